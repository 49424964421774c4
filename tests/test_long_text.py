"""ZeroSCROLLS and L-Eval through `eval --benchmark`: prompts, cuts and scores on files in the authors' schema."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.long_text import evaluation, leval, metrics, zeroscrolls
from lpes_bake.long_text.evaluation import bootstrap
from lpes_bake.long_text.questions import Question, fitted, read_benchmark
from lpes_bake.search.errors import InputError
from lpes_bake.search.models import load_scaled
from lpes_bake.source import open_source
from tests.conftest import write_tiny
from tests.hub_server import serve
from tests.runs import SMALL, Small, invoke, one_line, write_small
from tests.test_push import client

FACTORS = [0.5, 1.6]
MARK = "... [The rest of the article is omitted]\n\n"
ASKED = evaluation._answer
INSTRUCTION = "You are given an article and a question. Answer the question.\n\nArticle:\n"


@pytest.fixture(scope="module")
def tokenizer(small: Small) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small.model)


def scrolls_row(number: int, document: str, query: str, output: str | None, pid: str = "") -> dict[str, Any]:
    """A row with the fields of the authors' files."""
    text = f"{INSTRUCTION}{document}\n\nQuestion:\n{query}\n\nAnswer:\n"
    begin, query_start = len(INSTRUCTION), len(INSTRUCTION) + len(document) + 2
    return {
        "id": f"q{number}",
        "pid": f"q{number}_{pid}" if pid else f"q{number}",
        "input": text,
        "output": output,
        "document_start_index": begin,
        "document_end_index": begin + len(document),
        "query_start_index": query_start,
        "query_end_index": query_start + len(f"Question:\n{query}"),
        "truncation_seperator": MARK,
    }


def leval_row(instructions: list[str], outputs: list[str], evaluation: str, document: str = "Rain.") -> dict[str, Any]:
    return {
        "instructions": instructions,
        "outputs": outputs,
        "input": document,
        "source": "hand",
        "evaluation": evaluation,
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_prompt_that_fits_is_the_authors(tmp_path: Path) -> None:
    rows = [scrolls_row(1, "Tom did it.", "Who?", "Tom"), scrolls_row(2, "It rained.", "When?", "today")]
    rows.append(scrolls_row(1, "Tom did it.", "Who?", "Tom Smith", pid="2"))
    found = read_benchmark(f"zeroscrolls/qasper:{write_rows(tmp_path / 'validation.jsonl', rows)}")
    assert [one.prompt() for one in found.questions] == [rows[0]["input"], rows[1]["input"]]
    # Rows with one id are one question with several references.
    assert [one.references for one in found.questions] == [("Tom", "Tom Smith"), ("today",)]
    assert (found.metric_name, found.max_new_tokens) == ("F1", 128)
    limited = read_benchmark(f"zeroscrolls/qasper:{tmp_path / 'validation.jsonl'}", 1)
    assert limited.questions == found.questions[:1]


def test_the_document_is_cut_and_never_the_query(tmp_path: Path, tokenizer: Any) -> None:
    document = "".join(f"{number} " for number in range(200))
    row = scrolls_row(1, document, "Which number is the last?", "199")
    (question,) = read_benchmark(f"zeroscrolls/qasper:{write_rows(tmp_path / 'v.jsonl', [row])}").questions
    query = "Question:\nWhich number is the last?\n\nAnswer:\n"
    # This tokenizer's tokens are letters, so the authors' cut of tokens can be written down.
    kept = 300 - len(MARK + query)
    tokens, cut = fitted(question, tokenizer, "plain", 300)
    assert cut and tokenizer.decode(tokens) == row["input"][:kept] + MARK + query
    whole, cut = fitted(question, tokenizer, "plain", len(row["input"]))
    assert not cut and tokenizer.decode(whole) == row["input"]
    with pytest.raises(InputError, match=r"without its document has \d+ tokens, but there is room for 100"):
        fitted(question, tokenizer, "plain", 100)


def test_other_formats_and_long_documents_fill_the_room_too(tokenizer: Any) -> None:
    question = Question("<", "x" * 100_000, ">", ("",), "unit", mark="|")
    tokens, _ = fitted(question, tokenizer, "vicuna", 400)
    text = str(tokenizer.decode(tokens))
    assert len(tokens) == 400 and text.endswith("x|> ASSISTANT:")
    from_the_left = Question("<", "x" * 1000 + "end", ">", ("",), "unit", cut_at_beginning=True)
    assert tokenizer.decode(fitted(from_the_left, tokenizer, "plain", 10)[0]) == "<xxxxxend>"


def test_every_task_has_the_metric_of_its_paper() -> None:
    assert {name: kind.metric_name for name, kind in zeroscrolls.TASKS.items()} == {
        **dict.fromkeys(("gov_report", "summ_screen_fd", "qmsum", "squality"), "ROUGE"),
        **dict.fromkeys(("qasper", "narrative_qa", "musique"), "F1"),
        "quality": "accuracy",
        "space_digest": "exponential similarity",
        "book_sum_sort": "concordance index",
    }
    # 7 closed and 13 open ones.
    assert len(leval.TASKS) == len(set(leval.TASKS)) == 20


def test_leval_asks_as_the_authors_do(tmp_path: Path) -> None:
    def prompts(task: str, row: dict[str, Any]) -> list[str]:
        file = write_rows(tmp_path / f"{task}.jsonl", [row])
        return [one.prompt() for one in read_benchmark(f"leval/{task}:{file}").questions]

    (closed,) = prompts("tpo", leval_row(["Why?\nA. wet\nB. dry"], ["A"], "exam"))
    assert closed.startswith("Now you are given a very long document.") and closed.endswith(
        "when answering. For other questions, please directly give the concise and accurate answer. "
        "Document is as follows. Rain. \nQuestion: Why?\nA. wet\nB. dry.  Please directly give answer without any "
        "additonal output or explanation \nAnswer:"
    )
    (open_one,) = prompts("scientific_qa", leval_row(["Why?"], ["it was wet"], "f1"))
    assert open_one.endswith("Document is as follows. Rain. Instruction: Why? \nAnswer this question with 3 words.")
    (bare,) = prompts("codeU", leval_row(["f(1)?"], ["2"], "exam", document="def f(x): return x + 1"))
    assert bare.endswith("answer the question.def f(x): return x + 1\n\nf(1)?")
    told, real = prompts(
        "sci_fi",
        leval_row(
            ["Fish fly, True or False? Answer this question based on the world described in the document."],
            ["True [fact: False]"],
            "exam",
        ),
    )
    assert "Document is as follows. Rain." in told
    assert real == (
        "Fish fly, True or False? Answer this question based on the real-world knowledge and facts up until your last "
        "training\nAnswer:"
    )


def test_a_line_of_leval_is_one_document(tmp_path: Path) -> None:
    # The questions of GSM have their examples in the instruction, and no document.
    rows = [leval_row(["1 + 1?", "2 + 1?"], ["2", "3"], "exam", document=""), leval_row(["4?"], ["4"], "exam", "")]
    file = write_rows(tmp_path / "gsm.jsonl", rows)
    first, second, third = (one.unit for one in read_benchmark(f"leval/gsm100:{file}").questions)
    assert first == second != third


def test_questions_that_only_people_can_judge_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        leval_row(["Sum it up.", "Again."], ["Rain.", "Wet."], "human"),
        leval_row(["Sum it up."], ["It rained."], "rouge"),
        leval_row(["Sum it up."], ["It rained."], "LLM"),
    ]
    found = read_benchmark(f"leval/news_summ:{write_rows(tmp_path / 'news.jsonl', rows)}")
    assert (len(found.questions), found.left_out, found.metric_name) == (1, 3, "ROUGE")


def test_answers_and_scores_are_those_of_the_library(small: Small, tokenizer: Any, tmp_path: Path) -> None:
    model = load_scaled(small.model, dtype=torch.float32)
    rows = [scrolls_row(number, f"Lamp {number}. " * 4, "Which lamp?", "?") for number in range(4)]
    texts = []
    for row in rows:
        prompt = torch.tensor([tokenizer(row["input"])["input_ids"]])
        output = model.generate(prompt, max_new_tokens=32, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
        texts.append(str(tokenizer.decode(output, skip_special_tokens=True)).strip())
    # A random model answers nothing right; what it does say is made right, in one question of four.
    rows[2]["output"] = texts[2]
    file = write_rows(tmp_path / "validation.jsonl", rows)
    baked = bake(open_source(str(small.model)), Factors(tuple(FACTORS)), tmp_path / "small-lpes").out
    arguments = ["--benchmark", f"zeroscrolls/musique:{file}", "--device", "cpu", "--dtype", "float32"]
    done = invoke("eval", small.model, baked, *arguments, "--quiet", "--json", "--out", tmp_path / "result.json")
    assert done.exit_code == 0, done.output
    parsed = json.loads(done.stdout)
    assert parsed == json.loads((tmp_path / "result.json").read_text())
    (task,) = parsed["benchmarks"]
    assert (task["name"], task["metric"], task["questions"], task["cut"]) == ("zeroscrolls/musique", "F1", 4, 0)
    base, other = task["models"]
    assert [one["text"] for one in base["answers"]] == texts
    assert [one["text"] for one in other["answers"]] != texts
    parts = np.array([one["parts"][0] for one in base["answers"]])
    assert parts[2] == 100 and base["score"][0] == pytest.approx(parts.mean())
    difference = other["difference"]
    assert difference["against"] == "small"
    assert difference["score"][0] == pytest.approx(other["score"][0] - base["score"][0])
    assert difference["score"][1] <= difference["score"][0] <= difference["score"][2]


def test_decoding_is_greedy_whatever_the_model_s_files_ask_for(small: Small, tmp_path: Path) -> None:
    rows = [scrolls_row(number, f"Lamp {number}. " * 4, "Which lamp?", "?") for number in range(2)]
    file = write_rows(tmp_path / "validation.jsonl", rows)
    model = write_small(tmp_path).model
    # As Qwen2.5's chat models have it, but stronger: what stands in the prompt may hardly be said.
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "repetition_penalty": 9.0, "no_repeat_ngram_size": 2}))
    arguments = ["--benchmark", f"zeroscrolls/quality:{file}", "--device", "cpu", "--quiet", "--json"]
    said = []
    for one in (small.model, model):
        (answered,) = json.loads(invoke("eval", one, *arguments).stdout)["benchmarks"][0]["models"]
        said.append([answer["text"] for answer in answered["answers"]])
    assert said[0] == said[1] and any(said[0])


def test_the_longest_prompt_is_asked_first(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def answer(model: Any, name: str, tokenizer: Any, tokens: Any, max_new_tokens: int) -> str:
        lengths.append(len(tokens) + max_new_tokens)
        return ASKED(model, name, tokenizer, tokens, max_new_tokens)

    monkeypatch.setattr(evaluation, "_answer", answer)
    specs = []
    for task, sizes in (("quality", (1, 40, 9)), ("musique", (30, 2))):
        rows = [scrolls_row(number, "Rain. " * size, "What?", "C") for number, size in enumerate(sizes)]
        specs += ["--benchmark", f"zeroscrolls/{task}:{write_rows(tmp_path / f'{task}.jsonl', rows)}"]
    done = invoke("eval", small.model, *specs, "--device", "cpu", "--quiet", "--json")
    assert len(lengths) == 5 and lengths == sorted(lengths, reverse=True)
    # And each answer stands at its question.
    for spec, found in zip(specs[1::2], json.loads(done.stdout)["benchmarks"], strict=True):
        alone = json.loads(
            invoke("eval", small.model, "--benchmark", spec, "--device", "cpu", "--quiet", "--json").stdout
        )
        assert alone["benchmarks"] == [found]


def test_what_a_metric_needs_is_missed_before_anything_is_asked(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_rows(tmp_path / "news.jsonl", [leval_row(["Sum it up."], ["It rained."], "rouge")])
    metrics._rouge_scorer.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    # Not even the model is looked for.
    message = one_line(invoke("eval", tmp_path / "nowhere", "--benchmark", f"leval/news_summ:{file}"))
    assert "rouge-score, which is not installed: pip install 'lpes-bake[benchmarks]'" in message


def test_the_table_says_what_was_cut(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "short", "llama", **{**SMALL, "max_position_embeddings": 400})
    rows = [scrolls_row(number, "Rain. " * length, "What?", "C") for number, length in enumerate((1, 90, 100))]
    file = write_rows(tmp_path / "validation.jsonl", rows)
    done = invoke("eval", model, "--benchmark", f"zeroscrolls/quality:{file}", "--device", "cpu", "--limit", 2)
    assert done.exit_code == 0, done.output
    assert "zeroscrolls/quality: 2 questions; 1 of the prompts cut to fit into 400 tokens" in done.stdout
    assert "accuracy" in done.stdout and "short" in done.stdout


def test_files_come_from_the_hub_where_none_is_given(tmp_path: Path) -> None:
    content = "".join(json.dumps(scrolls_row(number, "Rain.", "What?", "Rain")) + "\n" for number in range(3))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("qasper/test.jsonl", "")
        archive.writestr("qasper/validation.jsonl", content)
    exam = json.dumps(leval_row(["Why?"], ["A"], "exam")).encode()
    code = (
        "from lpes_bake.long_text.questions import read_benchmark\n"
        "for spec in ('zeroscrolls/qasper', 'leval/tpo', 'leval/quality'):\n"
        "    print(spec, len(read_benchmark(spec).questions))\n"
    )
    with serve() as hub:
        hub.create("tau/zero_scrolls").add("main", "data", {"qasper.zip": packed.getvalue()}, set())
        hub.create("L4NLP/LEval").add("main", "data", {"LEval/Exam/tpo.jsonl": exam}, set())
        done = client(hub, tmp_path, "-c", code)
    assert done.stdout.splitlines() == ["zeroscrolls/qasper 3", "leval/tpo 1"]
    last = done.stderr.strip().splitlines()[-1]
    assert "LEval/Exam/quality.jsonl of the data set L4NLP/LEval could not be fetched from the Hub" in last


def test_intervals_are_over_documents() -> None:
    # Two documents with ten questions each, which the model gets right or wrong as a whole: with questions as the
    # unit the interval would be 30 to 70.
    documents = ["a"] * 10 + ["b"] * 10
    parts = np.array([[100.0]] * 10 + [[0.0]] * 10)
    assert bootstrap(documents, parts) == (50, 0, 100)
    assert bootstrap(documents, parts, parts) == (0, 0, 0)
    one, low, high = bootstrap(["a", "a"], np.array([[10.0], [30.0]]))
    assert one == 20 and np.isnan(low) and np.isnan(high)
    # ROUGE: the score of the means, not the mean of the scores.
    assert bootstrap(["a", "b"], np.array([[10.0, 40.0], [90.0, 60.0]]))[0] == pytest.approx((50 * 50) ** 0.5)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nonsense/qasper:{file}", "there is no benchmark 'nonsense'; there are: zeroscrolls, leval"),
        ("zeroscrolls/tpo:{file}", "zeroscrolls has no task 'tpo'; it has: gov_report"),
        ("zeroscrolls/qasper:nowhere.jsonl", "nowhere.jsonl does not exist"),
        ("zeroscrolls/qasper:{file}", 'line 2: "output" is missing: the test split has none'),
        ("zeroscrolls/qasper:{broken}", '"query_start_index" is 9999; it must count letters of "input"'),
        ("leval/tpo:{file}", '"instructions" is missing'),
        ("leval/news_summ:{mixed}", '"evaluation" is "f1"'),
        ("leval/tpo:{mixed}", '1 "instructions", but 2 "outputs"'),
    ],
)
def test_bad_input_is_refused_in_one_line(spec: str, said: str, small: Small, tmp_path: Path) -> None:
    good = scrolls_row(1, "Rain.", "What?", "Rain")
    files = {
        "file": [good, scrolls_row(2, "Rain.", "What?", None)],
        "broken": [{**good, "query_start_index": 9999}],
        "mixed": [leval_row(["a"], ["b"], "f1"), leval_row(["a"], ["b", "c"], "rouge")],
    }
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in files.items()}
    assert said in one_line(invoke("eval", small.model, "--benchmark", spec.format(**paths)))


def test_options_that_say_nothing_are_refused(small: Small) -> None:
    for arguments, said in (
        (("--benchmark", "leval/tpo:x", "--task", "kv"), "--task has no meaning with --benchmark"),
        (("--harness", "mmlu", "--contexts", 3), "--contexts has no meaning with --harness"),
        (("--limit", 3), "--limit has no meaning for --task"),
    ):
        assert said in one_line(invoke("eval", small.model, *arguments))


def test_a_model_that_gives_nan_has_no_score(tmp_path: Path) -> None:
    # An empty answer to a question with choices is right for L-Eval where the right one is A.
    file = write_rows(tmp_path / "tpo.jsonl", [leval_row(["Why?\nA. wet\nB. dry"], ["A"], "exam")])
    model = write_small(tmp_path).model
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    message = one_line(invoke("eval", model, "--benchmark", f"leval/tpo:{file}", "--device", "cpu", "--quiet"))
    assert "small gives NaN; look for NaN in its weights, or give another --dtype" in message
