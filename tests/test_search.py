"""`lpes-bake search` on tiny models: what a run leaves behind, how it is judged, how it survives, what it refuses."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from lpes_bake.cli import main
from lpes_bake.factors import load_factors
from lpes_bake.plan import make_plan, trials_at_most
from lpes_bake.report import load_result
from lpes_bake.run import search
from lpes_bake.search.curve import decode
from lpes_bake.search.errors import InputError
from lpes_bake.search.evaluator import Evaluator
from lpes_bake.search.scoring import Scorer, Scores
from lpes_bake.search.study import StudySettings, Trial
from lpes_bake.search.tasks import PARTS
from lpes_bake.search.units import Result, Unit
from lpes_bake.settings import SearchSettings
from tests.runs import (
    LAYERS,
    Command,
    Small,
    digests,
    invoke,
    one_line,
    records,
    without_date,
    write_mdqa,
    write_own,
    write_small,
)

IDENTITY = (1.0,) * LAYERS


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what comes before the report: drawing it takes longer than all the rest."""
    monkeypatch.setattr("lpes_bake.run.write_report", lambda out: None)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return write_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def whole(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the real command that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "run"
    before = digests(small.model)
    command = [sys.executable, "-m", "lpes_bake", "search", str(small.model), "--out", str(out), *small.options()]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["run"] == str(out) and printed["verdict"] == "better"
    assert printed["layer_rope_scaling"] == without_date(out)["layer_rope_scaling"]
    assert digests(small.model) == before
    return out


def content_of(out: Path) -> dict[str, Any]:
    """result.json but for what differs from run to run."""
    content: dict[str, Any] = json.loads((out / "result.json").read_text())
    for name in ("date", "seconds", "command"):
        del content[name]
    return content


def test_a_run_holds_all_its_files(whole: Path) -> None:
    assert {path.name for path in whole.iterdir()} == {
        *("settings.json", "journal.jsonl", "factors.json", "result.json", "report")
    }
    assert (whole / "report" / "report.html").read_text().startswith("<!DOCTYPE html>")
    pictures = list((whole / "report").glob("*.png"))
    assert pictures and all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_factors_json_says_where_the_factors_come_from(whole: Path) -> None:
    factors = load_factors(whole)
    assert factors.curve is not None and factors.search is not None and factors.scores is not None
    assert factors.base is not None and factors.base["num_hidden_layers"] == LAYERS
    assert factors.layer_rope_scaling == decode(factors.curve["points"], LAYERS) != IDENTITY
    assert factors.search["population"] == 6 and factors.search["seed"] == 0
    searched = [record["unit"] for record in records(whole) if record["unit"]["part"] == "search"]
    assert searched[0]["factors"] == list(IDENTITY)
    assert factors.search["evaluations"] == len({tuple(unit["factors"]) for unit in searched}) == 18
    assert "better than the base model on unseen questions" in factors.search["verdict"]


def test_the_command_that_reproduces_it_is_written_down(whole: Path, small: Small) -> None:
    command = shlex.split(json.loads((whole / "result.json").read_text())["command"])
    assert command[:5] == ["lpes-bake", "search", str(small.model), "--out", str(whole)]
    again = {name: command[command.index(name) + 1] for name in command[5::2]}
    # What is at its default anyway, gradients' settings apart, need not be said.
    assert again["--population"] == "6" and again["--uniform"] == "0.5,0.8" and again["--text"] == str(small.text)
    assert set(again) <= set(small.options())


def test_no_unit_is_computed_twice(whole: Path) -> None:
    units = [json.dumps(record["unit"]) for record in records(whole)]
    assert len(units) == len(set(units))


def logprobs(out: Path, part: str, factors: list[float]) -> Any:
    """(contexts, positions) of one candidate, put together from the journal."""
    found = [
        (record["unit"]["start"], record["result"]["logprob"])
        for record in records(out)
        if record["unit"]["part"] == part and record["unit"]["task"] == 0 and record["unit"]["factors"] == factors
    ]
    return np.concatenate([np.array(block) for _, block in sorted(found)])


def test_the_finalists_are_the_best_of_the_search_and_the_winner_is_the_best_of_the_selection(whole: Path) -> None:
    content = content_of(whole)
    identity, *others = content["selection"]["finalists"]
    assert identity["label"] == "identity" and len(others) == 5
    complete = sorted((one["score"] for one in content["trials"] if one["complete"]), reverse=True)
    # The identity is among the complete ones; there is no leash, so scores are plain means.
    assert [one["search_score"] for one in others] == complete[:5]
    for one in (identity, *others):
        factors = one["layer_rope_scaling"]
        assert one["search_score"] == pytest.approx(logprobs(whole, "search", factors).mean())
        assert one["selection_score"] == pytest.approx(logprobs(whole, "selection", factors).mean())
    (chosen,) = [one for one in others if one["chosen"]]
    assert chosen["selection_score"] == max(one["selection_score"] for one in others) > identity["selection_score"]
    assert chosen["layer_rope_scaling"] == content["layer_rope_scaling"]


def test_the_comparison_is_of_what_nobody_chose_by(whole: Path) -> None:
    content = content_of(whole)
    base, lpes = (logprobs(whole, "report", one) for one in (list(IDENTITY), content["layer_rope_scaling"]))
    assert base.shape == (16, 3)
    (task,) = content["report"]["tasks"]
    assert [one[0] for one in task["base"]["logprob"]["by_position"]] == pytest.approx(base.mean(0).tolist())
    mean, low, high = task["difference"]["logprob"]["mean"]
    assert mean == pytest.approx((lpes - base).mean()) == pytest.approx(content["selection"]["gain"]["report"])
    assert 0 < low < mean < high
    assert f"{mean:+.4f}, 95 % interval" in content["message"] and "16 contexts" in content["message"]
    scores = without_date(whole)["scores"]
    assert scores["tasks"][0]["difference"] == task["difference"] and scores["text"] == content["report"]["text"]
    assert scores["text"]["paragraphs"] == 6


def test_tokens_are_those_of_all_units_by_phase(whole: Path) -> None:
    cost = content_of(whole)["cost"]
    for part in PARTS:
        own = [record["result"]["tokens"] for record in records(whole) if record["unit"]["part"] == part]
        assert cost["tokens"][part] == sum(own)


def test_the_report_shows_what_came_out_and_what_to_do_next(whole: Path, small: Small) -> None:
    result = invoke("search", small.model, "--out", whole, "--resume", "--quiet")
    assert result.exit_code == 0 and result.stderr == ""
    for words in (
        "Key-value retrieval, 4 pairs: 16 unseen contexts",
        "difference, 95 % interval",
        "Short plain text (6 paragraphs)",
        "18 evaluations",
        "all 3 generations are done",
        "where nobody looked before",
        f"lpes-bake export {small.model} {whole / 'factors.json'} OUT",
    ):
        assert words in result.stdout, words


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "gradient"}, {"optimizer": "gradient", "space": "free"}, {"optimizer": "hybrid", "warmup": 1}],
    ids=["gradient", "free", "hybrid"],
)
def test_a_run_of_each_kind_can_be_shown_reported_and_exported(
    changes: dict[str, Any], small: Small, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    # A learning rate by which steps are seen, no race that stops the gradient's checks; the winner, whatever it is.
    changes = {**changes, "race": "off", "learning_rate": 0.3, "uniform": ""}
    before = digests(small.model)
    content = small.run(out, "--force", **changes)
    assert load_result(out)["trials"] == content["trials"]
    assert content["trials"][-1]["tokens"] == content["cost"]["tokens"]["search"]
    kinds = {one["kind"] for one in content["trials"]}
    assert kinds == {"score", "gradient"} and len(content["trials"]) <= 22
    factors = load_factors(out)
    assert factors.layer_rope_scaling == tuple(content["layer_rope_scaling"]) != IDENTITY
    if changes.get("space") == "free":
        assert factors.curve is None
    else:
        assert factors.curve is not None
        assert decode(factors.curve["points"], LAYERS) == factors.layer_rope_scaling
    assert all(0.5 <= one <= 2 for one in factors.layer_rope_scaling)
    shown = invoke("show", out)
    assert shown.exit_code == 0 and f"search: optimizer {changes['optimizer']}" in shown.stdout
    assert invoke("report", out, "--out", tmp_path / "page").exit_code == 0
    assert (tmp_path / "page" / "report.html").is_file()
    assert invoke("export", small.model, out / "factors.json", tmp_path / "baked").exit_code == 0
    assert load_factors(tmp_path / "baked").layer_rope_scaling == factors.layer_rope_scaling
    assert digests(small.model) == before


# Verdicts


@pytest.mark.usefixtures("no_pictures")
def test_a_search_that_finds_nothing_says_so_and_writes_the_identity(small: Small, tmp_path: Path) -> None:
    # A random model gives no right answer of eight digits, whatever its factors: nothing beats the identity.
    content = small.run(tmp_path / "run", "--force", task="kv,pairs=4,key_width=8", fitness="accuracy")
    assert content["verdict"] == "identity" and "found nothing better than the base model" in content["message"]
    factors = load_factors(tmp_path / "run")
    assert factors.layer_rope_scaling == IDENTITY
    exported = invoke("export", small.model, tmp_path / "run", tmp_path / "baked")
    assert exported.exit_code == 0 and "all factors are 1" in exported.output
    assert "All factors are 1" in (tmp_path / "baked" / "README.md").read_text(encoding="utf-8")
    again = small.search(tmp_path / "run", "--resume", "--force", task="kv,pairs=4,key_width=8", fitness="accuracy")
    assert "There is nothing to export" in again.output and "lpes-bake export" not in again.output
    assert "best found" in again.output and "LPES" not in again.output
    assert "give the model that was searched" in invoke("eval", tmp_path / "run").output
    assert factors.curve is not None and decode(factors.curve["points"], LAYERS) == IDENTITY
    assert factors.scores is not None and "lpes" not in factors.scores["tasks"][0]
    assert "base" in factors.scores["tasks"][0] and "lpes" not in factors.scores["text"]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("verdict", "changes", "words"),
    [
        ("uncertain", {"seed": 3, "report_contexts": 4}, "does not beat the base model beyond noise"),
        (
            "identity",
            {"seed": 1, "contexts": 2, "selection_contexts": 2, "report_contexts": 3},
            "is not better than the base model on unseen questions",
        ),
    ],
)
def test_a_winner_that_does_not_win_on_unseen_questions_is_written_by_force_only(
    verdict: str, changes: dict[str, Any], words: str, small: Small, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    content = small.run(out, **changes)
    assert content["verdict"] == verdict and words in content["message"]
    mean, low, _ = content["report"]["tasks"][0]["difference"]["logprob"]["mean"]
    assert low < 0 and (mean > 0) == (verdict == "uncertain")
    assert "factors.json holds the identity" in content["message"]
    assert load_factors(out).layer_rope_scaling == IDENTITY == tuple(content["layer_rope_scaling"])
    before = (out / "journal.jsonl").read_bytes()
    forced = small.run(out, "--resume", "--force", **changes)
    assert forced["verdict"] == verdict and "as was wished (--force)" in forced["message"]
    (winner,) = [one for one in forced["selection"]["finalists"] if one["chosen"]]
    factors = load_factors(out)
    assert list(factors.layer_rope_scaling) == winner["layer_rope_scaling"] == forced["layer_rope_scaling"]
    assert factors.layer_rope_scaling != IDENTITY
    assert factors.scores is not None and "lpes" in factors.scores["tasks"][0]
    assert (out / "journal.jsonl").read_bytes() == before


@pytest.mark.usefixtures("no_pictures")
def test_what_costs_too_much_on_short_text_does_not_win(whole: Path, small: Small, tmp_path: Path) -> None:
    damages = [one["damage"] for one in content_of(whole)["selection"]["finalists"]]
    content = small.run(tmp_path / "none", max_damage=0)
    assert content["verdict"] == "identity"
    assert "5 of its finalists cost more on short text than max_damage allows" in content["message"]
    # The cheapest alone is allowed as it is; of others, a part may be.
    limit = min(damages[1:]) * 1.001
    finalists = small.run(tmp_path / "one", max_damage=limit)["selection"]["finalists"]
    assert all(one["allowed"] == (one["damage"] <= limit) for one in finalists)
    whole_ones = [one for one in finalists if "% of it" not in one["label"]]
    assert [one["damage"] for one in whole_ones] == damages
    assert [one["damage"] for one in whole_ones if one["allowed"]] == [0, min(damages[1:])]
    allowed = [one for one in finalists if one["allowed"]]
    assert max(allowed, key=lambda one: one["selection_score"])["chosen"]


@pytest.mark.usefixtures("no_pictures")
def test_the_leash_is_the_price_of_damage(small: Small, tmp_path: Path) -> None:
    out = tmp_path / "run"
    content = small.run(out, leash=0.5, leash_kl=2, race="off", generations=1)
    units = [record["unit"] for record in records(out) if record["unit"]["part"] == "search"]
    candidates = dict.fromkeys(tuple(unit["factors"]) for unit in units)
    assert len(content["trials"]) == len(candidates) == 6
    for trial, factors in zip(content["trials"], candidates, strict=True):
        mean = logprobs(out, "search", list(factors)).mean()
        assert trial["score"] == pytest.approx(mean - 0.5 * max(0, trial["damage"]) - 2 * trial["kl"])
    assert any(one["damage"] > 0 for one in content["trials"])


# Questions


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tasks that read files, by name."""
    folder = tmp_path_factory.mktemp("files")
    return {
        "mdqa": f"mdqa:{write_mdqa(folder / 'mdqa.jsonl')},documents=3",
        "qa": f"qa:{write_own(folder / 'own.jsonl')}",
    }


def test_the_three_sets_share_no_question_and_are_as_large_as_asked_for(small: Small, files: dict[str, str]) -> None:
    settings = SearchSettings(
        task=("kv,pairs=2,key_width=1", files["mdqa"]),
        selection_task=(files["qa"],),
        study=StudySettings(contexts=3, gradient_contexts=2),
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


@pytest.fixture(scope="module")
def many(small: Small, files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on several tasks, chosen by another one, in another prompt format."""
    out = tmp_path_factory.mktemp("many") / "run"
    small.run(
        out,
        task=["kv,pairs=2,key_width=1", files["mdqa"]],
        selection_task=[files["qa"]],
        prompt_format="vicuna",
        contexts=2,
        selection_contexts=2,
        report_contexts=2,
        population=2,
        generations=1,
        uniform="",
    )
    return out


def test_several_tasks_are_searched_together_and_others_can_choose(many: Path, files: dict[str, str]) -> None:
    content = content_of(many)
    specs = ["kv,pairs=2,key_width=1", files["mdqa"], files["qa"]]
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


def test_the_header_names_all_that_decides_the_result(many: Path, small: Small, files: dict[str, str]) -> None:
    stored = json.loads((many / "settings.json").read_text())
    first = json.loads((many / "journal.jsonl").read_text().splitlines()[0])["record"]
    assert first["settings"] == stored
    assert set(SearchSettings().flat()) <= set(stored)
    assert stored["prompt_format"] == "vicuna" and stored["dtype"] == "float32" and stored["device"] == "cpu"
    assert stored["questions"]["2"]["file"] == "mdqa.jsonl" and len(stored["questions"]["2"]["sha256"]) == 16
    assert stored["questions"]["1"] == {"task": "kv", "pairs": 2, "key_width": 1, "positions": [0, 1]}
    assert len(stored["weights"]) == len(stored["paragraphs"]) == 16


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


# Being stopped


def lines_of(out: Path, count: int) -> Callable[[], bool]:
    journal = out / "journal.jsonl"
    return lambda: journal.exists() and journal.read_bytes().count(b"\n") >= count


def part_of(out: Path, part: str) -> Callable[[], bool]:
    journal = out / "journal.jsonl"
    return lambda: journal.exists() and f'"part": "{part}"'.encode() in journal.read_bytes()


MOMENTS: dict[str, Callable[[Path], Callable[[], bool]]] = {
    "begun": lambda out: lines_of(out, 1),
    "searching": lambda out: lines_of(out, 25),
    "choosing": lambda out: part_of(out, "selection"),
    "comparing": lambda out: part_of(out, "report"),
    "drawing": lambda out: (out / "result.json").exists,
}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_to_the_same_factors(moment: str, whole: Path, small: Small, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = Command(tmp_path, "search", small.model, "--out", out, *small.options())
    command.stop_once(MOMENTS[moment](out))
    code, printed, errors = command.finish()
    assert code == -signal.SIGKILL and printed == "" and "Traceback" not in errors
    assert not (out / "report" / "report.html").exists()
    assert (out / "factors.json").exists() == (moment == "drawing")
    done = len((out / "journal.jsonl").read_bytes().splitlines())
    assert done <= len(records(whole)) + 1
    # Options need not be given again.
    resumed = invoke("search", small.model, "--out", out, "--resume", "--json")
    assert resumed.exit_code == 0, resumed.output
    assert without_date(out) == without_date(whole)
    assert content_of(out) == content_of(whole)
    assert [one["unit"] for one in records(out)] == [one["unit"] for one in records(whole)]


@pytest.mark.parametrize(("how", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_a_polite_kill_say_how_to_go_on(
    how: signal.Signals, expected: int, small: Small, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = Command(tmp_path, "search", small.model, "--out", out, *small.options(max_tokens=10**7), "--force")
    command.stop_once(lines_of(out, 4), how)
    code, printed, errors = command.finish()
    assert code == expected and printed == "" and "Traceback" not in errors
    # What is not among the stored settings is given again.
    assert f"lpes-bake search {small.model} --out {out} --resume --max-tokens 10000000 --force\n" in errors
    assert not (out / "factors.json").exists()


def test_resuming_with_other_settings_is_refused_and_names_them(whole: Path, small: Small) -> None:
    before = digests(whole)
    message = one_line(
        invoke("search", small.model, "--out", whole, "--resume", "--population", 8, "--seed", 0, "--over", "worst")
    )
    assert "population: 6 → 8" in message and "over: 'mean' → 'worst'" in message
    assert "generations" not in message and "seed" not in message
    message = one_line(invoke("search", small.model, "--out", whole, "--resume", "--task", "kv,pairs=5,key_width=1"))
    assert "questions.1.pairs: 4 → 5" in message
    message = one_line(invoke("search", small.model, "--out", whole, "--resume", "--preset", "paper"))
    assert "population: 6 → 40" in message and "fitness: 'logprob' → 'accuracy'" in message
    assert digests(whole) == before


def test_resuming_with_another_model_or_weights_is_refused(whole: Path, small: Small, tmp_path: Path) -> None:
    other = Path(shutil.copytree(small.model, tmp_path / small.model.name))
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    message = one_line(invoke("search", other, "--out", whole, "--resume"))
    assert "weights: " in message and "base" not in message
    message = one_line(invoke("search", changed(other, rope_theta=5e5), "--out", whole, "--resume"))
    assert "base.rope.rope_theta: 10000.0 → 500000.0" in message


def test_resuming_with_other_data_or_other_text_is_refused(many: Path, small: Small, tmp_path: Path) -> None:
    out = Path(shutil.copytree(many, tmp_path / "run"))
    stored = json.loads((out / "settings.json").read_text())
    data = Path(stored["task"][1].partition(":")[2].partition(",")[0])
    before = data.read_bytes()
    try:
        data.write_bytes(before.replace(b"legs of 1?", b"feet of 1?"))
        message = one_line(invoke("search", small.model, "--out", out, "--resume"))
    finally:
        data.write_bytes(before)
    assert "questions.2.sha256: " in message and "questions.1" not in message and "questions.3" not in message
    text = small.text.read_bytes()
    try:
        small.text.write_bytes(text.replace(b"Paragraph 1 ", b"Paragraph one "))
        assert "paragraphs: " in one_line(invoke("search", small.model, "--out", out, "--resume"))
    finally:
        small.text.write_bytes(text)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (("--max-evaluations", "8"), "the limit of 8 evaluations is reached"),
        (("--max-tokens", "9000"), "the limit of 9000 tokens is reached"),
    ],
)
def test_a_limit_ends_the_search_with_the_best_so_far_and_without_it_the_run_goes_on(
    limit: tuple[str, str], words: str, whole: Path, small: Small, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    content = small.run(out, *limit)
    assert content["ended"] == words
    assert content["cost"]["evaluations"] <= 8
    assert content["identity_score"] == content_of(whole)["identity_score"]
    best = max(one["score"] for one in content["trials"] if one["complete"])
    assert max(one["search_score"] for one in content["selection"]["finalists"]) == best
    # Stopping is no setting of the run: with a larger limit, or none, it goes on.
    result = (out / "result.json").read_bytes()
    refused = invoke("search", small.model, "--out", out, "--resume", limit[0], 2)
    assert refused.exit_code == 2 and f"more than {limit[0]} 2; give more" in refused.stderr
    assert (out / "result.json").read_bytes() == result
    further = small.run(out, "--resume", "--max-evaluations", "1000")
    assert further["ended"] == "all 3 generations are done"
    assert without_date(out) == without_date(whole)


@pytest.mark.usefixtures("no_pictures")
def test_a_search_out_of_time_ends_with_the_best_so_far_and_goes_on_later(
    whole: Path, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Evaluator.compute

    def slow(self: Evaluator, unit: Unit) -> Result:
        time.sleep(0.05 if unit.part == "search" else 0)
        return real(self, unit)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "compute", slow)
        content = small.run(out, "--max-time", "0.02")
    assert content["ended"] == "the limit of 0.02 minutes is reached"
    assert content["identity_score"] == content_of(whole)["identity_score"]
    assert content["cost"]["evaluations"] < 18 and content["seconds"] >= 1.2
    small.run(out, "--resume")
    assert without_date(out) == without_date(whole)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (("--max-tokens", "1"), "the limit of 1 tokens is reached"),
        (("--max-time", "0.0000001"), "the limit of 1e-07 minutes is reached"),
    ],
)
def test_a_limit_before_the_model_itself_is_scored_is_an_error_that_says_so(
    limit: tuple[str, str], words: str, small: Small, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    tasks = ["kv,pairs=2,key_width=1", "kv,pairs=3,key_width=1"]
    done = small.search(out, *limit, task=tasks)
    assert done.exit_code == 1 and "Traceback" not in done.output
    assert f"{words}, before the model itself" in done.stderr and "--resume" in done.stderr
    assert not (out / "factors.json").exists()
    small.run(out, "--resume", "--max-evaluations", "3", task=tasks)
    assert load_factors(out).search is not None


# Failures


@pytest.mark.usefixtures("no_pictures")
def test_factors_that_a_model_cannot_take_fail_and_do_not_win(small: Small, tmp_path: Path) -> None:
    # The smallest factor of this grid is 0 when it is rounded, which no model can divide by.
    grid = {"y_low": 0.00001, "y_high": 1, "y_step": 0.99999, "max_step_y": 1, "max_jump_y": 1, "first_spread": 1}
    done = small.search(tmp_path / "run", **grid, uniform="0.00001", generations=2, race="off")
    assert done.exit_code == 0, done.output
    assert "trial 2 failed: ValueError: " in done.stderr
    content = content_of(tmp_path / "run")
    failed = [one for one in content["trials"] if one["error"] is not None]
    assert set(failed[0]["layer_rope_scaling"]) == {0.0} and failed[0]["score"] is None and not failed[0]["complete"]
    assert content["cost"]["failed"] == len(failed) < len(content["trials"])
    assert all(min(one["layer_rope_scaling"]) > 0 for one in content["selection"]["finalists"])
    assert content["identity_score"] is not None


@pytest.mark.usefixtures("no_pictures")
def test_nan_scores_fail_their_trials_only(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scorer.score

    def sometimes(self: Scorer, factors: Any, *arguments: Any) -> Scores:
        scores = real(self, factors, *arguments)
        return scores if set(factors) == {1.0} else replace(scores, logprob=np.full_like(scores.logprob, np.nan))

    monkeypatch.setattr(Scorer, "score", sometimes)
    content = small.run(tmp_path / "run", generations=1, uniform="")
    assert content["verdict"] == "identity" and content["cost"]["failed"] == 5
    assert "found nothing better" in content["message"]


def test_failing_evaluations_stop_the_search_with_the_cause_and_a_mended_run_goes_on(
    whole: Path, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Scorer.score

    def fail(self: Scorer, factors: Any, *arguments: Any) -> Scores:
        if set(factors) != {1.0}:
            raise RuntimeError("the solver gave up\nat step 3")
        return real(self, factors, *arguments)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "score", fail)
        done = small.search(out, "--quiet")
    assert done.exit_code == 1 and "Traceback" not in done.output
    assert "10 trials in a row failed" in done.stderr and "RuntimeError: the solver gave up" in done.stderr
    assert "--resume" in done.stderr and not (out / "factors.json").exists()
    small.run(out, "--resume")
    assert without_date(out) == without_date(whole)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("part", "who", "words"),
    [
        ("search", IDENTITY, "the model itself (all factors 1) cannot be scored: "),
        ("selection", IDENTITY, "the model itself (all factors 1) cannot be scored on the selection contexts: "),
        ("report", IDENTITY, "the model itself (all factors 1) cannot be scored on the report contexts: "),
        ("report", None, "the winner cannot be scored on the report contexts: "),
    ],
)
def test_a_failure_that_nothing_can_go_on_from_ends_the_run_and_is_tried_again(
    part: str,
    who: tuple[float, ...] | None,
    words: str,
    whole: Path,
    small: Small,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    winner = tuple(without_date(whole)["layer_rope_scaling"])
    real = Evaluator.compute

    def fail(self: Evaluator, unit: Unit) -> Result:
        if (unit.part, unit.factors) == (part, who or winner):
            return Result(error="OutOfMemoryError: 2 GiB asked for")
        return real(self, unit)

    # All but what is to fail is known already, so that this takes no time.
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    lines = (whole / "journal.jsonl").read_bytes().splitlines(keepends=True)
    known = [lines[0], *(line for line in lines[1:] if not hits(line, part, who or winner))]
    (out / "journal.jsonl").write_bytes(b"".join(known))
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "compute", fail)
        done = small.search(out, "--resume", "--quiet")
    assert done.exit_code == 1 and "Traceback" not in done.output
    assert f"{words}OutOfMemoryError: 2 GiB asked for" in done.stderr
    small.run(out, "--resume")
    assert without_date(out) == without_date(whole)


def hits(line: bytes, part: str, factors: tuple[float, ...]) -> bool:
    unit = json.loads(line)["record"]["unit"]
    return unit["part"] == part and tuple(unit["factors"]) == factors


# Bad input


def test_a_directory_that_is_not_empty_is_refused(small: Small, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty" in one_line(small.search(tmp_path))
    assert "holds a run; go on with it with --resume" in one_line(small.search(whole))
    assert "is a file" in one_line(small.search(tmp_path / "notes.txt"))
    assert "cannot be written" in one_line(small.search(tmp_path / "notes.txt" / "run"))


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("journal", [None, b"", b'{"crc32": "0000'])
def test_a_run_that_was_killed_before_its_first_record_can_start_again(
    journal: bytes | None, small: Small, tmp_path: Path
) -> None:
    (tmp_path / "settings.json").write_text("{}")
    if journal is not None:
        (tmp_path / "journal.jsonl").write_bytes(journal)
        assert "no run to resume" in one_line(small.search(tmp_path, "--resume"))
    small.run(tmp_path, generations=1, population=2, uniform="")
    assert load_factors(tmp_path).search is not None


def test_resuming_nothing_is_refused(small: Small, tmp_path: Path) -> None:
    assert "no run to resume" in one_line(small.search(tmp_path / "new", "--resume"))


@pytest.mark.parametrize("change", [(b"population", b"popularity"), (b'"journal": 2', b'"journal": 1')])
def test_a_journal_whose_header_is_not_ours_is_refused(
    change: tuple[bytes, bytes], whole: Path, small: Small, tmp_path: Path
) -> None:
    header, rest = (whole / "journal.jsonl").read_bytes().split(b"\n", 1)
    assert change[0] in header
    (tmp_path / "journal.jsonl").write_bytes(header.replace(*change) + b"\n" + rest)
    message = one_line(invoke("search", small.model, "--out", tmp_path, "--resume"))
    assert "does not begin as this version of lpes-bake writes it" in message


def test_a_run_inside_the_model_is_refused(small: Small, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(small.model)
    for out in (small.model / "run", link / "deep" / "run"):
        assert "inside the model's directory" in one_line(small.search(out))
        assert not out.exists()


def test_a_run_that_another_process_has_open_is_refused(whole: Path, small: Small, tmp_path: Path) -> None:
    from lpes_bake.search.journal import Journal

    out = Path(shutil.copytree(whole, tmp_path / "run"))
    with Journal(out / "journal.jsonl"):
        assert "in use by a run that is still going" in one_line(small.search(out, "--resume"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "nonsense"}, "there is no task 'nonsense'; there are: kv"),
        ({"task": "mdqa"}, "give it as mdqa:FILE"),
        ({"task": "kv,size=3"}, "there is no setting 'size'; there are: pairs=16"),
        ({"task": "kv:nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        ({"task": "own.py:Own"}, "own.py does not exist"),
        ({"task": "kv,pairs=4,positions=0/9"}, "gold position 9"),
        ({"task": "mdqa:{mdqa},documents=4"}, '"ctxs" has 3 documents, but 4'),
        ({"task": "mdqa:{mdqa},documents=3", "selection-contexts": "30"}, "for its selection part; asked for 30"),
        ({"task": "qa:{own}", "report-contexts": "70"}, "for its report part; asked for 70"),
        ({"selection-task": "nonsense"}, "there is no task 'nonsense'"),
        ({"optimizer": "nonsense"}, "'nonsense' is not one of 'genetic'"),
        ({"optimizer": "hybrid", "gradient-contexts": "0"}, "gradient_contexts is 0"),
        ({"optimizer": "gradient", "gradient-batch": "9"}, "gradient_contexts is 4"),
        ({"optimizer": "gradient", "steps": "0"}, "steps is 0"),
        ({"fitness": "loss"}, "'loss' is not one of 'logprob'"),
        ({"over": "best"}, "'best' is not one of 'mean'"),
        ({"race": "fair"}, "'fair' is not one of 'probable'"),
        ({"leash": "-1"}, "leash is -1"),
        ({"leash-kl": "nan"}, "leash_kl is nan"),
        ({"max-damage": "-0.1"}, "max_damage is -0.1"),
        ({"max-damage": "inf"}, "max_damage is inf"),
        ({"contexts": "0"}, "contexts is 0"),
        ({"first-block": "0"}, "first_block is 0"),
        ({"selection-contexts": "1"}, "selection_contexts is 1"),
        ({"report-contexts": "1"}, "report_contexts is 1"),
        ({"finalists": "0"}, "finalists is 0"),
        ({"population": "1"}, "population is 1"),
        ({"y-low": "0.52"}, "y_low"),
        ({"uniform": "0.8,x"}, "is not a list of numbers"),
        ({"uniform": "0.8,-1"}, "uniform holds -1.0"),
        ({"seed": "-1"}, "seed is -1"),
        ({"text": "nowhere.txt"}, "nowhere.txt cannot be read"),
        ({"text": "{short}"}, "has 2 different paragraphs"),
        ({"text": "{long}"}, "the paragraph 'wordword"),
        ({"text": "{model}"}, "cannot be read"),
        ({"prompt-format": "chat"}, "no chat template"),
        ({"prompt-format": "nonsense"}, "'nonsense' is not one of 'auto'"),
        ({"device": "nonsense"}, "nonsense"),
        ({"dtype": "int8"}, "'int8' is not one of 'float32'"),
        ({"quantization": "2bit"}, "'2bit' is not one of '4bit'"),
        ({"batch-size": "0"}, "batch_size is 0"),
        ({"max-evaluations": "0"}, "max_evaluations is 0"),
        ({"max-tokens": "-5"}, "max_tokens is -5"),
        ({"max-time": "nan"}, "max_time is nan"),
        ({"preset": "best"}, "'best' is not one of 'default'"),
    ],
    ids=lambda value: " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_in_one_line_before_a_weight_is_read(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], words: str
) -> None:
    monkeypatch.setattr("lpes_bake.plan.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "short.txt").write_text("One.\n\nTwo.")
    (tmp_path / "long.txt").write_text("\n\n".join(f"{'word' * 2100} {i}" for i in range(19)))
    paths = {name: str(tmp_path / f"{name}.txt") for name in ("short", "long")} | {"model": str(small.model)}
    if any("{mdqa}" in value or "{own}" in value for value in change.values()):
        paths |= {"mdqa": str(write_mdqa(tmp_path / "mdqa.jsonl")), "own": str(write_own(tmp_path / "own.jsonl"))}
    changes = {name.replace("-", "_"): value.format(**paths) for name, value in change.items()}
    assert words in one_line(small.search(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"device_map": "nonsense"}, "nonsense"), ({"quantization": "4bit"}, "needs bitsandbytes")],
)
def test_what_only_loading_shows_is_refused_in_one_line_and_leaves_nothing(
    small: Small, tmp_path: Path, change: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where bitsandbytes is not installed.
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert words in one_line(small.search(tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()


def changed(model: Path, **config: object) -> Path:
    """The model with other settings."""
    content = json.loads((model / "config.json").read_text())
    rope = {"rope_parameters": {**content["rope_parameters"], **config}} if "rope_theta" in config else config
    (model / "config.json").write_text(json.dumps({**content, **config, **rope}))
    return model


def test_models_that_cannot_be_searched_are_refused(small: Small, tmp_path: Path) -> None:
    def copy(name: str, **config: object) -> Small:
        return replace(small, model=changed(Path(shutil.copytree(small.model, tmp_path / name)), **config))

    out = tmp_path / "run"
    assert "no such" in one_line(replace(small, model=tmp_path / "nowhere").search(out)).lower()
    narrow = copy("narrow", max_position_embeddings=150)
    assert "too long for the model's 150 positions" in one_line(narrow.search(out))
    gpt2 = copy("gpt2", model_type="gpt2", architectures=["GPT2LMHeadModel"])
    assert "'gpt2'" in one_line(gpt2.search(out))
    assert "give a causal LM" in one_line(copy("bare", architectures=["LlamaModel"]).search(out))
    mute = copy("mute")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (mute.model / name).unlink()
    assert "no tokenizer" in one_line(mute.search(out))
    assert not out.exists()


class Yes(io.BytesIO):
    """A stdin that would say yes to everything, and notes when somebody asks."""

    asked = False

    def read1(self, size: int | None = -1, /) -> bytes:
        self.asked = True
        return super().read1(size)


def test_code_that_a_tokenizer_brings_does_not_run_unless_trusted_and_nobody_is_asked(
    small: Small, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(small.model, tmp_path / "model"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    stdin = Yes(b"y\n" * 9)
    arguments = ["search", str(model), "--out", str(tmp_path / "run"), *small.options()]
    message = one_line(CliRunner().invoke(main, arguments, input=stdin))
    assert "--trust-remote-code" in message and not (tmp_path / "ran").exists()
    assert not stdin.asked


def test_a_broken_input_is_an_input_error_for_callers_too(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        search(str(tmp_path), tmp_path / "run", SearchSettings())


@pytest.mark.usefixtures("no_pictures")
def test_an_exhausted_search_says_so(small: Small, tmp_path: Path) -> None:
    # Two points on three values of y, 2 layers: nine curves, and 200 generations find them all.
    grid = {"control_points": 2, "y_low": 0.95, "y_high": 1.05, "y_step": 0.05}
    steps = {"first_spread": 0.05, "max_step_y": 0.05, "max_jump_y": 0.05}
    content = small.run(
        tmp_path / "run", **grid, **steps, population=20, generations=200, uniform="", contexts=2, report_contexts=2
    )
    assert "exhausted" in content["ended"]


@pytest.mark.usefixtures("no_pictures")
def test_trials_are_told_as_they_come_and_never_more_than_said(small: Small, tmp_path: Path) -> None:
    from lpes_bake.run import Events

    trials: list[Trial] = []
    settings = SearchSettings.from_flat(
        {"task": ["kv,pairs=4,key_width=1"], "contexts": 4, "gradient_contexts": 4, "steps": 5, "check_every": 2}
        | {"population": 4, "warmup": 2, "selection_contexts": 2, "report_contexts": 2, "text": str(small.text)}
    )
    search(str(small.model), tmp_path / "run", settings, events=Events(trial=trials.append))
    assert [one.number for one in trials] == list(range(len(trials)))
    assert len(trials) <= trials_at_most(settings)
    assert trials[0].factors == IDENTITY and not any(one.replayed for one in trials[1:])
