"""What must hold for the evaluator: units come to what scorer and drift say, and what goes wrong leaves no trace."""

from __future__ import annotations

import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lpes_bake.search.errors import InputError
from lpes_bake.search.evaluator import Evaluator
from lpes_bake.search.kv_retrieval import KVRetrieval
from lpes_bake.search.ledger import attempt
from lpes_bake.search.models import load_scaled
from lpes_bake.search.prompts import take
from lpes_bake.search.scoring import Scorer
from lpes_bake.search.short_text import PARAGRAPHS, Drift
from lpes_bake.search.tasks import PARTS, Task
from lpes_bake.search.units import TEXT, Result, Unit
from tests.test_scoring import Moved, tokenizer_of

TASKS: tuple[Task, ...] = (KVRetrieval(pairs=4, key_width=3), Moved())
TEXTS = {part: PARAGRAPHS[2 * i : 2 * i + 2] for i, part in enumerate(PARTS)}
FACTORS = (0.5, 1.3, 0.8, 2.0)
WEIGHTS = (0.5, 0.25, 0.25)


@pytest.fixture
def evaluator(tiny_llama: Path) -> Evaluator:
    tokenizer = tokenizer_of(tiny_llama)
    contexts = {part: [take(task, part, 0, 3, tokenizer, "plain", 8192).contexts for task in TASKS] for part in PARTS}
    return Evaluator(load_scaled(tiny_llama, dtype=torch.float32), tokenizer, TASKS, contexts, TEXTS)


def scorer_of(evaluator: Evaluator, part: str, task: int) -> Scorer:
    return Scorer(evaluator.model, evaluator.tokenizer, TASKS[task], evaluator.contexts[part][task])


def test_score_units_are_what_the_scorer_says(evaluator: Evaluator) -> None:
    for part, task, start, stop in (("search", 0, 0, 2), ("report", 1, 1, 3), ("selection", 0, 2, 3)):
        result = evaluator.compute(Unit("score", part, task, start, stop, FACTORS))
        scores = scorer_of(evaluator, part, task).score(FACTORS, start, stop)
        assert result.error is None
        assert result.logprob == scores.logprob.tolist()
        assert result.probability == scores.probability.tolist()
        if task == 0:
            assert result.exact == scores.exact.astype(bool).tolist()
        else:
            assert result.exact == [[None] * 3] * 2
        assert result.tokens == scores.tokens
        assert result.seconds > 0
        assert not (result.gradient or result.kl)


def test_accuracy_of_a_task_that_generates_is_there_when_it_is_asked_for(evaluator: Evaluator) -> None:
    result = evaluator.compute(Unit("score", "search", 1, 0, 3, FACTORS, accuracy=True))
    scores = scorer_of(evaluator, "search", 1).score(FACTORS, 0, 3, accuracy=True)
    assert result.exact == scores.exact.astype(bool).tolist()
    assert result.tokens == scores.tokens


def test_predictions_of_one_part_are_let_go_before_those_of_the_next_are_made(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[Drift]] = []

    def drift(*args: Any, **options: Any) -> Drift:
        assert all(one() is None for one in kept)
        made = Drift(*args, **options)
        kept.append(weakref.ref(made))
        return made

    monkeypatch.setattr("lpes_bake.search.evaluator.Drift", drift)
    for part in PARTS:
        evaluator.compute(Unit("score", part, TEXT, 0, 0, FACTORS))
    assert len(kept) == len(PARTS)


def test_gradient_units_are_what_the_scorer_says(evaluator: Evaluator) -> None:
    result = evaluator.compute(Unit("gradient", "search", 1, 0, 2, FACTORS, weights=WEIGHTS))
    scores, gradient = scorer_of(evaluator, "search", 1).gradient(FACTORS, 0, 2, WEIGHTS)
    assert result.gradient == gradient.tolist()
    assert result.logprob == scores.logprob.tolist()
    assert result.exact == [[None] * 3] * 2


def test_text_units_are_what_drift_says(evaluator: Evaluator) -> None:
    for part in ("search", "report"):
        drift = Drift(evaluator.model, evaluator.tokenizer, TEXTS[part])
        result = evaluator.compute(Unit("score", part, TEXT, 0, 0, FACTORS))
        scores = drift.measure(FACTORS)
        assert result.logprob == [[value] for value in scores.logprob.tolist()]
        assert result.kl == scores.kl.tolist()
        assert result.tokens == scores.tokens
        assert not (result.probability or result.exact or result.gradient)
        result = evaluator.compute(Unit("gradient", part, TEXT, 1, 2, FACTORS, weights=(2.0, 0.5)))
        scores, gradient = drift.gradient(FACTORS, 1, 2, 2.0, 0.5)
        assert result.logprob == [[value] for value in scores.logprob.tolist()]
        assert result.gradient == gradient.tolist()


def test_units_do_not_depend_on_their_order(evaluator: Evaluator) -> None:
    units = [
        Unit("score", "search", 0, 0, 2, FACTORS),
        Unit("score", "search", TEXT, 0, 0, FACTORS),
        Unit("gradient", "search", 0, 0, 2, (1.1, 0.9, 1.0, 1.2), weights=WEIGHTS),
        Unit("score", "report", TEXT, 0, 0, FACTORS),
        Unit("score", "search", 1, 0, 2, FACTORS, accuracy=True),
    ]
    first = {unit: replace(evaluator.compute(unit), seconds=0) for unit in units}
    assert {unit: replace(evaluator.compute(unit), seconds=0) for unit in reversed(units)} == first
    # And survive the journal.
    for result in first.values():
        assert Result.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("device-side assert triggered"), RuntimeError),
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), InputError),
        (ZeroDivisionError(), ZeroDivisionError),
    ],
    ids=["runtime", "memory", "other"],
)
@pytest.mark.parametrize("kind", ["score", "gradient"])
def test_after_a_unit_that_throws_the_next_one_is_right(
    kind: str, error: Exception, expected: type[Exception], evaluator: Evaluator
) -> None:
    unit = Unit(kind, "search", 0, 0, 2, FACTORS, weights=WEIGHTS if kind == "gradient" else ())
    before = evaluator.compute(unit)

    def fail(module: Any, args: Any) -> None:
        raise error

    # In the middle of the model, when part of the work is done.
    handle = evaluator.model.base_model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(expected):
        evaluator.compute(unit)
    handle.remove()
    assert evaluator.compute(unit).logprob == before.logprob
    assert evaluator.compute(unit).gradient == before.gradient


def test_a_unit_that_does_not_exist_is_a_failed_result(evaluator: Evaluator) -> None:
    result = attempt(evaluator.compute, Unit("score", "search", 0, 2, 5, FACTORS))
    assert result.error == "ValueError: contexts 2 to 5 were asked for, but there are 3"
    result = attempt(evaluator.compute, Unit("score", "search", 0, 0, 1, (1.0, 2.0, -1.0, 1.0)))
    assert result.error is not None and "got -1.0 for layer 2" in result.error


@pytest.mark.parametrize("task", [0, TEXT])
@pytest.mark.parametrize("kind", ["score", "gradient"])
def test_nan_is_a_failed_result(kind: str, task: int, evaluator: Evaluator) -> None:
    with torch.no_grad():
        evaluator.model.base_model.layers[1].mlp.up_proj.weight.fill_(math.nan)
    weights = (1.0, 0.0) if task == TEXT else WEIGHTS
    result = attempt(evaluator.compute, Unit(kind, "search", task, 0, 2, FACTORS, weights=weights))
    assert result.error == "the model gave NaN or infinity"
    assert result.tokens > 0


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_interruptions_get_through(interruption: type[BaseException], evaluator: Evaluator) -> None:
    def interrupt(module: Any, args: Any) -> None:
        raise interruption

    evaluator.model.base_model.register_forward_pre_hook(interrupt)
    with pytest.raises(interruption):
        evaluator.compute(Unit("score", "search", 0, 0, 2, FACTORS))
