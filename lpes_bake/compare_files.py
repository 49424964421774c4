"""What a comparison writes: tables for the terminal, Markdown, LaTeX and CSV, figures, and a page. Imports no torch.

All of it is made from the content of comparison.json; the tables are made once, and each format prints them its way.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_bake.factors import save_text
from lpes_bake.pages import SCALES, count, difference, fixed, render_page

if TYPE_CHECKING:
    from rich.console import Console

NAME = "comparison"
JSON_FILE = f"{NAME}.json"

LATEX = {
    **{one: f"\\{one}" for one in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "×": r"$\times$",
    "–": "--",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    # A bracket behind a row's end would be an argument.
    "[": "{[}",
    "]": "{]}",
}


@dataclass(frozen=True)
class Table:
    """One table as text. The first column is the method's name."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def tables_of(content: Mapping[str, Any]) -> list[Table]:
    """For each task: both metrics by gold position, and the differences; then the costs."""
    tables = []
    for task in content["tasks"]:
        tables += [score_table(task, metric) for metric in SCALES]
        tables.append(difference_table(task))
    return [*tables, cost_table(content["costs"])] if content["costs"] is not None else tables


def score_table(task: Mapping[str, Any], metric: str) -> Table:
    """One metric by gold position, its mean, its worst, and best less worst."""
    name, factor, digits = SCALES[metric]
    unit = " %" if task["position_unit"] == "%" else ""
    columns = ["method", *(f"{position}{unit}" for position in task["positions"]), "mean", "worst", "spread"]
    rows = []
    for one in task["methods"]:
        found = one[metric]
        numbers = [*(mean for mean, _, _ in found["by_position"]), found["mean"][0], found["minimum"], found["spread"]]
        rows.append([one["label"], *(fixed(number, digits, factor) for number in numbers)])
    return Table(f"{task['title']}, {task['contexts']} contexts. {name}, by gold position", columns, rows)


def difference_table(task: Mapping[str, Any]) -> Table:
    """The paired difference of each method's mean from the base's and from its best rival's, by metric."""
    columns = ["method"]
    for metric in SCALES:
        columns += [f"{metric} − base", f"{metric} − best rival"]
    rows = []
    for one in task["methods"]:
        if all(one[metric]["against_base"] is None for metric in SCALES):
            continue
        row = [one["label"]]
        for metric in SCALES:
            rival = one[metric]["against_rival"]
            row += [
                interval(one[metric]["against_base"], metric),
                "–" if rival is None else f"{interval(rival, metric)} {rival['rival']}",
            ]
        rows.append(row)
    title = f"{task['title']}. Differences of means, in points and in nats a token, with paired 95 % intervals"
    return Table(title, columns, rows)


def interval(found: Mapping[str, Any], metric: str) -> str:
    """A difference of means and the ends of its interval."""
    _, factor, digits = SCALES[metric]
    return difference(found["mean"], digits, factor)


def cost_table(costs: Mapping[str, Any]) -> Table:
    """Time and memory: the base model's own, and the others as multiples of it."""
    base = costs["base"]
    rows = [["base", milliseconds(base["prefill"]), milliseconds(base["decode"]), megabytes(base["memory"])]]
    for name, one in costs["methods"].items():
        mark = "" if one["in_turn"] else " (not in turn)"
        rows.append([f"{name}{mark}", *(multiple(one["ratio"][key]) for key in ("prefill", "decode", "memory"))])
    title = (
        f"Cost beside the base model: a prompt of {count(costs['tokens'])} tokens, then {costs['decoded']} one by one; "
        f"medians of {costs['rounds']} rounds, in brackets the lowest and the highest"
    )
    return Table(title, ["method", "prefill", "decode, a token", "peak memory"], rows)


def multiple(ratio: Sequence[float | None]) -> str:
    """A ratio to the base model, and its range where it is known."""
    middle, low, high = ratio
    if middle is None:
        return "–"
    return f"{middle:.2f}×" if low is None else f"{middle:.2f}× [{fixed(low, 2)} to {fixed(high, 2)}]"


def milliseconds(seconds: float) -> str:
    """A short time."""
    return f"{1e3 * seconds:,.1f} ms"


def megabytes(number: float | None) -> str:
    """Memory."""
    return "–" if number is None else f"{number / 1e6:,.0f} MB"


def write_files(content: Mapping[str, Any], out: Path, *, page: bool) -> list[Path]:
    """comparison.json, .md, .tex, .csv, a figure a task and, where it is wished, a page; their paths."""
    tables = tables_of(content)
    texts = {
        JSON_FILE: json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        f"{NAME}.md": markdown(tables),
        f"{NAME}.tex": latex(tables),
        f"{NAME}.csv": comma_separated(content),
    }
    for name, text in texts.items():
        save_text(out / name, text)
    figures = draw(content, out)
    written = [*(out / name for name in texts), *figures.values()]
    if page:
        save_text(out / f"{NAME}.html", render_page("comparison.html.jinja", figures, content=content, tables=tables))
        written.append(out / f"{NAME}.html")
    return written


def show_tables(content: Mapping[str, Any], console: Console) -> None:
    """The tables in the terminal."""
    from rich.table import Table as RichTable
    from rich.text import Text

    for table in tables_of(content):
        # Names of methods and tasks are data: no markup.
        shown = RichTable(box=None, title=Text(table.title), title_justify="left")
        for i, column in enumerate(table.columns):
            shown.add_column(Text(column), justify="right" if i else "left", overflow="fold")
        for row in table.rows:
            shown.add_row(*map(Text, row))
        console.print(shown)
        console.print()


def markdown(tables: Sequence[Table]) -> str:
    """GitHub's Markdown."""
    parts = []
    for table in tables:
        heading, *rows = [" | ".join(map(markdown_text, line)) for line in (table.columns, *table.rows)]
        rule = " | ".join(["---", *["---:"] * (len(table.columns) - 1)])
        lines = "".join(f"| {line} |\n" for line in (heading, rule, *rows))
        parts.append(f"**{markdown_text(table.title)}**\n\n{lines}")
    return "\n".join(parts)


def markdown_text(text: str) -> str:
    """Plain text for Markdown."""
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", text)


def latex(tables: Sequence[Table]) -> str:
    """A table environment for each, with booktabs' rules."""
    parts = ["% \\usepackage{booktabs}\n"]
    for table in tables:
        lines = [" & ".join(map(latex_text, line)) + r" \\" for line in (table.columns, *table.rows)]
        parts.append(
            "\\begin{table}\n\\centering\n"
            f"\\caption{{{latex_text(table.title)}}}\n"
            f"\\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}\n\\toprule\n{lines[0]}\n\\midrule\n"
            + "".join(f"{line}\n" for line in lines[1:])
            + "\\bottomrule\n\\end{tabular}\n\\end{table}\n"
        )
    return "\n".join(parts)


def latex_text(text: str) -> str:
    """Plain text for LaTeX."""
    return "".join(LATEX.get(one, one) for one in text)


CSV_COLUMNS = (
    "task", "metric", "method", "position", "value", "low", "high",
    "against_base", "against_base_low", "against_base_high",
    "rival", "against_rival", "against_rival_low", "against_rival_high",
)  # fmt: skip


def comma_separated(content: Mapping[str, Any]) -> str:
    """A line for each number, in full precision; what is not known is empty. Costs are ratios to the base model."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    writer.writerows(csv_rows(content))
    return file.getvalue()


def csv_rows(content: Mapping[str, Any]) -> Iterator[list[Any]]:
    """The lines behind the heading."""
    nothing = [None] * 3
    for task in content["tasks"]:
        for metric in SCALES:
            for one in task["methods"]:
                found = one[metric]
                base, rival = found["against_base"], found["against_rival"]
                start = [task["spec"], metric, one["label"]]
                for place, position in enumerate((*task["positions"], "mean")):
                    value, gain, lead = (
                        nothing if part is None else part["mean"] if position == "mean" else part["by_position"][place]
                        for part in (found, base, rival)
                    )
                    yield [*start, position, *value, *gain, None if rival is None else rival["rival"], *lead]
                yield [*start, "worst", found["minimum"], *[None] * 9]
                yield [*start, "spread", found["spread"], *[None] * 9]
    for name, one in (content["costs"] or {"methods": {}})["methods"].items():
        for key, ratio in one["ratio"].items():
            yield [None, f"{key} ratio", name, None, *ratio, *[None] * 7]


def draw(content: Mapping[str, Any], out: Path) -> dict[str, Path]:
    """Both metrics by gold position, a PNG for each task: its name in the page → its path."""
    from lpes_bake.plots import position_plot

    paths = {}
    for number, task in enumerate(content["tasks"], 1):
        path = out / f"{NAME}-{number}-{task['name']}.png"
        accuracy, logprob = ({one["label"]: one[metric]["by_position"] for one in task["methods"]} for metric in SCALES)
        title = f"{task['title']}, {task['contexts']} contexts, 95 % intervals"
        position_plot(accuracy, logprob, task["positions"], path, unit=task["position_unit"], title=title)
        paths[f"positions-{number}"] = path
    return paths
