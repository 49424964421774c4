"""A search from a model to a RUN directory: checks, the study, the final re-scoring, the files.

RUN holds settings.json, journal.jsonl (each evaluation as it was made), and, once the search has
ended, factors.json, curve.png and positions.png. torch is imported inside functions only.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from lpes_bake import __version__
from lpes_bake.factors import Factors, base_facts
from lpes_bake.search.curve import CurveSettings, identity_points
from lpes_bake.search.errors import InputError
from lpes_bake.search.genetic import GeneticSearch, GeneticSettings, Individual
from lpes_bake.search.journal import Journal
from lpes_bake.search.study import Study, StudyResult, Trial, differences
from lpes_bake.search.tasks import Example, KVRetrieval, encode, even_positions
from lpes_bake.source import Source, open_source, parse_json, require_tokenizer, weight_files

SETTINGS_FILE = "settings.json"
JOURNAL_FILE = "journal.jsonl"
FACTORS_FILE = "factors.json"
CURVE_PLOT = "curve.png"
POSITION_PLOT = "positions.png"

# The winner is judged on contexts that no search can have seen: seeds below this are for searches.
HELDOUT_SEED = 1_000_000
HELDOUT_POSITIONS = 5

# Read from each end of a weight file to tell it from another.
DIGEST_BYTES = 1 << 20

Interval = tuple[float, float, float]


@dataclass(frozen=True)
class SearchSettings:
    """All that decides the result of a search, but for the model.

    The paper finds about 200 instances enough: 67 contexts, each asked at 3 positions.
    """

    task: KVRetrieval = field(default_factory=lambda: KVRetrieval(contexts=67))
    curve: CurveSettings = field(default_factory=CurveSettings)
    genetic: GeneticSettings = field(default_factory=GeneticSettings)
    fitness: str = "logprob"
    heldout_contexts: int = 100
    device: str | None = None
    dtype: str | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.fitness not in ("logprob", "accuracy"):
            raise InputError(f"fitness must be logprob or accuracy; got {self.fitness!r}")
        if self.heldout_contexts < 2:
            raise InputError(f"heldout_contexts is {self.heldout_contexts}; an interval needs at least 2")
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}; it must be at least 1")
        if not 0 <= self.task.seed < HELDOUT_SEED:
            raise InputError(f"seed is {self.task.seed}; it must be from 0 to {HELDOUT_SEED - 1}")

    @property
    def heldout(self) -> KVRetrieval:
        """The unseen questions: other contexts, and more positions than the search asks for."""
        positions = {*self.task.gold_positions, *even_positions(self.task.pairs, HELDOUT_POSITIONS)}
        return replace(
            self.task,
            seed=self.task.seed + HELDOUT_SEED,
            contexts=self.heldout_contexts,
            positions=tuple(sorted(positions)),
        )

    def flat(self) -> dict[str, Any]:
        """All settings by the names of their options, as JSON values."""
        nested = asdict(self)
        flat = {**nested.pop("task"), **nested.pop("curve"), **nested.pop("genetic"), **nested}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> SearchSettings:
        """The settings from such a dict; names that are missing keep their defaults."""
        parts: dict[str, Any] = {}
        for name, part in (("task", KVRetrieval), ("curve", CurveSettings), ("genetic", GeneticSettings)):
            names = {one.name for one in fields(part)}
            parts[name] = part(**{key: value for key, value in values.items() if key in names})
        if parts["task"].positions is not None:
            parts["task"] = replace(parts["task"], positions=tuple(parts["task"].positions))
        own = ("fitness", "heldout_contexts", "device", "dtype", "batch_size")
        return cls(**parts, **{name: values[name] for name in own if name in values})


@dataclass(frozen=True)
class Events:
    """Where a search reports to: what it is doing, each trial, and how many there are at most."""

    status: Callable[[str], None] = lambda _: None
    trial: Callable[[Trial], None] = lambda _: None


@dataclass(frozen=True)
class SearchResult:
    """What a search found. verdict is "better", "uncertain" (better, but the interval holds 0) or "identity"."""

    factors: Factors
    verdict: str
    message: str
    study: StudyResult
    comparison: Comparison


@dataclass(frozen=True)
class Comparison:
    """The winner beside the identity on unseen questions, and on short plain text.

    intervals: "accuracy" and "logprob" of the identity and of the winner, (mean, low, high) at each
    position. difference: winner − identity in what was searched for, (mean, low, high).
    """

    scores: dict[str, Any]
    intervals: dict[str, list[list[Interval]]]
    difference: Interval


def stored_settings(out: Path) -> dict[str, Any]:
    """The settings of the run in `out`, for going on with it."""
    path = out / SETTINGS_FILE
    if not path.is_file() or not (out / JOURNAL_FILE).is_file():
        raise InputError(f"there is no run to resume in {out}; leave out --resume to start one")
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; restore it or start a new run") from error
    if not isinstance(stored, dict):
        raise InputError(f"{path} does not hold settings; restore it or start a new run")
    return stored


def check_out(out: Path, *, resume: bool) -> None:
    """InputError unless a run can be written to `out`, or gone on with."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give a directory for the run")
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{out} cannot be written, because of {place}; give another directory")
    if resume:
        stored_settings(out)
    # The settings alone are what a run leaves that is killed before its first line in the journal.
    elif out.is_dir() and any(path.name != SETTINGS_FILE for path in out.iterdir()):
        hint = "go on with its run with --resume, or " if (out / JOURNAL_FILE).exists() else ""
        raise InputError(f"{out} is not empty; {hint}give a new directory")


def check_outside(out: Path, source: Source) -> None:
    """InputError when `out` lies in the model's own directory."""
    inside, model = out.resolve(), source.path.resolve()
    if inside == model or model in inside.parents:
        raise InputError(f"{out} lies inside the model's directory {source.path}; give a directory elsewhere")


def load_tokenizer(source: Source, *, trust_remote_code: bool) -> Any:
    """The model's tokenizer. Code of the source runs only when it is trusted; nothing is ever asked on stdin."""
    from transformers import AutoTokenizer

    require_tokenizer(source)
    try:
        return AutoTokenizer.from_pretrained(source.path, trust_remote_code=trust_remote_code)
    except Exception as error:  # many kinds, from many libraries
        if "trust_remote_code" in str(error):
            raise InputError(
                f"the tokenizer of {source.name} brings its own Python code: read it, then give --trust-remote-code"
            ) from error
        raise InputError(f"the tokenizer of {source.name} cannot be loaded: {first_line(error)}") from error


def check_lengths(examples: Sequence[Example], tokenizer: Any, source: Source) -> None:
    """InputError when a prompt with its answer is longer than the model's positions, before weights are loaded."""
    limit = source.config.get("max_position_embeddings")
    longest = max(len(prompt) + len(answer) for prompt, answer in (encode(one, tokenizer) for one in examples))
    if isinstance(limit, int) and longest > limit:
        raise InputError(
            f"the longest prompt with its answer has {longest} tokens, but {source.name} has {limit} positions "
            "(max_position_embeddings); use fewer pairs or shorter keys"
        )


def first_line(error: BaseException) -> str:
    """An error in one line, without its traceback."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def search(
    model: str,
    out: Path,
    settings: SearchSettings,
    *,
    revision: str | None = None,
    resume: bool = False,
    trust_remote_code: bool = False,
    events: Events | None = None,
) -> SearchResult:
    """Search factors for `model` and write all of RUN to `out`.

    Checks come first: InputError before any weight is read. Raises StudyStopped when evaluations fail
    again and again; KeyboardInterrupt leaves a journal that resume=True goes on with.
    """
    events = events or Events()
    check_out(out, resume=resume)
    source = open_source(model, revision=revision)
    check_outside(out, source)
    if not source.architecture.endswith("ForCausalLM"):
        raise InputError(f"{source.name} is a {source.architecture}, which answers nothing; a search needs a causal LM")
    layers = source.num_hidden_layers
    rng = np.random.default_rng(settings.task.seed)
    sampler = GeneticSearch(settings.curve, settings.genetic, layers, rng)

    from lpes_bake.search.device import pick_device, pick_dtype

    device = pick_device(settings.device)
    dtype = pick_dtype(settings.dtype, device)
    # What "auto" came to is part of the settings: another device or dtype gives other scores.
    settings = replace(settings, device=device.type, dtype=str(dtype).removeprefix("torch."))
    header = {"base": base_facts(source), "weights": weights_digest(source), **settings.flat()}
    if resume and (different := differences(stored_settings(out), header)):
        raise InputError(f"{out} is a run with other settings ({'; '.join(different)}); give the same, or a new --out")
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    examples, unseen = settings.task.examples(), settings.heldout.examples()
    check_lengths([*examples, *unseen], tokenizer, source)

    events.status(f"loading {source.name} on {device} in {settings.dtype}")
    loaded = load_model(source, device, dtype)

    from lpes_bake.search.scoring import Scorer

    scorer = Scorer(loaded, tokenizer, examples, batch_size=settings.batch_size)
    out.mkdir(parents=True, exist_ok=True)
    if not resume:
        (out / SETTINGS_FILE).write_text(json.dumps(header, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    identity_score: list[float | None] = []

    def on_trial(trial: Trial) -> None:
        if trial.number == 0:
            identity_score.append(trial.score)
        events.trial(trial)

    with Journal(out / JOURNAL_FILE) as journal:
        study = Study(
            sampler, lambda factors: scorer.score(factors).fitness(settings.fitness), journal, header, on_trial
        ).run()
        events.status("scoring the winner on unseen questions")
        comparison = compare(loaded, tokenizer, unseen, study.best.individual.factors, settings)
        result = conclude(study, comparison, source, settings, identity_score[0])
        result.factors.save(out / FACTORS_FILE)
        draw(result, out)
    return result


def weights_digest(source: Source) -> str:
    """Tells two models with one config apart: a hash of the size and both ends of each weight file.

    The whole files would take minutes to read for a large model, before each resumed run.
    """
    digest = hashlib.sha256()
    for path in weight_files(source.path):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(DIGEST_BYTES))
            file.seek(max(0, size - DIGEST_BYTES))
            digest.update(file.read(DIGEST_BYTES))
    return digest.hexdigest()[:16]


def load_model(source: Source, device: Any, dtype: Any) -> Any:
    """The model through the files that ship, on its device."""
    from transformers.utils import logging

    from lpes_bake.search.models import load_scaled

    logging.disable_progress_bar()
    try:
        return load_scaled(source.path, dtype=dtype, device=device)
    except (OSError, RuntimeError, ValueError, KeyError, ImportError) as error:
        raise InputError(f"{source.name} cannot be loaded on {device}: {first_line(error)}") from error


def compare(
    model: Any, tokenizer: Any, examples: Sequence[Example], winner: Sequence[float], settings: SearchSettings
) -> Comparison:
    """Score the winner and the identity on the same unseen questions; contexts are the sampling unit."""
    from lpes_bake.search.scoring import Scorer
    from lpes_bake.search.short_text import text_logprob
    from lpes_bake.search.statistics import mean_interval, paired_interval

    scorer = Scorer(model, tokenizer, examples, batch_size=settings.batch_size)
    identity = [1.0] * len(winner)
    base = scorer.score(identity)
    lpes = scorer.score(winner) if list(winner) != identity else base
    gains: dict[str, Any] = {}
    for kind in ("accuracy", "logprob"):
        first, second = lpes.values(kind), base.values(kind)
        gains[kind] = {
            "mean": list(paired_interval(first.mean(1), second.mean(1))),
            "by_position": [list(paired_interval(a, b)) for a, b in zip(first.T, second.T, strict=True)],
        }
    texts = [text_logprob(model, tokenizer, factors) for factors in (identity, winner)]
    intervals = {
        kind: [[mean_interval(column) for column in one.values(kind).T] for one in (base, lpes)]
        for kind in ("accuracy", "logprob")
    }
    task = settings.heldout
    scores = {
        "task": "key-value retrieval",
        "pairs": task.pairs,
        "key_width": task.key_width,
        "seed": task.seed,
        "contexts": task.contexts,
        "positions": list(task.gold_positions),
        "base": measured(base),
        "lpes": measured(lpes),
        "difference": gains,
        "short_text": {
            "paragraphs": len(texts[0]),
            "base": float(texts[0].mean()),
            "lpes": float(texts[1].mean()),
            "difference": list(paired_interval(texts[1], texts[0])),
        },
    }
    mean, low, high = gains[settings.fitness]["mean"]
    return Comparison(scores, intervals, (mean, low, high))


def measured(scores: Any) -> dict[str, Any]:
    """Accuracy and log-probability of one model: mean, minimum and spread over positions, and by position."""
    whole: dict[str, Any] = scores.to_json()
    return {kind: whole[kind] for kind in ("accuracy", "logprob")}


def conclude(
    study: StudyResult, comparison: Comparison, source: Source, settings: SearchSettings, identity_score: float | None
) -> SearchResult:
    """Judge the winner on what it was not searched on, and write down what there is to know about it."""
    winner = study.best.individual
    ones = (1.0,) * source.num_hidden_layers
    mean, low, high = comparison.difference
    what = {"logprob": "log-probability", "accuracy": "accuracy"}[settings.fitness]
    numbers = f"{what} {mean:+.4f}, 95 % interval {low:+.4f} to {high:+.4f}, {settings.heldout_contexts} contexts"
    if winner.factors == ones:
        verdict, message = "identity", "The search found nothing better than the identity (all factors 1)."
    elif not mean > 0:
        verdict = "identity"
        message = (
            "The search found nothing better than the identity: its winner is not better on unseen questions "
            f"({numbers}). factors.json holds the identity (all factors 1)."
        )
    elif not low > 0:
        verdict = "uncertain"
        message = (
            f"The winner may be no better than the base model: the interval on unseen questions holds 0 ({numbers})."
        )
    else:
        verdict, message = "better", f"The winner is better than the base model on unseen questions ({numbers})."
    kept = winner if verdict != "identity" else Individual(identity_points(settings.curve, len(ones)), ones)
    factors = Factors(
        layer_rope_scaling=kept.factors,
        base=base_facts(source),
        curve={"points": [list(point) for point in kept.points], **asdict(settings.curve)},
        search={
            **{name: value for name, value in settings.flat().items() if name not in asdict(settings.curve)},
            "evaluations": study.trials,
            "failed": study.failed,
            "ended": study.ended,
            "best_score": study.best.score,
            "identity_score": identity_score,
            "verdict": message,
        },
        scores=comparison.scores if verdict != "identity" else without_winner(comparison.scores),
        tool_version=__version__,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    return SearchResult(factors, verdict, message, study, comparison)


def without_winner(scores: Mapping[str, Any]) -> dict[str, Any]:
    """The base model's scores alone: those of a winner that lost do not belong to the identity."""
    kept = {name: value for name, value in scores.items() if name not in ("lpes", "difference", "short_text")}
    short = scores["short_text"]
    return {**kept, "short_text": {"paragraphs": short["paragraphs"], "base": short["base"]}}


def draw(result: SearchResult, out: Path) -> None:
    """The two pictures of a run."""
    from lpes_bake.plots import curve_plot, position_plot

    factors, scores = result.factors, result.comparison.scores
    points = (factors.curve or {})["points"]
    curve_plot(factors.layer_rope_scaling, out / CURVE_PLOT, control_points=points)
    labels = ["base", "LPES" if result.verdict != "identity" else "the search's winner, not kept"]
    if result.study.best.individual.factors == (1.0,) * len(factors.layer_rope_scaling):
        labels.pop()
    accuracy, logprob = (
        dict(zip(labels, result.comparison.intervals[kind], strict=False)) for kind in ("accuracy", "logprob")
    )
    position_plot(accuracy, logprob, scores["positions"], out / POSITION_PLOT, pairs=scores["pairs"])
