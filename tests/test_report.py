"""What must hold for the report: every number is on the page, nothing is fetched, nothing is believed unchecked."""

from __future__ import annotations

import base64
import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from lpes_bake.cli import main
from lpes_bake.comparison import compared
from lpes_bake.report import found_at, frontier_of, load_result, pareto_front, render
from lpes_bake.search.curve import decode
from lpes_bake.search.errors import InputError
from lpes_bake.search.statistics import paired_interval
from tests.conftest import ROOT
from tests.test_plots import png_size

LAYERS = 12
VOID = {"meta", "link", "img", "br", "hr"}
HOSTILE = "<script>alert('x')</script>\"&$\\frac$"


def synthetic(seed: int = 0) -> dict[str, Any]:
    """The result of a search that never was: scores by the library's statistics from drawn arrays."""
    rng = np.random.default_rng(seed)
    curve = [[0.0, 1.05], [3.5, 0.9], [8.0, 0.85], [11.0, 0.85]]
    chosen = [float(one) for one in decode([(x, y) for x, y in curve], LAYERS)]
    tasks, scores = [], []
    for spec, unit, positions, contexts in (
        ("kv,pairs=16,key_width=8", "place", [0, 4, 8, 12, 15], {"search": 40, "selection": 0, "report": 200}),
        ("mdqa:nq-open-oracle.jsonl.gz,documents=8", "%", [0, 50, 100], {"search": 0, "selection": 60, "report": 300}),
    ):
        shape = (contexts["report"], len(positions))
        base = rng.normal(-0.5, 0.2, shape) - 0.3 * np.sin(np.linspace(0, 3, len(positions)))
        lpes = base + rng.normal(0.04, 0.1, shape)
        values = [{"accuracy": (one > -0.6).astype(float), "logprob": one} for one in (base, lpes)]
        scores.append(compared(*values))
        tasks.append(
            {
                "spec": spec,
                "name": spec.split(",")[0].split(":")[0],
                "title": f"Some task, {len(positions)} places",
                "settings": {"pairs": 16, "key_width": 8, "file": None},
                "positions": positions,
                "position_unit": unit,
                "generates": unit == "%",
                "contexts": contexts,
                "too_long": {"selection": 3, "report": 17},
            }
        )
    text = rng.normal(-3.19, 0.3, 40)
    drifted = text - rng.normal(0.0007, 0.004, 40)
    trials = drawn_trials(rng)
    whole = [one for one in trials if one["complete"]]
    finalists = [trials[0], *sorted(whole, key=lambda one: -one["score"])[:3]]
    finalists[2]["layer_rope_scaling"] = chosen
    return {
        "version": 1,
        "date": "2026-11-30T14:05:00+00:00",
        "tool_version": "0.2.0",
        "command": "lpes-bake search SmolLM2-135M-Instruct --out 'runs/my run' --task kv,pairs=16,key_width=8",
        "seconds": 4983.2,
        "base": {
            "name": "SmolLM2-135M-Instruct",
            "revision": None,
            "architecture": "LlamaForCausalLM",
            "model_type": "llama",
            "num_hidden_layers": LAYERS,
            "rope": {"rope_theta": 100000.0, "rope_type": "default"},
        },
        "environment": {"python": "3.11.7", "torch": "2.8.0", "device": "cpu", "threads": 2, "processes": 1},
        "settings": {"optimizer": "hybrid", "population": 16, "y_max": 2.0, "task": ["kv", "mdqa"], "max_time": None},
        "tasks": tasks,
        "layer_rope_scaling": chosen,
        "curve": {"points": curve},
        "verdict": "better",
        "message": "The winner is better than the base model on unseen questions (log-probability +0.0412).",
        "ended": "the Budget of 60 evaluations is used up",
        "objective": {"fitness": "logprob", "over": "mean", "leash": 2.0, "leash_kl": 0.5, "weights": [0.6, 0.4]},
        "identity_score": trials[0]["score"],
        "trials": trials,
        "convergence": [
            [one["tokens"], max(t["score"] for t in whole if t["tokens"] <= one["tokens"])] for one in whole
        ],
        "selection": {
            "finalists": [
                {
                    "label": f"candidate {i}",
                    "layer_rope_scaling": one["layer_rope_scaling"],
                    "search_score": one["score"] + one["penalty"],
                    "selection_score": one["score"] - 0.0123 * (i + 1),
                    "damage": one["damage"] + 0.0001,
                    "kl": one["kl"],
                    "allowed": i != 1,
                    "chosen": i == 2,
                }
                for i, one in enumerate(finalists)
            ],
            "gain": {"search": 0.0612, "selection": 0.0499, "report": 0.0431},
            "max_damage": 0.005,
        },
        "report": {
            "tasks": scores,
            "text": {
                "paragraphs": 40,
                "base": float(text.mean()),
                "lpes": float(drifted.mean()),
                "difference": list(paired_interval(drifted, text)),
                "kl": 0.0191,
            },
        },
        "cost": {
            "tokens": {"search": 7_654_321, "selection": 432_100, "report": 1_234_567},
            "seconds": {"search": 3601.0, "selection": 59.96, "report": 700.0},
            "evaluations": 61,
            "failed": 2,
            "dropped": sum(not one["complete"] and one["error"] is None for one in trials),
        },
    }


def factors_of(number: int) -> list[float]:
    """Those of trial `number`: the identity, two uniform ones, and others."""
    if number < 3:
        return [(1.0, 0.8, 1.2)[number]] * LAYERS
    return [1.0 + 0.001 * number * layer for layer in range(LAYERS)]


def drawn_trials(rng: np.random.Generator) -> list[dict[str, Any]]:
    """The identity, two uniform ones, and others that gain with the damage they do, or are dropped, or fail."""
    trials = []
    tokens = 0
    for number in range(61):
        damage = 0.0 if number == 0 else float(rng.normal(0.003, 0.004) + 0.4 * (rng.random() < 0.1))
        complete = number < 3 or bool(rng.random() < 0.7)
        gain = 0.0 if number == 0 else 0.03 * number / 60 + 2 * damage * (damage < 0.1) - 12 * damage**2
        tokens += 120_000 if complete else 30_000
        failed = number in (20, 31)
        kl = 4 * abs(damage)
        trials.append(
            {
                "trial": number,
                "generation": number // 16,
                "kind": "score",
                "score": None if failed else -0.48 + float(gain) - 2.0 * max(0.0, damage) - 0.5 * kl,
                "penalty": 2.0 * max(0.0, damage) + 0.5 * kl,
                "complete": complete and not failed,
                "contexts": 40 if complete else 8,
                "damage": None if failed else damage,
                "kl": None if failed else kl,
                "tokens": tokens,
                "error": "OutOfMemoryError: 2 GiB asked for" if failed else None,
                "layer_rope_scaling": factors_of(number),
            }
        )
    return trials


class Page(HTMLParser):
    """A page as its reader sees it: text, rows of tables, tags in order, addresses. Fails on tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [(tag, value or "") for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if {"td", "th"} & {*self._open}:
            self.rows[-1][-1] += ("|" if "small" in self._open else "") + data


def write(result: Any, run: Path) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return run


def report(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def page_of(result: Any, run: Path) -> Page:
    done = report(write(result, run))
    assert done.exit_code == 0, done.output
    return Page((run / "report" / "report.html").read_text(encoding="utf-8"))


def text_page_of(result: Any, run: Path, figures_of: Path) -> Page:
    """Where the figures do not matter, those of another run do."""
    figures = {path.stem: path for path in (figures_of / "report").glob("*.png")}
    return Page(render(load_result(write(result, run)), figures))


def minus(text: str) -> str:
    return text.replace("-", "−")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write(synthetic(), tmp_path_factory.mktemp("report") / "my run")
    assert report(run).exit_code == 0
    return run


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page((run / "report" / "report.html").read_text(encoding="utf-8"))


def test_every_score_by_position_is_in_its_row_with_its_interval(page: Page) -> None:
    result = synthetic()
    for task, scores in zip(result["tasks"], result["report"]["tasks"], strict=True):
        unit = "place {}" if task["position_unit"] == "place" else "{} %"
        names = [*(unit.format(position) for position in task["positions"]), "mean"]
        for i, name in enumerate(names):
            row = [name]
            for metric, form, factor in (("accuracy", ".1f", 100), ("logprob", ".3f", 1)):
                for who in ("base", "lpes", "difference"):
                    found = scores[who][metric]
                    sign = "+" if who == "difference" else ""
                    numbers = found["mean"] if name == "mean" else found["by_position"][i]
                    mean, low, high = (minus(format(factor * one, sign + form)) for one in numbers)
                    row.append(f"{mean}|{low} to {high}")
            assert page.rows.count(row) == 1, row
        for name, what in (("worst position", "minimum"), ("best less worst", "spread")):
            a, b, c, d = (scores[who][metric][what] for metric in ("accuracy", "logprob") for who in ("base", "lpes"))
            accuracy = [f"{100 * a:.1f}", f"{100 * b:.1f}", f"{100 * (b - a):+.1f}"]
            row = [name, *map(minus, [*accuracy, f"{c:.3f}", f"{d:.3f}", f"{d - c:+.3f}"])]
            assert page.rows.count(row) == 1, row


def test_every_finalist_cost_factor_and_failure_is_in_its_row(page: Page) -> None:
    result = synthetic()
    for one in result["selection"]["finalists"]:
        numbers = [f"{one['search_score']:.4f}", f"{one['selection_score']:.4f}", f"{one['damage']:+.4f}"]
        words = ["yes" if one[name] else "no" for name in ("allowed", "chosen")]
        assert page.rows.count([one["label"], *map(minus, numbers), f"{one['kl']:.4f}", *words]) == 1
    assert ["search", "7,654,321", "1 h 00 min"] in page.rows
    assert ["selection", "432,100", "60.0 s"] in page.rows
    assert ["report", "1,234,567", "12 min"] in page.rows
    assert ["all", "9,320,988", "1 h 23 min"] in page.rows
    assert ["2", "20, 31", "OutOfMemoryError: 2 GiB asked for"] in page.rows
    factors = [f"{one:.4f}" for one in result["layer_rope_scaling"]]
    assert ["0–7", *factors[:8]] in page.rows
    assert ["8–11", *factors[8:]] in page.rows
    assert ["factor", "1.0500", "0.9000", "0.8500", "0.8500"] in page.rows
    assert [result["tasks"][1]["spec"], "0", "60", "300", "20", "0.400", "0, 50, 100 %"] in page.rows


def test_sentences_hold_verdict_drift_cost_settings_and_the_command(page: Page) -> None:
    result = synthetic()
    text = result["report"]["text"]
    mean, low, high = (minus(f"{one:+.4f}") for one in text["difference"])
    gain = result["report"]["tasks"][0]["difference"]["logprob"]["mean"]
    dropped = result["cost"]["dropped"]
    complete = sum(one["complete"] for one in result["trials"])
    for sentence in (
        result["message"],
        f"On 300 unseen contexts of {result['tasks'][1]['title']}, each asked at 3 gold positions",
        f"({gain[0]:+.3f}, 95\xa0% interval {gain[1]:+.3f} to {gain[2]:+.3f})",
        minus(f"{text['base']:.4f} nats for the base model and {text['lpes']:.4f} for LPES: "),
        f"{mean} (95\xa0% interval {low} to {high}; below 0 is damage)",
        "a KL divergence of 0.0191 nats a token",
        f"1 h 23 min for 61 evaluations and the comparison: {complete} trials were scored on all contexts, {dropped} ",
        "no more than 0.005 nats a token",
        f"How the search ended: {result['ended']}.",
        result["command"],
        "arXiv 2606.27705",
    ):
        assert sentence in page.text, sentence
    for part in (result["settings"], result["environment"], result["base"]):
        for name in part:
            assert name.replace("_", " ") in page.text
    assert '["kv", "mdqa"]' in page.text


def test_the_price_of_choosing_is_what_the_report_set_does_not_confirm(run: Path, page: Page, tmp_path: Path) -> None:
    # Searched on one task and chosen by another, only the choice can be checked on the report set.
    assert (
        "+0.0612; on the selection set, of other tasks, on which it was chosen among the finalists, +0.04" in page.text
    )
    assert (
        "of the same tasks, which had no say, +0.0431: the selection's own number was too good by 0.0068" in page.text
    )
    result = synthetic()
    for task in result["tasks"]:
        task["contexts"] = {"search": 40, "selection": 40, "report": 200}
    text = text_page_of(result, tmp_path, run).text
    assert "on the report set, which had no say, +0.0431: the search's own number was too good by 0.0181" in text
    result["selection"]["gain"] = {"search": 0.01, "selection": -0.002, "report": 0.01}
    text = text_page_of(result, tmp_path, run).text
    assert "−0.0020; on the report set, which had no say, +0.0100: the search's own number was not too good" in text


def test_the_page_stands_alone(run: Path, page: Page) -> None:
    html = (run / "report" / "report.html").read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>")
    assert not {"script", "iframe", "object", "embed", "base", "form", "video", "audio", "svg"} & {*page.tags}
    assert not re.search(r"url\(|@import|\son\w+=", html)
    for tag, address in page.addresses:
        if tag == "a" and address.startswith("#"):
            assert address[1:] in page.ids
        elif tag == "a":
            assert address == "https://arxiv.org/abs/2606.27705"
        else:
            assert address.startswith("data:")
    assert "Content-Security-Policy" in html and "prefers-color-scheme: dark" in html and "@media print" in html


def test_figures_are_whole_pictures_and_the_page_holds_the_same(run: Path, page: Page) -> None:
    from matplotlib.image import imread

    names = ["factors", "positions-1", "positions-2", "frontier", "convergence"]
    out = run / "report"
    assert {path.name for path in out.iterdir()} == {"report.html", *(f"{name}.png" for name in names)}
    inside = [base64.b64decode(address.split(",")[1]) for tag, address in page.addresses if tag == "img"]
    assert inside == [(out / f"{name}.png").read_bytes() for name in names]
    for name in names:
        # 300 dots an inch at 5 inches and more.
        assert min(png_size(out / f"{name}.png")) >= 1000
        assert np.asarray(imread(out / f"{name}.png"))[..., :3].std() > 0.02


def test_paths_as_json_another_directory_and_a_second_time(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "er"
    for _ in range(2):
        done = report(run, "--out", out, "--json")
        assert done.exit_code == 0, done.output
        paths = json.loads(done.stdout)
        assert paths["report"] == str(out / "report.html")
        assert sorted([paths["report"], *paths["figures"]]) == sorted(str(path) for path in out.iterdir())
    first = (run / "report" / "report.html").read_bytes()
    assert (out / "report.html").read_bytes() == first
    (tmp_path / "file").write_text("")
    done = report(run, "--out", tmp_path / "file")
    assert done.exit_code == 2 and "give --out a directory" in done.stderr


def test_a_winner_that_was_not_kept_is_called_so(run: Path, tmp_path: Path) -> None:
    result = synthetic()
    result |= {"verdict": "uncertain", "layer_rope_scaling": [1.0] * LAYERS, "curve": None}
    page = page_of(result, tmp_path / "lost")
    assert "The identity was kept" in page.text
    assert "those of the search's winner, which was not kept" in page.text
    assert ["base", "winner, not kept", "difference"] * 2 in page.rows
    assert not any(row[0] == "factor" for row in page.rows)
    for one in result["selection"]["finalists"]:
        one["chosen"] = one is result["selection"]["finalists"][0]
    page = text_page_of(result, tmp_path / "identity", run)
    assert "The search's winner is the identity itself" in page.text
    assert ["base", "identity", "difference"] * 2 in page.rows


def changed(value: Any, change: Callable[[Any], Any], name: str = "") -> Any:
    """The same JSON value with `change` made to each leaf, but for those that other things are looked up by."""
    if isinstance(value, dict):
        return {key: changed(item, change, key) for key, item in value.items()}
    if isinstance(value, list):
        return [changed(item, change, name) for item in value]
    kept = ("version", "verdict", "layer_rope_scaling", "positions", "trial", "generation", "points")
    return value if name in kept else change(value)


def test_hostile_names_are_text_and_nothing_else(page: Page, tmp_path: Path) -> None:
    plain = synthetic()
    hostile = changed(plain, lambda leaf: HOSTILE if isinstance(leaf, str) else leaf)
    for trial, before in zip(hostile["trials"], plain["trials"], strict=True):
        trial["kind"] = before["kind"]
    hostile["settings"] = {HOSTILE + name: value for name, value in hostile["settings"].items()}
    found = page_of(hostile, tmp_path / "run")
    assert found.tags == page.tags
    assert found.ids == page.ids
    assert [one for one in found.addresses if one[0] != "img"] == [one for one in page.addresses if one[0] != "img"]
    assert found.text.count(HOSTILE) > 25


def test_unknown_numbers_are_dashes(tmp_path: Path) -> None:
    unknown = changed(synthetic(), lambda leaf: None if isinstance(leaf, float) else leaf)
    page = page_of(unknown, tmp_path / "run")
    assert [*["–"] * 7][1:] == [cell.split("|")[0] for cell in next(row for row in page.rows if row[0] == "place 8")][
        1:
    ]
    assert "No trial's damage was measured" in page.text and "The scores are not known" in page.text
    assert "What the choice cost is not known" in page.text
    assert not re.search(r"\b(nan|None|inf)\b", page.text)
    assert not (tmp_path / "run" / "report" / "frontier.png").exists()


def test_a_search_without_a_leash_uniform_ones_or_failures_is_reported(tmp_path: Path) -> None:
    result = synthetic()
    result["objective"] |= {"leash": 0.0, "leash_kl": 0.0}
    result["trials"] = [one for one in result["trials"] if one["error"] is None][:1]
    result["convergence"] = result["convergence"][:1]
    result["selection"]["finalists"] = []
    result["settings"] = {}
    del result["cost"]["seconds"]
    page = page_of(result, tmp_path / "run")
    assert "less a penalty" not in page.text and "A trial that fails never wins" not in page.text


def test_the_frontier_gives_the_price_of_drift_back() -> None:
    result = synthetic()
    result["identity_score"] = -1.0
    mixed, low, level = [0.9] * (LAYERS - 1) + [1.0], [0.8] * LAYERS, [1.0] * LAYERS
    blank = {"kind": "score", "complete": True, "error": None, "tokens": 1, "penalty": 0.0, "layer_rope_scaling": mixed}
    result["trials"] = [
        blank | {"score": -1.0, "damage": 0.0, "layer_rope_scaling": level},
        blank | {"score": -0.9, "damage": 0.05, "penalty": 0.2},
        blank | {"score": -0.8, "damage": -0.01, "layer_rope_scaling": low},
        blank | {"score": 9.0, "damage": 0.0, "complete": False},
        blank | {"score": 9.0, "damage": 0.0, "kind": "gradient"},
        blank | {"score": -0.5, "damage": None, "penalty": None},
    ]
    frontier = frontier_of(result)
    assert frontier is not None
    assert np.allclose(frontier.trials, [(0.0, 0.0), (0.05, 0.3), (-0.01, 0.2)])
    assert np.allclose(frontier.front, [(-0.01, 0.2), (0.05, 0.3)])
    assert frontier.names == [(frontier.trials[2], "0.8")]
    # A finalist stands where its trial does; its damage on the selection's text is not in the picture.
    named = {"label": "?", "search_score": 0.0, "selection_score": 0.0, "damage": 0.9, "kl": 0.9, "allowed": True}
    result["selection"]["finalists"] = [
        named | {"layer_rope_scaling": level, "chosen": False},
        named | {"layer_rope_scaling": mixed, "chosen": True},
        named | {"layer_rope_scaling": low, "chosen": False},
        named | {"layer_rope_scaling": [0.7] * LAYERS, "chosen": False},
    ]
    frontier = frontier_of(result)
    assert frontier is not None
    assert frontier.marked == {
        "identity": [(0.0, 0.0)],
        "uniform factors": [frontier.trials[2]],
        "finalists": [frontier.trials[2]],
        "winner": [frontier.trials[1]],
    }


def test_finalists_stand_on_the_line_of_convergence_where_they_were_the_best_of_their_time() -> None:
    result = synthetic()
    finalists = result["selection"]["finalists"]
    blank = {"kind": "score", "complete": True, "error": None, "damage": 0.0, "kl": 0.0, "penalty": 0.0}
    result["trials"] = [
        blank | {"score": score, "tokens": tokens, "layer_rope_scaling": finalists[place]["layer_rope_scaling"]}
        for score, tokens, place in ((-0.5, 90, 0), (-0.4, 180, 2), (-0.45, 270, 1))
    ]
    result["convergence"] = [[100, -0.5], [300, -0.4], [400, -0.4]]
    assert found_at(result) == {"identity": [(100, -0.5)], "finalists": [(270, -0.45)], "winner": [(300, -0.4)]}


def test_pareto_front_is_what_pairwise_comparison_leaves() -> None:
    rng = np.random.default_rng(4)
    for size in (0, 1, 2, 5, 40):
        for _ in range(20):
            # A coarse grid, so that equal values and equal points occur.
            trials = [(float(a), float(b)) for a, b in rng.integers(-3, 8, (size, 2))]
            left = {
                one
                for one in trials
                if not any(other[0] <= one[0] and other[1] >= one[1] and other != one for other in trials)
            }
            assert pareto_front(trials) == sorted(left)


def error_of(run: Path) -> str:
    done = report(run)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert not (run / "report").exists()
    return done.stderr


def test_a_run_that_has_not_ended_is_told_how_to_go_on(tmp_path: Path) -> None:
    assert "has not ended" in error_of(tmp_path) and "--resume" in error_of(tmp_path)
    assert "is not a directory" in error_of(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "[" * 100_000, '"text"', "{}", '{"version": 2}', "\udcff\udcfe"]
)
def test_a_file_that_is_no_result_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "result.json" in error_of(tmp_path)


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "cost is missing": lambda result: result.pop("cost"),
    "base is a JSON list": lambda result: result.update(base=[]),
    "tasks[0].positions[2] is a JSON str": lambda result: result["tasks"][0]["positions"].__setitem__(2, "8"),
    "seconds is not a number": lambda result: result.update(seconds="long"),
    "identity_score is not a number": lambda result: result.update(identity_score=True),
    "report.text.difference has 2 items, not 3": lambda result: result["report"]["text"]["difference"].pop(),
    "report.tasks has 1 items, not 2": lambda result: result["report"]["tasks"].pop(),
    "report.tasks[1].lpes.logprob has not one": lambda r: r["report"]["tasks"][1]["lpes"]["logprob"][
        "by_position"
    ].pop(),
    "trials[3].error is a JSON int": lambda result: result["trials"][3].update(error=3),
    "verdict is 'good'": lambda result: result.update(verdict="good"),
    "tasks[0].too_long[0] is not a number": lambda result: result["tasks"][0].update(too_long={"report": "many"}),
    "cost.seconds.report is missing": lambda result: result["cost"]["seconds"].pop("report"),
    "curve.points is missing": lambda result: result.update(curve={}),
    "layer 1 has None": lambda result: result["layer_rope_scaling"].__setitem__(1, None),
    "11 factors for a model of 12 layers": lambda result: result["selection"]["finalists"][0][
        "layer_rope_scaling"
    ].pop(),
    "convergence[0][1] is not a number": lambda result: result.update(convergence=[[1, []]]),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_damage_is_named_where_it_is(said: str, tmp_path: Path) -> None:
    result = copy.deepcopy(synthetic())
    load_result(write(result, tmp_path))
    DAMAGE[said](result)
    assert said in error_of(write(result, tmp_path))


def test_each_field_that_goes_missing_is_named(tmp_path: Path) -> None:
    whole = synthetic()
    del whole["cost"]["seconds"]  # as of runs that do not know it
    places = [(key,) for key in whole] + [
        (a, b) for a in ("report", "selection", "cost", "objective") for b in whole[a]
    ]
    for place in places:
        result = copy.deepcopy(whole)
        holder = result if len(place) == 1 else result[place[0]]
        del holder[place[-1]]
        with pytest.raises(InputError, match=f"{re.escape('.'.join(place))} is missing"):
            load_result(write(result, tmp_path))


def test_the_report_needs_no_torch(run: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom lpes_bake.cli import main\n"
        f"try:\n    main(['report', {str(run)!r}, '--out', {str(tmp_path)!r}], prog_name='lpes-bake')\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "assert not {'torch', 'transformers'} & {*sys.modules}, 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
