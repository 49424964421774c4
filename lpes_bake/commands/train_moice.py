"""`lpes-bake train-moice`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from lpes_bake.baselines.moice_settings import MoICESettings
from lpes_bake.commands.options import GroupedCommand, quiet, revision, settings_options, trust_remote_code
from lpes_bake.settings import SearchSettings


@click.command("train-moice", cls=GroupedCommand, short_help="Train the routers of MoICE, a rival for compare.")
@click.argument("model", metavar="MODEL")
@click.argument("data", metavar="DATA.jsonl", type=click.Path(path_type=Path))
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), required=True, help="Where the routers go.")
@click.option("--resume", is_flag=True, help="Go on with the training that DIR holds, with the same options.")
@settings_options(MoICESettings, group="Training")
@settings_options(SearchSettings, "device", "dtype")
@revision
@trust_remote_code
@quiet
@click.option("--json", "as_json", is_flag=True, help="Print the record of the training as JSON.")
@click.pass_context
def command(
    context: click.Context,
    /,
    model: str,
    data: Path,
    out: Path,
    resume: bool,
    revision: str | None,
    device: str | None,
    dtype: str | None,
    trust_remote_code: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train the routers of MoICE, a method that LPES is compared with, for MODEL.

    DATA.jsonl has one sequence a line: {"text": …}, or a chat as {"messages": [{"role": …, "content": …}]} or
    {"conversations": [{"from": …, "value": …}]}. The first rows are used; all of the model but the routers is frozen.

    A training that was stopped (Ctrl-C) goes on with --resume. Compare the result by the method moice=DIR.

    \b
    lpes-bake train-moice BASE openhermes.jsonl --out moice
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from lpes_bake.baselines.moice_training import STATE_FILE, train_moice

    settings = MoICESettings(**options)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True, quiet=quiet),
    )
    task = bar.add_task("sequences", total=settings.steps * settings.sequences)
    try:
        with bar:
            record = train_moice(
                model,
                data,
                out,
                settings,
                resume=resume,
                revision=revision,
                device=device,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                on_progress=lambda done, loss: bar.update(
                    task, completed=done, description=f"sequences, loss {loss:.3f}"
                ),
            )
    except KeyboardInterrupt:
        again = " Go on with the same command and --resume." if (out / STATE_FILE).is_file() else ""
        click.echo(f"\nInterrupted.{again}", err=True)
        context.exit(130)
    if as_json:
        click.echo(json.dumps(record, indent=2))
        return
    for number, step in enumerate(record["loss_by_step"], 1):
        click.echo(f"step {number}: language-model loss {step['language']:.4f}, balancing loss {step['balance']:.4f}")
    click.echo(f"written: {out}")
