"""The study and its journal on a landscape without a model: what survives failures, kills and resuming."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpes_bake.search.curve import CurveSettings
from lpes_bake.search.errors import InputError
from lpes_bake.search.genetic import GeneticSearch, GeneticSettings
from lpes_bake.search.journal import Journal
from lpes_bake.search.study import FAILURES_IN_A_ROW, Study, StudyResult, StudyStopped, Trial, differences

LAYERS = 12
SETTINGS: dict[str, Any] = {"seed": 0, "population": 6, "base": {"name": "none"}}


def score(factors: tuple[float, ...]) -> float:
    return -sum((factor - 0.8 - 0.02 * layer) ** 2 for layer, factor in enumerate(factors))


def run(
    path: Path,
    evaluate: Callable[[tuple[float, ...]], float] = score,
    settings: dict[str, Any] | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    population: int = 6,
) -> StudyResult:
    genetic = GeneticSettings(population=population, generations=5)
    sampler = GeneticSearch(CurveSettings(), genetic, LAYERS, np.random.default_rng(0))
    with Journal(path) as journal:
        return Study(sampler, evaluate, journal, settings or SETTINGS, on_trial).run()


class Killed(BaseException):
    """Ends a run in the middle of an evaluation, past every `except Exception`."""


def killed_after(count: int) -> Callable[[tuple[float, ...]], float]:
    calls = 0

    def evaluate(factors: tuple[float, ...]) -> float:
        nonlocal calls
        calls += 1
        if calls > count:
            raise Killed
        return score(factors)

    return evaluate


@pytest.mark.parametrize("count", [0, 1, 6, 17, 29])
def test_a_killed_run_resumes_to_the_same_result_and_repeats_no_evaluation(tmp_path: Path, count: int) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "killed", killed_after(count))
    evaluated: list[tuple[float, ...]] = []

    def counted(factors: tuple[float, ...]) -> float:
        evaluated.append(factors)
        return score(factors)

    resumed = run(tmp_path / "killed", counted)
    assert resumed == whole
    assert len(evaluated) == whole.trials - count

    def without_time(path: Path) -> list[Any]:
        return [{**json.loads(line)["record"], "seconds": 0} for line in path.read_text().splitlines()]

    assert without_time(tmp_path / "killed") == without_time(tmp_path / "whole")


def test_a_finished_run_is_replayed_without_any_evaluation(tmp_path: Path) -> None:
    whole = run(tmp_path / "journal")
    trials: list[Trial] = []
    assert run(tmp_path / "journal", killed_after(0), on_trial=trials.append) == whole
    assert len(trials) == whole.trials and all(trial.replayed for trial in trials)


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_dropped_and_evaluated_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    whole = run(path)
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    assert run(path) == whole
    assert path.read_bytes().count(b"\n") == content.count(b"\n")


def test_a_journal_torn_in_its_header_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = run(path)
    path.write_bytes(path.read_bytes()[:20])
    assert run(path) == whole


def test_damage_before_the_last_line_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    run(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"score": -', b'"score": -1')
    path.write_bytes(b"".join(lines))
    with pytest.raises(InputError, match=r"line 4 .* is damaged"):
        run(path)


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    run(tmp_path / "journal")
    with pytest.raises(InputError) as caught:
        run(tmp_path / "journal", settings={"seed": 1, "population": 6, "base": {"name": "other"}})
    assert "seed: 0 → 1" in str(caught.value)
    assert "base.name: 'none' → 'other'" in str(caught.value)
    assert "population" not in str(caught.value)


def test_differences_sees_missing_names_too() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "c": None, "d": 3}) == ["b: 2 → None", "d: None → 3"]


def test_a_journal_of_other_individuals_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "journal")
    sampler = GeneticSearch(
        CurveSettings(), GeneticSettings(population=6, generations=5), LAYERS, np.random.default_rng(1)
    )
    with Journal(tmp_path / "journal") as journal, pytest.raises(InputError, match="other control points"):
        Study(sampler, score, journal, SETTINGS).run()


def test_a_journal_in_use_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal"), pytest.raises(InputError, match="in use"):
        Journal(tmp_path / "journal")
    Journal(tmp_path / "journal").close()


def test_failed_evaluations_are_recorded_and_the_study_goes_on(tmp_path: Path) -> None:
    calls = 0

    def sometimes(factors: tuple[float, ...]) -> float:
        nonlocal calls
        calls += 1
        if calls % 4 == 2:
            raise RuntimeError("CUDA out of memory\nTried to allocate")
        return math.nan if calls % 4 == 3 else math.inf if calls % 4 == 0 else score(factors)

    trials: list[Trial] = []
    result = run(tmp_path / "journal", sometimes, on_trial=trials.append)
    assert result.trials == 30
    assert result.failed == sum(trial.score is None for trial in trials) == 22
    assert math.isfinite(result.best.score)
    assert trials[1].error == "RuntimeError: CUDA out of memory"
    assert trials[2].error == "the score is nan"
    # Failures replay as failures: the resumed run must come to the same end.
    assert run(tmp_path / "journal", killed_after(0)) == result


def broken(factors: tuple[float, ...]) -> float:
    raise OSError("the disk is gone")


def test_ten_failures_in_a_row_stop_it_with_the_cause_and_a_mended_run_goes_on(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", population=12)
    for already_there in (0, 10):
        with pytest.raises(StudyStopped, match=r"10 evaluations in a row failed.*OSError: the disk is gone"):
            run(tmp_path / "journal", broken, population=12)
        failures = (tmp_path / "journal").read_text().count("the disk is gone")
        assert failures == already_there + FAILURES_IN_A_ROW
    assert run(tmp_path / "journal", population=12) == whole
    assert run(tmp_path / "journal", killed_after(0), population=12) == whole


def test_a_small_first_population_that_fails_whole_stops_it_too(tmp_path: Path) -> None:
    with pytest.raises(StudyStopped, match=r"no individual could be scored.*OSError: the disk is gone"):
        run(tmp_path / "journal", broken)
    assert run(tmp_path / "journal") == run(tmp_path / "whole")


def test_no_factors_are_evaluated_twice(tmp_path: Path) -> None:
    evaluated: list[tuple[float, ...]] = []
    run(tmp_path / "journal", on_trial=lambda trial: evaluated.append(trial.individual.factors))
    assert len(evaluated) == len(set(evaluated)) == 30


KILLED_FOR_REAL = """
import os, signal, sys
from pathlib import Path
import tests.test_study as here

def evaluate(factors, calls=[]):
    calls.append(factors)
    if len(calls) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return here.score(factors)

here.run(Path(sys.argv[1]), evaluate)
"""


def test_what_was_told_is_on_the_disk_when_the_process_is_killed(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", KILLED_FOR_REAL, str(tmp_path / "journal")],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL
    assert len((tmp_path / "journal").read_text().splitlines()) == 1 + 8
    assert run(tmp_path / "journal") == run(tmp_path / "whole")
