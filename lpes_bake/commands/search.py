"""`lpes-bake search`."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lpes_bake.search.curve import CurveSettings
from lpes_bake.search.genetic import GeneticSettings

if TYPE_CHECKING:
    from rich.console import Console

    from lpes_bake.run import SearchResult
    from lpes_bake.search.study import Trial

# Where stderr is not a terminal, a line at most so often, in seconds.
LINE_EVERY = 10.0


def settings_options(settings: type) -> Callable[[Any], Any]:
    """One option for each field of a settings dataclass, with its default and its help."""

    def decorate(function: Any) -> Any:
        for one in reversed(fields(settings)):
            option = click.option(
                f"--{one.name.replace('_', '-')}",
                type=type(one.default),
                default=one.default,
                show_default=True,
                help=one.metadata["help"],
            )
            function = option(function)
        return function

    return decorate


def positions_of(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Gold positions given as 0,8,15."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 0,8,15") from None


def key_width_of(context: click.Context, parameter: click.Parameter, value: str) -> int | str:
    """A number of hex digits, or uuid."""
    if value == "uuid":
        return value
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number of hex digits nor uuid") from None


@click.command("search")
@click.argument("model")
@click.option("--out", required=True, metavar="RUN", type=click.Path(path_type=Path), help="New directory for the run.")
@click.option("--resume", is_flag=True, help="Go on with the run in RUN. Options not given are taken from it.")
@click.option("--revision", help="Branch, tag or commit of MODEL on the Hub.  [default: its main branch]")
@click.option("--pairs", type=int, default=16, show_default=True, help="Task: key-value pairs in a prompt.")
@click.option(
    "--key-width",
    metavar="N|uuid",
    default="8",
    show_default=True,
    callback=key_width_of,
    help="Task: hex digits of a key and of a value, or uuid for UUID4 as in the paper.",
)
@click.option(
    "--contexts",
    type=int,
    default=67,
    show_default=True,
    help="Task: contexts, each asked at every position; at 3 positions 67 make the paper's 200 instances.",
)
@click.option(
    "--positions",
    metavar="P,P,…",
    callback=positions_of,
    help="Task: places of the pair asked for, from 0.  [default: the first, the middle and the last pair]",
)
@click.option(
    "--chat-template",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="Task: put prompts into the tokenizer's chat template; auto does when there is one.",
)
@click.option(
    "--heldout-contexts",
    type=int,
    default=100,
    show_default=True,
    help="Unseen contexts for the final comparison with the base model, asked at 5 places at least.",
)
@click.option(
    "--fitness",
    type=click.Choice(["logprob", "accuracy"]),
    default="logprob",
    show_default=True,
    help="What is maximised: the mean log-probability of the answer's tokens, which tells small steps apart, "
    "or the share of answers that greedy decoding gets right.",
)
@settings_options(GeneticSettings)
@settings_options(CurveSettings)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Seeds the search and its task; the final comparison has another.",
)
@click.option("--device", help="cpu, cuda, cuda:1, mps.  [default: the best there is]")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Precision of the model.  [default: bfloat16 on a GPU that computes in it, else float32]",
)
@click.option(
    "--batch-size",
    type=int,
    help="Contexts in a batch.  [default: what the device can take, less when memory is tight]",
)
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run Python code that MODEL brings for its tokenizer. Read it first.",
)
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
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
    quiet: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Find one RoPE scaling factor a layer for MODEL that makes it read all places of a prompt well.

    MODEL is a local directory or a name on the Hub, of a Llama or Qwen2 model with its tokenizer.

    A genetic algorithm searches Bézier curves over layer depth, by the score on key-value retrieval.
    It costs at most population × generations evaluations of contexts × positions questions each. The
    winner is then compared with the base model on unseen questions. RUN gets factors.json, settings.json,
    journal.jsonl, curve.png and positions.png.

    A search may be stopped at any moment (Ctrl-C): the same command with --resume goes on and comes to the
    same result.
    """
    from rich.console import Console

    from lpes_bake.run import SETTINGS_FILE, Events, SearchSettings, search, stored_settings
    from lpes_bake.search.errors import InputError
    from lpes_bake.search.study import StudyStopped

    if resume:
        given = click.core.ParameterSource.COMMANDLINE
        explicit = {name for name in values if context.get_parameter_source(name) == given}
        stored = stored_settings(out)
        values = {name: value if name in explicit else stored.get(name, value) for name, value in values.items()}
        if revision is None and not Path(model).is_dir():
            revision = stored.get("base", {}).get("revision")
    try:
        settings = SearchSettings.from_flat(values)
    except TypeError as error:  # options have the right types, a file that somebody edited may not
        raise InputError(f"{out / SETTINGS_FILE} does not hold settings; restore it or start a new run") from error
    progress = Progress(Console(stderr=True, quiet=quiet), settings.genetic.population * settings.genetic.generations)
    again = f"lpes-bake search {shlex.quote(model)} --out {shlex.quote(str(out))} --resume"
    try:
        with progress:
            result = search(
                model,
                out,
                settings,
                revision=revision,
                resume=resume,
                trust_remote_code=trust_remote_code,
                events=Events(progress.status, progress.trial),
            )
    except KeyboardInterrupt:
        if (out / "journal.jsonl").exists():
            click.echo(f"\nInterrupted after {progress.done} evaluations. Go on with:\n{again}", err=True)
        else:
            click.echo("\nInterrupted before the search began; nothing was written.", err=True)
        context.exit(130)
    except StudyStopped as error:
        raise click.ClickException(f"{error}. When that is mended, go on with: {again}") from error
    if as_json:
        content = {"run": str(out), "verdict": result.verdict, "message": result.message, **result.factors.to_json()}
        click.echo(json.dumps(content, indent=2))
        return
    report(result)
    commit = (result.factors.base or {}).get("revision")
    pinned = f" --revision {commit}" if commit and not Path(model).is_dir() else ""
    click.echo(
        f"\n{out / 'factors.json'}, {out / 'curve.png'}, {out / 'positions.png'}\n\nNext:\n"
        f"lpes-bake export {shlex.quote(model)} {shlex.quote(str(out / 'factors.json'))} OUT{pinned}"
    )


def report(result: SearchResult) -> None:
    """The comparison on unseen questions as a table, and what it means in words."""
    from rich.console import Console
    from rich.table import Table

    from lpes_bake.card import sparkline

    scores = result.comparison.scores
    console = Console(highlight=False, markup=False)
    title = f"{scores['contexts']} unseen contexts, by place of the evidence; differences with 95 % intervals"
    table = Table(title=title, title_justify="left", box=None)
    for heading in ("place", "accuracy: base", "LPES", "log-prob.: base", "LPES", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    columns = [scores[name][kind] for kind in ("accuracy", "logprob") for name in ("base", "lpes")]
    gains = scores["difference"]["logprob"]
    rows = [
        (str(position), [column["by_position"][i] for column in columns], gains["by_position"][i])
        for i, position in enumerate(scores["positions"])
    ]
    for name, cells, (mean, low, high) in [*rows, ("mean", [column["mean"] for column in columns], gains["mean"])]:
        numbers = [f"{cell:.2f}" for cell in cells[:2]] + [f"{cell:.3f}" for cell in cells[2:]]
        table.add_row(name, *numbers, f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]")
    console.print(table)
    short = scores["short_text"]
    mean, low, high = short["difference"]
    console.print(
        f"\nShort plain text ({short['paragraphs']} paragraphs), log-probability a token: base {short['base']:.3f}, "
        f"LPES {short['lpes']:.3f}, difference {mean:+.3f} [{low:+.3f}, {high:+.3f}]",
        soft_wrap=True,
    )
    study = result.study
    failed = f", {study.failed} failed" if study.failed else ""
    console.print(f"\n{study.trials} evaluations{failed}; {study.ended}.", soft_wrap=True)
    console.print(result.message, soft_wrap=True)
    factors = result.factors.layer_rope_scaling
    console.print(f"factors {sparkline(factors)} {min(factors):.4g} … {max(factors):.4g}", soft_wrap=True)


class Progress:
    """Progress on stderr: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self.console, self.total = console, total
        self.done = 0
        self._fresh = 0
        self._seconds = 0.0
        self._identity: float | None = None
        self._best: float | None = None
        self._line_due = 0.0
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._bar.add_task("starting", total=total, detail="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def status(self, text: str) -> None:
        """Say what is being done."""
        self._bar.update(self._task, description=text, detail="")
        if not self.console.is_terminal:
            self.console.print(text, markup=False, soft_wrap=True, highlight=False)

    def trial(self, trial: Trial) -> None:
        """Count one evaluation."""
        self.done += 1
        if not trial.replayed:
            self._fresh += 1
            self._seconds += trial.seconds
        if trial.score is not None:
            self._best = trial.score if self._best is None else max(self._best, trial.score)
            if trial.number == 0:
                self._identity = trial.score
        if trial.error is not None and not trial.replayed:
            self.console.print(f"evaluation {trial.number + 1} failed: {trial.error}", markup=False, soft_wrap=True)
        self._bar.update(
            self._task, completed=self.done, description=f"generation {trial.generation}", detail=self._detail()
        )
        now = time.monotonic()
        if not self.console.is_terminal and not trial.replayed and (now >= self._line_due or self.done == self.total):
            self._line_due = now + LINE_EVERY
            line = f"generation {trial.generation}, evaluation {self.done} of {self.total} at most, {self._detail()}"
            self.console.print(line, markup=False, soft_wrap=True, highlight=False)

    def _detail(self) -> str:
        scores = [
            f"{name} {score:.4f}"
            for name, score in (("best", self._best), ("identity", self._identity))
            if score is not None
        ]
        if self._fresh:
            left = round(self._seconds / self._fresh * (self.total - self.done))
            hours, minutes, seconds = left // 3600, left // 60 % 60, left % 60
            scores.append(f"{hours}:{minutes:02}:{seconds:02} left")
        return ", ".join(scores)
