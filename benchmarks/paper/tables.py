"""From the JSON of a recipe's commands to its tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS = {"accuracy": "accuracy", "logprob": "log-probability of the answer"}


@dataclass(frozen=True)
class Table:
    """Rows of JSON values. A list of three is a mean with its 95 % interval."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


def markdown(title: str, tables: Sequence[Table]) -> str:
    """Tables as Markdown."""
    blocks = [f"# {title}"]
    for table in tables:
        rows = [table.columns, ["---", *["--:"] * (len(table.columns) - 1)], *table.rows]
        lines = "\n".join("| " + " | ".join(map(shown, row)) + " |" for row in rows)
        blocks.append(f"## {table.title}\n\n{lines}")
    return "\n\n".join(blocks) + "\n"


def shown(value: Any) -> str:
    """A cell."""
    if value is None:
        return "—"
    if isinstance(value, list):
        mean, low, high = ("?" if one is None else f"{one:+.4f}" for one in value)
        return f"{mean} [{low}, {high}]"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def places(task: Mapping[str, Any], title: str, rows: Sequence[tuple[str, Mapping[str, Any], Any]]) -> Table:
    """One metric by gold position. rows: label, what `comparison.measured` gives, difference from the base."""
    columns = ["", *map(str, task["positions"]), "mean", "worst", "spread", "− base"]
    cells = [
        [label, *(one[0] for one in score["by_position"]), score["mean"][0], score["minimum"], score["spread"], change]
        for label, score, change in rows
    ]
    return Table(title, columns, cells)


def compared(path: Path) -> list[Table]:
    """A table a metric from comparison.json."""
    made = []
    for task in read(path)["tasks"]:
        for metric, name in METRICS.items():
            rows = [
                (row["label"], row[metric], (row[metric]["against_base"] or {}).get("mean")) for row in task["methods"]
            ]
            made.append(places(task, f"{task['title']}, {task['contexts']} contexts: {name}", rows))
    return made


def evaluated(path: Path, labels: Sequence[str]) -> list[Table]:
    """A table a metric from what `eval` wrote. labels: of its models, in their order."""
    made = []
    for task in read(path)["tasks"]:
        settings = ", ".join(f"{name} {value}" for name, value in task["settings"].items() if name in SIZES)
        for metric, name in METRICS.items():
            rows = [
                (label, row[metric], row["difference"][metric]["mean"] if "difference" in row else None)
                for label, row in zip(labels, task["models"], strict=True)
            ]
            made.append(places(task, f"{task['name']}, {settings}, {task['contexts']} contexts: {name}", rows))
    return made


SIZES = ("pairs", "documents")


def drawn(path: Path, draws: int) -> Table:
    """The base model, the found factors, and the mean and standard deviation over their shuffled and noisy copies."""
    (task,) = read(path)["tasks"]
    rows = []
    for label, models in kinds(["base", "found"], draws, task["models"]):
        means = [[model[metric]["mean"][0] for model in models] for metric in METRICS]
        rows.append([label, len(models), *(one for values in means for one in mean_and_sd(values))])
    columns = ["factors", "draws", *(f"{name}{part}" for name in METRICS.values() for part in ("", ", sd"))]
    return Table(f"{task['name']}, {task['contexts']} contexts, all positions", columns, rows)


def kinds(first: Sequence[str], draws: int, rows: Sequence[Any]) -> list[tuple[str, Sequence[Any]]]:
    """Rows by what they are of: one each for `first`, then so many shuffled and so many noisy ones."""
    n = len(first)
    single = [(label, rows[i : i + 1]) for i, label in enumerate(first)]
    return [*single, ("shuffled", rows[n : n + draws]), ("noisy", rows[n + draws :])]


def mean_and_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Over draws; of a single value there is no standard deviation."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def searches(results: Mapping[str, Path]) -> Table:
    """What each search found, on questions that nothing was chosen by; of several tasks, the first."""
    rows = []
    for label, path in results.items():
        result = read(path)
        gains = result["report"]["tasks"][0]["difference"]
        cost, text = result["cost"], result["report"]["text"]
        spent = cost["evaluations"], sum(cost["tokens"].values())
        factors = result["layer_rope_scaling"]
        changes = *(gains[one]["mean"] for one in METRICS), text["difference"]
        rows.append([label, *spent, *changes, min(factors), max(factors)])
    columns = ["search", "evaluations", "tokens", *(f"{name} − base" for name in METRICS.values())]
    columns += ["short text − base, nats a token", "least factor", "largest"]
    return Table("What searches find, on unseen questions", columns, rows)


def deviations(path: Path, draws: int) -> list[Table]:
    """A table a measure: a row a layer, a column for the found factors and the means over shuffled and noisy ones."""
    content = read(path)
    made = []
    names = {"relative_l2": "relative L2", "one_minus_cosine": "1 − cosine", "step": "change of the layer's step"}
    for measure, name in names.items():
        groups = kinds(["found"], draws, [one[measure] for one in content["candidates"]])
        means = [[statistics.fmean(layer) for layer in zip(*ones, strict=True)] for _, ones in groups]
        rows = [[layer, *values] for layer, values in enumerate(zip(*means, strict=True))]
        rows.append(["mean", *map(statistics.fmean, means)])
        columns = ["layer", *(label for label, _ in groups)]
        made.append(Table(f"Deviation from the base model, {content['prompts']} prompts: {name}", columns, rows))
    return made


def attention(path: Path) -> list[Table]:
    """The mass by gold position, then by layer as the mean over positions."""
    content = read(path)
    base, scaled = content["candidates"]
    positions = [["evidence's share of the tokens", *content["share_of_tokens"]]]
    positions += [[label, *one["by_position"]] for label, one in (("base", base), ("scaled", scaled))]
    layers = [[statistics.fmean(layer) for layer in zip(*one["by_layer"], strict=True)] for one in (base, scaled)]
    title = f"Attention on the evidence, {content['contexts']} contexts"
    return [
        Table(f"{title}: mean over heads and layers", ["gold position", *map(str, content["positions"])], positions),
        Table(
            f"{title}: by layer, mean over heads and gold positions",
            ["layer", "base", "scaled"],
            [[layer, *values] for layer, values in enumerate(zip(*layers, strict=True))],
        ),
    ]


def short_text(path: Path) -> Table:
    """Log-probability and KL of short plain text."""
    content = read(path)
    rows = [
        [label, one["logprob"], one["difference"], one["kl"]]
        for label, one in zip(("base", "scaled"), content["candidates"], strict=True)
    ]
    columns = ["", "log-probability a token", "− base", "KL from base"]
    return Table(f"Short plain text, {content['paragraphs']} paragraphs", columns, rows)


def harness(content: Mapping[str, Any]) -> list[Table]:
    """What lm-evaluation-harness gave for the base model and the baked one."""
    rows = []
    for row in content["rows"]:
        base, baked = (one["value"] for one in row["values"])
        (difference,) = row["differences"]
        rows.append(
            [row["task"], row["metric"], row["documents"], base, baked, difference["value"], difference["stderr"]]
        )
    columns = ["task", "metric", "documents", "base", "baked", "difference", "its standard error"]
    return [Table("lm-evaluation-harness", columns, rows)]
