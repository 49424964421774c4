"""A formula in the place of a model, for what must hold of a search whatever it searches: results of units in
microseconds, smooth in the factors, different from context to context, the same in every process."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lpes_bake.search.ledger import Ledger, open_journal
from lpes_bake.search.objective import Objective
from lpes_bake.search.processes import Single
from lpes_bake.search.units import TEXT, Factors, Result, Unit

LAYERS = 6

# Here short text suffers more than that of real models: the limit of damage stays out of the way.
OBJECTIVE = Objective(max_damage=9.0)
PARAGRAPHS = 40
# Of each task and layer, the best factor; of each task and gold position, what no factor mends.
TARGETS = (np.linspace(1.04, 0.82, LAYERS), np.linspace(0.9, 0.8, LAYERS))
FLOORS = (np.array([0.2, 0.6, 0.4]), np.array([2.0, 3.0, 2.5, 2.2]))
TOKENS = 10
CONTEXTS = 128


@dataclass(frozen=True)
class Landscape:
    """logprob = −(floor of the position + curvature · Σ (factor − best)²) · difficulty, lognormal by context.

    noise: how much of the difficulty (standard deviation of its logarithm) changes with the factors, and so
    does not cancel between two candidates. seconds: how long a unit takes.
    """

    noise: float = 0.05
    seconds: float = 0.0
    seed: int = 0

    def __call__(self, unit: Unit) -> Result:
        time.sleep(self.seconds)
        factors = np.array(unit.factors)
        if unit.task == TEXT:
            return self._text(unit, factors)
        away = factors - TARGETS[unit.task]
        loss = FLOORS[unit.task] + 4 * (away**2).sum()
        difficulty = self._difficulty(unit.part, unit.task, unit.factors)[unit.start : unit.stop]
        logprob = -difficulty * loss
        gradient: list[float] = []
        if unit.kind == "gradient":
            by_position = -difficulty.mean(0) @ np.array(unit.weights)
            gradient = (8 * away * by_position).tolist()
        return Result(
            logprob=logprob.tolist(),
            probability=np.exp(3 * logprob).tolist(),
            exact=(logprob > -0.5).tolist(),
            gradient=gradient,
            tokens=TOKENS * logprob.size,
            seconds=self.seconds,
        )

    @lru_cache(maxsize=256)  # noqa: B019 (small, and landscapes are few)
    def _difficulty(self, part: str, task: int, factors: Factors) -> NDArray[np.float64]:
        """(CONTEXTS, positions): what the loss of each question is multiplied with."""
        key, shape = [self.seed, zlib.crc32(part.encode()), task], (CONTEXTS, len(FLOORS[task]))
        shared = np.random.default_rng(key).normal(0, 0.4, shape)
        own = np.random.default_rng([*key, zlib.crc32(repr(factors).encode())]).normal(0, self.noise, shape)
        return np.exp(shared + own)

    def _text(self, unit: Unit, factors: NDArray[np.float64]) -> Result:
        scale = 0.2 * np.resize(np.arange(1, 6), PARAGRAPHS)[unit.start : unit.stop or None]
        leash, leash_kl = unit.weights or (0.0, 0.0)
        return Result(
            logprob=[[-3.2 - one * ((factors - 1) ** 2).sum()] for one in scale.tolist()],
            kl=(scale * ((factors - 1) ** 2).sum()).tolist(),
            gradient=(-2 * (leash + leash_kl) * scale.mean() * (factors - 1)).tolist() if unit.weights else [],
            tokens=TOKENS * len(scale),
            seconds=self.seconds,
        )


@contextmanager
def ledger_at(path: Path, compute: Callable[[Unit], Result], **options: Any) -> Iterator[Ledger]:
    """A ledger on the journal at `path`, which has no settings."""
    with open_journal(path, {}, Single()) as journal:
        yield Ledger(journal, compute, **options)


def score_unit(number: float, task: int = 0, start: int = 0, stop: int = 2, part: str = "search") -> Unit:
    """A unit of the uniform factors `number`."""
    return Unit("score", part, task, start, stop, (number,) * LAYERS)
