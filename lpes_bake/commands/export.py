"""`lpes-bake export`."""

from __future__ import annotations

import click


@click.command("export")
def command() -> None:
    """To be written."""
