"""What must hold for `lpes-bake eval`: the same questions to each model, honest comparisons, early refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from lpes_bake.cli import main
from lpes_bake.search.models import load_scaled
from lpes_bake.search.tasks import KVRetrieval, encode
from tests.conftest import write_tiny

FACTORS = [0.5, 1.4, 0.8, 1.9]
TASK = ("--pairs", "6", "--key-width", "4", "--contexts", "3", "--device", "cpu", "--dtype", "float32")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["eval", *map(str, arguments)])


def result_of(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, *TASK, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


@pytest.fixture(scope="module")
def factors_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("factors") / "factors.json"
    path.write_text(json.dumps(FACTORS))
    return path


@pytest.fixture(scope="module")
def baked(tiny_llama: Path, factors_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("baked") / "tiny-v1.5-lpes"
    result = CliRunner().invoke(main, ["export", str(tiny_llama), str(factors_file), str(out)])
    assert result.exit_code == 0, result.output
    return out


def test_base_factors_and_baked_side_by_side(tiny_llama: Path, baked: Path, factors_file: Path) -> None:
    parsed = result_of(tiny_llama, baked, "--factors", factors_file)
    assert parsed["task"]["positions"] == [0, 1, 2, 3, 5]
    base, with_factors, bake = parsed["models"]
    assert [one["label"] for one in parsed["models"]] == ["llama", f"llama + {factors_file}", "tiny-v1.5-lpes"]
    assert base["layer_rope_scaling"] is None
    assert with_factors["layer_rope_scaling"] == bake["layer_rope_scaling"] == FACTORS
    assert "difference" not in base
    # Baking changes nothing but where the factors come from.
    assert bake["logprob"] == with_factors["logprob"]
    assert bake["logprob"]["mean"] != pytest.approx(base["logprob"]["mean"], abs=1e-3)
    difference = bake["difference"]
    assert difference["against"] == "llama"
    ours, theirs = bake["logprob"], base["logprob"]
    assert difference["logprob"]["mean"] == pytest.approx(ours["mean"] - theirs["mean"])
    assert difference["logprob"]["low"] <= difference["logprob"]["mean"] <= difference["logprob"]["high"]
    for i, one in enumerate(difference["logprob"]["by_position"]):
        assert one["mean"] == pytest.approx(ours["by_position"][i] - theirs["by_position"][i])
    assert theirs["minimum"] == min(theirs["by_position"])
    assert theirs["spread"] == pytest.approx(max(theirs["by_position"]) - min(theirs["by_position"]))


def test_numbers_are_those_of_plain_forward_passes(tiny_llama: Path, baked: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = load_scaled(tiny_llama, dtype=torch.float32, factors=FACTORS)
    expected = []
    for example in KVRetrieval(pairs=6, key_width=4, contexts=3, positions=(1, 5), seed=7).examples():
        prompt, answer = encode(example, tokenizer)
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected.append(float(logprobs[range(len(answer)), answer].mean()))
    parsed = result_of(baked, "--positions", "1,5", "--seed", "7")
    by_position = np.array(expected).reshape(3, 2).mean(0)
    assert parsed["models"][0]["logprob"]["by_position"] == pytest.approx(by_position.tolist(), abs=1e-4)


def test_table_picture_and_file_are_written(tiny_llama: Path, baked: Path, tmp_path: Path) -> None:
    plot, out = tmp_path / "positions.png", tmp_path / "result.json"
    result = run(tiny_llama, baked, *TASK, "--plot", plot, "--out", out)
    assert result.exit_code == 0, result.output
    for word in ("accuracy", "log-probability", "minimum", "spread", "tiny-v1.5-lpes − llama", "3 contexts of 6 pairs"):
        assert word in result.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(out.read_text())["models"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["positions.png", "result.json"]


def test_a_model_beside_itself_differs_by_nothing(tiny_llama: Path) -> None:
    first, second = result_of(tiny_llama, f"{tiny_llama}/")["models"]
    assert first["label"] != second["label"]
    assert first["logprob"] == second["logprob"]
    assert second["difference"]["logprob"]["mean"] == second["difference"]["logprob"]["high"] == 0


def test_models_of_two_families_are_asked_the_same(tiny_llama: Path, tiny_qwen2: Path) -> None:
    first, second = result_of(tiny_llama, tiny_qwen2)["models"]
    assert (first["name"], second["name"]) == ("llama", "qwen2")
    assert first["tokens"] == second["tokens"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing/model"], "missing/model"),
        (["{base}", "--pairs", "0"], "pairs must be at least 1"),
        (["{base}", "--positions", "6"], "gold position 6"),
        (["{base}", "--pairs", "900"], r"longest prompt .* tokens, but .* positions"),
        (["{base}", "--chat-template", "on"], "no chat template"),
        (["{base}", "--device", "cuda:77"], "device 'cuda:77'"),
        (["{base}", "--revision", "main"], "--revision"),
        (["{base}", "--factors", "{short}"], "3 factors"),
        (["{baked}", "--factors", "{factors}"], "baked already"),
        (["{base}", "--plot", "{base}"], "cannot be written"),
        (["{base}", "--out", "{base}/no/such/file.json"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, tiny_llama: Path, baked: Path, factors_file: Path, tmp_path: Path
) -> None:
    import re

    short = tmp_path / "short.json"
    short.write_text("[1, 1, 1]")
    names = {"base": tiny_llama, "baked": baked, "factors": factors_file, "short": short}
    result = run(*TASK, *(one.format(**names) for one in arguments))
    assert result.exit_code == 2, result.output
    assert re.search(said, result.stderr)
    assert "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_model_without_tokenizer_or_language_head_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    shutil.copytree(tiny_llama, silent)
    for path in silent.glob("*token*"):
        path.unlink()
    result = run(silent, *TASK)
    assert result.exit_code == 2 and "tokenizer" in result.stderr
    config = json.loads((tiny_llama / "config.json").read_text())
    bare = write_tiny(tmp_path / "bare", "llama")
    (bare / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    result = run(bare, *TASK)
    assert result.exit_code == 2 and "causal LM" in result.stderr


def test_weights_that_are_missing_are_not_made_up(tiny_llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from lpes_bake.export import bake
    from lpes_bake.factors import Factors
    from lpes_bake.source import open_source

    short = Path(shutil.copytree(tiny_llama, tmp_path / "short"))
    tensors = load_file(short / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, short / "model.safetensors", metadata={"format": "pt"})
    for directory in (short, bake(open_source(str(short)), Factors(tuple(FACTORS)), tmp_path / "out").out):
        result = run(directory, *TASK)
        assert result.exit_code == 2 and "lm_head.weight" in result.stderr
