"""`lpes-bake search`."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lpes_bake.commands.options import GroupedCommand, quiet, revision, settings_options, trust_remote_code
from lpes_bake.pages import SCALES, difference, fixed
from lpes_bake.search.ledger import Limits
from lpes_bake.search.tasks import task_help
from lpes_bake.settings import PRESETS, SearchSettings

if TYPE_CHECKING:
    from rich.console import Console

    from lpes_bake.conclusion import SearchResult

LIMITS = tuple(one.name for one in fields(Limits))


@click.command(
    "search", cls=GroupedCommand, epilog=f"\b\n{task_help()}", short_help="Find the factors of a model: one a layer."
)
@click.argument("model")
@click.option("--out", required=True, metavar="RUN", type=click.Path(path_type=Path), help="New directory for the run.")
@click.option("--resume", is_flag=True, help="Go on with the run in RUN. Options not given are taken from it.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and what it would take, and do no more.")
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="default",
    show_default=True,
    help="Defaults for the options below; paper is the paper's own algorithm at its own price.",
)
@click.option("--force", is_flag=True, help="Write the winner to factors.json even where it does not beat the base.")
@settings_options(SearchSettings)
@revision
@trust_remote_code
@settings_options(Limits, group="Limits")
@quiet
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(
    context: click.Context,
    /,
    model: str,
    out: Path,
    resume: bool,
    dry_run: bool,
    revision: str | None,
    preset: str,
    force: bool,
    trust_remote_code: bool,
    quiet: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Find one RoPE scaling factor a layer for MODEL that makes it read all places of a prompt well.

    MODEL is a local directory or a name on the Hub, of a model of a known family with its tokenizer.

    An optimizer searches curves over layer depth, by how well the model answers questions whose evidence
    stands at several places. The best candidates meet on other questions, and the winner is compared with
    the base model on questions that nobody chose by. Three sets, no question in two of them. RUN gets
    factors.json, result.json, settings.json, journal.jsonl and report/report.html.

    A search may be stopped at any moment (Ctrl-C): the same command with --resume goes on and comes to the
    same result. Several processes: accelerate launch --multi_gpu --num_processes N -m lpes_bake search …

    \b
    lpes-bake search MODEL --out RUN --task kv,pairs=75,key_width=uuid
    lpes-bake search MODEL --out RUN --task kv --task qa:my-questions.jsonl
    lpes-bake search MODEL --out RUN --dry-run
    """
    from rich.console import Console

    from lpes_bake.run import Events, search
    from lpes_bake.search.processes import PeerLost
    from lpes_bake.search.study import StudyStopped

    limits = Limits(**{name: values.pop(name) for name in LIMITS})
    settings = settings_of(context, out, values, preset, resume=resume)
    if resume and revision is None and not Path(model).is_dir():
        revision = stored_revision(out)
    first = is_first()
    if dry_run:
        if not first:
            return
        from lpes_bake.dry_run import estimate, show_estimate

        if not quiet:
            click.echo("loading the model, then timing short text and a few contexts of each task", err=True)
        found = estimate(model, settings, revision=revision, trust_remote_code=trust_remote_code)
        if as_json:
            click.echo(json.dumps(found, indent=2))
        else:
            show_estimate(found, Console(highlight=False, markup=False))
        return
    from lpes_bake.commands.progress import Progress
    from lpes_bake.plan import trials_at_most

    progress = Progress(Console(stderr=True, quiet=quiet or not first), trials_at_most(settings))
    again = resume_command(model, out, limits, force=force, trust_remote_code=trust_remote_code)
    try:
        with progress:
            result = search(
                model,
                out,
                settings,
                revision=revision,
                resume=resume,
                trust_remote_code=trust_remote_code,
                limits=limits,
                force=force,
                command=command_of(
                    model, out, settings, limits, revision, force=force, trust_remote_code=trust_remote_code
                ),
                events=Events(progress.status, progress.trial, progress.warning),
            )
    except (KeyboardInterrupt, SystemExit) as stop:
        # Ctrl-C, or a polite kill: a machine that is taken away sends one.
        if first:
            begun = (out / "journal.jsonl").exists()
            click.echo(
                f"\nInterrupted after {progress.done} trials. Go on with:\n{again}"
                if begun
                else "\nInterrupted before the search began; nothing was written.",
                err=True,
            )
        if isinstance(stop, SystemExit):
            raise
        context.exit(130)
    except PeerLost as error:
        raise click.ClickException(str(error)) from error
    except StudyStopped as error:
        if not first:
            context.exit(1)
        raise click.ClickException(f"{error}. When that is mended, go on with: {again}") from error
    if not first:
        return
    if as_json:
        content = {"run": str(out), "verdict": result.verdict, "message": result.message, **result.factors.to_json()}
        click.echo(json.dumps(content, indent=2))
        return
    show_result(result, Console(highlight=False, markup=False))
    click.echo(f"\n{out / 'factors.json'}, {out / 'result.json'}, {out / 'report' / 'report.html'}\n")
    if result.factors.is_identity:
        click.echo("There is nothing to export. More --contexts and --steps may find more; another --task, too.")
        return
    commit = (result.factors.base or {}).get("revision")
    pinned = f" --revision {commit}" if commit and not Path(model).is_dir() else ""
    click.echo(f"Next:\nlpes-bake export {shlex.quote(model)} {shlex.quote(str(out / 'factors.json'))} OUT{pinned}")


def settings_of(
    context: click.Context, out: Path, values: dict[str, Any], preset: str, *, resume: bool
) -> SearchSettings:
    """What the user gave, over the preset, over what the run that goes on has."""
    from lpes_bake.run import stored_settings

    given = {
        name: value
        for name, value in values.items()
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE
    }
    stored = stored_settings(out) if resume else {}
    return SearchSettings.from_flat({**stored, **PRESETS[preset], **given})


def is_first() -> bool:
    """Whether this is the only process, or the first one of `accelerate launch`: the one that speaks."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1 or int(os.environ.get("RANK", "0")) == 0


def command_of(
    model: str,
    out: Path,
    settings: SearchSettings,
    limits: Limits,
    revision: str | None,
    *,
    force: bool,
    trust_remote_code: bool,
) -> str:
    """The command that gives this result from scratch: all options that are not at their defaults."""
    words = ["lpes-bake", "search", model, "--out", str(out)]
    words += ["--revision", revision] if revision is not None else []
    words += option_words(settings.flat(), SearchSettings().flat()) + option_words(asdict(limits), asdict(Limits()))
    words += ["--force"] if force else []
    words += ["--trust-remote-code"] if trust_remote_code else []
    return shlex.join(words)


def resume_command(model: str, out: Path, limits: Limits, *, force: bool, trust_remote_code: bool) -> str:
    """The command that goes on with this run. What it gives again is not among the stored settings."""
    words = [
        "lpes-bake",
        "search",
        model,
        "--out",
        str(out),
        "--resume",
        *option_words(asdict(limits), asdict(Limits())),
    ]
    words += ["--force"] if force else []
    words += ["--trust-remote-code"] if trust_remote_code else []
    return shlex.join(words)


def option_words(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """The options for the values that are not at their defaults."""
    words: list[str] = []
    for name, value in values.items():
        if value == defaults[name]:
            continue
        option = f"--{name.replace('_', '-')}"
        texts = isinstance(value, list) and any(isinstance(one, str) for one in value)
        numbers = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words += [word for one in value for word in (option, one)] if texts else [option, numbers]
    return words


def stored_revision(out: Path) -> str | None:
    """The commit that the run in `out` began with."""
    from lpes_bake.run import stored_settings

    commit: str | None = stored_settings(out)["base"]["revision"]
    return commit


def show_result(result: SearchResult, console: Console) -> None:
    """The comparison on unseen questions as a table a task, and what it means in words."""
    from rich.table import Table

    from lpes_bake.card import sparkline

    content = result.content
    # What does not win is not what factors.json holds.
    winner = "best found" if result.factors.is_identity else "LPES"
    for task, scores in zip(content["tasks"], content["report"]["tasks"], strict=True):
        left_out = sum(task["too_long"].values())
        console.print(
            f"{task['title']}: {task['contexts']['report']} unseen contexts, by place of the evidence"
            + (f"; {left_out} contexts were too long for the model" if left_out else ""),
            soft_wrap=True,
        )
        unit = "%" if task["position_unit"] == "%" else ""
        places = [*(f"{position}{unit}" for position in task["positions"]), "mean"]
        for metric, (title, factor, digits) in SCALES.items():
            table = Table(box=None, title=title, title_justify="left")
            for heading in ("place", "base", winner, "difference, 95 % interval"):
                table.add_column(heading, justify="right", no_wrap=True)
            base, lpes, gain = ([*one["by_position"], one["mean"]] for one in by_metric(scores, metric))
            for place, before, after, gained in zip(places, base, lpes, gain, strict=True):
                means = (fixed(one[0], digits, factor) for one in (before, after))
                table.add_row(place, *means, difference(gained, digits, factor))
            console.print(table)
        console.print()
    text = content["report"]["text"]
    console.print(
        f"Short plain text ({text['paragraphs']} paragraphs), log-probability a token: base {fixed(text['base'], 3)}, "
        f"{winner} {fixed(text['lpes'], 3)}, difference {difference(text['difference'], 3)}",
        soft_wrap=True,
    )
    cost, gain = content["cost"], content["selection"]["gain"]
    others = "".join(f", {cost[name]} {name}" for name in ("failed", "dropped") if cost[name])
    console.print(
        f"\n{cost['evaluations']} evaluations{others}, {sum(cost['tokens'].values()):,} tokens; {content['ended']}.",
        soft_wrap=True,
    )
    # A milder form of a candidate was not searched on.
    searched = "" if gain["search"] is None else f"where it was searched {fixed(gain['search'], 4)}, "
    console.print(
        f"Gain of the winner {searched}where it was chosen {fixed(gain['selection'], 4)}, where nobody looked before "
        f"{fixed(gain['report'], 4)}.",
        soft_wrap=True,
    )
    console.print(result.message, soft_wrap=True)
    factors = result.factors.layer_rope_scaling
    console.print(f"factors {sparkline(factors)} {min(factors):.4g} … {max(factors):.4g}", soft_wrap=True)


def by_metric(scores: dict[str, Any], metric: str) -> list[dict[str, Any]]:
    """One metric of the base, of the winner, and their difference."""
    return [scores[part][metric] for part in ("base", "lpes", "difference")]
