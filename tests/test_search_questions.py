"""`lpes-bake search`: what is asked in which part of a run, of several tasks and in several prompt formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpes_bake.plan import make_plan
from lpes_bake.search.study import StudySettings
from lpes_bake.search.tasks import PARTS
from lpes_bake.settings import SearchSettings
from tests.runs import IDENTITY, Small, content_of, invoke, one_line, records


def test_the_three_sets_share_no_question_and_are_as_large_as_asked_for(
    small: Small, file_tasks: dict[str, str]
) -> None:
    settings = SearchSettings(
        task=("kv,pairs=2,key_width=1", file_tasks["mdqa"]),
        selection_task=(file_tasks["qa"],),
        study=StudySettings(contexts=3, gradient_contexts=2, gradient_batch=(2,)),
        selection_contexts=4,
        report_contexts=5,
        device="cpu",
    )
    plan = make_plan(str(small.model), settings)
    counts = {part: [len(contexts) for contexts in plan.contexts[part]] for part in PARTS}
    # The gradient has contexts of its own; a task that only chooses is not searched, and reported like all.
    assert counts == {"search": [5, 5, 0], "selection": [0, 0, 4], "report": [5, 5, 5]}
    for task in range(3):
        prompts = {part: [one.prompt for one in all_of(plan.contexts[part][task])] for part in PARTS}
        together = [prompt for part in PARTS for prompt in {tuple(one) for one in prompts[part]}]
        assert len(together) == len(set(together)) > 0
    assert counts_without_gradient(small, settings) == [3, 3, 0]


def all_of(contexts: list[list[Any]]) -> list[Any]:
    return [example for context in contexts for example in context]


def counts_without_gradient(small: Small, settings: SearchSettings) -> list[int]:
    plan = make_plan(str(small.model), replace(settings, optimizer="genetic"))
    return [len(contexts) for contexts in plan.contexts["search"]]


COPIES = """
from lpes_bake.search.tasks import Example, Task

class Same(Task):
    name, positions = "same", (0, 1)
    def contexts(self, part, seed):
        for context in range(100):
            yield [Example(context, place, f"{context} {place}", "!") for place in self.positions]

class Settings(Task):
    name, positions = "settings", (0, 1)
    def contexts(self, part, seed):
        for context in range(100):
            yield [Example(context, place, f"{part} {context} {place}", "!") for place in self.positions]
    def describe(self):
        return {"task": self.name, "nested": {"sizes": (1, 2)}}
"""


def test_a_task_that_gives_one_question_to_two_parts_is_refused(small: Small, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(COPIES)
    message = one_line(small.search(tmp_path / "run", task=f"{tmp_path / 'own.py'}:Same"))
    assert "the same task gives one prompt to its search part and its selection part" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_pictures")
def test_a_task_may_describe_itself_with_tuples_and_be_resumed(small: Small, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(COPIES)
    few = {"population": 2, "generations": 1, "uniform": "", "report_contexts": 2}
    small.run(tmp_path / "run", task=f"{tmp_path / 'own.py'}:Settings", **few)
    done = invoke("search", small.model, "--out", tmp_path / "run", "--resume")
    assert done.exit_code == 0, done.output


def test_several_tasks_are_searched_together_and_others_can_choose(many: Path, file_tasks: dict[str, str]) -> None:
    content = content_of(many)
    specs = ["kv,pairs=2,key_width=1", file_tasks["mdqa"], file_tasks["qa"]]
    assert [one["spec"] for one in content["tasks"]] == specs
    assert [one["contexts"] for one in content["tasks"]] == [
        *[{"search": 2, "selection": 0, "report": 2}] * 2,
        {"search": 0, "selection": 2, "report": 2},
    ]
    assert [one["positions"] for one in content["tasks"]] == [[0, 1], [0, 1, 2], [0, 50, 100]]
    assert [one["position_unit"] for one in content["tasks"]] == ["place", "place", "%"]
    units = {(one["unit"]["part"], one["unit"]["task"]) for one in records(many)}
    assert units == {(part, -1) for part in PARTS} | {
        *(("search", 0), ("search", 1), ("selection", 2), ("report", 0), ("report", 1), ("report", 2))
    }
    # Searched log-probabilities count relative to the model's own: those of the identity weigh the same.
    values = [logprob_of_task(many, task) for task in (0, 1)]
    weights = content["objective"]["weights"]
    assert sum(weights) == pytest.approx(1) and weights[0] * values[0] == pytest.approx(weights[1] * values[1])
    assert content["identity_score"] == pytest.approx(float(np.dot(weights, values)))
    assert len(content["report"]["tasks"]) == 3


def logprob_of_task(out: Path, task: int) -> float:
    blocks = [
        record["result"]["logprob"]
        for record in records(out)
        if (record["unit"]["part"], record["unit"]["task"]) == ("search", task)
        and record["unit"]["factors"] == list(IDENTITY)
        and not (record["unit"]["accuracy"] and task == 1)
    ]
    return float(np.concatenate([np.array(block) for block in blocks]).mean())


def test_the_header_names_all_that_decides_the_result(many: Path, small: Small, file_tasks: dict[str, str]) -> None:
    stored = json.loads((many / "settings.json").read_text())
    first = json.loads((many / "journal.jsonl").read_text().splitlines()[0])["record"]
    assert first["settings"] == stored
    assert set(SearchSettings().flat()) <= set(stored)
    assert stored["prompt_format"] == "vicuna" and stored["dtype"] == "float32" and stored["device"] == "cpu"
    assert stored["questions"]["2"]["file"] == "mdqa.jsonl" and len(stored["questions"]["2"]["sha256"]) == 16
    assert stored["questions"]["1"] == {"task": "kv", "pairs": 2, "key_width": 1, "positions": [0, 1]}
    assert len(stored["weights"]) == len(stored["paragraphs"]) == len(stored["token_ids"]) == 16


def test_prompts_are_put_in_the_format_asked_for(small: Small) -> None:
    texts = {}
    for prompt_format in ("plain", "vicuna"):
        settings = SearchSettings(
            task=("kv,pairs=2,key_width=1",), optimizer="genetic", prompt_format=prompt_format, device="cpu"
        )
        plan = make_plan(str(small.model), replace(settings, study=StudySettings(contexts=1)))
        texts[prompt_format] = plan.tokenizer.decode(plan.contexts["search"][0][0][0].prompt)
    assert texts["plain"].startswith("Extract the value") and texts["plain"].endswith('Corresponding value: "')
    assert " USER: Extract the value" in texts["vicuna"] and texts["vicuna"].endswith('Corresponding value: "')


EASY = """
from dataclasses import dataclass
from lpes_bake.search.tasks import Example, Task

@dataclass(frozen=True)
class Easy(Task):
    name = "easy"
    generates = True
    max_new_tokens = 2
    positions = (0, 1)

    def contexts(self, part, seed):
        for context in range(100):
            yield [Example(context, place, f"{part} {context} {place}", "!") for place in self.positions]

    def correct(self, example, output):
        return True
"""


def test_factors_json_names_files_and_holds_no_paths(many: Path) -> None:
    text = (many / "factors.json").read_text()
    assert '"mdqa.jsonl"' in text and '"own.jsonl"' in text
    assert "/" not in text


@pytest.mark.usefixtures("no_pictures")
def test_tasks_that_are_too_hard_or_too_easy_are_told(small: Small, tmp_path: Path) -> None:
    (tmp_path / "easy.py").write_text(EASY)
    tasks = ["kv,pairs=2,key_width=8", f"{tmp_path / 'easy.py'}:Easy"]
    done = small.search(tmp_path / "run", task=tasks, population=2, generations=1, uniform="", report_contexts=2)
    assert done.exit_code == 0, done.output
    said = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert len(said) == 2
    assert "kv: the model answers none of 8 questions at 2 places right" in said[0] and "fewer pairs" in said[0]
    assert "easy: the model answers all of 8 questions at 2 places right" in said[1] and "too easy" in said[1]
