"""`lpes-bake search` on tiny models: what a run leaves behind, how it survives, what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lpes_bake.cli import main
from lpes_bake.factors import load_factors
from lpes_bake.run import HELDOUT_SEED, SearchSettings, conclude, search
from lpes_bake.search.curve import CurveSettings, decode
from lpes_bake.search.errors import InputError
from lpes_bake.search.genetic import GeneticSettings
from lpes_bake.search.tasks import KVRetrieval
from lpes_bake.source import open_source

SMALL = [
    *("--pairs", "4", "--key-width", "4", "--contexts", "4", "--heldout-contexts", "4"),
    *("--population", "6", "--generations", "5", "--device", "cpu"),
]
SMALL_SETTINGS = SearchSettings(
    task=KVRetrieval(pairs=4, key_width=4, contexts=2),
    genetic=GeneticSettings(population=3, generations=2),
    heldout_contexts=2,
    device="cpu",
)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["search", *map(str, arguments)])


def start(*arguments: object) -> subprocess.Popen[str]:
    """The real command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "lpes_bake", "search", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def stop_amid(process: subprocess.Popen[str], journal: Path, lines: int, how: signal.Signals) -> tuple[int, str, str]:
    """Send a signal once the journal has some lines."""
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") >= lines:
            process.send_signal(how)
            break
        time.sleep(0.005)
    return finish(process)


def without_date(path: Path) -> str:
    return "\n".join(line for line in path.read_text().splitlines() if '"date"' not in line)


@pytest.fixture(scope="module")
def whole(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    code, printed, errors = finish(start(tiny_llama, "--out", out, *SMALL, "--json"))
    assert code == 0, errors
    assert json.loads(printed)["run"] == str(out)
    return out


def test_a_run_holds_all_its_files(whole: Path, tiny_llama: Path) -> None:
    assert {path.name for path in whole.iterdir()} == {
        *("factors.json", "settings.json", "journal.jsonl", "curve.png", "positions.png")
    }
    for name in ("curve.png", "positions.png"):
        assert (whole / name).read_bytes().startswith(b"\x89PNG")


def test_factors_json_says_where_the_factors_come_from(whole: Path) -> None:
    factors = load_factors(whole)
    assert factors.curve is not None and factors.search is not None and factors.scores is not None
    assert factors.base is not None and factors.base["num_hidden_layers"] == 4
    assert factors.layer_rope_scaling == decode(factors.curve["points"], 4)
    assert factors.search["population"] == 6 and factors.search["seed"] == 0
    assert factors.search["evaluations"] == 30
    assert factors.scores["contexts"] == 4
    assert factors.scores["seed"] == HELDOUT_SEED
    assert set(factors.scores["positions"]) >= {0, 2, 3}
    records = [json.loads(line)["record"] for line in (whole / "journal.jsonl").read_text().splitlines()[1:]]
    assert factors.search["best_score"] == max(record["score"] for record in records)
    assert records[0]["factors"] == [1.0] * 4 and factors.search["identity_score"] == records[0]["score"]


def test_no_factors_are_scored_twice(whole: Path) -> None:
    lines = (whole / "journal.jsonl").read_text().splitlines()[1:]
    scored = [tuple(json.loads(line)["record"]["factors"]) for line in lines]
    assert len(scored) == len(set(scored)) == 30


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_stopped_run_resumes_to_the_same_bytes(
    whole: Path, tiny_llama: Path, tmp_path: Path, how: signal.Signals, code: int
) -> None:
    out = tmp_path / "run"
    stopped, printed, errors = stop_amid(
        start(tiny_llama, "--out", out, *SMALL, "--json"), out / "journal.jsonl", 4 if how == signal.SIGKILL else 9, how
    )
    assert stopped == code, errors
    assert printed == "" and "Traceback" not in errors
    assert not (out / "factors.json").exists()
    if how == signal.SIGINT:
        assert f"lpes-bake search {tiny_llama} --out {out} --resume" in errors
    done = (out / "journal.jsonl").read_bytes().count(b"\n")
    assert done < 31
    # Options need not be given again.
    resumed, printed, errors = finish(start(tiny_llama, "--out", out, "--resume", "--json"))
    assert resumed == 0, errors
    assert without_date(out / "factors.json") == without_date(whole / "factors.json")
    assert len((out / "journal.jsonl").read_text().splitlines()) == 31


def test_resuming_with_other_settings_is_refused_and_names_them(whole: Path, tiny_llama: Path) -> None:
    before = (whole / "factors.json").read_bytes(), (whole / "journal.jsonl").read_bytes()
    result = invoke(tiny_llama, "--out", whole, "--resume", "--population", "8", "--seed", "0", "--pairs", "5")
    assert result.exit_code == 2
    assert "population: 6 → 8" in result.output and "pairs: 4 → 5" in result.output
    assert "generations" not in result.output and "seed" not in result.output
    assert before == ((whole / "factors.json").read_bytes(), (whole / "journal.jsonl").read_bytes())


def test_resuming_with_another_model_is_refused(whole: Path, tiny_qwen2: Path) -> None:
    result = invoke(tiny_qwen2, "--out", whole, "--resume")
    assert result.exit_code == 2 and "base.model_type: 'llama' → 'qwen2'" in result.output


def test_resuming_with_other_weights_under_the_same_config_is_refused(
    whole: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    other = tmp_path / tiny_llama.name
    shutil.copytree(tiny_llama, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    assert "weights" in one_line(invoke(other, "--out", whole, "--resume"))


def test_the_report_shows_positions_intervals_and_what_to_do_next(whole: Path, tiny_llama: Path) -> None:
    result = invoke(tiny_llama, "--out", whole, "--resume", "--quiet")
    printed = result.stdout
    assert result.exit_code == 0
    assert "4 unseen contexts" in printed and "mean" in printed and "30 evaluations" in printed
    assert f"lpes-bake export {tiny_llama} {whole / 'factors.json'} OUT" in printed


def test_failing_evaluations_stop_the_search_with_the_cause_and_no_traceback(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lpes_bake.search.scoring import Scorer

    def fail(self: Scorer, factors: Any = None) -> Any:
        raise RuntimeError("the solver gave up\nat step 3")

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "score", fail)
        result = invoke(tiny_llama, "--out", out, *SMALL, "--population", "12")
    assert result.exit_code == 1
    assert "10 evaluations in a row failed" in result.output and "the solver gave up" in result.output
    assert "--resume" in result.output and not (out / "factors.json").exists()


def test_nan_scores_fail_their_trials_only(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from lpes_bake.search.scoring import Scorer, Scores

    real = Scorer.score

    def sometimes(self: Scorer, factors: Any = None) -> Scores:
        scores = real(self, factors)
        return scores if set(factors) == {1.0} else replace(scores, logprob=np.full_like(scores.logprob, np.nan))

    monkeypatch.setattr(Scorer, "score", sometimes)
    result = search(str(tiny_llama), tmp_path / "run", SMALL_SETTINGS)
    assert result.verdict == "identity" and result.study.failed == result.study.trials - 1
    assert "nothing better than the identity" in result.message


def test_a_search_that_finds_nothing_says_so_and_writes_the_identity(tiny_llama: Path, tmp_path: Path) -> None:
    # Accuracy is 0 for every curve on a random model: nothing beats the identity.
    result = invoke(tiny_llama, "--out", tmp_path / "run", *SMALL, "--fitness", "accuracy", "--generations", "2")
    assert result.exit_code == 0, result.output
    assert "nothing better than the identity" in result.output
    factors = load_factors(tmp_path / "run")
    assert factors.layer_rope_scaling == (1.0,) * 4
    assert factors.curve is not None and decode(factors.curve["points"], 4) == (1.0,) * 4
    assert factors.scores is not None and "lpes" not in factors.scores


def test_the_winner_is_judged_on_unseen_questions(tiny_llama: Path, tmp_path: Path) -> None:
    found = search(str(tiny_llama), tmp_path / "run", SMALL_SETTINGS)
    source = open_source(str(tiny_llama))

    def verdict(difference: tuple[float, float, float]) -> Any:
        individual = replace(found.study.best.individual, factors=(0.9,) * 4)
        study = replace(found.study, best=replace(found.study.best, individual=individual))
        return conclude(study, replace(found.comparison, difference=difference), source, SMALL_SETTINGS, -1.0)

    assert verdict((0.2, 0.1, 0.3)).verdict == "better"
    uncertain = verdict((0.2, -0.1, 0.5))
    assert uncertain.verdict == "uncertain" and uncertain.factors.layer_rope_scaling == (0.9,) * 4
    for lost in ((0.0, 0.0, 0.0), (-0.2, -0.3, -0.1), (float("nan"),) * 3):
        result = verdict(lost)
        assert result.verdict == "identity" and result.factors.layer_rope_scaling == (1.0,) * 4
        assert "not better on unseen questions" in result.message


def test_an_exhausted_search_says_so(tiny_llama: Path, tmp_path: Path) -> None:
    # Two points on three values of y, 4 layers: few curves are different, and 200 generations find them all.
    curve = CurveSettings(control_points=2, y_low=0.95, y_high=1.05, y_step=0.05)
    genetic = GeneticSettings(population=20, generations=200, first_spread=0.05, max_step_y=0.05, max_jump_y=0.05)
    result = search(str(tiny_llama), tmp_path / "run", replace(SMALL_SETTINGS, curve=curve, genetic=genetic))
    assert "no new individual" in result.study.ended
    assert result.factors.search is not None and "exhausted" in result.factors.search["ended"]


def test_settings_survive_the_way_through_their_file() -> None:
    settings = replace(SMALL_SETTINGS, task=KVRetrieval(pairs=9, positions=(0, 8), key_width="uuid"), dtype="float32")
    assert SearchSettings.from_flat(json.loads(json.dumps(settings.flat()))) == settings


def one_line(result: Result) -> str:
    assert result.exit_code == 2, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and "Traceback" not in result.output
    return lines[0]


def test_a_directory_that_is_not_empty_is_refused(tiny_llama: Path, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty" in one_line(invoke(tiny_llama, "--out", tmp_path, *SMALL))
    assert "--resume" in one_line(invoke(tiny_llama, "--out", whole, *SMALL))
    assert "is a file" in one_line(invoke(tiny_llama, "--out", tmp_path / "notes.txt", *SMALL))
    assert "cannot be written" in one_line(invoke(tiny_llama, "--out", tmp_path / "notes.txt" / "run", *SMALL))


def test_a_run_that_was_killed_before_its_journal_can_start_again(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    search(str(tiny_llama), tmp_path, SMALL_SETTINGS)
    assert load_factors(tmp_path).search is not None


def test_resuming_nothing_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    assert "no run to resume" in one_line(invoke(tiny_llama, "--out", tmp_path / "new", "--resume"))


@pytest.mark.parametrize("text", ["[]", "{", '{"pairs": "x"}', '{"positions": 5}', "[" * 100_000])
def test_resuming_with_settings_that_are_none_is_refused(tiny_llama: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "journal.jsonl").touch()
    (tmp_path / "settings.json").write_text(text)
    assert "restore it or start a new run" in one_line(invoke(tiny_llama, "--out", tmp_path, "--resume"))


def test_a_run_inside_the_model_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tiny_llama)
    for out in (tiny_llama / "run", link / "deep" / "run"):
        assert "inside the model's directory" in one_line(invoke(tiny_llama, "--out", out, *SMALL))
        assert not out.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--pairs": "600"}, "positions (max_position_embeddings)"),
        ({"--positions": "0,9"}, "gold position 9"),
        ({"--population": "1"}, "population is 1"),
        ({"--y-low": "0.52"}, "y_low"),
        ({"--seed": "-1"}, "seed is -1"),
        ({"--device": "nonsense"}, "nonsense"),
        ({"--heldout-contexts": "1"}, "heldout_contexts is 1"),
        ({"--batch-size": "0"}, "batch_size is 0"),
        ({"--chat-template": "on"}, "no chat template"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_model_is_loaded(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], words: str
) -> None:
    monkeypatch.setattr("lpes_bake.run.load_model", lambda *_: pytest.fail("the model was loaded"))
    arguments = dict(zip(SMALL[::2], SMALL[1::2], strict=True)) | change
    flat = [word for pair in arguments.items() for word in pair]
    assert words in one_line(invoke(tiny_llama, "--out", tmp_path / "run", *flat))
    assert not (tmp_path / "run").exists()


def changed(tiny: Path, path: Path, **config: object) -> Path:
    shutil.copytree(tiny, path)
    content = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**content, **config}))
    return path


def test_models_that_cannot_be_searched_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert "no such" in one_line(invoke(tmp_path / "nowhere", "--out", out, *SMALL)).lower()
    gpt2 = changed(tiny_llama, tmp_path / "gpt2", model_type="gpt2", architectures=["GPT2LMHeadModel"])
    assert "'gpt2'" in one_line(invoke(gpt2, "--out", out, *SMALL))
    bare = changed(tiny_llama, tmp_path / "bare", architectures=["LlamaModel"])
    assert "needs a causal LM" in one_line(invoke(bare, "--out", out, *SMALL))
    mute = changed(tiny_llama, tmp_path / "mute")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (mute / name).unlink()
    assert "no tokenizer" in one_line(invoke(mute, "--out", out, *SMALL))
    assert not out.exists()


def test_code_that_a_tokenizer_brings_does_not_run_unless_trusted(tiny_llama: Path, tmp_path: Path) -> None:
    model = changed(tiny_llama, tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    message = one_line(invoke(model, "--out", tmp_path / "run", *SMALL))
    assert "--trust-remote-code" in message and not (tmp_path / "ran").exists()


def test_a_broken_input_is_an_input_error_for_callers_too(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        search(str(tmp_path), tmp_path / "run", SMALL_SETTINGS)
