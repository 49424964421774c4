"""push sends a verified checkpoint and nothing else, in one commit, from which strangers load the same model.

The real Hub client talks to a server on loopback, always in a process of its own: it reads HF_ENDPOINT
when it is imported.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.source import open_source
from tests.conftest import write_tiny
from tests.hub_server import READ_TOKEN, TOKEN, Hub, serve

FACTORS = (0.25, 4.0, 1.0, 2.0)
LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
name, revision, out = sys.argv[1:]
kwargs = {"revision": revision} if revision else {}
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, **kwargs)
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True, **kwargs)
logits = model(torch.arange(3, 203)[None]).logits
torch.save(logits.detach(), out)
model.save_pretrained(out + ".saved")
found = {"class": type(model).__name__, "lpes_bake": "lpes_bake" in sys.modules, "ids": tokenizer("ab").input_ids}
print(json.dumps(found))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve() as hub:
        yield hub


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("base") / "tiny"
    write_tiny(base, "qwen2", tie_word_embeddings=True)
    (base / "LICENSE").write_text("Apache-2.0")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return bake(open_source(str(base)), Factors(FACTORS), tmp_path_factory.mktemp("baked") / "tiny-lpes").out


@pytest.fixture
def edited(baked: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(baked, tmp_path / "edited"))


def client(hub: Hub, home: Path, *command: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    """Run Python with an empty cache and `hub` as the only Hub there is."""
    drop = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "HF_MODULES_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in drop}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_TOKEN": token} if token else {}
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=home,
        timeout=300,
    )
    assert TOKEN not in done.stdout + done.stderr
    assert "signature" not in done.stdout + done.stderr
    return done


def push(hub: Hub, home: Path, *arguments: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    return client(hub, home, "-m", "lpes_bake", "push", *arguments, token=token)


def pushed(hub: Hub, home: Path, *arguments: str) -> dict[str, Any]:
    done = push(hub, home, *arguments, "--static", "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def refused(done: subprocess.CompletedProcess[str], reason: str, before_any_work: bool = True) -> None:
    """Exit code 2 and one line that says why: the only line, when it comes before any work."""
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    (error,) = [line for line in lines if line.startswith("Error: ")]
    assert reason in error
    assert "Traceback" not in done.stderr
    assert not before_any_work or lines == [error], done.stderr


def nothing_sent(hub: Hub) -> bool:
    return not any("/commit/" in request or request.startswith("PUT") for request in hub.requests)


def test_a_stranger_loads_what_was_pushed(hub: Hub, baked: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    done = push(hub, tmp_path, str(baked), "Tiny-2.5-lpes", "--prompt-tokens", "64")
    assert done.returncode == 0, done.stderr
    assert "✓ reference" in done.stderr
    commits = list(hub.repos["alice/Tiny-2.5-lpes"].commits.values())
    assert len(commits) == 2, "one commit on top of the one that the Hub makes"
    assert set(commits[1].files) - {".gitattributes"} == {path.name for path in baked.iterdir()}
    assert all(commits[1].files[path.name] == path.read_bytes() for path in baked.iterdir())
    assert f'revision = "{commits[1].oid}"' in done.stdout
    assert 'AutoModelForCausalLM.from_pretrained("alice/Tiny-2.5-lpes", revision=revision' in done.stdout

    home = tmp_path / "stranger"
    home.mkdir()
    out = home / "logits"
    loaded = client(hub, home, "-c", LOAD, "alice/Tiny-2.5-lpes", commits[1].oid, str(out), token=None)
    assert loaded.returncode == 0, loaded.stderr
    answer = json.loads(loaded.stdout.splitlines()[-1])
    assert answer["class"] == "LpesQwen2ForCausalLM"
    assert not answer["lpes_bake"]
    local = AutoModelForCausalLM.from_pretrained(baked, trust_remote_code=True)
    expected = local(torch.arange(3, 203)[None]).logits.detach()
    assert torch.equal(torch.load(out), expected)

    # And what the stranger saves stands on its own: no "repository--" in it, with all its Python files.
    saved = Path(f"{out}.saved")
    config = json.loads((saved / "config.json").read_text())
    assert not any("--" in str(target) for target in config["auto_map"].values())
    again = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    assert torch.equal(again(torch.arange(3, 203)[None]).logits.detach(), expected)


def test_only_the_checkpoints_own_files_are_sent(hub: Hub, edited: Path, tmp_path: Path) -> None:
    names = {path.name for path in edited.iterdir()}
    for stray in (".env", ".git/config", ".cache/x.json", "__pycache__/x.pyc", "journal.jsonl", "run.log", "id_rsa"):
        (edited / stray).parent.mkdir(exist_ok=True)
        (edited / stray).write_text("private")
    answer = pushed(hub, tmp_path, str(edited), "alice/tiny")
    assert set(answer["files"]) == names
    assert answer["left_out"] == ["id_rsa", "journal.jsonl", "run.log"]
    commit = hub.repos["alice/tiny"].at("main")
    assert commit is not None
    assert set(commit.files) - {".gitattributes"} == names
    assert b"private" not in commit.files.values()


def test_a_forgotten_access_token_is_never_sent(hub: Hub, edited: Path, tmp_path: Path) -> None:
    (edited / "notes.txt").write_text("login hf_" + "a1B2" * 9)
    done = push(hub, tmp_path, str(edited), "alice/tiny")
    refused(done, "notes.txt")
    assert "a1B2" not in done.stdout + done.stderr
    assert hub.requests == []


def test_a_broken_upload_leaves_no_trace_and_a_rerun_completes_it(hub: Hub, baked: Path, tmp_path: Path) -> None:
    hub.fail("POST .*/commit/", 500)
    refused(push(hub, tmp_path, str(baked), "alice/tiny", "--static"), "nothing was committed", before_any_work=False)
    assert len(hub.repos["alice/tiny"].commits) == 1
    sent = [request for request in hub.requests if request.startswith("PUT")]
    assert sent
    hub.requests.clear()
    answer = pushed(hub, tmp_path, str(baked), "alice/tiny")
    assert not any(request.startswith("PUT") for request in hub.requests), "large files were there already"
    assert len(hub.repos["alice/tiny"].commits) == 2
    # Once more changes nothing, and names the same commit.
    assert pushed(hub, tmp_path, str(baked), "alice/tiny")["commit"] == answer["commit"]
    assert len(hub.repos["alice/tiny"].commits) == 2


def test_an_upload_that_breaks_in_the_weights_is_completed_by_a_rerun(hub: Hub, baked: Path, tmp_path: Path) -> None:
    hub.fail("PUT /store/", 403)
    refused(
        push(hub, tmp_path, str(baked), "alice/tiny", "--static"), "run the same command again", before_any_work=False
    )
    assert len(hub.repos["alice/tiny"].commits) == 1
    pushed(hub, tmp_path, str(baked), "alice/tiny")
    assert len(hub.repos["alice/tiny"].commits) == 2


def test_a_card_that_the_hub_refuses_is_found_before_any_upload(hub: Hub, edited: Path, tmp_path: Path) -> None:
    card = edited / "README.md"
    card.write_text(card.read_text().replace("license: apache-2.0", "license: no-such-license"))
    refused(push(hub, tmp_path, str(edited), "alice/tiny"), '"license" must be one of those known')
    assert nothing_sent(hub)
    assert not hub.repos
    card.unlink()
    refused(push(hub, tmp_path, str(edited), "alice/tiny"), "no README.md")


def test_a_directory_that_fails_verification_is_not_sent(hub: Hub, edited: Path, tmp_path: Path) -> None:
    config = json.loads((edited / "config.json").read_text())
    config["architectures"] = ["Qwen2ForCausalLM"]
    (edited / "config.json").write_text(json.dumps(config))
    done = push(hub, tmp_path, str(edited), "alice/tiny")
    assert done.returncode == 1
    assert "✗ architectures" in done.stderr
    assert hub.requests == []


def test_whoever_may_not_write_is_told_before_any_work(hub: Hub, baked: Path, tmp_path: Path) -> None:
    hub.create("bob/tiny")
    hub.create("alice/public")
    for arguments, token, reason in [
        (("alice/tiny",), None, "not logged in"),
        (("alice/tiny",), READ_TOKEN, "may only read"),
        (("alice/tiny",), "hf_revoked", "check the connection and the login"),
        (("bob/tiny",), TOKEN, "alice may not write to bob"),
        (("carol/new", "--create-pr"), TOKEN, "alice may not write to carol"),
        (("a b",), TOKEN, "no valid name"),
        (("alice/public", "--private"), TOKEN, "exists and is public"),
    ]:
        refused(push(hub, tmp_path, str(baked), *arguments, token=token), reason)
    refused(push(hub, tmp_path, str(tmp_path / "nowhere"), "alice/tiny"), "nowhere")
    assert nothing_sent(hub)


def test_the_base_models_own_repository_is_never_the_target(hub: Hub, edited: Path, tmp_path: Path) -> None:
    card = edited / "README.md"
    card.write_text(card.read_text().replace("base_model: tiny", "base_model: alice/tiny"))
    for name in ("alice/tiny", "Alice/Tiny"):
        refused(push(hub, tmp_path, str(edited), name), "base model's own repository")
    # Whose a bare name is, the Hub says.
    refused(push(hub, tmp_path, str(edited), "tiny", "--static"), "base model's own repository")
    assert nothing_sent(hub)


def test_what_an_older_push_left_behind_is_removed_in_the_same_commit(hub: Hub, baked: Path, tmp_path: Path) -> None:
    old = {"model-00001-of-00002.safetensors": b"x", "model.safetensors.index.json": b"{}", "figure.png": b"x"}
    hub.create("lab/tiny", private=True).add("main", "old", {**old, "modeling_old.py": b"", ".gitignore": b""}, set())
    answer = pushed(hub, tmp_path, str(baked), "lab/tiny", "--private")
    assert answer["removed"] == ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "modeling_old.py"]
    commit = hub.repos["lab/tiny"].at("main")
    assert commit is not None
    assert commit.oid == answer["commit"]
    assert set(commit.files) == {*answer["files"], "figure.png", ".gitignore"}
    assert len(hub.repos["lab/tiny"].commits) == 3


def test_a_file_that_the_repositorys_gitignore_drops_is_reported(hub: Hub, baked: Path, tmp_path: Path) -> None:
    hub.create("alice/tiny").ignored.add("factors.json")
    refused(push(hub, tmp_path, str(baked), "alice/tiny", "--static"), "left out factors.json", before_any_work=False)


def test_branches_and_pull_requests(hub: Hub, baked: Path, tmp_path: Path) -> None:
    branch = pushed(hub, tmp_path, str(baked), "alice/tiny", "--revision", "v1", "--message", "first", "--private")
    repo = hub.repos["alice/tiny"]
    assert repo.private
    assert repo.branches["v1"] == branch["commit"] != repo.branches["main"]
    assert repo.commits[branch["commit"]].message == "first"
    hub.create("bob/tiny")
    request = pushed(hub, tmp_path, str(baked), "bob/tiny", "--create-pr")
    assert request["pull_request"] == f"{hub.url}/bob/tiny/discussions/1"
    assert hub.repos["bob/tiny"].branches["refs/pr/1"] == request["commit"]
    assert len(hub.repos["bob/tiny"].commits) == 2
