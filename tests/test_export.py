"""The bake: exactly the right files, to the byte, that load without lpes_bake."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from huggingface_hub import ModelCard

from lpes_bake import export
from lpes_bake.cli import main
from lpes_bake.comparison import compared
from lpes_bake.export import Weights, bake
from lpes_bake.factors import Factors, base_facts, load_factors
from lpes_bake.search.errors import InputError
from lpes_bake.search.families import family_of
from lpes_bake.source import open_source, weight_files
from lpes_bake.verify import verify
from tests.conftest import write_tiny
from tests.test_source import COMMIT, cached_tree, edit_config, edit_rope, shard, write_index

LIST = (0.25, 4.0, 1.0, 2.0)
FACTORS = Factors(LIST)

# Loads a directory as a stranger does: no lpes_bake, no network, an empty cache of modules. Prints a
# checksum of the logits, which depend strongly on the factors.
STRANGER = """
import importlib.abc, json, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "lpes_bake":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
def logits(path):
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    ids = torch.arange(3, 203).remainder(200)[None]
    with torch.no_grad():
        return model, model(ids).logits
"""


def stranger(code: str, cwd: Path, modules_cache: Path) -> Any:
    """What `code` prints as JSON, run after STRANGER."""
    environment = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "HF_MODULES_CACHE": str(modules_cache),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", STRANGER + code], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of a tiny checkpoint that may be changed."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def error(model: Path, out: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        bake(open_source(str(model)), FACTORS, out, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_bake_has_exactly_the_right_files(family: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(f"tiny_{family}")
    before = digests(source)
    result = bake(open_source(str(source)), FACTORS, tmp_path / "out")
    ours = {"config.json", "README.md", "factors.json", "layer_rope_scaling.py", f"modeling_lpes_{family}.py"}
    baked = digests(tmp_path / "out")
    assert set(baked) == ours | set(before) == set(result.files)
    assert {name: baked[name] for name in before if name not in ours} == {
        name: digest for name, digest in before.items() if name not in ours
    }
    assert "model.safetensors" in before
    assert digests(source) == before
    shipped = importlib.resources.files("lpes_bake.modeling")
    for name in ("layer_rope_scaling.py", f"modeling_lpes_{family}.py"):
        assert (tmp_path / "out" / name).read_bytes() == (shipped / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_config_keeps_all_but_what_applies_the_factors(model: Path, tmp_path: Path) -> None:
    edit_config(model, quantization_config={"quant_method": "gptq", "bits": 4}, custom="kept", torch_dtype="bfloat16")
    before = json.loads((model / "config.json").read_text())
    bake(open_source(str(model)), FACTORS, tmp_path / "out")
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after.pop("layer_rope_scaling") == list(LIST)
    assert after.pop("model_type") == "lpes_llama"
    assert after.pop("architectures") == ["LpesLlamaForCausalLM"]
    assert after.pop("auto_map") == family_of(before, "it").auto_map
    assert after == {key: value for key, value in before.items() if key not in ("model_type", "architectures")}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    ],
)
def test_rope_settings_stay_as_they_were_written(model: Path, tmp_path: Path, rope: dict[str, Any]) -> None:
    edit_rope(model, **rope)
    bake(open_source(str(model)), FACTORS, tmp_path / "out")
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: value for key, value in after.items() if key.startswith("rope_")} == rope


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize(
    "scaling",
    [
        ...,
        None,
        {"rope_type": "default"},
        {},
        {"type": "default"},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0},
        {"type": "linear", "rope_type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 2.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
    ],
)
def test_factors_divide_the_frequencies_of_every_spelling_of_rope(
    model: Path, tmp_path: Path, scaling: Any, theta: float
) -> None:
    """In the layout of transformers 4, and in that of 5."""
    import torch
    from transformers import AutoModel

    from lpes_bake.loading import load_model
    from lpes_bake.modeling.layer_rope_scaling import layer_tables

    positions = torch.arange(300)[None]
    new = {"rope_type": "default", **({} if scaling is ... or scaling is None else scaling), "rope_theta": theta}
    new["rope_type"] = new.pop("type", new["rope_type"])
    layouts = {"old": {"rope_theta": theta, "rope_scaling": scaling}, "new": {"rope_parameters": new}}
    for name, rope in layouts.items():
        edit_rope(model, **rope)
        out = bake(open_source(str(model)), FACTORS, tmp_path / name).out
        if name == "old":  # which transformers 4 reads too
            base = AutoModel.from_pretrained(model).rotary_emb
        baked = load_model(open_source(str(out), baked=True), torch.device("cpu"), torch.float32).model.rotary_emb
        shared = baked(torch.zeros(1), positions)
        for layer, factor in enumerate(LIST):
            cos, _ = layer_tables(shared, layer, torch.float32)
            angles = positions[0, :, None] * (base.inv_freq / factor)
            assert torch.allclose(cos[0, :, :16], angles.cos() * base.attention_scaling, atol=1e-4)
    # "dynamic" stretches nothing while a prompt fits.
    plain = scaling in (..., None, {}) or bool({"default", "dynamic"} & set(scaling.values()))
    assert np.allclose(base.inv_freq, theta ** -(np.arange(0, 32, 2) / 32), rtol=1e-5) == plain


def test_a_stranger_loads_what_the_search_scored(tiny_llama: Path, tmp_path: Path) -> None:
    import torch

    from lpes_bake.search.models import load_scaled

    out = tmp_path / "Qwen2.5-7B-lpes"
    bake(open_source(str(tiny_llama)), FACTORS, out)
    code = """
model, out = logits("Qwen2.5-7B-lpes/")
same = AutoModel.from_pretrained("Qwen2.5-7B-lpes", trust_remote_code=True)
config = AutoConfig.from_pretrained("Qwen2.5-7B-lpes", trust_remote_code=True)
AutoTokenizer.from_pretrained("Qwen2.5-7B-lpes", trust_remote_code=True)
base = transformers.LlamaForCausalLM.from_pretrained("Qwen2.5-7B-lpes")(torch.arange(3, 203).remainder(200)[None])
torch.save((out, base.logits.detach()), "logits.pt")
print(json.dumps([type(model).__name__, type(same).__name__, config.layer_rope_scaling, config.model_type]))
"""
    found = stranger(code, tmp_path, tmp_path / "modules")
    assert found == ["LpesLlamaForCausalLM", "LpesLlamaModel", list(LIST), "lpes_llama"]
    baked, base = torch.load(tmp_path / "logits.pt")
    ids = torch.arange(3, 203).remainder(200)[None]
    with torch.no_grad():
        assert torch.equal(load_scaled(tiny_llama, dtype=torch.float32, factors=LIST)(ids).logits, baked)
        assert torch.equal(load_scaled(tiny_llama, dtype=torch.float32)(ids).logits, base)
    assert (baked - base).abs().max() > 0.1


def test_a_saved_copy_loads_alone(tiny_qwen2: Path, tmp_path: Path) -> None:
    bake(open_source(str(tiny_qwen2)), FACTORS, tmp_path / "out")
    save = 'model, out = logits("out"); model.save_pretrained("copy"); print(json.dumps(out.double().sum().item()))'
    first = stranger(save, tmp_path, tmp_path / "modules")
    shutil.rmtree(tmp_path / "out")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert not any("--" in target for target in config["auto_map"].values())
    assert config["layer_rope_scaling"] == list(LIST)
    load = 'model, out = logits("copy"); print(json.dumps(out.double().sum().item()))'
    assert stranger(load, tmp_path, tmp_path / "empty") == first


def test_bakes_in_one_process_keep_their_own_code_and_factors(
    tiny_llama: Path, tiny_qwen2: Path, tmp_path: Path
) -> None:
    """Of one family and of two, in directories of one name and of several; in both orders."""
    names = ["a/Model-1.5", "b/Model-1.5", "c/Model-1.5", "d"]
    factors = Factors((1.0, 1.0, 2.0, 0.5))
    for name, source, one in zip(
        names, (tiny_llama, tiny_llama, tiny_qwen2, tiny_qwen2), (FACTORS, factors) * 2, strict=True
    ):
        bake(open_source(str(source)), one, tmp_path / name)
    # One more, with code of another kind under the same name.
    shutil.copytree(tmp_path / "a/Model-1.5", tmp_path / "e/Model-1.5")
    with (tmp_path / "e/Model-1.5/layer_rope_scaling.py").open("a") as file:
        file.write("\n\nLayerScaledRotaryEmbedding.factors = lambda self: torch.ones_like(self.layer_rope_scaling)\n")
    names.append("e/Model-1.5")
    code = "print(json.dumps([logits(n)[1].double().sum().item() for n in names]))"
    forth = stranger(f"names = {names}; {code}", tmp_path, tmp_path / "m1")
    back = stranger(f"names = {names[::-1]}; {code}", tmp_path, tmp_path / "m2")
    assert forth == back[::-1]
    assert len(set(forth)) == len(names)


def test_an_export_imports_no_torch(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "list").write_text("\n".join(map(str, LIST)))
    code = (
        "import sys; from lpes_bake.cli import main; main(sys.argv[1:], standalone_mode=False); "
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    arguments = ["export", str(tiny_llama), str(tmp_path / "list"), str(tmp_path / "out")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)


def test_every_file_that_makes_up_the_model_rides_along_and_no_other(model: Path, tmp_path: Path) -> None:
    kept = {
        "LICENSE": "Apache",
        "tokenizer.model": "sp",
        "added_tokens.json": "{}",
        "chat_template.jinja": "{{ x }}",
        "additional_chat_templates/rag.jinja": "{{ y }}",
        "vocab.json": "{}",
        "merges.txt": "#version: 0.2",
        "special_tokens_map.json": "{}",
        # Loading and saving this one raises: it must never go through transformers.
        "generation_config.json": '{"temperature": 0.9, "top_p": 0.6}',
        ".gitattributes": "*.safetensors filter=lfs",
        "figures/a.svg": "<svg/>",
    }
    left = {
        "pytorch_model.bin": "weights that transformers does not load",
        "pytorch_model.bin.index.json": "an index of weights that are not in the bake",
        "model.safetensors.index.json": "an index of weights that are not in the bake",
        "model-Q4.gguf": "weights that transformers does not load",
        "consolidated.safetensors": "weights that transformers does not load",
        "leftover.py": "code that nothing refers to",
        "original/": "the model in another format (consolidated.00.pth)",
        "linked/": "a link to a directory",
    }
    tiny = set(digests(model)) - set(kept)
    for name, text in {**kept, **dict.fromkeys(left, "x"), "original/params.json": "{}"}.items():
        if name.endswith("/"):
            continue
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(text)
    (model / "original" / "consolidated.00.pth").touch()
    (model / "linked").symlink_to(tmp_path)
    for hidden in (".git", ".cache", "__pycache__"):
        (model / hidden).mkdir()
        (model / hidden / "x").touch()
    before = digests(model)
    result = bake(open_source(str(model)), FACTORS, tmp_path / "out")
    baked = digests(tmp_path / "out")
    assert result.left_out == left
    assert {name: baked[name] for name in kept} == {name: before[name] for name in kept}
    extra = set(baked) - set(kept)
    assert not extra & {name for name in before if name.split("/")[0] in (*left, ".git", ".cache", "original")}
    ours = {"config.json", "factors.json", "README.md", "layer_rope_scaling.py", "modeling_lpes_llama.py"}
    assert extra == ours | tiny


def test_shards_in_use_ride_along_and_others_do_not(model: Path, tmp_path: Path) -> None:
    weight_map = shard(model)
    shutil.copyfile(model / "a.safetensors", model / "old.safetensors")
    result = bake(open_source(str(model)), FACTORS, tmp_path / "out")
    found = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert found == set(weight_map.values())
    assert set(result.left_out) == {"old.safetensors"}
    assert "model.safetensors.index.json" in result.files


def test_an_index_of_one_file_rides_along(model: Path, tmp_path: Path) -> None:
    names = weight_files(model)[model / "model.safetensors"]
    (model / "model.safetensors").rename(model / "a.safetensors")
    write_index(model, dict.fromkeys(names, "a.safetensors"))
    out = bake(open_source(str(model)), FACTORS, tmp_path / "out").out
    assert set(weight_files(out)) == {out / "a.safetensors"}


def test_tied_and_untied_heads_stay_as_they_are(tmp_path: Path) -> None:
    """In the bake, and in what is saved of it: every tensor once, as in the source."""
    for name, tied in (("tied", True), ("untied", False)):
        source = write_tiny(tmp_path / f"{name}-base", "llama", tie_word_embeddings=tied)
        bake(open_source(str(source)), FACTORS, tmp_path / name)
    code = """
models = [logits(n)[0] for n in ("tied", "untied")]
for model in models:
    model.save_pretrained(model.config.name_or_path + "-copy")
heads = [(m.lm_head.weight, m.model.embed_tokens.weight) for m in models]
print(json.dumps([head.data_ptr() == embedding.data_ptr() for head, embedding in heads]))
"""
    assert stranger(code, tmp_path, tmp_path / "modules") == [True, False]
    for name in ("tied", "untied"):
        (source_tensors,), (baked,), (copied,) = (
            weight_files(tmp_path / f"{name}{suffix}").values() for suffix in ("-base", "", "-copy")
        )
        assert source_tensors == baked == copied
        assert ("lm_head.weight" in baked) == (name == "untied")


def test_a_tree_of_the_hub_cache_bakes_to_plain_files(model: Path, tmp_path: Path) -> None:
    snapshot = cached_tree(model, tmp_path / "hub")
    result = bake(open_source(str(snapshot)), FACTORS, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert (result.base_model, result.revision) == ("org/Tiny-1.5", COMMIT)
    base = load_factors(tmp_path / "out").base
    assert base is not None and (base["name"], base["revision"]) == ("org/Tiny-1.5", COMMIT)
    # And the bake, laid out like that itself, loads: no file is looked for beside a link's target.
    again = cached_tree(tmp_path / "out", tmp_path / "again")
    code = "print(json.dumps([logits(n)[1].double().sum().item() for n in names]))"
    one, other = stranger(f"names = {[str(again), 'out']}; {code}", tmp_path, tmp_path / "modules")
    assert one == other
    assert verify(again, live=None).ok


def test_what_the_source_links_to_is_not_replaced(model: Path, tmp_path: Path) -> None:
    snapshot = cached_tree(model, tmp_path / "hub")
    before = digests(tmp_path)
    assert "behind a link" in error(snapshot, snapshot.parents[1] / "blobs", overwrite=True)
    assert digests(tmp_path) == before


def test_shards_that_would_not_ride_along_are_refused(model: Path, tmp_path: Path) -> None:
    (model / ".hidden").mkdir()
    shard(model, ("a.safetensors", ".hidden/b.safetensors"))
    assert "hidden or linked folder" in error(model, tmp_path / "out")
    (model / ".hidden").rename(tmp_path / "elsewhere")
    (model / ".hidden").symlink_to(tmp_path / "elsewhere")
    assert "hidden or linked folder" in error(model, tmp_path / "out")


def test_names_that_are_not_unicode_get_one_line(model: Path, tmp_path: Path) -> None:
    assert "not Unicode" in error(model, tmp_path / os.fsdecode(b"out\xff"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("weights", ["hardlink", "symlink"])
def test_weights_may_be_links(weights: Weights, model: Path, tmp_path: Path) -> None:
    snapshot = cached_tree(model, tmp_path / "hub")
    result = bake(open_source(str(snapshot)), FACTORS, tmp_path / "out", weights=weights)
    linked = tmp_path / "out" / "model.safetensors"
    assert linked.samefile(snapshot / "model.safetensors")
    assert linked.is_symlink() == (weights == "symlink")
    assert [name for name, how in result.files.items() if how == f"{weights}ed"] == ["model.safetensors"]
    # Small files are always copies: editing one must not reach into the source.
    assert not (tmp_path / "out" / "tokenizer.json").samefile(snapshot / "tokenizer.json")


def test_a_place_in_use_is_refused_or_replaced_whole(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    bake(open_source(str(model)), FACTORS, out)
    (out / "model-00001-of-00009.safetensors").write_text("stale")
    before = digests(out)
    assert "--overwrite" in error(model, out)
    assert digests(out) == before
    bake(open_source(str(model)), FACTORS, out, overwrite=True)
    assert set(digests(out)) == set(before) - {"model-00001-of-00009.safetensors"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_place_that_somebody_else_took_meanwhile_is_refused(model: Path, tmp_path: Path) -> None:
    def take(name: str) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "theirs").touch()

    with pytest.raises(InputError, match="not empty"):
        bake(open_source(str(model)), FACTORS, tmp_path / "out", notify=take)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]


def test_places_that_would_do_harm_are_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "file").touch()
    work = tmp_path / "work" / "here"
    work.mkdir(parents=True)
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    monkeypatch.chdir(work)
    before = digests(tmp_path)
    for overwrite in (False, True):
        for inside in (model, model / "out", model / "a" / "b", tmp_path / "link" / "out"):
            assert "in the source directory" in error(model, inside, overwrite=overwrite)
        assert "holds the source" in error(model, tmp_path, overwrite=overwrite)
        assert "is a file" in error(model, tmp_path / "file", overwrite=overwrite)
    assert "working directory" in error(model, tmp_path / "work", overwrite=True)
    assert "working directory" in error(model, work)
    assert "git repository" in error(model, tmp_path / "repository", overwrite=True)
    assert digests(tmp_path) == before


def test_a_full_disk_is_refused_before_anything_is_copied(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    monkeypatch.setattr(export, "clone", lambda old, new: False)
    monkeypatch.setattr(shutil, "copyfile", lambda old, new: pytest.fail("nothing may be copied"))
    assert "GB free" in error(model, tmp_path / "deep" / "er" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_interrupt_half_way_leaves_nothing_and_harms_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    bake(open_source(str(model)), FACTORS, out)
    before = digests(tmp_path)

    def interrupt(old: Path, new: Path) -> str:
        new.write_bytes(old.read_bytes()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "clone", lambda old, new: False)
    monkeypatch.setattr(shutil, "copyfile", interrupt)
    for place in (out, tmp_path / "new" / "out"):
        with pytest.raises(KeyboardInterrupt):
            bake(open_source(str(model)), FACTORS, place, overwrite=True)
    assert digests(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_what_was_there_comes_back_when_the_last_step_fails(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    bake(open_source(str(model)), FACTORS, out)
    before = digests(tmp_path)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.startswith(".out.") and not self.name.endswith(".old"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    assert "Input/output error" in error(model, out, overwrite=True)
    assert digests(tmp_path) == before


def test_a_tokenizer_with_code_of_its_own_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tok.Tok", null]}}')
    assert "tokenizer" in error(model, tmp_path / "out")


def test_a_broken_link_in_the_source_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "LICENSE").symlink_to("../blobs/gone")
    assert "broken link" in error(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_card_is_valid_metadata_and_says_what_matters(model: Path, tmp_path: Path) -> None:
    metadata = "license: other\nlicense_name: qwen\nlicense_link: LICENSE\nlanguage: [en, de]\ntags: [chat]"
    (model / "README.md").write_text(f"---\n{metadata}\n---\n# Base\n")
    source = open_source(str(cached_tree(model, tmp_path / "hub")))
    factors = Factors(
        LIST,
        base=base_facts(source),
        curve={"control_points": [[0, 1.0]]},
        search={"seed": 7},
        scores={"base": {"contexts": 200, "accuracy": 0.25}, "baked": {"contexts": 200, "by_position": [0.5, 0.125]}},
    )
    bake(source, factors, tmp_path / "Tiny-1.5-lpes")
    card = ModelCard((tmp_path / "Tiny-1.5-lpes" / "README.md").read_text())
    found = card.data.to_dict()  # type: ignore[no-untyped-call]
    wanted = {
        "base_model": "org/Tiny-1.5",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "other",
        "license_name": "qwen",
        "license_link": "LICENSE",
        "language": ["en", "de"],
    }
    assert {key: found.get(key) for key in wanted} == wanted
    assert "lpes" in found["tags"] and "chat" not in found["tags"]
    for text in (
        'AutoModelForCausalLM.from_pretrained("Tiny-1.5-lpes", trust_remote_code=True)',
        f"--revision {COMMIT}",
        "| baked: contexts | 200 |",
        "| baked: by position | 0.5 0.125 |",
        "0.25 4 1 2",
        "▁█▂▄",
        '"seed": 7',
        "2606.27705",
    ):
        assert text in card.text, text


def searched(rng: np.random.Generator, title: str, unit: str, positions: list[int]) -> tuple[dict[str, Any], Any, Any]:
    """A task as a search leaves it in factors.json, and both models' accuracy, (contexts, positions)."""
    base, lpes = (rng.random((40, len(positions))).round() for _ in range(2))
    measured = compared({"accuracy": base, "logprob": base - 2}, {"accuracy": lpes, "logprob": lpes - 2})
    about = {
        "name": "kv",
        "title": title,
        "settings": {"task": "kv", "pairs": 4},
        "positions": positions,
        "position_unit": unit,
        "generates": False,
        "contexts": {"search": 8, "selection": 4, "report": 40},
        "too_long": {"report": 0},
    }
    return {**about, **measured}, base, lpes


def card_of(model: Path, tmp_path: Path, scores: dict[str, Any]) -> str:
    factors = Factors(LIST, search={"seed": 7, "verdict": "The winner is better."}, scores=scores)
    bake(open_source(str(model)), factors, tmp_path / "out")
    return str(ModelCard((tmp_path / "out" / "README.md").read_text()).text)


def table_after(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table behind a heading, without its header."""
    lines = text.partition(heading)[2].split("\n|---")[1].splitlines()[1:]
    rows = list(takewhile(lambda line: line.startswith("|"), lines))
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_card_has_a_table_for_each_task_that_was_searched(model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first, base, lpes = searched(rng, "Key-value retrieval, 4 pairs", "place", [0, 2, 3])
    second, _, _ = searched(rng, "Questions of mine.jsonl", "%", [0, 50, 100])
    text = {"paragraphs": 12, "base": -3.1234, "lpes": -3.1299, "difference": [-0.0065, -0.01, -0.003], "kl": 0.01}
    card = card_of(model, tmp_path, {"tasks": [first, second], "text": text})
    rows = table_after(card, "### Key-value retrieval, 4 pairs")
    for name, values, row in (("base model", base, rows[0]), ("this model", lpes, rows[1])):
        means = values.mean(0)
        assert row == [name, *(f"{100 * mean:.1f}" for mean in (*means, values.mean(), means.min()))]
    found = first["difference"]["accuracy"]["mean"]
    assert found[0] == pytest.approx((lpes - base).mean())
    mean, low, high = (f"{100 * one:+.1f}".replace("-", "−") for one in found)
    assert rows[2][0] == "difference" and rows[2][4] == f"{mean} [{low} to {high}]"
    for words in (
        "### Questions of mine.jsonl",
        "| | place 0% | place 50% | place 100% | mean | minimum |",
        "40 contexts, each asked at every place",
        "Log-probability of the answer, nats a token:",
        "12 paragraphs",
        "-3.123 for the base",
        "-3.130 for this one",
        "The winner is better.",
        '"seed": 7',
    ):
        assert words in card, words
    assert "\n\n\n\n" not in card


def test_the_card_of_a_search_that_found_nothing_has_the_base_models_scores_alone(model: Path, tmp_path: Path) -> None:
    task, base, _ = searched(np.random.default_rng(0), "Key-value retrieval, 4 pairs", "place", [0, 2])
    alone = {name: value for name, value in task.items() if name not in ("lpes", "difference")}
    # Numbers that are not known are null.
    alone["base"]["logprob"]["minimum"] = None
    card = card_of(model, tmp_path, {"tasks": [alone], "text": {"paragraphs": 12, "base": -3.1}})
    rows = table_after(card, "### Key-value retrieval, 4 pairs")
    assert [row[0] for row in rows] == ["base model"] and rows[0][1] == f"{100 * base.mean(0)[0]:.1f}"
    assert table_after(card, "Log-probability of the answer")[0][-1] == "–"
    assert "for this one" not in card and "this model" not in card.partition("## Scores")[2].partition("## Rep")[0]


@pytest.mark.parametrize("scores", [{"tasks": 3, "text": {}}, {"tasks": [{"title": "x"}], "text": {"paragraphs": 1}}])
def test_scores_of_another_shape_are_listed_as_they_are(model: Path, tmp_path: Path, scores: dict[str, Any]) -> None:
    card = card_of(model, tmp_path, scores)
    assert "### " not in card.partition("## Scores")[2].partition("## Reproduce")[0]
    assert "| tasks | 3 |" in card or "| tasks 1: title | x |" in card


@pytest.mark.parametrize("text", ["no metadata", "---\na: [\n---\n", "---\nlicense: 3\nlanguage: no\n---\n", "\xff"])
def test_a_base_card_that_cannot_be_read_does_no_harm(model: Path, tmp_path: Path, text: str) -> None:
    (model / "README.md").write_bytes(text.encode("latin-1"))
    bake(open_source(str(model)), FACTORS, tmp_path / "out")
    card = ModelCard((tmp_path / "out" / "README.md").read_text())
    assert "license" not in {k for k, v in card.data.to_dict().items() if v}  # type: ignore[no-untyped-call]


def test_the_command_says_what_it_did_and_how_to_load_it(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(LIST))
    arguments = [str(tiny_llama), str(tmp_path / "list.json"), str(tmp_path / "out")]
    done = CliRunner().invoke(main, ["export", *arguments])
    assert done.exit_code == 0, done.output
    assert f'AutoModelForCausalLM.from_pretrained("{tmp_path / "out"}", trust_remote_code=True)' in done.stdout
    assert CliRunner().invoke(main, ["export", *arguments]).exit_code == 2
    done = CliRunner().invoke(main, ["bake", *arguments, "--overwrite", "--json", "--base-model", "org/name"])
    result = json.loads(done.stdout)
    assert result["base_model"] == "org/name"
    assert "config.json" in result["files"]
    assert CliRunner().invoke(main, ["bake", *arguments, "--overwrite", "--base-model", "a/b/c"]).exit_code == 2
    assert CliRunner().invoke(main, ["show", str(tmp_path / "out")]).exit_code == 0
    assert load_factors(tmp_path / "out").layer_rope_scaling == LIST
    assert load_factors(tmp_path / "out" / "config.json").layer_rope_scaling == LIST
