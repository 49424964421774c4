"""`lpes-bake eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lpes_bake.commands.search import key_width_of, positions_of

if TYPE_CHECKING:
    from rich.console import Console

    from lpes_bake.evaluate import Evaluation

POSITIONS = 5


@click.command("eval")
@click.argument("models", metavar="MODEL_OR_DIR...", nargs=-1, required=True)
@click.option(
    "--factors",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Also score the first model with these factors, without baking. May be given more than once.",
)
@click.option("--pairs", type=int, default=16, show_default=True, help="Key-value pairs in a prompt.")
@click.option(
    "--key-width",
    metavar="N|uuid",
    default="8",
    show_default=True,
    callback=key_width_of,
    help="Hex digits of a key and of a value, or uuid for UUID4 as in the literature.",
)
@click.option(
    "--contexts",
    type=int,
    default=100,
    show_default=True,
    help="Contexts, each asked at every position. The standard error at accuracy 0.5 is 5 points with 100, "
    "2.2 with 500.",
)
@click.option(
    "--positions",
    metavar="P,P,…",
    callback=positions_of,
    help=f"Places of the pair asked for, from 0.  [default: {POSITIONS}, evenly spread]",
)
@click.option(
    "--seed",
    type=int,
    default=2_000_000,
    show_default=True,
    help="Seeds keys and values. The default is one that no search uses.",
)
@click.option(
    "--chat-template",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="Put prompts into the tokenizer's chat template; auto does when there is one.",
)
@click.option("--revision", help="Branch, tag or commit of models on the Hub.  [default: their main branch]")
@click.option("--device", help="cpu, cuda, cuda:1, mps.  [default: the best there is]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
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
    pairs: int,
    key_width: int | str,
    contexts: int,
    positions: tuple[int, ...] | None,
    seed: int,
    chat_template: str,
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

    The task is key-value retrieval. Accuracy is the share of answers that greedy decoding gets right;
    the log-probability is the mean over the answer's tokens, in nats. Intervals are 95 % bootstrap
    intervals over contexts, for differences over pairs of the same contexts.

    \b
    lpes-bake eval BASE BAKED --plot positions.png
    lpes-bake eval BASE --factors RUN/factors.json
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from lpes_bake.evaluate import evaluate
    from lpes_bake.search.errors import InputError
    from lpes_bake.search.tasks import KVRetrieval, even_positions

    for path in (plot, out):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InputError(f"{path} cannot be written: give a file name in a directory that exists")
    task = KVRetrieval(
        pairs=pairs,
        key_width=key_width,
        contexts=contexts,
        positions=positions if positions is not None else even_positions(pairs, POSITIONS),
        seed=seed,
        chat_template=chat_template,
    )
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
            task,
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
    if plot is not None:
        evaluation.plot(plot)
    if as_json:
        click.echo(text)
    else:
        show(evaluation, Console(highlight=False))
        for path in (plot, out):
            if path is not None:
                click.echo(f"written: {path}")


def show(evaluation: Evaluation, console: Console) -> None:
    """Scores by position for each model, then the differences from the first one."""
    from rich.table import Table
    from rich.text import Text

    task, first = evaluation.task, evaluation.entries[0]
    names = {"accuracy": "accuracy", "logprob": "log-probability of the answer"}
    places = [str(position) for position in task.gold_positions]
    for metric, name in names.items():
        table = Table("position", *places, "mean", "minimum", "spread", box=None, title_justify="left", title=name)
        # Names that differ at their end only (base, base-lpes) must not be cut there.
        table.columns[0].overflow = "fold"
        for column in table.columns[1:]:
            column.justify = "right"
        for entry in evaluation.entries:
            scores = entry.scores.values(metric).mean(0)
            numbers = [*scores, scores.mean(), scores.min(), scores.max() - scores.min()]
            table.add_row(Text(entry.label), *(f"{number:.3f}" for number in numbers))
        console.print(table)
        console.print()
    for entry in evaluation.entries[1:]:
        table = Table("position", *names.values(), box=None, title_justify="left")
        table.title = Text(f"{entry.label} − {first.label}, with 95 % intervals")
        differences = {metric: entry.difference(first, metric) for metric in names}
        for row, place in enumerate(places):
            table.add_row(place, *(signed(by_position[row]) for _, by_position in differences.values()))
        table.add_row("mean", *(signed(overall) for overall, _ in differences.values()))
        console.print(table)
        console.print()
    console.print(f"{task.contexts} contexts of {task.pairs} pairs, each asked at {len(places)} positions")


def signed(interval: tuple[float, float, float]) -> str:
    """A difference with its interval."""
    return "{:+.3f} ({:+.3f} to {:+.3f})".format(*interval)
