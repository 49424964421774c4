"""The study: asks an optimizer for candidates, scores them in a race, and tells what came of them.

Scores come from contexts 0 … contexts − 1 of the search's part. Gradients come from those behind
them, a minibatch a step, so that the scores which stop the climb early are of questions that it did
not climb on. All work goes through the ledger, so a study that was killed is simply run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from lpes_bake.search.curve import Points
from lpes_bake.search.errors import InputError
from lpes_bake.search.ledger import Ledger, LimitReached
from lpes_bake.search.objective import Objective, equally_long
from lpes_bake.search.optimizer import Individual, Optimizer, Outcome, Scored
from lpes_bake.search.racing import RACES, Entrant, Race
from lpes_bake.search.units import TEXT, Factors, Unit

# So many failures one after the other are not bad luck with some factors: something is broken.
FAILURES_IN_A_ROW = 10


# Paragraphs in a gradient's minibatch, and in each of its units, so that one takes about as long as a context.
TEXT_BATCH, TEXT_UNIT = 16, 4


class StudyStopped(RuntimeError):
    """The study cannot go on. The message says why, in one line."""


@dataclass(frozen=True)
class StudySettings:
    """How many contexts candidates see, and when they see no more."""

    contexts: int = field(default=67, metadata={"help": "Contexts of each task that candidates are scored on."})
    gradient_contexts: int = field(
        default=64, metadata={"help": "Further contexts of each task, for the gradient's minibatches alone."}
    )
    gradient_batch: tuple[int, ...] = field(
        # Contexts pull in different directions: the mean of two is mostly noise (`benchmarks/search_cost.py`).
        default=(8,),
        metadata={
            "help": "Contexts in a minibatch: one number for every task, or one for each with commas, so that tasks "
            "with short contexts can have more."
        },
    )
    race: str = field(
        default="probable",
        metadata={
            "help": "Drop a candidate early when it very probably does not reach the parents, when it provably "
            "cannot (exact), or never (off).",
            "choices": RACES,
        },
    )
    first_block: int = field(default=8, metadata={"help": "Contexts that every candidate in a race sees."})

    def __post_init__(self) -> None:
        for name in ("contexts", "first_block"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if min(self.gradient_batch, default=0) < 1:
            given = ",".join(map(str, self.gradient_batch))
            raise InputError(f"gradient_batch is {given!r}; it must be numbers of at least 1")
        if self.gradient_contexts and self.gradient_contexts < max(self.gradient_batch):
            raise InputError(
                f"gradient_contexts is {self.gradient_contexts}, less than one minibatch (gradient_batch) of "
                f"{max(self.gradient_batch)}; give 0, or at least that many"
            )
        if self.race not in RACES:
            raise InputError(f"race must be one of {', '.join(RACES)}; got {self.race!r}")

    def batches(self, tasks: int) -> tuple[int, ...]:
        """The size of a minibatch of each of so many tasks. Raises InputError unless they are that many."""
        if len(self.gradient_batch) not in (1, tasks):
            raise InputError(
                f"gradient_batch has {len(self.gradient_batch)} numbers for {tasks} task{'s' * (tasks > 1)}; give one "
                "for all, or one for each"
            )
        return self.gradient_batch * (tasks if len(self.gradient_batch) == 1 else 1)

    def minibatch(self, number: int, size: int) -> tuple[int, int]:
        """(start, stop) of a task's minibatch: one behind the other, and from the first again when none is left.

        All are of one size; contexts that are too few to be another one are left out.
        """
        start = self.contexts + number % (self.gradient_contexts // size) * size
        return start, start + size


@dataclass(frozen=True)
class Trial:
    """One candidate that was scored, or one gradient that was computed."""

    number: int
    generation: int
    factors: Factors
    points: Points | None
    gradient: bool
    score: float | None
    """None when it failed. Of a gradient, the score on its minibatch."""
    complete: bool
    """Whether it was scored on all contexts; where not, the score is an estimate."""
    contexts: int
    damage: float
    kl: float
    penalty: float
    """What of the score drift has taken."""
    tokens: int
    seconds: float
    error: str | None
    replayed: bool


@dataclass(frozen=True)
class StudyResult:
    """How a study ended."""

    ranking: list[Scored]
    """All that were scored on all contexts, best first; the identity is among them, and first of its equals."""
    complete: dict[Factors, Entrant]
    """What is known of each of these: values, damage, KL."""
    task_weights: tuple[float, ...]
    trials: int
    failed: int
    dropped: int
    """Candidates that the race, or a limit, did not let see all contexts."""
    evaluations: int
    """Distinct candidates, those of gradients included."""
    tokens: int
    convergence: list[tuple[int, float]]
    """(tokens so far, best score so far), a pair for each new best, and one for the end."""
    ended: str


class Study:
    """Runs an optimizer to its end, or to a limit.

    layers: decoder layers of the model. tasks: how many the ledger's units can be of. on_trial is called
    for each trial, replayed ones included, in an order that does not depend on kills and processes.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        ledger: Ledger,
        objective: Objective,
        settings: StudySettings,
        *,
        layers: int,
        tasks: int = 1,
        on_trial: Callable[[Trial], None] | None = None,
    ) -> None:
        self.optimizer, self.ledger, self.objective, self.settings = optimizer, ledger, objective, settings
        self.identity: Factors = (1.0,) * layers
        self.tasks, self.on_trial = tasks, on_trial
        self._batches = settings.batches(tasks)
        self._limit: str | None = None
        self._price = objective.leash
        self._trials = self._failed = self._dropped = self._minibatches = 0
        self._failing: list[Factors] = []
        self._convergence: list[tuple[int, float]] = []

    def run(self) -> StudyResult:
        """Ask, score, tell until the optimizer has ended or a limit is reached.

        Raises StudyStopped when the identity cannot be scored, or FAILURES_IN_A_ROW trials in a row fail;
        run again with the same journal, it tries those again. InputError when the optimizer wants
        gradients and the settings leave no contexts for them.
        """
        race = self._start()
        while self._limit is None and (asked := self.optimizer.ask()):
            self.optimizer.tell(
                self._gradients(race, asked) if self.optimizer.wants_gradient else self._scores(race, asked)
            )
            self._note_best()
        ended = self._limit or self.optimizer.ended
        assert ended is not None
        ranking = self._ranking(race)
        self._convergence.append((self.ledger.tokens, ranking[0].score))
        return StudyResult(
            ranking=ranking,
            complete=race.complete,
            task_weights=race.weights,
            trials=self._trials,
            failed=self._failed,
            dropped=self._dropped,
            evaluations=self.ledger.evaluations,
            tokens=self.ledger.tokens,
            convergence=self._convergence,
            ended=ended,
        )

    def _start(self) -> Race:
        """The race, with the identity scored."""
        try:
            race = Race(
                self.ledger,
                self.objective,
                layers=len(self.identity),
                tasks=self.tasks,
                contexts=self.settings.contexts,
                mode=self.settings.race,
                first_block=self.settings.first_block,
            )
        except LimitReached as limit:
            raise StudyStopped(
                f"{limit.reason}, before the model itself (all factors 1) was scored: it must be larger"
            ) from limit
        if race.identity.score is None:
            self.ledger.forget([self.identity])
            raise StudyStopped(f"the model itself (all factors 1) cannot be scored: {race.identity.error}")
        self._convergence.append((self.ledger.tokens, race.identity.score))
        return race

    def _scores(self, race: Race, asked: Sequence[Individual]) -> list[Outcome]:
        entrants = race.run([individual.factors for individual in asked], self.optimizer.parents)
        self._limit = race.limit
        for individual, entrant in zip(asked, entrants, strict=True):
            self._dropped += entrant.error is None and entrant.started and not entrant.complete
            self._note_trial(individual, entrant)
        return [Outcome(entrant.score, entrant.complete) for entrant in entrants]

    def _gradients(self, race: Race, asked: Sequence[Individual]) -> list[Outcome]:
        """d score / d factor on the next minibatches, the same ones for all that were asked.

        The gradient is that of the log-probability, whatever the fitness: accuracy has none. The leash pulls
        also where short text has not lost anything yet, for it is cheaper to stay away from damage than to come
        back, and harder from step to step while the damage is beyond its limit. Over the worst position, and for
        mean − spread, the gradient is that of the positions which are worst and best for the best candidate so
        far.
        """
        if not self.settings.gradient_contexts:
            raise InputError(
                f"the optimizer wants gradients, but gradient_contexts is 0; give at least {max(self._batches)}"
            )
        contexts = [self.settings.minibatch(self._minibatches, size) for size in self._batches]
        paragraphs = self._text_minibatch(race.paragraphs)
        self._minibatches += 1
        best = race.complete[self._ranking(race)[0].individual.factors]
        weights = [self.objective.position_weights(values) for values in best.values]
        outcomes: list[Outcome] = []
        for individual in asked:
            units = [
                Unit("gradient", "search", task, *contexts[task], individual.factors, weights=weights[task]).split(1)
                for task in range(self.tasks)
            ]
            if self.objective.leash or self.objective.leash_kl:
                prices = (self._price, self.objective.leash_kl)
                text = Unit("gradient", "search", TEXT, *paragraphs, individual.factors, weights=prices)
                units.append(text.split(TEXT_UNIT))
            try:
                results = iter(self.ledger.results([one for own in units for one in own]))
            except LimitReached as limit:
                self._limit = limit.reason
                outcomes.append(Outcome(None))
                continue
            by_unit = [list(islice(results, len(own))) for own in units]
            entrant, whole = race.minibatch(individual.factors, units, by_unit)
            self._note_trial(individual, entrant, gradient=True)
            if entrant.error is not None:
                outcomes.append(Outcome(None))
                continue
            pulls = [
                weight * np.array(result.gradient)
                for weight, result in zip(race.weights, whole[: self.tasks], strict=True)
            ]
            shares = self.objective.shares(self.tasks)
            gradient = np.sum([share * pull for share, pull in zip(shares, equally_long(pulls), strict=True)], axis=0)
            for drift in whole[self.tasks :]:
                gradient += np.array(drift.gradient)
                self._price = self.objective.next_price(self._price, entrant.damage)
            outcomes.append(Outcome(entrant.score, complete=False, gradient=tuple(gradient.tolist())))
        return outcomes

    def _text_minibatch(self, paragraphs: int) -> tuple[int, int]:
        """The next paragraphs in the same way, from those that candidates are scored on, for there are no more."""
        size = min(TEXT_BATCH, paragraphs)
        start = self._minibatches % (paragraphs // size) * size if size else 0
        return start, start + size

    def _note_trial(self, individual: Individual, entrant: Entrant, gradient: bool = False) -> None:
        """Count and report a trial, unless a limit came before it."""
        if not entrant.started:
            return
        trial = Trial(
            number=self._trials,
            generation=self.optimizer.generation,
            factors=individual.factors,
            points=individual.points,
            gradient=gradient,
            score=entrant.score,
            complete=entrant.complete,
            contexts=entrant.contexts,
            damage=entrant.damage,
            kl=entrant.kl,
            penalty=entrant.penalty,
            tokens=entrant.tokens,
            seconds=round(entrant.seconds, 3),
            error=entrant.error,
            replayed=entrant.replayed,
        )
        self._trials += 1
        if self.on_trial is not None:
            self.on_trial(trial)
        if trial.error is None:
            self._failing.clear()
            return
        self._failed += 1
        self._failing.append(trial.factors)
        if len(self._failing) >= FAILURES_IN_A_ROW:
            self.ledger.forget(self._failing)
            raise StudyStopped(f"{FAILURES_IN_A_ROW} trials in a row failed, the last with: {trial.error}")

    def _note_best(self) -> None:
        ranking = self.optimizer.ranking()
        if ranking and ranking[0].score > self._convergence[-1][1]:
            self._convergence.append((self.ledger.tokens, ranking[0].score))

    def _ranking(self, race: Race) -> list[Scored]:
        """The optimizer's ranking with the identity in it, which a limit can keep the optimizer from hearing of."""
        assert race.identity.score is not None
        ranking = self.optimizer.ranking()
        if all(one.individual.factors != self.identity for one in ranking):
            ranking = [Scored(Individual(self.identity), race.identity.score), *ranking]
        return sorted(ranking, key=lambda one: -one.score)
