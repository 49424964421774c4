"""Choosing the winner: a fresh start on other contexts, for those alone that short text does not suffer from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lpes_bake.search.curve import ControlPoint, decode
from lpes_bake.search.objective import Objective
from lpes_bake.search.optimizer import Individual, Scored
from lpes_bake.search.racing import Race
from lpes_bake.search.study import StudyStopped
from lpes_bake.search.units import TEXT, Factors, Result, Unit
from lpes_bake.selection import BLOCK, Selection, choose, milder, select
from tests.synthetic import LAYERS, TARGETS, Landscape, ledger_at

CONTEXTS = 2 * BLOCK + 4
IDENTITY: Factors = (1.0,) * LAYERS
TARGET: Factors = tuple(TARGETS[0].tolist())
OBJECTIVE = Objective(leash=0.5)


def towards(share: float) -> Factors:
    """Part of the way from the identity to the best factors."""
    return tuple((1 + share * (TARGETS[0] - 1)).tolist())


def selected(
    candidates: list[Factors],
    compute: Callable[[Unit], Result] | None = None,
    *,
    objective: Objective = OBJECTIVE,
    tasks: tuple[int, ...] = (0,),
    finalists: int = 9,
    max_damage: float = 9.0,
    path: Path,
) -> Selection:
    """The candidates through the race of a search, and then those that are chosen from, on one ledger."""
    objective = replace(objective, max_damage=max_damage)
    with ledger_at(path / "journal.jsonl", compute or Landscape()) as ledger:
        race = Race(ledger, objective, layers=LAYERS, tasks=2, contexts=8, mode="off")
        race.run(candidates, keep=1)
        ranking = [
            Scored(Individual(one.factors), one.score) for one in race.complete.values() if one.score is not None
        ]
        ranking.sort(key=lambda one: -one.score)
        return select(
            ledger,
            objective,
            ranking,
            race.complete,
            tasks,
            contexts=CONTEXTS,
            finalists=finalists,
        )


def scores_of(factors: Factors, task: int, part: str = "selection", contexts: int = CONTEXTS) -> float:
    return float(np.mean(Landscape()(Unit("score", part, task, 0, contexts, factors)).logprob))


def test_the_best_on_the_selection_contexts_wins(tmp_path: Path) -> None:
    candidates = [towards(0.2), TARGET, towards(0.6)]
    selection = selected(candidates, path=tmp_path)
    assert selection.identity.individual.factors == IDENTITY
    assert [one.individual.factors for one in selection.finalists[1:]] == [TARGET, towards(0.6), towards(0.2)]
    for one in selection.finalists:
        assert one.selection_score == pytest.approx(scores_of(one.individual.factors, 0))
    assert selection.winner.individual.factors == TARGET and selection.weights == (1.0,)
    # The search's scores without the price of drift, and in both of its tasks.
    values = [scores_of(IDENTITY, task, "search", 8) for task in (0, 1)]
    weights = np.array([1 / abs(value) for value in values]) / sum(1 / abs(value) for value in values)
    for one in selection.finalists:
        own = [scores_of(one.individual.factors, task, "search", 8) for task in (0, 1)]
        assert one.search_score == pytest.approx(float(weights @ own))


def test_the_luck_of_the_search_does_not_choose(tmp_path: Path) -> None:
    def lucky(unit: Unit) -> Result:
        result = Landscape()(unit)
        if unit.part == "search" and unit.factors == towards(0.1) and unit.task != TEXT:
            return replace(result, logprob=[[0.0] * len(row) for row in result.logprob])
        return result

    selection = selected([TARGET, towards(0.1)], lucky, path=tmp_path)
    first, second = selection.finalists[1:]
    assert first.individual.factors == towards(0.1) and first.search_score > second.search_score
    assert selection.winner is second


def test_tasks_that_choose_are_weighed_by_the_identity_on_their_own_contexts(tmp_path: Path) -> None:
    selection = selected([TARGET], tasks=(0, 1), path=tmp_path)
    own = [scores_of(IDENTITY, task) for task in (0, 1)]
    assert selection.weights[0] * own[0] == pytest.approx(selection.weights[1] * own[1])
    assert sum(selection.weights) == pytest.approx(1)


def test_what_costs_more_than_is_allowed_is_shown_and_a_milder_form_of_it_chosen(tmp_path: Path) -> None:
    damage = {
        one: float(np.mean(0.2 * np.arange(1, 6))) * sum((x - 1) ** 2 for x in one) for one in (TARGET, towards(0.5))
    }
    between = (damage[TARGET] + damage[towards(0.5)]) / 2
    selection = selected([TARGET, towards(0.5)], max_damage=between, path=tmp_path)
    # Beyond the limit the search takes twenty times the price: the target comes after what is half-way to it.
    # 80 % of the target still cost .64 of its damage, more than .625; 60 % cost .36.
    assert [one.label for one in selection.finalists] == [
        "identity",
        "candidate 1",
        "candidate 2",
        "candidate 2, 60 % of it",
    ]
    assert [one.allowed for one in selection.finalists] == [True, True, False, True]
    costs = [0, damage[towards(0.5)], damage[TARGET], 0.36 * damage[TARGET]]
    assert [one.damage for one in selection.finalists] == pytest.approx(costs)
    assert [one.kl for one in selection.finalists] == pytest.approx(costs)
    assert np.isnan(selection.finalists[2].selection_score) and np.isnan(selection.finalists[3].search_score)
    assert selection.winner.individual.factors == pytest.approx(towards(0.6))
    assert [one["chosen"] for one in selection.to_json()] == [False, False, False, True]
    none = selected([TARGET, towards(0.5)], max_damage=0.0, path=tmp_path)
    assert none.winner is none.identity


def test_a_milder_curve_is_a_curve() -> None:
    points = (ControlPoint(0, 0.8), ControlPoint(2, 1.4), ControlPoint(4, 1.1))
    whole = Individual(decode(points, 5), points)
    half = milder(whole, 0.5)
    assert half.points is not None and half.factors == decode(half.points, 5)
    assert half.factors == pytest.approx([1 + 0.5 * (factor - 1) for factor in whole.factors], abs=1e-4)


def test_the_identity_wins_where_nothing_is_better(tmp_path: Path) -> None:
    selection = selected([(1.2,) * LAYERS, (1.5,) * LAYERS], path=tmp_path)
    assert selection.winner is selection.identity
    # Among equals, too.
    accuracy = Objective(fitness="accuracy", leash=0.0)

    def all_wrong(unit: Unit) -> Result:
        result = Landscape()(unit)
        return replace(result, exact=[[False] * len(row) for row in result.logprob])

    (tmp_path / "equal").mkdir()
    selection = selected([TARGET], all_wrong, objective=accuracy, path=tmp_path / "equal")
    assert selection.winner is selection.identity


def test_the_best_few_are_finalists_and_the_best_uniform_factors_whatever_their_place() -> None:
    def scored(factors: Factors, score: float) -> Scored:
        return Scored(Individual(factors), score)

    best, second, third = scored(TARGET, -1), scored(towards(0.9), -2), scored(towards(0.5), -3)
    uniform, worse, identity = scored((0.9,) * LAYERS, -4), scored((0.8,) * LAYERS, -5), scored(IDENTITY, -6)
    ranking = [best, second, third, uniform, worse, identity]
    assert choose(ranking, 2) == [identity, best, second, uniform]
    assert choose(ranking, 4) == [identity, best, second, third, uniform]
    assert choose(ranking, 9) == [identity, best, second, third, uniform, worse]
    assert choose([best, identity], 1) == [identity, best]
    assert choose([identity], 5) == [identity]


def test_names_tell_uniform_factors(tmp_path: Path) -> None:
    selection = selected([(0.95,) * LAYERS, TARGET], path=tmp_path)
    assert [one.label for one in selection.finalists] == ["identity", "candidate 1", "uniform 0.95"]


def failing(part: str, factors: Factors, text: bool) -> Callable[[Unit], Result]:
    def compute(unit: Unit) -> Result:
        if (unit.part, unit.factors, unit.task == TEXT) == (part, factors, text):
            return Result(error="OutOfMemoryError: 2 GiB asked for")
        return Landscape()(unit)

    return compute


@pytest.mark.parametrize("text", [False, True])
def test_a_finalist_that_fails_is_shown_and_not_chosen(text: bool, tmp_path: Path) -> None:
    selection = selected([TARGET, towards(0.5)], failing("selection", TARGET, text), path=tmp_path)
    failed = selection.finalists[1]
    assert failed.individual.factors == TARGET and not failed.allowed and math.isnan(failed.selection_score)
    assert selection.winner.individual.factors == towards(0.5)
    unknown = {name for name, value in selection.to_json()[1].items() if value is None}
    assert unknown == ({"selection_score", "damage", "kl"} if text else {"selection_score"})


@pytest.mark.parametrize("text", [False, True])
def test_an_identity_that_fails_stops_it_with_the_cause_and_is_tried_again(text: bool, tmp_path: Path) -> None:
    with pytest.raises(StudyStopped, match="on the selection contexts: OutOfMemoryError: 2 GiB asked for"):
        selected([TARGET], failing("selection", IDENTITY, text), path=tmp_path)
    assert selected([TARGET], path=tmp_path).winner.individual.factors == TARGET


def test_a_kill_loses_one_block_at_most(tmp_path: Path) -> None:
    stops: list[tuple[int, int]] = []

    def noted(unit: Unit) -> Result:
        if unit.part == "selection" and unit.task != TEXT:
            stops.append((unit.start, unit.stop))
        return Landscape()(unit)

    selected([TARGET], noted, path=tmp_path)
    assert stops == [(0, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, CONTEXTS)] * 2
