"""The command line: the group, its lazily loaded commands, and how errors reach the user."""

from __future__ import annotations

import errno
import importlib
import io
import signal
import sys
from typing import Any

import click

from lpes_bake import __version__
from lpes_bake.search.errors import InputError

# Command name → module below lpes_bake.commands; listed in the order of the work.
COMMANDS = {
    "search": "search",
    "show": "show",
    "report": "report",
    "export": "export",
    "bake": "export",
    "verify": "verify",
    "eval": "eval",
    "compare": "compare",
    "push": "push",
    "tasks-dir": "tasks_dir",
    "train-moice": "train_moice",
}


class BadInput(click.ClickException):
    """An InputError on its way out: one line on stderr, exit code 2."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class Commands(click.Group):
    """A group that imports a command's module when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands in the order of the work, aliases left out."""
        return [name for name in COMMANDS if name != "bake"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"lpes_bake.commands.{COMMANDS[cmd_name]}")
        command: click.Command = module.command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run; turn bad input into one line."""
        # A polite kill cleans up as Ctrl-C does: nothing half-written stays.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        # Bars and check marks become question marks where the terminal or the pipe is not UTF-8.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        try:
            return super().invoke(ctx)
        except InputError as error:
            raise BadInput(str(error)) from error
        except OSError as error:
            # A file that cannot be read or written, a full disk. click deals with a reader that went away.
            if error.errno in (None, errno.EPIPE):
                raise
            raise BadInput(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lpes-bake")
def main() -> None:
    """Give a RoPE model one scaling factor a layer, so that it stops losing the middle of its prompt.

    \b
    lpes-bake search MODEL --out RUN   find the factors
    lpes-bake show RUN                 see what they are, what they gain and cost
    lpes-bake export MODEL RUN OUT     write a checkpoint that anyone can load
    lpes-bake verify OUT --base MODEL  prove that it is right
    lpes-bake eval MODEL OUT           prove that it helps
    lpes-bake push OUT user/name       put it on the Hub

    `bake` is another name for `export`.
    """
