"""The end of a search: the winner against the base model, the verdict, and all there is to know as plain data.

torch is imported inside functions only.
"""

from __future__ import annotations

import datetime
import itertools
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lpes_bake import __version__
from lpes_bake.comparison import Values, compared, numbers, objective_interval, task_facts
from lpes_bake.factors import Factors, base_facts, finite
from lpes_bake.plan import Plan
from lpes_bake.search.curve import level_points
from lpes_bake.search.ledger import Ledger
from lpes_bake.search.statistics import paired_interval
from lpes_bake.search.study import StudyResult, StudyStopped, Trial
from lpes_bake.search.tasks import PARTS
from lpes_bake.search.units import TEXT, Result, Unit
from lpes_bake.selection import Selection, drift, error_in, part_results, values_of

# Settings that hold paths, which mean nothing on other machines, and which factors.json takes there. What the files
# are, its `questions`, `paragraphs` and `start_factors` say.
LOCAL = ("task", "selection_task", "text", "start")

# Factors that change nothing gain on all of n contexts once in 2^n times: below one in 40 with so many and more.
FEWEST_FOR_A_VERDICT = 6


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    verdict: "better", "uncertain" (better, but the interval holds 0 or the contexts are too few for one; the identity
    is written unless forced) or "identity". content: all of it, as result.json has it.
    """

    factors: Factors
    verdict: str
    message: str
    content: dict[str, Any]


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
            **task_facts(spec, task),
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
        "environment": environment_of(plan.device, plan.settings.dtype),
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
            "max_damage": settings.objective.max_damage,
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
        dear = sum(one.damage > settings.objective.max_damage for one in selection.finalists)
        because = f" ({dear} of its finalists cost more on short text than max_damage allows)" if dear else ""
        return "identity", f"The search found nothing better than the base model{because}."
    if not mean > 0:
        return "identity", f"The winner is not better than the base model on unseen questions ({numbers})."
    if not low > 0:
        return (
            "uncertain",
            f"The search's winner does not beat the base model beyond noise on unseen questions ({numbers}).",
        )
    if settings.report_contexts < FEWEST_FOR_A_VERDICT:
        return (
            "uncertain",
            f"The winner gains on unseen questions, but these are too few to tell it from chance ({numbers}); "
            f"--report-contexts {FEWEST_FOR_A_VERDICT} is the least for a verdict.",
        )
    message = f"The winner is better than the base model on unseen questions ({numbers})."
    damage = -report.text["difference"][0]
    if damage > settings.objective.max_damage:
        # The selection paragraphs allowed it, and these are others: a limit met on a sample may be missed.
        message += f" On other short text it costs {damage:.4f} nats a token, more than max_damage."
    return "better", message


def trial_records(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """The trials for result.json; tokens are cumulative."""
    records, tokens = [], 0
    known: dict[Any, int] = {}
    for trial in trials:
        # A candidate that is asked for again brings what it took before, too; each gradient is a new one.
        key = trial.number if trial.gradient else trial.factors
        tokens += trial.tokens - known.get(key, 0)
        known[key] = trial.tokens
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
                "penalty": trial.penalty,
                "tokens": tokens,
                "error": trial.error,
                "layer_rope_scaling": list(trial.factors),
            }
        )
    return records


def without_winner(scores: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """The base model's scores alone: those of a winner that was not kept do not belong to the identity."""
    tasks = [{key: value for key, value in one.items() if key not in ("lpes", "difference")} for one in scores["tasks"]]
    return {"tasks": tasks, "text": {"paragraphs": text["paragraphs"], "base": text["base"]}}


def environment_of(device: Any, dtype: str | None) -> dict[str, Any]:
    """What numbers are computed with, on that device."""
    import torch
    import transformers

    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(terse=True),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }
