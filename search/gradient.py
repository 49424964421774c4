"""Gradient ascent on the factors, by Adam (Kingma and Ba, arXiv 1412.6980), as an ask/tell object.

The parameters are logarithms z. In the space "curve" they are those of the y's of control points at
even distances in depth, and the factors are B @ exp(z) with B of `curve.bernstein`; in the space
"free" each layer has its own, and the factors are exp(z), which is the same with B the identity
matrix. The weights of the model stay as they are: whoever scores gives d score / d factor.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from lpes_bake.search.curve import FACTOR_DECIMALS, CurveSettings, FloatArray, bernstein, decode, even_points
from lpes_bake.search.errors import InputError
from lpes_bake.search.optimizer import AskTell, Individual, Outcome, uniform_population

SPACES = ("curve", "free")

# So many failed gradients end the search: half and a quarter of the learning rate did not help.
FAILURES = 3

# Directions of the basis with a singular value below this share of the largest are left alone by a fit: with
# many control points they would take wild y's to follow what no such curve can.
SINGULAR = 0.03


@dataclass(frozen=True)
class GradientSettings:
    """How gradients are followed. A step costs the gradient on one minibatch, a check one evaluation."""

    space: str = field(
        default="curve",
        metadata={"help": "What is moved: the control points of a curve, or each layer by itself.", "choices": SPACES},
    )
    steps: int = field(default=40, metadata={"help": "Gradient steps at most."})
    learning_rate: float = field(
        default=0.02, metadata={"help": "Learning rate of Adam, in log-factors: the size of the first steps."}
    )
    check_every: int = field(default=10, metadata={"help": "Gradient steps between two scores on held-back examples."})
    patience: int = field(default=2, metadata={"help": "Checks without a new best score before it stops."})
    smoothness: float = field(
        default=0.1,
        metadata={
            "help": "Free factors: penalty on the squared differences of neighbouring layers' log-factors, summed."
        },
    )
    warmup: int = field(
        default=3, metadata={"help": "Hybrid: generations of the genetic search before the gradient, at most."}
    )

    def __post_init__(self) -> None:
        if self.space not in SPACES:
            raise InputError(f"space is {self.space!r}; it must be {' or '.join(SPACES)}")
        for name in ("steps", "check_every", "patience", "warmup"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"learning_rate is {self.learning_rate}; it must be positive")
        if not 0 <= self.smoothness < math.inf:
            raise InputError(f"smoothness is {self.smoothness}; it must be 0 or more")


class Adam:
    """Algorithm 1 of Kingma and Ba, upwards, with the β and ε that they recommend."""

    beta1, beta2, epsilon = 0.9, 0.999, 1e-8

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.t = 0
        self.m: FloatArray = np.zeros(1)
        self.v: FloatArray = np.zeros(1)

    def step(self, gradient: FloatArray) -> FloatArray:
        """How far to move, of the gradient's shape."""
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * gradient  # biased first moment
        self.v = self.beta2 * self.v + (1 - self.beta2) * gradient**2  # biased second raw moment
        m_hat = self.m / (1 - self.beta1**self.t)  # section 3, eq. 4
        v_hat = self.v / (1 - self.beta2**self.t)
        return self.learning_rate * m_hat / (np.sqrt(v_hat) + self.epsilon)


class GradientSearch(AskTell):
    """Climbs from the best uniform factor, from `start`, or from one of `others`, by gradients on minibatches.

    It asks for the uniform factors' scores and those of others, and begins at the best; then for one gradient a step,
    and after every `check_every` steps for a score of where it stands: of the mean of the last half of these steps, for
    a single one goes where its minibatch pulls (Polyak and Juditsky 1992). What wins is the best of what was scored.
    After a gradient that failed it goes on from the best so far with half the learning rate.
    layers: decoder layers of the model. start: (layers,) factors; those of a curve whose control points
    do not stand at even distances are fitted by least squares. A race may drop such a fit, which is worse than what
    it fits: the climb begins there all the same, and uniform factors are not asked for. others: such factors that are
    scored with the uniform ones. There is no chance in it.
    """

    def __init__(
        self,
        curve: CurveSettings,
        settings: GradientSettings,
        layers: int,
        start: Sequence[float] | None = None,
        others: Sequence[Sequence[float]] = (),
    ) -> None:
        super().__init__()
        self.curve, self.settings, self.layers = curve, settings, layers
        free = settings.space == "free"
        self._basis = np.eye(layers) if free else bernstein(layers, curve.control_points)
        self._smoothness = settings.smoothness if free else 0.0
        self._z = self._fit(start if start is not None else np.ones(layers))
        self._first = [self._individual(self._fit(one)) for one in others]
        self._first[:0] = [self._individual(self._z)] if start is not None else uniform_population(curve, layers)
        self._best_z, self._best_score = self._z, -math.inf
        self._adam = Adam(settings.learning_rate)
        self._trail: deque[FloatArray] = deque(maxlen=math.ceil(settings.check_every / 2))
        self._step = self._failed = self._checks_in_vain = 0
        self._check_due = False
        self._startable = False

    def _next(self) -> list[Individual]:
        if self.generation == 0:
            return self._first
        if not self._startable:
            self.ended = "no individual could be scored, so there is none to start from"
        elif self._failed >= FAILURES:
            self.ended = f"{FAILURES} gradients failed"
        elif self._checks_in_vain >= self.settings.patience:
            self.ended = f"{self._checks_in_vain} checks in a row found no better score"
        elif self._step >= self.settings.steps and not self._check_due:
            self.ended = f"all {self.settings.steps} gradient steps are done"
        if self.ended is not None:
            return []
        self.wants_gradient = not self._check_due
        return [self._individual(self._mean() if self._check_due else self._z)]

    def _learn(self, asked: Sequence[Individual], outcomes: Sequence[Outcome]) -> None:
        if self.wants_gradient:
            self._climb(outcomes[0])
            return
        ranking = self.ranking()
        first = self.generation == 1
        if first:
            self._startable = any(outcome.value > -math.inf for outcome in outcomes)
            if ranking:
                self._z = self._fit(ranking[0].individual.factors)
        self._check_due = False
        if ranking and ranking[0].score > self._best_score:
            self._best_z, self._best_score = self._z if first else self._mean(), ranking[0].score
            self._checks_in_vain = 0
        elif not first:
            self._checks_in_vain += 1

    def _climb(self, outcome: Outcome) -> None:
        """One step up the gradient, or back to the best where it failed."""
        self._step += 1
        gradient = outcome.gradient
        if gradient is None or outcome.value == -math.inf or not np.isfinite(gradient).all():
            self._failed += 1
            self._z = self._best_z
            self._trail.clear()
            self._adam = Adam(self._adam.learning_rate / 2)
            return
        if len(gradient) != self.layers:
            raise ValueError(f"the gradient has {len(gradient)} entries for {self.layers} layers")
        slope = log_gradient(self._basis, self._z, gradient) - self._smoothness * roughness_gradient(self._z)
        low, high = math.log(self.curve.y_low), math.log(self.curve.y_high)
        # Steps that shorten to nothing along half a cosine (Loshchilov and Hutter, arXiv 1608.03983), for minibatches
        # are noisy: long steps first, to get there, short ones last, to stay.
        decay = (1 + math.cos(math.pi * (self._step - 1) / self.settings.steps)) / 2
        self._z = np.clip(self._z + decay * self._adam.step(slope), low, high)
        self._trail.append(self._z)
        self._check_due = self._step % self.settings.check_every == 0 or self._step == self.settings.steps

    def _mean(self) -> FloatArray:
        """The mean of the last steps' parameters."""
        mean: FloatArray = np.mean(self._trail, axis=0)
        return mean

    def _individual(self, z: FloatArray) -> Individual:
        """What the parameters z stand for. The y's are rounded, so that the control points give these very factors."""
        ys = np.exp(z).round(FACTOR_DECIMALS).tolist()
        if self.settings.space == "free":
            return Individual(tuple(ys))
        points = even_points(ys, self.layers)
        return Individual(decode(points, self.layers), points)

    def _fit(self, factors: ArrayLike) -> FloatArray:
        """The parameters whose factors are closest, within the bounds."""
        target = np.asarray(factors, dtype=np.float64)
        # The mean apart: a level curve stays one, be there fewer layers than control points.
        y = target.mean() + np.linalg.lstsq(self._basis, target - target.mean(), rcond=SINGULAR)[0]
        z: FloatArray = np.log(np.clip(y, self.curve.y_low, self.curve.y_high))
        return z


def log_gradient(basis: FloatArray, z: FloatArray, gradient: ArrayLike) -> FloatArray:
    """The gradient (P,) by z, from that by the factors (layers,) = basis (layers, P) @ exp(z)."""
    slope: FloatArray = np.exp(z) * (basis.T @ np.asarray(gradient, dtype=np.float64))
    return slope


def roughness_gradient(z: FloatArray) -> FloatArray:
    """The gradient by z of Σ (z[h+1] − z[h])²."""
    steps = np.diff(z)
    slope: FloatArray = 2 * (np.append(0.0, steps) - np.append(steps, 0.0))
    return slope
