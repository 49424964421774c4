"""The benchmarks run, on a model so small that their times mean nothing: what they count must be right all the same."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import LlamaConfig

from benchmarks import inference, scoring, search_cost
from tests.runs import LAYERS, Small, write_small


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return write_small(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture
def figures_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What a benchmark writes as JSON, run with these arguments."""

    def run(main: Callable[[], None], file: str, *arguments: object) -> Any:
        words = [file, *(str(one) for one in arguments), "--json", str(tmp_path / "figures.json")]
        monkeypatch.setattr(sys, "argv", words)
        main()
        return json.loads((tmp_path / "figures.json").read_text())

    return run


def test_a_decode_step_has_two_kernels_more_than_the_base_models(
    small: Small, figures_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "TABLE_LENGTHS", (4,))
    monkeypatch.setattr(inference, "WIDE", LlamaConfig(**inference.WIDE.to_diff_dict() | {"hidden_size": 64}))
    costs = figures_of(inference.main, "inference.py", small.model, "--lengths", "8,300", "--repeats", 3)
    assert [(one["model"], one["call"]) for one in costs] == [
        (model, call)
        for model in (small.model.name, "random, 2,048 wide")
        for call in ("decode", "prefill 8", "prefill 300")
    ]
    more = [one["kernels"][1] - one["kernels"][0] for one in costs]
    # One division of frequencies and one product of angles for all layers; above FEW_TOKENS each makes its own.
    assert more[0] == more[1] == more[3] == more[4] == 2
    assert more[2] > 2 * LAYERS
    assert all(low <= middle <= high and one["bytes"][0] > 0 for one in costs for low, middle, high in [one["ratio"]])


def test_the_engine_and_the_plain_path_come_to_the_same(small: Small, figures_of: Callable[..., Any]) -> None:
    found = figures_of(scoring.main, scoring.__file__, small.model, "--contexts", 1, "--repeats", 1)
    engine, *plain = found["figures"]
    assert [one["path"] for one in found["figures"]] == list(scoring.PATHS)
    assert engine["logprob_difference"] < 1e-4
    # Five questions share most of their context; the plain path reads all of it for each.
    assert all(one["tokens"] > 3 * engine["tokens"] and one["accuracy"] == engine["accuracy"] for one in plain)


def test_each_optimizer_has_a_row_and_a_price(small: Small, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = {"seeds": 1, "contexts": 2, "heldout-contexts": 2, "population": 4, "generations": 1, "steps": 2}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    task = ["--task", "kv,pairs=4,key_width=1", "--other", "kv,pairs=3,key_width=1"]
    done = CliRunner().invoke(search_cost.main, [str(small.model), str(out), *task, *words])
    assert done.exit_code == 0, done.output
    measured = json.loads((out / "search_cost.json").read_text())
    names = {one["name"] for one in measured}
    for line in [line for line in done.output.splitlines() if line.startswith("| ")][1:]:
        name, tokens, *_ = re.split(r" *\| *", line.strip("| "))
        assert name in names
        assert (int(tokens.replace(",", "")) == 0) == name.startswith("uniform")
