"""All optimizers on landscapes whose optimum is known, and the gradient search's own arithmetic. No model here."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from lpes_bake.search.curve import FACTOR_DECIMALS, CurveSettings, FloatArray, bernstein, decode, even_points
from lpes_bake.search.errors import InputError
from lpes_bake.search.genetic import GeneticSettings
from lpes_bake.search.gradient import (
    Adam,
    GradientSearch,
    GradientSettings,
    log_gradient,
    roughness_gradient,
)
from lpes_bake.search.optimizer import Individual, Optimizer, Outcome
from lpes_bake.search.optimizers import OPTIMIZERS, make_optimizer

LAYERS = 24
CURVE = CurveSettings(control_points=5, uniform=(0.8, 0.9, 1.1, 1.25))
ONES = (1.0,) * LAYERS
UNIFORM = [(value,) * LAYERS for value in (1.0, *CURVE.uniform)]

Factors = tuple[float, ...]
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def make(name: str, seed: int = 0, curve: CurveSettings = CURVE, generations: int = 6) -> Optimizer:
    """A small optimizer; generations are those of 8 individuals."""
    genetic = GeneticSettings(population=8, generations=generations)
    return make_optimizer(name, curve, genetic, GradientSettings(), LAYERS, np.random.default_rng(seed))


def climb(
    layers: int = LAYERS, curve: CurveSettings = CURVE, start: Sequence[float] | None = None, **settings: Any
) -> GradientSearch:
    return GradientSearch(curve, GradientSettings(**settings), layers, start)


class Hill:
    """−Σ (log factor − log target)², whose top is 0 at the target; with noise on what is told, not on `height`."""

    def __init__(self, target: ArrayLike, noise: float = 0.0, seed: int = 0) -> None:
        self.target, self.noise = np.log(target), noise
        self.rng = np.random.default_rng(seed)

    def height(self, factors: Factors) -> float:
        return -float(((np.log(factors) - self.target) ** 2).sum())

    def __call__(self, individual: Individual, wants_gradient: bool) -> Outcome:
        f = np.array(individual.factors)
        gradient = -2 * (np.log(f) - self.target) / f
        noise = self.noise * self.rng.standard_normal(len(f) + 1)
        told = tuple((gradient + noise[1:]).tolist()) if wants_gradient else None
        return Outcome(self.height(individual.factors) + float(noise[0]), gradient=told)


Landscape = Callable[[Individual, bool], Outcome]
SMOOTH = decode([(0, 1.3), (5.75, 1.2), (11.5, 0.75), (17.25, 0.7), (23, 0.9)], LAYERS)


def drive(optimizer: Optimizer, landscape: Landscape) -> list[tuple[bool, list[Individual]]]:
    """Run to the end: whether each generation wanted gradients, and its individuals."""
    generations = []
    while asked := optimizer.ask():
        generations.append((optimizer.wants_gradient, asked))
        assert optimizer.generation == len(generations)
        assert optimizer.ended is None
        optimizer.tell([landscape(individual, optimizer.wants_gradient) for individual in asked])
    return generations


def drive_once(optimizer: Optimizer, landscape: Landscape) -> None:
    optimizer.tell([landscape(individual, optimizer.wants_gradient) for individual in optimizer.ask()])


def scored(generations: list[tuple[bool, list[Individual]]]) -> list[Individual]:
    return [individual for wants_gradient, asked in generations if not wants_gradient for individual in asked]


def constant(individual: Individual, wants_gradient: bool) -> Outcome:
    return Outcome(0.25, gradient=(0.0,) * len(individual.factors) if wants_gradient else None)


def failing(individual: Individual, wants_gradient: bool) -> Outcome:
    return Outcome(None)


# What holds for every optimizer.


@every_optimizer
def test_the_identity_comes_first_and_the_uniform_factors_behind_it(name: str) -> None:
    assert [individual.factors for individual in make(name).ask()[: len(UNIFORM)]] == UNIFORM
    bare = CurveSettings(control_points=5, uniform=())
    first = [individual.factors for individual in make(name, curve=bare).ask()]
    assert first[0] == ONES and not set(first) & set(UNIFORM[1:])


def test_parents_are_as_many_as_the_next_generation_depends_on() -> None:
    expected = {"genetic": 2, "gradient": 1, "hybrid": 2, "cma-es": 4, "random": 1}
    assert {name: make(name).parents for name in OPTIMIZERS} == expected


@every_optimizer
def test_the_identity_wins_ties(name: str) -> None:
    optimizer = make(name)
    drive(optimizer, constant)
    assert optimizer.ranking()[0].individual.factors == ONES


@every_optimizer
def test_same_seed_and_same_outcomes_give_the_same_individuals(name: str) -> None:
    one, two = (drive(make(name, seed=3), Hill(SMOOTH)) for _ in range(2))
    assert one == two and len(one) > 5
    if name != "gradient":  # which has no chance in it
        assert one != drive(make(name, seed=4), Hill(SMOOTH))


@every_optimizer
def test_it_ends_with_a_reason_and_asks_no_more(name: str) -> None:
    optimizer = make(name)
    drive(optimizer, Hill(SMOOTH))
    assert optimizer.ended
    assert optimizer.ask() == []
    with pytest.raises(RuntimeError, match="ask before telling"):
        optimizer.tell([])


@every_optimizer
def test_asking_and_telling_out_of_turn_is_an_error(name: str) -> None:
    optimizer = make(name)
    with pytest.raises(RuntimeError, match="ask before telling"):
        optimizer.tell([])
    count = len(optimizer.ask())
    with pytest.raises(RuntimeError, match="tell the outcomes"):
        optimizer.ask()
    with pytest.raises(ValueError, match=f"{count} individuals were asked, but 1 outcomes"):
        optimizer.tell([Outcome(1.0)])
    # A wrong tell changes nothing.
    optimizer.tell([Outcome(1.0)] * count)
    assert len(optimizer.ranking()) == count


@every_optimizer
@pytest.mark.parametrize("direction", [1, -1])
def test_no_factor_leaves_the_bounds_and_points_decode_to_their_factors(name: str, direction: int) -> None:
    curve = CurveSettings(control_points=5, y_low=0.9, y_high=1.2)

    def slope(individual: Individual, wants_gradient: bool) -> Outcome:
        gradient = (float(direction),) * LAYERS if wants_gradient else None
        return Outcome(direction * sum(individual.factors), gradient=gradient)

    optimizer = make(name, curve=curve)
    for _, asked in drive(optimizer, slope):
        for individual in asked:
            assert len(individual.factors) == LAYERS
            assert all(0.9 <= factor <= 1.2 for factor in individual.factors)
            assert individual.points is not None
            assert all(0.9 <= y <= 1.2 for _, y in individual.points)
            assert decode(individual.points, LAYERS) == individual.factors
            assert all(round(y, FACTOR_DECIMALS) == y for _, y in individual.points)


@every_optimizer
@pytest.mark.parametrize("failure", [None, math.nan, math.inf, -math.inf])
def test_what_fails_never_ranks(name: str, failure: float | None) -> None:
    hill, told = Hill(SMOOTH), []

    def landscape(individual: Individual, wants_gradient: bool) -> Outcome:
        # Everything that scores better than the identity fails.
        outcome = hill(individual, wants_gradient)
        if not wants_gradient and outcome.value > hill.height(ONES):
            told.append(individual.factors)
            return Outcome(failure)
        return outcome

    optimizer = make(name)
    drive(optimizer, landscape)
    assert told
    ranking = optimizer.ranking()
    assert ranking[0].individual.factors == ONES
    assert not {one.individual.factors for one in ranking} & set(told)


@every_optimizer
def test_what_was_dropped_never_ranks_however_high_its_estimate(name: str) -> None:
    hill, dropped = Hill(SMOOTH), []

    def landscape(individual: Individual, wants_gradient: bool) -> Outcome:
        outcome = hill(individual, wants_gradient)
        if not wants_gradient and individual.factors != ONES and hash(individual.factors) % 2:
            dropped.append(individual.factors)
            return Outcome(outcome.value + 100, complete=False)
        return outcome

    optimizer = make(name)
    drive(optimizer, landscape)
    assert dropped
    assert all(one.score <= 0 and one.individual.factors not in dropped for one in optimizer.ranking())


@every_optimizer
def test_a_search_in_which_all_fails_ends_without_a_ranking(name: str) -> None:
    optimizer = make(name)
    assert len(drive(optimizer, failing)) == 1
    assert optimizer.ranking() == []
    assert optimizer.ended is not None and "no individual could be scored" in optimizer.ended


@every_optimizer
def test_the_ranking_holds_what_was_scored_once_and_best_first(name: str) -> None:
    optimizer, hill = make(name), Hill(SMOOTH)
    asked = dict.fromkeys(individual.factors for individual in scored(drive(optimizer, hill)))
    expected = sorted(asked, key=lambda factors: -hill.height(factors))
    assert [one.individual.factors for one in optimizer.ranking()] == expected
    assert [one.score for one in optimizer.ranking()] == [hill.height(factors) for factors in expected]


@every_optimizer
def test_gradients_are_asked_for_one_individual_at_a_time_and_their_scores_do_not_rank(name: str) -> None:
    def landscape(individual: Individual, wants_gradient: bool) -> Outcome:
        # On its minibatch everything seems splendid.
        return Outcome(1000.0 if wants_gradient else 1.0, gradient=ONES if wants_gradient else None)

    optimizer = make(name)
    generations = drive(optimizer, landscape)
    assert all(len(asked) == 1 for wants_gradient, asked in generations if wants_gradient)
    assert any(wants_gradient for wants_gradient, _ in generations) == (name in ("gradient", "hybrid"))
    assert {one.score for one in optimizer.ranking()} == {1.0}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "random"])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_it_beats_random_search_at_equal_cost(name: str, noise: float) -> None:
    identity = Hill(SMOOTH).height(ONES)
    left: dict[str, list[float]] = {name: [], "random": []}
    for seed in range(5):
        cost = 96
        for one in (name, "random"):
            # A gradient counts as an evaluation here, and random search gets what the other took.
            optimizer, hill = make(one, seed, generations=math.ceil(cost / 8)), Hill(SMOOTH, noise, seed)
            cost = sum(len(asked) for _, asked in drive(optimizer, hill))
            left[one].append(hill.height(optimizer.ranking()[0].individual.factors) / identity)
    # The share of the way to the top that is left.
    assert np.mean(left[name]) < 0.5 * np.mean(left["random"])


# Gradients.


@pytest.mark.parametrize("learning_rate", [0.02, 0.3])
def test_adam_takes_the_steps_of_torch(learning_rate: float) -> None:
    rng = np.random.default_rng(0)
    ours, adam = np.zeros(6), Adam(learning_rate)
    theirs = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    reference = torch.optim.Adam([theirs], lr=learning_rate, maximize=True)
    for scale in (1.0, 1e-3, 30.0, 0.0, *rng.uniform(0, 2, 20)):
        gradient = scale * rng.standard_normal(6)
        ours = ours + adam.step(gradient)
        theirs.grad = torch.tensor(gradient)
        reference.step()
        assert ours == pytest.approx(theirs.detach().numpy(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("basis", [bernstein(7, 4), bernstein(1, 3), np.eye(5)])
def test_the_gradient_by_the_parameters_equals_finite_differences(basis: FloatArray) -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(len(basis))

    def score(factors: FloatArray) -> float:
        return float(weights @ np.sin(3 * factors) + np.prod(factors))

    z = rng.normal(0, 0.2, basis.shape[1])
    factors = basis @ np.exp(z)
    by_factor = weights * 3 * np.cos(3 * factors) + np.prod(factors) / factors
    step = 1e-6 * np.eye(len(z))
    expected = [(score(basis @ np.exp(z + e)) - score(basis @ np.exp(z - e))) / 2e-6 for e in step]
    assert log_gradient(basis, z, by_factor) == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_the_gradient_of_roughness_equals_finite_differences() -> None:
    def roughness(z: FloatArray) -> float:
        return sum(float(z[h + 1] - z[h]) ** 2 for h in range(len(z) - 1))

    z = np.random.default_rng(0).standard_normal(6)
    expected = [(roughness(z + e) - roughness(z - e)) / 2e-6 for e in 1e-6 * np.eye(6)]
    assert roughness_gradient(z) == pytest.approx(expected, rel=1e-6)
    assert roughness_gradient(z[:1]) == [0.0]


def test_steps_and_checks_alternate_and_the_last_step_is_checked() -> None:
    generations = drive(climb(steps=7, check_every=3), Hill(SMOOTH))
    asked = "".join("g" if wants_gradient else "s" for wants_gradient, _ in generations)
    assert asked == "s" + "gggs" + "gggs" + "gs"
    assert [len(individuals) for _, individuals in generations] == [5, *[1] * 10]


@pytest.mark.parametrize("space", ["curve", "free"])
def test_a_check_scores_the_mean_of_the_last_half_of_the_steps(space: str) -> None:
    pulls = (1.0, 1.0, -5.0, -1.0, 2.0)
    left = iter(pulls)

    def landscape(individual: Individual, wants_gradient: bool) -> Outcome:
        factor = individual.factors[0]  # all layers alike
        pull = next(left) / factor if wants_gradient else 0.0  # by the factor; by its logarithm it is the pull
        return Outcome(-abs(math.log(factor)), gradient=(pull,) * LAYERS)

    search = climb(space=space, smoothness=0.0, steps=5, check_every=5, learning_rate=0.05)
    generations = drive(search, landscape)
    # The library's own Adam and cosine schedule.
    theirs = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adam = torch.optim.Adam([theirs], lr=0.05, maximize=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=5)
    trail = []
    for pull in pulls:
        theirs.grad = torch.full_like(theirs, pull)
        adam.step()
        schedule.step()
        trail.append(float(theirs.detach()))
    z = np.array(trail)
    assert generations[-1][1][0].factors == pytest.approx((math.exp(z[2:].mean()),) * LAYERS, abs=2e-4)
    assert abs(z[2:].mean() - z[-1]) > 0.002


def test_it_starts_from_the_best_uniform_factor() -> None:
    for target in (0.8, 1.25, 1.0):
        search = climb()
        drive_once(search, Hill((target,) * LAYERS))
        assert search.ask()[0].factors == (target,) * LAYERS
        assert search.wants_gradient


@pytest.mark.parametrize("space", ["curve", "free"])
def test_the_first_step_moves_every_parameter_by_the_learning_rate_uphill(space: str) -> None:
    # Adam's first step is the sign of the gradient, whatever its size.
    search = climb(space=space, learning_rate=0.03, smoothness=0.0)
    drive_once(search, Hill((1.02,) * LAYERS))
    drive_once(search, Hill((1.02,) * LAYERS))
    assert search.ask()[0].factors == pytest.approx((math.exp(0.03),) * LAYERS, abs=1e-4)


def test_a_curve_comes_to_a_target_curve_and_free_factors_to_any_target() -> None:
    ys = [1.3, 1.1, 0.7, 0.8, 1.0]
    curve = climb(steps=400, check_every=50, patience=100)
    drive(curve, Hill(bernstein(LAYERS, 5) @ ys))
    found = curve.ranking()[0].individual
    assert found.points is not None
    assert [y for _, y in found.points] == pytest.approx(ys, abs=0.01)

    rough = np.random.default_rng(0).uniform(0.7, 1.4, LAYERS)
    free = climb(space="free", smoothness=0.0, steps=400, check_every=50, patience=100)
    drive(free, Hill(rough))
    assert free.ranking()[0].individual.factors == pytest.approx(rough, abs=0.005)
    assert free.ranking()[0].individual.points is None
    assert all(round(factor, FACTOR_DECIMALS) == factor for factor in free.ranking()[0].individual.factors)


def test_smoothness_is_bought_with_score() -> None:
    rough = np.random.default_rng(0).uniform(0.7, 1.4, LAYERS)

    def roughness(smoothness: float) -> float:
        search = climb(space="free", smoothness=smoothness, steps=200, check_every=200)
        drive(search, Hill(rough))
        return float((np.diff(np.log(search.ranking()[0].individual.factors)) ** 2).sum())

    # With the penalty λ the optimum solves (1 + λ D'D) z = target, a slow but independent reference.
    difference = np.diff(np.eye(LAYERS), axis=0)
    optimum = np.linalg.solve(np.eye(LAYERS) + 2 * difference.T @ difference, np.log(rough))
    assert roughness(2.0) == pytest.approx((np.diff(optimum) ** 2).sum(), rel=0.05)
    assert roughness(2.0) < roughness(0.0) / 5


def test_it_stops_when_checks_find_nothing_better() -> None:
    # Held-back examples like the identity best, whatever the minibatches say.
    def overfitted(individual: Individual, wants_gradient: bool) -> Outcome:
        return Hill(SMOOTH if wants_gradient else ONES)(individual, wants_gradient)

    search = climb(steps=100, check_every=4, patience=3)
    generations = drive(search, overfitted)
    assert sum(wants_gradient for wants_gradient, _ in generations) == 12
    assert search.ended is not None and "3 checks" in search.ended
    assert search.ranking()[0].individual.factors == ONES


def test_a_new_best_makes_it_patient_again() -> None:
    checks = iter([1.0, 0.0, 2.0, 0.0, 0.0, 3.0])
    tilt = tuple(np.linspace(1, -1, LAYERS).tolist())

    def landscape(individual: Individual, wants_gradient: bool) -> Outcome:
        if wants_gradient:
            return Outcome(0.0, gradient=tilt)
        return Outcome(-1.0 if len(set(individual.factors)) == 1 else next(checks))

    search = climb(steps=100, check_every=1, patience=2)
    drive(search, landscape)
    assert [one.score for one in search.ranking()[:3]] == [2.0, 1.0, 0.0]
    assert next(checks) == 3.0


def test_what_is_scored_twice_counts_as_it_was_scored_first() -> None:
    # Steps too small to be seen: the checks score the identity again.
    scores = iter([1.0, 0.5, 0.5, 0.5, 0.5, 9.0, 9.0])

    def landscape(individual: Individual, wants_gradient: bool) -> Outcome:
        return Outcome(0.0, gradient=ONES) if wants_gradient else Outcome(next(scores))

    search = climb(learning_rate=1e-9, check_every=1)
    drive(search, landscape)
    assert [one.score for one in search.ranking()] == [1.0, 0.5, 0.5, 0.5, 0.5]
    assert search.ended is not None and "2 checks" in search.ended


def test_a_check_that_was_dropped_found_nothing_better() -> None:
    def dropping(individual: Individual, wants_gradient: bool) -> Outcome:
        outcome = Hill(SMOOTH)(individual, wants_gradient)
        uniform = len(set(individual.factors)) == 1
        return outcome if wants_gradient or uniform else Outcome(outcome.score, complete=False)

    search = climb(steps=100, check_every=4, patience=2)
    assert sum(wants_gradient for wants_gradient, _ in drive(search, dropping)) == 8


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(None),
        Outcome(1.0),
        Outcome(1.0, gradient=(*ONES[:-1], math.nan)),
        Outcome(math.nan, gradient=ONES),
    ],
)
def test_a_failed_gradient_leads_back_to_the_best_with_half_the_rate(outcome: Outcome) -> None:
    hill = Hill(SMOOTH)
    search = climb(check_every=2)
    for _ in range(4):  # the uniform factors, two steps, a check; …
        drive_once(search, hill)
    best = search.ranking()[0].individual.factors
    assert len(set(best)) > 1
    drive_once(search, hill)  # … one step on, …
    assert search.ask()[0].factors != best
    search.tell([outcome])  # … and one that fails.
    assert search.ask()[0].factors == best
    search.tell([hill(Individual(best), True)])
    before, after = (search.ranking()[0].individual.points, search.ask()[0].points)
    assert before is not None and after is not None
    moved = [abs(math.log(b.y / a.y)) for a, b in zip(before, after, strict=True)]
    assert moved == pytest.approx([0.01] * 5, abs=3e-4)


def test_three_failed_gradients_end_the_search_with_its_best() -> None:
    def landscape(individual: Individual, wants_gradient: bool) -> Outcome:
        return Outcome(None) if wants_gradient else Hill(SMOOTH)(individual, wants_gradient)

    search = climb()
    generations = drive(search, landscape)
    assert [wants_gradient for wants_gradient, _ in generations] == [False, True, True, True]
    assert search.ended == "3 gradients failed"
    assert len(search.ranking()) == 5


def test_a_gradient_of_the_wrong_length_is_an_error() -> None:
    search = climb()
    drive_once(search, Hill(SMOOTH))
    search.ask()
    with pytest.raises(ValueError, match="3 entries for 24 layers"):
        search.tell([Outcome(1.0, gradient=(1.0, 2.0, 3.0))])


@pytest.mark.parametrize("layers", [1, 2, 24])
@pytest.mark.parametrize("control_points", [2, 6, 12])
@pytest.mark.parametrize("space", ["curve", "free"])
def test_a_level_start_is_kept_exactly(layers: int, control_points: int, space: str) -> None:
    search = climb(layers, CurveSettings(control_points=control_points), (0.85,) * layers, space=space)
    assert [individual.factors for individual in search.ask()] == [(0.85,) * layers]


@pytest.mark.parametrize("control_points", [4, 6])
def test_a_start_is_met_by_the_closest_curve(control_points: int) -> None:
    curve = CurveSettings(control_points=control_points)
    ys = np.random.default_rng(0).uniform(0.7, 1.4, control_points).round(2)
    factors = decode(even_points(ys.tolist(), LAYERS), LAYERS)
    assert climb(curve=curve, start=factors).ask()[0].factors == pytest.approx(factors, abs=2e-4)
    # Control points that stand unevenly: numpy fits the polynomial, in powers and not in Bernstein's basis.
    uneven = decode([(0, 0.9), (3, 1.1), (9, 1.2), (23, 0.8)], LAYERS)
    expected = np.polynomial.Polynomial.fit(np.arange(LAYERS), uneven, control_points - 1)(np.arange(LAYERS))
    assert np.abs(expected - uneven).max() > 1e-3
    assert climb(curve=curve, start=uneven).ask()[0].factors == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("space", ["curve", "free"])
def test_factors_to_go_on_from_stand_beside_the_uniform_ones_and_the_climb_begins_at_the_best(space: str) -> None:
    curve = CurveSettings(uniform=(0.9,))
    start = decode(even_points([0.9, 1.1, 0.8, 1.0], LAYERS), LAYERS)
    settings = GradientSettings(space=space)
    for best in range(3):
        search = make_optimizer("gradient", curve, GeneticSettings(), settings, LAYERS, np.random.default_rng(0), start)
        asked = search.ask()
        assert [asked[0].factors, asked[1].factors] == [(1.0,) * LAYERS, (0.9,) * LAYERS]
        assert asked[2].factors == pytest.approx(start, abs=2e-4)
        search.tell([Outcome(-0.5 if place == best else -1.0) for place in range(3)])
        assert search.ask()[0].factors == pytest.approx(asked[best].factors, abs=2e-4) and search.wants_gradient


def test_a_start_that_no_curve_comes_close_to_gives_no_wild_one() -> None:
    jump = np.repeat([0.8, 1.2], LAYERS // 2)
    closest = np.polynomial.Polynomial.fit(np.arange(LAYERS), jump, 11)(np.arange(LAYERS))
    factors = np.array(climb(curve=CurveSettings(control_points=12), start=jump.tolist()).ask()[0].factors)
    assert np.linalg.norm(factors - jump) < 1.5 * np.linalg.norm(closest - jump)


@pytest.mark.parametrize(
    "settings",
    [
        {"space": "line"},
        {"steps": 0},
        {"check_every": 0},
        {"patience": 0},
        {"warmup": 0},
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"smoothness": -1.0},
        {"smoothness": math.inf},
    ],
)
def test_gradient_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        GradientSettings(**settings)
    assert next(iter(settings)) in str(caught.value) and "\n" not in str(caught.value)


# One after the other.


def test_the_hybrid_goes_on_from_the_best_of_the_genetic_search() -> None:
    hill = Hill(SMOOTH)
    genetic = GeneticSettings(population=8, generations=20)
    optimizer = make_optimizer("hybrid", CURVE, genetic, GradientSettings(warmup=2), LAYERS, np.random.default_rng(0))
    generations = []
    for _ in range(2):
        generations.append(optimizer.ask())
        assert optimizer.parents == 2
        optimizer.tell([hill(individual, False) for individual in generations[-1]])
    bred = optimizer.ranking()[0]
    (start,) = optimizer.ask()
    assert optimizer.generation == 3 and optimizer.parents == 1 and not optimizer.wants_gradient
    assert start.factors == climb(start=bred.individual.factors).ask()[0].factors
    # The start fails: nothing of the genetic search is lost.
    optimizer.tell([Outcome(None)])
    assert optimizer.ranking()[0] == bred
    assert optimizer.ask() == []
    assert optimizer.ended is not None


def test_the_hybrid_keeps_the_better_of_a_curve_and_its_fit() -> None:
    scores = iter([*range(8), 3.5])
    optimizer = make_optimizer(
        "hybrid",
        CURVE,
        GeneticSettings(population=8, generations=1),
        GradientSettings(),
        LAYERS,
        np.random.default_rng(0),
    )
    for _ in range(2):
        optimizer.tell([Outcome(next(scores)) for _ in optimizer.ask()])
    assert [one.score for one in optimizer.ranking()] == [7, 6, 5, 4, 3.5, 3, 2, 1, 0]


def test_the_hybrid_climbs_from_a_fit_that_the_race_has_dropped() -> None:
    hill = Hill(SMOOTH)
    genetic = GeneticSettings(population=8, generations=2)
    settings = GradientSettings(check_every=4)
    optimizer = make_optimizer("hybrid", CURVE, genetic, settings, LAYERS, np.random.default_rng(0))
    for _ in range(2):
        drive_once(optimizer, hill)
    (start,) = optimizer.ask()
    optimizer.tell([Outcome(hill.height(start.factors), complete=False)])
    # The first checks may be in vain, one less than the patience.
    for checked in (False, True):
        for _ in range(4):
            assert [optimizer.ask() != [], optimizer.wants_gradient] == [True, True]
            optimizer.tell([hill(start, True)])
        (end,) = optimizer.ask()
        assert not optimizer.wants_gradient and end.factors != start.factors
        optimizer.tell([Outcome(0.0, complete=checked)])
    assert optimizer.ended is None and optimizer.ranking()[0].individual == end


def test_the_hybrid_counts_a_level_curve_that_both_have_scored_as_it_was_scored_first() -> None:
    optimizer = make("hybrid", generations=1)
    optimizer.tell([Outcome(float(individual.factors == UNIFORM[1])) for individual in optimizer.ask()])
    assert [individual.factors for individual in optimizer.ask()] == [UNIFORM[1]]
    optimizer.tell([Outcome(5.0)])
    assert len(optimizer.ranking()) == 8 and optimizer.ranking()[0].score == 1.0


# CMA-ES.


def test_cma_es_begins_at_the_best_uniform_factor() -> None:
    optimizer = make("cma-es")
    drive_once(optimizer, Hill((0.8,) * LAYERS))
    ys = [y for individual in optimizer.ask() for _, y in individual.points or ()]
    assert len(ys) == 40
    assert np.log(ys).mean() == pytest.approx(math.log(0.8), abs=0.05)
    assert np.log(ys).std() == pytest.approx(0.1, abs=0.03)


def test_cma_es_finds_the_very_top() -> None:
    optimizer = make("cma-es", generations=80)
    hill = Hill(bernstein(LAYERS, 5) @ [1.3, 1.1, 0.7, 0.8, 1.0])
    drive(optimizer, hill)
    assert hill.height(optimizer.ranking()[0].individual.factors) > -1e-5


def test_cma_es_learns_from_estimates_and_takes_what_failed_for_the_worst() -> None:
    def third_generation(third: Callable[[float, float], Outcome]) -> list[Individual]:
        """What is asked after one of CMA-ES's populations, whose third individual is told as third(score, worst)."""
        optimizer, hill = make("cma-es"), Hill(SMOOTH)
        drive_once(optimizer, hill)
        scores = [hill.height(individual.factors) for individual in optimizer.ask()]
        outcomes = [Outcome(score) for score in scores]
        outcomes[2] = third(scores[2], min(scores))
        optimizer.tell(outcomes)
        return optimizer.ask()

    plain = third_generation(lambda score, worst: Outcome(score))
    assert third_generation(lambda score, worst: Outcome(score, complete=False)) == plain
    failed = third_generation(lambda score, worst: Outcome(None))
    assert failed == third_generation(lambda score, worst: Outcome(worst)) != plain


def test_cma_es_goes_on_after_a_generation_in_which_all_failed() -> None:
    optimizer = make("cma-es")
    drive_once(optimizer, Hill(SMOOTH))
    drive_once(optimizer, failing)
    assert len(optimizer.ask()) == 8


def test_cma_es_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cmaes", None)
    with pytest.raises(InputError, match=r"pip install lpes-bake\[cma\]"):
        make("cma-es")


def test_cma_es_refuses_a_population_too_small_for_it() -> None:
    with pytest.raises(InputError, match="population is 3"):
        make_optimizer(
            "cma-es", CURVE, GeneticSettings(population=3), GradientSettings(), LAYERS, np.random.default_rng(0)
        )


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"no optimizer 'sgd'.*genetic, gradient, hybrid, cma-es, random"):
        make("sgd")
