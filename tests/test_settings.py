"""The settings of a search: one dataclass, and the options, the journal's header and the command that come from it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

from lpes_bake.commands import search as search_command
from lpes_bake.commands.options import flat_fields
from lpes_bake.commands.search import command_of, settings_of
from lpes_bake.plan import trials_at_most
from lpes_bake.search.curve import CurveSettings
from lpes_bake.search.errors import InputError
from lpes_bake.search.genetic import GeneticSettings
from lpes_bake.search.gradient import GradientSettings
from lpes_bake.search.ledger import Limits
from lpes_bake.search.objective import Objective
from lpes_bake.search.study import StudySettings
from lpes_bake.settings import NESTED, PRESETS, SearchSettings
from tests.runs import invoke

OTHER = SearchSettings(
    task=("kv,pairs=9", "qa:my data.jsonl"),
    selection_task=("mdqa:nq.jsonl.gz,documents=8",),
    optimizer="gradient",
    start="earlier run",
    objective=Objective(
        fitness="probability", over="worst", task_weights=(2.0, 0.5), leash=0.25, max_damage=0.1, leash_kl=3.0
    ),
    study=StudySettings(contexts=9, gradient_contexts=5, gradient_batch=(5,), race="exact", first_block=3),
    selection_contexts=11,
    report_contexts=12,
    finalists=2,
    text="some 'text'.txt",
    prompt_format="vicuna",
    seed=7,
    curve=CurveSettings(control_points=3, y_low=0.6, y_high=1.5, y_step=0.1, uniform=(0.7, 1.25)),
    genetic=GeneticSettings(population=5, generations=6, parents=0.5, crossover=0.1, mutation=0.2, tries=7),
    gradient=GradientSettings(space="free", steps=3, learning_rate=0.5, check_every=2, patience=4, smoothness=0.0),
    device="cpu",
    dtype="bfloat16",
    device_map="auto",
    quantization="8bit",
    batch_size=3,
)


def given(words: list[str]) -> tuple[SearchSettings, Limits, bool]:
    """What the command makes of its options."""
    with search_command.command.make_context("search", list(words)) as context:
        values = {one.name: context.params[one.name] for one, *_ in flat_fields(SearchSettings)}
        limits = Limits(**{one.name: context.params[one.name] for one in fields(Limits)})
        settings = settings_of(context, Path("run"), values, context.params["preset"], resume=False)
        return settings, limits, context.params["force"]


def test_settings_survive_the_way_through_json() -> None:
    for settings in (SearchSettings(), OTHER, SearchSettings.from_flat(PRESETS["paper"])):
        assert SearchSettings.from_flat(json.loads(json.dumps(settings.flat()))) == settings
    # What other versions may have written is no setting, and what they did not write is at its default.
    assert SearchSettings.from_flat({"unknown": 3, "seed": 4}) == SearchSettings(seed=4)


def test_no_two_settings_share_a_name() -> None:
    parts = [SearchSettings, *NESTED.values()]
    names = [one.name for part in parts for one in fields(part) if one.name not in NESTED]
    assert len(names) == len(set(names)) == len(SearchSettings().flat())


def test_without_options_all_is_at_its_default() -> None:
    assert given(["model", "--out", "run"]) == (SearchSettings(), Limits(), False)


def test_every_setting_is_an_option_with_its_default_in_the_help() -> None:
    options = {one.name: one for one in search_command.command.params if isinstance(one, click.Option)}
    done = invoke("search", "--help")
    assert done.exit_code == 0
    shown = " ".join(done.stdout.split())
    for one, *_ in [*flat_fields(SearchSettings), *flat_fields(Limits)]:
        assert f"--{one.name.replace('_', '-')}" in options[one.name].opts
        assert options[one.name].help and one.metadata["help"] in str(options[one.name].help)
        # click prints none for lists that are empty; None is said in words.
        if one.name in SearchSettings().flat() and isinstance(one.default, (int, float, str)):
            assert f"[default: {one.default}]" in shown, one.name
    assert "[default: 0.8,0.9,0.95,1.1,1.25]" in shown and "[default: paragraphs that come with lpes-bake]" in shown


def test_the_help_lists_every_option_once_under_its_heading() -> None:
    headings: dict[str, str] = {}
    heading = ""
    for line in invoke("search", "--help").stdout.splitlines():
        if found := re.match(r"(\w.*):$", line):
            heading = found[1]
        elif heading and (found := re.match(r"  (?:-\w, )?--([\w-]+)", line)):
            assert found[1] not in headings
            headings[found[1]] = heading
    options = [one for one in search_command.command.params if isinstance(one, click.Option)]
    assert {f"--{name}" for name in headings} == {one.opts[0] for one in options} | {"--help"}
    assert headings["out"] == headings["json"] == headings["help"] == "Options"
    assert headings["task"] == headings["prompt-format"] == headings["seed"] == "Questions"
    assert headings["device"] == headings["trust-remote-code"] == "Model and machine"
    # Settings that stand together in the code do so here, and are not among the others.
    for part, expected in (
        (Objective, "Fitness and leash"),
        (StudySettings, "Contexts"),
        (CurveSettings, "Optimizer and curve"),
        (GeneticSettings, "Genetic algorithm"),
        (GradientSettings, "Gradient"),
        (Limits, "Limits"),
    ):
        assert {headings[one.name.replace("_", "-")] for one in fields(part)} == {expected}


@pytest.mark.parametrize("command", ["search", "eval"])
def test_the_help_names_all_tasks_and_their_settings(command: str) -> None:
    done = invoke(command, "--help")
    assert done.exit_code == 0
    for words in ("kv  Key-value", "pairs=16", "kv:FILE", "mdqa:FILE", "documents=10", "qa:FILE", "FILE.py:CLASS"):
        assert words in done.stdout, words


def test_the_command_that_is_written_down_gives_the_same_settings() -> None:
    cases: list[tuple[SearchSettings, Limits, bool]] = [
        (SearchSettings(), Limits(), False),
        (OTHER, Limits(max_evaluations=9, max_tokens=800, max_time=1.5), True),
        (SearchSettings.from_flat(PRESETS["paper"]), Limits(), False),
    ]
    for settings, limits, force in cases:
        line = command_of("org/model", Path("my run"), settings, limits, "abc", force=force, trust_remote_code=force)
        name, command, model, *words = shlex.split(line)
        assert (name, command, model) == ("lpes-bake", "search", "org/model")
        assert words[:4] == ["--out", "my run", "--revision", "abc"]
        assert given([model, *words]) == (settings, limits, force)
        # Without it, a tokenizer with code of its own would be refused.
        assert ("--trust-remote-code" in words) == force
    plain = command_of("m", Path("r"), SearchSettings(), Limits(), None, force=False, trust_remote_code=False)
    assert plain == "lpes-bake search m --out r"


def test_options_go_before_the_preset_and_the_preset_before_defaults() -> None:
    settings, _, _ = given(["model", "--out", "run", "--preset", "paper", "--population", "10", "--seed", "0"])
    paper = SearchSettings.from_flat(PRESETS["paper"])
    assert settings == replace(paper, genetic=replace(paper.genetic, population=10))
    assert settings.optimizer == "genetic" and settings.curve.uniform == () and settings.study.race == "off"


def test_the_papers_preset_costs_what_the_paper_says() -> None:
    paper = SearchSettings.from_flat(PRESETS["paper"])
    assert trials_at_most(paper) == 800
    assert (paper.objective.fitness, paper.objective.leash, paper.finalists) == ("accuracy", 0, 1)
    # Every name in it is one.
    assert all(set(preset) <= set(SearchSettings().flat()) for preset in PRESETS.values())


@pytest.mark.parametrize(
    ("changes", "trials"),
    [
        # The identity and three uniform factors fit into the first population of 6.
        ({"optimizer": "genetic", "population": 6, "generations": 3}, 18),
        # Four do not fit into one of 2.
        ({"optimizer": "genetic", "population": 2, "generations": 3}, 4 + 2 + 2),
        ({"optimizer": "random", "population": 6, "generations": 1}, 6),
        # The uniform factors, 7 steps, checks after 3, 6 and 7.
        ({"optimizer": "gradient", "steps": 7, "check_every": 3}, 4 + 7 + 3),
        # Two generations, the best of them as a curve through even points, and the climb.
        ({"optimizer": "hybrid", "steps": 7, "check_every": 3, "population": 6, "warmup": 2}, 12 + 1 + 7 + 3),
        ({"optimizer": "cma-es", "population": 6, "generations": 3}, 4 + 6 + 6),
    ],
)
def test_trials_are_counted_before_they_are_made(changes: dict[str, Any], trials: int) -> None:
    settings = SearchSettings.from_flat({"uniform": [0.8, 0.9, 1.1], **changes})
    assert trials_at_most(settings) == trials


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": ()}, "no task is given"),
        ({"finalists": 0}, "finalists is 0"),
        ({"optimizer": "nonsense"}, "optimizer must be one of genetic"),
        ({"prompt_format": "nonsense"}, "prompt_format must be one of auto"),
        ({"dtype": "int8"}, "dtype must be one of float32"),
        ({"quantization": "2bit"}, "quantization must be one of 4bit"),
        ({"study": StudySettings(gradient_contexts=0)}, "gradient_contexts is 0, but the optimizer gradient"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        SearchSettings(**changes)


def test_every_setting_is_json() -> None:
    flat = OTHER.flat()
    assert json.loads(json.dumps(flat)) == flat
    assert flat["uniform"] == [0.7, 1.25] and flat["population"] == 5
    assert set(flat) == {name for name in asdict(OTHER) if name not in NESTED} | {
        one.name for part in NESTED.values() for one in fields(part)
    }


def test_a_task_given_twice_is_refused() -> None:
    twice = ("kv,pairs=4", "kv", "kv,pairs=4")
    for settings in (partial(SearchSettings, task=twice), partial(SearchSettings, selection_task=twice)):
        with pytest.raises(InputError, match="the task kv,pairs=4 is given twice"):
            settings()
