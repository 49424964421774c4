"""Scores by gold position with their intervals, alone and against the base model, as plain data.

Contexts are the sampling unit of all intervals: the questions about one context are averaged first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lpes_bake.search.objective import FloatArray, Objective
from lpes_bake.search.statistics import RESAMPLES, Interval, mean_interval, paired_interval, resamples, spread
from lpes_bake.search.tasks import Task

METRICS = ("accuracy", "logprob")

Values = Mapping[str, NDArray[np.float64]]
"""For each of METRICS: (contexts, positions)."""


@dataclass(frozen=True)
class ScoredModel:
    """One model among others. factors: what it was scored with, None for a plain base model."""

    label: str
    name: str
    revision: str | None
    factors: tuple[float, ...] | None

    def facts(self) -> dict[str, Any]:
        """What identifies it."""
        return {
            "label": self.label,
            "name": self.name,
            "revision": self.revision,
            "layer_rope_scaling": None if self.factors is None else list(self.factors),
        }


def task_facts(spec: str, task: Task) -> dict[str, Any]:
    """What a task asks. spec: as it was given behind --task."""
    return {
        "spec": spec,
        "name": task.name,
        "title": task.title,
        "settings": task.describe(),
        "positions": list(task.positions),
        "position_unit": task.position_unit,
        "generates": task.generates,
    }


def measured(values: ArrayLike) -> dict[str, Any]:
    """One metric of one model, from (contexts, positions): by_position and mean as [mean, low, high],
    minimum and spread over positions. What is not finite is null."""
    array = np.asarray(values, dtype=np.float64)
    means = array.mean(0)
    return {
        "by_position": [numbers(mean_interval(column)) for column in array.T],
        "mean": numbers(mean_interval(array.mean(1))),
        "minimum": number(means.min()),
        "spread": number(spread(means)),
    }


def difference(values: ArrayLike, base: ArrayLike) -> dict[str, Any]:
    """values − base, both (contexts, positions) of the same questions: mean and by_position as [mean, low, high]."""
    ours, theirs = np.asarray(values, dtype=np.float64), np.asarray(base, dtype=np.float64)
    return {
        "mean": numbers(paired_interval(ours.mean(1), theirs.mean(1))),
        "by_position": [numbers(paired_interval(a, b)) for a, b in zip(ours.T, theirs.T, strict=True)],
    }


def compared(base: Values, lpes: Values) -> dict[str, Any]:
    """Two models on one task: `base`, `lpes` and their `difference`, each by metric."""
    return {
        "base": {metric: measured(base[metric]) for metric in METRICS},
        "lpes": {metric: measured(lpes[metric]) for metric in METRICS},
        "difference": {metric: difference(lpes[metric], base[metric]) for metric in METRICS},
    }


def side_by_side(methods: Mapping[str, Values], base: str) -> list[dict[str, Any]]:
    """Several methods on the same questions of one task, in their order, by metric: `measured`; `against_base`, the
    difference from the method called `base`; `against_rival`, that from the best of the other methods by this metric's
    mean, called `rival`. The last two are None where there is nothing to compare with."""
    rows: list[dict[str, Any]] = []
    for label, values in methods.items():
        row: dict[str, Any] = {"label": label}
        for metric in METRICS:
            others = {
                name: other[metric] for name, other in methods.items() if name not in (base, label) and label != base
            }
            means = {name: other.mean() for name, other in others.items() if np.isfinite(other).all()}
            rival = max(means, key=lambda name: means[name], default=None)
            row[metric] = {
                **measured(values[metric]),
                "against_base": None if label == base else difference(values[metric], methods[base][metric]),
                "against_rival": None
                if rival is None
                else {"rival": rival, **difference(values[metric], others[rival])},
            }
        rows.append(row)
    return rows


def numbers(values: tuple[float, ...]) -> list[float | None]:
    """JSON numbers."""
    return [number(value) for value in values]


def number(value: float) -> float | None:
    """A JSON number: null where it is not finite."""
    return float(value) if math.isfinite(value) else None


def objective_interval(
    objective: Objective, weights: Sequence[float], values: Sequence[FloatArray], base: Sequence[FloatArray]
) -> Interval:
    """(mean, low, high) of the objective of `values` less that of `base`: paired percentile bootstrap over contexts.

    Both hold (contexts, positions) a task, of the same questions. The price of drift is left out. The contexts drawn
    are those of `difference`, so that one task's mean has one interval wherever it is shown.
    """
    mean, differences = 0.0, np.zeros(RESAMPLES)
    for task, (weight, ours, theirs) in enumerate(zip(weights, values, base, strict=True)):
        mean += weight * float(objective.aggregate(ours.mean(0)) - objective.aggregate(theirs.mean(0)))
        drawn = [
            objective.aggregate(ours[rows].mean(1)) - objective.aggregate(theirs[rows].mean(1))
            for rows in resamples(len(ours), seed=task)
        ]
        differences += weight * np.concatenate(drawn)
    low, high = np.quantile(differences, [0.025, 0.975])
    return mean, float(low), float(high)
