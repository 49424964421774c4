"""Evaluating models side by side: the same questions to each, by gold position, with paired intervals.

torch is imported inside functions only.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_bake.factors import check_factors, load_factors
from lpes_bake.run import check_lengths, first_line, load_model, load_tokenizer
from lpes_bake.search.errors import InputError
from lpes_bake.search.statistics import Interval, mean_interval, paired_interval
from lpes_bake.search.tasks import KVRetrieval
from lpes_bake.source import Source, open_source

if TYPE_CHECKING:
    from lpes_bake.search.scoring import Scores

METRICS = ("accuracy", "logprob")


@dataclass(frozen=True)
class Entry:
    """One row of the comparison. factors: what the model was scored with, None for a plain base model."""

    label: str
    name: str
    revision: str | None
    factors: tuple[float, ...] | None
    scores: Scores

    def by_position(self, metric: str) -> list[Interval]:
        """(mean, low, high) of "accuracy" or "logprob" at each gold position."""
        return [mean_interval(column) for column in self.scores.values(metric).T]

    def difference(self, first: Entry, metric: str) -> tuple[Interval, list[Interval]]:
        """This model minus `first` on the same contexts: over all positions, and at each."""
        ours, theirs = self.scores.values(metric), first.scores.values(metric)
        by_position = [paired_interval(a, b) for a, b in zip(ours.T, theirs.T, strict=True)]
        return paired_interval(ours.mean(1), theirs.mean(1)), by_position


@dataclass(frozen=True)
class Evaluation:
    """What was measured; the first entry is what the others are compared with."""

    task: KVRetrieval
    device: str
    dtype: str
    entries: list[Entry]

    def to_json(self) -> dict[str, Any]:
        """Plain data. Numbers that are not finite are null."""
        return {
            "task": {"name": "key-value retrieval", **asdict(self.task), "positions": list(self.task.gold_positions)},
            "device": self.device,
            "dtype": self.dtype,
            "models": [self._entry(entry) for entry in self.entries],
        }

    def _entry(self, entry: Entry) -> dict[str, Any]:
        first = self.entries[0]
        measured = entry.scores.to_json()
        result: dict[str, Any] = {
            "label": entry.label,
            "name": entry.name,
            "revision": entry.revision,
            "layer_rope_scaling": None if entry.factors is None else list(entry.factors),
            "tokens": entry.scores.tokens,
        }
        for metric in METRICS:
            result[metric] = {**measured[metric], "intervals": [_interval(one) for one in entry.by_position(metric)]}
        if entry is not first:
            result["difference"] = {"against": first.label}
            for metric in METRICS:
                overall, by_position = entry.difference(first, metric)
                result["difference"][metric] = {
                    **_interval(overall),
                    "by_position": [_interval(one) for one in by_position],
                }
        return result

    def plot(self, path: Path) -> None:
        """Both metrics by gold position, as a PNG."""
        from lpes_bake.plots import position_plot

        accuracy, logprob = ({one.label: one.by_position(metric) for one in self.entries} for metric in METRICS)
        title = f"Key-value retrieval, {self.task.contexts} contexts, 95 % intervals"
        position_plot(accuracy, logprob, self.task.gold_positions, path, pairs=self.task.pairs, title=title)


def _interval(interval: Interval) -> dict[str, float | None]:
    numbers = [value if math.isfinite(value) else None for value in interval]
    return dict(zip(("mean", "low", "high"), numbers, strict=True))


def evaluate(
    models: Sequence[str],
    task: KVRetrieval,
    *,
    factors: Sequence[Path] = (),
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    batch_size: int | None = None,
    trust_remote_code: bool = False,
    on_progress: Callable[[str, float], None] = lambda label, share: None,
) -> Evaluation:
    """Score each model (base or baked directory, Hub name), and the first with each factors file, on `task`.

    on_progress is given the label of the model at work and the share of its questions that are done.
    Raises InputError before any weight is read when something cannot work.
    """
    # Revisions belong to the Hub; a local directory beside a model of the Hub has none.
    sources = [open_source(one, revision=None if Path(one).is_dir() else revision, baked=True) for one in models]
    if revision is not None and all(Path(one).is_dir() for one in models):
        raise InputError("--revision is for models on the Hub, and all models given are local directories")
    for source in sources:
        if not source.architecture.endswith("ForCausalLM"):
            raise InputError(f"{source.name} is a {source.architecture}, which answers nothing; give a causal LM")
    with_factors = [_factors(path, sources[0]) for path in factors]

    from transformers.utils import logging

    from lpes_bake.search.device import pick_device, pick_dtype

    # Loading a baked directory's tokenizer without its code makes transformers warn of a model type it does not know.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    where = pick_device(device)
    precision = pick_dtype(dtype, where)
    examples = task.examples()
    tokenizers = [load_tokenizer(source, trust_remote_code=trust_remote_code) for source in sources]
    for source, tokenizer in zip(sources, tokenizers, strict=True):
        check_lengths(examples, tokenizer, source)

    from lpes_bake.search.scoring import Scorer

    entries: list[Entry] = []
    labels = _labels(models, sources, factors)
    for i, (source, tokenizer) in enumerate(zip(sources, tokenizers, strict=True)):
        own = None if source.factors is None else tuple(source.factors)
        variants = [own, *with_factors] if i == 0 else [own]
        on_progress(labels[0], 0.0)
        scorer = Scorer(_load(source, where, precision), tokenizer, examples, batch_size=batch_size)
        for variant in variants:
            label = labels.pop(0)
            scores = scorer.score(variant, lambda share, label=label: on_progress(label, share))  # type: ignore[misc]
            entries.append(Entry(label, source.name, source.revision, variant, scores))
        # The model goes before the next one comes: together they may not fit.
        del scorer
    return Evaluation(task, str(where), str(precision).removeprefix("torch."), entries)


def _factors(path: Path, source: Source) -> tuple[float, ...]:
    if source.factors is not None:
        raise InputError(f"--factors is for a base model, and {source.name} is baked already; give its base first")
    found = load_factors(path)
    check_factors(found, source)
    return found.layer_rope_scaling


def _labels(models: Sequence[str], sources: Sequence[Source], factors: Sequence[Path]) -> list[str]:
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


def _load(source: Source, device: Any, dtype: Any) -> Any:
    """A base model, or a baked one, through lpes_bake's own copy of the files that ship."""
    if source.factors is None:
        return load_model(source, device, dtype)
    from lpes_bake.search.models import load_whole

    modeling = importlib.import_module(f"lpes_bake.modeling.{source.family.module}")
    model_class = getattr(modeling, f"{source.family.prefix}ForCausalLM")
    try:
        return load_whole(model_class, source.path, torch_dtype=dtype).to(device).eval()
    except (OSError, RuntimeError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"{source.name} cannot be loaded on {device}: {first_line(error)}") from error
