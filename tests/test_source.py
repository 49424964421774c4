"""What may be a source, and the one line that each other thing gets."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lpes_bake.search.errors import InputError
from lpes_bake.source import open_source, require_tokenizer, rope_settings

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of a tiny checkpoint that may be damaged."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def edit_config(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    config.update(changes)
    (model / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def edit_rope(model: Path, **settings: Any) -> None:
    """Replace all RoPE settings, whichever layout the transformers at hand has written."""
    edit_config(model, **{"rope_theta": ..., "rope_scaling": ..., "rope_parameters": ..., **settings})


def shard(model: Path, names: tuple[str, str] = ("a.safetensors", "b.safetensors")) -> dict[str, str]:
    """Split model.safetensors in two, with an index; returns the weight map."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    keys = sorted(tensors)
    (model / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for name, part in zip(names, (keys[: len(keys) // 2], keys[len(keys) // 2 :]), strict=True):
        save_file({key: tensors[key] for key in part}, model / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    write_index(model, weight_map)
    return weight_map


def write_index(model: Path, weight_map: Any) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def cached_tree(model: Path, root: Path) -> Path:
    """The model as the Hub's cache lays it out: snapshots/COMMIT/name → blobs/hash."""
    repo = root / "models--org--Tiny-1.5"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copyfile(file, repo / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def error(model: Path | str, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        open_source(str(model), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory_opens_by_any_spelling_of_its_path(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    for spelling in (".", "./", str(model), f"{model}/", "../model"):
        source = open_source(spelling)
        assert (source.name, source.revision, source.factors) == ("model", None, None)
        assert source.architecture == "LlamaForCausalLM"
        assert source.num_hidden_layers == 4


def test_a_tree_of_the_hub_cache_knows_its_name_and_commit(model: Path, tmp_path: Path) -> None:
    source = open_source(str(cached_tree(model, tmp_path / "hub")))
    assert (source.name, source.revision) == ("org/Tiny-1.5", COMMIT)


def test_a_hub_name_in_the_cache_opens_offline(model: Path, tmp_path: Path) -> None:
    snapshot = cached_tree(model, tmp_path / "hub")
    code = (
        "from lpes_bake.source import open_source; s = open_source('org/Tiny-1.5'); print(s.name, s.revision, s.path)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["org/Tiny-1.5", COMMIT, str(snapshot)]


def test_what_is_no_model_gets_one_line(model: Path, tmp_path: Path) -> None:
    assert "no such directory" in error(tmp_path / "nothing")
    assert "no such directory" in error("./nothing")
    assert "is a file" in error(model / "config.json")
    assert "Hub" in error("org/never-downloaded")
    assert "no such directory" in error("a/b/c")
    assert "no such user" in error("~nobody-by-this-name/model")
    assert "--revision" in error(model, revision="main")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in error(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "adapter" in error(tmp_path / "empty")


@pytest.mark.parametrize("text", ["{", "", "[]", "\xff", "[" * 100_000])
def test_a_broken_config_gets_one_line(model: Path, text: str) -> None:
    (model / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in error(model)


def test_unsupported_architectures_are_named_with_the_supported_ones(model: Path) -> None:
    edit_config(model, architectures=["LlamaForQuestionAnswering"])
    assert "LlamaForQuestionAnswering" in error(model)
    assert "LlamaForCausalLM" in error(model)
    edit_config(model, model_type="gpt2")
    assert "'gpt2'" in error(model)
    assert "llama, qwen2" in error(model)


def test_models_with_code_of_their_own_are_refused(model: Path) -> None:
    edit_config(model, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    assert "remove auto_map from a local copy if transformers' own Llama does the same" in error(model)
    edit_config(model, auto_map=...)
    assert open_source(str(model)).factors is None


def test_factors_that_loaders_would_ignore_are_refused(model: Path) -> None:
    edit_config(model, layer_rope_scaling=[1.0] * 4)
    assert "ignore" in error(model)
    assert "ignore" in error(model, baked=True)


def test_a_baked_directory_is_a_source_only_where_it_may_be(model: Path) -> None:
    edit_config(model, model_type="lpes_llama", architectures=["LpesLlamaForCausalLM"], layer_rope_scaling=[1, 2, 1, 1])
    assert "already baked" in error(model)
    source = open_source(str(model), baked=True)
    assert source.factors == [1, 2, 1, 1]
    assert source.architecture == "LlamaForCausalLM"
    edit_config(model, layer_rope_scaling=[1, 2, 1])
    assert "3 factors for a model of 4 layers" in error(model, baked=True)
    edit_config(model, layer_rope_scaling=...)
    assert "layer_rope_scaling" in error(model, baked=True)


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize(
    ("written", "settings"),
    [
        ({"rope_scaling": None}, {"rope_type": "default"}),
        ({}, {"rope_type": "default"}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, {"rope_type": "dynamic", "factor": 2}),
        ({"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0}}, {"rope_type": "yarn", "factor": 4.0}),
        ({"rope_scaling": {"rope_type": "default"}}, {"rope_type": "default"}),
        ({"rope_scaling": {"type": "default"}}, {"rope_type": "default"}),
    ],
)
def test_both_layouts_of_rope_settings_say_the_same(
    theta: float, written: dict[str, Any], settings: dict[str, Any]
) -> None:
    wanted = {"rope_theta": theta, **settings}
    assert rope_settings({"rope_theta": theta, **written}, "m") == wanted
    new = {"rope_parameters": {"rope_theta": theta, **(written.get("rope_scaling") or {})}}
    assert rope_settings(new, "m") == wanted


@pytest.mark.parametrize(
    ("old", "new", "settings"),
    [
        # A part of the dimensions rotates: StableLM, and GPT-NeoX with its own names.
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}},
            {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
        ),
        (
            {"rotary_emb_base": 10000, "rotary_pct": 0.25},
            {"rope_parameters": {"rope_theta": 10000, "rope_type": "default", "partial_rotary_factor": 0.25}},
            {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
        ),
        # Two tables: Gemma 3.
        (
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                }
            },
            {
                "rope_theta": 1e6,
                "rope_type": "linear",
                "factor": 8.0,
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
        ),
    ],
    ids=["partial", "gpt_neox", "two tables"],
)
def test_rope_settings_of_some_families_are_found_in_both_layouts(
    old: dict[str, Any], new: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert rope_settings(old, "m") == rope_settings(new, "m") == settings


def test_a_table_of_two_without_theta_is_refused() -> None:
    tables = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(InputError, match=r"no rope_theta, neither at its top nor in rope_parameters.sliding_attention"):
        rope_settings({"rope_parameters": tables}, "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "default"}}, "no rope_theta"),
        ({"rope_parameters": None}, "no rope_theta"),
        ({"rope_parameters": {"rope_theta": "10000"}}, "positive number"),
        ({"rope_parameters": {"rope_theta": -1}}, "positive number"),
        ({"rope_parameters": {"rope_theta": True}}, "positive number"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "positive number"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "positive number"),
        ({"rope_parameters": [1]}, "must be an object"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": "2"}}, "factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": ["linear"]}}, "['linear']"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear"}}, "lacks factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "mrope"}}, "'mrope'"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e6}, "two values"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
            "rope_type 'dynamic' and type 'linear'",
        ),
        ({"model_type": ["llama"]}, "['llama']"),
        ({"num_hidden_layers": ...}, "num_hidden_layers"),
        ({"num_hidden_layers": 4.0}, "num_hidden_layers"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"quantization_config": [1]}, "quantization_config"),
        ({"layer_rope_scaling_types": ["full"]}, "['full']"),
        ({"layer_rope_scaling_types": []}, "full_attention, sliding_attention or both"),
    ],
)
def test_settings_that_would_go_wrong_silently_are_refused(model: Path, changes: dict[str, Any], message: str) -> None:
    edit = edit_rope if any(name.startswith("rope_") for name in changes) else edit_config
    edit(model, **changes)
    assert message in error(model)


def test_truncated_and_unreadable_weights_are_refused(model: Path) -> None:
    path = model / "model.safetensors"
    whole = path.read_bytes()
    damages: dict[str, Callable[[], bytes]] = {
        "truncated or too long": lambda: whole[:-1],
        "safetensors header": lambda: whole[:8] + b"x" + whole[9:],
        "is not a safetensors file": lambda: struct.pack("<Q", len(whole)) + whole[8:],
        "truncated": lambda: b"",
        "Git LFS": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    }
    for message, damage in damages.items():
        path.write_bytes(damage())
        assert message in error(model)
        assert str(path) in error(model)
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    for header in (
        "[" * 100_000,
        json.dumps({"__metadata__": "pt", "a": entry}),
        json.dumps({"a": {**entry, "data_offsets": [0, 1, 2]}}),
        json.dumps({"a": {**entry, "data_offsets": [0, float("inf")]}}),
        json.dumps({"a": {**entry, "shape": ["1"]}}),
        json.dumps({"a": {"data_offsets": [0, 1]}}),
    ):
        path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"1")
        assert "unreadable safetensors header" in error(model)
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    assert "no tensor" in error(model)
    path.unlink()
    path.symlink_to("../blobs/gone")
    assert "cannot be read" in error(model)


def test_overlapping_tensors_are_refused(model: Path) -> None:
    header = {name: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for name in ("a", "b")}
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"12")
    assert "overlap" in error(model)


def test_an_index_must_name_files_and_tensors_that_are_there(model: Path) -> None:
    weight_map = shard(model)
    assert open_source(str(model)).num_hidden_layers == 4
    first = min(weight_map)
    for outside in ("../b.safetensors", "/etc/passwd", "x/../../b.safetensors", 3, "", "..\\b.safetensors", "b\0"):
        write_index(model, {**weight_map, first: outside})
        assert "inside the directory" in error(model)
    write_index(model, {**weight_map, first: "c.safetensors"})
    assert "c.safetensors cannot be read" in error(model)
    write_index(model, {**weight_map, "ghost": "a.safetensors"})
    assert "ghost" in error(model)
    write_index(model, {})
    assert "weight_map" in error(model)


def test_no_usable_weights_gets_a_line_that_helps(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "no weights" in error(model)
    (model / "model.onnx").touch()
    assert "model.onnx is not a format" in error(model)
    (model / "model.gguf").touch()
    assert "to bake model.gguf, give that file's own name" in error(model)


def test_an_adapter_beside_the_model_is_refused(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    assert "adapter" in error(model)


def test_a_missing_tokenizer_is_found_out(model: Path) -> None:
    require_tokenizer(open_source(str(model)))
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(InputError, match="no tokenizer"):
        require_tokenizer(open_source(str(model)))


def test_opening_imports_no_torch(model: Path) -> None:
    code = f"import sys, lpes_bake.source as s; s.open_source({str(model)!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
