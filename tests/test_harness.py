"""lm-evaluation-harness: our tasks in it, and `eval --harness`. What needs lm-eval itself is skipped without it."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lpes_bake.commands.eval_tables import show
from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.harness import TASKS_DIR, Difference, HarnessEvaluation, base_folder, compare
from lpes_bake.lm_eval_tasks.lost_in_the_middle import judge_text, judge_value
from lpes_bake.source import open_source
from tests.runs import Small, invoke, one_line, write_small
from tests.test_source import edit_config

FACTORS = [0.5, 1.6]
# Of nelson-liu/lost-in-the-middle: EXPERIMENTS.md.
GOLD_PLACES = {
    "lpes_mdqa_10": [0, 4, 9],
    "lpes_mdqa_20": [0, 4, 9, 14, 19],
    "lpes_mdqa_30": [0, 4, 9, 14, 19, 24, 29],
    "lpes_kv_75": [0, 24, 49, 74],
    "lpes_kv_140": [0, 34, 69, 104, 139],
    "lpes_kv_300": [0, 49, 99, 149, 199, 249, 299],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """With the special tokens that lm-eval cannot do without: tokens 0 and 2, as in the model's config."""
    from transformers import AutoTokenizer

    small = write_small(tmp_path_factory.mktemp("small"))
    tokenizer = AutoTokenizer.from_pretrained(small.model)
    tokenizer.add_special_tokens({"pad_token": "!", "eos_token": "#"})
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 2, 256)
    tokenizer.save_pretrained(small.model)
    return small


@pytest.fixture(scope="module")
def baked(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bake(open_source(str(small.model)), Factors(tuple(FACTORS)), tmp_path_factory.mktemp("out") / "lpes").out


def write_documents(path: Path, rows: int, documents: int = 10) -> Path:
    """A file in the format of the lost-in-the-middle authors with so many documents in each row."""
    lines = []
    for row in range(rows):
        texts = [f"Lamp {row}{place} has {row * 7 + place} legs." for place in range(documents)]
        found = [{"title": f"T{place}", "text": text, "isgold": place == 3} for place, text in enumerate(texts)]
        lines.append({"question": f"legs of {row}?", "answers": [str(row * 7 + 3)], "ctxs": found})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_tasks_dir_prints_the_folder_of_the_tasks() -> None:
    done = invoke("tasks-dir")
    assert done.exit_code == 0 and Path(done.stdout.strip()) == TASKS_DIR
    assert {path.stem for path in TASKS_DIR.glob("*.yaml")} == set(GOLD_PLACES)


@pytest.mark.parametrize("name", GOLD_PLACES)
def test_gold_places_and_metrics_are_the_published_ones(name: str) -> None:
    import yaml  # type: ignore[import-untyped]

    task = yaml.safe_load((TASKS_DIR / f"{name}.yaml").read_text())
    assert task["task"] == name and task["dataset_kwargs"]["positions"] == GOLD_PLACES[name]
    assert (task["dataset_kwargs"].get("documents") or task["dataset_kwargs"]["pairs"]) == int(name.split("_")[-1])
    wanted = ["acc", *(f"acc_at_{place}" for place in GOLD_PLACES[name])]
    assert [one["metric"] for one in task["metric_list"]] == wanted
    assert (TASKS_DIR / task["include"]).is_file()


def test_answers_are_judged_at_their_place() -> None:
    doc = {"position": 4, "answers": ["the Nile", "Amazon"]}
    assert judge_text(doc, ["\n\nIt is the Amazon.\nOr not."]) == {"acc": 1.0, "acc_at_4": 1.0}
    assert judge_text(doc, ["It is the Rhine.\nOr the Nile."]) == {"acc": 0.0, "acc_at_4": 0.0}
    assert judge_value(doc, [(-3.5, True)]) == {"acc": 1.0, "acc_at_4": 1.0}
    assert judge_value(doc, [(-0.1, False)]) == {"acc": 0.0, "acc_at_4": 0.0}


def test_tasks_say_what_is_missing_where_lpes_bake_is_not() -> None:
    # Isolated, and without anything that was installed.
    command = [sys.executable, "-I", "-S", str(TASKS_DIR / "lost_in_the_middle.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "need lpes-bake in the environment that lm_eval runs in" in last


def test_the_base_model_of_a_baked_directory_is_at_hand(small: Small, baked: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = torch.arange(40)[None]
    with base_folder(open_source(str(baked), baked=True)) as folder, torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
        assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"]
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(small.model).eval()(tokens).logits
    assert torch.equal(logits, wanted)
    assert not folder.exists() and (baked / "model.safetensors").is_file()


def test_lm_eval_that_is_not_installed_is_asked_for(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'lpes-bake[harness]'" in one_line(invoke("eval", small.model, "--harness", "mmlu"))


def test_code_that_is_not_ours_is_not_run(baked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It is refused before lm-eval is imported, so that it need not be there.
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec("json" if name == "lm_eval" else name))

    def said(directory: Path) -> str:
        return one_line(invoke("eval", directory, "--harness", "lpes_kv_75", "--limit", 4, "--device", "cpu"))

    changed = Path(shutil.copytree(baked, tmp_path / "changed"))
    with (changed / "modeling_lpes_llama.py").open("a") as file:
        file.write("raise SystemExit(77)\n")
    refused = said(changed)
    assert "modeling_lpes_llama.py is not the file that this lpes-bake ships" in refused
    assert "--trust-remote-code" in refused
    # All files are ours, but transformers would fetch and run those of another repository.
    elsewhere = Path(shutil.copytree(baked, tmp_path / "elsewhere"))
    auto_map = json.loads((baked / "config.json").read_text())["auto_map"]
    edit_config(elsewhere, auto_map={**auto_map, "AutoConfig": "someone/else--code.Config"})
    refused = said(elsewhere)
    assert "auto_map points to another repository" in refused and "--trust-remote-code" in refused


def logged(scores: dict[str, list[float]], stderr: dict[str, float], groups: dict[str, tuple[float, list[str]]]) -> Any:
    """What simple_evaluate gives, as far as it is compared."""
    results: dict[str, dict[str, Any]] = {
        task: {"alias": task, "acc,none": float(np.mean(values)), "acc_stderr,none": stderr[task]}
        for task, values in scores.items()
    }
    results |= {name: {"acc,none": value, "acc_stderr,none": 0.1} for name, (value, _) in groups.items()}
    samples = {
        task: [{"doc_id": i, "filter": "none", "acc": value} for i, value in enumerate(values)]
        for task, values in scores.items()
    }
    return {"results": results, "group_subtasks": {n: list(m) for n, (_, m) in groups.items()}, "samples": samples}


def test_errors_of_differences_are_over_pairs_of_documents() -> None:
    stderr = {"one": 0.2, "two": 0.3}
    base = logged({"one": [1, 0, 0, 1], "two": [0, 1]}, stderr, {"all": (3 / 6, ["one", "two"])})
    ours = logged({"one": [1, 1, 1, 0], "two": [1, 1]}, stderr, {"all": (5 / 6, ["one", "two"])})
    rows = {row.task: row for row in compare([base, ours])}
    # Differences 0, 1, 1, −1: their variance is 11/12, and a quarter of that is the square of the mean's error.
    (one,) = rows["one"].differences
    assert one.paired and one.value == pytest.approx(0.25) and one.stderr == pytest.approx(math.sqrt(11 / 48))
    # Differences 1, 0.
    (two,) = rows["two"].differences
    assert two.value == pytest.approx(0.5) and two.stderr == pytest.approx(0.5)
    # The group counts documents: 4/6 of one and 2/6 of the other.
    (both,) = rows["all"].differences
    assert both.value == pytest.approx(2 / 6) and both.paired
    assert both.stderr == pytest.approx(math.sqrt((4 / 6) ** 2 * 11 / 48 + (2 / 6) ** 2 / 4))
    assert [row.documents for row in rows.values()] == [4, 2, 6]
    assert [one.stderr for one in rows["one"].values] == [0.2, 0.2]


def test_a_group_may_count_its_tasks_alike() -> None:
    stderr = {"one": 0.2, "two": 0.3}
    base = logged({"one": [1, 0, 0, 1], "two": [0, 1]}, stderr, {"all": (0.5, ["one", "two"])})
    ours = logged({"one": [1, 1, 1, 0], "two": [1, 1]}, stderr, {"all": (0.875, ["one", "two"])})
    (both,) = next(row for row in compare([base, ours]) if row.task == "all").differences
    assert both.paired and both.stderr == pytest.approx(math.sqrt((11 / 48 + 1 / 4) / 4))


def test_a_metric_that_is_no_mean_is_not_paired() -> None:
    base, ours = (logged({"one": [1.0, 0.0]}, {"one": error}, {}) for error in (0.3, 0.4))
    ours["results"]["one"]["acc,none"] = 7.5
    (row,) = compare([base, ours])
    assert row.differences == (Difference(7.0, 0.5, False),)


def test_the_table_says_which_differences_are_paired() -> None:
    from rich.console import Console

    base = logged({"one": [1, 0, 0, 1], "two": [0, 1]}, {"one": 0.25, "two": 0.3}, {})
    ours = logged({"one": [1, 1, 1, 0], "two": [1, 1]}, {"one": 0.25, "two": 0.4}, {})
    ours["results"]["two"]["acc,none"] = 7.5
    rows = tuple(compare([base, ours]))
    written = io.StringIO()
    console = Console(file=written, width=200)
    show(HarnessEvaluation(("base", "lpes"), (), "0.4.9", {}, None, False, rows), console)
    lines = [" ".join(line.split()) for line in written.getvalue().splitlines()]
    assert lines[:3] == [
        "task metric base lpes lpes − base",
        "one acc 0.5000 ± 0.2500 0.7500 ± 0.2500 +0.2500 ± 0.4787",
        "two acc 0.5000 ± 0.3000 7.5000 ± 0.4000 +7.0000 ± 0.5000 (not paired)",
    ]


def test_documents_are_judged_alike_in_lm_eval_and_in_eval(
    small: Small, baked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    from transformers import AutoTokenizer

    from lpes_bake.search.models import load_scaled
    from lpes_bake.search.prompts import encode, take
    from lpes_bake.search.tasks import parse_task

    file = write_documents(tmp_path / "documents.jsonl", rows=12)
    spec = f"mdqa:{file},documents=10,positions=0/4/9"
    # A random model answers nothing right. More answers change no prompt, so what it does say can be made right.
    tokenizer = AutoTokenizer.from_pretrained(small.model)
    model = load_scaled(small.model, dtype=torch.float32)
    example = take(parse_task(spec), "report", 1, 1, tokenizer, "plain", 8192).examples[0][1]
    prompt = torch.tensor([encode(example, tokenizer, "plain")[0]])
    output = model.generate(prompt, max_new_tokens=100, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
    said = re.sub(r"\W", "", str(tokenizer.decode(output, skip_special_tokens=True)).strip().splitlines()[0])[:2]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**row, "answers": [*row["answers"], said]}) + "\n" for row in rows))
    monkeypatch.setenv("LPES_MDQA_FILE", str(file))
    common = ("--device", "cpu", "--dtype", "float32", "--json", "--quiet")
    done = invoke("eval", baked, "--harness", "lpes_mdqa_10", "--limit", 6, *common)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    # The baked directory alone is compared with its base model.
    assert [one["layer_rope_scaling"] for one in found["models"]] == [None, FACTORS]
    arguments = ("--task", spec, "--contexts", 2, "--prompt-format", "plain", *common)
    ours = json.loads(invoke("eval", small.model, baked, *arguments).stdout)["tasks"][0]["models"]
    by_metric = {row["metric"]: row for row in found["rows"]}
    assert by_metric["acc"]["documents"] == 6 and by_metric["acc_at_4"]["documents"] == 2
    for model_number, one in enumerate(ours):
        values = [by_metric[f"acc_at_{place}"]["values"][model_number]["value"] for place in (0, 4, 9)]
        assert values == pytest.approx([place[0] for place in one["accuracy"]["by_position"]])
    assert by_metric["acc"]["values"][0]["value"] > 0
    (difference,) = by_metric["acc"]["differences"]
    assert difference["paired"]
    gain = by_metric["acc"]["values"][1]["value"] - by_metric["acc"]["values"][0]["value"]
    assert difference["value"] == pytest.approx(gain)


def test_values_have_the_same_probability_in_lm_eval_and_in_eval(small: Small) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(TASKS_DIR), include_defaults=False, metadata={"lpes_contexts": 1})
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(small.model), "dtype": "float32"},
        tasks=["lpes_kv_75"],
        device="cpu",
        task_manager=manager,
    )
    samples = found["samples"]["lpes_kv_75"]
    task = "kv,pairs=75,key_width=uuid,positions=0/24/49/74"
    arguments = ("--task", task, "--contexts", 1, "--prompt-format", "plain", "--device", "cpu", "--dtype", "float32")
    done = invoke("eval", small.model, *arguments, "--json", "--quiet")
    (ours,) = json.loads(done.stdout)["tasks"][0]["models"]
    # A UUID has 36 letters, and this tokenizer's tokens are letters.
    means = [sample["resps"][0][0][0] / 36 for sample in samples]
    assert means == pytest.approx([place[0] for place in ours["logprob"]["by_position"]], abs=1e-4)
    assert [sample["doc"]["position"] for sample in samples] == [0, 24, 49, 74]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--harness", "lpes_no_such_task"], "lm-eval has no task 'lpes_no_such_task'"),
        (["--harness", "lpes_mdqa_10"], "LPES_MDQA_FILE is not set"),
        (["--harness", "lpes_kv_75", "--prompt-format", "vicuna"], "plain and chat, not vicuna"),
        (["--harness", ","], "--harness names no task"),
        (["--harness", "lpes_kv_75", "--prompt-format", "chat"], "small has no chat template"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    arguments: list[str], said: str, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.delenv("LPES_MDQA_FILE", raising=False)
    assert said in one_line(invoke("eval", small.model, *arguments))


def test_a_tokenizer_without_what_lm_eval_needs_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("lm_eval.simple_evaluate", lambda **_: pytest.fail("lm-eval was called"))
    message = one_line(invoke("eval", write_small(tmp_path).model, "--harness", "lpes_kv_75"))
    assert "the tokenizer of small has neither a BOS nor an EOS token" in message


BROKEN = """
task: lpes_broken
custom_dataset: !function broken.rows
test_split: test
output_type: loglikelihood
doc_to_text: "{{prompt}}"
doc_to_target: "{{answer}}"
process_results: !function broken.judge
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_package", "lpes_broken: No module named 'no_such_package'; install what these tasks"),
        ("def judge(doc, results): raise ArithmeticError('odd')", "lm-eval failed on small: ArithmeticError: odd"),
    ],
)
def test_what_a_task_raises_is_said_in_one_line(
    code: str, said: str, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    (tmp_path / "lpes_broken.yaml").write_text(BROKEN)
    rows = "def rows(**_): return {'test': Dataset.from_list([{'prompt': 'a', 'answer': 'b'}])}"
    (tmp_path / "broken.py").write_text(f"from datasets import Dataset\n{rows}\n{code}\n")
    monkeypatch.setattr("lpes_bake.harness.TASKS_DIR", tmp_path)
    message = one_line(invoke("eval", small.model, "--harness", "lpes_broken", "--device", "cpu", "--quiet"))
    assert said in message
