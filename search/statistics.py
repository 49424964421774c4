"""Intervals for what was measured on a sample of contexts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 10_000
Interval = tuple[float, float, float]


def mean_interval(values: ArrayLike, seed: int = 0, level: float = 0.95) -> Interval:
    """(mean, low, high): percentile bootstrap (Efron 1979) over contexts.

    values: (contexts,), one number for each context. A context is the sampling unit, so several
    questions about one context must be averaged first. One context, or NaN among the values, gives
    NaN bounds: nothing is known about the spread.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not sample.size:
        raise ValueError(f"values must be one number for each context; got shape {sample.shape}")
    mean = float(sample.mean())
    if sample.size == 1 or not np.isfinite(sample).all():
        return mean, float("nan"), float("nan")
    means = np.concatenate([sample[drawn].mean(axis=1) for drawn in resamples(sample.size, seed)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return mean, float(low), float(high)


def paired_interval(a: ArrayLike, b: ArrayLike, seed: int = 0, level: float = 0.95) -> Interval:
    """(mean, low, high) of a - b, both (contexts,) and measured on the same contexts in the same order."""
    first, second = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if first.shape != second.shape:
        raise ValueError(f"paired samples must be of one shape; got {first.shape} and {second.shape}")
    return mean_interval(first - second, seed, level)


def resamples(size: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """RESAMPLES times `size` contexts drawn with replacement: their numbers, in blocks of (resamples, size)."""
    rng = np.random.default_rng(seed)
    # In blocks, so that thousands of contexts need little memory.
    block = max(1, 1_000_000 // size)
    for start in range(0, RESAMPLES, block):
        yield rng.integers(size, size=(min(block, RESAMPLES - start), size))


def spread(values: ArrayLike) -> float:
    """Largest minus smallest: 0 for a model that does not care where the evidence stands."""
    by_position = np.asarray(values, dtype=np.float64)
    return float(by_position.max() - by_position.min())
