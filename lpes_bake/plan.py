"""What a search will do, checked before any weight is read: model, tasks, three sets of questions, settings.

torch is imported inside functions only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lpes_bake.factors import base_facts, load_factors
from lpes_bake.loading import load_model, load_tokenizer, require_causal
from lpes_bake.search.errors import InputError
from lpes_bake.search.optimizers import make_optimizer
from lpes_bake.search.study import StudySettings
from lpes_bake.search.tasks import PARTS, Task, parse_task
from lpes_bake.settings import GRADIENT_OPTIMIZERS, SearchSettings
from lpes_bake.source import Source, open_source, weight_files

# Read from each end of a weight file to tell it from another.
DIGEST_BYTES = 1 << 20

# What says how many contexts each part gives.
COUNTED_BY = {
    "search": "--contexts and --gradient-contexts",
    "selection": "--selection-contexts",
    "report": "--report-contexts",
}

# Contexts of a task with generated answers that tell whether it is too hard.
DIFFICULTY_CONTEXTS = 4


@dataclass(frozen=True)
class Plan:
    """A search that passed its checks: nothing of it has been computed.

    settings: with device and dtype as "auto" came to. tasks: those that are searched, then those that only
    choose. contexts: by part, a task each; empty where the task has no say in the part. paragraphs: by part.
    """

    source: Source
    settings: SearchSettings
    tasks: tuple[Task, ...]
    searched: int
    tokenizer: Any
    device: Any
    dtype: Any
    contexts: dict[str, list[list[Any]]]
    too_long: list[dict[str, int]]
    paragraphs: dict[str, list[str]]
    header: dict[str, Any]

    @property
    def choosing(self) -> list[int]:
        """The tasks that the winner is chosen by."""
        return list(range(self.searched, len(self.tasks))) or list(range(self.searched))


def make_plan(
    model: str,
    settings: SearchSettings,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_rank: int | None = None,
) -> Plan:
    """Check everything that can be checked before a weight is read. Raises InputError.

    local_rank: number of this process on its machine, where there are several; it picks the GPU.
    """
    source = open_source(model, revision=revision)
    require_causal(source)
    tasks = [parse_task(spec) for spec in (*settings.task, *settings.selection_task)]
    searched = len(settings.task)
    # The optimizer is made to see whether its settings can work.
    optimizer_of(settings, source.num_hidden_layers)

    from lpes_bake.search.device import pick_device, pick_dtype
    from lpes_bake.search.prompts import take

    device = pick_device(settings.device, local_rank)
    dtype = pick_dtype(settings.dtype, device)
    # What "auto" came to is part of the settings: another device or dtype gives other scores.
    settings = dataclasses.replace(settings, device=device.type, dtype=str(dtype).removeprefix("torch."))
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    counts = {
        "search": settings.study.contexts + (settings.study.gradient_contexts if wants_gradients(settings) else 0),
        "selection": settings.selection_contexts,
        "report": settings.report_contexts,
    }
    choosing = range(searched, len(tasks)) if settings.selection_task else range(searched)
    having = {"search": range(searched), "selection": choosing, "report": range(len(tasks))}
    contexts: dict[str, list[list[Any]]] = {part: [[] for _ in tasks] for part in PARTS}
    too_long: list[dict[str, int]] = [{} for _ in tasks]
    for part in PARTS:
        for i in having[part]:
            taken = take(
                tasks[i],
                part,
                settings.seed,
                counts[part],
                tokenizer,
                settings.prompt_format,
                source.max_positions,
                COUNTED_BY[part],
            )
            contexts[part][i] = taken.contexts
            too_long[i][part] = taken.too_long
    check_disjoint(tasks, contexts)
    paragraphs = paragraphs_of(settings, tokenizer, source)
    header = {
        "base": base_facts(source),
        "weights": weights_digest(source),
        "questions": {str(number): task.describe() for number, task in enumerate(tasks, 1)},
        "token_ids": tokens_digest(tokenizer, contexts, paragraphs),
        # Those that come along change from version to version.
        "paragraphs": hashlib.sha256(json.dumps(paragraphs).encode()).hexdigest()[:16],
        "start_factors": start_of(settings, source.num_hidden_layers),
        **settings.flat(),
    }
    return Plan(
        source,
        settings,
        tuple(tasks),
        searched,
        tokenizer,
        device,
        dtype,
        contexts,
        too_long,
        paragraphs,
        # As it is read again: a tuple of a user's task comes back as a list.
        json.loads(json.dumps(header)),
    )


def check_disjoint(tasks: Sequence[Task], contexts: Mapping[str, Sequence[Sequence[Sequence[Any]]]]) -> None:
    """InputError for a question in two parts, as a task that takes no notice of `part` gives: it would be searched
    on, and then taken for unseen."""
    for i, task in enumerate(tasks):
        asked: dict[tuple[str, str], str] = {}
        for part in PARTS:
            for example in (one.example for context in contexts[part][i] for one in context):
                if asked.setdefault((example.prompt, example.lead), part) != part:
                    raise InputError(
                        f"the {task.name} task gives one prompt to its {asked[example.prompt, example.lead]} part and "
                        f"its {part} part; these must share nothing: docs/tasks.md shows how"
                    )


def paragraphs_of(settings: SearchSettings, tokenizer: Any, source: Source) -> dict[str, list[str]]:
    """The short plain text of each part. InputError for a file that has too few, or too long ones."""
    from lpes_bake.search.short_text import read_paragraphs

    paragraphs = read_paragraphs(None if settings.text is None else Path(settings.text))
    for one in itertools.chain(*paragraphs.values()):
        if not 2 <= (tokens := len(tokenizer(one)["input_ids"])) <= source.max_positions:
            raise InputError(
                f"the paragraph {one[:40]!r}… has {tokens} tokens; it must have 2 to {source.max_positions}, the "
                "model's positions"
            )
    return paragraphs


def wants_gradients(settings: SearchSettings) -> bool:
    """Whether the optimizer follows gradients."""
    return settings.optimizer in GRADIENT_OPTIMIZERS


def optimizer_of(settings: SearchSettings, layers: int) -> Any:
    """The optimizer, its chance seeded. Raises InputError for settings that cannot work."""
    rng, start = np.random.default_rng(settings.seed), start_of(settings, layers)
    return make_optimizer(settings.optimizer, settings.curve, settings.genetic, settings.gradient, layers, rng, start)


def start_of(settings: SearchSettings, layers: int) -> tuple[float, ...] | None:
    """The factors to go on from. Raises InputError unless there is one a layer."""
    if settings.start is None:
        return None
    start = load_factors(settings.start).layer_rope_scaling
    if len(start) != layers:
        raise InputError(f"{settings.start} has {len(start)} factors, and the model {layers} layers")
    return start


def first_contexts(study: StudySettings, task: Task) -> int:
    """How many contexts tell whether a task is too hard.

    What is only scored is a piece of the study's own work; what is generated comes on top, so it is little.
    """
    block = study.contexts if study.race == "off" else min(study.first_block, study.contexts)
    return min(block, DIFFICULTY_CONTEXTS) if task.generates else block


def trials_at_most(settings: SearchSettings) -> int:
    """How many trials a search can come to."""
    genetic, gradient = settings.genetic, settings.gradient
    uniform = len(settings.curve.uniform_places) + (settings.start is not None)
    climb = gradient.steps + math.ceil(gradient.steps / gradient.check_every)
    if settings.optimizer == "gradient":
        return uniform + climb
    first = uniform if settings.optimizer == "cma-es" else max(genetic.population, uniform)
    if settings.optimizer == "hybrid":
        # What the climb starts from is scored anew: as a curve through even points.
        return first + genetic.population * (min(genetic.generations, gradient.warmup) - 1) + 1 + climb
    return first + genetic.population * (genetic.generations - 1)


def load_evaluator(plan: Plan) -> Any:
    """The loaded model with the questions and the paragraphs: what computes units."""
    from lpes_bake.search.evaluator import Evaluator

    settings = plan.settings
    model = load_model(
        plan.source,
        plan.device,
        plan.dtype,
        device_map=settings.device_map,
        quantization=settings.quantization,
    )
    return Evaluator(model, plan.tokenizer, plan.tasks, plan.contexts, plan.paragraphs, batch_size=settings.batch_size)


def tokens_digest(
    tokenizer: Any, contexts: Mapping[str, Sequence[Sequence[Sequence[Any]]]], paragraphs: Mapping[str, Sequence[str]]
) -> str:
    """Tells two tokenizers or chat templates apart, and all else that puts questions into other words: a hash of what
    the model is given."""
    digest = hashlib.sha256()
    questions = (one for part in PARTS for task in contexts[part] for context in task for one in context)
    given = itertools.chain.from_iterable((one.prompt, one.answer) for one in questions)
    texts = (tokenizer(one)["input_ids"] for part in PARTS for one in paragraphs[part])
    for ids in itertools.chain(given, texts):
        digest.update(np.array([len(ids), *ids], dtype="<i8").tobytes())
    return digest.hexdigest()[:16]


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
