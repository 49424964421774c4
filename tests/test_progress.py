"""What must hold for the progress of a search on stderr."""

from __future__ import annotations

import io

from rich.console import Console

from lpes_bake.commands.progress import Progress


def test_names_are_shown_as_they_are_on_a_terminal() -> None:
    # "[/old]" would close a tag that is not open, "[red]" would vanish.
    name = "models[/old] [red]"
    screen = io.StringIO()
    with Progress(Console(file=screen, force_terminal=True, width=200), 3) as progress:
        progress.status(f"loading {name}")
        progress.warning(f"{name} is slow")
    assert f"loading {name}" in screen.getvalue() and f"warning: {name} is slow" in screen.getvalue()
