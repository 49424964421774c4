"""What must hold for the ledger and its journal: nothing is computed twice, nothing is lost, limits are kept."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lpes_bake.search.errors import InputError
from lpes_bake.search.journal import Journal, check_header, differences
from lpes_bake.search.ledger import Ledger, LimitReached, Limits, open_journal
from lpes_bake.search.processes import Single
from lpes_bake.search.units import TEXT, Result, Unit
from tests.synthetic import Landscape, ledger_at, score_unit

UNITS = [score_unit(number, start=start, stop=start + 2) for number in (1.0, 0.9, 1.1) for start in (0, 2)]
# Landscape's cost of each of UNITS: 2 contexts at 3 positions, 10 tokens each.
UNIT_TOKENS = 60


class Killed(BaseException):
    """Ends a run in the middle of a unit, past every `except Exception`."""


class Counting:
    """Computes units and keeps them; is killed at the one after `most`."""

    def __init__(self, compute: Callable[[Unit], Result] | None = None, most: int = 1_000) -> None:
        self.units: list[Unit] = []
        self._compute, self._most = compute or Landscape(), most

    def __call__(self, unit: Unit) -> Result:
        if len(self.units) >= self._most:
            raise Killed
        self.units.append(unit)
        return self._compute(unit)


def records(path: Path) -> list[Any]:
    return [json.loads(line)["record"] for line in path.read_text().splitlines()]


def test_units_and_results_survive_json_to_the_last_digit() -> None:
    unit = Unit("gradient", "report", TEXT, 0, 7, (0.1 + 0.2, 1 / 3), accuracy=True, weights=(1.2, -0.2))
    assert Unit.from_json(json.loads(json.dumps(unit.to_json()))) == unit
    result = Result(
        logprob=[[-1 / 3, -2e-17], [-0.1, -5.0]],
        probability=[[0.5, 1.0], [0.0, 1 / 7]],
        exact=[[True, None], [False, True]],
        kl=[1e-9],
        gradient=[0.1 + 0.2, -3.0],
        tokens=12,
        seconds=0.25,
    )
    assert Result.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_numbers_that_are_not_finite_become_null_and_nan() -> None:
    result = Result(
        logprob=[[-1.0, math.nan], [-math.inf, -2.0]], exact=[[None, True], [True, True]], gradient=[math.nan]
    )
    text = json.dumps(result.to_json(), allow_nan=False)
    assert json.loads(text)["logprob"] == [[-1.0, None], [None, -2.0]]
    back = Result.from_json(json.loads(text))
    assert back.logprob[0][0] == -1.0 and math.isnan(back.logprob[0][1]) and math.isnan(back.logprob[1][0])
    assert math.isnan(back.gradient[0]) and back.exact == result.exact
    assert not result.finite and not back.finite and Result(logprob=[[-1.0]], kl=[0.0]).finite


def test_no_unit_is_computed_twice_neither_in_one_list_nor_in_a_later_run(tmp_path: Path) -> None:
    compute = Counting()
    with ledger_at(tmp_path / "journal", compute) as ledger:
        first = ledger.results([UNITS[0], UNITS[1], UNITS[0]])
        assert first[0] == first[2] != first[1]
        assert ledger.results([UNITS[1], UNITS[2]])[0] == first[1]
        assert compute.units == UNITS[:3] and all(map(ledger.computed, UNITS[:3]))
    with ledger_at(tmp_path / "journal", compute) as ledger:
        assert ledger.results(UNITS[:2]) == first[:2]
        assert compute.units == UNITS[:3] and not ledger.computed(UNITS[0])
        # Any other field makes another unit.
        ledger.results([score_unit(1.0, part="report"), score_unit(1.0, stop=1), score_unit(1.0, task=1)])
    assert len(compute.units) == 6


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_killed_run_goes_on_and_has_lost_only_the_unit_in_work(tmp_path: Path, count: int) -> None:
    with ledger_at(tmp_path / "whole", Landscape()) as ledger:
        whole = ledger.results(UNITS)
    with pytest.raises(Killed), ledger_at(tmp_path / "killed", Counting(most=count)) as ledger:
        ledger.results(UNITS)
    assert len(records(tmp_path / "killed")) == 1 + count
    compute = Counting()
    with ledger_at(tmp_path / "killed", compute) as ledger:
        assert ledger.results(UNITS) == whole
    assert compute.units == UNITS[count:]
    assert records(tmp_path / "killed") == records(tmp_path / "whole")


KILLS_ITSELF = """
import os, signal, sys
from pathlib import Path
from tests.synthetic import Landscape, ledger_at
from tests.test_ledger import UNITS

def compute(unit):
    if unit == UNITS[4]:
        os.kill(os.getpid(), signal.SIGKILL)
    return Landscape()(unit)

with ledger_at(Path(sys.argv[1]), compute) as ledger:
    ledger.results(UNITS)
"""


def test_what_was_computed_is_in_the_file_when_the_process_is_killed(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", KILLS_ITSELF, str(tmp_path / "journal")]
    done = subprocess.run(command, cwd=root, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [record["unit"] for record in records(tmp_path / "journal")[1:]] == [
        json.loads(json.dumps(unit.to_json())) for unit in UNITS[:4]
    ]


def test_each_record_is_synced_to_the_disk_before_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    sync = os.fsync

    def watched(file: int) -> None:
        sync(file)
        synced.append((tmp_path / "journal").read_bytes().count(b"\n"))

    monkeypatch.setattr(os, "fsync", watched)
    with ledger_at(tmp_path / "journal", Landscape()) as ledger:
        for done, unit in enumerate(UNITS, start=1):
            ledger.results([unit])
            assert synced[-1] == 1 + done


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_is_dropped_and_computed_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    with ledger_at(path, Landscape()) as ledger:
        whole = ledger.results(UNITS)
    content = path.read_bytes()
    path.write_bytes(content[:-cut])
    compute = Counting()
    with ledger_at(path, compute) as ledger:
        assert ledger.results(UNITS) == whole
    assert compute.units == UNITS[-1:] and path.read_bytes() == content


def test_a_journal_torn_in_its_header_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with ledger_at(path, Landscape()) as ledger:
        ledger.results(UNITS)
    content = path.read_bytes()
    path.write_bytes(content[:20])
    with ledger_at(path, Landscape()) as ledger:
        ledger.results(UNITS)
    assert path.read_bytes() == content


def test_damage_before_the_last_line_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with ledger_at(path, Landscape()) as ledger:
        ledger.results(UNITS)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"logprob": [[-', b'"logprob": [[-1')
    path.write_bytes(b"".join(lines))
    with pytest.raises(InputError, match=r"line 4 .* is damaged"):
        Journal(path)


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as journal:
        check_header(journal, {"seed": 0, "population": 6, "base": {"name": "none"}})
    with Journal(tmp_path / "journal") as journal, pytest.raises(InputError) as caught:
        check_header(journal, {"seed": 1, "population": 6, "base": {"name": "other"}})
    assert "seed: 0 → 1" in str(caught.value)
    assert "base.name: 'none' → 'other'" in str(caught.value)
    assert "population" not in str(caught.value)


def test_differences_sees_missing_names_too() -> None:
    assert differences({"a": 1, "b": 2}, {"a": 1, "c": None, "d": 3}) == ["b: 2 → None", "d: None → 3"]


def test_a_journal_of_another_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as journal:
        journal.append({"journal": 1, "settings": {}})
    with (
        pytest.raises(InputError, match=r"format 1, .* reads 2; go on with the version that wrote it, or start a new"),
        open_journal(tmp_path / "journal", {}, Single()),
    ):
        pass
    # It is closed again, and as it was.
    with Journal(tmp_path / "journal") as journal:
        assert journal.records == [{"journal": 1, "settings": {}}]


def test_a_journal_in_use_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal"), pytest.raises(InputError, match="in use"):
        Journal(tmp_path / "journal")
    Journal(tmp_path / "journal").close()


def test_a_unit_that_throws_or_is_not_finite_fails_and_stays_failed(tmp_path: Path) -> None:
    def compute(unit: Unit) -> Result:
        time.sleep(0.01)
        if unit == UNITS[0]:
            raise RuntimeError("CUDA out of memory\nTried to allocate")
        if unit == UNITS[1]:
            raise KeyError
        number = {UNITS[2]: math.nan, UNITS[3]: -math.inf}.get(unit, -1.0)
        return Result(logprob=[[-1.0, number]])

    with ledger_at(tmp_path / "journal", compute) as ledger:
        results = ledger.results(UNITS)
    errors = [result.error for result in results]
    assert results[2].logprob == [] and all(0.01 <= result.seconds < 10 for result in results[:2])
    not_finite = "the model gave NaN or infinity"
    expected = ["RuntimeError: CUDA out of memory", "KeyError: no message", not_finite, not_finite, None, None]
    assert errors == expected
    with ledger_at(tmp_path / "journal", Counting(most=0)) as ledger:
        assert [result.error for result in ledger.results(UNITS)] == expected


def test_an_interrupt_is_no_failure_of_the_unit(tmp_path: Path) -> None:
    def interrupted(unit: Unit) -> Result:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ledger_at(tmp_path / "journal", interrupted) as ledger:
        ledger.results(UNITS)
    assert len(records(tmp_path / "journal")) == 1


def test_failures_that_were_forgotten_are_tried_again_and_no_others(tmp_path: Path) -> None:
    def broken(unit: Unit) -> Result:
        if unit.start == 0:
            raise OSError("the disk is gone")
        return Landscape()(unit)

    with ledger_at(tmp_path / "journal", broken) as ledger:
        assert [result.error is None for result in ledger.results(UNITS)] == [False, True] * 3
        ledger.forget([UNITS[0].factors, UNITS[2].factors])
    compute = Counting()
    with ledger_at(tmp_path / "journal", compute) as ledger:
        errors = [result.error for result in ledger.results(UNITS)]
    assert compute.units == [UNITS[0], UNITS[2]]
    assert errors == [None] * 4 + ["OSError: the disk is gone", None]
    # What they came to the second time counts from now on.
    with ledger_at(tmp_path / "journal", Counting(most=0)) as ledger:
        assert [result.error for result in ledger.results(UNITS)] == errors


def test_tokens_and_candidates_are_counted_once_computed_or_known(tmp_path: Path) -> None:
    for _ in range(2):
        with ledger_at(tmp_path / "journal", Landscape()) as ledger:
            ledger.results([*UNITS[:3], UNITS[0]])
            ledger.results(UNITS[1:4])
            assert ledger.tokens == 4 * UNIT_TOKENS
            ledger.results([score_unit(0.7, part="report")])
            assert ledger.tokens == 5 * UNIT_TOKENS
            assert ledger.evaluations == 2


@pytest.mark.parametrize(
    ("limits", "done", "reason"),
    [
        (Limits(max_tokens=1), 1, "the limit of 1 tokens is reached"),
        (Limits(max_tokens=3 * UNIT_TOKENS), 3, "the limit of 180 tokens is reached"),
        (Limits(max_tokens=3 * UNIT_TOKENS + 1), 4, "the limit of 181 tokens is reached"),
        (Limits(max_evaluations=2), 4, "the limit of 2 evaluations is reached"),
        (Limits(max_time=1e-9), 1, "the limit of 1e-09 minutes is reached"),
    ],
)
def test_a_limit_stops_the_search_and_hands_over_what_came_before(
    tmp_path: Path, limits: Limits, done: int, reason: str
) -> None:
    whole = Ledger(None, Landscape()).results(UNITS)
    for run in range(2):
        with ledger_at(tmp_path / "journal", Landscape(), limits=limits) as ledger:
            with pytest.raises(LimitReached) as caught:
                ledger.results(UNITS)
            if run == 0 or limits.max_time is None:
                # A resumed run stops where the first one did, but for time.
                assert caught.value.reason == reason and caught.value.results == whole[:done]
            # What was asked for once is free, and so is all that is not of the search.
            ledger.results([*UNITS[:1], score_unit(0.7, part="selection"), score_unit(0.7, part="report")])
    assert len(records(tmp_path / "journal")) == 1 + done + 2 + (limits.max_time is not None)


def test_candidates_within_the_limit_of_evaluations_may_go_on(tmp_path: Path) -> None:
    with ledger_at(tmp_path / "journal", Landscape(), limits=Limits(max_evaluations=2)) as ledger:
        ledger.results([UNITS[0], UNITS[2]])
        with pytest.raises(LimitReached) as caught:
            ledger.results([UNITS[1], UNITS[3], UNITS[4]])
        assert len(caught.value.results) == 2


def test_without_a_limit_a_stopped_search_goes_on(tmp_path: Path) -> None:
    limits = Limits(max_tokens=1)
    with ledger_at(tmp_path / "journal", Landscape(), limits=limits) as ledger, pytest.raises(LimitReached):
        ledger.results(UNITS)
    compute = Counting()
    with ledger_at(tmp_path / "journal", compute) as ledger:
        ledger.results(UNITS)
    assert compute.units == UNITS[1:]


def test_the_clock_stops_a_search_that_computes_and_not_one_that_replays(tmp_path: Path) -> None:
    with ledger_at(tmp_path / "journal", Landscape()) as ledger:
        whole = ledger.results(UNITS)
    with ledger_at(tmp_path / "journal", Landscape(), limits=Limits(max_time=1e-9)) as ledger:
        assert ledger.results(UNITS) == whole
        with pytest.raises(LimitReached):
            ledger.results([score_unit(0.5), score_unit(0.6)])


def test_limits_that_cannot_be_are_refused() -> None:
    for name in ("max_evaluations", "max_tokens", "max_time"):
        with pytest.raises(InputError, match=f"{name} is 0"):
            Limits(**{name: 0})
