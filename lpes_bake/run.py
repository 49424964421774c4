"""A search from a model to a RUN directory: checks, the study, the choice of a winner, the final comparison.

RUN holds settings.json, journal.jsonl (each piece of work as it was done), and, once the search has
ended, factors.json, result.json (all there is to know) and report/, a page of it with its pictures.
torch is imported inside functions only.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lpes_bake import __version__
from lpes_bake.comparison import Values, compared, numbers, objective_interval
from lpes_bake.factors import Factors, base_facts, finite, save_text
from lpes_bake.loading import load_model, load_tokenizer, require_causal
from lpes_bake.report import write_report
from lpes_bake.search.curve import level_points
from lpes_bake.search.errors import InputError
from lpes_bake.search.journal import JOURNAL_FORMAT, decode_line, differences
from lpes_bake.search.ledger import Ledger, LimitReached, Limits, open_journal
from lpes_bake.search.optimizers import make_optimizer
from lpes_bake.search.processes import Processes, connected, too_few
from lpes_bake.search.statistics import paired_interval
from lpes_bake.search.study import Study, StudyResult, StudySettings, StudyStopped, Trial
from lpes_bake.search.tasks import PARTS, Task, parse_task
from lpes_bake.search.units import TEXT, Result, Unit
from lpes_bake.selection import Selection, drift, error_in, part_results, select, values_of
from lpes_bake.settings import GRADIENT_OPTIMIZERS, SearchSettings
from lpes_bake.source import Source, open_source, weight_files

SETTINGS_FILE = "settings.json"
JOURNAL_FILE = "journal.jsonl"
FACTORS_FILE = "factors.json"
RESULT_FILE = "result.json"

# Read from each end of a weight file to tell it from another.
DIGEST_BYTES = 1 << 20

# Settings that hold paths, which mean nothing on other machines, and which factors.json takes there. What the files
# are, its `questions` and `paragraphs` say.
LOCAL = ("task", "selection_task", "text")

# Contexts of a task with generated answers that tell whether it is too hard.
DIFFICULTY_CONTEXTS = 4


@dataclass(frozen=True)
class Events:
    """Where a search reports to: what it is doing, each trial, and what the user should know now."""

    status: Callable[[str], None] = lambda _: None
    trial: Callable[[Trial], None] = lambda _: None
    warning: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    verdict: "better", "uncertain" (better, but the interval holds 0; the identity is written unless forced) or
    "identity". content: all of it, as result.json has it.
    """

    factors: Factors
    verdict: str
    message: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A search that passed its checks: nothing of it has been computed.

    settings: with device and dtype as "auto" came to. tasks: those that are searched, then those that only
    choose. contexts: by part, a task each; empty where the task has no say in the part. paragraphs: by part.
    """

    source: Source
    settings: SearchSettings
    tasks: tuple[Task, ...]
    searched: int
    tokenizer: Any
    device: Any
    dtype: Any
    contexts: dict[str, list[list[Any]]]
    too_long: list[dict[str, int]]
    paragraphs: dict[str, list[str]]
    header: dict[str, Any]

    @property
    def choosing(self) -> list[int]:
        """The tasks that the winner is chosen by."""
        return list(range(self.searched, len(self.tasks))) or list(range(self.searched))


def make_plan(
    model: str,
    settings: SearchSettings,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_rank: int | None = None,
) -> Plan:
    """Check everything that can be checked before a weight is read. Raises InputError.

    local_rank: number of this process on its machine, where there are several; it picks the GPU.
    """
    source = open_source(model, revision=revision)
    require_causal(source)
    tasks = [parse_task(spec) for spec in (*settings.task, *settings.selection_task)]
    searched = len(settings.task)
    # The optimizer is made to see whether its settings can work.
    optimizer_of(settings, source.num_hidden_layers)

    from lpes_bake.search.device import pick_device, pick_dtype
    from lpes_bake.search.prompts import take

    device = pick_device(settings.device, local_rank)
    dtype = pick_dtype(settings.dtype, device)
    # What "auto" came to is part of the settings: another device or dtype gives other scores.
    settings = dataclasses.replace(settings, device=device.type, dtype=str(dtype).removeprefix("torch."))
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    counts = {
        "search": settings.study.contexts + (settings.study.gradient_contexts if wants_gradients(settings) else 0),
        "selection": settings.selection_contexts,
        "report": settings.report_contexts,
    }
    choosing = range(searched, len(tasks)) if settings.selection_task else range(searched)
    having = {"search": range(searched), "selection": choosing, "report": range(len(tasks))}
    contexts: dict[str, list[list[Any]]] = {part: [[] for _ in tasks] for part in PARTS}
    too_long: list[dict[str, int]] = [{} for _ in tasks]
    for part in PARTS:
        for i in having[part]:
            taken = take(
                tasks[i],
                part,
                settings.seed,
                counts[part],
                tokenizer,
                settings.prompt_format,
                source.max_positions,
            )
            contexts[part][i] = taken.contexts
            too_long[i][part] = taken.too_long
    check_disjoint(tasks, contexts)
    paragraphs = paragraphs_of(settings, tokenizer, source)
    header = {
        "base": base_facts(source),
        "weights": weights_digest(source),
        "questions": {str(number): task.describe() for number, task in enumerate(tasks, 1)},
        # Those that come along change from version to version.
        "paragraphs": hashlib.sha256(json.dumps(paragraphs).encode()).hexdigest()[:16],
        **settings.flat(),
    }
    return Plan(
        source,
        settings,
        tuple(tasks),
        searched,
        tokenizer,
        device,
        dtype,
        contexts,
        too_long,
        paragraphs,
        # As it is read again: a tuple of a user's task comes back as a list.
        json.loads(json.dumps(header)),
    )


def check_disjoint(tasks: Sequence[Task], contexts: Mapping[str, Sequence[Sequence[Sequence[Any]]]]) -> None:
    """InputError for a question in two parts, as a task that takes no notice of `part` gives: it would be searched
    on, and then taken for unseen."""
    for i, task in enumerate(tasks):
        asked: dict[tuple[str, str], str] = {}
        for part in PARTS:
            for example in (one.example for context in contexts[part][i] for one in context):
                if asked.setdefault((example.prompt, example.lead), part) != part:
                    raise InputError(
                        f"the {task.name} task gives one prompt to its {asked[example.prompt, example.lead]} part and "
                        f"its {part} part; these must share nothing: docs/tasks.md shows how"
                    )


def paragraphs_of(settings: SearchSettings, tokenizer: Any, source: Source) -> dict[str, list[str]]:
    """The short plain text of each part. InputError for a file that has too few, or too long ones."""
    from lpes_bake.search.short_text import read_paragraphs

    paragraphs = read_paragraphs(None if settings.text is None else Path(settings.text))
    for one in itertools.chain(*paragraphs.values()):
        if not 2 <= (tokens := len(tokenizer(one)["input_ids"])) <= source.max_positions:
            raise InputError(
                f"the paragraph {one[:40]!r}… has {tokens} tokens; it must have 2 to {source.max_positions}, the "
                "model's positions"
            )
    return paragraphs


def wants_gradients(settings: SearchSettings) -> bool:
    """Whether the optimizer follows gradients."""
    return settings.optimizer in GRADIENT_OPTIMIZERS


def optimizer_of(settings: SearchSettings, layers: int) -> Any:
    """The optimizer, its chance seeded. Raises InputError for settings that cannot work."""
    rng = np.random.default_rng(settings.seed)
    return make_optimizer(settings.optimizer, settings.curve, settings.genetic, settings.gradient, layers, rng)


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


def begin(out: Path, plan: Plan) -> None:
    """Make RUN and write its settings."""
    # Another run may have begun there while the model was loading.
    check_out(out, resume=False)
    out.mkdir(parents=True, exist_ok=True)
    save_text(out / SETTINGS_FILE, json.dumps(plan.header, indent=2, ensure_ascii=False) + "\n")


def load_evaluator(plan: Plan) -> Any:
    """The loaded model with the questions and the paragraphs: what computes units."""
    from lpes_bake.search.evaluator import Evaluator

    settings = plan.settings
    model = load_model(
        plan.source,
        plan.device,
        plan.dtype,
        device_map=settings.device_map,
        quantization=settings.quantization,
    )
    return Evaluator(model, plan.tokenizer, plan.tasks, plan.contexts, plan.paragraphs, batch_size=settings.batch_size)


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
        objective,
        study.ranking,
        study.complete,
        plan.choosing,
        contexts=settings.selection_contexts,
        finalists=settings.finalists,
        max_damage=settings.max_damage,
    )
    cost.note("selection")
    events.status("comparing the winner with the base model on unseen questions")
    report = Report(plan, ledger, selection)
    cost.note("report")
    return conclude(
        plan, study, trials, selection, report, cost, force=force, command=command, seconds=time.monotonic() - started
    )


def first_contexts(study: StudySettings, task: Task) -> int:
    """How many contexts tell whether a task is too hard.

    What is only scored is a piece of the study's own work; what is generated comes on top, so it is little.
    """
    block = study.contexts if study.race == "off" else min(study.first_block, study.contexts)
    return min(block, DIFFICULTY_CONTEXTS) if task.generates else block


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


class Cost:
    """What each phase of a run took, in tokens: search first, then what `note` names."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._last = ledger, ledger.tokens
        self.tokens = {"search": ledger.tokens}

    def note(self, phase: str) -> None:
        """A phase is over."""
        self.tokens[phase] = self._ledger.tokens - self._last
        self._last = self._ledger.tokens


class Report:
    """The winner beside the identity on the report contexts of all tasks, and on other short plain text."""

    def __init__(self, plan: Plan, ledger: Ledger, selection: Selection) -> None:
        settings, objective = plan.settings, plan.settings.objective
        candidates = [selection.identity.individual.factors, selection.winner.individual.factors]
        found = [
            [
                part_results(ledger, "report", task, settings.report_contexts, factors, accuracy=True)
                for task in range(len(plan.tasks))
            ]
            for factors in candidates
        ]
        texts = ledger.results([Unit("score", "report", TEXT, 0, 0, factors) for factors in candidates])
        for factors, text, results in zip(candidates, texts, found, strict=True):
            if (error := error_in([text, *itertools.chain(*results)])) is not None:
                ledger.forget([factors])
                who = "model itself (all factors 1)" if factors is candidates[0] else "winner"
                raise StudyStopped(f"the {who} cannot be scored on the report contexts: {error}")
        self.tasks = [compared(metrics_of(base), metrics_of(lpes)) for base, lpes in zip(*found, strict=True)]
        self.text = text_difference(*texts)
        fitness = [[values_of(objective, results[task]) for task in plan.choosing] for results in found]
        self.gain = objective_interval(objective, selection.weights, fitness[1], fitness[0])


def metrics_of(results: Sequence[Result]) -> Values:
    """Both metrics, (contexts, positions), of one model's blocks."""
    return {
        "accuracy": np.array([row for one in results for row in one.exact], dtype=np.float64),
        "logprob": np.array([row for one in results for row in one.logprob], dtype=np.float64),
    }


def text_difference(base: Result, lpes: Result) -> dict[str, Any]:
    """Short plain text: mean log-probability a token of both, the paired difference, and the KL."""
    ours, theirs = (np.array(one.logprob)[:, 0] for one in (lpes, base))
    return {
        "paragraphs": len(ours),
        "base": float(theirs.mean()),
        "lpes": float(ours.mean()),
        "difference": numbers(paired_interval(ours, theirs)),
        "kl": drift(lpes, base)[1],
    }


def conclude(
    plan: Plan,
    study: StudyResult,
    trials: Sequence[Trial],
    selection: Selection,
    report: Report,
    cost: Cost,
    *,
    force: bool,
    command: str,
    seconds: float,
) -> SearchResult:
    """Judge the winner on what it was neither searched nor chosen on, and write down what there is to know."""
    settings, winner = plan.settings, selection.winner
    verdict, message = judge(plan, selection, report)
    kept = winner if verdict == "better" or (force and winner is not selection.identity) else selection.identity
    if kept is selection.identity:
        message += " factors.json holds the identity (all factors 1)."
    elif verdict != "better":
        message += " factors.json holds the winner all the same, as was wished (--force)."
    facts = base_facts(plan.source)
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    points = kept.individual.points or level_points(settings.curve, plan.source.num_hidden_layers, 1.0)
    is_curve = kept.individual.points is not None or kept is selection.identity
    curve = {"points": [list(point) for point in points], **asdict(settings.curve)} if is_curve else None
    tasks = [
        {
            "spec": spec,
            "name": task.name,
            "title": task.title,
            "settings": task.describe(),
            "positions": list(task.positions),
            "position_unit": task.position_unit,
            "generates": task.generates,
            "contexts": {part: len(plan.contexts[part][i]) for part in PARTS},
            "too_long": plan.too_long[i],
        }
        for i, (spec, task) in enumerate(zip((*settings.task, *settings.selection_task), plan.tasks, strict=True))
    ]
    scores = {
        "tasks": [
            {**{name: value for name, value in about.items() if name != "spec"}, **measured}
            for about, measured in zip(tasks, report.tasks, strict=True)
        ]
    }
    elsewhere = ("base", *asdict(settings.curve), *LOCAL)
    factors = Factors(
        layer_rope_scaling=kept.individual.factors,
        base=facts,
        curve=curve,
        search={
            **{name: value for name, value in plan.header.items() if name not in elsewhere},
            "evaluations": study.evaluations,
            "tokens": study.tokens,
            "failed": study.failed,
            "ended": study.ended,
            "verdict": message,
        },
        scores=(without_winner(scores, report.text) if kept is selection.identity else {**scores, "text": report.text}),
        tool_version=__version__,
        date=date,
    )
    search_gain = winner.search_score - selection.identity.search_score
    content = {
        "version": 1,
        "date": date,
        "tool_version": __version__,
        "command": command,
        "seconds": round(seconds, 1),
        "base": facts,
        "environment": environment(plan),
        "settings": plan.header,
        "tasks": tasks,
        "layer_rope_scaling": list(kept.individual.factors),
        "curve": None if curve is None else {"points": curve["points"]},
        "verdict": verdict,
        "message": message,
        "ended": study.ended,
        "objective": {**asdict(settings.objective), "weights": list(study.task_weights)},
        "identity_score": selection.identity.search_score,
        "trials": trial_records(trials),
        "convergence": [list(pair) for pair in study.convergence],
        "selection": {
            "finalists": selection.to_json(),
            "max_damage": settings.max_damage,
            "gain": {
                "search": search_gain,
                "selection": winner.selection_score - selection.identity.selection_score,
                "report": report.gain[0],
            },
        },
        "report": {"tasks": report.tasks, "text": report.text},
        "cost": {
            "tokens": cost.tokens,
            "evaluations": study.evaluations,
            "failed": study.failed,
            "dropped": study.dropped,
        },
    }
    return SearchResult(factors, verdict, message, finite(content))


def judge(plan: Plan, selection: Selection, report: Report) -> tuple[str, str]:
    """("better" | "uncertain" | "identity", the reason in words)."""
    settings = plan.settings
    mean, low, high = report.gain
    what = {"logprob": "log-probability of the answer", "probability": "probability of the answer"}.get(
        settings.objective.fitness, "accuracy"
    )
    numbers = f"{what} {mean:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}, {settings.report_contexts} contexts"
    if selection.winner is selection.identity:
        dear = sum(one.damage > settings.max_damage for one in selection.finalists)
        because = f" ({dear} of its finalists cost more on short text than max_damage allows)" if dear else ""
        return "identity", f"The search found nothing better than the base model{because}."
    if not mean > 0:
        return "identity", f"The winner is not better than the base model on unseen questions ({numbers})."
    if not low > 0:
        return (
            "uncertain",
            f"The search's winner does not beat the base model beyond noise on unseen questions ({numbers}).",
        )
    message = f"The winner is better than the base model on unseen questions ({numbers})."
    damage = -report.text["difference"][0]
    if damage > settings.max_damage:
        # The selection paragraphs allowed it, and these are others: a limit met on a sample may be missed.
        message += f" On other short text it costs {damage:.4f} nats a token, more than max_damage."
    return "better", message


def trial_records(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The trials for result.json; tokens are cumulative, uniform is the factor where all layers share one."""
    records, tokens = [], 0
    for trial in trials:
        tokens += trial.tokens
        records.append(
            {
                "trial": trial.number,
                "generation": trial.generation,
                "kind": "gradient" if trial.gradient else "score",
                "score": trial.score,
                "complete": trial.complete,
                "contexts": trial.contexts,
                "damage": trial.damage,
                "kl": trial.kl,
                "tokens": tokens,
                "error": trial.error,
                "uniform": trial.factors[0] if len(set(trial.factors)) == 1 else None,
            }
        )
    return records


def without_winner(scores: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """The base model's scores alone: those of a winner that was not kept do not belong to the identity."""
    tasks = [{key: value for key, value in one.items() if key not in ("lpes", "difference")} for one in scores["tasks"]]
    return {"tasks": tasks, "text": {"paragraphs": text["paragraphs"], "base": text["base"]}}


def environment(plan: Plan) -> dict[str, Any]:
    """What the numbers were computed with."""
    import torch
    import transformers

    cuda = plan.device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(terse=True),
        "device": plan.device.type,
        "device_name": torch.cuda.get_device_name(plan.device) if cuda else platform.machine(),
        "dtype": plan.settings.dtype,
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


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
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give a directory for the run")
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{out} cannot be written, because of {place}; give another directory")
    if resume:
        stored_settings(out)
    elif begun(out):
        raise InputError(f"{out} holds a run; go on with it with --resume, or give a new directory")
    elif out.is_dir() and any(path.name not in (SETTINGS_FILE, JOURNAL_FILE) for path in out.iterdir()):
        raise InputError(f"{out} is not empty; give a new directory")


def check_outside(out: Path, source: Source) -> None:
    """InputError when `out` lies in the model's own directory."""
    inside, model = out.resolve(), source.path.resolve()
    if inside == model or model in inside.parents:
        raise InputError(f"{out} lies inside the model's directory {source.path}; give a directory elsewhere")


def weights_digest(source: Source) -> str:
    """Tells two models with one config apart: a hash of the size and both ends of each weight file.

    The whole files would take minutes to read for a large model, before each resumed run.
    """
    digest = hashlib.sha256()
    for path in weight_files(source.path):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(DIGEST_BYTES))
            file.seek(max(0, size - DIGEST_BYTES))
            digest.update(file.read(DIGEST_BYTES))
    return digest.hexdigest()[:16]


def trials_at_most(settings: SearchSettings) -> int:
    """How many trials a search can come to."""
    genetic, gradient = settings.genetic, settings.gradient
    uniform = len(settings.curve.uniform_places)
    climb = gradient.steps + math.ceil(gradient.steps / gradient.check_every)
    if settings.optimizer == "gradient":
        return uniform + climb
    first = uniform if settings.optimizer == "cma-es" else max(genetic.population, uniform)
    if settings.optimizer == "hybrid":
        # What the climb starts from is scored anew: as a curve through even points.
        return first + genetic.population * (min(genetic.generations, gradient.warmup) - 1) + 1 + climb
    return first + genetic.population * (genetic.generations - 1)
