"""`lpes-bake show`."""

from __future__ import annotations

import click


@click.command("show")
def command() -> None:
    """To be written."""
