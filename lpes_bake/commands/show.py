"""`lpes-bake show`."""

from __future__ import annotations

import json
from pathlib import Path

import click

BAR_CELLS = 40


@click.command("show")
@click.argument("factors", metavar="FILE_OR_DIR", type=click.Path(path_type=Path))
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw the factors over the layers into this PNG.")
@click.option("--json", "as_json", is_flag=True, help="Print factors.json's content as JSON.")
def command(factors: Path, plot: Path | None, as_json: bool) -> None:
    """Show the factors in a file or directory: one row and one bar a layer.

    FILE_OR_DIR is factors.json, the directory of a search or of a baked checkpoint, or a bare list of
    numbers (JSON, or one a line).
    """
    from rich.console import Console
    from rich.table import Table

    from lpes_bake.card import leaves
    from lpes_bake.factors import load_factors

    found = load_factors(factors)
    if plot is not None:
        from lpes_bake.plots import curve_plot

        points = [(float(layer), float(factor)) for layer, factor in (found.curve or {}).get("points", [])]
        curve_plot(found.layer_rope_scaling, plot, control_points=points)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
        return
    console = Console(highlight=False)
    table = Table("layer", "factor", "", box=None)
    table.columns[0].justify = table.columns[1].justify = "right"
    highest = max(*found.layer_rope_scaling, 1.0)
    for layer, factor in enumerate(found.layer_rope_scaling):
        table.add_row(str(layer), f"{factor:.4g}", bar(factor / highest, 1 / highest))
    console.print(table)
    record = found.to_json()
    for name in ("base", "curve", "search", "scores"):
        for what, value in leaves(record.get(name) or {}, f"{name}:"):
            console.print(f"{what} {value}", markup=False)
    for name in ("tool_version", "date"):
        if name in record:
            console.print(f"{name.replace('_', ' ')}: {record[name]}", markup=False)
    if plot is not None:
        console.print(f"plot: {plot}", markup=False)


def bar(length: float, one: float) -> str:
    """A bar of `length` (0 … 1), and a mark where a factor of 1 ends."""
    cells = ["█"] * max(1, round(length * BAR_CELLS))
    cells += [" "] * (BAR_CELLS - len(cells))
    mark = round(one * BAR_CELLS) - 1
    if cells[mark] == " ":
        cells[mark] = "┊"
    return "".join(cells).rstrip()
