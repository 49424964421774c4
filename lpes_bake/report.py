"""The report of a search: one HTML page that stands alone, and its figures. Reads RUN/result.json, imports no torch.

The page is for somebody who was not there: what was searched, what came out, how sure that is, what it cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lpes_bake.card import short
from lpes_bake.factors import finite, save_text
from lpes_bake.pages import SCALES, fixed, render_page, signed
from lpes_bake.plots import Point
from lpes_bake.search.errors import InputError
from lpes_bake.source import check_list, is_number, parse_json

RESULT_FILE = "result.json"
PAGE = "report.html"
VERSION = 1

Number = float | int | None
INTERVAL = (Number, Number, Number)
METRIC = {"by_position": [INTERVAL], "mean": INTERVAL, "minimum": Number, "spread": Number}
DIFFERENCE = {"by_position": [INTERVAL], "mean": INTERVAL}
PARTS = {"search": Number, "selection": Number, "report": Number}

# What result.json must hold: a type, the fields of an object, [items of a list], (items, one, by, one). Numbers
# that were not finite are null.
RESULT = {
    "version": int,
    "date": str,
    "tool_version": str,
    "command": str,
    "seconds": Number,
    "base": dict,
    "environment": dict,
    "settings": dict,
    "tasks": [
        {
            "spec": str,
            "title": str,
            "settings": dict,
            "positions": [int],
            "position_unit": str,
            "generates": bool,
            "contexts": PARTS,
            "too_long": dict,
        }
    ],
    "layer_rope_scaling": [Number],
    "curve": dict | None,
    "verdict": str,
    "message": str,
    "ended": str,
    "objective": {"fitness": str, "over": str, "leash": Number, "leash_kl": Number, "weights": [Number]},
    "identity_score": Number,
    "trials": [
        {
            "trial": int,
            "kind": str,
            "score": Number,
            "complete": bool,
            "damage": Number,
            "kl": Number,
            "penalty": Number,
            "tokens": Number,
            "error": str | None,
            "layer_rope_scaling": [Number],
        }
    ],
    "convergence": [(Number, Number)],
    "selection": {
        "finalists": [
            {
                "label": str,
                "layer_rope_scaling": [Number],
                "search_score": Number,
                "selection_score": Number,
                "damage": Number,
                "kl": Number,
                "allowed": bool,
                "chosen": bool,
            }
        ],
        "gain": PARTS,
        "max_damage": Number,
    },
    "report": {
        "tasks": [
            {
                "base": {"accuracy": METRIC, "logprob": METRIC},
                "lpes": {"accuracy": METRIC, "logprob": METRIC},
                "difference": {"accuracy": DIFFERENCE, "logprob": DIFFERENCE},
            }
        ],
        "text": {"paragraphs": Number, "base": Number, "lpes": Number, "difference": INTERVAL, "kl": Number},
    },
    "cost": {"tokens": PARTS, "evaluations": Number, "failed": Number, "dropped": Number},
}

VERDICTS = ("better", "uncertain", "identity")
FITNESS = {
    "logprob": "the mean log-probability of the answer's tokens",
    "probability": "the probability of the whole answer",
    "accuracy": "the share of right answers",
}
OVER = {
    "mean": "averaged over the gold positions",
    "worst": "at the worst gold position",
    "mean-spread": "averaged over the gold positions, less the spread between them",
}


@dataclass(frozen=True)
class Written:
    """Where the report lies."""

    page: Path
    figures: tuple[Path, ...]


def write_report(run: Path, out: Path | None = None) -> Written:
    """Write report.html and its PNGs for the ended search in `run` to `out`, by default RUN/report."""
    result = load_result(run)
    out = run / "report" if out is None else out
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give --out a directory")
    figures = draw(result, out)
    page = out / PAGE
    save_text(page, render(result, figures))
    return Written(page, tuple(figures.values()))


def load_result(run: Path) -> dict[str, Any]:
    """RUN/result.json, checked against RESULT. InputError when there is none, or when it is not whole."""
    path = run / RESULT_FILE
    if not run.is_dir():
        raise InputError(f"{run} is not a directory; give the RUN of lpes-bake search")
    if not path.is_file():
        raise InputError(
            f"{run} has no {RESULT_FILE}: the search in it has not ended (go on with --resume), or there is none"
        )
    mend = "go on with the search with --resume, which writes it again"
    try:
        result = finite(parse_json(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}; {mend}") from error
    if isinstance(result, dict) and result.get("version", VERSION) != VERSION:
        raise InputError(
            f"{path} has version {result['version']!r}, and this lpes-bake reads version {VERSION}: "
            "use the lpes-bake that wrote it"
        )
    try:
        check(result, RESULT, "it")
        check_sizes(result)
    except InputError as error:
        raise InputError(f"{path} is damaged: {error}; {mend}") from error
    return dict(result)


def check(value: Any, shape: Any, where: str) -> None:
    """InputError that names the first place where a JSON value has not the shape that RESULT speaks of."""
    if isinstance(shape, dict):
        check(value, dict, where)
        for name, inner in shape.items():
            place = name if where == "it" else f"{where}.{name}"
            if name not in value:
                raise InputError(f"{place} is missing")
            check(value[name], inner, place)
    elif isinstance(shape, (list, tuple)):
        check(value, list, where)
        if isinstance(shape, tuple) and len(value) != len(shape):
            raise InputError(f"{where} has {len(value)} items, not {len(shape)}")
        for i, item in enumerate(value):
            check(item, shape[i if isinstance(shape, tuple) else 0], f"{where}[{i}]")
    elif shape is Number:
        if value is not None and not is_number(value):
            raise InputError(f"{where} is not a number")
    elif not isinstance(value, shape):
        raise InputError(f"{where} is a JSON {type(value).__name__}")


def check_sizes(result: Mapping[str, Any]) -> None:
    """InputError where parts that belong together do not fit."""
    layers = len(check_list(result["layer_rope_scaling"], "the factors kept"))
    for finalist in result["selection"]["finalists"]:
        check_list(finalist["layer_rope_scaling"], "selection.finalists", layers)
    if result["curve"] is not None:
        check(result["curve"], {"points": [(Number, Number)]}, "curve")
    # Of runs that know what each phase took.
    if "seconds" in result["cost"]:
        check(result["cost"]["seconds"], PARTS, "cost.seconds")
    for i, task in enumerate(result["tasks"]):
        check(list(task["too_long"].values()), [Number], f"tasks[{i}].too_long")
    if result["verdict"] not in VERDICTS:
        raise InputError(f"verdict is {result['verdict']!r}, not one of {', '.join(VERDICTS)}")
    if len(result["report"]["tasks"]) != len(result["tasks"]):
        raise InputError(f"report.tasks has {len(result['report']['tasks'])} items, not {len(result['tasks'])}")
    for i, (task, scores) in enumerate(zip(result["tasks"], result["report"]["tasks"], strict=True)):
        for who, by_metric in scores.items():
            for metric, found in by_metric.items():
                if len(found["by_position"]) != len(task["positions"]) or not task["positions"]:
                    raise InputError(f"report.tasks[{i}].{who}.{metric} has not one item for each position")


def draw(result: Mapping[str, Any], out: Path) -> dict[str, Path]:
    """Write the figures; their names → paths, in the order of the page."""
    from lpes_bake.plots import convergence_plot, curve_plot, frontier_plot, position_plot

    paths = {"factors": out / "factors.png"}
    finalists = result["selection"]["finalists"]
    kept = result["layer_rope_scaling"]
    curve_plot(
        kept,
        paths["factors"],
        control_points=points((result["curve"] or {"points": []})["points"]),
        others=[one["layer_rope_scaling"] for one in finalists if one["layer_rope_scaling"] != kept],
        title="",
    )
    for i, (task, scores) in enumerate(zip(result["tasks"], result["report"]["tasks"], strict=True)):
        path = paths[f"positions-{i + 1}"] = out / f"positions-{i + 1}.png"
        labels = (("base", "base"), ("lpes", winner_name(result)))
        accuracy, logprob = ({label: scores[who][metric]["by_position"] for who, label in labels} for metric in SCALES)
        gains = [scores["difference"][metric]["by_position"] for metric in SCALES]
        position_plot(
            accuracy, logprob, task["positions"], path, difference=(gains[0], gains[1]), unit=task["position_unit"]
        )
    best = points(result["convergence"])
    if best and result["identity_score"] is not None:
        paths["convergence"] = out / "convergence.png"
        convergence_plot(
            best,
            paths["convergence"],
            identity=result["identity_score"],
            marked=found_at(result),
            score="score (objective)",
        )
    if frontier := frontier_of(result):
        paths["frontier"] = out / "frontier.png"
        frontier_plot(
            frontier.trials,
            frontier.front,
            paths["frontier"],
            marked=frontier.marked,
            names=frontier.names,
            max_damage=result["selection"]["max_damage"],
            gain="gain over the identity",
        )
    return paths


class Frontier(NamedTuple):
    """What `frontier_plot` draws: (damage, gain) of the complete trials, and which of them stand out."""

    trials: list[Point]
    front: list[Point]
    marked: dict[str, list[Point]]
    names: list[tuple[Point, str]]


def frontier_of(result: Mapping[str, Any]) -> Frontier | None:
    """Gain before the price of drift against damage; None when no trial's damage was measured.

    Finalists stand where the search saw them: the selection measures their damage anew.
    """
    identity = result["identity_score"]

    def place(one: Mapping[str, Any] | None) -> list[Point]:
        if one is None or identity is None or one["damage"] is None:
            return []
        return [(one["damage"], one["score"] + (one["penalty"] or 0.0) - identity)]

    complete = complete_trials(result)
    trials = [point for one in complete for point in place(one)]
    if not trials:
        return None
    uniform = [
        (point, one["layer_rope_scaling"][0])
        for one in complete
        if len(set(one["layer_rope_scaling"])) == 1 and not is_identity(one["layer_rope_scaling"])
        for point in place(one)
    ]
    marked = {"identity": [(0.0, 0.0)], "uniform factors": [point for point, _ in uniform]}
    for kind, one in found_by_search(result):
        marked.setdefault(kind, []).extend(place(one))
    return Frontier(trials, pareto_front(trials), marked, [(point, short(float(factor))) for point, factor in uniform])


def found_by_search(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """("finalists" or "winner", its trial) for each finalist but the identity and those that had no trial: the same
    as another at a part of its size."""
    first: dict[tuple[float, ...], Mapping[str, Any]] = {}
    for trial in complete_trials(result):
        first.setdefault(tuple(trial["layer_rope_scaling"]), trial)
    chosen = {tuple(one["layer_rope_scaling"]): one["chosen"] for one in result["selection"]["finalists"]}
    return [
        ("winner" if wins else "finalists", first[factors])
        for factors, wins in chosen.items()
        if factors in first and not is_identity(factors)
    ]


def is_identity(factors: Sequence[float]) -> bool:
    """Whether they change nothing."""
    return set(factors) == {1.0}


def complete_trials(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The trials that were scored on all contexts of the search."""
    return [one for one in result["trials"] if one["complete"] and one["kind"] == "score" and one["score"] is not None]


def pareto_front(trials: Sequence[Point]) -> list[Point]:
    """The points (damage, gain) than which none has less damage and as much gain, or more gain and no more damage.

    By rising damage; equal points once.
    """
    front: list[Point] = []
    for damage, gain in sorted(set(trials), key=lambda point: (point[0], -point[1])):
        if not front or gain > front[-1][1]:
            front.append((damage, gain))
    return front


def found_at(result: Mapping[str, Any]) -> dict[str, list[Point]]:
    """The identity, finalists and winner as (tokens, score): on the line where they were the best of their time."""
    best = points(result["convergence"])
    when = {score: tokens for tokens, score in reversed(best)}
    marked: dict[str, list[Point]] = {"identity": best[:1]}
    for kind, trial in found_by_search(result):
        marked.setdefault(kind, []).append((when.get(trial["score"], trial["tokens"]), trial["score"]))
    return marked


def points(pairs: Sequence[Sequence[float | None]]) -> list[Point]:
    """The pairs of which both numbers are known."""
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def winner_name(result: Mapping[str, Any]) -> str:
    """What the page calls the winner, which stands beside the base model: not always is it what was kept."""
    winner = [one["layer_rope_scaling"] for one in result["selection"]["finalists"] if one["chosen"]]
    if winner and is_identity(winner[0]):
        return "identity"
    return "LPES" if winner and winner[0] == result["layer_rope_scaling"] else "winner, not kept"


def render(result: Mapping[str, Any], figures: Mapping[str, Path]) -> str:
    """The page as HTML, with the figures inside."""
    objective = result["objective"]
    return render_page(
        "report.html.jinja",
        figures,
        **{name: result[name] for name in RESULT},
        winner=winner_name(result),
        fitness=FITNESS.get(objective["fitness"], objective["fitness"]),
        over=OVER.get(objective["over"], objective["over"]),
        layers=len(result["layer_rope_scaling"]),
        # These two stand in places of their own.
        other_settings={name: one for name, one in result["settings"].items() if name not in ("base", "questions")},
        complete=len(complete_trials(result)),
        optimism=optimism(result),
        failures=failures(result["trials"]),
        place=lambda task, position: (
            f"{position} %" if task["position_unit"] == "%" else f"{task['position_unit']} {position}"
        ),
    )


def optimism(result: Mapping[str, Any]) -> str:
    """What it cost to choose, in a sentence."""
    gain = result["selection"]["gain"]
    if gain["search"] is None and None not in (gain["selection"], gain["report"]):
        return (
            "The winner is a finalist moved towards the identity, which the search did not score. Its gain over the "
            f"identity is {signed(gain['selection'], 4)} on the selection set, where it was chosen, and "
            f"{signed(gain['report'], 4)} on the report set, which had no say."
        )
    if None in gain.values():
        return "What the choice cost is not known, as a score is missing."
    other = any(bool(task["contexts"]["search"]) != bool(task["contexts"]["selection"]) for task in result["tasks"])
    judge, lost = ("selection", gain["selection"]) if other else ("search", gain["search"])
    lost -= gain["report"]
    price = (
        f"the {judge}'s own number was too good by {fixed(lost, 4)}, which is the price of choosing by it"
        if lost > 0
        else f"the {judge}'s own number was not too good, so choosing by it cost nothing here"
    )
    return (
        "On the search set, on which it was found, the winner's gain over the identity is "
        f"{signed(gain['search'], 4)}; "
        f"on the selection set{', of other tasks,' if other else ','} on which it was chosen among the finalists, "
        f"{signed(gain['selection'], 4)}; on the report set{' of the same tasks' if other else ''}, which had no say, "
        f"{signed(gain['report'], 4)}: {price}."
    )


def failures(trials: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[int]]]:
    """Error → the trials that it ended, the most frequent first."""
    by_error: dict[str, list[int]] = {}
    for one in trials:
        if one["error"] is not None:
            by_error.setdefault(one["error"], []).append(one["trial"])
    return sorted(by_error.items(), key=lambda item: -len(item[1]))
