"""Each table as a list of commands, and what is made of their JSON. Commands are data: nothing is run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.paper import tables
from benchmarks.paper.setups import Options, Setup, Words
from benchmarks.paper.tables import Table

# What the noise multiplies a factor with is e to the power of a normal number with this standard deviation.
NOISE = "0.1"
NOTHING: Options = MappingProxyType({})


@dataclass(frozen=True)
class Step:
    """A command. made: what stands there once it is done. optional: where it needs what not everybody has."""

    made: Path
    words: Words
    optional: bool = False


@dataclass(frozen=True)
class Files:
    """Where things are. out: all that the recipes of one model write. factors: those to use instead of searching.

    moice: the folder of trained routers, from `lpes-bake train-moice`. text: paragraphs, instead of those that come
    along.
    """

    out: Path
    mdqa: Path
    factors: Path | None = None
    moice: Path | None = None
    text: Path | None = None


@dataclass(frozen=True)
class Recipe:
    """The commands of a table, in their order, and what makes the table once they are done."""

    steps: list[Step]
    gather: Callable[[], list[Table]]


def search(setup: Setup, files: Files, task: str, name: str = "", changes: Options = NOTHING) -> Step:
    """A search on one task, in a folder of its own. changes: to the options of every search."""
    run = files.out / f"search-{task}{name and f'-{name}'}"
    spec = setup.searched[task].format(mdqa=files.mdqa)
    words = ("lpes-bake", "search", setup.model, "--out", str(run), "--task", spec, *asking(setup))
    return Step(run / "result.json", (*words, *words_of({**setup.search, **changes})))


def words_of(options: Options) -> Words:
    """Options as words of a command."""
    return tuple(word for name, value in options.items() for word in (f"--{name}", value) if word is not None)


def found(setup: Setup, files: Files, task: str) -> tuple[list[Step], Path]:
    """The search on a task, unless factors are given; and where the factors are then."""
    if files.factors is not None:
        return [], files.factors
    step = search(setup, files, task)
    return [step], step.made.parent / "factors.json"


def asking(setup: Setup) -> Words:
    """How prompts are put."""
    return ("--prompt-format", setup.prompt_format)


def evaluate(setup: Setup, files: Files, table: str, task: str, factors: list[Path]) -> Step:
    """`lpes-bake eval` of the base model and of these factors on one task."""
    made = files.out / f"{table}-{task}.json"
    asked = setup.tasks[task]
    words = ("lpes-bake", "eval", setup.model, *with_factors(factors), "--task", asked.spec.format(mdqa=files.mdqa))
    return Step(made, (*words, "--contexts", str(asked.contexts), *asking(setup), "--out", str(made)))


def measure(setup: Setup, files: Files, table: str, factors: list[Path]) -> Step:
    """A measurement inside the model, on key-value retrieval, by the module that is named as the table."""
    made = files.out / f"{table}.measured.json"
    words = ("python", "-m", f"benchmarks.paper.{table}", setup.model, *with_factors(factors), "--out", str(made))
    return Step(made, (*words, "--task", setup.tasks["kv"].spec, "--contexts", str(setup.few), *asking(setup)))


def with_factors(paths: list[Path]) -> Words:
    """The option for each file."""
    return tuple(word for path in paths for word in ("--factors", str(path)))


def variants(setup: Setup, files: Files, factors: Path) -> tuple[Step, list[Path]]:
    """Shuffled and noisy copies of factors: the command, and the files that it makes, in this order."""
    folder = files.out / "variants"
    made = [folder / f"{kind}-{draw}.json" for kind in ("shuffled", "noisy") for draw in range(setup.draws)]
    words = ("python", "-m", "benchmarks.paper.variants", str(factors), str(folder))
    return Step(made[-1], (*words, "--draws", str(setup.draws), "--noise", NOISE)), made


def main_table(setup: Setup, files: Files) -> Recipe:
    """Methods side by side, by gold position, on both tasks."""
    steps: list[Step] = []
    for task in ("kv", "mdqa"):
        searches, factors = found(setup, files, task)
        moice = [] if files.moice is None else [f"moice={files.moice}"]
        methods = [f"pi={setup.pi}", "ms-poe", "attention-buckets", *moice, f"lpes={factors}"]
        asked, compared = setup.tasks[task], files.out / f"compare-{task}"
        words = ("lpes-bake", "compare", setup.model, "--out", str(compared), "--methods", ",".join(methods))
        spec = asked.spec.format(mdqa=files.mdqa)
        words_of_task = ("--task", spec, "--contexts", str(asked.contexts), *asking(setup))
        steps += [*searches, Step(compared / "comparison.json", (*words, *words_of_task))]
    made = [step.made for step in steps if step.made.name == "comparison.json"]
    return Recipe(steps, lambda: [table for path in made for table in tables.compared(path)])


def transfer(setup: Setup, files: Files) -> Recipe:
    """Factors found on one task, scored on the other, and on another length of either."""
    (kv_search, kv), (mdqa_search, mdqa) = found(setup, files, "kv"), found(setup, files, "mdqa")
    labels = {"kv": "found on key-value retrieval", "mdqa": "found on multi-document QA"}
    factors = {labels["kv"]: kv, labels["mdqa"]: mdqa} if files.factors is None else {"given": files.factors}
    evals = [evaluate(setup, files, "transfer", task, list(factors.values())) for task in setup.tasks]
    return Recipe(
        [*kv_search, *mdqa_search, *evals],
        lambda: [table for step in evals for table in tables.evaluated(step.made, ["base", *factors])],
    )


def ablations(setup: Setup, files: Files) -> Recipe:
    """The found factors beside noisy and shuffled ones; and what searches with other settings find."""
    base = search(setup, files, "kv")
    runs = {"as in the main table": base}
    for points in setup.control_points:
        step = search(setup, files, "kv", f"{points}-points", {"control-points": str(points)})
        runs[f"{points} control points"] = step
    for contexts in setup.instances:
        step = search(setup, files, "kv", f"{contexts}-contexts", {"contexts": str(contexts)})
        runs[f"{3 * contexts} instances"] = step
    for name, changes in setup.optimizers.items():
        runs[f"optimizer {name}"] = search(setup, files, "kv", name, changes)
    factors = files.factors or base.made.parent / "factors.json"
    drawing, drawn = variants(setup, files, factors)
    scored = evaluate(setup, files, "ablations", "kv", [factors, *drawn])
    return Recipe(
        [base, drawing, scored, *(step for step in runs.values() if step is not base)],
        lambda: [
            tables.drawn(scored.made, setup.draws),
            tables.searches({label: step.made for label, step in runs.items()}),
        ],
    )


def deviation(setup: Setup, files: Files) -> Recipe:
    """How far factors move hidden states, by layer: the found ones beside shuffled and noisy ones."""
    searches, factors = found(setup, files, "kv")
    drawing, drawn = variants(setup, files, factors)
    step = measure(setup, files, "deviation", [factors, *drawn])
    return Recipe([*searches, drawing, step], lambda: tables.deviations(step.made, setup.draws))


def attention(setup: Setup, files: Files) -> Recipe:
    """Attention on the evidence by gold position, before and after."""
    searches, factors = found(setup, files, "kv")
    step = measure(setup, files, "attention", [factors])
    return Recipe([*searches, step], lambda: tables.attention(step.made))


def general(setup: Setup, files: Files) -> Recipe:
    """What the factors cost elsewhere: short text, and questions of lm-evaluation-harness."""
    searches, factors = found(setup, files, "kv")
    baked, asked, read = files.out / "baked", files.out / "harness.json", files.out / "short-text.json"
    text = () if files.text is None else ("--text", str(files.text))
    words = ("python", "-m", "benchmarks.paper.short_text", setup.model, *with_factors([factors]), "--out", str(read))
    steps = [
        *searches,
        Step(read, (*words, *text)),
        Step(baked, ("lpes-bake", "export", setup.model, str(factors), str(baked))),
        Step(asked, ("lpes-bake", "eval", str(baked), *words_of(setup.harness), "--out", str(asked)), optional=True),
    ]
    return Recipe(
        steps, lambda: [tables.short_text(read), *(tables.harness(tables.read(asked)) if asked.exists() else [])]
    )


RECIPES: dict[str, Callable[[Setup, Files], Recipe]] = {
    "main": main_table,
    "transfer": transfer,
    "ablations": ablations,
    "deviation": deviation,
    "attention": attention,
    "general": general,
}
