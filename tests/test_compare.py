"""What must hold for `lpes-bake compare`: the same unseen questions to each method, by one path, whatever happens."""

from __future__ import annotations

import csv
import json
import re
import signal
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lpes_bake.answers import Interview
from lpes_bake.baselines.decoder import Decoder, ModelDecoder, State
from lpes_bake.baselines.hidden_channel import HiddenChannel, find_channel
from lpes_bake.baselines.methods import Method
from lpes_bake.baselines.moice import new_routers, save_routers
from lpes_bake.compare import CompareSettings, make_interview, make_plan, named_methods
from lpes_bake.compare_files import latex_text
from lpes_bake.comparison import side_by_side
from lpes_bake.export import bake
from lpes_bake.factors import Factors, load_factors
from lpes_bake.search.errors import InputError
from lpes_bake.search.models import load_scaled
from lpes_bake.search.tasks import parse_task
from lpes_bake.source import open_source
from lpes_bake.timing import Clock
from lpes_bake.unseen import check_unseen, searched
from tests.conftest import write_tiny
from tests.runs import SMALL, Command, Small, invoke, one_line, write_mdqa, write_small
from tests.test_launch import launched
from tests.test_plots import png_size
from tests.test_report import Page

FACTORS = [0.5, 1.4]
KV = "kv,pairs=6,key_width=2"
CONTEXTS = 3
COMMON = ("--contexts", CONTEXTS, "--device", "cpu", "--dtype", "float32")


@dataclass(frozen=True)
class Compared:
    """An ended comparison, and the words that began it."""

    out: Path
    words: list[object]
    content: dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with factors and questions."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "factors.json").write_text(json.dumps(FACTORS))
    write_mdqa(folder / "mdqa.jsonl")
    return folder


@pytest.fixture(scope="module")
def compared(small: Small, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    out = tmp_path_factory.mktemp("compared") / "out"
    words: list[object] = [
        *(small.model, *COMMON, "--methods", f"pi=1.5,lpes={files / 'factors.json'}"),
        *("--task", KV, "--task", f"mdqa:{files / 'mdqa.jsonl'},documents=3", "--timing-tokens", 40),
    ]
    done = invoke("compare", *words, "--out", out, "--html")
    assert done.exit_code == 0, done.output
    return Compared(out, words, json.loads((out / "comparison.json").read_text()))


def units(out: Path) -> list[dict[str, Any]]:
    """The answers in a journal, in their order."""
    records = [json.loads(line)["record"] for line in (out / "journal.jsonl").read_text().splitlines()]
    return [one for one in records if "unit" in one]


def answered(out: Path, count: int) -> Callable[[], bool]:
    """Whether so many answers are in the journal."""
    path = out / "journal.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b'"unit"') >= count


def test_base_and_lpes_come_to_the_numbers_of_eval(small: Small, files: Path, compared: Compared) -> None:
    tasks = [word for one in compared.content["tasks"] for word in ("--task", one["spec"])]
    done = invoke("eval", small.model, *COMMON, "--factors", files / "factors.json", *tasks, "--json", "--quiet")
    evaluated = json.loads(done.stdout)["tasks"]
    assert [one["label"] for one in compared.content["tasks"][0]["methods"]] == ["base", "pi=1.5", "lpes=factors.json"]
    for ours, theirs in zip(compared.content["tasks"], evaluated, strict=True):
        assert ours["settings"] == theirs["settings"]
        base, _, lpes = ours["methods"]
        for found, expected in zip((base, lpes), theirs["models"], strict=True):
            for metric in ("accuracy", "logprob"):
                # The intervals, too: the same contexts were drawn.
                for part in ("by_position", "mean", "minimum", "spread"):
                    assert np.array(found[metric][part]) == pytest.approx(np.array(expected[metric][part]), abs=1e-4)
        for metric in ("accuracy", "logprob"):
            gain = np.array(lpes[metric]["against_base"]["mean"])
            assert gain == pytest.approx(np.array(theirs["models"][1]["difference"][metric]["mean"]), abs=1e-4)
    # Some generated answers are right and some wrong, or this would say little.
    assert 0 < compared.content["tasks"][1]["methods"][0]["accuracy"]["mean"][0] < 1


def test_each_method_meets_the_best_of_the_others() -> None:
    rng = np.random.default_rng(3)
    values = {
        name: {"accuracy": rng.random((9, 2)) + level, "logprob": rng.random((9, 2)) - level}
        for name, level in (("base", 9), ("a", 1), ("b", 3), ("c", 2))
    }
    rows = {row["label"]: row for row in side_by_side(values, "base")}
    for metric, rivals in (
        ("accuracy", {"base": None, "a": "b", "b": "c", "c": "b"}),
        ("logprob", {"base": None, "a": "c", "b": "a", "c": "a"}),
    ):
        for name, rival in rivals.items():
            found = rows[name][metric]
            if rival is None:
                assert found["against_base"] is None and found["against_rival"] is None
                continue
            assert found["against_rival"]["rival"] == rival
            for other, part in (("base", "against_base"), (rival, "against_rival")):
                mean, low, high = found[part]["mean"]
                pairs = (values[name][metric] - values[other][metric]).mean(1)
                assert mean == pytest.approx(pairs.mean())
                # What Student's t gives for 9 pairs, which a bootstrap comes near to.
                half = 2.306 * pairs.std(ddof=1) / 3
                assert low == pytest.approx(mean - half, abs=0.5 * half)
                assert high == pytest.approx(mean + half, abs=0.5 * half)


def test_a_method_that_gave_nan_is_nobodys_best_rival() -> None:
    right = np.ones((4, 2))
    values = {name: {"accuracy": right, "logprob": -right} for name in ("base", "a", "b")}
    values["b"] = {"accuracy": right * np.nan, "logprob": right * np.nan}
    a, b = side_by_side(values, "base")[1:]
    assert a["accuracy"]["against_rival"] is None and b["accuracy"]["against_rival"]["rival"] == "a"
    assert b["logprob"]["mean"] == [None, None, None] == b["logprob"]["against_base"]["mean"]


def test_every_format_has_the_numbers_of_the_json(compared: Compared) -> None:
    out = compared.out
    names = ["comparison.json", "comparison.md", "comparison.tex", "comparison.csv", "comparison.html"]
    pictures = ["comparison-1-kv.png", "comparison-2-mdqa.png"]
    assert {path.name for path in out.iterdir()} == {*names, *pictures, "journal.jsonl"}
    assert all(min(png_size(out / name)) > 1000 for name in pictures)
    page = Page((out / "comparison.html").read_text())
    assert "Content-Security-Policy" in (out / "comparison.html").read_text()
    assert all(address.startswith("data:") for _, address in page.addresses)
    lines = list(csv.DictReader((out / "comparison.csv").open()))
    markdown, latex = ((out / f"comparison.{ending}").read_text() for ending in ("md", "tex"))
    for task in compared.content["tasks"]:
        for metric, form, factor in (("accuracy", ".1f", 100), ("logprob", ".3f", 1)):
            for one in task["methods"]:
                found = one[metric]
                numbers = [*(mean for mean, _, _ in found["by_position"]), found["mean"][0]]
                numbers += [found["minimum"], found["spread"]]
                row = [one["label"], *(f"{factor * number:{form}}".replace("-", "−") for number in numbers)]
                assert row in page.rows
                assert f"| {' | '.join(row)} |" in markdown
                assert " & ".join(row).replace("−", "$-$") + r" \\" in latex
                own = [
                    line
                    for line in lines
                    if (line["task"], line["metric"], line["method"]) == (task["spec"], metric, one["label"])
                ]
                places = [*map(str, task["positions"]), "mean", "worst", "spread"]
                assert [line["position"] for line in own] == places
                assert [float(line["value"]) for line in own] == numbers
                if found["against_base"] is not None:
                    gain = [float(own[-3][f"against_base{end}"]) for end in ("", "_low", "_high")]
                    assert gain == found["against_base"]["mean"]
    assert latex.count(r"\toprule") == latex.count(r"\midrule") == latex.count(r"\bottomrule") == 7


def test_signs_that_mean_something_to_latex_are_only_text() -> None:
    assert latex_text(r"50% of_{a} & \b #1 $x$ [−1] ^~") == (
        r"50\% of\_\{a\} \& \textbackslash{}b \#1 \$x\$ {[}$-$1{]} \textasciicircum{}\textasciitilde{}"
    )


def test_names_are_short_unless_that_makes_them_alike(tmp_path: Path) -> None:
    # A comma in a file's name is no border.
    paths = [tmp_path / name for name in ("a.json", "b/a.json", "b/mine,v2.json")]
    (tmp_path / "b").mkdir()
    for path in paths:
        path.write_text("[1, 1]")
    first, second, third = (f"lpes={path}" for path in paths)
    assert list(named_methods([f"pi=2, {first},base,{third}"])) == ["base", "pi=2", "lpes=a.json", "lpes=mine,v2.json"]
    assert list(named_methods([f"{first},{second}", third])) == ["base", first, second, "lpes=mine,v2.json"]


def test_left_padding_and_a_lack_of_memory_change_no_answer(small: Small, files: Path) -> None:
    settings = CompareSettings(
        ("pi=1.5",), (f"mdqa:{files / 'mdqa.jsonl'},documents=3", KV), contexts=1, device="cpu", dtype="float32"
    )
    plan = make_plan(str(small.model), settings)
    decoder = plan.methods["pi=1.5"].load(plan.source, plan.device, plan.dtype)
    ends = {2}
    scarce = Scarce(decoder, room=2)
    for i, task in enumerate(plan.tasks):
        questions = plan.questions(("pi=1.5", i, 0))
        # Prompts and answers of different lengths.
        questions[0].prompt[:] = questions[0].prompt[9:]
        questions[1].answer.append(questions[1].answer[0])
        alone = Interview(plan.tokenizer, ends, plan.device).ask(decoder, task, questions)
        padded = Interview(plan.tokenizer, ends, plan.device, batch_size=8).ask(decoder, task, questions)
        halved = Interview(plan.tokenizer, ends, plan.device, batch_size=8).ask(scarce, task, questions)
        for other in (padded, halved):
            assert other.logprob == pytest.approx(alone.logprob, abs=1e-4)
            assert (other.exact, other.outputs) == (alone.exact, alone.outputs)
        assert bool(alone.outputs) == task.generates
    assert scarce.refused == 2
    with pytest.raises(InputError, match="out of memory on cpu with a single prompt of up to"):
        Interview(plan.tokenizer, ends, plan.device).ask(Scarce(decoder, room=0), plan.tasks[1], questions)


@pytest.mark.parametrize("name", ["pi=1.5", "ms-poe"])
def test_what_questions_have_in_common_is_read_once_where_the_method_allows_it(
    name: str, small: Small, files: Path
) -> None:
    settings = CompareSettings(
        (name,), (f"mdqa:{files / 'mdqa.jsonl'},documents=3", KV), contexts=1, device="cpu", dtype="float32"
    )
    plan = make_plan(str(small.model), settings)
    decoder = plan.methods[name].load(plan.source, plan.device, plan.dtype)
    interview = Interview(plan.tokenizer, {2}, plan.device)
    for i, task in enumerate(plan.tasks):
        questions = plan.questions((name, i, 0))
        counting, whole = Scarce(decoder, room=1), Scarce(decoder, room=1, in_parts=False)
        found, expected = (interview.ask(one, task, questions) for one in (counting, whole))
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert (found.exact, found.outputs) == (expected.exact, expected.outputs)
        assert whole.read == sum(len(one.prompt) for one in questions)
        if decoder.in_parts:
            first, *others = (one.prompt[:-1] for one in questions)
            assert counting.read > 9 and all(one[: counting.read] == first[: counting.read] for one in others)
        else:
            assert name == "ms-poe" and counting.read == whole.read


def test_frequencies_that_depend_on_the_length_are_those_of_the_whole_prompt(tmp_path: Path) -> None:
    # Prompts of 202 tokens: what they begin with would be read with the short factors.
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    rope = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 190, **factors}
    model = write_tiny(tmp_path / "long", "llama", **SMALL, rope_scaling=rope)
    plan = make_plan(str(model), CompareSettings(("attention-buckets",), (KV,), contexts=1, device="cpu"))
    base, buckets = (one.load(plan.source, plan.device, torch.float32) for one in plan.methods.values())
    library = LlamaForCausalLM.from_pretrained(model)
    expected, questions = [], plan.questions(("base", 0, 0))
    for one in questions:
        assert len(one.prompt) == 202
        logprobs = library(torch.tensor([one.prompt + one.answer[:-1]])).logits[0, 201:].log_softmax(-1)
        expected.append(float(logprobs.gather(-1, torch.tensor(one.answer)[:, None]).mean()))
    assert make_interview(plan).ask(base, plan.tasks[0], questions).logprob == pytest.approx(expected, abs=1e-4)
    assert not buckets.in_parts
    with pytest.raises(InputError, match="batch_size is 2, but under RoPE type 'longrope'"):
        make_plan(str(model), CompareSettings(("pi=2",), (KV,), contexts=1, batch_size=2, device="cpu"))


def test_where_memory_has_no_room_for_what_is_in_common_each_prompt_is_read_by_itself(small: Small) -> None:
    plan = make_plan(str(small.model), CompareSettings(("pi=1.5",), (KV,), contexts=1, device="cpu", dtype="float32"))
    decoder = plan.methods["pi=1.5"].load(plan.source, plan.device, plan.dtype)
    questions = plan.questions(("pi=1.5", 0, 0))
    found, expected = (make_interview(plan).ask(one, plan.tasks[0], questions) for one in (Full(decoder), decoder))
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4) and found.exact == expected.exact


class Uncopied(State):
    """A state that memory has no room for twice."""

    def __deepcopy__(self, memo: Any) -> Uncopied:
        raise RuntimeError("CUDA out of memory. Tried to allocate 9 GiB")


class Full:
    """A decoder whose states cannot be copied."""

    in_parts = True

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Any]:
        """See `Decoder`."""
        logprobs, state = self.decoder.prefill(input_ids, attention_mask)
        return logprobs, Uncopied(state.cache, state.mask)

    def decode(self, state: Any, input_ids: Tensor) -> Tensor:
        """See `Decoder`."""
        return self.decoder.decode(state, input_ids)


@dataclass
class Scarce:
    """A decoder that has room for so many prompts at once, and counts the tokens of those that it reads."""

    decoder: Decoder
    room: int
    in_parts: bool = True
    refused: int = 0
    read: int = 0

    def __post_init__(self) -> None:
        self.in_parts = self.in_parts and self.decoder.in_parts

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Any]:
        """See `Decoder`."""
        if len(input_ids) > self.room:
            self.refused += 1
            raise RuntimeError("CUDA out of memory. Tried to allocate 9 GiB")
        self.read += input_ids.numel()
        return self.decoder.prefill(input_ids, attention_mask)

    def decode(self, state: Any, input_ids: Tensor) -> Tensor:
        """See `Decoder`."""
        return self.decoder.decode(state, input_ids)


@pytest.mark.parametrize("ends", [2, [7, 9], None])
def test_the_tokens_that_end_a_text_are_those_of_the_loaded_model(ends: Any, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny", "llama", **SMALL, eos_token_id=ends)
    settings = CompareSettings(("pi=1.5",), (KV,), contexts=1, device="cpu")
    for remove in (False, True):
        if remove:
            (model / "generation_config.json").unlink()
        loaded = load_scaled(model, dtype=torch.float32).generation_config.eos_token_id
        expected = loaded if isinstance(loaded, list) else [] if loaded is None else [loaded]
        assert make_interview(make_plan(str(model), settings)).ends == set(expected)


def test_a_baked_model_is_compared_with_its_base(files: Path, compared: Compared, tmp_path: Path) -> None:
    model = write_small(tmp_path).model
    # What the library reads from it where it is there, it finds in config.json otherwise.
    (model / "generation_config.json").unlink()
    baked = bake(open_source(str(model)), Factors(tuple(FACTORS)), tmp_path / "baked").out
    task = compared.content["tasks"][1]
    words = (*COMMON, "--methods", "lpes", "--task", task["spec"], "--timing-tokens", 0, "--out", tmp_path / "out")
    done = invoke("compare", baked, *words, "--json")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    base, lpes = content["tasks"][0]["methods"]
    for found, expected in zip((base, lpes), task["methods"][::2], strict=True):
        for metric in ("accuracy", "logprob"):
            assert found[metric]["by_position"] == expected[metric]["by_position"]
    assert content["costs"] is None and "Cost" not in (tmp_path / "out" / "comparison.md").read_text()


# Costs


class Heavy(ModelDecoder):
    """A model that reads its prompt four times, and holds 200 MB that it has no use for."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.ballast = torch.ones(50_000_000)

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Any]:
        """See `Decoder`."""
        for _ in range(3):
            super().prefill(input_ids, attention_mask)
        return super().prefill(input_ids, attention_mask)


def test_time_and_memory_are_those_of_the_method(tiny_llama: Path) -> None:
    clock = Clock(list(range(200)), torch.device("cpu"))

    def load(kind: type[ModelDecoder]) -> Callable[[], Decoder]:
        return lambda: kind(load_scaled(tiny_llama, dtype=torch.float32))

    clock.warm_up(load(ModelDecoder))
    timing = clock.beside(load(ModelDecoder), load(Heavy))
    assert timing.in_turn
    rounds = [ours / theirs for ours, theirs in zip(timing.method.prefill, timing.base.prefill, strict=True)]
    assert len(rounds) == 5 and 2 < np.median(rounds) < 8
    assert 0.3 < np.median(timing.method.decode) / np.median(timing.base.decode) < 3
    if timing.base.memory is not None and timing.method.memory is not None:
        # Linux lets a process forget its own peak.
        assert 190e6 < timing.method.memory - timing.base.memory < 300e6


def test_models_that_do_not_fit_together_are_measured_one_after_the_other(tiny_llama: Path) -> None:
    alive: list[Any] = []

    def load() -> Decoder:
        if any(one() is not None for one in alive):
            raise InputError("tiny cannot be loaded on cuda: CUDA out of memory. Tried to allocate 9 GiB")
        decoder = ModelDecoder(load_scaled(tiny_llama, dtype=torch.float32))
        alive.append(weakref.ref(decoder))
        return decoder

    timing = Clock([5, 6, 7], torch.device("cpu")).beside(load, load)
    assert not timing.in_turn and len(timing.base.decode) == len(timing.method.decode) == 5


def test_costs_are_ratios_to_the_base_model(compared: Compared) -> None:
    costs = compared.content["costs"]
    assert costs["tokens"] == 40 and list(costs["methods"]) == ["pi=1.5", "lpes=factors.json"]
    records = [json.loads(line)["record"] for line in (compared.out / "journal.jsonl").read_text().splitlines()]
    for record in (one for one in records if "timing" in one):
        timing, found = record["timing"], costs["methods"][record["method"]]
        for key in ("prefill", "decode"):
            rounds = sorted(a / b for a, b in zip(timing["method"][key], timing["base"][key], strict=True))
            assert found["ratio"][key] == [rounds[2], rounds[0], rounds[4]]
            assert found[key] == sorted(timing["method"][key])[2]


# Interruptions and processes


def test_a_comparison_that_was_stopped_says_how_to_go_on_and_comes_to_the_same(
    compared: Compared, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [*compared.words, "--timing-tokens", 0, "--out", out]
    command = Command(tmp_path, "compare", *words)
    command.stop_once(answered(out, 4), signal.SIGINT)
    code, printed, errors = command.finish()
    assert code == 130 and printed == "" and "Traceback" not in errors
    assert re.search(r"Interrupted. Go on with:\nlpes-bake compare .*--timing-tokens 0 .*--resume\n", errors)
    known = (out / "journal.jsonl").read_bytes()
    assert "holds a run; go on with it with --resume" in one_line(invoke("compare", *words))
    assert "other settings (seed: 1 → 5)" in one_line(invoke("compare", *words, "--resume", "--seed", 5))
    done = invoke("compare", *words, "--resume", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["tasks"] == compared.content["tasks"]
    assert (out / "journal.jsonl").read_bytes().startswith(known)
    asked = [tuple(one["unit"]) for one in units(out)]
    assert len(set(asked)) == len(asked) == 3 * 2 * CONTEXTS


def test_a_full_disk_is_said_in_one_line_and_the_comparison_goes_on(small: Small, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [small.model, "--out", out, "--methods", "pi=1.5", "--task", KV, "--contexts", 6, "--timing-tokens", 0]
    command = Command(tmp_path, "compare", *words)
    command.fill_disk(2000)
    code, _, errors = command.finish()
    assert code == 2 and "Traceback" not in errors
    assert errors.splitlines()[-1] == f"Error: {out / 'journal.jsonl'}: File too large"
    *whole, _ = (out / "journal.jsonl").read_bytes().splitlines()  # the last one was cut off
    assert len(whole) > 2
    done = invoke("compare", *words, "--resume", "--json")
    assert done.exit_code == 0, done.output
    assert (out / "journal.jsonl").read_bytes().splitlines()[: len(whole)] == whole
    assert len(units(out)) == 2 * 6


def test_two_processes_share_the_work_and_come_to_the_same(compared: Compared, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, second = launched(tmp_path, "compare", *compared.words, "--timing-tokens", 0, "--out", out)
    code, printed, errors = first.finish()
    assert code == 0, errors
    assert second.finish() == (0, "", "")
    content = json.loads((out / "comparison.json").read_text())
    assert content["tasks"] == compared.content["tasks"] and content["environment"]["processes"] == 2
    assert printed.count(f"written: {out / 'comparison.json'}") == 1
    assert sorted(map(str, units(out))) == sorted(map(str, units(compared.out)))


# Questions that were searched on

OWN_TASK = """
from dataclasses import dataclass
import random
from lpes_bake.search.tasks import Example, Task

@dataclass(frozen=True)
class Careless(Task):
    name = "careless"
    honest: bool = False

    @property
    def positions(self):
        return (0, 1)

    def contexts(self, part, seed):
        rng = random.Random(f"{part if self.honest else ''} {seed}")
        context = 0
        while True:
            digits = [str(rng.randrange(1000)) for _ in range(2)]
            yield [Example(context, i, f"{digits} {i}?", f" {digits[i]}") for i in (0, 1)]
            context += 1
"""


def recorded(seed: int, **contexts: int) -> Factors:
    """Factors whose file tells of a search on the careless task."""
    scores = {"tasks": [{"settings": {"task": "careless"}, "contexts": contexts, "too_long": {"search": 2}}]}
    return Factors(tuple(FACTORS), search={"seed": seed}, scores=scores)


def test_factors_that_were_searched_on_these_questions_are_refused(small: Small, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_TASK)
    recorded(1, search=1, selection=1).save(tmp_path / "factors.json")
    words = (small.model, "--out", tmp_path / "out", *COMMON, "--methods", f"lpes={tmp_path / 'factors.json'}")
    done = invoke("compare", *words, "--task", f"{tmp_path / 'own.py'}:Careless")
    assert (
        "lpes=factors.json: these factors were searched on context 0 of the careless task's search part (seed 1), "
        "which is context 0 here"
    ) in one_line(done)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("factors", "honest", "expected"),
    [
        # Three contexts were drawn for the search, one of which is beyond what is asked here.
        (recorded(1, search=1, selection=0), False, "searched on context 0"),
        (recorded(1, search=0, selection=1), False, "searched on context 0"),
        (recorded(2, search=1, selection=1), False, None),
        (recorded(1, search=9, selection=9), True, None),
        (Factors(tuple(FACTORS)), False, None),
        (Factors(tuple(FACTORS), search={"seed": 1}, scores={"tasks": [{"contexts": None}]}), False, None),
    ],
)
def test_only_what_a_file_tells_of_is_refused(
    factors: Factors, honest: bool, expected: str | None, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN_TASK)
    task = parse_task(f"{tmp_path / 'own.py'}:Careless,honest={str(honest).lower()}")
    contexts = task.contexts("report", 1)
    questions = [next(contexts) for _ in range(2)]
    if expected is None:
        check_unseen("mine", factors, task, questions)
    else:
        with pytest.raises(InputError, match=expected):
            check_unseen("mine", factors, task, questions)


@pytest.mark.usefixtures("no_pictures")
def test_a_search_writes_down_which_questions_it_drew(small: Small, tmp_path: Path) -> None:
    small.run(tmp_path / "run", generations=1, seed=3)
    factors = load_factors(tmp_path / "run" / "factors.json")
    assert list(searched(factors, parse_task(KV))) == [("search", 3, 8), ("selection", 3, 8)]


# Bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "there is nothing to compare with the base: give --methods"),
        (["--methods", "base"], "there is nothing to compare with the base"),
        (["--methods", "magic"], "there is no method 'magic'"),
        (["--methods", "pi=1.5", "--methods", "pi=1.5"], "method 'pi=1.5' is given twice"),
        (["--methods", "pi=x"], "needs a positive factor"),
        (["--methods", "lpes={files}/nothing.json"], "nothing.json"),
        (["--methods", "lpes={files}/short.json"], "1 factors for a model of 2 layers"),
        (["--methods", "lpes"], "lpes: small is not baked; give the factors by lpes=FILE"),
        (["--methods", "pi=1.5", "--task", "kv,pairs=0"], "pairs must be at least 1"),
        (["--methods", "pi=1.5", "--contexts", "0"], "contexts is 0; it must be at least 1"),
        (["--methods", "pi=1.5", "--timing-tokens", "8190"], "give at most 8176"),
        (["--methods", "pi=1.5", "--device", "cuda:77"], "device 'cuda:77'"),
        (["--methods", "pi=1.5", "--prompt-format", "chat"], "no chat template"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_a_weight_is_read(
    arguments: Sequence[str], said: str, small: Small, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Method, "load", lambda *_: pytest.fail("a model was loaded"))
    (files / "short.json").write_text("[1.0]")
    words = [one.format(files=files) for one in arguments]
    done: Result = invoke("compare", small.model, "--out", tmp_path / "out", *words)
    assert said in one_line(done), done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "changes", "methods", "said"),
    [
        ("gemma3_text", {}, ("ntk=2", "attention-buckets"), "has two bases"),
        ("gemma2", {}, ("ms-poe", "ms-poe-released", "moice={files}", "hidden-channel"), "does not know the attention"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("pi=2", "yarn=2"), "RoPE type 'dynamic'"),
        ("llama", {}, ("moice={files}",), "has no routers.safetensors"),
        ("llama", {}, ("moice={files}/others",), "holds routers of another model"),
        ("llama", {}, ("hidden-channel=128/0.5",), "has channels 0 to 127"),
    ],
)
def test_methods_that_do_not_fit_the_model_are_refused_before_a_weight_is_read(
    family: str,
    changes: dict[str, Any],
    methods: Sequence[str],
    said: str,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = write_tiny(tmp_path / family, family, **changes)
    (files / "others").mkdir(exist_ok=True)
    config = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2)
    save_routers(new_routers(config, 7), files / "others", {"bases": [1e4] * 7, "top_k": 7})
    monkeypatch.setattr(Method, "load", lambda *_: pytest.fail("a model was loaded"))
    for method in methods:
        words = ("--out", tmp_path / "out", "--task", KV, "--methods", method.format(files=files))
        assert said in one_line(invoke("compare", model, *words))
        assert not (tmp_path / "out").exists()


def test_routers_for_another_base_are_refused(tmp_path: Path) -> None:
    model = write_small(tmp_path, rope_theta=5e5).model
    config = LlamaConfig.from_pretrained(model)
    for theta, said in ((1e4, "these routers are for a model with rope_theta 10000, and small has 500000"), (5e5, "")):
        save_routers(new_routers(config, 7), tmp_path, {"bases": [theta] * 7, "top_k": 7})
        words = (model, *COMMON, "--methods", f"moice={tmp_path}", "--task", KV, "--timing-tokens", 0)
        done = invoke("compare", *words, "--out", tmp_path / "out")
        assert said in one_line(done) if said else done.exit_code == 0, done.output


def test_routers_that_were_trained_anew_are_not_those_of_the_comparison_so_far(small: Small, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(small.model)
    words = (small.model, *COMMON, "--methods", f"moice={tmp_path}", "--task", KV, "--timing-tokens", 0)
    for seed, flags in ((0, ()), (1, ("--resume",))):
        save_routers(new_routers(config, 7, seed), tmp_path, {"bases": [1e4] * 7, "top_k": 7})
        done = invoke("compare", *words, "--out", tmp_path / "out", *flags)
        if not flags:
            assert done.exit_code == 0, done.output
    assert f"answers of another moice={tmp_path.name}" in one_line(done)


def test_a_method_that_is_added_later_joins_those_that_have_answered(compared: Compared, tmp_path: Path) -> None:
    words, out = [*compared.words], tmp_path / "out"
    place = words.index("--methods") + 1
    first, second = str(words[place]).split(",")

    def run(methods: str, *flags: str) -> dict[str, Any]:
        words[place] = methods
        done = invoke("compare", *words, "--out", out, "--json", *flags)
        assert done.exit_code == 0, done.output
        content: dict[str, Any] = json.loads(done.stdout)
        return content

    run(second)
    both = run(f"{first},{second}", "--resume")
    asked = [tuple(one["unit"]) for one in units(out)]
    assert len(set(asked)) == len(asked) and both["tasks"] == compared.content["tasks"]
    assert list(both["costs"]["methods"]) == list(compared.content["costs"]["methods"])
    known = (out / "journal.jsonl").read_bytes()
    alone = run(second, "--resume")
    assert alone["methods"] == ["base", both["methods"][2]] and (out / "journal.jsonl").read_bytes() == known


def test_what_a_method_looks_for_in_the_model_is_found_once_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = write_small(tmp_path, num_hidden_layers=4).model, tmp_path / "out"
    # Its tokenizer has code of its own, which the user trusts.
    code = "import transformers\n\n\nclass OwnTokenizer(transformers.PreTrainedTokenizerFast):\n    pass\n"
    (model / "tokenization_own.py").write_text(code)
    path = model / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}, "tokenizer_class": "OwnTokenizer"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    words = (model, *COMMON, "--out", out, "--task", KV, "--timing-tokens", 20, "--json", "--trust-remote-code")
    searches = []

    def small_search(*found_in: Any) -> HiddenChannel:
        searches.append(found_in)
        return find_channel(*found_in, strings=1, contexts=1)

    monkeypatch.setattr("lpes_bake.baselines.hidden_channel.find_channel", small_search)
    for methods, flags in (("hidden-channel", ()), ("hidden-channel,pi=2", ("--resume",))):
        done = invoke("compare", *words, "--methods", methods, *flags)
        assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    ((_, _, asked_in),) = searches
    assert asked_in == content["settings"]["prompt_format"]
    settled = content["settings"]["methods"]["hidden-channel"]["settled"]
    by_itself = invoke("compare", *words, "--out", tmp_path / "other", "--methods", settled)
    (_, by_name, _), (_, given) = content["tasks"][0]["methods"], json.loads(by_itself.stdout)["tasks"][0]["methods"]
    assert by_name["logprob"] == {**given["logprob"], "against_rival": by_name["logprob"]["against_rival"]}
    assert by_name["logprob"]["mean"] != content["tasks"][0]["methods"][0]["logprob"]["mean"]


def test_a_model_of_nan_gives_no_numbers_and_says_so(tmp_path: Path) -> None:
    model = write_small(tmp_path).model
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    words = (*COMMON, "--methods", "pi=2,ms-poe", "--task", KV, "--timing-tokens", 0, "--out", tmp_path / "out")
    done = invoke("compare", model, *words, "--json")
    assert done.exit_code == 0, done.output
    for name in ("base", "pi=2", "ms-poe"):
        assert f"{name}: the model gave NaN for 9 of 9 questions" in " ".join(done.stderr.split())
    for one in json.loads(done.stdout, parse_constant=pytest.fail)["tasks"][0]["methods"]:
        assert one["logprob"]["mean"] == [None, None, None] == one["accuracy"]["mean"]
