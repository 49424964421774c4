"""`lpes-bake show`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lpes_bake.pages import SCALES, difference

if TYPE_CHECKING:
    from lpes_bake.factors import Factors

# Layers in a row.
ROW = 8


@click.command("show", short_help="What factors are, where they come from, gain and cost.")
@click.argument("factors", metavar="FILE_OR_DIR", type=click.Path(path_type=Path))
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw the factors over the layers into this PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print all that factors.json holds, as JSON.")
def command(factors: Path, plot: Path | None, as_json: bool) -> None:
    """Show the factors in a file or directory: what they are, where they come from, what they gain and cost.

    FILE_OR_DIR is factors.json, the directory of a search or of a baked checkpoint, or a bare list of
    numbers (JSON, or one a line).
    """
    from rich.console import Console
    from rich.table import Table

    from lpes_bake.factors import load_factors

    found = load_factors(factors)
    if plot is not None:
        from lpes_bake.plots import curve_plot

        points = [(float(layer), float(factor)) for layer, factor in (found.curve or {}).get("points", [])]
        curve_plot(found.layer_rope_scaling, plot, control_points=points)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for heading, words in [*facts(found), *gains(found.scores or {}), ("plot", str(plot or ""))]:
        if words:
            table.add_row(heading, words)
    Console(highlight=False, markup=False).print(table)


def facts(found: Factors) -> Iterator[tuple[str, str]]:
    """What is known of the factors but for their scores, as rows: a heading, and words, if there are any."""
    from lpes_bake.card import sparkline

    factors, base, search = found.layer_rope_scaling, found.base or {}, found.search or {}
    yield "base model", ", ".join(str(base[name]) for name in ("name", "revision", "architecture") if base.get(name))
    yield "factors", f"{sparkline(factors)}  {min(factors):.4g} … {max(factors):.4g}"
    for start in range(0, len(factors), ROW):
        row = factors[start : start + ROW]
        yield f"layers {start}–{start + len(row) - 1}", " ".join(f"{factor:<7.4g}" for factor in row)
    known = ("optimizer", "prompt_format", "seed", "evaluations")
    yield "search", ", ".join(f"{name.replace('_', ' ')} {search[name]}" for name in known if name in search)
    yield "written", ", ".join(filter(None, [found.date, found.tool_version and f"lpes-bake {found.tool_version}"]))
    yield "verdict", str(search.get("verdict", ""))


def gains(scores: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a search measured on unseen questions and on short text, as such rows: the mean differences from the base
    model with their intervals. None for factors of 1, and for scores of any other shape."""
    try:
        rows = []
        for task in scores["tasks"]:
            accuracy, logprob = (
                difference(task["difference"][metric]["mean"], digits, factor)
                for metric, (_, factor, digits) in SCALES.items()
            )
            asked = f"{task['title']}, {task['contexts']['report']} unseen contexts"
            rows.append(("gain", f"{asked}: accuracy {accuracy} points, log-probability {logprob}"))
        text = scores["text"]
        loss = f"log-probability a token {difference(text['difference'], 3)}, {text['paragraphs']} paragraphs"
        return [*rows, ("short text", loss)]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
