"""`lpes-bake search`: a run that is stopped or fails, and how it goes on."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpes_bake.factors import load_factors
from lpes_bake.search.evaluator import Evaluator
from lpes_bake.search.scoring import Scorer, Scores
from lpes_bake.search.units import Result, Unit
from tests.runs import IDENTITY, Command, Small, changed, content_of, digests, invoke, one_line, records, without_date


def lines_of(out: Path, count: int) -> Callable[[], bool]:
    journal = out / "journal.jsonl"
    return lambda: journal.exists() and journal.read_bytes().count(b"\n") >= count


def part_of(out: Path, part: str) -> Callable[[], bool]:
    journal = out / "journal.jsonl"
    return lambda: journal.exists() and f'"part": "{part}"'.encode() in journal.read_bytes()


MOMENTS: dict[str, Callable[[Path], Callable[[], bool]]] = {
    "begun": lambda out: lines_of(out, 1),
    "searching": lambda out: lines_of(out, 25),
    "choosing": lambda out: part_of(out, "selection"),
    "comparing": lambda out: part_of(out, "report"),
    "drawing": lambda out: (out / "result.json").exists,
}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_to_the_same_factors(moment: str, whole: Path, small: Small, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = Command(tmp_path, "search", small.model, "--out", out, *small.options())
    command.stop_once(MOMENTS[moment](out))
    code, printed, errors = command.finish()
    assert code == -signal.SIGKILL and printed == "" and "Traceback" not in errors
    assert not (out / "report" / "report.html").exists()
    assert (out / "factors.json").exists() == (moment == "drawing")
    done = len((out / "journal.jsonl").read_bytes().splitlines())
    assert done <= len(records(whole)) + 1
    # Options need not be given again.
    resumed = invoke("search", small.model, "--out", out, "--resume", "--json")
    assert resumed.exit_code == 0, resumed.output
    assert without_date(out) == without_date(whole)
    assert content_of(out) == content_of(whole)
    assert [one["unit"] for one in records(out)] == [one["unit"] for one in records(whole)]


@pytest.mark.parametrize("full", ["journal.jsonl", "result.json"])
def test_a_full_disk_is_said_in_one_line_and_a_mended_run_goes_on(
    full: str, whole: Path, small: Small, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert (whole / full).stat().st_size > 10_000
    flags = []
    if full == "result.json":
        shutil.copytree(whole, out)
        (out / "result.json").unlink()
        flags = ["--resume"]
    command = Command(tmp_path, "search", small.model, "--out", out, *small.options(), *flags)
    command.fill_disk(10_000)
    code, _, errors = command.finish()
    assert code == 2 and "Traceback" not in errors
    assert errors.splitlines()[-1] == f"Error: {out / full}: File too large"
    assert not (out / "result.json").exists()
    resumed = invoke("search", small.model, "--out", out, "--resume", "--json")
    assert resumed.exit_code == 0, resumed.output
    assert content_of(out) == content_of(whole) and without_date(out) == without_date(whole)


@pytest.mark.parametrize(("how", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_a_polite_kill_say_how_to_go_on(
    how: signal.Signals, expected: int, small: Small, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = Command(tmp_path, "search", small.model, "--out", out, *small.options(max_tokens=10**7), "--force")
    command.stop_once(lines_of(out, 4), how)
    code, printed, errors = command.finish()
    assert code == expected and printed == "" and "Traceback" not in errors
    # What is not among the stored settings is given again.
    assert f"lpes-bake search {small.model} --out {out} --resume --max-tokens 10000000 --force\n" in errors
    assert not (out / "factors.json").exists()


def test_resuming_with_other_settings_is_refused_and_names_them(whole: Path, small: Small) -> None:
    before = digests(whole)
    message = one_line(
        invoke("search", small.model, "--out", whole, "--resume", "--population", 8, "--seed", 0, "--over", "worst")
    )
    assert "population: 6 → 8" in message and "over: 'mean' → 'worst'" in message
    assert "generations" not in message and "seed" not in message
    message = one_line(invoke("search", small.model, "--out", whole, "--resume", "--task", "kv,pairs=5,key_width=1"))
    assert "questions.1.pairs: 4 → 5" in message
    message = one_line(invoke("search", small.model, "--out", whole, "--resume", "--preset", "paper"))
    assert "population: 6 → 40" in message and "fitness: 'logprob' → 'accuracy'" in message
    assert digests(whole) == before


def test_resuming_with_another_model_or_weights_is_refused(whole: Path, small: Small, tmp_path: Path) -> None:
    other = Path(shutil.copytree(small.model, tmp_path / small.model.name))
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    message = one_line(invoke("search", other, "--out", whole, "--resume"))
    assert "weights: " in message and "base" not in message
    message = one_line(invoke("search", changed(other, rope_theta=5e5), "--out", whole, "--resume"))
    assert "base.rope.rope_theta: 10000.0 → 500000.0" in message


def test_resuming_with_another_chat_template_is_refused(whole: Path, small: Small, tmp_path: Path) -> None:
    other = Path(shutil.copytree(small.model, tmp_path / small.model.name))
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    message = one_line(invoke("search", other, "--out", whole, "--resume"))
    assert "(token_ids: " in message and ";" not in message.partition(")")[0]


def test_resuming_with_other_data_or_other_text_is_refused(many: Path, small: Small, tmp_path: Path) -> None:
    out = Path(shutil.copytree(many, tmp_path / "run"))
    stored = json.loads((out / "settings.json").read_text())
    data = Path(stored["task"][1].partition(":")[2].partition(",")[0])
    before = data.read_bytes()
    try:
        data.write_bytes(before.replace(b"legs of 1?", b"feet of 1?"))
        message = one_line(invoke("search", small.model, "--out", out, "--resume"))
    finally:
        data.write_bytes(before)
    assert "questions.2.sha256: " in message and "questions.1" not in message and "questions.3" not in message
    text = small.text.read_bytes()
    try:
        small.text.write_bytes(text.replace(b"Paragraph 1 ", b"Paragraph one "))
        assert "paragraphs: " in one_line(invoke("search", small.model, "--out", out, "--resume"))
    finally:
        small.text.write_bytes(text)


@pytest.mark.usefixtures("no_pictures")
def test_a_search_that_goes_on_from_factors_is_resumed_with_the_same_ones_only(small: Small, tmp_path: Path) -> None:
    start, out = tmp_path / "start.json", tmp_path / "run"
    start.write_text("[0.5, 1.5]")
    result = small.run(out, start=start, optimizer="gradient", space="free", steps=1)
    first = [trial["layer_rope_scaling"] for trial in result["trials"] if trial["kind"] == "score"]
    assert [0.5, 1.5] in first
    search = json.loads((out / "factors.json").read_text())["search"]
    assert search["start_factors"] == [0.5, 1.5] and "start" not in search
    start.write_text("[0.5, 1.25]")
    message = one_line(small.search(out, "--resume", start=start, optimizer="gradient", space="free", steps=1))
    assert "start_factors" in message and "1.5" in message and "1.25" in message
    start.write_text("[0.5, 1.5, 1.0]")
    message = one_line(small.search(tmp_path / "other", start=start, optimizer="gradient"))
    assert "start.json has 3 factors, and the model 2 layers" in message and not (tmp_path / "other").exists()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (("--max-evaluations", "8"), "the limit of 8 evaluations is reached"),
        (("--max-tokens", "9000"), "the limit of 9000 tokens is reached"),
    ],
)
def test_a_limit_ends_the_search_with_the_best_so_far_and_without_it_the_run_goes_on(
    limit: tuple[str, str], words: str, whole: Path, small: Small, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    content = small.run(out, *limit)
    assert content["ended"] == words
    assert content["cost"]["evaluations"] <= 8
    assert content["identity_score"] == content_of(whole)["identity_score"]
    best = max(one["score"] for one in content["trials"] if one["complete"])
    assert max(one["search_score"] for one in content["selection"]["finalists"]) == best
    before = content_of(out)
    assert small.search(out, "--resume", *limit).exit_code == 0 and content_of(out) == before
    # Stopping is no setting of the run: with a larger limit, or none, it goes on.
    result = (out / "result.json").read_bytes()
    refused = invoke("search", small.model, "--out", out, "--resume", limit[0], 2)
    assert refused.exit_code == 2 and f"more than {limit[0]} 2; give more" in refused.stderr
    assert (out / "result.json").read_bytes() == result
    (out / "result.json").write_bytes(result[:-9])  # A broken one is written again.
    further = small.run(out, "--resume", "--max-evaluations", "1000")
    assert further["ended"] == "all 3 generations are done"
    assert without_date(out) == without_date(whole)


@pytest.mark.usefixtures("no_pictures")
def test_a_search_out_of_time_ends_with_the_best_so_far_and_goes_on_later(
    whole: Path, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Evaluator.compute

    def slow(self: Evaluator, unit: Unit) -> Result:
        # Time for the model itself, also on a busy machine, and none for more than one candidate.
        time.sleep(3 if unit.part == "search" and unit.factors != IDENTITY else 0)
        return real(self, unit)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "compute", slow)
        content = small.run(out, "--max-time", "0.05")
    assert content["ended"] == "the limit of 0.05 minutes is reached"
    assert content["identity_score"] == content_of(whole)["identity_score"]
    assert content["cost"]["evaluations"] < 18 and content["seconds"] >= 3
    small.run(out, "--resume")
    assert without_date(out) == without_date(whole)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (("--max-tokens", "1"), "the limit of 1 tokens is reached"),
        (("--max-time", "0.0000001"), "the limit of 1e-07 minutes is reached"),
    ],
)
def test_a_limit_before_the_model_itself_is_scored_is_an_error_that_says_so(
    limit: tuple[str, str], words: str, small: Small, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    tasks = ["kv,pairs=2,key_width=1", "kv,pairs=3,key_width=1"]
    done = small.search(out, *limit, task=tasks)
    assert done.exit_code == 1 and "Traceback" not in done.output
    assert f"{words}, before the model itself" in done.stderr and "--resume" in done.stderr
    assert not (out / "factors.json").exists()
    small.run(out, "--resume", "--max-evaluations", "3", task=tasks)
    assert load_factors(out).search is not None


@pytest.mark.usefixtures("no_pictures")
def test_an_exhausted_search_says_so(small: Small, tmp_path: Path) -> None:
    # Two points on three values of y, 2 layers: nine curves, and 200 generations find them all.
    grid = {"control_points": 2, "y_low": 0.95, "y_high": 1.05, "y_step": 0.05}
    steps = {"first_spread": 0.05, "max_step_y": 0.05, "max_jump_y": 0.05}
    content = small.run(
        tmp_path / "run", **grid, **steps, population=20, generations=200, uniform="", contexts=2, report_contexts=2
    )
    assert "exhausted" in content["ended"]


# Failures


@pytest.mark.usefixtures("no_pictures")
def test_factors_that_a_model_cannot_take_fail_and_do_not_win(small: Small, tmp_path: Path) -> None:
    # The smallest factor of this grid is 0 when it is rounded, which no model can divide by.
    grid = {"y_low": 0.00001, "y_high": 1, "y_step": 0.99999, "max_step_y": 1, "max_jump_y": 1, "first_spread": 1}
    done = small.search(tmp_path / "run", **grid, uniform="0.00001", generations=2, race="off")
    assert done.exit_code == 0, done.output
    assert "trial 2 failed: ValueError: " in done.stderr
    content = content_of(tmp_path / "run")
    failed = [one for one in content["trials"] if one["error"] is not None]
    assert set(failed[0]["layer_rope_scaling"]) == {0.0} and failed[0]["score"] is None and not failed[0]["complete"]
    assert content["cost"]["failed"] == len(failed) < len(content["trials"])
    assert all(min(one["layer_rope_scaling"]) > 0 for one in content["selection"]["finalists"])
    assert content["identity_score"] is not None


@pytest.mark.usefixtures("no_pictures")
def test_nan_scores_fail_their_trials_only(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scorer.score

    def sometimes(self: Scorer, factors: Any, *arguments: Any) -> Scores:
        scores = real(self, factors, *arguments)
        return scores if set(factors) == {1.0} else replace(scores, logprob=np.full_like(scores.logprob, np.nan))

    monkeypatch.setattr(Scorer, "score", sometimes)
    content = small.run(tmp_path / "run", generations=1, uniform="")
    assert content["verdict"] == "identity" and content["cost"]["failed"] == 5
    assert "found nothing better" in content["message"]


def test_failing_evaluations_stop_the_search_with_the_cause_and_a_mended_run_goes_on(
    whole: Path, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Scorer.score

    def fail(self: Scorer, factors: Any, *arguments: Any) -> Scores:
        if set(factors) != {1.0}:
            raise RuntimeError("the solver gave up\nat step 3")
        return real(self, factors, *arguments)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "score", fail)
        done = small.search(out, "--quiet")
    assert done.exit_code == 1 and "Traceback" not in done.output
    assert "10 trials in a row failed" in done.stderr and "RuntimeError: the solver gave up" in done.stderr
    assert "--resume" in done.stderr and not (out / "factors.json").exists()
    small.run(out, "--resume")
    assert without_date(out) == without_date(whole)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("part", "who", "words"),
    [
        ("search", IDENTITY, "the model itself (all factors 1) cannot be scored: "),
        ("selection", IDENTITY, "the model itself (all factors 1) cannot be scored on the selection contexts: "),
        ("report", IDENTITY, "the model itself (all factors 1) cannot be scored on the report contexts: "),
        ("report", None, "the winner cannot be scored on the report contexts: "),
    ],
)
def test_a_failure_that_nothing_can_go_on_from_ends_the_run_and_is_tried_again(
    part: str,
    who: tuple[float, ...] | None,
    words: str,
    whole: Path,
    small: Small,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    winner = tuple(without_date(whole)["layer_rope_scaling"])
    real = Evaluator.compute

    def fail(self: Evaluator, unit: Unit) -> Result:
        if (unit.part, unit.factors) == (part, who or winner):
            return Result(error="OutOfMemoryError: 2 GiB asked for")
        return real(self, unit)

    # All but what is to fail is known already, so that this takes no time.
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    lines = (whole / "journal.jsonl").read_bytes().splitlines(keepends=True)
    known = [lines[0], *(line for line in lines[1:] if not hits(line, part, who or winner))]
    (out / "journal.jsonl").write_bytes(b"".join(known))
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "compute", fail)
        done = small.search(out, "--resume", "--quiet")
    assert done.exit_code == 1 and "Traceback" not in done.output
    assert f"{words}OutOfMemoryError: 2 GiB asked for" in done.stderr
    small.run(out, "--resume")
    assert without_date(out) == without_date(whole)


def hits(line: bytes, part: str, factors: tuple[float, ...]) -> bool:
    unit = json.loads(line)["record"]["unit"]
    return unit["part"] == part and tuple(unit["factors"]) == factors
