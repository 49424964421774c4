"""What must hold for `lpes-bake eval`: the same questions to each model, honest comparisons, early refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.search.kv_retrieval import KVRetrieval
from lpes_bake.search.metrics import best_subspan_em
from lpes_bake.search.models import load_scaled
from lpes_bake.search.prompts import encode, take
from lpes_bake.search.tasks import parse_task
from lpes_bake.source import open_source
from tests.conftest import write_tiny
from tests.runs import LAYERS, Small, invoke, one_line, write_mdqa, write_own
from tests.test_plots import png_size

FACTORS = [0.5, 1.4, 0.8, 1.9]
KV = "kv,pairs=6,key_width=4"
COMMON = ("--contexts", 3, "--device", "cpu", "--dtype", "float32")


def run(*arguments: object) -> Result:
    return invoke("eval", *COMMON, *arguments)


def result_of(*arguments: object) -> dict[str, Any]:
    done = run(*arguments, "--json", "--quiet")
    assert done.exit_code == 0 and done.stderr == "", done.output
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.fixture(scope="module")
def factors_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("factors") / "factors.json"
    path.write_text(json.dumps(FACTORS))
    return path


@pytest.fixture(scope="module")
def baked(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("baked") / "tiny-v1.5-lpes"
    return bake(open_source(str(tiny_llama)), Factors(tuple(FACTORS)), out).out


def test_base_factors_and_baked_side_by_side(tiny_llama: Path, baked: Path, factors_file: Path) -> None:
    parsed = result_of(tiny_llama, baked, "--task", KV, "--factors", factors_file)
    assert [one["label"] for one in parsed["models"]] == ["llama", f"llama + {factors_file}", "tiny-v1.5-lpes"]
    assert [one["layer_rope_scaling"] for one in parsed["models"]] == [None, FACTORS, FACTORS]
    (task,) = parsed["tasks"]
    assert task["positions"] == [0, 3, 5] and task["contexts"] == 3 and task["too_long"] == 0
    base, with_factors, bake = task["models"]
    assert "difference" not in base
    # Baking changes nothing but where the factors come from.
    assert bake["logprob"] == with_factors["logprob"]
    ours, theirs = bake["logprob"], base["logprob"]
    assert ours["mean"][0] != pytest.approx(theirs["mean"][0], abs=1e-3)
    difference = bake["difference"]
    assert difference["against"] == "llama"
    mean, low, high = difference["logprob"]["mean"]
    assert mean == pytest.approx(ours["mean"][0] - theirs["mean"][0])
    assert low <= mean <= high
    for gain, our, their in zip(
        difference["logprob"]["by_position"], ours["by_position"], theirs["by_position"], strict=True
    ):
        assert gain[0] == pytest.approx(our[0] - their[0])
        assert our[1] <= our[0] <= our[2]
    means = [one[0] for one in theirs["by_position"]]
    assert theirs["minimum"] == min(means)
    assert theirs["spread"] == pytest.approx(max(means) - min(means))


def test_numbers_are_those_of_plain_forward_passes(tiny_llama: Path, baked: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = load_scaled(tiny_llama, dtype=torch.float32, factors=FACTORS)
    task = KVRetrieval(pairs=6, key_width=4, positions=(1, 5))
    expected = []
    for context in take(task, "report", 7, 3, tokenizer, "vicuna", 8192).examples:
        for example in context:
            prompt, answer = encode(example, tokenizer, "vicuna")
            with torch.no_grad():
                logprobs = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected.append(float(logprobs[range(len(answer)), answer].mean()))
    parsed = result_of(baked, "--task", f"{KV},positions=1/5", "--seed", 7, "--prompt-format", "vicuna")
    found = [one[0] for one in parsed["tasks"][0]["models"][0]["logprob"]["by_position"]]
    assert found == pytest.approx(np.array(expected).reshape(3, 2).mean(0).tolist(), abs=1e-4)


def test_accuracy_on_documents_is_of_freely_generated_text(small: Small, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small.model)
    model = load_scaled(small.model, dtype=torch.float32, factors=FACTORS[:LAYERS])
    file = write_mdqa(tmp_path / "mdqa.jsonl")

    def outputs(spec: str) -> dict[str, list[str]]:
        """The library's own greedy answers to the questions, by question, a place each."""
        found: dict[str, list[str]] = {}
        for context in take(parse_task(spec), "report", 1, 3, tokenizer, "auto", 8192).examples:
            for example in context:
                prompt = torch.tensor([encode(example, tokenizer)[0]])
                output = model.generate(prompt, max_new_tokens=100, do_sample=False, pad_token_id=0)[0]
                text = str(tokenizer.decode(output[prompt.shape[1] :], skip_special_tokens=True))
                found.setdefault(example.prompt.rpartition("Question: ")[2].partition("\n")[0], []).append(text)
        return found

    spec = f"mdqa:{file},documents=3"
    generated = outputs(spec)
    # A random model answers nothing right. An answer more changes no prompt, so what it does say can be made right.
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    first = next(iter(generated))
    wanted = re.sub(r"\W", "", generated[first][0].strip().splitlines()[0])[:2]
    for row in rows:
        row["answers"].append(wanted)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = {row["question"]: row["answers"] for row in rows}
    right = np.array(
        [
            [best_subspan_em(text.lstrip().partition("\n")[0], answers[question]) for text in texts]
            for question, texts in generated.items()
        ],
        dtype=float,
    )
    assert right.mean() > 0
    factors = tmp_path / "factors.json"
    factors.write_text(json.dumps(FACTORS[:LAYERS]))
    parsed = result_of(small.model, "--task", spec, "--factors", factors)
    found = parsed["tasks"][0]["models"][1]["accuracy"]["by_position"]
    assert [one[0] for one in found] == pytest.approx(right.mean(0).tolist())


def test_several_tasks_have_tables_and_pictures_of_their_own(small: Small, tmp_path: Path) -> None:
    baked = bake(open_source(str(small.model)), Factors(tuple(FACTORS[:LAYERS])), tmp_path / "tiny-v1.5-lpes").out
    tasks = [KV, f"qa:{write_own(tmp_path / 'own.jsonl')},positions=0/100"]
    plot, out = tmp_path / "positions.png", tmp_path / "result.json"
    done = run(small.model, baked, *(word for one in tasks for word in ("--task", one)), "--plot", plot, "--out", out)
    assert done.exit_code == 0, done.output
    for words in (
        *("Accuracy, %", "Log-probability of the answer", "minimum", "spread", "tiny-v1.5-lpes − small"),
        "Key-value retrieval, 6 pairs: 3 contexts, each asked at 3 positions",
        "Questions of own.jsonl: 3 contexts, each asked at 2 positions",
        "100%",
    ):
        assert words in done.stdout, words
    pictures = [tmp_path / "positions-1-kv.png", tmp_path / "positions-2-qa.png"]
    assert sorted(tmp_path.iterdir()) == sorted([*pictures, out, tmp_path / "own.jsonl", baked])
    for path in (*pictures, out):
        assert f"written: {path}" in done.stdout
    assert all(min(png_size(path)) > 100 for path in pictures)
    parsed = json.loads(out.read_text())
    assert [one["name"] for one in parsed["tasks"]] == ["kv", "qa"]
    assert [one["position_unit"] for one in parsed["tasks"]] == ["place", "%"]
    assert [len(one["models"]) for one in parsed["tasks"]] == [2, 2]
    # What was asked can be told from the file.
    assert parsed["tasks"][1]["settings"]["file"] == "own.jsonl" and parsed["seed"] == 1


def test_one_task_has_the_picture_that_was_asked_for(tiny_llama: Path, tmp_path: Path) -> None:
    plot = tmp_path / "positions.png"
    assert run(tiny_llama, "--task", KV, "--plot", plot).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["positions.png"]


@pytest.mark.parametrize("option", ["--plot", "--out"])
def test_a_file_that_cannot_be_written_does_not_cost_the_numbers(option: str, tiny_llama: Path, tmp_path: Path) -> None:
    # As long as a name may be: what is written beside it first has a longer one.
    file = tmp_path / f"{'p' * 251}.png"
    done = run(tiny_llama, "--task", KV, option, file, "--json")
    assert json.loads(done.stdout)["tasks"][0]["name"] == "kv"
    assert "File name too long" in one_line(done)
    assert list(tmp_path.iterdir()) == []


def test_a_model_beside_itself_differs_by_nothing(tiny_llama: Path) -> None:
    parsed = result_of(tiny_llama, f"{tiny_llama}/", "--task", KV)
    first, second = parsed["tasks"][0]["models"]
    assert first["label"] != second["label"]
    assert first["logprob"] == second["logprob"]
    assert second["difference"]["logprob"]["mean"] == [0, 0, 0]


def test_models_of_two_families_are_asked_the_same(tiny_llama: Path, tiny_qwen2: Path) -> None:
    parsed = result_of(tiny_llama, tiny_qwen2, "--task", KV)
    assert [one["name"] for one in parsed["models"]] == ["llama", "qwen2"]
    first, second = parsed["tasks"][0]["models"]
    assert first["tokens"] == second["tokens"]


def test_contexts_that_the_shortest_model_cannot_read_are_left_out_for_all(small: Small, tmp_path: Path) -> None:
    rows = [
        {"question": f"Who {i}?", "documents": ["Tom did." + " No." * (100 * (i % 2)), "No.", "No."], "answer": "Tom"}
        for i in range(40)
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({**row, "gold": 0}) + "\n" for row in rows))
    short = Path(shutil.copytree(small.model, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 350}))
    done = run(small.model, short, "--task", f"qa:{file}", "--out", tmp_path / "result.json")
    assert done.exit_code == 0, done.output
    (task,) = json.loads((tmp_path / "result.json").read_text())["tasks"]
    assert task["too_long"] > 0 and f"{task['too_long']} more are too long" in done.stdout
    whole, cut = task["models"]
    assert whole["tokens"] == cut["tokens"] and whole["logprob"] == cut["logprob"]


def test_models_that_cannot_be_asked_the_same_are_refused(small: Small, tmp_path: Path) -> None:
    # This tokenizer makes one token of the words that some contexts are long for.
    other = Path(shutil.copytree(small.model, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [
        {"id": 5, "content": "No. No. No. No.", **dict.fromkeys(("single_word", "lstrip", "rstrip"), False)}
        | {"normalized": False, "special": False}
    ]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = [
        {"question": f"Who {i}?", "documents": ["Tom did." + " No." * (2000 * (i % 2)), "No.", "No."], "answer": "Tom"}
        for i in range(40)
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({**row, "gold": 0}) + "\n" for row in rows))
    done = run(small.model, other, "--task", f"qa:{file}")
    assert "with the tokenizer of other other contexts fit into 8192 tokens than with that of small" in one_line(done)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing/model"], "missing/model"),
        (["{base}", "--task", "nonsense"], "there is no task 'nonsense'"),
        (["{base}", "--task", "kv,pairs=0"], "pairs must be at least 1"),
        (["{base}", "--task", "kv,size=3"], "there is no setting 'size'; there are: pairs=16"),
        (["{base}", "--task", "kv,pairs=6,positions=6"], "gold position 6"),
        (["{base}", "--task", "mdqa:nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["{base}", "--task", "qa:{own}"], "asked for 3 (--contexts): ask for fewer, or bring more data"),
        (["{base}", "--prompt-format", "chat"], "no chat template"),
        (["{base}", "--prompt-format", "nonsense"], "'nonsense' is not one of 'auto'"),
        (["{base}", "--device", "cuda:77"], "device 'cuda:77'"),
        (["{base}", "--revision", "main"], "--revision"),
        (["{base}", "--factors", "{short}"], "3 factors"),
        (["{baked}", "--factors", "{factors}"], "baked already"),
        (["{base}", "--plot", "{base}"], "cannot be written"),
        (["{base}", "--out", "{base}/no/such/file.json"], "cannot be written"),
        (["{base}", "--batch-size", "0"], "0 is not in the range x>=1"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_a_weight_is_read(
    arguments: list[str],
    said: str,
    tiny_llama: Path,
    baked: Path,
    factors_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lpes_bake.evaluate.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "short.json").write_text("[1, 1, 1]")
    names = {
        "base": tiny_llama,
        "baked": baked,
        "factors": factors_file,
        "short": tmp_path / "short.json",
        "own": write_own(tmp_path / "own.jsonl", rows=2),
    }
    assert said in one_line(run(*(one.format(**names) for one in arguments)))


FRAIL = """
from dataclasses import dataclass
from lpes_bake.search.tasks import Example, Task

@dataclass(frozen=True)
class Frail(Task):
    name = "frail"
    generates = True
    positions = (0,)

    def contexts(self, part, seed):
        for number in range(9):
            yield [Example(number, 0, f"{part} {number}?", " yes")]

    def METHOD(self, *arguments):
        return {}["nothing"]
"""


@pytest.mark.parametrize("method", ["correct", "finished"])
def test_a_users_task_that_cannot_judge_an_answer_is_named_in_one_line(
    method: str, tiny_llama: Path, tmp_path: Path
) -> None:
    code = FRAIL.replace("METHOD", method)
    if method == "finished":
        code += "\n    def correct(self, example, output):\n        return False\n"
    (tmp_path / "frail.py").write_text(code)
    said = one_line(run(tiny_llama, "--task", f"{tmp_path / 'frail.py'}:Frail"))
    assert "Frail in" in said and "fails with KeyError: 'nothing' (line 16); mend the file" in said


def test_a_model_without_tokenizer_or_language_head_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    silent = Path(shutil.copytree(tiny_llama, tmp_path / "silent"))
    for path in silent.glob("*token*"):
        path.unlink()
    assert "tokenizer" in one_line(run(silent))
    config = json.loads((tiny_llama / "config.json").read_text())
    bare = write_tiny(tmp_path / "bare", "llama")
    (bare / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    assert "causal LM" in one_line(run(bare))


def test_weights_that_are_missing_are_not_made_up(tiny_llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    short = Path(shutil.copytree(tiny_llama, tmp_path / "short"))
    baked = bake(open_source(str(short)), Factors(tuple(FACTORS)), tmp_path / "out").out
    tensors = load_file(short / "model.safetensors")
    del tensors["lm_head.weight"]
    for directory in (short, baked):
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        assert "lm_head.weight" in one_line(run(directory, "--task", KV))
