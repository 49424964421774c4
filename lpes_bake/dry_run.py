"""What a search would do and take, measured on a few questions: `lpes-bake search --dry-run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lpes_bake.plan import Plan, first_contexts, load_evaluator, make_plan, trials_at_most, wants_gradients
from lpes_bake.search.errors import InputError
from lpes_bake.search.ledger import attempt
from lpes_bake.search.objective import FloatArray
from lpes_bake.search.study import TEXT_BATCH
from lpes_bake.search.tasks import PARTS
from lpes_bake.search.units import TEXT, Result, Unit
from lpes_bake.selection import SHARES

if TYPE_CHECKING:
    from rich.console import Console

    from lpes_bake.settings import SearchSettings

# Contexts of each task and part that are timed.
SAMPLE = 4


class Meter:
    """What units cost, as arrays (tokens, seconds): tokens are counted, seconds measured on a few contexts.

    Generated tokens are taken to be as many as the task allows.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.evaluator = plan, load_evaluator(plan)
        # Not the identity, as most that are scored are not.
        self.factors = (0.99,) * plan.source.num_hidden_layers

    def text(self, part: str, kind: str = "score") -> FloatArray:
        """One candidate on the short text of a part."""
        gradient = kind == "gradient"
        stop = min(TEXT_BATCH, len(self.plan.paragraphs[part])) if gradient else 0
        weights = (1.0, 0.0) if gradient else ()
        result = self._compute(Unit(kind, part, TEXT, 0, stop, self.factors, weights=weights))
        return np.array([result.tokens, result.seconds])

    def score(self, part: str, task: int, contexts: int, *, accuracy: bool) -> FloatArray:
        """One candidate on the first contexts of a task."""
        about = self.plan.tasks[task]
        sample = min(SAMPLE, contexts)
        result = self._compute(Unit("score", part, task, 0, sample, self.factors, accuracy=accuracy))
        tokens = self.evaluator.tokens(Unit("score", part, task, 0, contexts, self.factors))
        if accuracy and about.generates:
            # The first one costs nothing: the pass that scores the answer predicts it.
            tokens += contexts * len(about.positions) * (about.max_new_tokens - 1)
        return np.array([tokens, result.seconds * contexts / sample])

    def gradient(self, task: int) -> FloatArray:
        """A minibatch of a task at most."""
        study, positions = self.plan.settings.study, len(self.plan.tasks[task].positions)
        weights = (1 / positions,) * positions
        first, batch = study.contexts, study.batches(self.plan.searched)[task]
        result = self._compute(Unit("gradient", "search", task, first, first + 1, self.factors, weights=weights))
        tokens = max(
            self.evaluator.tokens(Unit("gradient", "search", task, *study.minibatch(number, batch), self.factors))
            for number in range(study.gradient_contexts // batch)
        )
        return np.array([tokens, result.seconds * batch])

    def _compute(self, unit: Unit) -> Result:
        result = attempt(self.evaluator.compute, unit)
        if result.error is not None:
            raise InputError(f"a first batch fails with: {result.error}")
        return result


def estimate(
    model: str, settings: SearchSettings, *, revision: str | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Load the model, time a few contexts of each task, and add up the rest. Writes nothing.

    A race drops candidates early, so the totals are what the search takes at most. Bytes are on paper
    (`memory.memory_estimate`).
    """
    plan = make_plan(model, settings, revision=revision, trust_remote_code=trust_remote_code)
    meter = Meter(plan)
    study, objective = settings.study, settings.objective
    accuracy = objective.fitness == "accuracy"
    searched, everything = range(plan.searched), range(len(plan.tasks))
    nothing = np.zeros(2)

    meter.text("search")  # the first call of a process is slower
    evaluation = meter.text("search")
    evaluation += sum((meter.score("search", task, study.contexts, accuracy=accuracy) for task in searched), nothing)
    steps = settings.gradient.steps if wants_gradients(settings) else 0
    step = nothing
    if steps:
        leashed = bool(objective.leash or objective.leash_kl)
        step = sum((meter.gradient(task) for task in searched), meter.text("search", "gradient") * leashed)
    choice = sum(
        (meter.score("selection", task, settings.selection_contexts, accuracy=accuracy) for task in plan.choosing),
        # A finalist that is too dear is measured once more for each share of it that is tried.
        (1 + len(SHARES)) * meter.text("selection"),
    )
    comparison = sum(
        (meter.score("report", task, settings.report_contexts, accuracy=True) for task in everything),
        meter.text("report"),
    )
    # Whether a task is too hard is seen from scores that are needed anyway, or from a few generated answers.
    difficulty = sum(
        (
            meter.score("search", i, first_contexts(study, task), accuracy=True)
            for i, task in enumerate(plan.tasks[: plan.searched])
            if task.generates
        ),
        nothing,
    )
    trials = trials_at_most(settings)
    # The identity and the best uniform factors are finalists whatever their place; the report is of two models.
    total = (trials - steps) * evaluation + steps * step + (settings.finalists + 2) * choice + 2 * comparison
    total += difficulty
    return {
        "model": plan.source.name,
        "device": plan.settings.device,
        "dtype": plan.settings.dtype,
        "tasks": [
            {
                "title": task.title,
                "contexts": {part: len(plan.contexts[part][i]) for part in PARTS},
                "too_long": plan.too_long[i],
                "longest_prompt": longest(plan, i),
            }
            for i, task in enumerate(plan.tasks)
        ],
        "optimizer": settings.optimizer,
        "trials_at_most": trials,
        "evaluation": shown(evaluation),
        "gradient_step": shown(step) if steps else None,
        "total_at_most": shown(total),
        "memory_bytes": memory(plan, meter.evaluator.model, bool(steps)),
    }


def shown(cost: FloatArray) -> dict[str, Any]:
    """Tokens and seconds."""
    return {"tokens": int(cost[0]), "seconds": round(float(cost[1]), 2)}


def longest(plan: Plan, task: int) -> int:
    """Tokens of the longest prompt with its answer."""
    contexts = (context for part in PARTS for context in plan.contexts[part][task])
    return max(len(one.prompt) + len(one.answer) for context in contexts for one in context)


def memory(plan: Plan, model: Any, gradient: bool) -> int:
    """Bytes on the device, on paper."""
    from lpes_bake.search.memory import memory_estimate

    tokens = max(longest(plan, i) for i in range(len(plan.tasks)))
    checkpointing = plan.device.type != "cpu"
    one = memory_estimate(model.config, tokens, plan.dtype, gradient=gradient, checkpointing=checkpointing)
    # What the base model predicts of a part's short text is kept, a row of the vocabulary for each token but the first.
    predicted = max(
        sum(len(plan.tokenizer(paragraph)["input_ids"]) - 1 for paragraph in paragraphs)
        for paragraphs in plan.paragraphs.values()
    )
    return int(one + predicted * model.config.vocab_size * plan.dtype.itemsize)


def show_estimate(found: dict[str, Any], console: Console) -> None:
    """The estimate in words."""
    from lpes_bake.commands.progress import clock

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    say(f"{found['model']} on {found['device']} in {found['dtype']}, optimizer {found['optimizer']}")
    for task in found["tasks"]:
        contexts = ", ".join(f"{count} to {part}" for part, count in task["contexts"].items() if count)
        too_long = sum(task["too_long"].values())
        say(
            f"{task['title']}: contexts {contexts}; the longest prompt has {task['longest_prompt']:,} tokens"
            + (f"; {too_long} contexts are too long for the model and left out" if too_long else "")
        )
    one = found["evaluation"]
    say(f"One evaluation: {one['tokens']:,} tokens, {one['seconds']} s")
    if step := found["gradient_step"]:
        say(f"One gradient step: {step['tokens']:,} tokens, {step['seconds']} s")
    total = found["total_at_most"]
    say(
        f"At most {found['trials_at_most']} trials and {total['tokens']:,} tokens, {clock(total['seconds'])} in all; "
        "a race ends most trials early"
    )
    say(f"Memory: about {found['memory_bytes'] / 1e9:.3g} GB")
    say("Nothing was written.")
