"""What is loaded for scoring is the base model or a baked one, whole; and a baked directory loads in whichever
way people start it: many processes at once, ".", a trailing slash."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.harness import base_folder
from lpes_bake.loading import first_line, load_library_model, load_model, load_tokenizer, require_causal
from lpes_bake.search.errors import InputError
from lpes_bake.source import open_source
from tests.test_source import edit_config

FACTORS = (0.25, 4.0, 1.0, 2.0)

# Imports once, and forks into processes that load at the same moment into one empty cache of modules.
LOAD = """
import os, sys, traceback
import torch
from transformers import AutoModelForCausalLM

def load(name):
    os.read(start, 1)
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    total = model(torch.arange(3, 40)[None]).logits.double().sum().item()
    os.write(1, f"{type(model).__name__} {total}\\n".encode())

start, begin = os.pipe()
children = []
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            load(name)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    children.append(child)
os.write(begin, b"x" * len(children))
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


def test_processes_that_load_at_once_with_an_empty_cache_all_succeed(tiny_llama: Path, tmp_path: Path) -> None:
    out = bake(open_source(str(tiny_llama)), Factors(FACTORS), tmp_path / "tiny-2.5-lpes").out
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(out), f"{out}/", str(out), "."],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"},
        cwd=out,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 4
    assert len(set(answers)) == 1
    assert answers[0].startswith("LpesLlamaForCausalLM ")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 60)[None]).logits
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_base_model_is_loaded_with_factors_of_1_and_a_baked_one_with_its_own(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForCausalLM

    path = request.getfixturevalue(f"tiny_{family}")
    base = load_model(open_source(str(path)), "cpu", torch.float32)
    assert torch.equal(logits(base), logits(AutoModelForCausalLM.from_pretrained(path)))
    out = bake(open_source(str(path)), Factors(FACTORS), tmp_path / "baked").out
    baked = load_model(open_source(str(out), baked=True), "cpu", torch.float32)
    assert baked.base_model.rotary_emb.layer_rope_scaling.tolist() == list(FACTORS)
    stranger = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert torch.equal(logits(baked), logits(stranger)) and not torch.equal(logits(baked), logits(base))
    assert not (base.training or baked.training)


def test_a_base_model_that_transformers_5_saved_keeps_its_theta_in_transformers_4(
    tiny_llama: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    path = Path(shutil.copytree(tiny_llama, tmp_path / "saved"))
    edit_config(path, rope_theta=..., rope_scaling=..., rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    source = open_source(str(path))
    baked = open_source(str(bake(source, Factors(FACTORS), tmp_path / "baked").out), baked=True)
    with base_folder(baked) as folder:
        models: list[Any] = [AutoModelForCausalLM.from_pretrained(folder)]
    models += [load_library_model(one, "cpu", torch.float32) for one in (source, baked)]
    for model in models:
        # Dimension 1 of a head's 16 pairs.
        assert model.base_model.rotary_emb.inv_freq[1].item() == pytest.approx(1e6 ** (-1 / 16))


@pytest.mark.parametrize("bits", ["load_in_8bit", "load_in_4bit"])
def test_a_quantised_bake_is_put_on_the_device_while_it_is_loaded(bits: str, tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(**{bits: True})
    AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=settings).save_pretrained(tmp_path / "small")
    source = open_source(str(tmp_path / "small"))
    baked = open_source(str(bake(source, Factors(FACTORS), tmp_path / "baked").out), baked=True)
    # transformers 4 moves no such model.
    assert not torch.equal(
        logits(load_model(baked, "cpu", torch.float32)), logits(load_model(source, "cpu", torch.float32))
    )


def test_dtype_and_device_map_are_those_asked_for(tiny_llama: Path) -> None:
    source = open_source(str(tiny_llama))
    assert load_model(source, "cpu", torch.bfloat16).dtype == torch.bfloat16
    mapped = load_model(source, "cpu", torch.float32, device_map="cpu")
    assert torch.equal(logits(mapped), logits(load_model(source, "cpu", torch.float32)))


def message(model: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        load_model(open_source(str(model)), "cpu", torch.float32, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_loaded_is_said_in_one_line(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as where it is not installed
    assert "llama cannot be loaded on cpu" in message(tiny_llama, device_map="nonsense")
    for quantization in ("4bit", "8bit"):
        assert f"quantization '{quantization}' needs bitsandbytes" in message(tiny_llama, quantization=quantization)
    broken = Path(shutil.copytree(tiny_llama, tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 99}))
    assert "broken cannot be loaded on cpu" in message(broken)


def test_tokenizers_that_cannot_be_had_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    assert len(load_tokenizer(open_source(str(model)), trust_remote_code=False)) == 256
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="the tokenizer of model cannot be loaded"):
        load_tokenizer(open_source(str(model)), trust_remote_code=False)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]}))
    with pytest.raises(InputError, match="answers nothing; give a causal LM"):
        require_causal(open_source(str(model)))


def test_an_error_becomes_one_line() -> None:
    assert first_line(ValueError("  first\nsecond")) == "first"
    assert first_line(RuntimeError()) == "RuntimeError"
