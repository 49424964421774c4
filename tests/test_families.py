"""Every family bakes, loads as a stranger loads it, verifies, and is scored as its plain forward pass says."""

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

import lpes_bake
from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.push import checkpoint_files
from lpes_bake.search.families import FAMILIES
from lpes_bake.search.kv_retrieval import KVRetrieval
from lpes_bake.search.models import load_scaled, set_factors
from lpes_bake.search.scoring import Scorer
from lpes_bake.source import open_source
from lpes_bake.verify import verify
from tests.conftest import ROOT, write_tiny
from tests.families import TINY_FAMILIES, family_named
from tests.test_scoring import contexts_of, plain_scores, same, tokenizer_of

EACH_FAMILY = pytest.mark.parametrize("family", TINY_FAMILIES)
FACTORS = (0.5, 1.3, 0.8, 2.0)
TASK = KVRetrieval(pairs=5, key_width=4)
# Started by its path, never imported.
LIVE_CHECKS = str(Path(lpes_bake.__file__).with_name("live_checks.py"))
# The live checks of `verify`, of all families in one process a part: a process of each family's own takes seconds.
ALL_LIVE_CHECKS = """
import runpy, sys
from pathlib import Path
script, part, root = sys.argv[1:]
names = runpy.run_path(script)
for model in sorted(Path(root).glob("*/Model-1.5")):
    scratch = model.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    names["say"](family=model.parent.name)
    settings = names["Settings"](str(model), "cpu", "float32", 3072)
    {"directory": names["check_directory"], "copy": names["check_copy"]}[part](settings, scratch)
    if part == "directory":
        settings.directory = str(model.parent / "edited")
        passed, reason = names["check_refusal"](settings)
        names["result"]("refusal of the edited one", passed, reason)
"""


def test_every_family_is_on_the_checklist() -> None:
    assert list(TINY_FAMILIES) == [family.base_model_type for family in FAMILIES]


def test_the_docs_and_the_cards_name_the_version_of_transformers_that_a_family_needs(root: Path) -> None:
    rows = (ROOT / "docs" / "adding_a_family.md").read_text().splitlines()
    for family in FAMILIES:
        (row,) = [row for row in rows if f"| `{family.base_model_type}` |" in row]
        needs = row.split("|")[3].strip()
        card = (root / family.base_model_type / "Model-1.5" / "README.md").read_text()
        assert f"They need transformers {needs} or newer." in card, family.base_model_type


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a family: `base`, a tiny checkpoint, and `Model-1.5`, its bake, whose name is hard on old versions."""
    root = tmp_path_factory.mktemp("families")
    for family in TINY_FAMILIES:
        base = write_tiny(root / family / "base", family)
        out = bake(open_source(str(base)), Factors(FACTORS), root / family / "Model-1.5").out
        # What a hand would do that wants it to load without trust_remote_code.
        config = json.loads((out / "config.json").read_text())
        (root / family / "edited").mkdir()
        (root / family / "edited" / "config.json").write_text(json.dumps({**config, "model_type": family}))
    return root


@pytest.fixture(scope="module")
def live(root: Path) -> dict[str, dict[str, tuple[str, str]]]:
    """Family → check → (status, reason), from processes that cannot import lpes_bake."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for part in ("directory", "copy"):
        done = subprocess.run(
            [sys.executable, "-c", ALL_LIVE_CHECKS, LIVE_CHECKS, part, str(root)],
            cwd=root,
            env={**os.environ, "HF_HOME": str(root / "home"), "HF_MODULES_CACHE": str(root / part)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        family = ""
        for message in map(json.loads, done.stdout.splitlines()):
            family = message.get("family", family)
            if "name" in message:
                found.setdefault(family, {})[message["name"]] = message["status"], message["reason"]
    return found


@EACH_FAMILY
def test_a_bake_passes_every_check_of_verify(
    family: str, root: Path, live: dict[str, dict[str, tuple[str, str]]]
) -> None:
    report = verify(root / family / "Model-1.5", open_source(str(root / family / "base")), live=None)
    assert {check.status for check in report.checks} == {"pass"}, report.checks
    wanted = {"refusal", "loads", "generation", "reference", "bare model", "tokenizer", "save and reload"}
    found = dict(live[family])
    status, reason = found.pop("refusal of the edited one")
    assert status == "fail" and "the factors are ignored" in reason
    assert set(found) == wanted
    assert {status for status, _ in found.values()} == {"pass"}, found


@EACH_FAMILY
def test_edits_that_lose_the_factors_in_silence_are_caught(family: str, root: Path, tmp_path: Path) -> None:
    baked = Path(shutil.copytree(root / family / "Model-1.5", tmp_path / "edited"))
    config = json.loads((baked / "config.json").read_text())
    entry = family_named(family)
    without_model = {auto: name for auto, name in config["auto_map"].items() if auto != "AutoModel"}
    edits: dict[str, dict[str, Any]] = {
        "model type": {"model_type": family},
        "architectures": {"architectures": [entry.base_class("ForCausalLM")]},
        "auto_map": {"auto_map": without_model},
        "factors": {"layer_rope_scaling": [1.0] * 4},
    }
    for check, change in edits.items():
        (baked / "config.json").write_text(json.dumps({**config, **change}))
        found = verify(baked, live=None).checks
        assert [one.name for one in found if one.status == "fail"] == [check], found


@EACH_FAMILY
def test_all_that_the_live_checks_had_is_pushed(family: str, root: Path) -> None:
    baked = root / family / "Model-1.5"
    files, left_out = checkpoint_files(baked)
    assert set(files) == {path.relative_to(baked).as_posix() for path in baked.rglob("*")}
    assert left_out == []


@EACH_FAMILY
def test_the_scorer_gives_what_plain_forward_passes_give(family: str, root: Path) -> None:
    path = root / family / "base"
    model: Any = load_scaled(path, dtype=torch.float64)
    # The fast ways to compute experts have no float64; models without experts never look.
    model.config._experts_implementation = "eager"
    tokenizer = tokenizer_of(path)
    contexts = contexts_of(TASK, tokenizer, 2)
    scorer = Scorer(model, tokenizer, TASK, contexts)
    assert scorer.plain == TINY_FAMILIES[family].plain
    scores = scorer.score(FACTORS)
    set_factors(model, FACTORS)
    expected = plain_scores(model, contexts)
    same(scores.logprob.flatten(), expected.logprob)
    assert scores.exact.flatten().tolist() == expected.exact
