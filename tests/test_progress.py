"""What must hold for the progress of a search on stderr."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lpes_bake.commands.progress import Counted, Progress


def test_names_are_shown_as_they_are_on_a_terminal() -> None:
    # "[/old]" would close a tag that is not open, "[red]" would vanish.
    name = "models[/old] [red]"
    screen = io.StringIO()
    with Progress(Console(file=screen, force_terminal=True, width=200), 3) as progress:
        progress.status(f"loading {name}")
        progress.warning(f"{name} is slow")
    assert f"loading {name}" in screen.getvalue() and f"warning: {name} is slow" in screen.getvalue()


def test_work_is_counted_in_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    lines = io.StringIO()
    with Counted(Console(file=lines, width=200)) as progress:
        progress.progress(4, 10)  # by an earlier run
        for done, now in ((5, 107.0), (6, 110.0), (7, 121.0), (10, 125.0)):  # noqa: B007
            progress.progress(done, 10)
    # 7 seconds a piece at first; then 3 pieces in 21 seconds; the second line would come too early.
    assert lines.getvalue().splitlines() == ["5 of 10, 0:00:35 left", "7 of 10, 0:00:21 left", "10 of 10, 0:00:00 left"]
