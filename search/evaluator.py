"""Computes units of work with a loaded model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lpes_bake.search.prompts import Encoded
from lpes_bake.search.scoring import Scorer, Scores
from lpes_bake.search.short_text import Drift, TextScores
from lpes_bake.search.tasks import Task
from lpes_bake.search.units import TEXT, Result, Unit


class Evaluator:
    """Holds the model, its questions and its paragraphs; `compute` is deterministic given these."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        tasks: Sequence[Task],
        contexts: Mapping[str, Sequence[Sequence[Sequence[Encoded]]]],
        paragraphs: Mapping[str, Sequence[str]],
        *,
        batch_size: int | None = None,
        checkpointing: bool | None = None,
    ) -> None:
        """contexts: of each part, a list a task, of contexts as `Scorer` takes them. paragraphs: of each part.

        batch_size, checkpointing: as for `Scorer`.
        """
        self.model, self.tokenizer, self.tasks = model, tokenizer, tasks
        self.contexts, self.paragraphs = contexts, paragraphs
        self.batch_size, self.checkpointing = batch_size, checkpointing
        self._scorers: dict[tuple[str, int], Scorer] = {}
        self._drifts: dict[str, Drift] = {}

    def compute(self, unit: Unit) -> Result:
        """What the unit comes to. What goes wrong is for `ledger.attempt` to catch."""
        started = time.monotonic()
        result = self._text(unit) if unit.task == TEXT else self._task(unit)
        return replace(result, seconds=time.monotonic() - started)

    def tokens(self, unit: Unit) -> int:
        """Tokens that a unit of a task takes through the model; generated ones not counted."""
        return self._scorer(unit.part, unit.task).tokens(unit.start, unit.stop, gradient=unit.kind == "gradient")

    def _task(self, unit: Unit) -> Result:
        scorer = self._scorer(unit.part, unit.task)
        gradient: list[float] = []
        if unit.kind == "gradient":
            scores, values = scorer.gradient(unit.factors, unit.start, unit.stop, unit.weights)
            gradient = values.tolist()
        else:
            scores = scorer.score(unit.factors, unit.start, unit.stop, unit.accuracy)
        return Result(
            logprob=scores.logprob.tolist(),
            probability=scores.probability.tolist(),
            exact=_exact(scores),
            gradient=gradient,
            tokens=scores.tokens,
        )

    def _text(self, unit: Unit) -> Result:
        drift = self._drift(unit.part)
        gradient = np.zeros(0)
        scores: TextScores
        if unit.kind == "gradient":
            scores, gradient = drift.gradient(unit.factors, unit.start, unit.stop, *unit.weights)
        else:
            scores = drift.measure(unit.factors)
        return Result(
            logprob=scores.logprob[:, None].tolist(),
            kl=scores.kl.tolist(),
            gradient=gradient.tolist(),
            tokens=scores.tokens,
        )

    def _scorer(self, part: str, task: int) -> Scorer:
        if (part, task) not in self._scorers:
            self._scorers[part, task] = Scorer(
                self.model,
                self.tokenizer,
                self.tasks[task],
                self.contexts[part][task],
                batch_size=self.batch_size,
                checkpointing=self.checkpointing,
            )
        return self._scorers[part, task]

    def _drift(self, part: str) -> Drift:
        if part not in self._drifts:
            # One at a time, and the last one goes before the next one comes: each keeps the base model's predictions.
            self._drifts.clear()
            self._drifts[part] = Drift(
                self.model, self.tokenizer, self.paragraphs[part], checkpointing=self.checkpointing
            )
        return self._drifts[part]


def _exact(scores: Scores) -> list[list[bool | None]]:
    """NaN, where nothing was generated, as None."""
    return [[None if np.isnan(value) else bool(value) for value in row] for row in scores.exact]
