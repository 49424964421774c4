"""Fixtures of the tests of searches: what is searched, and runs that many tests look at and leave as they are.

Each is made once in a process, whatever number of test files asks for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import Small, digests, without_date, write_mdqa, write_own, write_small


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what comes before the report: drawing it takes longer than all the rest."""
    monkeypatch.setattr("lpes_bake.run.write_report", lambda out: None)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """A tiny model and a text; leave them as they are."""
    return write_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def whole(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the real command that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    before = digests(small.model)
    command = [sys.executable, "-m", "lpes_bake", "search", str(small.model), "--out", str(out), *small.options()]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["run"] == str(out) and printed["verdict"] == "better"
    assert printed["layer_rope_scaling"] == without_date(out)["layer_rope_scaling"]
    assert digests(small.model) == before
    return out


@pytest.fixture(scope="session")
def file_tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tasks that read files, by name."""
    folder = tmp_path_factory.mktemp("files")
    return {
        "mdqa": f"mdqa:{write_mdqa(folder / 'mdqa.jsonl')},documents=3",
        "qa": f"qa:{write_own(folder / 'own.jsonl')}",
    }


@pytest.fixture(scope="session")
def many(small: Small, file_tasks: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on several tasks, chosen by another one, in another prompt format."""
    out = tmp_path_factory.mktemp("many") / "run"
    small.run(
        out,
        task=["kv,pairs=2,key_width=1", file_tasks["mdqa"]],
        selection_task=[file_tasks["qa"]],
        prompt_format="vicuna",
        contexts=2,
        selection_contexts=2,
        report_contexts=2,
        population=2,
        generations=1,
        uniform="",
    )
    return out
