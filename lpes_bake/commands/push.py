"""`lpes-bake push`."""

from __future__ import annotations

import click


@click.command("push")
def command() -> None:
    """To be written."""
