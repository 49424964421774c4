"""What a search maximises: the fitness over gold positions and tasks, less the price of drift.

score = Σ_t w_t · v_t − leash · (max(0, damage) + STEEP · max(0, damage − max_damage)) − leash_kl · KL

v_t: the fitness in task t, averaged over contexts, then aggregated over gold positions. w_t: 1 for a
single task, so that the score is in the fitness's own units. Of several, each log-probability counts by
its change relative to the model's own (w_t ∝ 1 / |v_t of the identity|), for a hard task's nats are many;
accuracies and probabilities count equally; on top comes what the user says that each counts. damage: what
short plain text loses in log-probability a token against the identity; KL: how far its next-token
distributions moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lpes_bake.search.errors import InputError
from lpes_bake.search.units import Result

FITNESS = ("logprob", "probability", "accuracy")
OVER = ("mean", "worst", "mean-spread")

# In nats a token. A task that the model has all but solved has next to nothing to gain: without this
# least value, the noise in it would outweigh every other task.
LEAST_VALUE = 0.1

# How many times as dear damage gets beyond max_damage, where a candidate could not win: dear enough that no gain seen
# on real models pays for it, and still a slope that leads back.
STEEP = 20.0

# A gradient of a task is nothing beside the longest where it is no longer than this share of it.
NEGLIGIBLE = 0.01

# How fast the price that gradients see rises, in leashes a step for a nat of damage beyond max_damage. A price that
# jumps at the limit as the score's does would throw Adam about; this one comes to where the limit is just met.
PRICE_RATE = 50.0

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Objective:
    """How results become one number, higher is better. Values are arrays (contexts, positions), one a task."""

    fitness: str = field(
        default="logprob",
        metadata={
            "help": "What is maximised: the mean log-probability of the answer's tokens; probability, the answer's "
            "whole (expected accuracy); or accuracy.",
            "choices": FITNESS,
        },
    )
    over: str = field(
        default="mean",
        metadata={"help": "Of the gold positions: their mean, the worst, or mean minus spread.", "choices": OVER},
    )
    task_weights: tuple[float, ...] = field(
        default=(),
        metadata={
            "help": "What each --task counts, a number for each with commas: with 2,1 a gain of 1 % in the first is "
            "worth one of 2 % in the second.",
            "unset": "all count the same",
        },
    )
    leash: float = field(
        default=1.0, metadata={"help": "Price of a nat a token that short plain text loses, in units of fitness."}
    )
    max_damage: float = field(
        default=0.005, metadata={"help": "Most that the winner may cost on short plain text, in nats a token."}
    )
    leash_kl: float = field(
        default=0.0, metadata={"help": "Price of a nat a token of KL from the base model on short plain text."}
    )

    def __post_init__(self) -> None:
        for name, known in (("fitness", FITNESS), ("over", OVER)):
            if getattr(self, name) not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}")
        for name in ("leash", "max_damage", "leash_kl"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if not all(0 < weight < math.inf for weight in self.task_weights):
            raise InputError(f"task_weights is {','.join(map(str, self.task_weights))!r}; give positive numbers")

    @property
    def largest(self) -> float:
        """What no value can exceed: log 1, or all right."""
        return 0.0 if self.fitness == "logprob" else 1.0

    def values(self, result: Result) -> FloatArray:
        """(contexts, positions) of the fitness. ValueError for accuracy that was not asked for."""
        if self.fitness == "logprob":
            return np.array(result.logprob, dtype=np.float64)
        if self.fitness == "probability":
            return np.array(result.probability, dtype=np.float64)
        if any(right is None for row in result.exact for right in row):
            raise ValueError("the fitness is accuracy, but the unit was computed without it")
        return np.array(result.exact, dtype=np.float64)

    def shares(self, tasks: int) -> tuple[float, ...]:
        """What each of so many tasks counts, 1 on average. Raises InputError unless task_weights are that many."""
        weights = self.task_weights or (1.0,) * tasks
        if len(weights) != tasks:
            raise InputError(
                f"task_weights has {len(weights)} number{'s' * (len(weights) > 1)} for {tasks} "
                f"task{'s' * (tasks > 1)}; give one for each --task"
            )
        return tuple(weight * tasks / sum(weights) for weight in weights)

    def weights(self, identity: Sequence[FloatArray]) -> tuple[float, ...]:
        """w_t of each task, Σ = 1, from the identity's values."""
        if self.fitness == "logprob":
            sizes = [max(LEAST_VALUE, abs(float(self.aggregate(values.mean(0))))) for values in identity]
        else:
            sizes = [1.0] * len(identity)
        worth = [share / size for share, size in zip(self.shares(len(sizes)), sizes, strict=True)]
        return tuple(one / sum(worth) for one in worth)

    def aggregate(self, by_position: FloatArray) -> FloatArray:
        """(…, positions) → (…): the mean, the worst, or mean − (best − worst)."""
        if self.over == "mean":
            return np.asarray(by_position.mean(-1))
        if self.over == "worst":
            return np.asarray(by_position.min(-1))
        return np.asarray(by_position.mean(-1) - by_position.max(-1) + by_position.min(-1))

    def penalty(self, damage: float, kl: float) -> float:
        """The price of drift, 0 or more; both arguments in nats a token."""
        beyond = max(0.0, damage - self.max_damage)
        return self.leash * (max(0.0, damage) + STEEP * beyond) + self.leash_kl * kl

    def next_price(self, price: float, damage: float) -> float:
        """The price of damage for the next gradient step: it rises while the limit is exceeded, and falls again, but
        never below the leash (dual ascent on the constraint damage ≤ max_damage)."""
        return max(self.leash, price + PRICE_RATE * self.leash * (damage - self.max_damage))

    def score(self, values: Sequence[FloatArray], weights: Sequence[float], penalty: float) -> float:
        """The score on the contexts at hand."""
        pairs = zip(weights, values, strict=True)
        return sum(weight * float(self.aggregate(each.mean(0))) for weight, each in pairs) - penalty

    def bound(self, values: Sequence[FloatArray], weights: Sequence[float], penalty: float, contexts: int) -> float:
        """The most that the score can come to on `contexts` contexts, of which the values hold the first."""
        total = 0.0
        for weight, seen in zip(weights, values, strict=True):
            by_position = (seen.sum(0) + (contexts - len(seen)) * self.largest) / contexts
            # mean − (best − worst) never exceeds the worst, and the worst is largest where all are.
            total += weight * float(by_position.mean() if self.over == "mean" else by_position.min())
        return total - penalty

    def position_weights(self, values: FloatArray) -> tuple[float, ...]:
        """(positions,): a subgradient of the aggregate at the means of these values; it sums to 1."""
        by_position = values.mean(0)
        count = len(by_position)
        if self.over == "mean":
            return (1 / count,) * count
        weights = np.zeros(count) if self.over == "worst" else np.full(count, 1 / count)
        weights[by_position.argmin()] += 1
        if self.over == "mean-spread":
            weights[by_position.argmax()] -= 1
        return tuple(weights.tolist())


def equally_long(gradients: Sequence[FloatArray]) -> list[FloatArray]:
    """Gradients of tasks, each (layers,), shortened to the length of the shortest that is not NEGLIGIBLE.

    Answers of many nats have long gradients that differ from context to context far more than they have in common:
    on minibatches, their noise would drown what the other tasks say. A task that is all but solved has next to none,
    and leaves the others as they are: shortened to it, all would be drowned by the price of damage.
    """
    lengths = [float(np.linalg.norm(gradient)) for gradient in gradients]
    shortest = min((length for length in lengths if length > NEGLIGIBLE * max(lengths)), default=0.0)
    return [
        gradient * min(1.0, shortest / (length or 1.0)) for gradient, length in zip(gradients, lengths, strict=True)
    ]
