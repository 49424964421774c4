"""The ledger: what units came to. What the journal knows is not computed again.

It makes the whole search a deterministic program over units. A run that was killed is run again: it
asks for the same units in the same order, gets the known ones from the journal, and goes on where it
stopped, having lost the unit that was being computed. With several processes each runs the same
program; units that are missing are computed side by side, and the first process writes.

The journal's records behind its header: {"unit": …, "result": …}, and {"forget": [factors, …]} where a
run gave up on candidates that failed: their failures do not count any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lpes_bake.search.errors import InputError
from lpes_bake.search.journal import Journal, check_header
from lpes_bake.search.processes import Processes, Single
from lpes_bake.search.units import Factors, Result, Unit


@dataclass(frozen=True)
class Limits:
    """Where a search stops although it could go on. What it does not decide is what the search finds until then."""

    max_evaluations: int | None = field(
        default=None, metadata={"help": "Stop the search after so many candidates, gradient steps included."}
    )
    max_tokens: int | None = field(
        default=None, metadata={"help": "Stop the search after so many tokens have gone through the model."}
    )
    max_time: float | None = field(
        default=None, metadata={"help": "Stop the search after so many minutes; a resumed run counts anew."}
    )

    def __post_init__(self) -> None:
        for name in ("max_evaluations", "max_tokens", "max_time"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} is {value}; it must be more than 0")


class LimitReached(Exception):
    """The search may compute no more. reason: in words; results: of the units before the one that was too much."""

    def __init__(self, reason: str, results: list[Result]) -> None:
        super().__init__(reason)
        self.reason, self.results = reason, results


class Ledger:
    """Gives the results of units, from the journal or by computing them.

    compute: what it raises, and numbers that are not finite, make a failed result (`attempt`); the run goes on.
    journal: with its header; None on all processes but the first.
    tokens and evaluations count what was asked for in this process, each unit and each candidate of the
    search once, whether it was computed or known: a resumed run counts like one that was not killed.
    """

    def __init__(
        self,
        journal: Journal | None,
        compute: Callable[[Unit], Result],
        processes: Processes | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.journal, self.processes, self.limits = journal, processes or Single(), limits or Limits()
        self.tokens = 0
        self._compute = compute
        self._known: dict[Unit, Result] = {}
        self._computed: set[Unit] = set()
        self._asked: set[Unit] = set()
        self._candidates: set[Factors] = set()
        self._started = time.monotonic()
        self._out_of_time = False
        for record in self.processes.broadcast(journal.records[1:] if journal is not None else []):
            if "forget" in record:
                self._drop_failures([tuple(factors) for factors in record["forget"]])
            else:
                self._known[Unit.from_json(record["unit"])] = Result.from_json(record["result"])

    @property
    def evaluations(self) -> int:
        """How many candidates of the search were asked for."""
        return len(self._candidates)

    def computed(self, unit: Unit) -> bool:
        """Whether this run computed the unit, and did not find it in the journal."""
        return unit in self._computed

    def results(self, units: Sequence[Unit]) -> list[Result]:
        """The results of the units, in their order.

        Each that is computed is in the journal before the next one begins. Raises LimitReached before a
        unit of the search that was not asked for before, once a limit is reached.
        """
        results: list[Result] = []
        for place, unit in enumerate(units):
            if (reason := self._limit(unit)) is not None:
                raise LimitReached(reason, results)
            if unit not in self._known:
                self._compute_next(units[place:])
            result = self._known[unit]
            self._count(unit, result)
            results.append(result)
        return results

    def forget(self, candidates: Sequence[Factors]) -> None:
        """Let the failures of these candidates be tried again by the run that goes on from this journal."""
        if self.journal is not None:
            self.journal.append({"forget": [list(factors) for factors in candidates]})
        self._drop_failures(candidates)

    def _drop_failures(self, candidates: Sequence[Factors]) -> None:
        gone = set(candidates)
        self._known = {
            unit: result for unit, result in self._known.items() if result.error is None or unit.factors not in gone
        }

    def _limit(self, unit: Unit) -> str | None:
        """Why the unit is too much, if it is."""
        if unit.part != "search" or unit in self._asked:
            return None
        limits = self.limits
        if limits.max_tokens is not None and self.tokens >= limits.max_tokens:
            return f"the limit of {limits.max_tokens} tokens is reached"
        if (
            limits.max_evaluations is not None
            and self.evaluations >= limits.max_evaluations
            and unit.factors not in self._candidates
        ):
            return f"the limit of {limits.max_evaluations} evaluations is reached"
        if self._out_of_time:
            return f"the limit of {limits.max_time:g} minutes is reached"
        return None

    def _count(self, unit: Unit, result: Result) -> None:
        if unit not in self._asked:
            self._asked.add(unit)
            self.tokens += result.tokens
            if unit.part == "search":
                self._candidates.add(unit.factors)

    def _compute_next(self, units: Sequence[Unit]) -> None:
        """Compute the first of the units, which is missing, and as many missing ones as there are processes for."""
        first = units[0]
        missing = [unit for unit in dict.fromkeys(units) if unit not in self._known]
        # Processes wait for one another: beside the first go units of its kind, which take as long.
        missing.sort(key=lambda unit: (unit.task, unit.stop - unit.start) != (first.task, first.stop - first.start))
        dealt = missing[: self.processes.world_size]
        rank = self.processes.rank
        mine = (dealt[rank], attempt(self._compute, dealt[rank])) if rank < len(dealt) else None
        over = self.limits.max_time is not None and time.monotonic() - self._started >= 60 * self.limits.max_time
        everyone = self.processes.gather((mine, over))
        # One clock decides for all.
        self._out_of_time = everyone[0][1]
        done = [pair for pair, _ in everyone if pair is not None]
        if [unit for unit, _ in done] != dealt:
            raise RuntimeError("the processes of this run ask for different units; do they have the same settings?")
        for unit, result in done:
            if self.journal is not None:
                self.journal.append({"unit": unit.to_json(), "result": result.to_json()})
            self._known[unit] = result
            self._computed.add(unit)


def attempt(compute: Callable[[Unit], Result], unit: Unit) -> Result:
    """The unit's result. An exception or NaN becomes `Result.error`; only an interruption gets through."""
    started = time.monotonic()
    try:
        result = compute(unit)
    except Exception as error:
        # Out of memory, a kernel's error, …: bad for these factors, no reason to lose hours of work.
        first_line = (str(error).strip() or "no message").splitlines()[0]
        return Result(seconds=time.monotonic() - started, error=f"{type(error).__name__}: {first_line}")
    if result.finite:
        return result
    return Result(tokens=result.tokens, seconds=result.seconds, error="the model gave NaN or infinity")


@contextmanager
def open_journal(path: Path, settings: Mapping[str, Any], processes: Processes) -> Iterator[Journal | None]:
    """The journal at `path` with its header, on the first process; None on the others.

    settings: see `check_header`. What the first process cannot open, none can: all raise its InputError
    or OSError.
    """
    with ExitStack() as stack:
        journal: Journal | None = None
        problem: InputError | OSError | None = None
        if processes.rank == 0:
            try:
                journal = stack.enter_context(Journal(path))
                check_header(journal, settings)
            except (InputError, OSError) as error:
                problem = error
        problem = processes.broadcast(problem)
        if problem is not None:
            raise problem
        yield journal
