"""`lpes-bake eval`."""

from __future__ import annotations

import click


@click.command("eval")
def command() -> None:
    """To be written."""
