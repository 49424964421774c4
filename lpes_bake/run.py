"""A search from a model to a RUN directory: checks, the study, the choice of a winner, the final comparison.

RUN holds settings.json, journal.jsonl (each piece of work as it was done), and, once the search has
ended, factors.json, result.json (all there is to know) and report/, a page of it with its pictures.
torch is imported inside functions only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpes_bake.conclusion import Cost, Report, SearchResult, conclude
from lpes_bake.factors import save_text
from lpes_bake.plan import Plan, first_contexts, load_evaluator, make_plan, optimizer_of
from lpes_bake.report import load_result, write_report
from lpes_bake.search.errors import InputError
from lpes_bake.search.journal import JOURNAL_FORMAT, Journal, decode_line, differences
from lpes_bake.search.ledger import Ledger, LimitReached, Limits, open_journal
from lpes_bake.search.processes import Processes, connected, too_few
from lpes_bake.search.study import Study, Trial
from lpes_bake.search.units import Unit
from lpes_bake.selection import select
from lpes_bake.settings import SearchSettings
from lpes_bake.source import Source

SETTINGS_FILE = "settings.json"
JOURNAL_FILE = "journal.jsonl"
FACTORS_FILE = "factors.json"
RESULT_FILE = "result.json"


@dataclass(frozen=True)
class Events:
    """Where a search reports to: what it is doing, each trial, and what the user should know now."""

    status: Callable[[str], None] = lambda _: None
    trial: Callable[[Trial], None] = lambda _: None
    warning: Callable[[str], None] = lambda _: None


def search(
    model: str,
    out: Path,
    settings: SearchSettings,
    *,
    revision: str | None = None,
    resume: bool = False,
    trust_remote_code: bool = False,
    limits: Limits | None = None,
    force: bool = False,
    command: str = "",
    events: Events | None = None,
) -> SearchResult:
    """Search factors for `model` and write all of RUN to `out`.

    Checks come first: InputError before any weight is read, and before RUN is made. Raises StudyStopped when
    evaluations fail again and again; KeyboardInterrupt leaves a journal that resume=True goes on with.
    force: write the winner though it does not beat the base model beyond noise. command: what result.json
    says to reproduce it with.

    Every process of `accelerate launch` runs this; the first one writes.
    """
    events = events or Events()
    if (lonely := too_few()) is not None:
        events.warning(lonely)
    with connected() as processes:
        first = processes.rank == 0
        together(processes, lambda: check_out(out, resume=resume))
        plan = make_plan(
            model,
            settings,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")) if processes.world_size > 1 else None,
        )
        check_outside(out, plan.source)
        if resume:
            together(processes, lambda: check_same(out, plan))
            together(processes, lambda: check_spent(out, limits or Limits()))
        events.status(f"loading {plan.source.name} on {plan.device} in {plan.settings.dtype}")
        evaluator = load_evaluator(plan)
        if not resume:
            together(processes, lambda: begin(out, plan))
        with open_journal(out / JOURNAL_FILE, plan.header, processes) as journal:
            ledger = Ledger(journal, evaluator.compute, processes, limits)
            result = run_plan(plan, ledger, events, force=force, command=command)
        if first:
            save(result, out)
    return result


def together(processes: Processes, check: Callable[[], None]) -> None:
    """Run `check` on the first process; what it raises, all raise."""
    problem: Exception | None = None
    if processes.rank == 0:
        try:
            check()
        except (InputError, OSError) as error:
            problem = error
    problem = processes.broadcast(problem)
    if problem is not None:
        raise problem


def check_same(out: Path, plan: Plan) -> None:
    """InputError when the run in `out` has other settings, and so comes to something else."""
    if different := differences(stored_settings(out), plan.header):
        raise InputError(f"{out} is a run with other settings ({'; '.join(different)}); give the same, or a new --out")


def check_spent(out: Path, limits: Limits) -> None:
    """InputError when a limit would end the run sooner than it ended before, and so overwrite its result with less."""
    try:
        result = load_result(out)
    except InputError:
        return  # There is no whole result to lose: it is written, or written again.
    cost, ended = result["cost"], result["ended"]
    spent = {"tokens": cost["tokens"]["search"], "evaluations": cost["evaluations"]}
    for name, limit in (("tokens", limits.max_tokens), ("evaluations", limits.max_evaluations)):
        # The limit that ended it is passed by the last unit's tokens, and would end it there again.
        if limit is not None and limit < spent[name] and ended != f"the limit of {limit} {name} is reached":
            raise InputError(
                f"{out} holds the result of a search of {spent[name]} {name}, more than --max-{name} {limit}; "
                "give more, or no limit"
            )


def begin(out: Path, plan: Plan) -> None:
    """Make RUN and write its settings."""
    # Another run may have begun there while the model was loading.
    check_out(out, resume=False)
    out.mkdir(parents=True, exist_ok=True)
    save_text(out / SETTINGS_FILE, json.dumps(plan.header, indent=2, ensure_ascii=False) + "\n")


def run_plan(plan: Plan, ledger: Ledger, events: Events, *, force: bool, command: str) -> SearchResult:
    """The search proper: study, choice of the winner, final comparison. A plain program over units."""
    started = time.monotonic()
    settings, objective = plan.settings, plan.settings.objective
    layers = plan.source.num_hidden_layers
    for warning in difficulty(plan, ledger):
        events.warning(warning)
    trials: list[Trial] = []

    def on_trial(trial: Trial) -> None:
        trials.append(trial)
        events.trial(trial)

    study = Study(
        optimizer_of(settings, layers),
        ledger,
        objective,
        settings.study,
        layers=layers,
        tasks=plan.searched,
        on_trial=on_trial,
    ).run()
    events.status("choosing the winner on other questions")
    cost = Cost(ledger)
    selection = select(
        ledger,
        # The weights are of the searched tasks; others to select by count the same.
        replace(objective, task_weights=()) if settings.selection_task else objective,
        study.ranking,
        study.complete,
        plan.choosing,
        contexts=settings.selection_contexts,
        finalists=settings.finalists,
    )
    cost.note("selection")
    events.status("comparing the winner with the base model on unseen questions")
    report = Report(plan, ledger, selection)
    cost.note("report")
    return conclude(
        plan, study, trials, selection, report, cost, force=force, command=command, seconds=time.monotonic() - started
    )


def difficulty(plan: Plan, ledger: Ledger) -> list[str]:
    """What to say where the model answers none or all of the first questions of a task right."""
    identity = (1.0,) * plan.source.num_hidden_layers
    said = []
    for i, task in enumerate(plan.tasks[: plan.searched]):
        count = first_contexts(plan.settings.study, task)
        accuracy = task.generates or plan.settings.objective.fitness == "accuracy"
        try:
            (result,) = ledger.results([Unit("score", "search", i, 0, count, identity, accuracy=accuracy)])
        except LimitReached:
            break
        right = [bool(one) for row in result.exact for one in row]
        questions = f"of {len(right)} questions at {len(task.positions)} places"
        if right and not any(right):
            said.append(
                f"{task.name}: the model answers none {questions} right; this task may be too hard for it: "
                "try fewer pairs or documents"
            )
        elif right and all(right):
            said.append(
                f"{task.name}: the model answers all {questions} right; this task is too easy to show anything: "
                "try more pairs or documents"
            )
    return said


def save(result: SearchResult, out: Path) -> None:
    """factors.json, result.json and the report."""
    result.factors.save(out / FACTORS_FILE)
    save_text(out / RESULT_FILE, json.dumps(result.content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_report(out)


def stored_settings(out: Path) -> dict[str, Any]:
    """The settings of the run in `out`, for going on with it: the header of its journal."""
    path = out / JOURNAL_FILE
    if not begun(out):
        raise InputError(f"there is no run to resume in {out}; leave out --resume to start one")
    with path.open("rb") as file:
        header = decode_line(file.readline())
    if header is None or header.get("journal") != JOURNAL_FORMAT:
        raise InputError(f"{path} does not begin as this version of lpes-bake writes it; start a new run")
    settings: dict[str, Any] = header["settings"]
    return settings


def begun(out: Path) -> bool:
    """Whether a run began in `out`: its journal has a first line. A kill just before leaves the files without it."""
    path = out / JOURNAL_FILE
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")


def check_out(out: Path, *, resume: bool) -> None:
    """InputError unless a run can be written to `out`, or gone on with."""
    check_writable(out)
    if resume:
        stored_settings(out)
        # Damage, and another run that is still going, are told before the model is loaded.
        Journal(out / JOURNAL_FILE).close()
    elif begun(out):
        raise InputError(f"{out} holds a run; go on with it with --resume, or give a new directory")
    elif out.is_dir() and any(path.name not in (SETTINGS_FILE, JOURNAL_FILE) for path in out.iterdir()):
        raise InputError(f"{out} is not empty; give a new directory")


def check_writable(out: Path) -> None:
    """InputError unless `out` is a directory, or can become one, that files can be written to."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give a directory")
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{out} cannot be written, because of {place}; give another directory")


def check_outside(out: Path, source: Source) -> None:
    """InputError when `out` lies in the model's own directory."""
    inside, model = out.resolve(), source.path.resolve()
    if inside == model or model in inside.parents:
        raise InputError(f"{out} lies inside the model's directory {source.path}; give a directory elsewhere")
