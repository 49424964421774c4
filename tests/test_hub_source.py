"""Models on the Hub as sources: judged by their config.json first, pinned to a commit, read through the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import Hub, serve
from tests.test_push import client


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as hub:
        yield hub


def put(hub: Hub, name: str, files: dict[str, bytes]) -> str:
    """A repository with these files; returns the commit's hash."""
    return hub.create(name).add("main", "model", files, {name for name in files if name.endswith(".safetensors")}).oid


def test_an_unsupported_architecture_is_refused_after_its_config_alone(hub: Hub, tmp_path: Path) -> None:
    config = json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}).encode()
    put(hub, "eve/gpt2", {"config.json": config, "model.safetensors": b"x" * 1000})
    (tmp_path / "f.json").write_text("[1.0]")
    done = client(hub, tmp_path, "-m", "lpes_bake", "export", "eve/gpt2", "f.json", "out")
    assert done.returncode == 2
    assert "gpt2" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    fetched = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
    assert fetched == {"config.json"}


def test_a_model_that_is_not_there_is_one_line(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text("[1.0]")
    done = client(hub, tmp_path, "-m", "lpes_bake", "export", "eve/nothing", "f.json", "out", token=None)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", [("export", "f.json", "out"), ("search", "--out", "out"), ("eval",)])
def test_a_gated_model_is_refused_before_any_work(hub: Hub, tmp_path: Path, command: tuple[str, ...]) -> None:
    put(hub, "eve/gated", {"config.json": b"{}", "model.safetensors": b"x"})
    hub.repos["eve/gated"].gated = True
    (tmp_path / "f.json").write_text("[1.0]")
    name, *rest = command
    done = client(hub, tmp_path, "-m", "lpes_bake", name, "eve/gated", *rest)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "eve/gated is gated: accept its terms on its page on the Hub and log in with `hf auth login`" in line
    assert not (tmp_path / "out").exists()
    assert {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request} == {"config.json"}


def test_pickled_weights_are_downloaded_only_where_there_are_no_others(
    hub: Hub, tiny_llama: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir() if path.suffix != ".safetensors"}
    torch.save(load_file(tiny_llama / "model.safetensors"), tmp_path / "pytorch_model.bin")
    pickled = (tmp_path / "pytorch_model.bin").read_bytes()
    others = dict.fromkeys(("training_args.bin", "original/pytorch_model.bin", "model.gguf"), b"x")
    put(hub, "eve/old", {**files, **others, "pytorch_model.bin": pickled})
    (tmp_path / "f.json").write_text("[0.25, 4, 1, 2]")
    done = client(hub, tmp_path, "-m", "lpes_bake", "export", "eve/old", "f.json", "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not list((tmp_path / "out").glob("*.bin"))
    fetched = {request.rpartition("/resolve/")[2].partition("/")[2] for request in hub.requests}
    assert "pytorch_model.bin" in fetched and not fetched & set(others)


def test_a_model_from_the_hub_is_baked_through_the_cache_and_its_commit_recorded(
    hub: Hub, tiny_llama: Path, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in tiny_llama.iterdir()}
    commit = put(hub, "eve/tiny-1.5", {**files, "pytorch_model.bin": b"x", "original/consolidated.00.pth": b"x"})
    (tmp_path / "f.json").write_text("[0.25, 4, 1, 2]")
    done = client(hub, tmp_path, "-m", "lpes_bake", "export", "eve/tiny-1.5", "f.json", "out")
    assert done.returncode == 0, done.stderr
    assert not any(request.endswith((".bin", ".pth")) for request in hub.requests)
    base = json.loads((tmp_path / "out" / "factors.json").read_text())["base"]
    assert (base["name"], base["revision"]) == ("eve/tiny-1.5", commit)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert not (tmp_path / "out" / "model.safetensors").is_symlink()
    verified = client(hub, tmp_path, "-m", "lpes_bake", "verify", "out", "--base", "eve/tiny-1.5", "--static")
    assert verified.returncode == 0, verified.stdout + verified.stderr
