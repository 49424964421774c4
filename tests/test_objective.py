"""What must hold for the objective: hand-worked scores, bounds that bound, weights that are the gradient."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from lpes_bake.search.errors import InputError
from lpes_bake.search.objective import FITNESS, LEAST_VALUE, OVER, FloatArray, Objective
from lpes_bake.search.units import Result

# By position −1, −4, −2.
VALUES = np.array([[-1.5, -3.0, -2.5], [-0.5, -5.0, -1.5]])


@pytest.mark.parametrize(("over", "expected"), [("mean", -7 / 3), ("worst", -4.0), ("mean-spread", -7 / 3 - 3)])
def test_positions_are_aggregated_after_contexts(over: str, expected: float) -> None:
    objective = Objective(over=over)
    assert objective.score([VALUES], (1.0,), 0.0) == pytest.approx(expected)
    # Any leading shape will do.
    stacked = np.stack([VALUES.mean(0), VALUES.mean(0) + 1])
    assert objective.aggregate(stacked) == pytest.approx([expected, expected + 1])


def test_damage_costs_and_its_opposite_earns_nothing() -> None:
    objective = Objective(leash=2.0, max_damage=0.1, leash_kl=0.5)
    assert objective.penalty(0.1, 0.04) == pytest.approx(0.22)
    assert objective.penalty(-0.1, 0.04) == pytest.approx(0.02)
    assert Objective(max_damage=0.1).penalty(0.1, 0.04) == 0.1
    # Twenty times as dear beyond what is allowed.
    assert objective.penalty(0.13, 0.04) == pytest.approx(2 * (0.13 + 20 * 0.03) + 0.02)
    assert Objective(leash=0.0, max_damage=0.0).penalty(9.0, 9.0) == 0
    assert objective.score([VALUES], (1.0,), 0.22) == pytest.approx(-7 / 3 - 0.22)


def test_the_price_that_gradients_see_settles_where_the_limit_is_just_met() -> None:
    objective = Objective(leash=1.0, max_damage=0.005)
    # Damage falls as the price rises: .02 at the leash's own price, .005 at four times that.
    price = objective.leash
    for _ in range(200):
        price = objective.next_price(price, 0.02 / price)
    assert price == pytest.approx(4, abs=0.01)
    # A candidate that keeps within the limit pays the leash again in the end, and no less.
    for _ in range(200):
        price = objective.next_price(price, 0.0)
    assert price == objective.leash


def test_values_are_those_of_the_fitness() -> None:
    result = Result(logprob=[[-1.0, -2.0]], probability=[[0.4, 0.1]], exact=[[True, False]])
    expected = {"logprob": [[-1.0, -2.0]], "probability": [[0.4, 0.1]], "accuracy": [[1.0, 0.0]]}
    for fitness in FITNESS:
        values = Objective(fitness=fitness).values(result)
        assert values.dtype == np.float64 and values.tolist() == expected[fitness]
    with pytest.raises(ValueError, match="computed without it"):
        Objective(fitness="accuracy").values(Result(exact=[[True, None]]))


def test_tasks_count_by_their_relative_change() -> None:
    easy, hard = np.array([[-0.5, -0.5]]), np.array([[-4.0, -2.0]])
    weights = Objective().weights([easy, hard])
    assert weights == pytest.approx((6 / 7, 1 / 7))
    # Ten percent better in one is worth as much as ten percent better in the other.
    objective, base = Objective(), Objective().score([easy, hard], weights, 0.0)
    gains = [objective.score(better, weights, 0.0) - base for better in ([0.9 * easy, hard], [easy, 0.9 * hard])]
    assert gains[0] == pytest.approx(gains[1]) and gains[0] > 0
    assert Objective(over="worst").weights([easy, hard]) == pytest.approx((8 / 9, 1 / 9))
    assert Objective().weights([hard]) == (1.0,)


def test_tasks_count_as_the_user_says() -> None:
    easy, hard = np.array([[-0.5]]), np.array([[-4.0]])
    objective = Objective(task_weights=(2.0, 1.0))
    weights = objective.weights([easy, hard])
    assert sum(weights) == pytest.approx(1)
    # Five percent better in the first is worth as much as ten percent better in the second.
    base = objective.score([easy, hard], weights, 0.0)
    gains = [objective.score(better, weights, 0.0) - base for better in ([0.95 * easy, hard], [easy, 0.9 * hard])]
    assert gains[0] == pytest.approx(gains[1]) and gains[0] > 0
    assert Objective(fitness="accuracy", task_weights=(3, 1)).weights([easy, hard]) == (0.75, 0.25)
    for wrong in ((0.0, 1.0), (-1.0,), (math.inf,), (math.nan,)):
        with pytest.raises(InputError, match="task_weights"):
            Objective(task_weights=wrong)
    with pytest.raises(InputError, match="task_weights has 2 numbers for 1 task; give one for each --task"):
        objective.weights([easy])


def test_a_solved_task_does_not_outweigh_all_others() -> None:
    weights = Objective().weights([np.array([[-1e-6]]), np.array([[-1.0]])])
    assert weights == pytest.approx((1 / (1 + LEAST_VALUE), LEAST_VALUE / (1 + LEAST_VALUE)))


@pytest.mark.parametrize("fitness", ["probability", "accuracy"])
def test_tasks_count_equally_where_values_are_shares(fitness: str) -> None:
    assert Objective(fitness=fitness).weights([np.array([[0.9]]), np.array([[0.0]])]) == (0.5, 0.5)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("fitness", FITNESS)
def test_no_score_exceeds_its_bound_and_the_bound_of_all_contexts_is_close(fitness: str, over: str) -> None:
    objective = Objective(fitness=fitness, over=over)
    rng = np.random.default_rng(0)
    weights = (0.3, 0.7)
    for _ in range(200):
        values: list[FloatArray] = [rng.random((12, 3)), rng.random((12, 2)).round()]
        if fitness == "logprob":
            values = [-3 * rng.random() * one for one in values]
        score = objective.score(values, weights, 0.1)
        bounds = [objective.bound([one[:seen] for one in values], weights, 0.1, 12) for seen in range(13)]
        assert all(score <= bound + 1e-12 for bound in bounds)
        # What is seen can only take away.
        assert all(later <= earlier + 1e-12 for earlier, later in pairwise(bounds))
        if over != "mean-spread":
            assert bounds[-1] == pytest.approx(score)
    nothing = [np.zeros((0, 3)), np.zeros((0, 2))]
    assert objective.bound(nothing, weights, 0.1, 12) == pytest.approx((0.0 if fitness == "logprob" else 1.0) - 0.1)


def test_the_bound_of_mean_minus_spread_is_reached_where_all_positions_become_as_bad_as_the_worst() -> None:
    objective, seen = Objective(over="mean-spread"), np.array([[-1.0, -4.0]])
    # One of four contexts: at best −1 at the worst position; the other can come down to it.
    assert objective.bound([seen], (1.0,), 0.0, 4) == pytest.approx(-1.0)
    rest = np.array([[-1.0, 0.0]] * 3)
    assert objective.score([np.concatenate([seen, rest])], (1.0,), 0.0) == pytest.approx(-1.0)


@pytest.mark.parametrize("over", OVER)
def test_position_weights_are_the_gradient_of_the_aggregate(over: str) -> None:
    objective = Objective(over=over)
    rng = np.random.default_rng(1)
    for _ in range(20):
        values = -rng.random((5, 4))
        means, step = values.mean(0), 1e-6
        slopes = [
            float(objective.aggregate(means + step * axis) - objective.aggregate(means - step * axis)) / (2 * step)
            for axis in np.eye(4)
        ]
        weights = objective.position_weights(values)
        assert weights == pytest.approx(slopes, abs=1e-8)
        assert sum(weights) == pytest.approx(1)


def test_equal_positions_have_weights_that_sum_to_one() -> None:
    for over in OVER:
        assert sum(Objective(over=over).position_weights(np.zeros((2, 3)))) == pytest.approx(1)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="fitness must be one of logprob, probability, accuracy; got 'loss'"):
        Objective(fitness="loss")
    with pytest.raises(InputError, match="over must be one of"):
        Objective(over="median")
    for value in (-1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="leash_kl is"):
            Objective(leash_kl=value)
