"""`lpes-bake search --dry-run`: it says what a search would take, takes next to nothing, and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import LAYERS, Small, digests, one_line, records, write_mdqa

# What is compared here is known before the report is drawn.
pytestmark = pytest.mark.usefixtures("no_pictures")


def estimate(small: Small, out: Path, **changes: Any) -> dict[str, Any]:
    done = small.search(out, "--dry-run", "--json", **changes)
    assert done.exit_code == 0, done.output
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def cost_of_units(out: Path, kind: str) -> dict[tuple[float, ...], int]:
    """Tokens of a run's search by candidate, text included."""
    tokens: dict[tuple[float, ...], int] = {}
    for record in records(out):
        unit = record["unit"]
        if unit["part"] == "search" and unit["kind"] == kind:
            factors = tuple(unit["factors"])
            tokens[factors] = tokens.get(factors, 0) + record["result"]["tokens"]
    return tokens


@pytest.mark.parametrize("optimizer", ["genetic", "gradient", "hybrid"])
def test_tokens_are_those_of_the_search_when_nothing_is_dropped(optimizer: str, small: Small, tmp_path: Path) -> None:
    changes = {"optimizer": optimizer, "race": "off", "leash": 1, "patience": 9, "warmup": 1}
    changes |= {"finalists": 2, "gradient_batch": "2"}
    found = estimate(small, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()
    content = small.run(tmp_path / "run", **changes)
    assert set(cost_of_units(tmp_path / "run", "score").values()) == {found["evaluation"]["tokens"]}
    if optimizer != "genetic":
        # Minibatches are not all of one length.
        assert max(cost_of_units(tmp_path / "run", "gradient").values()) <= found["gradient_step"]["tokens"]
    else:
        assert found["gradient_step"] is None
    assert len(content["trials"]) == found["trials_at_most"]
    spent = sum(content["cost"]["tokens"].values())
    # At most, and not far from it: the best uniform factors are among the finalists anyway.
    assert spent <= found["total_at_most"]["tokens"] <= 1.5 * spent


def test_generated_answers_are_counted_at_their_longest(small: Small, tmp_path: Path) -> None:
    changes = {
        "task": ["kv,pairs=2,key_width=1", f"mdqa:{write_mdqa(tmp_path / 'mdqa.jsonl')},documents=3"],
        **{"contexts": 5, "selection_contexts": 2, "report_contexts": 2, "population": 3, "generations": 1},
        **{"uniform": "", "race": "off"},
    }
    found = estimate(small, tmp_path / "run", **changes)
    content = small.run(tmp_path / "run", **changes)
    assert sum(content["cost"]["tokens"].values()) <= found["total_at_most"]["tokens"]
    evaluations = cost_of_units(tmp_path / "run", "score")
    del evaluations[(1.0,) * LAYERS]  # a few of its answers were generated, to see whether the task is too hard
    assert set(evaluations.values()) == {found["evaluation"]["tokens"]}
    assert [one["contexts"]["search"] for one in found["tasks"]] == [5, 5]


def test_it_is_said_in_words_and_nothing_is_written(small: Small, tmp_path: Path) -> None:
    before = digests(small.model.parent)
    done = small.search(tmp_path / "run", "--dry-run")
    assert done.exit_code == 0, done.output
    for words in (
        "small on cpu in float32, optimizer genetic",
        "Key-value retrieval, 4 pairs: contexts 8 to search, 8 to selection, 16 to report; the longest prompt has",
        "One evaluation: ",
        "At most 18 trials",
        "Memory: about",
        "Nothing was written.",
    ):
        assert words in done.stdout, words
    assert list(tmp_path.iterdir()) == [] and digests(small.model.parent) == before


def test_memory_covers_the_weights(small: Small, tmp_path: Path) -> None:
    found = estimate(small, tmp_path / "run", optimizer="gradient")
    weights = (small.model / "model.safetensors").stat().st_size
    assert weights < found["memory_bytes"]
    assert estimate(small, tmp_path / "run", optimizer="genetic")["memory_bytes"] < found["memory_bytes"]


def test_memory_grows_with_the_predictions_of_short_text_that_are_kept(small: Small, tmp_path: Path) -> None:
    found = []
    for name, paragraphs in (("few", 12), ("many", 30)):
        text = tmp_path / f"{name}.txt"
        text.write_text("\n\n".join(f"Ten bytes{number:3}" for number in range(paragraphs)))
        found.append(estimate(small, tmp_path / "run", text=text)["memory_bytes"])
    # The tokenizer knows bytes only. Of 12 in a paragraph, 11 are predicted, each as 256 numbers of 4 bytes.
    assert found[1] - found[0] == (30 - 12) // 3 * 11 * 256 * 4


def test_what_a_search_would_refuse_is_refused_here_too(small: Small, tmp_path: Path) -> None:
    assert "finalists is 0" in one_line(small.search(tmp_path / "run", "--dry-run", finalists=0))
    assert "there is no task" in one_line(small.search(tmp_path / "run", "--dry-run", task="nonsense"))
