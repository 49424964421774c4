"""The race: candidates see contexts in growing blocks, and those that will not reach the parents are dropped.

All candidates see the same contexts in the same order, so that differences between them are paired.
After each block the reference is the K-th best of what was scored to the end before and what is still
running; K is how many parents the optimizer breeds from. A candidate below it leaves the race

- "exact": when the best possible values on all contexts that it has not seen would not bring it to the
  K-th best of what was scored to the end. Which are the K best, and their order, stays what it is without a race;
- "probable": also when a paired bootstrap over contexts gives it less than CHANCE to reach the reference;
- "off": never.

A candidate that was dropped is told with an estimate, the identity's score + the difference from it on
the contexts that both have seen, and can never be the best. What a candidate costs on short text is
known before the first block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np

from lpes_bake.search.ledger import Ledger, LimitReached
from lpes_bake.search.objective import FloatArray, Objective
from lpes_bake.search.units import TEXT, Factors, Result, Unit, joined

RACES = ("probable", "exact", "off")

# A candidate with less than this chance to reach the reference is dropped.
CHANCE = 0.02
RESAMPLES = 500

# Bounds are compared with sums in another order; a difference so small is none.
TOLERANCE = 1e-9


@dataclass(eq=False)
class Entrant:
    """What is known of one candidate."""

    factors: Factors
    values: list[FloatArray] = field(default_factory=list)
    """A task each, (contexts seen, positions): the objective's fitness."""
    score: float | None = None
    """On all contexts when complete, else an estimate; None when it failed, or nothing was computed."""
    complete: bool = False
    damage: float = math.nan
    """Log-probability a token that it loses on short text, in nats."""
    kl: float = math.nan
    """KL from the identity on short text, in nats a token."""
    penalty: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    replayed: bool = True
    """Nothing of it was computed by this run."""
    error: str | None = None

    @property
    def contexts(self) -> int:
        """How many contexts of each task it has seen."""
        return len(self.values[0]) if self.values else 0

    @property
    def started(self) -> bool:
        """Whether anything is known of it, be it a failure."""
        return self.error is not None or self.score is not None


class Race:
    """Scores candidates on the search's contexts, generation by generation.

    contexts: how many contexts of each of the `tasks` candidates are scored on.
    The constructor scores the identity in full: damage, the weights of tasks and all estimates are
    relative to it. Raises LimitReached when a limit is reached before that, and leaves a failure of the
    identity in `identity.error`: nothing can be raced then.
    complete: all that were scored to the end. limit: why the search must stop, once a limit was reached.
    """

    def __init__(
        self,
        ledger: Ledger,
        objective: Objective,
        *,
        layers: int,
        tasks: int,
        contexts: int,
        mode: str = "probable",
        first_block: int = 8,
    ) -> None:
        self.ledger, self.objective, self.tasks, self.contexts, self.mode = ledger, objective, tasks, contexts, mode
        self.blocks = [(0, contexts)] if mode == "off" else blocks(contexts, first_block)
        self.limit: str | None = None
        self.identity = Entrant((1.0,) * layers)
        self.complete: dict[Factors, Entrant] = {}
        units = [self._text_unit(self.identity)]
        units += [unit for block in self.blocks for unit in self._block_units(self.identity, *block)]
        text, *results = ledger.results(units)
        self._charge(self.identity, units, [text, *results])
        if self.identity.error is not None:
            return
        self._text = text
        self._take_text(self.identity, text)
        for start in range(0, len(results), tasks):
            self._take_block(self.identity, results[start : start + tasks])
        self.weights = objective.weights(self.identity.values)
        self._finish(self.identity)

    @property
    def paragraphs(self) -> int:
        """How many paragraphs damage is measured on."""
        return len(self._text.logprob)

    def run(self, candidates: Sequence[Factors], keep: int) -> list[Entrant]:
        """What came of each candidate, in their order. keep: K, how many of the best must not be dropped.

        After a limit was reached, candidates that are being scored go on as far as it lets them; one that
        was not reached has not `started`.
        """
        entrants = [self.complete.get(factors) or Entrant(factors) for factors in candidates]
        running = [entrant for entrant in entrants if not entrant.complete]
        running = self._advance(running, [[self._text_unit(entrant)] for entrant in running])
        for start, stop in self.blocks:
            running = self._drop(running, keep)
            running = self._advance(running, [self._block_units(entrant, start, stop) for entrant in running])
        for entrant in running:
            self._finish(entrant)
        for entrant in entrants:
            if entrant.error is None and not entrant.complete and not math.isnan(entrant.damage):
                entrant.score = self._standing(entrant)
        return entrants

    def minibatch(
        self, candidate: Factors, units: Sequence[Sequence[Unit]], results: Sequence[Sequence[Result]]
    ) -> tuple[Entrant, list[Result]]:
        """One candidate on gradient units: those of each task, and then, where they were computed, those of text.

        Its values, and so its score, are log-probabilities whatever the fitness: these have gradients. Also gives
        the results of the units joined, unless one has failed.
        """
        entrant = Entrant(candidate)
        for own, got in zip(units, results, strict=True):
            self._charge(entrant, own, got)
        if entrant.error is not None:
            return entrant, []
        whole = [joined(got) for got in results]
        if len(whole) > self.tasks:
            self._take_text(entrant, whole[-1], units[-1][0].start, units[-1][-1].stop)
        entrant.values = [np.array(result.logprob) for result in whole[: self.tasks]]
        entrant.score = self.objective.score(entrant.values, self.weights, entrant.penalty)
        return entrant, whole

    def _advance(self, running: list[Entrant], units: list[list[Unit]]) -> list[Entrant]:
        """Compute each one's units; those that failed or that a limit cut off run no more."""
        try:
            results = self.ledger.results([unit for own in units for unit in own])
        except LimitReached as limit:
            self.limit, results = limit.reason, limit.results
        still: list[Entrant] = []
        for entrant, own in zip(running, units, strict=True):
            got, results = results[: len(own)], results[len(own) :]
            self._charge(entrant, own, got)
            if entrant.error is not None or len(got) < len(own):
                continue
            if own[0].task == TEXT:
                self._take_text(entrant, got[0])
            else:
                self._take_block(entrant, got)
            still.append(entrant)
        return still

    def _drop(self, running: list[Entrant], keep: int) -> list[Entrant]:
        """Those that stay in the race."""
        if self.mode == "off" or not running:
            return running
        finished = sorted((self._standing(entrant) for entrant in self.complete.values()), reverse=True)
        if len(finished) >= keep:
            least = finished[keep - 1] - TOLERANCE
            running = [
                entrant
                for entrant in running
                if self.objective.bound(self._values(entrant), self.weights, entrant.penalty, self.contexts) >= least
            ]
        if self.mode == "exact" or not running or not running[0].contexts:
            return running
        best = sorted([*self.complete.values(), *running], key=lambda entrant: -self._standing(entrant))[:keep]
        if len(best) < keep:
            return running
        return [
            entrant for entrant in running if entrant in best or self._chance(entrant, reference=best[-1]) >= CHANCE
        ]

    def _chance(self, entrant: Entrant, reference: Entrant) -> float:
        """The chance that the entrant's score on all contexts is at least the reference's.

        Paired percentile bootstrap of the difference (Efron 1979). Its deviations are scaled for a sample
        of n from N contexts, √(1 − n/N): what was seen is certain; and by √(n / (n−1)), for the bootstrap
        of a mean falls short by that. Accuracy comes in steps of one question, and half a step is no
        difference: else of two that have nothing right yet, the price of drift would choose.
        """
        seen = entrant.contexts
        if seen < 2:
            return 1.0
        difference = self._score(entrant, seen) - self._score(reference, seen)
        resampled = self._resampled(entrant, seen) - self._resampled(reference, seen)
        scale = math.sqrt((1 - seen / self.contexts) * seen / (seen - 1))
        step = 1 / seen if self.objective.fitness == "accuracy" else 0.0
        return float(np.mean(difference + scale * (resampled - difference) >= -step / 2))

    def _resampled(self, entrant: Entrant, seen: int) -> FloatArray:
        """(RESAMPLES,) scores on resampled contexts, the same ones for every entrant."""
        counts = resampled_counts(seen)
        total = np.full(len(counts), -entrant.penalty)
        for weight, values in zip(self.weights, entrant.values, strict=True):
            # Not @: BLAS adds in an order, and so to last digits, that differ from machine to machine.
            means = np.einsum("rc,cp->rp", counts, values[:seen]) / seen
            total += weight * self.objective.aggregate(means)
        return total

    def _score(self, entrant: Entrant, seen: int) -> float:
        """The score on the first contexts only."""
        return self.objective.score([values[:seen] for values in entrant.values], self.weights, entrant.penalty)

    def _standing(self, entrant: Entrant) -> float:
        """The score; of one that is not complete, the identity's + the paired difference on what both have seen."""
        if entrant.complete and entrant.score is not None:
            return entrant.score
        assert self.identity.score is not None
        seen = entrant.contexts
        if not seen:
            return self.identity.score - entrant.penalty
        return self.identity.score + self._score(entrant, seen) - self._score(self.identity, seen)

    def _values(self, entrant: Entrant) -> list[FloatArray]:
        """The entrant's values; before its first block, of no contexts."""
        return entrant.values or [values[:0] for values in self.identity.values]

    def _finish(self, entrant: Entrant) -> None:
        entrant.score, entrant.complete = self._score(entrant, self.contexts), True
        self.complete[entrant.factors] = entrant

    def _text_unit(self, entrant: Entrant) -> Unit:
        return Unit("score", "search", TEXT, 0, 0, entrant.factors)

    def _block_units(self, entrant: Entrant, start: int, stop: int) -> list[Unit]:
        accuracy = self.objective.fitness == "accuracy"
        return [
            Unit("score", "search", task, start, stop, entrant.factors, accuracy=accuracy) for task in range(self.tasks)
        ]

    def _charge(self, entrant: Entrant, units: Sequence[Unit], results: Sequence[Result]) -> None:
        """Add what the units cost, and the error of the first that failed."""
        # Of the units, a limit may have cut off the last ones.
        for unit, result in zip(units, results, strict=False):
            entrant.tokens += result.tokens
            entrant.seconds += result.seconds
            entrant.replayed &= not self.ledger.computed(unit)
            entrant.error = entrant.error or result.error

    def _take_text(self, entrant: Entrant, result: Result, start: int = 0, stop: int | None = None) -> None:
        """What paragraphs start … stop − 1 say."""
        entrant.damage = float(np.mean(np.array(self._text.logprob[start:stop]) - np.array(result.logprob)))
        entrant.kl = float(np.mean(result.kl))
        entrant.penalty = self.objective.penalty(entrant.damage, entrant.kl)

    def _take_block(self, entrant: Entrant, results: Sequence[Result]) -> None:
        new = [self.objective.values(result) for result in results]
        seen = entrant.values or [values[:0] for values in new]
        entrant.values = [np.concatenate(pair) for pair in zip(seen, new, strict=True)]


def blocks(contexts: int, first: int) -> list[tuple[int, int]]:
    """(start, stop) of blocks that double what was seen: first, first, 2·first, 4·first, …"""
    stops = [min(first, contexts)]
    while stops[-1] < contexts:
        stops.append(min(2 * stops[-1], contexts))
    return list(pairwise([0, *stops]))


@cache
def resampled_counts(size: int) -> FloatArray:
    """(RESAMPLES, size): how often each of `size` contexts is in a sample of as many, drawn with replacement."""
    drawn = np.random.default_rng(size).integers(size, size=(RESAMPLES, size))
    return np.array([np.bincount(row, minlength=size) for row in drawn], dtype=np.float64)
