"""`lpes-bake verify`."""

from __future__ import annotations

import click


@click.command("verify")
def command() -> None:
    """To be written."""
