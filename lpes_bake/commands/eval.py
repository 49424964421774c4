"""`lpes-bake eval`."""

from __future__ import annotations

import json
from pathlib import Path

import click
from click.core import ParameterSource

from lpes_bake.commands.options import GroupedCommand, grouped, quiet, revision, settings_options
from lpes_bake.search.tasks import task_help
from lpes_bake.settings import MACHINE, QUESTIONS, SearchSettings

# What says which questions about places are asked, and how they are shown.
PLACES_ONLY = ("factors", "specs", "contexts", "seed", "plot")
BENCHMARKS = "Benchmarks"


@click.command(
    "eval",
    cls=GroupedCommand,
    epilog=f"\b\n{task_help()}",
    short_help="Score models, or factors, by the place of the evidence.",
)
@click.argument("models", metavar="MODEL_OR_DIR...", nargs=-1, required=True)
@click.option(
    "--factors",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Also score the first model with these factors, without baking. May be given more than once.",
)
@grouped(
    "--task",
    "specs",
    group=QUESTIONS,
    multiple=True,
    default=("kv",),
    show_default=True,
    metavar="SPEC",
    help="What is asked: NAME[:FILE][,key=value…], as for search. May be given more than once.",
)
@grouped(
    "--contexts",
    group=QUESTIONS,
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Contexts of each task, each asked at every position. The standard error at accuracy 0.5 is 5 points with "
    "100, 2.2 with 500.",
)
@grouped(
    "--seed",
    group=QUESTIONS,
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Seeds the drawing of questions. They are never those of a search, whatever its seed.",
)
@settings_options(SearchSettings, "prompt_format")
@grouped(
    "--benchmark",
    "benchmarks",
    group=BENCHMARKS,
    multiple=True,
    metavar="SPEC",
    help="Ask a benchmark's questions about long texts instead: zeroscrolls/TASK[:FILE] or leval/TASK[:FILE], fetched "
    "from the Hub where there is no FILE (docs/benchmarks.md). May be given more than once.",
)
@grouped(
    "--harness",
    group=BENCHMARKS,
    metavar="TASK,TASK,…",
    help="Hand the models to lm-evaluation-harness instead, for tasks of it or of `lpes-bake tasks-dir`. A baked "
    "directory alone is compared with its base model.",
)
@grouped(
    "--limit",
    group=BENCHMARKS,
    type=click.IntRange(min=1),
    metavar="N",
    help="With --benchmark or --harness: the first N questions of each task only.",
)
@grouped(
    "--num-fewshot",
    group=BENCHMARKS,
    type=click.IntRange(min=0),
    metavar="N",
    help="With --harness: examples before each question.  [default: the task's own]",
)
@settings_options(SearchSettings, "device", "dtype")
@revision
@grouped(
    "--batch-size",
    group=MACHINE,
    type=click.IntRange(min=1),
    help="Contexts in a batch.  [default: what the device can take, less when memory is tight]",
)
@grouped(
    "--trust-remote-code",
    group=MACHINE,
    is_flag=True,
    help="Run Python code that a model brings for its tokenizer or, with --harness, that of a baked directory which is "
    "not ours. Read it first.",
)
@click.option("--plot", metavar="PNG", type=click.Path(path_type=Path), help="Draw the scores by position.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), help="Also write the result as JSON.")
@quiet
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def command(
    context: click.Context,
    models: tuple[str, ...],
    factors: tuple[Path, ...],
    specs: tuple[str, ...],
    contexts: int,
    seed: int,
    prompt_format: str,
    benchmarks: tuple[str, ...],
    harness: str | None,
    limit: int | None,
    num_fewshot: int | None,
    revision: str | None,
    device: str | None,
    dtype: str | None,
    batch_size: int | None,
    trust_remote_code: bool,
    plot: Path | None,
    out: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Ask models the same questions and show how well each answers by the place of the evidence.

    MODEL_OR_DIR is a base model (local directory or name on the Hub) or a baked directory; all others
    are compared with the first.

    Accuracy is the share of answers that greedy decoding gets right; the log-probability is the mean over the
    answer's tokens, in nats. Intervals are 95 % bootstrap intervals over contexts, for differences over
    pairs of the same contexts.

    \b
    lpes-bake eval BASE BAKED --plot positions.png
    lpes-bake eval BASE --factors RUN/factors.json --task kv,pairs=75,key_width=uuid
    lpes-bake eval BASE BAKED --benchmark zeroscrolls/qasper:validation.jsonl
    lpes-bake eval BAKED --harness mmlu,ceval-valid --num-fewshot 5
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from lpes_bake.commands import eval_tables
    from lpes_bake.evaluate import Evaluation, evaluate
    from lpes_bake.factors import finite, save_text
    from lpes_bake.harness import HarnessEvaluation, evaluate_with_harness
    from lpes_bake.long_text.evaluation import LongEvaluation, evaluate_long
    from lpes_bake.long_text.questions import read_benchmark
    from lpes_bake.search.errors import InputError
    from lpes_bake.search.tasks import parse_task

    for path in (plot, out):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InputError(f"{path} cannot be written: give a file name in a directory that exists")
    refuse_mixtures(context)
    stderr = Console(stderr=True, quiet=quiet)
    bar = Progress(TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn(), console=stderr)
    rows: dict[str, int] = {}

    def on_progress(label: str, share: float) -> None:
        if label not in rows:
            rows[label] = int(bar.add_task(label, total=1.0))
        bar.update(rows[label], completed=share)  # type: ignore[arg-type]

    result: Evaluation | LongEvaluation | HarnessEvaluation
    if harness is not None:
        result = evaluate_with_harness(
            models,
            [task.strip() for task in harness.split(",") if task.strip()],
            limit=limit,
            num_fewshot=num_fewshot,
            prompt_format=prompt_format,
            revision=revision,
            device=device,
            dtype=dtype,
            batch_size=batch_size,
            trust_remote_code=trust_remote_code,
            quiet=quiet,
        )
    elif benchmarks:
        read = [read_benchmark(spec, limit) for spec in benchmarks]
        with bar:
            result = evaluate_long(
                models,
                read,
                prompt_format=prompt_format,
                revision=revision,
                device=device,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                on_progress=on_progress,
            )
    else:
        tasks = [parse_task(spec) for spec in specs]
        with bar:
            result = evaluate(
                models,
                tasks,
                contexts=contexts,
                seed=seed,
                prompt_format=prompt_format,
                factors=factors,
                revision=revision,
                device=device,
                dtype=dtype,
                batch_size=batch_size,
                trust_remote_code=trust_remote_code,
                on_progress=on_progress,
            )
    text = json.dumps(finite(result.to_json()), indent=2, ensure_ascii=False)
    if as_json:
        click.echo(text)
    else:
        eval_tables.show(result, Console(highlight=False))
    # Last, as files that cannot be written must not cost the numbers.
    if out is not None:
        save_text(out, text + "\n")
    pictures = result.plot(plot) if isinstance(result, Evaluation) and plot is not None else []
    if not as_json:
        for path in [*([] if out is None else [out]), *pictures]:
            click.echo(f"written: {path}")


def refuse_mixtures(context: click.Context) -> None:
    """InputError for options that say nothing about what is asked."""
    from lpes_bake.search.errors import InputError

    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    flags = {one.name: one.opts[0] for one in context.command.params}
    what = next((name for name in ("harness", "benchmarks") if name in given), None)
    meaningless = {
        "harness": ("benchmarks", *PLACES_ONLY),
        "benchmarks": ("num_fewshot", "batch_size", *PLACES_ONLY),
        None: ("limit", "num_fewshot"),
    }
    for name in meaningless[what]:
        if name in given:
            raise InputError(
                f"{flags[name]} has no meaning {f'with {flags[what]}' if what else 'for --task'}; leave it out"
            )
