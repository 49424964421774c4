"""The genetic search on landscapes whose optimum is known. No model here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lpes_bake.search.curve import CurveSettings, decode
from lpes_bake.search.errors import InputError
from lpes_bake.search.genetic import GeneticSearch, GeneticSettings, Individual

LAYERS = 24
SMALL = GeneticSettings(population=8, generations=6)

Score = Callable[[tuple[float, ...]], float]


def make(seed: int = 0, layers: int = LAYERS, curve: CurveSettings | None = None, **settings: Any) -> GeneticSearch:
    settings = {"population": 8, "generations": 6, **settings}
    rng = np.random.default_rng(seed)
    return GeneticSearch(curve or CurveSettings(), GeneticSettings(**settings), layers, rng)


def drive(search: GeneticSearch, score: Score) -> list[list[Individual]]:
    generations = []
    while asked := search.ask():
        generations.append(asked)
        search.tell([score(individual.factors) for individual in asked])
    return generations


def distance_to(target: tuple[float, ...]) -> Score:
    return lambda factors: -math.dist(factors, target)


PLANTED = decode([(0, 0.8), (8, 1.2), (14, 0.9), (23, 1.25)], LAYERS)


@pytest.mark.parametrize("seed", range(5))
def test_the_search_comes_closer_to_a_planted_optimum_than_its_first_population(seed: int) -> None:
    search = make(seed, population=24, generations=20)
    score = distance_to(PLANTED)
    first = max(score(individual.factors) for individual in drive(search, score)[0])
    assert search.best is not None
    assert search.best.score > first / 2  # scores are negative: half the distance at most is left
    assert search.best.score > score((1.0,) * LAYERS) / 2


def test_the_first_population_holds_the_identity_and_stays_near_it() -> None:
    for seed in range(20):
        first = make(seed, population=30).ask()
        assert len(first) == 30
        assert first[0].factors == (1.0,) * LAYERS
        assert all(abs(y - 1) <= 0.2 + 1e-9 for individual in first for _, y in individual.points)


def test_later_generations_leave_the_neighbourhood_of_the_identity() -> None:
    search = make(population=16, generations=12)
    drive(search, lambda factors: sum(factors))
    assert search.best is not None
    assert max(search.best.individual.factors) > 1.4


@pytest.mark.parametrize("layers", [1, 2, 5, 32])
@pytest.mark.parametrize("control_points", [2, 4, 7])
def test_every_individual_is_a_valid_smooth_curve(layers: int, control_points: int) -> None:
    curve = CurveSettings(control_points=control_points)
    grid = set(curve.grid.tolist())
    chance = np.random.default_rng(9)
    for seed in range(2):
        search = make(seed, layers, curve, max_jump_y=0.3, generations=5)
        for individual in itertools.chain(*drive(search, lambda _: chance.random())):
            xs, ys = [x for x, _ in individual.points], [y for _, y in individual.points]
            assert len(xs) == control_points
            assert all(isinstance(x, int) and 0 <= x < layers for x in xs)
            assert all(a <= b for a, b in itertools.pairwise(xs))
            assert set(ys) <= grid
            assert all(abs(a - b) <= 0.3 + 1e-9 for a, b in itertools.pairwise(ys))
            assert individual.factors == decode(individual.points, layers)


def test_a_control_point_moves_no_further_than_max_step_y_from_its_parent() -> None:
    # Without crossover each child has one parent, one of the two best.
    search = make(crossover=0.0, parents=0.25, max_step_y=0.1, generations=10)
    score = distance_to(PLANTED)
    scored: list[tuple[float, Individual]] = []
    while asked := search.ask():
        parents = [individual for _, individual in sorted(scored, key=lambda pair: -pair[0])[:2]]
        for child in asked if parents else []:
            steps = [
                max(abs(a.y - b.y) for a, b in zip(child.points, parent.points, strict=True)) for parent in parents
            ]
            assert min(steps) <= 0.1 + 1e-9
        scored += [(score(individual.factors), individual) for individual in asked]
        search.tell([score(individual.factors) for individual in asked])


def test_crossover_alone_takes_every_control_point_between_its_parents() -> None:
    search = make(crossover=1.0, mutation=0.0, parents=0.25, generations=2, population=8)
    first = search.ask()
    scores = [score * 1.0 for score in range(8)]
    search.tell(scores)
    children = search.ask()
    mother, father = first[-1], first[-2]
    for child in children:
        for point, one, other in zip(child.points, mother.points, father.points, strict=True):
            assert min(one.y, other.y) - 1e-9 <= point.y <= max(one.y, other.y) + 1e-9
            assert min(one.x, other.x) <= point.x <= max(one.x, other.x)


def test_no_factors_are_ever_asked_twice() -> None:
    for seed in range(5):
        search = make(seed, layers=3, curve=CurveSettings(control_points=3, y_step=0.1), generations=8)
        asked = [individual.factors for individual in itertools.chain(*drive(search, lambda factors: factors[0]))]
        assert len(asked) == len(set(asked))


def test_different_control_points_with_the_same_factors_are_one_individual() -> None:
    # On one layer with two control points only the mean of the y's counts: 3 × 3 curves, 5 factors.
    curve = CurveSettings(control_points=2, y_low=0.9, y_high=1.1, y_step=0.1)
    search = make(layers=1, curve=curve, generations=50)
    factors = sorted(individual.factors[0] for individual in itertools.chain(*drive(search, lambda _: 0.0)))
    assert factors == [0.9, 0.95, 1.0, 1.05, 1.1]


def test_a_generation_without_new_individuals_ends_the_search_and_says_so() -> None:
    curve = CurveSettings(control_points=2, y_low=0.9, y_high=1.1, y_step=0.1)
    search = make(layers=2, curve=curve, generations=1000)
    drive(search, lambda factors: factors[0])
    assert search.ended is not None and "no new individual" in search.ended and "exhausted" in search.ended
    assert search.generation < 1000
    assert search.ask() == []


def test_it_ends_after_its_generations_and_says_so() -> None:
    search = make(generations=3)
    assert [len(generation) for generation in drive(search, sum)] == [8, 8, 8]
    assert search.ended == "all 3 generations are done"


def test_the_best_is_never_lost() -> None:
    search = make(generations=15)
    best = -math.inf
    score = distance_to(PLANTED)
    while asked := search.ask():
        best = max(best, *(score(individual.factors) for individual in asked))
        search.tell([score(individual.factors) for individual in asked])
        assert search.best is not None and search.best.score == best


@pytest.mark.parametrize("failure", [None, math.nan, math.inf, -math.inf])
def test_failed_scores_never_win_and_never_breed(failure: float | None) -> None:
    search = make(generations=4)
    asked = search.ask()
    search.tell([0.5, *[failure] * 7])
    assert search.best is not None and search.best.individual == asked[0]
    # The only parent is the identity: its children differ from it in few control points, all near.
    for child in search.ask():
        assert all(abs(y - 1) <= 0.2 + 1e-9 for _, y in child.points)


def test_a_search_in_which_all_fails_ends_and_says_so() -> None:
    search = make()
    search.tell([math.nan] * len(search.ask()))
    assert search.ask() == []
    assert search.best is None
    assert search.ended is not None and "no individual could be scored" in search.ended


def test_the_identity_wins_ties() -> None:
    search = make()
    drive(search, lambda _: 1.0)
    assert search.best is not None and set(search.best.individual.factors) == {1.0}


def test_same_seed_and_same_scores_give_the_same_individuals() -> None:
    one, two = (drive(make(3), distance_to(PLANTED)) for _ in range(2))
    assert one == two
    assert one != drive(make(4), distance_to(PLANTED))


def test_asking_and_telling_out_of_turn_is_an_error() -> None:
    search = make()
    with pytest.raises(RuntimeError, match="ask before telling"):
        search.tell([])
    search.ask()
    with pytest.raises(RuntimeError, match="tell the scores"):
        search.ask()
    with pytest.raises(ValueError, match="8 individuals"):
        search.tell([1.0])


@pytest.mark.parametrize(
    "settings",
    [
        {"population": 1},
        {"generations": 0},
        {"tries": 0},
        {"parents": 1.5},
        {"crossover": -0.1},
        {"mutation": math.nan},
        {"first_spread": 0.0},
        {"max_step_y": 0.04},
        {"max_jump_y": math.inf},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        make(**settings)
    assert next(iter(settings)) in str(caught.value) and "\n" not in str(caught.value)


def test_steps_beyond_the_grid_are_as_good_as_the_whole_grid() -> None:
    search = make(max_step_x=1e308, max_step_y=1e308, max_jump_y=1e308, first_spread=1e308)
    assert drive(search, lambda factors: -max(factors))
