"""Evaluating models side by side: the same questions to each, by gold position, with paired intervals.

torch is imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lpes_bake.comparison import METRICS, ScoredModel, difference, measured
from lpes_bake.factors import check_factors, load_factors
from lpes_bake.loading import load_model, load_tokenizer, open_sources
from lpes_bake.search.errors import InputError
from lpes_bake.source import Source

if TYPE_CHECKING:
    from lpes_bake.search.scoring import Scores
    from lpes_bake.search.tasks import Task


@dataclass(frozen=True)
class Entry(ScoredModel):
    """One model. scores: one a task."""

    scores: tuple[Scores, ...]

    def values(self, task: int, metric: str) -> NDArray[np.float64]:
        """(contexts, positions) of "accuracy" or "logprob" on one task."""
        return self.scores[task].values(metric)


@dataclass(frozen=True)
class Evaluation:
    """What was measured; the first entry is what the others are compared with."""

    tasks: tuple[Task, ...]
    contexts: int
    too_long: tuple[int, ...]
    seed: int
    prompt_format: str
    device: str
    dtype: str
    entries: list[Entry]

    def difference(self, entry: Entry, task: int, metric: str) -> dict[str, Any]:
        """`entry` minus the first one on the same questions."""
        return difference(entry.values(task, metric), self.entries[0].values(task, metric))

    def to_json(self) -> dict[str, Any]:
        """Plain data. Intervals are [mean, low, high]; numbers that are not finite are null."""
        return {
            "seed": self.seed,
            "prompt_format": self.prompt_format,
            "device": self.device,
            "dtype": self.dtype,
            "models": [entry.facts() for entry in self.entries],
            "tasks": [
                {
                    "name": task.name,
                    "settings": task.describe(),
                    "positions": list(task.positions),
                    "position_unit": task.position_unit,
                    "contexts": self.contexts,
                    "too_long": self.too_long[i],
                    "models": [self._entry(entry, i) for entry in self.entries],
                }
                for i, task in enumerate(self.tasks)
            ],
        }

    def _entry(self, entry: Entry, task: int) -> dict[str, Any]:
        result: dict[str, Any] = {"label": entry.label, "tokens": entry.scores[task].tokens}
        for metric in METRICS:
            result[metric] = measured(entry.values(task, metric))
        if entry is not self.entries[0]:
            result["difference"] = {
                "against": self.entries[0].label,
                **{metric: self.difference(entry, task, metric) for metric in METRICS},
            }
        return result

    def plot(self, path: Path) -> list[Path]:
        """Both metrics by gold position, as a PNG for each task: NAME.png, or NAME-task.png where there are several."""
        from lpes_bake.plots import position_plot

        paths = []
        for i, task in enumerate(self.tasks):
            accuracy, logprob = (
                {one.label: measured(one.values(i, metric))["by_position"] for one in self.entries}
                for metric in METRICS
            )
            target = path if len(self.tasks) == 1 else path.with_name(f"{path.stem}-{i + 1}-{task.name}{path.suffix}")
            title = f"{task.title}, {self.contexts} contexts, 95 % intervals"
            position_plot(accuracy, logprob, task.positions, target, unit=task.position_unit, title=title)
            paths.append(target)
        return paths


def evaluate(
    models: Sequence[str],
    tasks: Sequence[Task],
    *,
    contexts: int,
    seed: int,
    prompt_format: str = "auto",
    factors: Sequence[Path] = (),
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int | None = None,
    trust_remote_code: bool = False,
    on_progress: Callable[[str, float], None] = lambda label, share: None,
) -> Evaluation:
    """Score each model (base or baked directory, Hub name), and the first with each factors file.

    The questions are those of the report part of each task, which no search sees. on_progress is given the
    label of the model at work and the share of its questions that are done. Raises InputError before any
    weight is read when something cannot work.
    """
    sources = open_sources(models, revision)
    with_factors = [_factors(path, sources[0]) for path in factors]

    from transformers.utils import logging

    from lpes_bake.search.device import pick_device, pick_dtype
    from lpes_bake.search.prompts import take

    # Loading a baked directory's tokenizer without its code makes transformers warn of a model type it does not know.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    where = pick_device(device)
    precision = pick_dtype(dtype, where)
    tokenizers = [load_tokenizer(source, trust_remote_code=trust_remote_code) for source in sources]
    # What does not fit in the shortest model is left out for all: they must be asked the same.
    limit = min(source.max_positions for source in sources)
    taken = [
        [take(task, "report", seed, contexts, tokenizer, prompt_format, limit) for task in tasks]
        for tokenizer in tokenizers
    ]
    for source, found in zip(sources, taken, strict=True):
        for task, one, first in zip(tasks, found, taken[0], strict=True):
            if one.examples != first.examples:
                raise InputError(
                    f"{task.title}: with the tokenizer of {source.name} other contexts fit into {limit} tokens than "
                    f"with that of {sources[0].name}, so they cannot be compared; use shorter contexts"
                )

    from lpes_bake.search.scoring import Scorer

    entries: list[Entry] = []
    labels = distinct_labels(models, sources, factors)
    for i, (source, tokenizer) in enumerate(zip(sources, tokenizers, strict=True)):
        own = None if source.factors is None else tuple(source.factors)
        variants = [own, *with_factors] if i == 0 else [own]
        on_progress(labels[0], 0.0)
        model = load_model(source, where, precision)
        scorers = [
            Scorer(model, tokenizer, task, one.contexts, batch_size=batch_size)
            for task, one in zip(tasks, taken[i], strict=True)
        ]
        for variant in variants:
            label = labels.pop(0)
            scores = []
            for done, scorer in enumerate(scorers):

                def progress(share: float, done: int = done, label: str = label) -> None:
                    on_progress(label, (done + share) / len(tasks))

                scores.append(scorer.score(variant, accuracy=True, on_progress=progress))
            entries.append(Entry(label, source.name, source.revision, variant, tuple(scores)))
        # The model goes before the next one comes: together they may not fit.
        del model, scorers, scorer
    return Evaluation(
        tuple(tasks),
        contexts,
        tuple(one.too_long for one in taken[0]),
        seed,
        prompt_format,
        str(where),
        str(precision).removeprefix("torch."),
        entries,
    )


def _factors(path: Path, source: Source) -> tuple[float, ...]:
    if source.factors is not None:
        raise InputError(f"--factors is for a base model, and {source.name} is baked already; give its base first")
    found = load_factors(path)
    check_factors(found, source)
    return found.layer_rope_scaling


def distinct_labels(models: Sequence[str], sources: Sequence[Source], factors: Sequence[Path] = ()) -> list[str]:
    """Short names that differ, in the order of the work: the first model, it with factors, the other models."""
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        names = list(models)
    names[1:1] = [f"{names[0]} + {path}" for path in factors]
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    counts: dict[str, int] = {}
    labels = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        labels.append(name if seen[name] == 1 else f"{name} ({counts[name]})")
    return labels
