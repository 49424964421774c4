"""How `lpes-bake eval` shows what it measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpes_bake.comparison import numbers
from lpes_bake.evaluate import Evaluation
from lpes_bake.long_text.evaluation import LongEvaluation
from lpes_bake.pages import SCALES, difference, estimate, fixed

if TYPE_CHECKING:
    from rich.console import Console

    from lpes_bake.harness import HarnessEvaluation


def show(result: Evaluation | LongEvaluation | HarnessEvaluation, console: Console) -> None:
    """The tables of an evaluation, whichever it is."""
    if isinstance(result, Evaluation):
        _show_places(result, console)
    elif isinstance(result, LongEvaluation):
        _show_benchmarks(result, console)
    else:
        _show_harness(result, console)


def _show_places(evaluation: Evaluation, console: Console) -> None:
    """For each task: scores by position for each model, then the differences from the first one."""
    from rich.table import Table
    from rich.text import Text

    first = evaluation.entries[0]
    for i, task in enumerate(evaluation.tasks):
        unit = "%" if task.position_unit == "%" else ""
        places = [f"{position}{unit}" for position in task.positions]
        left_out = f"; {evaluation.too_long[i]} more are too long" if evaluation.too_long[i] else ""
        console.print(
            f"{task.title}: {evaluation.contexts} contexts, each asked at {len(places)} positions{left_out}\n",
            markup=False,
            soft_wrap=True,
        )
        for metric, (name, factor, digits) in SCALES.items():
            table = Table("position", *places, "mean", "minimum", "spread", box=None, title_justify="left", title=name)
            # Names that differ at their end only (base, base-lpes) must not be cut there.
            table.columns[0].overflow = "fold"
            for column in table.columns[1:]:
                column.justify = "right"
            for entry in evaluation.entries:
                scores = entry.values(i, metric).mean(0)
                numbers = [*scores, scores.mean(), scores.min(), scores.max() - scores.min()]
                table.add_row(Text(entry.label), *(fixed(number, digits, factor) for number in numbers))
            console.print(table)
            console.print()
        for entry in evaluation.entries[1:]:
            table = Table("position", *(scale.name for scale in SCALES.values()), box=None, title_justify="left")
            table.title = Text(f"{entry.label} − {first.label}, with 95 % intervals")
            columns = []
            for metric, (_, factor, digits) in SCALES.items():
                found = evaluation.difference(entry, i, metric)
                columns.append([difference(one, digits, factor) for one in (*found["by_position"], found["mean"])])
            for row in zip((*places, "mean"), *columns, strict=True):
                table.add_row(*row)
            console.print(table)
            console.print()


def _show_benchmarks(result: LongEvaluation, console: Console) -> None:
    """For each benchmark: the score of each model and the difference from the first one's."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    first = result.entries[0]
    for i, one in enumerate(result.benchmarks):
        left_out = f"; {one.left_out} more that only people or other models can judge" if one.left_out else ""
        cut = f"; {result.cut[i]} of the prompts cut to fit into {result.limit} tokens" if result.cut[i] else ""
        console.print(f"{one.name}: {len(one.questions)} questions{left_out}{cut}\n", markup=False, soft_wrap=True)
        table = Table("model", one.metric_name, escape(f"− {first.label}"), box=None)
        table.columns[0].overflow = "fold"
        for entry in result.entries:
            score = estimate(numbers(result.score(entry, i)), 2)
            gain = "" if entry is first else difference(numbers(result.difference(entry, i)), 2)
            table.add_row(Text(entry.label), score, gain)
        console.print(table)
        console.print()


def _show_harness(result: HarnessEvaluation, console: Console) -> None:
    """A row a task and metric: each model's value, and the differences from the first one's."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    first, *others = result.labels
    headings = map(escape, (*result.labels, *(f"{label} − {first}" for label in others)))
    table = Table("task", "metric", *headings, box=None)
    for row in result.rows:
        values = [f"{one.value:.4f}{_error(one.stderr)}" for one in row.values]
        differences = [
            f"{one.value:+.4f}{_error(one.stderr)}{'' if one.paired else ' (not paired)'}" for one in row.differences
        ]
        table.add_row(row.task, row.metric, *map(Text, (*values, *differences)))
    console.print(table)
    console.print("\n± standard error; of differences, over pairs of the same documents")


def _error(stderr: float | None) -> str:
    return "" if stderr is None else f" ± {stderr:.4f}"
