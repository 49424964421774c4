"""`lpes-bake search`."""

from __future__ import annotations

import click


@click.command("search")
def command() -> None:
    """To be written."""
