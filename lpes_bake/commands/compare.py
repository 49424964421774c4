"""`lpes-bake compare`."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from lpes_bake.baselines.methods import METHODS
from lpes_bake.commands.options import GroupedCommand, quiet, revision, settings_options, trust_remote_code
from lpes_bake.commands.search import is_first, option_words
from lpes_bake.compare import CompareSettings
from lpes_bake.search.tasks import task_help

EPILOG = f"\b\nMethods: {', '.join(example for _, example in METHODS.values())}\n\n\b\n{task_help()}"


@click.command(
    "compare",
    cls=GroupedCommand,
    epilog=EPILOG,
    short_help="LPES, the base and rivals on the same questions, and costs.",
)
@click.argument("model")
@click.option("--out", required=True, metavar="DIR", type=click.Path(path_type=Path), help="New directory for it all.")
@click.option(
    "--resume",
    is_flag=True,
    help="Go on with the comparison in DIR. Other options must be the same, but for --methods: none that has answered "
    "is asked again.",
)
@settings_options(CompareSettings)
@revision
@trust_remote_code
@click.option("--html", is_flag=True, help="Also write a page that stands alone.")
@quiet
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(
    context: click.Context,
    /,
    model: str,
    out: Path,
    resume: bool,
    revision: str | None,
    trust_remote_code: bool,
    html: bool,
    quiet: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Ask MODEL the same questions under several methods, and show what each gains and what it costs.

    MODEL is a local directory or a name on the Hub. Each method is scored by the place of the evidence; its mean
    is compared with the base's and with the best rival's, with paired 95 % bootstrap intervals over contexts;
    and its time and memory are measured in turn with the base model's. Questions are those that no search
    sees: factors that were searched on one of them are refused.

    DIR gets comparison.json, .md, .tex (booktabs), .csv, a PNG a task, and journal.jsonl. A comparison may be
    stopped at any moment (Ctrl-C): the same command with --resume goes on. Several processes: accelerate
    launch --multi_gpu --num_processes N -m lpes_bake compare …

    \b
    lpes-bake compare MODEL --out DIR --methods pi=1.5,lpes=RUN/factors.json
    lpes-bake compare MODEL --out DIR --methods lpes=RUN --task kv,pairs=75,key_width=uuid --contexts 500 --html
    """
    from rich.console import Console

    from lpes_bake.commands.progress import Counted
    from lpes_bake.compare import Events, compare
    from lpes_bake.compare_files import show_tables, write_files
    from lpes_bake.search.processes import PeerLost

    settings = CompareSettings(**values)
    first = is_first()
    words = ["lpes-bake", "compare", model, "--out", str(out), *(["--revision", revision] if revision else [])]
    words += option_words(listed(settings), listed(CompareSettings()))
    words += [*(["--trust-remote-code"] if trust_remote_code else []), *(["--html"] if html else [])]
    progress = Counted(Console(stderr=True, quiet=quiet or not first))
    try:
        with progress:
            content = compare(
                model,
                out,
                settings,
                revision=revision,
                resume=resume,
                trust_remote_code=trust_remote_code,
                command=shlex.join(words),
                events=Events(progress.status, progress.progress, progress.warning),
            )
    except (KeyboardInterrupt, SystemExit) as stop:
        if first:
            again = f" Go on with:\n{shlex.join([*words, '--resume'])}" if (out / "journal.jsonl").exists() else ""
            click.echo(f"\nInterrupted.{again}", err=True)
        if isinstance(stop, SystemExit):
            raise
        context.exit(130)
    except PeerLost as error:
        raise click.ClickException(str(error)) from error
    if content is None:
        return
    if as_json:
        click.echo(json.dumps(content, indent=2, ensure_ascii=False))
    else:
        show_tables(content, Console(highlight=False))
    # Last, as a file that cannot be written must not cost the numbers.
    written = write_files(content, out, page=html)
    if not as_json:
        for path in written:
            click.echo(f"written: {path}")


def listed(settings: CompareSettings) -> dict[str, Any]:
    """The settings by the names of their options, tuples as lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
