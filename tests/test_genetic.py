"""The genetic search on landscapes whose optimum is known. No model here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from lpes_bake.search.curve import CurveSettings, Points, decode
from lpes_bake.search.errors import InputError
from lpes_bake.search.genetic import GeneticSearch, GeneticSettings
from lpes_bake.search.optimizer import Individual, Outcome, Scored
from lpes_bake.search.random_search import RandomSearch

LAYERS = 24

Score = Callable[[tuple[float, ...]], float]


def make(seed: int = 0, layers: int = LAYERS, curve: CurveSettings | None = None, **settings: Any) -> GeneticSearch:
    """A small search; without a curve given, one that has no uniform factors but the identity to begin with."""
    settings = {"population": 8, "generations": 6, **settings}
    rng = np.random.default_rng(seed)
    return GeneticSearch(curve or CurveSettings(uniform=()), GeneticSettings(**settings), layers, rng)


def tell(search: GeneticSearch, scores: Iterable[float | None]) -> None:
    search.tell([Outcome(score) for score in scores])


def best(search: GeneticSearch) -> Scored:
    return search.ranking()[0]


def points(individual: Individual) -> Points:
    assert individual.points is not None
    return individual.points


def drive(search: GeneticSearch, score: Score) -> list[list[Individual]]:
    generations = []
    while asked := search.ask():
        generations.append(asked)
        tell(search, (score(individual.factors) for individual in asked))
    return generations


def distance_to(target: tuple[float, ...]) -> Score:
    return lambda factors: -math.dist(factors, target)


PLANTED = decode([(0, 0.8), (8, 1.2), (14, 0.9), (23, 1.25)], LAYERS)


@pytest.mark.parametrize("seed", range(5))
def test_the_search_comes_closer_to_a_planted_optimum_than_its_first_population(seed: int) -> None:
    search = make(seed, population=24, generations=20)
    score = distance_to(PLANTED)
    first = max(score(individual.factors) for individual in drive(search, score)[0])
    assert best(search).score > first / 2  # scores are negative: half the distance at most is left
    assert best(search).score > score((1.0,) * LAYERS) / 2


def test_the_first_population_holds_the_identity_and_stays_near_it() -> None:
    for seed in range(20):
        first = make(seed, population=30).ask()
        assert len(first) == 30
        assert first[0].factors == (1.0,) * LAYERS
        assert all(abs(y - 1) <= 0.2 + 1e-9 for individual in first for _, y in points(individual))


def test_the_first_population_holds_the_uniform_factors_behind_the_identity() -> None:
    curve = CurveSettings(uniform=(0.6, 1.0, 1.27, 2.5))
    # 1 is there already, 1.27 moves to the grid, 2.5 lies beyond it.
    expected = [(1.0,) * LAYERS, (0.6,) * LAYERS, (1.25,) * LAYERS]
    first = make(curve=curve).ask()
    assert len(first) == 8
    assert [individual.factors for individual in first[:3]] == expected
    assert [individual.factors for individual in make(curve=curve, population=2).ask()] == expected


def test_a_uniform_factor_can_be_bred_from() -> None:
    # The uniform 0.6 is far from all else of the first population, and wins: its children are near it.
    search = make(curve=CurveSettings(uniform=(0.6,)), parents=0.25, max_step_y=0.1, crossover=0.0)
    first = search.ask()
    search.tell([Outcome(1.0 if set(individual.factors) == {0.6} else None) for individual in first])
    children = search.ask()
    assert len(children) == 8
    assert all(0.5 <= y <= 0.7 for child in children for _, y in points(child))


def test_later_generations_leave_the_neighbourhood_of_the_identity() -> None:
    search = make(population=16, generations=12)
    drive(search, lambda factors: sum(factors))
    assert max(best(search).individual.factors) > 1.4


@pytest.mark.parametrize("layers", [1, 2, 5, 32])
@pytest.mark.parametrize("control_points", [2, 4, 7])
def test_every_individual_is_a_valid_smooth_curve(layers: int, control_points: int) -> None:
    curve = CurveSettings(control_points=control_points)
    grid = set(curve.grid.tolist())
    chance = np.random.default_rng(9)
    for seed in range(2):
        search = make(seed, layers, curve, max_jump_y=0.3, generations=5)
        for individual in itertools.chain(*drive(search, lambda _: chance.random())):
            xs, ys = zip(*points(individual), strict=True)
            assert len(xs) == control_points
            assert all(isinstance(x, int) and 0 <= x < layers for x in xs)
            assert all(a <= b for a, b in itertools.pairwise(xs))
            assert set(ys) <= grid
            assert all(abs(a - b) <= 0.3 + 1e-9 for a, b in itertools.pairwise(ys))
            assert individual.factors == decode(points(individual), layers)


def test_a_control_point_moves_no_further_than_max_step_y_from_its_parent() -> None:
    # Without crossover each child has one parent, one of the two best.
    search = make(crossover=0.0, parents=0.25, max_step_y=0.1, generations=10)
    score = distance_to(PLANTED)
    scored: list[tuple[float, Individual]] = []
    while asked := search.ask():
        parents = [individual for _, individual in sorted(scored, key=lambda pair: -pair[0])[:2]]
        for child in asked if parents else []:
            steps = [
                max(abs(a.y - b.y) for a, b in zip(points(child), points(parent), strict=True)) for parent in parents
            ]
            assert min(steps) <= 0.1 + 1e-9
        scored += [(score(individual.factors), individual) for individual in asked]
        tell(search, (score(individual.factors) for individual in asked))


def test_crossover_alone_takes_every_control_point_between_its_parents() -> None:
    search = make(crossover=1.0, mutation=0.0, parents=0.25, generations=2, population=8)
    first = search.ask()
    tell(search, range(8))
    children = search.ask()
    mother, father = first[-1], first[-2]
    for child in children:
        for point, one, other in zip(*map(points, (child, mother, father)), strict=True):
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
    highest = -math.inf
    score = distance_to(PLANTED)
    while asked := search.ask():
        highest = max(highest, *(score(individual.factors) for individual in asked))
        tell(search, (score(individual.factors) for individual in asked))
        assert best(search).score == highest


@pytest.mark.parametrize("failure", [None, math.nan, math.inf, -math.inf])
def test_failed_scores_never_win_and_never_breed(failure: float | None) -> None:
    search = make(generations=4)
    asked = search.ask()
    tell(search, [0.5, *[failure] * 7])
    assert search.ranking() == [Scored(asked[0], 0.5)]
    # The only parent is the identity: its children differ from it in few control points, all near.
    for child in search.ask():
        assert all(abs(y - 1) <= 0.2 + 1e-9 for _, y in points(child))


def test_those_dropped_never_rank_and_never_breed_and_are_not_asked_again() -> None:
    one, other = make(5), make(5)
    asked = one.ask()
    assert other.ask() == asked
    # To the one search the six are dropped with high estimates, to the other they have failed.
    one.tell([Outcome(0.5), Outcome(0.4), *[Outcome(9.0, complete=False)] * 6])
    tell(other, [0.5, 0.4, *[None] * 6])
    assert one.ranking() == other.ranking() == [Scored(asked[0], 0.5), Scored(asked[1], 0.4)]
    children = one.ask()
    assert children == other.ask()
    assert not {child.factors for child in children} & {individual.factors for individual in asked}


def test_a_search_in_which_all_fails_ends_and_says_so() -> None:
    search = make()
    tell(search, [math.nan] * len(search.ask()))
    assert search.ask() == []
    assert search.ranking() == []
    assert search.ended is not None and "no individual could be scored" in search.ended


def test_the_identity_wins_ties() -> None:
    search = make()
    drive(search, lambda _: 1.0)
    assert set(best(search).individual.factors) == {1.0}


def test_same_seed_and_same_scores_give_the_same_individuals() -> None:
    one, two = (drive(make(3), distance_to(PLANTED)) for _ in range(2))
    assert one == two
    assert one != drive(make(4), distance_to(PLANTED))


def test_the_number_of_parents_is_their_share_of_the_population() -> None:
    assert make(population=32, parents=0.25).parents == 8
    assert make(population=4, parents=0.0).parents == 2


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


def test_random_search_draws_every_generation_like_the_first_population_of_the_genetic_search() -> None:
    settings = GeneticSettings(population=30, generations=4)
    search = RandomSearch(CurveSettings(uniform=()), settings, LAYERS, np.random.default_rng(1))
    asked = [individual for generation in drive(search, sum) for individual in generation]
    assert len({individual.factors for individual in asked}) == 120
    assert asked[:30] == make(1, population=30).ask()
    # Scores that rise with the factors would have led a search that learns from them away from 1.
    assert all(abs(y - 1) <= 0.2 + 1e-9 for individual in asked for _, y in points(individual))
    assert np.mean([individual.factors for individual in asked[90:]]) == pytest.approx(1.0, abs=0.03)
