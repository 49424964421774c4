"""Benchmarks of lm-evaluation-harness on models side by side, and what changed from the first to each other.

Directories are handed to lm-eval as its own command would take them, so the numbers are those of `lm_eval --model hf`.
lm-eval is imported inside functions only.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from lpes_bake.evaluate import distinct_labels
from lpes_bake.loading import first_line, load_tokenizer, open_sources
from lpes_bake.search.errors import InputError
from lpes_bake.source import Source, base_form
from lpes_bake.verify import check_auto_map, check_python_files

TASKS_DIR = Path(__file__).resolve().parent / "lm_eval_tasks"

# Beyond that, means that were added up in another order are different numbers.
SAME = 1e-9


@dataclass(frozen=True)
class Measured:
    """A number with its standard error, None where there is none."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class Difference:
    """A model's value minus the first one's.

    paired: whether the error is that of pairs of the same documents; otherwise the two models were taken for
    independent of one another.
    """

    value: float
    stderr: float | None
    paired: bool


@dataclass(frozen=True)
class HarnessRow:
    """A metric of a task or group. metric: with lm-eval's filter behind a comma where it has a name."""

    task: str
    metric: str
    documents: int
    values: tuple[Measured, ...]
    differences: tuple[Difference, ...]
    """Of all models but the first."""


@dataclass(frozen=True)
class HarnessEvaluation:
    """What was measured; the first model is what the others are compared with."""

    labels: tuple[str, ...]
    sources: tuple[Source, ...]
    lm_eval_version: str
    num_fewshot: dict[str, int]
    """Of each task."""
    limit: int | None
    chat: bool
    rows: tuple[HarnessRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "lm_eval_version": self.lm_eval_version,
            "num_fewshot": self.num_fewshot,
            "limit": self.limit,
            "chat_template": self.chat,
            "models": [
                {
                    "label": label,
                    "name": source.name,
                    "revision": source.revision,
                    "layer_rope_scaling": None if source.factors is None else list(source.factors),
                }
                for label, source in zip(self.labels, self.sources, strict=True)
            ],
            "rows": [asdict(row) for row in self.rows],
        }


def evaluate_with_harness(
    models: Sequence[str],
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    prompt_format: str = "auto",
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int | None = None,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> HarnessEvaluation:
    """Let lm-eval score each model (base or baked directory, Hub name) on its tasks, or those of TASKS_DIR.

    A baked directory alone is compared with its base model: the same files without the factors. A baked directory's
    code is run if it is what lpes-bake ships and lies there, other code only where trust_remote_code is given.
    Raises InputError before any weight is read when something cannot work.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError("--harness needs lm-eval, which is not installed: pip install 'lpes-bake[harness]'")
    if prompt_format not in ("auto", "plain", "chat"):
        raise InputError(f"lm-eval knows the prompt formats plain and chat, not {prompt_format}; leave it out")
    sources = open_sources(models, revision)
    for source in sources:
        if not trust_remote_code:
            _check_code(source)
        _check_tokenizer(source, trust_remote_code, chat=prompt_format == "chat")
    from lpes_bake.search.device import pick_device, pick_dtype

    where = pick_device(device)
    precision = str(pick_dtype(dtype, where)).removeprefix("torch.")
    with ExitStack() as stack:
        # Results go to stdout; whatever lm-eval says while it works does not.
        stack.enter_context(redirect_stdout(sys.stderr))
        if quiet:
            stack.enter_context(redirect_stderr(stack.enter_context(Path(os.devnull).open("w"))))
        manager = _task_manager(tasks)
        names = _check_tasks(manager, tasks)
        folders = [source.path for source in sources]
        if len(sources) == 1 and sources[0].factors is not None:
            folders.insert(0, stack.enter_context(base_folder(sources[0])))
            sources.insert(0, base_form(sources[0]))
            models = [sources[0].name, *models]
        results = [
            _scores_of(
                source,
                model_args={
                    "pretrained": str(folder),
                    "dtype": precision,
                    "trust_remote_code": trust_remote_code or source.factors is not None,
                },
                tasks=names,
                num_fewshot=num_fewshot,
                batch_size=batch_size or 1,
                device=str(where),
                limit=limit,
                apply_chat_template=prompt_format == "chat",
                task_manager=manager,
            )
            for source, folder in zip(sources, folders, strict=True)
        ]
    return HarnessEvaluation(
        tuple(distinct_labels(models, sources)),
        tuple(sources),
        version("lm_eval"),
        results[0]["n-shot"],
        limit,
        prompt_format == "chat",
        tuple(compare(results)),
    )


@contextmanager
def base_folder(source: Source) -> Iterator[Path]:
    """A folder for a while, with the base model that a baked directory was made from: a bake leaves all but
    config.json as it is, so links will do."""
    from lpes_bake.modeling.layer_rope_scaling import config_fields

    # Version 4 of transformers would overlook what version 5 wrote, and take its default theta.
    config = config_fields(base_form(source).config, source.family.base_model_type)
    with tempfile.TemporaryDirectory(prefix="lpes-bake-base-") as name:
        folder = Path(name)
        for path in source.path.iterdir():
            if path.name != "config.json" and path.suffix != ".py":
                (folder / path.name).symlink_to(path.resolve())
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder


def _check_code(source: Source) -> None:
    if source.factors is None:
        return
    try:
        check_auto_map(source.config, source.family)
        check_python_files(source.path, source.family)
    except InputError as error:
        raise InputError(
            f"{source.name}: {error}; its Python code is run only after you have read it, with --trust-remote-code"
        ) from error


def _check_tokenizer(source: Source, trust_remote_code: bool, *, chat: bool) -> None:
    from transformers.utils import logging

    # Loading a baked directory's tokenizer without its code makes transformers warn of a model type it does not know.
    logging.set_verbosity_error()
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise InputError(
            f"the tokenizer of {source.name} has neither a BOS nor an EOS token, and lm-eval cannot do without; name "
            "one in tokenizer_config.json"
        )
    if chat and not tokenizer.chat_template:
        raise InputError(f"the tokenizer of {source.name} has no chat template; leave out --prompt-format")


def _scores_of(source: Source, **options: Any) -> Any:
    """What simple_evaluate gives for one model."""
    import lm_eval

    try:
        return lm_eval.simple_evaluate(model="hf", log_samples=True, **options)
    except Exception as error:  # lm-eval runs the code of whatever tasks it has, which raises what it likes
        raise InputError(f"lm-eval failed on {source.name}: {type(error).__name__}: {first_line(error)}") from error


def _task_manager(tasks: Sequence[str]) -> Any:
    from lm_eval.tasks import TaskManager

    # lm-eval reads all of its own 13,000 files first, which takes longer than a small task.
    own = all(task.startswith("lpes_") for task in tasks)
    return TaskManager(include_path=str(TASKS_DIR), include_defaults=not own)


def _check_tasks(manager: Any, tasks: Sequence[str]) -> list[str]:
    """The names of all tasks that are meant; each is loaded with its data, so that what is not there shows early."""
    names = []
    for task in tasks:
        found = manager.match_tasks([task])
        if not found:
            raise InputError(f"lm-eval has no task {task!r}; `lm_eval ls tasks` lists them")
        names += found
    if not names:
        raise InputError("--harness names no task; give some, with commas between them")
    try:
        manager.load(names)
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"{', '.join(tasks)}: {first_line(error)}; install what these tasks of lm-eval need"
        ) from error
    except Exception as error:  # many kinds, from many libraries
        raise InputError(f"lm-eval cannot load {', '.join(tasks)}: {first_line(error)}") from error
    return names


def compare(results: Sequence[Mapping[str, Any]]) -> Iterator[HarnessRow]:
    """A row for each metric of each task and group, from what simple_evaluate gave for each model."""
    base = results[0]
    for task, measured in base["results"].items():
        for key, value in measured.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            values = [_measured(one["results"][task], metric, kind) for one in results]
            differences = [
                _difference(one, base, task, metric, kind, found, values[0])
                for one, found in zip(results[1:], values[1:], strict=True)
            ]
            documents = sum(len(_scores(base, leaf, metric, kind)) for leaf in _leaves(base, task))
            shown = metric if kind == "none" else key
            yield HarnessRow(task, shown, documents, tuple(values), tuple(differences))


def _measured(measured: Mapping[str, Any], metric: str, kind: str) -> Measured:
    stderr = measured.get(f"{metric}_stderr,{kind}")
    return Measured(float(measured[f"{metric},{kind}"]), float(stderr) if isinstance(stderr, (int, float)) else None)


def _difference(
    ours: Mapping[str, Any],
    base: Mapping[str, Any],
    task: str,
    metric: str,
    kind: str,
    found: Measured,
    other: Measured,
) -> Difference:
    """Paired by document, where the task's value is the mean of its documents' (a group's: of its tasks' values, by
    their sizes or not)."""
    value = found.value - other.value
    means, errors, sizes = [], [], []
    for leaf in _leaves(base, task):
        mine, theirs = _scores(ours, leaf, metric, kind), _scores(base, leaf, metric, kind)
        pairs = np.array([mine[document] - theirs[document] for document in theirs if document in mine])
        means.append(pairs.mean() if len(pairs) else math.nan)
        errors.append(pairs.std(ddof=1) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan)
        sizes.append(len(pairs))
    for weights in (np.array(sizes, dtype=float), np.ones(len(sizes))):
        shares = weights / weights.sum()
        if abs(shares @ means - value) < SAME:
            error = math.sqrt(float(((shares * errors) ** 2).sum()))
            return Difference(value, error if math.isfinite(error) else None, True)
    if found.stderr is None or other.stderr is None:
        return Difference(value, None, False)
    return Difference(value, math.hypot(found.stderr, other.stderr), False)


def _leaves(result: Mapping[str, Any], task: str) -> list[str]:
    """The tasks of a group and of the groups in it, or the task itself."""
    members = result["group_subtasks"].get(task)
    return [task] if not members else [leaf for member in members for leaf in _leaves(result, member)]


def _scores(result: Mapping[str, Any], task: str, metric: str, kind: str) -> dict[int, float]:
    """document → its metric, where that is a number."""
    return {
        sample["doc_id"]: float(sample[metric])
        for sample in result["samples"][task]
        if sample["filter"] == kind and isinstance(sample.get(metric), (int, float))
    }
