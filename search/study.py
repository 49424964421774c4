"""The study: asks a sampler for factors, evaluates them, tells the scores, and keeps a journal.

A study can be killed at any moment and run again with the same journal: the sampler is deterministic,
so it asks for the same trials again, and those that the journal knows are not evaluated a second time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lpes_bake.search.errors import InputError
from lpes_bake.search.genetic import GeneticSearch, Individual, Scored
from lpes_bake.search.journal import Journal

JOURNAL_FORMAT = 1

# So many failures one after the other are not bad luck with some factors: something is broken.
FAILURES_IN_A_ROW = 10

Factors = tuple[float, ...]


class StudyStopped(RuntimeError):
    """The study cannot go on. The message says why, in one line."""


@dataclass(frozen=True)
class Trial:
    """One evaluation. score is None when it failed, and error says why."""

    number: int
    generation: int
    individual: Individual
    score: float | None
    error: str | None
    seconds: float
    replayed: bool


@dataclass(frozen=True)
class StudyResult:
    """How a study ended: its best individual, its first one (the identity), and the reason."""

    best: Scored
    trials: int
    failed: int
    ended: str


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Each setting that differs as "name: old → new", nested ones with dots."""
    found: list[str] = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name}: {before!r} → {after!r}")
    return found


class Study:
    """Runs a sampler to its end.

    evaluate: factors → score, higher is better. What it raises, and a score that is not finite, makes
    the trial fail; the study goes on. settings: JSON values that identify the run; a journal that was
    written under other settings is refused with an InputError that names what differs.
    on_trial is called after each trial, replayed ones included.
    """

    def __init__(
        self,
        sampler: GeneticSearch,
        evaluate: Callable[[Factors], float],
        journal: Journal,
        settings: Mapping[str, Any],
        on_trial: Callable[[Trial], None] | None = None,
    ) -> None:
        self.sampler, self.evaluate, self.journal, self.on_trial = sampler, evaluate, journal, on_trial
        check_header(journal, settings)
        # A later record of a trial stands for an earlier one: it was tried again.
        self._known = {record["trial"]: record for record in journal.records[1:]}
        self._forget_failed_end()
        self._trials = self._failed = self._in_a_row = 0

    def run(self) -> StudyResult:
        """Ask, evaluate, tell until the sampler has ended. Raises StudyStopped when there is no result."""
        last_error = None
        while asked := self.sampler.ask():
            scores: list[float | None] = []
            for individual in asked:
                trial = self._replay(individual) or self._evaluate(individual)
                scores.append(trial.score)
                self._trials += 1
                if trial.score is None:
                    self._failed += 1
                    last_error = trial.error
                self._in_a_row = self._in_a_row + 1 if trial.score is None else 0
                if self.on_trial is not None:
                    self.on_trial(trial)
                if self._in_a_row >= FAILURES_IN_A_ROW:
                    raise StudyStopped(f"{FAILURES_IN_A_ROW} evaluations in a row failed, the last with: {last_error}")
            self.sampler.tell(scores)
        best, ended = self.sampler.best, self.sampler.ended
        assert ended is not None
        if best is None:
            raise StudyStopped(f"{ended}; the last failed with: {last_error}")
        return StudyResult(best, self._trials, self._failed, ended)

    def _replay(self, individual: Individual) -> Trial | None:
        """The next trial as the journal has it, if it has it."""
        record = self._known.get(self._trials)
        if record is None:
            return None
        if [list(point) for point in individual.points] != record["points"]:
            raise InputError(
                f"trial {self._trials} of {self.journal.path} has other control points than the search asks for now: "
                "the journal is from another version of lpes-bake or numpy; start a new run"
            )
        return Trial(
            self._trials,
            record["generation"],
            individual,
            record["score"],
            record["error"],
            record["seconds"],
            replayed=True,
        )

    def _evaluate(self, individual: Individual) -> Trial:
        """Evaluate and journal the next trial."""
        started = time.monotonic()
        score, error = None, None
        try:
            score = float(self.evaluate(individual.factors))
            if not math.isfinite(score):
                score, error = None, f"the score is {score}"
        except Exception as problem:
            # Out of memory, a solver's error, …: bad for these factors, no reason to lose hours of work.
            first_line = (str(problem).strip() or "no message").splitlines()[0]
            error = f"{type(problem).__name__}: {first_line}"
        trial = Trial(
            self._trials,
            self.sampler.generation,
            individual,
            score,
            error,
            round(time.monotonic() - started, 3),
            replayed=False,
        )
        self.journal.append(
            {
                "trial": trial.number,
                "generation": trial.generation,
                "points": [list(point) for point in individual.points],
                "factors": list(individual.factors),
                "score": score,
                "error": error,
                "seconds": trial.seconds,
            }
        )
        return trial

    def _forget_failed_end(self) -> None:
        """Where failures stopped the study, try those trials again: the cause may be mended."""
        end = max(self._known, default=-1)
        start = end
        while start >= 0 and start in self._known and self._known[start]["score"] is None:
            start -= 1
        if end - start >= FAILURES_IN_A_ROW or start < 0:
            for number in range(start + 1, end + 1):
                del self._known[number]


def check_header(journal: Journal, settings: Mapping[str, Any]) -> None:
    """Write the header of a new journal, or compare an old one's. Raises InputError when it differs."""
    header = {"journal": JOURNAL_FORMAT, "settings": dict(settings)}
    if not journal.records:
        journal.append(header)
        return
    first = journal.records[0]
    if first.get("journal") != JOURNAL_FORMAT:
        raise InputError(
            f"{journal.path} has journal format {first.get('journal')!r}, this version reads {JOURNAL_FORMAT}"
        )
    if different := differences(first["settings"], settings):
        raise InputError(
            f"{journal.path} belongs to a run with other settings ({'; '.join(different)}); "
            "give the same ones, or a new output directory"
        )
