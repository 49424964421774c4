"""What must hold for the paper's recipes: measurements equal plain forward passes of other models, all commands parse,
and each table holds what its commands have written."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.paper import __main__ as paper
from benchmarks.paper import tables
from benchmarks.paper.attention import attention_mass, evidence_of, tokens_of
from benchmarks.paper.deviation import Deviation, deviations
from benchmarks.paper.recipes import RECIPES, Files, Recipe, Step
from benchmarks.paper.setups import SETUPS, Asked, Setup
from benchmarks.paper.variants import noisy, shuffled
from lpes_bake.cli import main
from lpes_bake.commands.search import LIMITS, settings_of
from lpes_bake.compare import named_methods
from lpes_bake.harness import Difference, HarnessRow, Measured
from lpes_bake.loading import load_library_model
from lpes_bake.search.errors import InputError
from lpes_bake.search.models import load_scaled, set_factors
from lpes_bake.search.prompts import encode
from lpes_bake.search.tasks import Example, parse_task
from lpes_bake.source import open_source
from tests.runs import Small, invoke, without_date, write_own, write_small

FACTORS = (0.5, 1.3, 0.8, 2.0)
UNIFORM = (1.3,) * 4
PROMPTS = [[7, 3, 99, 12, 45, 8, 61, 20], [5, 200, 17, 9, 9, 130, 77, 31, 4, 88]]


def plain_deviation(base: Any, scaled: Any) -> Deviation:
    """Independent: two models, a forward pass each, numbers one by one."""
    measures = np.zeros((3, 4))
    for prompt in PROMPTS:
        with torch.no_grad():
            h, g = (
                [one[0].double().tolist() for one in model(torch.tensor([prompt]), output_hidden_states=True)[-1]]
                for model in (base, scaled)
            )
        for layer in range(4):
            for token in range(len(prompt)):
                a, b = h[layer + 1][token], g[layer + 1][token]
                steps = cosine(g[layer][token], b) - cosine(h[layer][token], a)
                share = 1 / len(prompt) / len(PROMPTS)
                measures[:, layer] += share * np.array([math.dist(a, b) / math.hypot(*a), 1 - cosine(a, b), abs(steps)])
    return Deviation(*measures)


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("factors", [FACTORS, UNIFORM])
def test_deviation_equals_that_of_two_separate_models(
    family: str, factors: tuple[float, ...], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(f"tiny_{family}")
    source = open_source(str(path))
    base = load_library_model(source, "cpu", torch.float32)
    if factors == UNIFORM:
        scaled = load_library_model(source, "cpu", torch.float32, rope_type="linear", factor=1.3)
    else:
        scaled = load_scaled(path, dtype=torch.float32, factors=factors)
    (found,) = deviations(load_scaled(path, dtype=torch.float32), PROMPTS, [factors])
    expected = plain_deviation(base, scaled)
    assert expected.relative_l2.min() > 0.01
    for name in ("relative_l2", "one_minus_cosine", "step"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-6)


def test_deviation_is_zero_where_nothing_changed(tiny_llama: Path) -> None:
    model = load_scaled(tiny_llama, dtype=torch.float32)
    none, third = deviations(model, PROMPTS, [(1.0,) * 4, (1.0, 1.0, 1.4, 1.0)])
    for name in ("relative_l2", "one_minus_cosine", "step"):
        assert getattr(none, name).tolist() == [0] * 4
        assert getattr(third, name)[:2].tolist() == [0, 0] and (getattr(third, name)[2:] > 0).all()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_attention_mass_equals_the_attentions_of_transformers(family: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(f"tiny_{family}")
    model = load_scaled(path, dtype=torch.float64)
    set_factors(model, UNIFORM)
    # The library's own scaling, and its own collecting.
    config = load_library_model(open_source(str(path)), "cpu", torch.float32, rope_type="linear", factor=1.3).config
    plain = AutoModelForCausalLM.from_pretrained(path, config=config, attn_implementation="eager").double()
    with torch.no_grad():
        attentions = plain(torch.tensor([PROMPTS[1]]), output_attentions=True).attentions
    expected = [
        [sum(float(layer[0, head, 9, key]) for key in (2, 3, 4, 5)) for head in range(4)] for layer in attentions
    ]
    mass = attention_mass(model, PROMPTS[1], range(2, 6))
    assert mass.shape == (4, 4)
    np.testing.assert_allclose(mass, expected, rtol=1e-4, atol=1e-6)
    # A layer's attention goes to all tokens, and no hook stays behind.
    np.testing.assert_allclose(attention_mass(model, PROMPTS[1], range(10)), np.ones((4, 4)), rtol=1e-6)
    assert not any(layer.self_attn._forward_hooks for layer in model.base_model.layers)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("prompt_format", ["plain", "vicuna"])
def test_evidence_is_found_byte_by_byte(tiny_llama: Path, prompt_format: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    for example in next(parse_task("kv,pairs=5,key_width=4").contexts("report", 1)):
        prompt, _ = encode(example, tokenizer, prompt_format)
        evidence = evidence_of(example)
        # A token of this tokenizer is a byte.
        lines = example.prompt.splitlines()
        assert evidence == lines[3 + example.position].strip(" {},")
        span = tokens_of(evidence, prompt, tokenizer)
        assert tokenizer.decode(prompt[span.start : span.stop]) == evidence and len(span) == len(evidence)


@pytest.mark.smollm2
def test_evidence_is_found_by_the_offsets_of_a_real_tokenizer(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for example in next(parse_task("kv,pairs=12,key_width=uuid").contexts("report", 1)):
        prompt, _ = encode(example, tokenizer, "plain")
        evidence = evidence_of(example)
        start = (example.prompt + example.lead).index(evidence)
        offsets = tokenizer(example.prompt + example.lead, return_offsets_mapping=True)["offset_mapping"]
        touching = [i for i, (a, b) in enumerate(offsets) if a < start + len(evidence) and b > start]
        assert list(tokens_of(evidence, prompt, tokenizer)) == touching


def test_evidence_of_another_task_is_refused() -> None:
    with pytest.raises(InputError, match="key-value retrieval"):
        evidence_of(Example(0, 0, "Question: who?\nAnswer:", "Tom"))


def test_shuffled_and_noisy_factors() -> None:
    factors = np.linspace(0.8, 1.2, 4000).tolist()
    assert sorted(shuffled(factors, 0)) == factors and shuffled(factors, 0) != factors
    assert shuffled(factors, 0) == shuffled(factors, 0) != shuffled(factors, 1)
    logs = np.log(np.array(noisy(factors, 0.1, 0)) / factors)
    # Of 4,000 draws, the mean's and the deviation's standard errors are .0016 and .0011.
    assert abs(logs.mean()) < 0.006 and abs(logs.std() - 0.1) < 0.005
    np.testing.assert_allclose(noisy(factors, 0.0, 0), factors, atol=5e-5)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with gold passages and factors."""
    folder = tmp_path_factory.mktemp("files")
    rows = [
        {
            "question": f"Who keeps lamp {row}?",
            "answers": [f"Keeper{row:03}"],
            "ctxs": [{"title": f"Lamp {row}", "text": f"Keeper{row:03} keeps it.", "isgold": True}],
        }
        for row in range(200)
    ]
    (folder / "mdqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "factors.json").write_text(json.dumps([0.5, 1.4]))
    return folder


@pytest.mark.parametrize("model", SETUPS)
@pytest.mark.parametrize("table", RECIPES)
@pytest.mark.parametrize("given", [False, True])
def test_commands_parse(model: str, table: str, given: bool, files: Path, tmp_path: Path) -> None:
    factors = files / "factors.json" if given else None
    moice = tmp_path / "moice"
    recipe = RECIPES[table](SETUPS[model], Files(tmp_path, files / "mdqa.jsonl", factors, moice, files / "text.txt"))
    made = [step.made for step in recipe.steps]
    assert len({*made}) == len(made)
    known = {files / "factors.json"}
    for step in recipe.steps:
        program, *words = step.words
        if program == "python":
            module = importlib.import_module(words[1])
            options = vars(module.parser().parse_args(words[2:]))
        else:
            command = main.get_command(click.Context(main), words[0])
            assert command is not None
            context = command.make_context(words[0], words[1:])
            options = context.params
            if words[0] == "search":
                values = {
                    name: value
                    for name, value in options.items()
                    if name not in (*LIMITS, "model", "out", "resume", "dry_run", "revision", "preset", "force")
                }
                settings_of(context, options["out"], values, options["preset"], resume=False)
            if words[0] == "compare" and given:
                assert len(named_methods(options["methods"])) == 6
        tasks = options.get("task") or options.get("specs") or ()
        for spec in [tasks] if isinstance(tasks, str) else tasks:
            parse_task(spec)
        # Nothing is read that no step before has made.
        used = options.get("factors") or []
        assert {*(used if isinstance(used, (list, tuple)) else [used])} <= known
        known |= {step.made, step.made.parent / "factors.json"}
        if "variants" in str(step.made):
            known |= {step.made.parent / f"{kind}-{i}.json" for kind in ("shuffled", "noisy") for i in range(5)}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return write_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def tiny_setup(small: Small) -> Setup:
    """All tables in seconds."""
    base = SETUPS["smollm2"]
    search = {name.replace("_", "-"): str(value) for name, value in TINY_SEARCH.items()}
    return dataclasses.replace(
        base,
        model=str(small.model),
        tasks={
            "kv": Asked("kv,pairs=4,key_width=2,positions=0/3", 3),
            "kv-other": Asked("kv,pairs=6,key_width=2,positions=0/5", 3),
            # Free text would take ten times as long.
            "mdqa": Asked("kv,pairs=3,key_width=3,positions=0/2", 2),
            "mdqa-other": Asked("kv,pairs=2,key_width=3,positions=0/1", 2),
        },
        searched={"kv": "kv,pairs=4,key_width=2", "mdqa": "kv,pairs=3,key_width=3"},
        search={**search, "text": str(small.text), "force": None},
        optimizers={"random": {"optimizer": "random"}},
        control_points=(),
        instances=(),
        draws=2,
        few=2,
    )


TINY_SEARCH = {
    "optimizer": "genetic",
    "population": 3,
    "generations": 1,
    "uniform": "0.8",
    "contexts": 4,
    "first_block": 4,
    "selection_contexts": 4,
    "report_contexts": 4,
    "finalists": 1,
    "leash": 0,
    "max_damage": 100,
    "device": "cpu",
}


def done(recipe: Recipe) -> list[tables.Table]:
    """A recipe's tables, its commands run within this process; those that may fail are left out."""
    for step in recipe.steps:
        program, *words = step.words
        if step.optional or step.made.exists():
            continue
        if program == "python":
            importlib.import_module(words[1]).main(words[2:])
        else:
            result = invoke(*words)
            assert result.exit_code == 0, result.output
        assert step.made.exists(), step.words
    return recipe.gather()


def test_tables_hold_what_the_commands_wrote(tiny_setup: Setup, small: Small, files: Path, tmp_path: Path) -> None:
    where = Files(tmp_path, files / "mdqa.jsonl", text=small.text)
    made = {table: done(recipe(tiny_setup, where)) for table, recipe in RECIPES.items()}

    def written(name: str) -> Any:
        return json.loads((tmp_path / name).read_text())

    logprob = made["main"][1]
    comparison = written("compare-kv/comparison.json")["tasks"][0]["methods"]
    assert [row[0] for row in logprob.rows] == ["base", "pi=0.95", "ms-poe", "attention-buckets", "lpes=factors.json"]
    assert logprob.columns[1:3] == ["0", "3"] and len(made["main"]) == 4
    for row, method in zip(logprob.rows, comparison, strict=True):
        at_first, at_last, mean, worst, spread, change = row[1:]
        assert at_first == method["logprob"]["by_position"][0][0]
        assert mean == pytest.approx((at_first + at_last) / 2) and worst == min(at_first, at_last)
        assert spread == pytest.approx(abs(at_first - at_last))
        assert change is None or change[0] == pytest.approx(mean - logprob.rows[0][4 - 1])

    assert len(made["transfer"]) == 8
    assert [row[0][:8] for row in made["transfer"][0].rows] == ["base", "found on", "found on"]
    # `compare` and `eval` ask the same questions.
    assert made["transfer"][1].rows[0][3] == pytest.approx(logprob.rows[0][3], abs=1e-5)

    variants, searches = made["ablations"]
    models = written("ablations-kv.json")["tasks"][0]["models"]
    shuffles = [model["logprob"]["mean"][0] for model in models[2:4]]
    by_name = {row[0]: row for row in variants.rows}
    assert list(by_name) == ["base", "found", "shuffled", "noisy"] and by_name["noisy"][1] == 2
    assert by_name["shuffled"][4] == pytest.approx(sum(shuffles) / 2)
    assert by_name["shuffled"][5] == pytest.approx(abs(shuffles[0] - shuffles[1]) / math.sqrt(2))
    assert by_name["base"][5] is None
    assert [row[0] for row in searches.rows] == ["as in the main table", "optimizer random"]

    found = written("deviation.measured.json")["candidates"]
    table = made["deviation"][0]
    assert table.columns == ["layer", "found", "shuffled", "noisy"] and [row[0] for row in table.rows] == [0, 1, "mean"]
    assert table.rows[1][3] == pytest.approx((found[3]["relative_l2"][1] + found[4]["relative_l2"][1]) / 2)

    by_position, by_layer = made["attention"]
    assert by_position.columns == ["gold position", "0", "3"] and len(by_layer.rows) == 2
    base = written("attention.measured.json")["candidates"][0]
    assert by_position.rows[1][1:] == pytest.approx(np.array(base["by_layer"]).mean(1))
    assert by_layer.rows[0][1] == pytest.approx(np.array(base["by_layer"])[:, 0].mean())

    (text,) = made["general"]
    assert text.rows[0][2:] == [None, 0.0]
    assert text.rows[1][2][0] == pytest.approx(text.rows[1][1] - text.rows[0][1])
    for name, ones in made.items():
        assert tables.markdown(name, ones).count("\n## ") == len(ones)


def test_harness_table() -> None:
    row = HarnessRow("mmlu", "acc", 100, (Measured(0.5, 0.05), Measured(0.48, 0.05)), (Difference(-0.02, 0.01, True),))
    (table,) = tables.harness({"rows": [dataclasses.asdict(row)]})
    assert table.rows == [["mmlu", "acc", 100, 0.5, 0.48, -0.02, 0.01]]


def test_markdown() -> None:
    table = tables.Table("T", ["", "0", "− base"], [["base", 0.5, None], ["a", 2, [0.25, -1.0, None]]])
    expected = "# M\n\n## T\n\n|  | 0 | − base |\n| --- | --: | --: |\n"
    assert tables.markdown("M", [table]) == f"{expected}| base | 0.5000 | — |\n| a | 2 | +0.2500 [-1.0000, ?] |\n"


def test_a_table_from_the_command_line(
    small: Small, files: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["attention", str(tmp_path / "out"), "--model", "smollm2", "--path", str(small.model)]
    given = [*words, "--factors", str(files / "factors.json")]
    paper.main([*given, "--print"])
    printed = capfd.readouterr().out
    assert printed.startswith("python -m benchmarks.paper.attention ") and not (tmp_path / "out").exists()
    paper.main(given)
    assert f"{printed}# attention: {small.model}\n" in capfd.readouterr().out
    content = json.loads((tmp_path / "out" / "attention.json").read_text())
    assert content["commands"] == printed.splitlines() and len(content["tables"][0]["rows"]) == 3
    # What is there is not made again; what another command made is not taken for it.
    paper.main(given)
    assert f"# done: {printed}" in capfd.readouterr().out
    other = tmp_path / "other.json"
    other.write_text("[1, 1]")
    with pytest.raises(SystemExit, match="another command"):
        paper.main([*words, "--factors", str(other)])


def test_a_stopped_search_goes_on(small: Small, tmp_path: Path) -> None:
    run = tmp_path / "search"
    options = {**TINY_SEARCH, "task": "kv,pairs=4,key_width=2"}
    words = ("--out", str(run), *small.options(**options))
    assert invoke("search", small.model, *words).exit_code == 0
    expected = without_date(run)
    for name in ("result.json", "factors.json"):
        (run / name).unlink()
    journal = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    (run / "journal.jsonl").write_text("".join(journal[:3]))
    paper.run(Step(run / "result.json", ("lpes-bake", "search", str(small.model), *words)), tmp_path)
    assert without_date(run) == expected
    assert (run / "journal.jsonl").read_text().startswith("".join(journal[:3]))


def test_a_step_that_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    step = Step(tmp_path / "made.json", ("lpes-bake", "eval", str(tmp_path / "none")), optional=True)
    paper.run(step, tmp_path)
    said = capfd.readouterr()
    assert said.err.startswith("\nError: ") and "# skipped, the line above says why: lpes-bake eval" in said.out
    with pytest.raises(SystemExit) as stop:
        paper.run(dataclasses.replace(step, optional=False), tmp_path)
    assert stop.value.code == 2


def test_a_measurement_of_bad_input_fails_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        words = ("python", "-m", "benchmarks.paper.variants", str(tmp_path / "none.json"), str(tmp_path))
        paper.run(Step(tmp_path / "noisy-4.json", words), tmp_path)
    error = capfd.readouterr().err
    assert stop.value.code == 2 and error.startswith("Error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("measurement", "factors", "options", "said"),
    [
        ("attention", [1, 1], ["--task", "qa:{own}"], "only prompts of key-value retrieval say where"),
        ("attention", [1, 1, 1], [], "3 factors"),
        ("deviation", [1, 1], ["--task", "kv,pairs=x"], "pairs"),
        ("short_text", [1, 1, 1], [], "3 factors"),
    ],
)
def test_a_measurement_s_input_is_checked_before_weights_are_read(
    measurement: str,
    factors: list[int],
    options: list[str],
    said: str,
    small: Small,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_model(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("benchmarks.paper.measuring.load_model", load_model)
    (tmp_path / "factors.json").write_text(json.dumps(factors))
    own = write_own(tmp_path / "own.jsonl")
    words = [
        str(small.model),
        "--factors",
        str(tmp_path / "factors.json"),
        "--out",
        str(tmp_path / "made.json"),
        *options,
    ]
    with pytest.raises(InputError, match=said):
        importlib.import_module(f"benchmarks.paper.{measurement}").main([word.format(own=own) for word in words])


def test_a_measurement_that_could_not_be_written_does_not_begin(
    small: Small, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(small.model), "--factors", str(files / "factors.json"), "--out", str(tmp_path / "none" / "made.json")]
    with pytest.raises(SystemExit) as stop:
        importlib.import_module("benchmarks.paper.short_text").main(words)
    assert stop.value.code == 2 and "give a file name in a directory that exists" in capsys.readouterr().err


def test_files_that_are_missing_are_told_before_anything_runs(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "missing")
    for table, option in (
        ("transfer", "--mdqa"),
        ("deviation", "--factors"),
        ("main", "--moice"),
        ("general", "--text"),
    ):
        words = [table, str(tmp_path / "out"), "--model", "smollm2", "--path", str(small.model), option, missing]
        with pytest.raises(SystemExit) as stop:
            paper.main([*words, *(["--mdqa", str(small.text)] if option != "--mdqa" else [])])
        assert stop.value.code == 2 and capsys.readouterr().err.endswith(f"error: {option}: {missing} does not exist\n")
    assert not (tmp_path / "out").exists()


def test_ctrl_c_ends_a_table_without_a_traceback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # What a terminal does to both of them, the command does to this process.
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    # Where the tests run in a shell's background, the signal is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as stop:
            paper.run(Step(tmp_path / "made.json", ("python", "-c", code)), tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop.value.code == 130 and capfd.readouterr().err.endswith("Interrupted. The same command goes on.\n")
