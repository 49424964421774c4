"""What must hold for a study: failures, kills, limits and several processes change nothing that they should not."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpes_bake.search.curve import CurveSettings
from lpes_bake.search.errors import InputError
from lpes_bake.search.genetic import GeneticSettings
from lpes_bake.search.gradient import GradientSettings
from lpes_bake.search.ledger import Ledger, Limits, open_journal
from lpes_bake.search.objective import OVER, FloatArray, Objective, equally_long
from lpes_bake.search.optimizer import Individual, Optimizer, Outcome, Scored
from lpes_bake.search.optimizers import make_optimizer
from lpes_bake.search.processes import Processes, Single, connected
from lpes_bake.search.racing import Race
from lpes_bake.search.study import (
    FAILURES_IN_A_ROW,
    TEXT_BATCH,
    TEXT_UNIT,
    Study,
    StudyResult,
    StudySettings,
    StudyStopped,
    Trial,
)
from lpes_bake.search.units import TEXT, Factors, Result, Unit
from tests.synthetic import LAYERS, OBJECTIVE, PARAGRAPHS, TOKENS, Landscape

ROOT = Path(__file__).resolve().parent.parent
IDENTITY: Factors = (1.0,) * LAYERS
SETTINGS = StudySettings(contexts=24, gradient_contexts=8, gradient_batch=(2,))
# Tokens of the first things that a study of two tasks asks for: text, and the identity on all contexts.
IDENTITY_TOKENS = TOKENS * (PARAGRAPHS + 24 * 7)


def run(
    path: Path | None = None,
    compute: Callable[[Unit], Result] | None = None,
    *,
    optimizer: Optimizer | str = "hybrid",
    population: int = 6,
    objective: Objective | None = None,
    settings: StudySettings = SETTINGS,
    limits: Limits | None = None,
    processes: Processes | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    tasks: int = 2,
) -> StudyResult:
    """A small study, with a journal where a path is given."""
    if isinstance(optimizer, str):
        optimizer = make_optimizer(
            optimizer,
            CurveSettings(),
            GeneticSettings(population=population, generations=4),
            GradientSettings(steps=9, check_every=3, patience=3),
            LAYERS,
            np.random.default_rng(0),
        )

    def study(journal: Any) -> StudyResult:
        ledger = Ledger(journal, compute or Landscape(), processes, limits)
        return Study(
            optimizer, ledger, objective or OBJECTIVE, settings, layers=LAYERS, tasks=tasks, on_trial=on_trial
        ).run()

    if path is None:
        return study(None)
    with open_journal(path, {}, processes or Single()) as journal:
        return study(journal)


def essence(result: StudyResult) -> dict[str, Any]:
    """All of a result that can be compared: everything but seconds and whether it was replayed."""
    plain = {name: value for name, value in asdict(result).items() if name not in ("complete", "ranking")}
    complete = {factors: (one.score, one.damage, one.kl, one.tokens) for factors, one in result.complete.items()}
    return {**plain, "ranking": result.ranking, "complete": complete}


class Script:
    """An optimizer that asks for what it was given, and keeps what it was told."""

    ended: str | None = None
    parents = 1
    generation = 0

    def __init__(self, asks: Sequence[tuple[bool, Sequence[Factors]]]) -> None:
        self._asks = list(asks)
        self.wants_gradient = False
        self.told: list[Sequence[Outcome]] = []

    def ask(self) -> list[Individual]:
        if not self._asks:
            self.ended = "the script is over"
            return []
        self.wants_gradient, factors = self._asks.pop(0)
        return [Individual(one) for one in factors]

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        self.told.append(outcomes)

    def ranking(self) -> list[Scored]:
        return []


class Killed(BaseException):
    """Ends a run in the middle of a unit, past every `except Exception`."""


def killed_after(count: int) -> Callable[[Unit], Result]:
    calls = 0

    def compute(unit: Unit) -> Result:
        nonlocal calls
        calls += 1
        if calls > count:
            raise Killed
        return Landscape()(unit)

    return compute


def records(path: Path) -> list[Any]:
    """All records behind the header, without seconds."""
    lines = [json.loads(line)["record"] for line in path.read_text().splitlines()[1:]]
    return [{**line, "result": {**line["result"], "seconds": 0}} if "result" in line else line for line in lines]


@pytest.mark.parametrize("optimizer", ["genetic", "gradient", "hybrid", "cma-es", "random"])
def test_every_optimizer_improves_on_the_identity(optimizer: str) -> None:
    result = run(optimizer=optimizer)
    best, identity = result.ranking[0], result.complete[IDENTITY]
    assert identity.score is not None and best.score > identity.score + 0.01
    assert result.complete[best.individual.factors].score == best.score
    assert [one.score for one in result.ranking] == sorted((one.score for one in result.ranking), reverse=True)
    assert IDENTITY in [one.individual.factors for one in result.ranking]
    tokens, scores = zip(*result.convergence, strict=True)
    assert result.convergence[0] == (IDENTITY_TOKENS, identity.score)
    assert list(tokens) == sorted(tokens) and list(scores) == sorted(scores)
    assert result.convergence[-1] == (result.tokens, best.score)
    assert result.failed == 0 and result.trials >= result.evaluations


def test_trials_tell_what_came_of_each_candidate() -> None:
    trials: list[Trial] = []
    result = run(on_trial=trials.append)
    assert [trial.number for trial in trials] == list(range(result.trials))
    assert trials[0].factors == IDENTITY and trials[0].damage == 0 and trials[0].tokens == IDENTITY_TOKENS
    assert [trial.generation for trial in trials] == sorted(trial.generation for trial in trials)
    assert len({trial.factors for trial in trials}) == result.evaluations
    gradients = [trial for trial in trials if trial.gradient]
    assert len(gradients) == 9 and all(trial.contexts == 2 and not trial.complete for trial in gradients)
    scored = [trial for trial in trials if not trial.gradient]
    assert result.dropped == sum(not trial.complete for trial in scored) > 0
    assert all((trial.contexts == 24) == trial.complete for trial in scored)
    assert {trial.factors for trial in scored if trial.complete} == set(result.complete)
    assert all(trial.points is not None and not trial.replayed for trial in scored)


@pytest.mark.parametrize("count", [0, 1, 7, 40, 120])
def test_a_killed_run_resumes_to_the_same_result_and_repeats_no_unit(tmp_path: Path, count: int) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "killed", killed_after(count))
    assert essence(run(tmp_path / "killed")) == essence(whole)
    assert records(tmp_path / "killed") == records(tmp_path / "whole")
    units = [json.dumps(record["unit"]) for record in records(tmp_path / "whole")]
    assert len(units) == len(set(units)) > 120


def test_a_finished_run_is_replayed_without_any_unit(tmp_path: Path) -> None:
    whole = run(tmp_path / "journal")
    trials: list[Trial] = []
    assert essence(run(tmp_path / "journal", killed_after(0), on_trial=trials.append)) == essence(whole)
    assert len(trials) == whole.trials and all(trial.replayed for trial in trials)


KILLED = """
import sys
from pathlib import Path
from tests.synthetic import Landscape
from tests.test_study import run

print("ready", flush=True)
print(run(Path(sys.argv[1]), Landscape(seconds=0.004)).ranking[0].individual.factors)
"""


def test_fifty_kills_at_random_moments_change_no_digit_of_the_factors(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    moments = random.Random(0)
    killed = journal = amid = 0
    while killed < 50:
        path = tmp_path / f"killed-{journal}"
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(moments.uniform(0, 0.08))
        process.kill()
        printed = process.stdout.read()
        process.wait()
        killed += 1
        if printed:
            # It was done before it was killed: so many kills did not matter. On with a new one.
            assert printed == f"{whole.ranking[0].individual.factors}\n"
            journal += 1
        else:
            assert process.returncode == -signal.SIGKILL
            amid += path.exists() and path.stat().st_size > 0
    assert amid > 40
    for number in range(journal + 1):
        assert essence(run(tmp_path / f"killed-{number}")) == essence(whole)
        assert records(tmp_path / f"killed-{number}") == records(tmp_path / "whole")


def test_a_failed_candidate_is_recorded_never_wins_and_the_study_goes_on(tmp_path: Path) -> None:
    def sometimes(unit: Unit) -> Result:
        result = Landscape()(unit)
        if unit.factors[0] > 1.1:
            raise RuntimeError("CUDA out of memory\nTried to allocate")
        if unit.factors[0] < 0.9:
            # As though it were perfect, but for one NaN.
            logprob = [[0.0 for _ in row] for row in result.logprob]
            logprob[-1][-1] = float("nan")
            return Result(logprob=logprob, kl=result.kl, tokens=result.tokens)
        return result

    trials: list[Trial] = []
    result = run(tmp_path / "journal", sometimes, optimizer="genetic", population=9, on_trial=trials.append)
    errors = {trial.factors: trial.error for trial in trials}
    assert {error for factors, error in errors.items() if factors[0] > 1.1} == {"RuntimeError: CUDA out of memory"}
    assert {error for factors, error in errors.items() if factors[0] < 0.9} == {"the model gave NaN or infinity"}
    assert result.failed == sum(error is not None for error in errors.values()) >= 4
    assert all(0.9 <= one.individual.factors[0] <= 1.1 for one in result.ranking)
    # Failures replay as failures: the resumed run must come to the same end.
    assert essence(run(tmp_path / "journal", killed_after(0), optimizer="genetic", population=9)) == essence(result)


def test_ten_failures_in_a_row_stop_it_with_the_cause_and_a_mended_run_goes_on(tmp_path: Path) -> None:
    def broken(unit: Unit) -> Result:
        if unit.factors != IDENTITY:
            raise OSError("the disk is gone")
        return Landscape()(unit)

    whole = run(tmp_path / "whole", population=14)
    for already_there in (0, 1):
        with pytest.raises(StudyStopped, match=r"10 trials in a row failed, the last with: OSError: the disk is gone"):
            run(tmp_path / "journal", broken, population=14)
        text = (tmp_path / "journal").read_text()
        assert text.count('"forget"') == already_there + 1
        # They were tried again, and are in the journal again.
        assert text.count("the disk is gone") >= (already_there + 1) * FAILURES_IN_A_ROW
    result = run(tmp_path / "journal", population=14)
    # What failed beside the ten, in the same generation, was not what stopped the study: it stays as it is.
    assert result.failed <= 4 and result.ranking[0].score > whole.convergence[0][1]
    assert essence(run(tmp_path / "journal", killed_after(0), population=14)) == essence(result)


def test_failures_that_are_not_in_a_row_do_not_stop_it() -> None:
    def every_other(unit: Unit) -> Result:
        if unit.factors[0] < 1:
            raise OSError("the disk is gone")
        return Landscape()(unit)

    asks = [(False, [(0.8 + number / 100,) * LAYERS, (1.01 + number / 100,) * LAYERS]) for number in range(12)]
    assert run(compute=every_other, optimizer=Script(asks)).failed == 12


def test_an_identity_that_fails_stops_it_at_once_with_the_cause_and_a_mended_run_goes_on(tmp_path: Path) -> None:
    calls = 0

    def broken(unit: Unit) -> Result:
        nonlocal calls
        calls += 1
        if unit.task != TEXT and unit.start == 0:
            raise OSError("the disk is gone")
        return Landscape()(unit)

    with pytest.raises(StudyStopped, match=r"all factors 1\) cannot be scored: OSError: the disk is gone"):
        run(tmp_path / "journal", broken)
    assert calls < 10
    assert essence(run(tmp_path / "journal")) == essence(run())


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(max_evaluations=1), "the limit of 1 evaluations"),
        (Limits(max_evaluations=9), "the limit of 9 evaluations"),
        (Limits(max_evaluations=27), "the limit of 27 evaluations"),
        (Limits(max_tokens=IDENTITY_TOKENS), "tokens is reached"),
        (Limits(max_tokens=2 * IDENTITY_TOKENS), "tokens is reached"),
        (Limits(max_tokens=10 * IDENTITY_TOKENS), "tokens is reached"),
    ],
)
def test_a_limit_ends_the_study_with_its_best_and_it_can_go_on(tmp_path: Path, limits: Limits, words: str) -> None:
    path, whole = tmp_path / "journal", run()
    stopped = run(path, limits=limits)
    assert words in stopped.ended and len(stopped.ranking) >= 1
    assert stopped.evaluations <= (limits.max_evaluations or whole.evaluations)
    # Over by less than the last unit.
    assert stopped.tokens < (limits.max_tokens or whole.tokens) + IDENTITY_TOKENS
    assert whole.convergence[0][1] <= stopped.ranking[0].score <= whole.ranking[0].score
    # Killed at any moment, it ends in the same place.
    for count in (5, 20):
        other = tmp_path / f"killed-{count}"
        if len(records(path)) > count:
            with pytest.raises(Killed):
                run(other, killed_after(count), limits=limits)
        assert essence(run(other, limits=limits)) == essence(stopped)
    assert essence(run(path)) == essence(whole)


def test_after_a_limit_nothing_more_is_asked_and_what_was_not_reached_is_no_trial() -> None:
    trials: list[Trial] = []
    script = Script([(False, [(0.8 + number / 20,) * LAYERS for number in range(3)]), (False, [(0.7,) * LAYERS])])
    result = run(optimizer=script, limits=Limits(max_evaluations=3), on_trial=trials.append)
    assert len(script.told) == 1 and script.told[0][2] == Outcome(None, complete=False)
    assert [trial.factors[0] for trial in trials] == pytest.approx([0.8, 0.85]) and result.trials == 2


def test_a_study_out_of_time_ends_with_the_best_so_far(tmp_path: Path) -> None:
    with pytest.raises(StudyStopped, match=r"minutes is reached, before the model itself"):
        run(tmp_path / "journal", limits=Limits(max_time=1e-9))
    # However slow the machine: the identity is known.
    run(tmp_path / "journal", limits=Limits(max_evaluations=1))
    limits = Limits(max_time=0.3 / 60)
    result = run(tmp_path / "journal", Landscape(seconds=0.01), limits=limits)
    assert "the limit of 0.005 minutes is reached" in result.ended
    assert result.ranking and result.evaluations < run().evaluations
    assert essence(run(tmp_path / "journal")) == essence(run())


def test_a_limit_before_the_identity_is_scored_says_so() -> None:
    with pytest.raises(StudyStopped, match=r"the limit of 1 tokens is reached, before the model itself"):
        run(limits=Limits(max_tokens=1))


def test_an_optimizer_that_never_scores_leaves_the_identity() -> None:
    result = run(optimizer=Script([(True, [(0.9,) * LAYERS])]))
    assert [one.individual.factors for one in result.ranking] == [IDENTITY]
    assert result.ended == "the script is over"


@pytest.mark.parametrize("task_weights", [(), (3.0, 1.0)], ids=str)
@pytest.mark.parametrize("over", OVER)
def test_gradients_are_those_of_the_objective_on_the_minibatch(over: str, task_weights: tuple[float, ...]) -> None:
    rng = np.random.default_rng(0)
    factors = tuple((1 + rng.uniform(-0.2, 0.2, LAYERS)).tolist())
    objective = Objective(over=over, task_weights=task_weights, leash=2.0, max_damage=9.0, leash_kl=0.3)
    landscape = Landscape(noise=0.0)
    script = Script([(True, [factors])])
    run(compute=landscape, optimizer=script, objective=objective)
    (outcome,) = script.told[0]
    assert outcome.gradient is not None and not outcome.complete
    race = Race(Ledger(None, landscape), objective, layers=LAYERS, tasks=2, contexts=SETTINGS.contexts)

    def parts(shifted: Sequence[float]) -> FloatArray:
        """What both tasks and short text add to the objective on contexts 24 and 25, which the first minibatch holds.
        Without noise the worst and the best position are the same for all candidates."""
        units = [Unit("score", "search", task, 24, 26, tuple(shifted)) for task in (0, 1)]
        text = landscape(Unit("score", "search", TEXT, 0, TEXT_BATCH, tuple(shifted)))
        damage = float(np.mean(-3.2 - np.array(text.logprob)))
        values = [np.array(landscape(unit).logprob) for unit in units]
        found = []
        for weight, each, whole in zip(race.weights, values, race.identity.values, strict=True):
            by_position, means = each.mean(0), whole.mean(0)
            if over == "mean":
                found.append(weight * by_position.mean())
            elif over == "worst":
                found.append(weight * by_position[means.argmin()])
            else:
                found.append(weight * (by_position.mean() + by_position[means.argmin()] - by_position[means.argmax()]))
        return np.array([*found, -objective.leash * damage - objective.leash_kl * float(np.mean(text.kl))])

    step = 1e-6
    slopes = [(parts(factors + step * axis) - parts(factors - step * axis)) / (2 * step) for axis in np.eye(LAYERS)]
    first, second, text = np.array(slopes).T
    # The longer of the two tasks' gradients is brought to the length of the other, then each counts as the user says;
    # that of short text stays as it is.
    lengths = np.linalg.norm(first), np.linalg.norm(second)
    assert max(lengths) > 1.1 * min(lengths)
    ones, twos = (1.5, 0.5) if task_weights else (1, 1)
    expected = min(lengths) * (ones * first / lengths[0] + twos * second / lengths[1]) + text
    assert outcome.gradient == pytest.approx(expected, rel=1e-5, abs=1e-8)
    if over == "mean":
        assert outcome.score == pytest.approx(parts(factors).sum())


def test_a_task_without_a_gradient_leaves_the_others_as_they_are() -> None:
    long, short, none = np.array([3.0, 4.0]), np.array([0.0, 1.0]), np.zeros(2)
    shortened = np.array(equally_long([long, none, short]))
    assert shortened == pytest.approx(np.array([[0.6, 0.8], [0.0, 0.0], [0.0, 1.0]]))
    # A task that is all but solved sets no length.
    solved = np.array([0.0, 1e-6])
    assert np.array(equally_long([long, solved, short])) == pytest.approx(np.array([[0.6, 0.8], solved, [0.0, 1.0]]))
    assert equally_long([none])[0].tolist() == [0.0, 0.0]
    assert equally_long([long])[0].tolist() == [3.0, 4.0]


def test_minibatches_follow_one_another_behind_the_scored_contexts_and_begin_again() -> None:
    units: list[Unit] = []

    def watched(unit: Unit) -> Result:
        units.append(unit)
        return Landscape()(unit)

    steps = [(True, [(0.9 + number / 100,) * LAYERS]) for number in range(5)]
    settings = StudySettings(contexts=24, gradient_contexts=7, gradient_batch=(2,))
    run(compute=watched, optimizer=Script(steps), settings=settings)
    slices = [(unit.task, unit.start, unit.stop) for unit in units if unit.kind == "gradient"]
    starts = [(24, 0), (26, 16), (28, 0), (24, 16), (26, 0)]
    # A unit is one context, or a few paragraphs: what several processes share out among them.
    assert slices == [
        (task, first, first + size)
        for start, text in starts
        for task, begin, end, size in (
            (0, start, start + 2, 1),
            (1, start, start + 2, 1),
            (TEXT, text, text + TEXT_BATCH, TEXT_UNIT),
        )
        for first in range(begin, end, size)
    ]
    scored = [unit for unit in units if unit.kind == "score"]
    assert max(unit.stop for unit in scored) == 24


def test_each_task_can_have_minibatches_of_its_own_size() -> None:
    units: list[Unit] = []

    def watched(unit: Unit) -> Result:
        units.append(unit)
        return Landscape()(unit)

    steps = [(True, [(0.9 + number / 100,) * LAYERS]) for number in range(3)]
    settings = StudySettings(contexts=24, gradient_contexts=7, gradient_batch=(3, 1))
    run(compute=watched, optimizer=Script(steps), settings=settings, objective=Objective(leash=0.0))
    slices = [(unit.task, unit.start, unit.stop) for unit in units if unit.kind == "gradient"]
    starts = [(0, start) for start in (24, 25, 26)], [(0, start) for start in (27, 28, 29)]
    expected = [*starts[0], (1, 24), *starts[1], (1, 25), *starts[0], (1, 26)]
    assert slices == [(task, start, start + 1) for task, start in expected]
    with pytest.raises(InputError, match="gradient_batch has 3 numbers for 2 tasks"):
        run(optimizer=Script(steps), settings=replace(settings, gradient_batch=(1, 1, 1)))


def test_gradients_see_a_price_that_rises_while_damage_is_beyond_its_limit() -> None:
    seen: dict[Factors, float] = {}

    def watched(unit: Unit) -> Result:
        if unit.kind == "gradient" and unit.task == TEXT:
            seen[unit.factors] = unit.weights[0]
        return Landscape()(unit)

    # Three steps where short text suffers, then three where it does not.
    steps = [(True, [(number,) * LAYERS]) for number in (0.9, 0.901, 0.902, 1.0, 1.0001, 1.0002)]
    run(compute=watched, optimizer=Script(steps), objective=Objective(leash=2.0, max_damage=0.005))
    prices = list(seen.values())
    assert prices[0] == 2.0
    assert prices[0] < prices[1] < prices[2] < prices[3] > prices[4] > prices[5] > 2.0


def test_without_a_leash_gradients_need_no_text() -> None:
    script = Script([(True, [(0.9,) * LAYERS])])
    settings = Objective(leash=0.0)
    trials: list[Trial] = []
    run(optimizer=script, objective=settings, on_trial=trials.append)
    assert trials[0].tokens == TOKENS * 2 * 7
    (outcome,) = script.told[0]
    assert outcome.gradient is not None and outcome.score == trials[0].score


def test_where_accuracy_is_the_fitness_gradients_are_of_the_log_probability() -> None:
    def compute(unit: Unit) -> Result:
        result = Landscape()(unit)
        if unit.accuracy or unit.task == TEXT:
            return result
        # As for a task whose accuracy needs generation, which was not asked for.
        return replace(result, exact=[[None for _ in row] for row in result.exact])

    script = Script([(False, [(1.05,) * LAYERS]), (True, [(0.9,) * LAYERS])])
    run(compute=compute, optimizer=script, objective=Objective(fitness="accuracy", leash=0.0))
    scored, climbed = script.told[0][0], script.told[1][0]
    assert scored.score is not None and 0 <= scored.score <= 1
    assert climbed.gradient is not None and climbed.score is not None and climbed.score < 0


def test_a_gradient_that_fails_is_told_as_failed_and_counts_in_the_row() -> None:
    def broken(unit: Unit) -> Result:
        result = Landscape()(unit)
        return Result(**{**asdict(result), "gradient": [float("nan")] * LAYERS}) if result.gradient else result

    script = Script([(True, [(0.9 + number / 100,) * LAYERS]) for number in range(12)])
    with pytest.raises(StudyStopped, match=r"10 trials in a row failed, the last with: the model gave NaN or infinity"):
        run(compute=broken, optimizer=script)
    assert [outcome.score for outcomes in script.told for outcome in outcomes] == [None] * 9


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="gradient_contexts is 0; give at least 8"):
        run(optimizer="gradient", settings=StudySettings(contexts=4, gradient_contexts=0))
    with pytest.raises(InputError, match="less than one minibatch"):
        StudySettings(gradient_contexts=1)
    for batch in ((), (2, 0)):
        with pytest.raises(InputError, match=r"gradient_batch is '.*'; it must be numbers of at least 1"):
            StudySettings(gradient_batch=batch)
    with pytest.raises(InputError, match="first_block is 0"):
        StudySettings(first_block=0)
    with pytest.raises(InputError, match="race must be one of"):
        StudySettings(race="fair")


TOGETHER = """
import sys
from pathlib import Path
from lpes_bake.search.ledger import Ledger, Limits, open_journal
from lpes_bake.search.processes import connected
from tests.synthetic import Landscape, score_unit
from tests.test_study import essence, run

with connected() as processes:
    path = Path(sys.argv[1])
    found = [essence(run(path / "whole", processes=processes))]
    found.append(essence(run(path / "limited", processes=processes, limits=Limits(max_evaluations=9))))
    (path / f"found-{processes.rank}").write_text(repr(found))
    with open_journal(path / "dealt", {}, processes) as journal:
        units = [score_unit(number, task) for number in (1.0, 0.9, 1.1) for task in (0, 1)]
        Ledger(journal, Landscape(), processes).results(units)
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_two_processes_find_the_same_to_the_last_digit(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TOGETHER)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path)], cwd=ROOT, env=environment, timeout=240, check=False
    )
    assert done.returncode == 0
    expected = repr([essence(run(tmp_path / "one")), essence(run(limits=Limits(max_evaluations=9)))])
    assert [(tmp_path / f"found-{rank}").read_text() for rank in (0, 1)] == [expected] * 2

    def by_unit(path: Path) -> dict[str, Any]:
        found = {json.dumps(record["unit"]): record["result"] for record in records(path)}
        assert len(found) == len(records(path))
        return found

    assert by_unit(tmp_path / "whole") == by_unit(tmp_path / "one")
    # Units of one task last equally long, so they are dealt together, and neither process waits for the other.
    assert [record["unit"]["task"] for record in records(tmp_path / "dealt")] == [0, 0, 1, 1, 0, 1]


LOSING_ONE = """
import sys
from pathlib import Path
from lpes_bake.search.errors import InputError
from lpes_bake.search.processes import PeerLost, connected
from tests.synthetic import Landscape
from tests.test_study import run

with connected() as processes:
    try:
        run(Path(sys.argv[1]) / "in-use", processes=processes)
    except InputError as error:
        print(error)

    def dies(unit):
        if processes.rank == 1 and unit.start == 8:
            raise KeyboardInterrupt
        return Landscape()(unit)

    try:
        run(Path(sys.argv[1]) / "lost", dies, processes=processes)
    except PeerLost as error:
        print(error)
"""


def test_an_error_of_one_process_ends_the_others_too(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with open_journal(tmp_path / "in-use", {}, Single()):
        # No launcher, which would end the others by itself.
        both = [
            subprocess.Popen(
                [sys.executable, "-c", LOSING_ONE, str(tmp_path)],
                cwd=ROOT,
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        (first, _), (second, errors) = [process.communicate(timeout=120) for process in both]
    assert "is in use by a run" in first and "is in use by a run" in second
    assert both[0].returncode == 0 and "another process of this run has ended" in first
    assert both[1].returncode != 0 and "KeyboardInterrupt" in errors
    # What was computed before is safe.
    assert essence(run(tmp_path / "lost")) == essence(run())


def test_without_a_launcher_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with connected() as processes:
        assert (processes.rank, processes.world_size) == (0, 1)
        assert processes.gather(3) == [3] and processes.broadcast(3) == 3


@pytest.mark.parametrize("options", [[], ["--num_processes", "2"]])
def test_a_launcher_that_starts_one_process_in_place_of_two_is_seen(tmp_path: Path, options: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("from lpes_bake.search.processes import too_few\nprint('says:', too_few())\n")
    # Without a GPU in sight, wherever this runs.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *options, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.count("says:") == 1
    assert ("one process only" in done.stdout) == bool(options)
