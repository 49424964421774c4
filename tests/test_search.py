"""`lpes-bake search` on tiny models: what a run leaves behind, and how it is judged."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpes_bake.factors import load_factors
from lpes_bake.plan import trials_at_most
from lpes_bake.report import load_result
from lpes_bake.run import search
from lpes_bake.search.curve import decode
from lpes_bake.search.study import Trial
from lpes_bake.search.tasks import PARTS
from lpes_bake.settings import SearchSettings
from tests.runs import IDENTITY, LAYERS, Small, content_of, digests, invoke, records, without_date


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
    # The verdict and the table are of one interval.
    assert f"{mean:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}, 16 contexts" in content["message"]
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


def test_show_says_what_the_factors_gain_and_cost(whole: Path) -> None:
    shown = " ".join(invoke("show", whole).stdout.split())
    content = content_of(whole)
    base, lpes = (logprobs(whole, "report", one) for one in (list(IDENTITY), content["layer_rope_scaling"]))
    assert "Key-value retrieval, 4 pairs, 16 unseen contexts: accuracy +0.0 [" in shown
    assert f", log-probability {(lpes - base).mean():+.3f} [" in shown
    theirs, ours = (content["report"]["text"][who] for who in ("base", "lpes"))
    loss = f"{ours - theirs:+.3f}".replace("-", "−")
    assert f"short text log-probability a token {loss} [" in shown and "6 paragraphs" in shown
    assert f"verdict {content['message']}" in shown


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
    changes = {**changes, "race": "off", "learning_rate": 0.1, "uniform": ""}
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
    assert shown.exit_code == 0 and f"optimizer {changes['optimizer']}, prompt format auto" in shown.stdout
    assert invoke("report", out, "--out", tmp_path / "page").exit_code == 0
    assert (tmp_path / "page" / "report.html").is_file()
    assert invoke("export", small.model, out / "factors.json", tmp_path / "baked").exit_code == 0
    assert load_factors(tmp_path / "baked").layer_rope_scaling == factors.layer_rope_scaling
    assert digests(small.model) == before


@pytest.mark.usefixtures("no_pictures")
def test_trials_are_told_as_they_come_and_never_more_than_said(small: Small, tmp_path: Path) -> None:
    from lpes_bake.run import Events

    trials: list[Trial] = []
    settings = SearchSettings.from_flat(
        {"task": ["kv,pairs=4,key_width=1"], "contexts": 4, "gradient_contexts": 4, "steps": 5, "check_every": 2}
        | {"population": 4, "warmup": 2, "selection_contexts": 2, "report_contexts": 2, "text": str(small.text)}
        | {"gradient_batch": [2]}
    )
    search(str(small.model), tmp_path / "run", settings, events=Events(trial=trials.append))
    assert [one.number for one in trials] == list(range(len(trials)))
    assert len(trials) <= trials_at_most(settings)
    assert trials[0].factors == IDENTITY and not any(one.replayed for one in trials[1:])


# Verdicts


@pytest.mark.usefixtures("no_pictures")
def test_a_search_that_finds_nothing_says_so_and_writes_the_identity(small: Small, tmp_path: Path) -> None:
    # A random model gives no right answer of eight digits, whatever its factors: nothing beats the identity.
    content = small.run(tmp_path / "run", "--force", task="kv,pairs=4,key_width=8", fitness="accuracy")
    assert content["verdict"] == "identity" and "found nothing better than the base model" in content["message"]
    factors = load_factors(tmp_path / "run")
    assert factors.layer_rope_scaling == IDENTITY
    assert "gain" not in invoke("show", tmp_path / "run").output
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
def test_few_contexts_that_all_gain_are_no_verdict(small: Small, tmp_path: Path) -> None:
    out = tmp_path / "run"
    few = small.run(out, report_contexts=5)
    assert few["verdict"] == "uncertain" and "too few to tell it from chance" in few["message"]
    assert few["report"]["tasks"][0]["difference"]["logprob"]["mean"][1] > 0
    assert load_factors(out).layer_rope_scaling == IDENTITY
    assert small.run(tmp_path / "more", report_contexts=6)["verdict"] == "better"


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
