"""What each optimizer finds, and for how many tokens: held-out gain against tokens processed.

    python benchmarks/search_cost.py MODEL_DIR OUT_DIR
    python benchmarks/search_cost.py MODEL_DIR OUT_DIR --task mdqa:nq-open-oracle.jsonl.gz,documents=8 --other kv
    accelerate launch --multi_gpu --num_processes 2 benchmarks/search_cost.py MODEL_DIR OUT_DIR

Every optimizer searches on the same contexts of --task, with several seeds. Its best factors so far, at
several times, are then scored on held-out contexts of --task and, to see what carries over, of --other,
beside uniform factors. Prints a table and the tokens that each needs for the final score of the paper's own
algorithm; writes OUT_DIR/search_cost.json and .png. Stopped half-way, it goes on where it was.

Tokens are those that went through the model, with what a gradient costs on top. The paper's algorithm
runs at a small part of its own budget, for 800 evaluations of 200 questions are many hours on a CPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from matplotlib.figure import Figure

from lpes_bake.plan import Plan, load_evaluator, make_plan, optimizer_of
from lpes_bake.plots import COLOURS, MARKERS
from lpes_bake.search.ledger import Ledger, open_journal
from lpes_bake.search.processes import connected
from lpes_bake.search.statistics import mean_interval
from lpes_bake.search.study import Study, StudySettings, Trial
from lpes_bake.search.units import TEXT, Unit
from lpes_bake.selection import drift, part_results
from lpes_bake.settings import PRESETS, SearchSettings

# Of each optimizer's times of a new best, so many are scored on held-out contexts, the last among them.
TIMES = 3

# What a gradient costs beyond the pass whose tokens are counted, in passes (SmolLM2, CPU).
BACKWARD = 1.3


def rows(population: int, generations: int, steps: int) -> dict[str, dict[str, Any]]:
    """The searches that are compared, by name, as settings."""
    budget = {"population": population, "generations": generations}
    climb = {"optimizer": "gradient", "steps": steps}
    return {
        "paper": {**PRESETS["paper"], **budget},
        "random": {"optimizer": "random", **budget},
        "genetic": {"optimizer": "genetic", **budget},
        "cma-es": {"optimizer": "cma-es", "control_points": 6, **budget},
        "gradient, curve": {**climb, "space": "curve", "control_points": 6},
        "gradient, free": {**climb, "space": "free"},
        "hybrid": {**climb, "optimizer": "hybrid", "space": "curve", "control_points": 6, "warmup": 2, **budget},
    }


@dataclass(frozen=True)
class Best:
    """The best factors of a search after `tokens` of the `total` that it took; the last of them are what it found."""

    name: str
    last: bool
    tokens: int
    total: int
    factors: tuple[float, ...]


def search(name: str, plan: Plan, ledger: Ledger) -> list[Best]:
    """One search: TIMES of its new bests, evenly spread over them, the last one included."""
    bests: list[tuple[int, tuple[float, ...]]] = []
    best, backward = -np.inf, 0
    layers, objective = plan.source.num_hidden_layers, plan.settings.objective
    text = ledger.results([text_unit("search", (1.0,) * layers)])[0].tokens

    def tokens() -> int:
        # Without a leash, short text decides nothing: looking at it is no cost of the search.
        return ledger.tokens + backward - (0 if objective.leash else text * ledger.evaluations)

    def on_trial(trial: Trial) -> None:
        nonlocal best, backward
        backward += round(BACKWARD * trial.tokens) if trial.gradient else 0
        if trial.complete and trial.score is not None and trial.score > best:
            best = trial.score
            bests.append((tokens(), trial.factors))

    optimizer = optimizer_of(plan.settings, layers)
    Study(optimizer, ledger, objective, plan.settings.study, layers=layers, on_trial=on_trial).run()
    last, total = len(bests) - 1, tokens()
    places = sorted({round(i) for i in np.linspace(0, last, TIMES)})
    return [Best(name, place == last, bests[place][0], total, bests[place][1]) for place in places]


def text_unit(part: str, factors: tuple[float, ...]) -> Unit:
    """How these factors predict a part's short text."""
    return Unit("score", part, TEXT, 0, 0, factors)


def measure(best: Best, seed: int, heldout: Sequence[int], ledger: Ledger) -> dict[str, Any]:
    """Gains over the base model on `heldout` contexts of each task: a number a context, positions averaged.

    The task that is not searched on is for what a search found at last.
    """
    identity = (1.0,) * len(best.factors)

    def logprob(task: int, factors: tuple[float, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
        results = part_results(ledger, "report", task, heldout[task], factors, accuracy=False)
        return np.asarray(np.array([row for one in results for row in one.logprob]).mean(1))

    gains = [
        (logprob(task, best.factors) - logprob(task, identity)).tolist()
        for task in range(len(heldout) if best.last else 1)
    ]
    texts = ledger.results([text_unit("report", one) for one in (best.factors, identity)])
    return {**asdict(best), "seed": seed, "gains": gains, "damage": drift(*texts)[0]}


@click.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--task", default="kv,positions=0/3/7/11/15", show_default=True)
@click.option("--other", help="A task that is not searched on.")
@click.option("--prompt-format", default="plain", show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--contexts", default=12, show_default=True, help="Contexts that candidates are scored on.")
@click.option("--heldout-contexts", default=40, show_default=True)
@click.option("--other-contexts", default=20, show_default=True, help="Held-out contexts of --other.")
@click.option("--population", default=8, show_default=True)
@click.option("--generations", default=8, show_default=True)
@click.option("--steps", default=30, show_default=True)
@click.option("--only", multiple=True, help="Only these optimizers.")
def main(
    model: str,
    out: Path,
    task: str,
    other: str | None,
    prompt_format: str,
    seeds: int,
    contexts: int,
    heldout_contexts: int,
    other_contexts: int,
    population: int,
    generations: int,
    steps: int,
    only: tuple[str, ...],
) -> None:
    """Compare optimizers on MODEL (a local directory)."""
    common: dict[str, Any] = {
        "task": (task,),
        "selection_task": (other,) if other else (),
        "prompt_format": prompt_format,
        "contexts": contexts,
        "gradient_contexts": max(2 * steps, *StudySettings().gradient_batch),
        "selection_contexts": 2,
        "report_contexts": max(heldout_contexts, other_contexts),
    }
    searches = {name: one for name, one in rows(population, generations, steps).items() if not only or name in only}
    out.mkdir(parents=True, exist_ok=True)
    measured: list[dict[str, Any]] = []
    with connected() as processes:
        for seed in range(seeds):
            # One model and one set of questions serve all searches of a seed: gradients need most contexts.
            plan = make_plan(model, SearchSettings.from_flat({**common, "optimizer": "gradient", "seed": seed}))
            compute = load_evaluator(plan).compute
            with open_journal(out / f"journal-{seed}.jsonl", plan.header, processes) as journal:
                bests: list[Best] = []
                for name, changes in searches.items():
                    settings = SearchSettings.from_flat({**common, **changes, "contexts": contexts, "seed": seed})
                    # A ledger of its own counts all that this search asks for, be it known from another one.
                    bests += search(name, replace(plan, settings=settings), Ledger(journal, compute, processes))
                    if processes.rank == 0:
                        click.echo(f"seed {seed}, {name}: {bests[-1].total:,} tokens", err=True)
                layers = plan.source.num_hidden_layers
                bests += [Best(f"uniform {value:g}", True, 0, 0, (value,) * layers) for value in settings.curve.uniform]
                heldout = (heldout_contexts, other_contexts)[: len(plan.tasks)]
                measured += [measure(one, seed, heldout, Ledger(journal, compute, processes)) for one in bests]
            if processes.rank == 0:
                (out / "search_cost.json").write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
                plot(measured, out / "search_cost.png")
        if processes.rank == 0:
            show(measured)


def show(measured: Sequence[dict[str, Any]]) -> None:
    """The final factors of each search, all seeds together."""
    names = list(dict.fromkeys(one["name"] for one in measured))
    finals = {name: final(measured, name) for name in names}
    goal = finals.get("paper")
    goal_gain = float(np.mean([np.mean(one["gains"][0]) for one in goal])) if goal else None
    click.echo("| optimizer | tokens | held-out gain | other task | short-text damage | tokens to the paper's score |")
    click.echo("|---|---|---|---|---|---|")
    for name, ones in finals.items():
        cells = [name, f"{statistics.mean(one['total'] for one in ones):,.0f}"]
        cells += [interval(ones, task) if task < len(ones[0]["gains"]) else "–" for task in range(2)]
        cells.append(f"{statistics.mean(one['damage'] for one in ones):+.4f}")
        cells.append(tokens_to(measured, name, goal_gain))
        click.echo(f"| {' | '.join(cells)} |")


def final(measured: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The last factors of each seed."""
    last = {one["seed"]: one for one in measured if one["name"] == name}
    return list(last.values())


def interval(ones: Sequence[dict[str, Any]], task: int) -> str:
    """Mean gain with its 95 % interval over the contexts of all seeds."""
    mean, low, high = mean_interval(np.concatenate([one["gains"][task] for one in ones]))
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def tokens_to(measured: Sequence[dict[str, Any]], name: str, goal: float | None) -> str:
    """Tokens after which the held-out gain, mean over seeds, has reached the goal, at the times that were scored."""
    ones = [one for one in measured if one["name"] == name and one["tokens"]]
    if goal is None or not ones:
        return "–"
    by_seed = {seed: [one for one in ones if one["seed"] == seed] for seed in {one["seed"] for one in ones}}
    for tokens in sorted({one["tokens"] for one in ones}):
        reached = [[one for one in seed if one["tokens"] <= tokens] for seed in by_seed.values()]
        if all(reached) and np.mean([np.mean(seed[-1]["gains"][0]) for seed in reached]) >= goal:
            return f"{tokens:,}"
    return "not reached"


def plot(measured: Sequence[dict[str, Any]], path: Path) -> None:
    """Held-out gain against tokens, a line a search."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    searches = list(dict.fromkeys(one["name"] for one in measured if one["tokens"]))
    for i, name in enumerate(searches):
        for seed in sorted({one["seed"] for one in measured}):
            ones = [one for one in measured if one["name"] == name and one["seed"] == seed]
            axes.plot(
                [one["tokens"] for one in ones],
                [float(np.mean(one["gains"][0])) for one in ones],
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                label=None if seed else name,
            )
    axes.set(xscale="log", xlabel="tokens processed", ylabel="held-out gain, nats a token of the answer")
    axes.axhline(0, color="#999999", linewidth=1, linestyle="--")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
