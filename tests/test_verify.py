"""verify passes what export writes, and catches each way in which an edited directory goes wrong silently."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lpes_bake.cli import main
from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.search.errors import InputError
from lpes_bake.source import open_source
from lpes_bake.verify import Check, LiveSettings, Report, verify
from tests.conftest import write_tiny

FACTORS = (0.25, 4.0, 1.0, 2.0)


@pytest.fixture(scope="module")
def baked(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bake(open_source(str(tiny_llama)), Factors(FACTORS), tmp_path_factory.mktemp("baked") / "llama-lpes").out


@pytest.fixture
def edited(baked: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(baked, tmp_path / "edited"))


@pytest.fixture(scope="module")
def sharded_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, several shards, a RoPE type with parameters, and a dot in the name."""
    from transformers import AutoModelForCausalLM

    base = tmp_path_factory.mktemp("base") / "Qwen2.5-tiny"
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    write_tiny(base, "qwen2", tie_word_embeddings=True, rope_scaling=yarn, rope_theta=1e6)
    model = AutoModelForCausalLM.from_pretrained(base)
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="500KB")
    assert len(list(base.glob("model-*.safetensors"))) > 2
    # Vicuna's, which transformers refuses to save.
    (base / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    return base


def change_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def failed(report: Report) -> dict[str, str]:
    return {check.name: check.reason for check in report.checks if check.status == "fail"}


def run_cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lpes_bake", "verify", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
        timeout=300,
    )


def test_what_export_writes_passes_every_check(sharded_base: Path, tmp_path: Path) -> None:
    out = bake(open_source(str(sharded_base)), Factors((0.9, 1.2, 1.0, 0.8)), tmp_path / "Qwen2.5-tiny-lpes").out
    done = run_cli(str(out), "--base", str(sharded_base), "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["ok"]
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    assert set(statuses.values()) == {"pass"}
    live = {"refusal", "loads", "generation", "reference", "bare model", "tokenizer", "save and reload"}
    assert live < set(statuses)
    open_points = {one["what"]: one["how"] for one in report["not_checked"]}
    assert open_points["positions from 3072 to 8192"] == "--prompt-tokens 8192"
    assert open_points["16-bit precision"] == "--dtype bfloat16"
    assert open_points["vLLM"].endswith("--stack transformers,vllm")
    assert not any("base model" in what or "computes" in what for what in open_points)
    reference = next(check["reason"] for check in report["checks"] if check["name"] == "reference")
    assert "on 3072 tokens" in reference


def test_static_checks_import_no_torch_and_pass(baked: Path, tiny_llama: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from lpes_bake.source import open_source; from lpes_bake.verify import "
        f"verify; report = verify(Path({str(baked)!r}), open_source({str(tiny_llama)!r}), live=None); "
        "assert report.ok, report.checks; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_bake_whose_quantisation_transformers_cannot_save_is_right_all_the_same(
    tiny_llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(load_in_8bit=True)
    AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=settings).save_pretrained(tmp_path / "small")
    bake(open_source(str(tmp_path / "small")), Factors(FACTORS), tmp_path / "out")
    report = verify(tmp_path / "out", live=LiveSettings(device="cpu", prompt_tokens=300))
    assert failed(report) == {}
    saved = next(check for check in report.checks if check.name == "save and reload")
    assert saved.status == "pass" or "cannot save" in saved.reason


def test_what_was_not_checked_is_listed_with_the_way_to_check_it(
    baked: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(base: Path | None, live: LiveSettings | None) -> str:
        # What is listed follows from the settings: nothing needs to be run.
        monkeypatch.setattr("lpes_bake.verify.live_checks", lambda *arguments: iter([Check("x", "skip", "no room")]))
        found = verify(baked, open_source(str(base)) if base else None, live=live).not_checked
        return "\n".join(f"{one.what}: {one.how}" for one in found)

    alone = listed(None, None)
    assert "what it computes, and of the weights more than the headers: leave out --static" in alone
    assert "are the base model's: --base MODEL" in alone
    against = listed(tiny_llama, None)
    assert "--base" not in against and "headers" not in against and "what it computes: leave out --static" in against
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    run = listed(tiny_llama, LiveSettings(dtype="bfloat16", prompt_tokens=9000))
    for line in (
        "x: no room",
        "vLLM: install vLLM beside lpes-bake, then --stack transformers,vllm",
        "errors that 16-bit rounding hides: --dtype float32",
    ):
        assert line in run, run
    assert "--static" not in run and "positions" not in run
    assert "vLLM: " not in (rest := listed(tiny_llama, LiveSettings(stacks=("vllm",))))
    assert "--stack transformers" in rest and "positions from 3072 to 8192" in rest


def test_the_list_of_what_was_not_checked_is_printed(baked: Path) -> None:
    done = run_cli(str(baked), "--static")
    assert done.returncode == 0, done.stderr
    head, _, rest = done.stdout.partition("Not checked in this run:\n")
    assert "weights" in head
    assert [line[:2] for line in rest.splitlines()] == ["- ", "- "]


@pytest.mark.parametrize(
    ("stack", "said"), [("vllm", "needs vllm"), ("transformers,onnx", "known: transformers, vllm"), ("", "unknown")]
)
def test_a_stack_that_is_not_there_is_refused_before_any_work(
    baked: Path, monkeypatch: pytest.MonkeyPatch, stack: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    monkeypatch.setattr("lpes_bake.source.open_source", lambda *arguments: pytest.fail("nothing may be read"))
    done = CliRunner().invoke(main, ["verify", str(baked), "--base", "org/model", "--stack", stack])
    assert done.exit_code == 2
    assert said in done.output and len(done.output.strip().splitlines()) == 1


def test_vllm_that_cannot_load_the_directory_is_a_failed_check_with_its_cause(baked: Path, tmp_path: Path) -> None:
    # Says what vLLM 0.32 says when its engine, a process of its own, does not start.
    (tmp_path / "vllm.py").write_text(
        """
import sys
class SamplingParams: pass
class LLM:
    def __init__(self, *arguments, **options):
        print("(EngineCore pid=7) ERROR [core.py:1] ValueError: head size 24 is not supported", file=sys.stderr)
        raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
"""
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = run_cli(str(baked), "--stack", "vllm", "--prompt-tokens", "64", PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    assert re.search(r"✓ greedy tokens +16 after 64 in transformers; without the factors others", done.stdout)
    assert re.search(r"✗ vLLM +ValueError: head size 24 is not supported\n", done.stdout)
    assert "✓ loads" not in done.stdout and "- the outputs, the cache, saving" in done.stdout


def test_vllm_generates_what_transformers_does_and_lost_factors_are_caught(edited: Path) -> None:
    pytest.importorskip("vllm")
    settings = LiveSettings(prompt_tokens=300, trust_remote_code=True, stacks=("vllm",))
    found = {check.name: (check.status, check.reason) for check in verify(edited, live=settings).checks}
    assert found["vLLM"][0] == "pass", found
    with (edited / "layer_rope_scaling.py").open("a") as file:
        # Right in transformers, wrong in vLLM.
        file.write("\nimport sys\nif 'vllm' in sys.modules:\n    LayerScaledRotaryEmbedding.factors = ")
        file.write("lambda self: torch.ones_like(self.layer_rope_scaling)\n")
    found = {check.name: (check.status, check.reason) for check in verify(edited, live=settings).checks}
    assert found["vLLM"][0] == "fail" and "other tokens than transformers'" in found["vLLM"][1]


@pytest.mark.parametrize(
    ("check", "change", "reason"),
    [
        ("architectures", lambda c: c.update(architectures=["LlamaForCausalLM"]), "vLLM would take the base model"),
        ("architectures", lambda c: c.pop("architectures"), "None"),
        ("model type", lambda c: c.update(model_type="llama"), "ignore the factors"),
        ("auto_map", lambda c: c["auto_map"].pop("AutoModel"), "lacks AutoModel"),
        ("auto_map", lambda c: c["auto_map"].pop("AutoConfig"), "lacks AutoConfig"),
        ("auto_map", lambda c: c.pop("auto_map"), "None"),
        (
            "auto_map",
            lambda c: c["auto_map"].update(AutoModel=f"eve/x--{c['auto_map']['AutoModel']}"),
            "another repository",
        ),
        ("auto_map", lambda c: c["auto_map"].update(AutoModel="other.LpesLlamaModel"), "other.LpesLlamaModel"),
        ("factors", lambda c: c.pop("layer_rope_scaling"), "None"),
        ("factors", lambda c: c.update(num_hidden_layers="four"), "positive integer"),
        ("factors", lambda c: c["layer_rope_scaling"].pop(), "3 factors for a model of 4 layers"),
        ("factors", lambda c: c["layer_rope_scaling"].__setitem__(1, 0.0), "layer 1"),
        ("factors", lambda c: c["layer_rope_scaling"].__setitem__(2, 1.05), "not what factors.json says"),
        ("weights", lambda c: c.update(quantization_config="gptq"), "must be an object; got 'gptq'"),
    ],
)
def test_silent_config_edits_are_caught(
    edited: Path, check: str, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    change_config(edited, change)
    report = verify(edited, live=LiveSettings())
    assert reason in failed(report)[check]
    assert report.checks[-1].status == "skip", "a directory known to be wrong must not be run"


@pytest.mark.parametrize("with_base", [True, False])
def test_a_changed_rope_theta_is_caught(edited: Path, tiny_llama: Path, with_base: bool) -> None:
    def change(config: dict[str, Any]) -> None:
        config.get("rope_parameters", config)["rope_theta"] = 500000.0

    change_config(edited, change)
    report = verify(edited, open_source(str(tiny_llama)) if with_base else None, live=None)
    assert "rope_theta is 500000.0 and not 10000.0" in failed(report)["rope settings"]


def test_a_missing_rope_theta_is_caught(edited: Path) -> None:
    change_config(edited, lambda config: [config.pop(key, None) for key in ("rope_parameters", "rope_theta")])
    assert "no rope_theta" in failed(verify(edited, live=None))["rope settings"]


def test_other_config_changes_are_caught_against_the_base(edited: Path, tiny_llama: Path) -> None:
    change_config(edited, lambda config: config.update(rms_norm_eps=1e-2))
    report = verify(edited, open_source(str(tiny_llama)), live=None)
    assert failed(report).keys() == {"base config"}
    assert "rms_norm_eps" in failed(report)["base config"]


def test_an_edited_python_file_is_caught_and_not_run(edited: Path, tmp_path: Path) -> None:
    trap = tmp_path / "it ran"
    with (edited / "modeling_lpes_llama.py").open("a") as file:
        file.write(f"\nopen({str(trap)!r}, 'w').close()\n")
    report = verify(edited, live=LiveSettings())
    assert "modeling_lpes_llama.py is not the file" in failed(report)["python files"]
    assert not trap.exists()


def test_missing_and_extra_python_files_are_caught(edited: Path) -> None:
    (edited / "helper.py").write_text("")
    assert "helper.py" in failed(verify(edited, live=None))["python files"]
    (edited / "helper.py").unlink()
    (edited / "layer_rope_scaling.py").unlink()
    assert "layer_rope_scaling.py is missing" in failed(verify(edited, live=None))["python files"]


def test_code_behind_a_linked_folder_is_caught_and_not_run(edited: Path, tmp_path: Path) -> None:
    trap = tmp_path / "it ran"
    (edited / ".hidden").mkdir()
    (edited / ".hidden" / "generate.py").write_text(f"open({str(trap)!r}, 'w').close()\ndef generate(**kwargs): pass\n")
    (edited / "custom_generate").symlink_to(".hidden")
    report = verify(edited, live=LiveSettings())
    assert not trap.exists()
    assert "custom_generate is no part of a bake" in failed(report)["python files"]


def test_code_that_the_tokenizer_would_bring_is_caught(edited: Path) -> None:
    (edited / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["eve/x--code.Tokenizer", null]}}')
    assert "auto_map" in failed(verify(edited, live=None))["python files"]


def test_one_changed_byte_in_the_weights_is_caught(edited: Path, tiny_llama: Path) -> None:
    path = edited / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    reasons = failed(verify(edited, open_source(str(tiny_llama)), live=None))
    assert reasons.keys() == {"base weights"}
    assert "has other values" in reasons["base weights"]


def test_weights_spread_over_other_files_are_still_the_bases(edited: Path, tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    (edited / "model.safetensors").unlink()
    scratch = edited.with_name("scratch")
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(scratch, max_shard_size="500KB")
    for path in scratch.glob("model*"):
        shutil.copy(path, edited)
    report = verify(edited, open_source(str(tiny_llama)), live=None)
    assert report.ok, failed(report)
    assert re.search(r"\d+ tensors equal", next(c.reason for c in report.checks if c.name == "base weights"))


def test_truncated_stale_and_foreign_weights_are_caught(edited: Path) -> None:
    weights = edited / "model.safetensors"
    for name in ("model-00001-of-00002.safetensors", "pytorch_model.bin", "MODEL.BIN", "adapter_config.json"):
        (edited / name).write_bytes(weights.read_bytes())
        assert name in failed(verify(edited, live=None))["weights"]
        (edited / name).unlink()
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "truncated" in failed(verify(edited, live=None))["weights"]


def test_weights_without_the_format_metadata_are_caught(edited: Path) -> None:
    from safetensors.numpy import load_file, save_file

    save_file(load_file(edited / "model.safetensors"), edited / "model.safetensors")
    assert "format" in failed(verify(edited, live=None))["weights"]


def test_a_lost_or_changed_tokenizer_is_caught(edited: Path, tiny_llama: Path) -> None:
    base = open_source(str(tiny_llama))
    with (edited / "tokenizer_config.json").open("a") as file:
        file.write("\n")
    assert "tokenizer_config.json differs" in failed(verify(edited, base, live=None))["base files"]
    (edited / "tokenizer_config.json").unlink()
    assert "tokenizer_config.json of" in failed(verify(edited, base, live=None))["base files"]


@pytest.mark.parametrize("metadata", ["tags: [unclosed", "license: [1, 2]\ntags: 5: 6", "- a list"])
def test_an_unreadable_model_card_is_caught(edited: Path, metadata: str) -> None:
    (edited / "README.md").write_text(f"---\n{metadata}\n---\n# title\n")
    assert "README.md" in failed(verify(edited, live=None))["model card"]


def test_code_that_loses_the_factors_is_caught_by_what_it_computes(edited: Path) -> None:
    # Right for short prompts, as anybody would try first; wrong for long ones, and for single tokens as in decoding.
    with (edited / "layer_rope_scaling.py").open("a") as file:
        file.write(
            """

right = LayerScaledRotaryEmbedding.forward


def wrong(self, x, position_ids):
    if 2 <= position_ids.shape[-1] <= 300:
        return right(self, x, position_ids)
    kept = self.layer_rope_scaling.clone()
    self.layer_rope_scaling.fill_(1.0)
    shared = right(self, x, position_ids)
    self.layer_rope_scaling.copy_(kept)
    return shared


LayerScaledRotaryEmbedding.forward = wrong
"""
        )
    report = verify(edited, live=LiveSettings(trust_remote_code=True, prompt_tokens=512))
    reasons = failed(report)
    assert reasons.keys() == {"python files", "generation", "reference"}
    assert "logits differ" in reasons["generation"]
    assert "the factors are ignored" in reasons["reference"]


def test_trusted_code_sees_no_token_and_cannot_import_lpes_bake(edited: Path) -> None:
    with (edited / "modeling_lpes_llama.py").open("a") as file:
        file.write(
            """
import os
try:
    import lpes_bake
except ModuleNotFoundError as error:
    raise RuntimeError(f"tokens {[name for name in os.environ if 'TOKEN' in name]}, {error}")
"""
        )
    done = run_cli(str(edited), "--trust-remote-code", HF_TOKEN="hf_secret")
    assert done.returncode == 1
    assert "✗ python files" in done.stdout
    assert re.search(r"✗ loads +RuntimeError: tokens \[\], lpes_bake: a baked checkpoint must load", done.stdout)
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("content", [None, "{}", '{"model_type": "gpt2"}', "not json", '{"model_type": "llama"}'])
def test_what_is_no_bake_is_bad_input(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError):
        verify(tmp_path, live=None)


def test_exit_codes_tell_failed_checks_from_bad_input(edited: Path, tmp_path: Path) -> None:
    change_config(edited, lambda config: config.update(model_type="llama"))
    done = run_cli(str(edited), "--static", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["ok"] is False
    for bad in ([str(tmp_path / "nowhere")], [str(edited), "--device", "no-such-device"]):
        done = run_cli(*bad)
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1


def test_an_output_that_is_not_unicode_stops_nothing(baked: Path) -> None:
    done = run_cli(str(baked), "--static", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "? model type" in done.stdout


def test_a_config_may_leave_out_what_its_class_knows(tiny_llama: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    change_config(base, lambda config: config.pop("max_position_embeddings"))
    out = bake(open_source(str(base)), Factors(FACTORS), tmp_path / "out").out
    assert not failed(verify(out, live=LiveSettings(prompt_tokens=64)))
