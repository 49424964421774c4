"""`lpes-bake eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lpes_bake.search.device import DTYPES
from lpes_bake.search.prompts import PROMPT_FORMATS
from lpes_bake.search.tasks import task_help

if TYPE_CHECKING:
    from rich.console import Console

    from lpes_bake.evaluate import Evaluation


@click.command("eval", epilog=f"\b\n{task_help()}")
@click.argument("models", metavar="MODEL_OR_DIR...", nargs=-1, required=True)
@click.option(
    "--factors",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Also score the first model with these factors, without baking. May be given more than once.",
)
@click.option(
    "--task",
    "specs",
    multiple=True,
    default=("kv",),
    show_default=True,
    metavar="SPEC",
    help="What is asked: NAME[:FILE][,key=value…], as for search. May be given more than once.",
)
@click.option(
    "--contexts",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Contexts of each task, each asked at every position. The standard error at accuracy 0.5 is 5 points with "
    "100, 2.2 with 500.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Seeds the drawing of questions. They are never those of a search, whatever its seed.",
)
@click.option(
    "--prompt-format",
    type=click.Choice(PROMPT_FORMATS),
    default="auto",
    show_default=True,
    help="How prompts are put to the models: auto uses the tokenizer's chat template when there is one.",
)
@click.option("--revision", help="Branch, tag or commit of models on the Hub.  [default: their main branch]")
@click.option("--device", help="cpu, cuda, cuda:1, mps.  [default: the best there is]")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Precision of the models.  [default: bfloat16 on a GPU that computes in it, else float32]",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    help="Contexts in a batch.  [default: what the device can take, less when memory is tight]",
)
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run Python code that a model brings for its tokenizer. Read it first.",
)
@click.option("--plot", metavar="PNG", type=click.Path(path_type=Path), help="Draw the scores by position.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="Also write the result as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    models: tuple[str, ...],
    factors: tuple[Path, ...],
    specs: tuple[str, ...],
    contexts: int,
    seed: int,
    prompt_format: str,
    revision: str | None,
    device: str | None,
    dtype: str | None,
    batch_size: int | None,
    trust_remote_code: bool,
    plot: Path | None,
    out: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Ask models the same questions and show how well each answers by the place of the evidence.

    MODEL_OR_DIR is a base model (local directory or name on the Hub) or a baked directory; all others
    are compared with the first.

    Accuracy is the share of answers that greedy decoding gets right; the log-probability is the mean over the
    answer's tokens, in nats. Intervals are 95 % bootstrap intervals over contexts, for differences over
    pairs of the same contexts.

    \b
    lpes-bake eval BASE BAKED --plot positions.png
    lpes-bake eval BASE --factors RUN/factors.json --task kv,pairs=75,key_width=uuid
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from lpes_bake.evaluate import evaluate
    from lpes_bake.search.errors import InputError
    from lpes_bake.search.tasks import parse_task

    for path in (plot, out):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InputError(f"{path} cannot be written: give a file name in a directory that exists")
    tasks = [parse_task(spec) for spec in specs]
    stderr = Console(stderr=True, quiet=quiet)
    bar = Progress(TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn(), console=stderr)
    rows: dict[str, int] = {}

    def on_progress(label: str, share: float) -> None:
        if label not in rows:
            rows[label] = int(bar.add_task(label, total=1.0))
        bar.update(rows[label], completed=share)  # type: ignore[arg-type]

    with bar:
        evaluation = evaluate(
            models,
            tasks,
            contexts=contexts,
            seed=seed,
            prompt_format=prompt_format,
            factors=factors,
            revision=revision,
            device=device,
            dtype=dtype,
            batch_size=batch_size,
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
    text = json.dumps(evaluation.to_json(), indent=2, ensure_ascii=False)
    if out is not None:
        partial = out.with_name(f".{out.name}.partial")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(out)
    if as_json:
        click.echo(text)
    else:
        show(evaluation, Console(highlight=False))
    # Last, as a picture that cannot be written must not cost the numbers.
    written = [*([] if out is None else [out]), *([] if plot is None else evaluation.plot(plot))]
    if not as_json:
        for path in written:
            click.echo(f"written: {path}")


def show(evaluation: Evaluation, console: Console) -> None:
    """For each task: scores by position for each model, then the differences from the first one."""
    from rich.table import Table
    from rich.text import Text

    first = evaluation.entries[0]
    names = {"accuracy": "accuracy", "logprob": "log-probability of the answer"}
    for i, task in enumerate(evaluation.tasks):
        unit = "%" if task.position_unit == "%" else ""
        places = [f"{position}{unit}" for position in task.positions]
        left_out = f"; {evaluation.too_long[i]} more are too long" if evaluation.too_long[i] else ""
        console.print(
            f"{task.title}: {evaluation.contexts} contexts, each asked at {len(places)} positions{left_out}\n",
            markup=False,
            soft_wrap=True,
        )
        for metric, name in names.items():
            table = Table("position", *places, "mean", "minimum", "spread", box=None, title_justify="left", title=name)
            # Names that differ at their end only (base, base-lpes) must not be cut there.
            table.columns[0].overflow = "fold"
            for column in table.columns[1:]:
                column.justify = "right"
            for entry in evaluation.entries:
                scores = entry.values(i, metric).mean(0)
                numbers = [*scores, scores.mean(), scores.min(), scores.max() - scores.min()]
                table.add_row(Text(entry.label), *(f"{number:.3f}" for number in numbers))
            console.print(table)
            console.print()
        for entry in evaluation.entries[1:]:
            table = Table("position", *names.values(), box=None, title_justify="left")
            table.title = Text(f"{entry.label} − {first.label}, with 95 % intervals")
            differences = [evaluation.difference(entry, i, metric) for metric in names]
            for row, place in enumerate(places):
                table.add_row(place, *(signed(one["by_position"][row]) for one in differences))
            table.add_row("mean", *(signed(one["mean"]) for one in differences))
            console.print(table)
            console.print()


def signed(interval: list[float | None]) -> str:
    """A difference with its interval."""
    return "{} ({} to {})".format(*("?" if number is None else f"{number:+.3f}" for number in interval))
