"""The factors file: what is written comes back, and what is wrong is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lpes_bake.cli import main
from lpes_bake.factors import Factors, base_facts, check_factors, load_factors
from lpes_bake.search.errors import InputError
from lpes_bake.source import open_source

LIST = (0.25, 4.0, 1.0, 2.0)


def record(tiny_llama: Path) -> Factors:
    return Factors(
        LIST,
        base=base_facts(open_source(str(tiny_llama))),
        curve={"points": [[0, 1.0], [3, 1.25]]},
        search={"seed": 7, "generations": 20},
        scores={"base": {"mean": 0.5, "contexts": 200}, "baked": {"by_position": [0.1] * 50, "worst": float("nan")}},
        tool_version="0.1.0",
        date="2026-11-29",
    )


def error(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        load_factors(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_saved_comes_back(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "factors.json"
    factors = record(tiny_llama)
    factors.save(path)
    found = load_factors(path)
    # NaN is no JSON: it comes back as null.
    assert found.scores is not None and found.scores["baked"].pop("worst") is None
    assert factors.scores is not None and factors.scores["baked"].pop("worst")
    assert found == factors
    assert [file.name for file in tmp_path.iterdir()] == ["factors.json"]


def test_the_file_has_one_factor_a_line_and_no_long_lines(tiny_llama: Path) -> None:
    lines = record(tiny_llama).to_text().splitlines()
    start = lines.index('  "layer_rope_scaling": [')
    assert [json.loads(line.strip().rstrip(",")) for line in lines[start + 1 : start + 5]] == list(LIST)
    assert max(map(len, lines)) <= 110
    assert len(lines) < 40


@pytest.mark.parametrize("text", ["[0.25, 4, 1, 2]", "0.25\n4\n\n 1.0 \n2\n", "\ufeff0.25\r\n4\r\n1\r\n2e0\r\n"])
def test_a_bare_list_is_enough(tmp_path: Path, text: str) -> None:
    (tmp_path / "list").write_bytes(text.encode())
    assert load_factors(tmp_path / "list") == Factors(LIST)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, NaN]", "layer 1 has nan"),
        ("[1, 0]", "layer 1 has 0"),
        ("[-1]", "layer 0 has -1"),
        ('["1"]', "layer 0 has '1'"),
        ("[true]", "layer 0 has True"),
        ("[[1]]", "layer 0 has [1]"),
        ("[1e999]", "layer 0 has inf"),
        ("1\nnan", "layer 1 has nan"),
        ("1\n-2", "layer 1 has -2"),
        ("1\none", "line 2: 'one' is not a number"),
        ("1, 2", "line 1"),
        ("[]", "must be a list"),
        ("", "must be a list"),
        ("null", "layer 0 has None"),
        ("[1, 1" + "0" * 400 + "]", "layer 1 has 10"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[1,", "not valid JSON"),
        ("{}", "has version None"),
        ('{"version": 2}', "has version 2"),
        ('{"version": true}', "has version True"),
        ('{"version": 1}', "layer_rope_scaling"),
        ('{"version": 1, "layer_rope_scaling": [1], "factor": 1}', "unknown field 'factor'"),
        ('{"version": 1, "layer_rope_scaling": [1], "base": []}', "base must be an object"),
        ('{"version": 1, "layer_rope_scaling": [1], "curve": {"points": [[1]]}}', "[layer, factor] pairs"),
        ('{"version": 1, "layer_rope_scaling": [1], "curve": {"points": [[1, 1%s]]}}' % ("0" * 400), "pairs"),
        ('{"version": 1, "layer_rope_scaling": [1], "date": 3}', "date must be a string"),
        ('{"version": 1, "layer_rope_scaling": [1], "base": {"num_hidden_layers": 2}}', "contradicts itself"),
        ('{"model_type": "llama"}', "not a baked checkpoint"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "factors.json").write_text(text)
    assert message in error(tmp_path / "factors.json")
    assert str(tmp_path / "factors.json") in error(tmp_path / "factors.json")


@pytest.mark.parametrize("number", ["1e-320", "1e-39", "1e39", "-1e-9"])
def test_factors_that_float32_does_not_hold_are_refused(tmp_path: Path, number: str) -> None:
    """Models hold them in float32: 1e-320 would be 0 there, and every frequency infinite."""
    (tmp_path / "f.json").write_text(f"[1.0, {number}]")
    assert "float32" in error(tmp_path / "f.json") and "layer 1" in error(tmp_path / "f.json")


def test_what_cannot_be_a_factors_file_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    assert "No such file" in error(tmp_path / "nothing")
    assert "neither" in error(tmp_path)
    assert "not a text file" in error(tiny_llama / "model.safetensors")
    assert "not a baked checkpoint" in error(tiny_llama)


def change(facts: dict[str, Any], **changes: Any) -> Factors:
    return Factors(LIST, base={**facts, **changes})


def test_factors_for_another_model_are_refused(tiny_llama: Path, tiny_qwen2: Path) -> None:
    source = open_source(str(tiny_llama))
    facts = base_facts(source)
    check_factors(Factors(LIST), source)
    check_factors(record(tiny_llama), source)
    check_factors(change(facts, name="another/finetune", revision="abc"), source)
    for wrong in (
        change(facts, model_type="qwen2"),
        change(facts, architecture="LlamaModel"),
        change(facts, rope={**facts["rope"], "rope_theta": 1e6}),
        change(facts, rope={**facts["rope"], "rope_type": "linear", "factor": 2.0}),
        replace(record(tiny_llama), layer_rope_scaling=LIST[:3]),
    ):
        with pytest.raises(InputError):
            check_factors(wrong, source)
    with pytest.raises(InputError, match="model_type 'llama'"):
        check_factors(record(tiny_llama), open_source(str(tiny_qwen2)))


def shown_rows(path: Path) -> list[list[str]]:
    shown = CliRunner().invoke(main, ["show", str(path)])
    assert shown.exit_code == 0, shown.output
    return [line.split() for line in shown.output.splitlines()]


def test_show_prints_the_factors_and_where_they_come_from(tiny_llama: Path, tmp_path: Path) -> None:
    record(tiny_llama).save(tmp_path / "factors.json")
    # Scores of a shape that is not a search's are not guessed at.
    assert shown_rows(tmp_path) == [
        ["base", "model", f"{tiny_llama.name},", "LlamaForCausalLM"],
        # Heights in eighths of the way from .25 to 4.
        ["factors", "▁█▂▄", "0.25", "…", "4"],
        ["layers", "0–3", "0.25", "4", "1", "2"],
        ["search", "seed", "7"],
        ["written", "2026-11-29,", "lpes-bake", "0.1.0"],
    ]


def test_show_is_a_screenful_for_deep_models_too(tmp_path: Path) -> None:
    factors = [round(0.5 + layer / 100, 2) for layer in range(80)]
    (tmp_path / "list").write_text(json.dumps(factors))
    chart, *rows = "\n".join(" ".join(row) for row in shown_rows(tmp_path / "list")).split("layers ")
    assert sum(chart.count(bar) for bar in "▁▂▃▄▅▆▇█") == 80 and "0.5 … 1.29" in chart
    assert [float(one) for row in rows for one in row.split()[1:]] == factors
    assert len(shown_rows(tmp_path / "list")) < 24


def test_show_as_json_is_the_file(tiny_llama: Path, tmp_path: Path) -> None:
    record(tiny_llama).save(tmp_path / "factors.json")
    shown = CliRunner().invoke(main, ["show", "--json", str(tmp_path / "factors.json")])
    assert json.loads(shown.output) == json.loads((tmp_path / "factors.json").read_text())


def test_show_as_json_is_json_for_every_reader(tmp_path: Path) -> None:
    text = '{"version": 1, "layer_rope_scaling": [1], "scores": {"a": NaN, "b": [Infinity]}}'
    (tmp_path / "factors.json").write_text(text)
    shown = CliRunner().invoke(main, ["show", str(tmp_path), "--json"])
    assert json.loads(shown.output, parse_constant=pytest.fail)["scores"] == {"a": None, "b": [None]}


def test_show_draws_the_factors(tiny_llama: Path, tmp_path: Path) -> None:
    record(tiny_llama).save(tmp_path / "factors.json")
    for source in (tmp_path / "factors.json", tmp_path):
        shown = CliRunner().invoke(main, ["show", str(source), "--plot", str(tmp_path / "out.png")])
        assert shown.exit_code == 0, shown.output
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "out.png").unlink()


def test_show_of_bad_input_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("1")
    (tmp_path / "folder").mkdir()
    for arguments in (["nothing"], ["n" * 5000], ["no\nthing"], ["list", "--plot", str(tmp_path / "folder")]):
        shown = CliRunner().invoke(main, ["show", str(tmp_path / arguments[0]), *arguments[1:]])
        assert shown.exit_code == 2
        assert len(shown.output.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "list"]
