"""`lpes-bake report`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("report", short_help="An HTML page of a search, and its figures.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Where to write it.  [default: RUN/report]")
@click.option("--json", "as_json", is_flag=True, help="Print the paths as JSON.")
def command(run: Path, out: Path | None, as_json: bool) -> None:
    """Write the report of a search that has ended: one HTML page that stands alone, and its figures as PNGs.

    It shows the factors by layer, scores by gold position before and after, gain against damage,
    convergence, how the winner was chosen, what it all cost, and how to reproduce it.
    """
    from lpes_bake.report import write_report

    written = write_report(run, out)
    if as_json:
        click.echo(
            json.dumps({"report": str(written.page), "figures": [str(path) for path in written.figures]}, indent=2)
        )
        return
    for path in (written.page, *written.figures):
        click.echo(str(path))
