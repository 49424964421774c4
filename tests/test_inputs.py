"""What may go into a bake besides plain safetensors: pickles, quantised weights, GGUF files, what is baked already."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import weakref
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from lpes_bake.cli import main
from lpes_bake.export import bake
from lpes_bake.factors import Factors, base_facts, load_factors
from lpes_bake.loading import load_model
from lpes_bake.search.errors import InputError
from lpes_bake.search.models import set_factors
from lpes_bake.source import base_form, open_source
from lpes_bake.verify import verify
from tests.conftest import write_tiny
from tests.test_export import LIST, digests
from tests.test_source import COMMIT, cached_tree, edit_config, error

FACTORS = Factors(LIST)


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of a tiny checkpoint that may be changed."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def pickle_weights(model: Path, shards: int = 1) -> dict[str, torch.Tensor]:
    """Replace the weights by pickles, as transformers 4 wrote them; returns the tensors."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, model / "pytorch_model.bin")
        return tensors
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        part = {key: tensors[key] for key in sorted(tensors)[number::shards]}
        torch.save(part, model / name)
        weight_map |= dict.fromkeys(part, name)
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory's safetensors files."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def logits(directory: Path, factors: tuple[float, ...] | None = None) -> torch.Tensor:
    """What a baked directory computes, or a base model with these factors."""
    model = load_model(open_source(str(directory), baked=True), torch.device("cpu"), torch.float32)
    if factors is not None:
        set_factors(model, factors)
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 203)[None]).logits
    return found


def export(*arguments: Path | str) -> tuple[int, str]:
    """Exit code and output of `lpes-bake export`."""
    done = CliRunner().invoke(main, ["export", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.fixture
def factors_file(tmp_path: Path) -> Path:
    (tmp_path / "factors.json").write_text(json.dumps(LIST))
    return tmp_path / "factors.json"


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_weights_become_safetensors_that_load(model: Path, tmp_path: Path, shards: int) -> None:
    tensors = pickle_weights(model, shards)
    before = digests(model)
    result = bake(open_source(str(model)), FACTORS, tmp_path / "out")
    assert same(weights_of(tmp_path / "out"), tensors)
    assert digests(model) == before
    assert not list((tmp_path / "out").glob("*.bin*"))
    converted = {name for name, how in result.files.items() if how == "converted"}
    if shards == 1:
        assert converted == {"model.safetensors"}
    else:
        names = {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
        assert converted == {*names, "model.safetensors.index.json"}
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(tensors)
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        assert list(result.left_out) == ["pytorch_model.bin.index.json"]
    report = verify(tmp_path / "out", open_source(str(model)), live=None)
    assert report.ok, report.checks
    reasons = {check.name: check.reason for check in report.checks}
    assert f"{len(tensors)} tensors equal" in reasons["base weights"]


def test_a_pickle_that_is_another_model_is_told_from_the_base(model: Path, tmp_path: Path) -> None:
    tensors = pickle_weights(model)
    bake(open_source(str(model)), FACTORS, tmp_path / "out")
    for change in (
        {**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1},
        {**tensors, "model.norm.weight": tensors["model.norm.weight"].half()},
        {**tensors, "extra": torch.zeros(1)},
        {name: tensor for name, tensor in tensors.items() if "norm" not in name},
    ):
        torch.save(change, model / "pytorch_model.bin")
        report = verify(tmp_path / "out", open_source(str(model)), live=None)
        assert [check.name for check in report.checks if check.status == "fail"] == ["base weights"]


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_that_shares_memory_is_dropped_only_where_the_config_ties_it(tmp_path: Path, tied: bool) -> None:
    model = write_tiny(tmp_path / "model", "llama", tie_word_embeddings=tied)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, model / "pytorch_model.bin")
    bake(open_source(str(model)), FACTORS, tmp_path / "out")
    found = weights_of(tmp_path / "out")
    assert ("lm_head.weight" in found) != tied
    assert torch.equal(
        found.get("lm_head.weight", found["model.embed_tokens.weight"]), tensors["model.embed_tokens.weight"]
    )
    # As transformers has it from the pickle itself.
    assert torch.equal(logits(tmp_path / "out"), logits(model, LIST))
    assert verify(tmp_path / "out", open_source(str(model)), live=None).ok


def test_slices_and_transposes_in_a_pickle_are_written_whole(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    name, other = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    both = torch.cat([tensors[name], tensors[other]])
    views = {name: both[: len(both) // 2], other: both[len(both) // 2 :]}
    down = "model.layers.1.mlp.down_proj.weight"
    views[down] = tensors[down].T.contiguous().T
    assert not views[down].is_contiguous()
    torch.save({**tensors, **views}, model / "pytorch_model.bin")
    bake(open_source(str(model)), FACTORS, tmp_path / "out")
    assert same(weights_of(tmp_path / "out"), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pickles_keep_their_dtype_in_either_layout_of_torch(model: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in pickle_weights(model).items()}
    old = dtype == torch.float16
    # The layout of torch before 1.6, which cannot be mapped.
    torch.save(tensors, model / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
    bake(open_source(str(model)), FACTORS, tmp_path / "out")
    assert same(weights_of(tmp_path / "out"), tensors)


class Trap:
    """What a malicious pickle does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_with_anything_but_tensors_is_one_line_and_leaves_nothing(
    model: Path, tmp_path: Path, factors_file: Path
) -> None:
    tensors = pickle_weights(model)
    path = model / "pytorch_model.bin"
    whole = path.read_bytes()
    trap = tmp_path / "it ran"
    bad: dict[str, Any] = {
        "more than plain tensors": {**tensors, "x": Trap(trap)},
        "'x', which is no tensor": {**tensors, "x": 3},
        "sparse, a tensor of a kind": {**tensors, "sparse": torch.eye(3).to_sparse()},
        "packed, a tensor of a kind": {
            **tensors,
            "packed": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        },
        "meta, a tensor of a kind": {**tensors, "meta": torch.ones(3, device="meta")},
        "a list, not a model's tensors": [1],
        "a dict, not a model's tensors": {},
        "layers.2.mlp.up_proj.weight": {name: one for name, one in tensors.items() if "2.mlp.up_proj" not in name},
    }
    contents: dict[str, bytes] = {
        "truncated": whole[:-30],
        "is damaged": b"\x80\x02}q\x00.",
        "Git LFS": b"version https",
    }
    for message in (*bad, *contents):
        if message in bad:
            torch.save(bad[message], path)
        else:
            path.write_bytes(contents[message])
        code, output = export(model, factors_file, tmp_path / "new" / "out")
        assert (code, len(output.strip().splitlines())) == (2, 1), output
        assert message in output
        assert sorted(one.name for one in tmp_path.iterdir()) == ["factors.json", "model"], message
    assert not trap.exists()


def test_one_pickle_at_a_time_is_in_memory(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lpes_bake import convert

    pickle_weights(model, 3)
    load, seen = convert.load_pickle, list[weakref.ref[torch.Tensor]]()

    def watched(path: Path) -> dict[str, torch.Tensor]:
        assert not [one for one in seen if one() is not None]
        tensors = load(path)
        seen.extend(map(weakref.ref, tensors.values()))
        return tensors

    monkeypatch.setattr(convert, "load_pickle", watched)
    bake(open_source(str(model)), FACTORS, tmp_path / "out")
    assert len(seen) == len(weights_of(tmp_path / "out"))


def test_an_index_of_pickles_must_be_right(model: Path, tmp_path: Path) -> None:
    pickle_weights(model, 2)
    path = model / "pytorch_model.bin.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost.weight"] = "pytorch_model-00001-of-00002.bin"
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"lacks model\.ghost\.weight"):
        bake(open_source(str(model)), FACTORS, tmp_path / "out")
    del index["weight_map"]["model.ghost.weight"], index["weight_map"]["model.layers.3.mlp.up_proj.weight"]
    path.write_text(json.dumps(index))
    assert "lacks layers.3.mlp.up_proj.weight" in error(model)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


def test_what_is_pickled_is_scored_as_what_is_not(model: Path, tiny_llama: Path) -> None:
    pickle_weights(model, 2)
    assert torch.equal(logits(model, LIST), logits(tiny_llama, LIST))


def test_a_pickle_that_would_run_code_is_not_scored(model: Path, tmp_path: Path) -> None:
    tensors = pickle_weights(model)
    torch.save({**tensors, "x": Trap(tmp_path / "it ran")}, model / "pytorch_model.bin")
    with pytest.raises(InputError, match="model cannot be loaded"):
        logits(model)
    assert not (tmp_path / "it ran").exists()


def test_a_pickle_in_a_cached_tree_bakes_to_plain_files(model: Path, tmp_path: Path) -> None:
    tensors = pickle_weights(model, 2)
    result = bake(open_source(str(cached_tree(model, tmp_path / "hub"))), FACTORS, tmp_path / "out", weights="hardlink")
    assert same(weights_of(tmp_path / "out"), tensors)
    assert result.revision == COMMIT
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def packed(layout: str, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A linear map's weight as a quantisation's checkpoints hold it: names, dtypes and shapes, not values."""
    rows, columns = weight.shape
    base = name.removesuffix(".weight")
    if layout == "gptq":
        return {
            f"{base}.qweight": torch.ones(columns // 8, rows, dtype=torch.int32),
            f"{base}.qzeros": torch.ones(1, rows // 8, dtype=torch.int32),
            f"{base}.scales": torch.ones(1, rows, dtype=torch.float16),
            f"{base}.g_idx": torch.zeros(columns, dtype=torch.int32),
        }
    if layout == "awq":
        return {
            f"{base}.qweight": torch.ones(columns, rows // 8, dtype=torch.int32),
            f"{base}.qzeros": torch.ones(1, rows // 8, dtype=torch.int32),
            f"{base}.scales": torch.ones(1, rows, dtype=torch.float16),
        }
    if layout == "nf4":
        return {
            name: torch.ones(rows * columns // 2, 1, dtype=torch.uint8),
            f"{name}.absmax": torch.ones(rows * columns // 64, dtype=torch.uint8),
            f"{name}.quant_map": torch.ones(16),
            f"{name}.nested_absmax": torch.ones(1),
            f"{name}.nested_quant_map": torch.ones(256),
            f"{name}.quant_state.bitsandbytes__nf4": torch.ones(90, dtype=torch.uint8),
        }
    return {
        name: torch.ones(rows, columns, dtype=torch.int8),
        f"{base}.SCB": torch.ones(rows),
        f"{base}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


QUANTIZATIONS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
}


@pytest.mark.parametrize("layout", QUANTIZATIONS)
def test_quantised_weights_and_their_config_are_carried_over(model: Path, tmp_path: Path, layout: str) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        # One map is left as it was, as quantisers may be told to.
        whole = "_proj" not in name or name == "model.layers.1.mlp.down_proj.weight"
        tensors |= {name: tensor.half()} if whole else packed(layout, name, tensor)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    edit_config(model, quantization_config=QUANTIZATIONS[layout])
    before = digests(model)
    bake(open_source(str(model)), FACTORS, tmp_path / "out")
    assert digests(tmp_path / "out")["model.safetensors"] == before["model.safetensors"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == QUANTIZATIONS[layout]
    report = verify(tmp_path / "out", open_source(str(model)), live=None)
    assert report.ok, report.checks
    method = QUANTIZATIONS[layout]["quant_method"]
    said = f"{method}: every layer has the maps of the others, and none of 27 packed ones lacks a tensor"
    assert said in next(check.reason for check in report.checks if check.name == "weights")
    # A map that lacks one of its tensors, and one that lacks them all.
    one = {"gptq": ".qzeros", "awq": ".scales", "nf4": ".weight.absmax", "int8": ".weight"}[layout]
    for lost in (f"layers.2.self_attn.q_proj{one}", "layers.2.self_attn.q_proj"):
        kept = {name: tensor for name, tensor in tensors.items() if lost not in name}
        for directory in (model, tmp_path / "out"):
            save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
        assert f"lacks {lost}" in error(model)
        checks = verify(tmp_path / "out", live=None).checks
        assert f"lacks {lost}" in next(check.reason for check in checks if check.status == "fail")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_each_dtype_bakes_to_the_byte(tmp_path: Path, dtype: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    source = write_tiny(tmp_path / "model", "qwen2", tie_word_embeddings=tied)
    AutoModelForCausalLM.from_pretrained(source, torch_dtype=getattr(torch, dtype)).save_pretrained(source)
    bake(open_source(str(source)), FACTORS, tmp_path / "out")
    assert digests(tmp_path / "out")["model.safetensors"] == digests(source)["model.safetensors"]
    assert {tensor.dtype for tensor in weights_of(tmp_path / "out").values()} == {getattr(torch, dtype)}
    assert verify(tmp_path / "out", open_source(str(source)), live=None).ok


@pytest.mark.parametrize(
    "lost", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.2.mlp.up_proj.weight"]
)
def test_weights_that_lack_a_tensor_are_refused_and_caught(model: Path, tmp_path: Path, lost: str) -> None:
    out = bake(open_source(str(model)), FACTORS, tmp_path / "out").out
    tensors = load_file(model / "model.safetensors")
    del tensors[lost]
    for directory in (model, out):
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert f"lacks {lost.removeprefix('model.')} in its weights" in error(model)
    report = verify(out, live=None)
    assert {check.name: check.reason for check in report.checks if check.status == "fail"}.keys() == {"weights"}
    # Whole layers, of a model that is said to have more of them.
    fewer = {name: one for name, one in load_file(out / "model.safetensors").items() if "layers.3." not in name}
    save_file({**fewer, lost: torch.ones(4)}, model / "model.safetensors", metadata={"format": "pt"})
    assert "lacks layers.3." in error(model)
    edit_config(model, num_hidden_layers=10**15)
    assert "lacks layers.3." in error(model)


def test_a_bare_model_needs_no_head(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    AutoModel.from_pretrained(model).save_pretrained(tmp_path / "bare")
    assert open_source(str(tmp_path / "bare")).architecture == "LlamaModel"


def test_weights_without_the_mark_of_pytorchs_get_it_and_stay_the_same(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    for number, metadata in enumerate((None, {"made_by": "me"})):
        save_file(tensors, model / "model.safetensors", metadata=metadata)
        out = tmp_path / f"out{number}"
        result = bake(open_source(str(model)), FACTORS, out, weights="hardlink")
        assert result.files["model.safetensors"] == "marked"
        assert not (out / "model.safetensors").samefile(model / "model.safetensors")
        assert same(weights_of(out), tensors)
        from safetensors import safe_open

        with safe_open(out / "model.safetensors", "pt") as file:
            assert file.metadata() == {**(metadata or {}), "format": "pt"}
        assert verify(out, open_source(str(model)), live=None).ok
    save_file(tensors, model / "model.safetensors", metadata={"format": "flax"})
    assert "'flax'" in error(model)


def test_a_baked_directory_is_baked_again_only_when_asked(model: Path, tmp_path: Path, factors_file: Path) -> None:
    (model / "README.md").write_text("---\nlicense: mit\n---\n")
    snapshot = cached_tree(model, tmp_path / "hub")
    bake(open_source(str(snapshot)), Factors((1.0, 1.0, 2.0, 0.5)), tmp_path / "first")
    code, output = export(tmp_path / "first", factors_file, tmp_path / "again")
    assert (code, len(output.strip().splitlines())) == (2, 1)
    assert "already baked" in output and "--rebake" in output
    code, output = export(tmp_path / "first", factors_file, tmp_path / "again", "--rebake")
    assert code == 0, output
    bake(open_source(str(snapshot)), FACTORS, tmp_path / "direct")
    again, direct = digests(tmp_path / "again"), digests(tmp_path / "direct")
    assert {name for name in direct if again[name] != direct[name]} <= {"README.md"}
    cards = [(tmp_path / name / "README.md").read_text() for name in ("again", "direct")]
    assert cards[0].replace("again", "direct") == cards[1]
    assert load_factors(tmp_path / "again").base == load_factors(tmp_path / "direct").base
    assert verify(tmp_path / "again", open_source(str(model)), live=None).ok
    # A base model is what it is already.
    assert base_form(open_source(str(model))) == open_source(str(model))


@pytest.mark.parametrize("name", ["me/finetuned", None])
def test_a_second_bake_names_what_was_baked_and_not_what_the_factors_were_found_on(
    name: str | None, model: Path, tmp_path: Path
) -> None:
    source = open_source(str(model.rename(tmp_path / "a model")))
    found_on = {**base_facts(source), "name": "org/other", "revision": COMMIT}
    bake(source, Factors(LIST, base=found_on), tmp_path / "first", base_model=name)
    base = base_form(open_source(str(tmp_path / "first"), baked=True))
    assert (base.name, base.revision) == (name or "a model", None)
    (tmp_path / "first" / "README.md").unlink()
    base = base_form(open_source(str(tmp_path / "first"), baked=True))
    assert (base.name, base.revision) == ("org/other", COMMIT)


def test_a_baked_directory_without_its_record_can_be_baked_again(model: Path, tmp_path: Path) -> None:
    out = bake(open_source(str(model)), FACTORS, tmp_path / "first").out
    (out / "factors.json").unlink()
    edit_config(out, auto_map=...)
    source = base_form(open_source(str(out), baked=True))
    assert (source.name, source.factors) == ("model", None)
    bake(source, FACTORS, tmp_path / "again")
    assert verify(tmp_path / "again", open_source(str(model)), live=None).ok


def test_an_adapter_says_how_it_is_merged(model: Path, tmp_path: Path, factors_file: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    code, output = export(tmp_path / "adapter", factors_file, tmp_path / "out")
    assert (code, len(output.strip().splitlines())) == (2, 1)
    assert "merge_and_unload" in output


def write_gguf(
    model: Path, architecture: str, path: Path, *, rope_freqs: bool = False, scaling: str | dict[str, float] = "none"
) -> None:
    """A tiny model as llama.cpp's converter writes it, in float32. scaling: its type, or other settings below rope."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    if isinstance(scaling, str):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    else:
        for name, number in scaling.items():
            writer.add_float32(f"{architecture}.rope.{name}", number)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    for name, tensor in load_file(model / "model.safetensors").items():
        array = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            # llama.cpp's Llama rotates neighbouring rows, transformers' the two halves of a head.
            count = heads if "q_proj" in name else kv_heads
            array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        there = names.get_name(name, (".weight", ".bias"))
        assert there is not None
        writer.add_tensor(there, array)
    if rope_freqs:
        writer.add_tensor("rope_freqs.weight", torch.ones(16).numpy())
    vocab = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    tokens[255] = "he"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def quiet_progress() -> Iterator[None]:
    """transformers' loggers as they were: a GGUF export silences them for its process."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    yield
    logging.set_verbosity(level)


@pytest.mark.usefixtures("quiet_progress")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_bakes_to_the_model_that_it_was_made_from(
    family: str, tied: bool, tmp_path: Path, factors_file: Path
) -> None:
    from transformers import AutoTokenizer

    model = write_tiny(tmp_path / "base", family, tie_word_embeddings=tied)
    write_gguf(model, family, tmp_path / "tiny.gguf")
    before = {path.name for path in tmp_path.iterdir()}
    code, output = export(tmp_path / "tiny.gguf", factors_file, tmp_path / "out", "--base-model", "org/tiny")
    assert code == 0, output
    assert {path.name for path in tmp_path.iterdir()} == {*before, "out"}
    assert same(weights_of(tmp_path / "out"), load_file(model / "model.safetensors"))
    assert (tmp_path / "out" / "model.safetensors").stat().st_nlink == 1
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert tokenizer("the").input_ids[-1] == 255
    assert torch.allclose(logits(tmp_path / "out"), logits(model, LIST), atol=1e-3)
    assert verify(tmp_path / "out", live=None).ok


@pytest.mark.usefixtures("quiet_progress")
def test_a_gguf_file_that_would_lose_something_is_refused(model: Path, tmp_path: Path, factors_file: Path) -> None:
    import gguf

    path = tmp_path / "tiny.gguf"
    write_gguf(model, "llama", path, rope_freqs=True)
    refusals = {"scales RoPE": path.read_bytes()}
    write_gguf(model, "llama", path, scaling="linear")
    refusals["scales RoPE "] = path.read_bytes()
    write_gguf(model, "llama", path)
    refusals["not a whole GGUF file"] = path.read_bytes()[:100]
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.ones(128, 1)}, model / "model.safetensors")
    write_gguf(model, "llama", path)
    refusals["40 tensors, of which transformers knows 39"] = path.read_bytes()
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refusals["architecture 'gpt2'"] = path.read_bytes()
    for message, content in refusals.items():
        path.write_bytes(content)
        code, output = export(path, factors_file, tmp_path / "out")
        assert code == 2 and message in output.splitlines()[-1], output
        assert sorted(one.name for one in tmp_path.iterdir()) == ["factors.json", "model", "tiny.gguf"]
    assert "can only be exported" in error(path)


@pytest.mark.usefixtures("quiet_progress")
@pytest.mark.parametrize("name", ["scale_linear", "scaling.factor"])
def test_a_gguf_file_of_2023_that_scales_rope_without_a_type_is_refused(
    name: str, model: Path, tmp_path: Path, factors_file: Path
) -> None:
    write_gguf(model, "llama", tmp_path / "tiny.gguf", scaling={name: 4.0})
    code, output = export(tmp_path / "tiny.gguf", factors_file, tmp_path / "out")
    assert code == 2 and "scales RoPE" in output.splitlines()[-1], output
    write_gguf(model, "llama", tmp_path / "tiny.gguf", scaling={name: 1.0})
    code, output = export(tmp_path / "tiny.gguf", factors_file, tmp_path / "out")
    assert code == 0, output


def test_without_the_gguf_package_the_mend_is_named(
    model: Path, tmp_path: Path, factors_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    (tmp_path / "x.gguf").touch()
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    code, output = export(tmp_path / "x.gguf", factors_file, tmp_path / "out")
    assert code == 2 and "pip install 'lpes-bake[gguf]'" in output


# Writes end in an error at 100,000 bytes a file, as they do where a disk is full or a quota used up.
TIGHT = """
import resource, sys
from lpes_bake.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
main(sys.argv[1:])
"""


@pytest.mark.parametrize("way", ["copied", "marked", "converted", "dequantised"])
def test_writes_that_fail_half_way_leave_nothing_and_harm_nothing(
    way: str, model: Path, tmp_path: Path, factors_file: Path
) -> None:
    weights = model / "model.safetensors"
    out = bake(open_source(str(model)), FACTORS, tmp_path / "out").out
    if way == "marked":
        save_file(load_file(weights), weights)
    elif way == "converted":
        pickle_weights(model)
    elif way == "dequantised":
        write_gguf(model, "llama", tmp_path / "tiny.gguf")
        model = tmp_path / "tiny.gguf"
    before = digests(tmp_path)
    for place in (out, tmp_path / "new" / "deep" / "out"):
        command = [sys.executable, "-c", TIGHT, "export", str(model), str(factors_file), str(place), "--overwrite"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        line = done.stderr.strip().splitlines()[-1]
        assert re.match(r"Error: .* could not be written.*, and nothing was left behind: .*File too large", line), line
        assert "Traceback" not in done.stderr
    assert digests(tmp_path) == before
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".*"))


def test_a_disk_too_small_for_what_a_gguf_file_holds_is_refused_before_it_is_read(
    model: Path, tmp_path: Path, factors_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    write_gguf(model, "llama", tmp_path / "tiny.gguf")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("nothing may be read"))
    code, output = export(tmp_path / "tiny.gguf", factors_file, tmp_path / "out")
    assert code == 2 and "0.00 GB free" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["factors.json", "model", "tiny.gguf"]
