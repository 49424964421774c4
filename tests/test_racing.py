"""What must hold for the race: exact changes no winner, probable seldom does and costs less, estimates are fair."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lpes_bake.search.ledger import Ledger, LimitReached, Limits
from lpes_bake.search.objective import FITNESS, OVER, Objective
from lpes_bake.search.racing import CHANCE, RESAMPLES, Entrant, Race, blocks, resampled_counts
from lpes_bake.search.units import TEXT, Factors, Result, Unit
from tests.synthetic import LAYERS, OBJECTIVE, PARAGRAPHS, TOKENS, Landscape

IDENTITY: Factors = (1.0,) * LAYERS
CONTEXTS = 64


def candidates(rng: np.random.Generator, count: int, spread: float = 0.25) -> list[Factors]:
    """Curves near the identity, good ones and bad ones."""
    return [
        tuple((1 + rng.uniform(-spread, spread) + np.cumsum(rng.normal(0, 0.04, LAYERS))).tolist())
        for _ in range(count)
    ]


def race(
    mode: str,
    landscape: Landscape | None = None,
    objective: Objective | None = None,
    contexts: int = CONTEXTS,
    tasks: int = 1,
    limits: Limits | None = None,
) -> Race:
    ledger = Ledger(None, landscape or Landscape(), limits=limits)
    return Race(ledger, objective or OBJECTIVE, layers=LAYERS, tasks=tasks, contexts=contexts, mode=mode)


def best_of(one: Race, keep: int) -> list[tuple[Factors, float | None]]:
    entrants = sorted(one.complete.values(), key=lambda entrant: -(entrant.score or 0.0))
    return [(entrant.factors, entrant.score) for entrant in entrants[:keep]]


def test_blocks_double_what_was_seen() -> None:
    assert blocks(67, 8) == [(0, 8), (8, 16), (16, 32), (32, 64), (64, 67)]
    assert blocks(64, 8) == [(0, 8), (8, 16), (16, 32), (32, 64)]
    assert blocks(5, 8) == [(0, 5)]


def test_scores_are_those_of_all_contexts_however_they_were_divided() -> None:
    asked = candidates(np.random.default_rng(0), 4)
    for mode in ("off", "exact", "probable"):
        one = race(mode, tasks=2, objective=Objective(leash=3.0, max_damage=9.0, leash_kl=0.1))
        for entrant in one.run(asked, keep=10):
            values, score = [], -3.0 * entrant.damage - 0.1 * entrant.kl
            for task, weight in enumerate(one.weights):
                result = Landscape()(Unit("score", "search", task, 0, CONTEXTS, entrant.factors))
                values.append(np.array(result.logprob))
                score += weight * values[-1].mean()
            # Damage and KL as Landscape's text makes them.
            away = sum((factor - 1) ** 2 for factor in entrant.factors)
            assert (entrant.damage, entrant.kl) == pytest.approx((0.2 * 3 * away,) * 2)
            assert entrant.complete and entrant.contexts == CONTEXTS and entrant.error is None
            assert entrant.score == pytest.approx(score, abs=1e-12)
            assert all(np.array_equal(mine, whole) for mine, whole in zip(entrant.values, values, strict=True))
            assert entrant.tokens == TOKENS * (CONTEXTS * (3 + 4) + PARAGRAPHS)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("fitness", FITNESS)
def test_the_exact_race_has_the_same_parents_as_no_race(fitness: str, over: str) -> None:
    dropped = 0
    for seed in range(6):
        objective, keep = replace(OBJECTIVE, fitness=fitness, over=over), 3
        landscape = Landscape(noise=0.3, seed=seed)
        races = {mode: race(mode, landscape, objective, 24, tasks=2) for mode in ("off", "exact")}
        # Context by context, so that bounds become tight and the last drops are close calls.
        races["exact"].blocks = [(context, context + 1) for context in range(24)]
        rng = np.random.default_rng(seed)
        for generation in [candidates(rng, 12, spread) for spread in (0.1, 0.1, 0.2)]:
            for one in races.values():
                entrants = one.run(generation, keep)
                dropped += sum(not entrant.complete for entrant in entrants)
            assert best_of(races["off"], keep) == best_of(races["exact"], keep)
        assert races["exact"].ledger.tokens <= races["off"].ledger.tokens
    # Of 24 candidates that meet earlier ones, in each of 6 runs.
    assert dropped > 30


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("fitness", FITNESS)
def test_the_probable_race_keeps_the_winner_and_costs_much_less(fitness: str, over: str) -> None:
    kept, share = [], []
    for seed in range(20):
        landscape, objective = Landscape(noise=0.2, seed=seed), replace(OBJECTIVE, fitness=fitness, over=over)
        asked = candidates(np.random.default_rng(seed), 24)
        whole, raced = race("off", landscape, objective), race("probable", landscape, objective)
        scores = [entrant.score or -math.inf for entrant in whole.run(asked, keep=6)]
        entrants = raced.run(asked, keep=6)
        kept.append(entrants[int(np.argmax(scores))].complete)
        share.append(raced.ledger.tokens / whole.ledger.tokens)
        # At least as many as there are parents are left, and the identity.
        assert len(raced.complete) >= 6 and IDENTITY in raced.complete
    assert np.mean(kept) >= 0.95
    # Accuracy tells less by each context.
    assert np.mean(share) < (0.8 if fitness == "accuracy" else 0.65)


def test_the_worst_are_dropped_after_the_first_block() -> None:
    asked = candidates(np.random.default_rng(0), 24)
    whole = race("off").run(asked, keep=6)
    entrants = race("probable").run(asked, keep=6)
    order = np.argsort([entrant.score or 0.0 for entrant in whole])
    assert all(entrants[place].contexts == 8 for place in order[:8])


def test_estimates_of_the_dropped_are_close_and_lean_to_no_side() -> None:
    errors, spread = [], []
    for seed in range(20):
        landscape = Landscape(noise=0.2, seed=seed)
        asked = candidates(np.random.default_rng(seed), 24)
        scores = [entrant.score or 0.0 for entrant in race("off", landscape).run(asked, keep=6)]
        spread.append(np.std(scores))
        for entrant, score in zip(race("probable", landscape).run(asked, keep=6), scores, strict=True):
            if not entrant.complete:
                assert entrant.score is not None
                errors.append(entrant.score - score)
    assert len(errors) > 200
    assert np.std(errors) < 0.3 * np.mean(spread)
    assert abs(np.mean(errors)) < 0.05 * np.mean(spread)


def test_an_estimate_is_the_identitys_score_and_the_difference_on_what_both_saw() -> None:
    one = race("probable")
    dropped = next(
        entrant for entrant in one.run(candidates(np.random.default_rng(0), 24), keep=6) if not entrant.complete
    )
    seen = slice(0, dropped.contexts)
    difference = (dropped.values[0] - one.identity.values[0][seen]).mean()
    assert dropped.score == pytest.approx(one.identity.values[0].mean() + difference - dropped.penalty)


@pytest.mark.parametrize("mode", ["exact", "probable"])
def test_what_is_too_dear_on_short_text_sees_no_context(mode: str) -> None:
    one = race(mode, objective=Objective(leash=1000.0))
    (entrant,) = one.run([(1.2,) * LAYERS], keep=1)
    assert not entrant.complete and entrant.contexts == 0 and entrant.tokens == TOKENS * PARAGRAPHS
    assert entrant.started and entrant.score == pytest.approx((one.identity.score or 0.0) - entrant.penalty)


def test_what_was_complete_before_is_not_raced_again() -> None:
    one = race("probable")
    better: list[Factors] = [tuple(np.linspace(1.04, 0.8 + i / 50, LAYERS).tolist()) for i in range(5)]
    first, *others = one.run([IDENTITY, *better], keep=1)
    # All others are better, and there is room for one: yet the identity is not dropped.
    assert first is one.identity and first.complete
    assert all((other.score or 0.0) > (first.score or 0.0) for other in others)
    tokens = one.ledger.tokens
    assert one.run([IDENTITY], keep=1) == [first] and one.ledger.tokens == tokens


def test_the_best_are_not_dropped_though_one_of_them_did_better_on_what_was_seen() -> None:
    one = race("probable", objective=Objective(leash=0.0), contexts=16)
    one.identity.values, one.identity.score = [np.full((16, 3), -1.0)], -1.0
    # Full score −.85, but −.2 on the first block.
    rival = Entrant((0.9,) * LAYERS, [np.repeat([[-0.2], [-1.5]], 8, axis=0) * np.ones(3)], -0.85, complete=True)
    one.complete[rival.factors] = rival
    second = Entrant((1.1,) * LAYERS, [np.full((8, 3), -0.8)])
    third = Entrant((1.2,) * LAYERS, [np.full((8, 3), -0.9)])
    assert one._chance(second, rival) == 0
    assert one._drop([second, third], keep=2) == [second]
    assert one._drop([second, third], keep=4) == [second, third]


class Failing(Landscape):
    """Fails for candidates whose first factor is below 0.9, in their second block."""

    def __call__(self, unit: Unit) -> Result:
        if unit.factors[0] < 0.9 and unit.start >= 8:
            raise RuntimeError("out of memory")
        return super().__call__(unit)


def test_a_failed_unit_fails_its_candidate_only() -> None:
    asked = candidates(np.random.default_rng(1), 12, spread=0.15)
    one = race("off", Failing())
    one.blocks = blocks(CONTEXTS, 8)
    for factors, entrant in zip(asked, one.run(asked, keep=3), strict=True):
        failed = factors[0] < 0.9
        assert (entrant.error == "RuntimeError: out of memory") == failed
        assert entrant.complete != failed and (entrant.score is None) == failed and entrant.started
        assert (factors in one.complete) != failed
    assert any(factors[0] < 0.9 for factors in asked)


def test_an_identity_that_fails_is_left_for_the_caller_to_see() -> None:
    def broken(unit: Unit) -> Result:
        raise OSError("the disk is gone")

    one = Race(Ledger(None, broken), Objective(), layers=LAYERS, tasks=1, contexts=8)
    assert one.identity.error == "OSError: the disk is gone" and one.identity.score is None


def test_a_limit_of_evaluations_lets_those_within_it_finish() -> None:
    asked = candidates(np.random.default_rng(0), 8)
    one = race("probable", limits=Limits(max_evaluations=4))
    entrants = one.run(asked, keep=8)
    assert one.limit == "the limit of 4 evaluations is reached"
    assert [entrant.complete for entrant in entrants] == [True] * 3 + [False] * 5
    assert [entrant.started for entrant in entrants] == [True] * 3 + [False] * 5


def test_a_limit_of_tokens_keeps_what_is_complete_by_then() -> None:
    asked = candidates(np.random.default_rng(0), 8)
    whole = race("off")
    scores = [entrant.score for entrant in whole.run(asked, keep=8)]
    # The identity; text for all; and three candidates on all contexts, the third cut short by nothing.
    task, text = TOKENS * CONTEXTS * 3, TOKENS * PARAGRAPHS
    one = race("off", limits=Limits(max_tokens=task + text + 8 * text + 3 * task))
    entrants = one.run(asked, keep=8)
    assert one.limit is not None and "tokens" in one.limit
    assert [entrant.complete for entrant in entrants] == [True] * 3 + [False] * 5
    assert [entrant.score for entrant in entrants[:3]] == scores[:3]
    with pytest.raises(LimitReached):
        race("off", limits=Limits(max_tokens=text))


def test_resamples_are_as_large_as_the_sample_and_the_same_each_time() -> None:
    counts = resampled_counts(16)
    assert counts.shape == (RESAMPLES, 16) and (counts.sum(1) == 16).all()
    # Each context is drawn once on average; the standard error of 500 draws of variance 15/16 is .043.
    assert np.abs(counts.mean(0) - 1).max() < 0.2
    resampled_counts.cache_clear()
    assert (resampled_counts(16) == counts).all()


def test_the_chance_agrees_with_the_normal_distribution() -> None:
    one = race("probable")
    one.contexts = 1_000_000
    rng = np.random.default_rng(3)
    seen = 100
    reference = Entrant(IDENTITY, values=[-rng.random((seen, 3)) - 1])
    noise = rng.normal(0, 0.5, (seen, 3))
    noise -= noise.mean()
    error = noise.mean(1).std(ddof=1) / math.sqrt(seen)
    for deviations in (-3, -2, -1, 0, 1):
        entrant = Entrant((0.9,) * LAYERS, values=[reference.values[0] + noise + deviations * error])
        expected = 0.5 * math.erfc(-deviations / math.sqrt(2))
        assert one._chance(entrant, reference) == pytest.approx(expected, abs=0.06)
    # Of 200 contexts 100 are certain: the deviations of the difference are smaller by √½.
    one.contexts = 2 * seen
    entrant = Entrant((0.9,) * LAYERS, values=[reference.values[0] + noise - error])
    assert one._chance(entrant, reference) == pytest.approx(0.5 * math.erfc(1.0), abs=0.05)


def test_accuracies_that_do_not_differ_are_not_told_apart_by_the_price_of_drift() -> None:
    one = race("probable", objective=Objective(fitness="accuracy"))
    nothing_right = [np.zeros((8, 3))]
    reference = Entrant(IDENTITY, values=nothing_right)
    assert one._chance(Entrant((0.9,) * LAYERS, values=nothing_right, penalty=0.01), reference) == 1.0
    assert one._chance(Entrant((0.9,) * LAYERS, values=nothing_right, penalty=0.1), reference) < CHANCE


def test_text_is_asked_for_first_and_only_once() -> None:
    units: list[Unit] = []

    class Watched(Landscape):
        def __call__(self, unit: Unit) -> Result:
            units.append(unit)
            return super().__call__(unit)

    one = race("off", Watched())
    one.run([(0.9,) * LAYERS, (1.1,) * LAYERS], keep=1)
    assert [unit.task for unit in units] == [TEXT, 0, TEXT, TEXT, 0, 0]
