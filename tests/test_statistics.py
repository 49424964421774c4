"""What must hold for the intervals: agreement with theory, coverage, honest answers to degenerate data."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lpes_bake.search.statistics import mean_interval, paired_interval, spread


def test_interval_agrees_with_the_normal_approximation() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    mean, low, high = mean_interval(values)
    half = 1.959964 * values.std() / math.sqrt(len(values))
    assert mean == pytest.approx(values.mean())
    assert low == pytest.approx(values.mean() - half, abs=0.02)
    assert high == pytest.approx(values.mean() + half, abs=0.02)


def test_level_narrows_the_interval() -> None:
    values = np.random.default_rng(1).normal(0.0, 1.0, 400)
    _, low, high = mean_interval(values, level=0.6827)
    assert (high - low) / 2 == pytest.approx(values.std() / math.sqrt(400), rel=0.05)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(300):
        _, low, high = mean_interval((rng.random(60) < 0.3).astype(float))
        hits += low <= 0.3 <= high
    # Binomial: 300 × .95 = 285, standard deviation 3.8; small samples of a percentile bootstrap fall a little short.
    assert 267 <= hits <= 298


def test_pairing_takes_out_what_both_share() -> None:
    rng = np.random.default_rng(3)
    difficulty = rng.normal(0, 10, 200)
    better, worse = difficulty + 0.5 + rng.normal(0, 0.1, 200), difficulty + rng.normal(0, 0.1, 200)
    mean, low, high = paired_interval(better, worse)
    assert 0 < low < mean < high
    assert high - low < 0.1
    _, alone_low, alone_high = mean_interval(better)
    assert alone_high - alone_low > 2


def test_same_seed_same_interval() -> None:
    values = np.random.default_rng(6).normal(0, 1, 20)
    assert mean_interval(values, seed=4) == mean_interval(values, seed=4)
    assert mean_interval(values, seed=4) != mean_interval(values, seed=5)


def test_degenerate_samples() -> None:
    assert paired_interval([1.0, 1.0, 1.0], [0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5)
    mean, low, high = mean_interval([2.0])
    assert mean == 2.0 and math.isnan(low) and math.isnan(high)
    assert all(math.isnan(number) for number in mean_interval([1.0, math.nan]))
    with pytest.raises(ValueError, match="one shape"):
        paired_interval([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="for each context"):
        mean_interval([])
    with pytest.raises(ValueError, match="for each context"):
        mean_interval(np.zeros((3, 2)))


def test_many_contexts_in_blocks_give_the_interval_too() -> None:
    values = np.random.default_rng(5).normal(0, 1, 3000)
    _, low, high = mean_interval(values)
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / math.sqrt(3000), rel=0.05)


def test_spread_is_largest_minus_smallest() -> None:
    assert spread([0.2, 0.9, 0.4]) == pytest.approx(0.7)
