"""Benchmarks on models side by side: the same prompts to each, answered freely, with paired intervals over documents.

torch is imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lpes_bake.comparison import ScoredModel, numbers
from lpes_bake.evaluate import distinct_labels
from lpes_bake.loading import load_model, load_tokenizer, open_sources
from lpes_bake.long_text.metrics import score_of
from lpes_bake.long_text.questions import Benchmark, fitted
from lpes_bake.search.errors import InputError
from lpes_bake.search.statistics import Interval

RESAMPLES = 2000
# Of what a model's generation_config.json says.
KEPT_IN_GENERATION = ("eos_token_id", "pad_token_id", "cache_implementation")


@dataclass(frozen=True)
class Answers:
    """One model's answers to a benchmark. parts: (questions, parts), each answer's metric."""

    texts: tuple[str, ...]
    parts: NDArray[np.float64]


@dataclass(frozen=True)
class Entry(ScoredModel):
    """One model, with its answers to each benchmark."""

    answers: tuple[Answers, ...]


@dataclass(frozen=True)
class LongEvaluation:
    """What was measured; the first entry is what the others are compared with.

    cut: of each benchmark, the prompts whose document was cut to fit into `limit` tokens with the answer.
    """

    benchmarks: tuple[Benchmark, ...]
    cut: tuple[int, ...]
    limit: int
    prompt_format: str
    device: str
    dtype: str
    entries: tuple[Entry, ...]

    def score(self, entry: Entry, benchmark: int) -> Interval:
        """(score, low, high), 0 to 100, with a 95 % bootstrap interval over documents."""
        return self._interval(benchmark, entry)

    def difference(self, entry: Entry, benchmark: int) -> Interval:
        """`entry` minus the first one, by the same documents."""
        return self._interval(benchmark, entry, self.entries[0])

    def _interval(self, benchmark: int, entry: Entry, base: Entry | None = None) -> Interval:
        documents = [question.unit for question in self.benchmarks[benchmark].questions]
        parts = [one.answers[benchmark].parts for one in (entry, base) if one is not None]
        return bootstrap(documents, *parts)

    def to_json(self) -> dict[str, Any]:
        """Plain data. Intervals are [score, low, high]; numbers that are not finite are null."""
        return {
            "prompt_format": self.prompt_format,
            "device": self.device,
            "dtype": self.dtype,
            "limit": self.limit,
            "models": [entry.facts() for entry in self.entries],
            "benchmarks": [
                {
                    "name": one.name,
                    "metric": one.metric_name,
                    "questions": len(one.questions),
                    "left_out": one.left_out,
                    "cut": self.cut[i],
                    "models": [self._entry(entry, i) for entry in self.entries],
                }
                for i, one in enumerate(self.benchmarks)
            ],
        }

    def _entry(self, entry: Entry, benchmark: int) -> dict[str, Any]:
        result: dict[str, Any] = {"label": entry.label, "score": numbers(self.score(entry, benchmark))}
        if entry is not self.entries[0]:
            difference = numbers(self.difference(entry, benchmark))
            result["difference"] = {"against": self.entries[0].label, "score": difference}
        answers = entry.answers[benchmark]
        result["answers"] = [
            {"text": text, "parts": parts} for text, parts in zip(answers.texts, answers.parts.tolist(), strict=True)
        ]
        return result


def bootstrap(
    documents: Sequence[str], parts: NDArray[np.float64], base: NDArray[np.float64] | None = None
) -> Interval:
    """(score, low, high) of `parts`, or of its score minus that of `base`: a 95 % percentile bootstrap over documents.

    parts, base: (questions, parts). documents: that of each question; questions about one are drawn together. With one
    document the bounds are NaN: nothing is known about the spread.
    """
    numbered = {document: index for index, document in enumerate(dict.fromkeys(documents))}
    of = [numbered[document] for document in documents]
    counts = np.bincount(of).astype(np.float64)

    def scores(drawn: NDArray[np.int64]) -> NDArray[np.float64]:
        """The score on each row of documents."""
        found = []
        for one in (parts, base):
            if one is not None:
                sums = np.zeros((len(counts), one.shape[1]))
                np.add.at(sums, of, one)
                found.append(score_of(sums[drawn].sum(-2) / counts[drawn].sum(-1)[..., None]))
        return found[0] if base is None else found[0] - found[1]

    everything = float(scores(np.arange(len(counts))))
    if len(counts) == 1:
        return everything, float("nan"), float("nan")
    resampled = scores(np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts))))
    low, high = np.quantile(resampled, [0.025, 0.975])
    return everything, float(low), float(high)


def evaluate_long(
    models: Sequence[str],
    benchmarks: Sequence[Benchmark],
    *,
    prompt_format: str = "auto",
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    on_progress: Callable[[str, float], None] = lambda label, share: None,
) -> LongEvaluation:
    """Let each model (base or baked directory, Hub name) answer all questions by greedy decoding, one by one.

    Documents are cut to the shortest model's positions, as the benchmarks' authors do, so that all are asked the same.
    on_progress is given the label of the model at work and the share of its questions that are done. Raises InputError
    before any weight is read when something cannot work.
    """
    for one in benchmarks:
        # What a metric needs must be there before there is anything to score.
        one.metric("", one.questions[0].references)
    sources = open_sources(models, revision)

    from transformers import GenerationConfig
    from transformers.utils import logging

    from lpes_bake.search.device import pick_device, pick_dtype

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    where = pick_device(device)
    precision = pick_dtype(dtype, where)
    tokenizers = [load_tokenizer(source, trust_remote_code=trust_remote_code) for source in sources]
    limit = min(source.max_positions for source in sources)
    prompts = [
        [
            [fitted(question, tokenizer, prompt_format, limit - one.max_new_tokens) for question in one.questions]
            for one in benchmarks
        ]
        for tokenizer in tokenizers
    ]
    cut = [[[was_cut for _, was_cut in one] for one in found] for found in prompts]
    for source, found in zip(sources, cut, strict=True):
        if found != cut[0]:
            raise InputError(
                f"the tokenizer of {source.name} cuts other documents than that of {sources[0].name}, so they cannot "
                "be compared; evaluate them one by one"
            )
    labels = distinct_labels(models, sources)
    entries = []
    for source, tokenizer, label, found_prompts in zip(sources, tokenizers, labels, prompts, strict=True):
        on_progress(label, 0.0)
        model = load_model(source, where, precision)
        # Nothing that changes what is said but what ends a text: a repetition penalty, for one, is not greedy decoding.
        model.generation_config = GenerationConfig(
            **{name: getattr(model.generation_config, name, None) for name in KEPT_IN_GENERATION}
        )
        # The longest first, so that memory runs out at once or never.
        order = sorted(
            (
                (len(tokens) + one.max_new_tokens, i, k)
                for i, one in enumerate(benchmarks)
                for k, (tokens, _) in enumerate(found_prompts[i])
            ),
            reverse=True,
        )
        texts = [[""] * len(one.questions) for one in benchmarks]
        for done, (_, i, k) in enumerate(order, 1):
            tokens, _ = found_prompts[i][k]
            texts[i][k] = _answer(model, source.name, tokenizer, tokens, benchmarks[i].max_new_tokens)
            on_progress(label, done / len(order))
        answers = []
        for one, said in zip(benchmarks, texts, strict=True):
            parts = [one.metric(text, q.references) for text, q in zip(said, one.questions, strict=True)]
            answers.append(Answers(tuple(said), np.array(parts, dtype=np.float64)))
        factors = None if source.factors is None else tuple(source.factors)
        entries.append(Entry(label, source.name, source.revision, factors, tuple(answers)))
        # The model goes before the next one comes: together they may not fit.
        del model
    return LongEvaluation(
        tuple(benchmarks),
        tuple(sum(one) for one in cut[0]),
        limit,
        prompt_format,
        str(where),
        str(precision).removeprefix("torch."),
        tuple(entries),
    )


def _answer(model: Any, name: str, tokenizer: Any, tokens: Sequence[int], max_new_tokens: int) -> str:
    """What greedy decoding says behind a prompt. InputError for a model that gives NaN or needs too much memory."""
    import torch

    from lpes_bake.search.scoring import out_of_memory

    def refuse_nan(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # The largest of them would be some token, and some metrics take silence for an answer.
        if scores.isnan().any():
            raise InputError(f"{name} gives NaN; look for NaN in its weights, or give another --dtype")
        return scores

    prompt = torch.tensor([list(tokens)], device=model.get_input_embeddings().weight.device)
    try:
        with torch.inference_mode():
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                logits_processor=[refuse_nan],
            )
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise InputError(
            f"out of memory on {prompt.device} with a prompt of {len(tokens)} tokens; give another --dtype or --device"
        ) from error
    text: str = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
    return text.strip()
