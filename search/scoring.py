"""The scoring engine: how well a model with given factors answers the examples.

One teacher-forced pass gives all that is wanted: the answer's log-probability, and whether greedy
decoding would begin with it. Questions about one context share their prompt's beginning, which is
computed once; logits are computed at answer positions only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from lpes_bake.search.errors import InputError
from lpes_bake.search.models import set_factors
from lpes_bake.search.statistics import spread
from lpes_bake.search.tasks import Example, encode

# Tokens in one batch. A CPU gains nothing from more; a GPU that cannot hold so many backs off.
BATCH_TOKENS = {"cpu": 1024, "cuda": 16384, "mps": 4096}
# Their frequencies depend on the longest position of a call, so each prompt needs a call of its own.
LENGTH_DEPENDENT = ("dynamic", "longrope")

FITNESS = ("logprob", "accuracy")


@dataclass(frozen=True)
class Scores:
    """Scores of one candidate. Rows are contexts, columns gold positions."""

    positions: tuple[int, ...]
    logprob: NDArray[np.float64]
    """(contexts, positions): mean log-probability of the answer's tokens; NaN where the model gave NaN."""
    exact: NDArray[np.bool_]
    """(contexts, positions): whether greedy decoding begins with the answer."""
    tokens: int
    """Tokens that went through the model, padding left out."""

    def fitness(self, kind: str = "logprob") -> float:
        """Mean over contexts and positions of "logprob" or "accuracy"; NaN when any score is NaN."""
        return float(self.values(kind).mean())

    def values(self, kind: str) -> NDArray[np.float64]:
        """(contexts, positions) of "logprob" or "accuracy" as floats, NaN where the model gave NaN."""
        if kind not in FITNESS:
            raise InputError(f"fitness must be one of {', '.join(FITNESS)}; got {kind!r}")
        if kind == "logprob":
            return self.logprob
        return np.where(np.isnan(self.logprob), np.nan, self.exact)

    def by_position(self) -> list[dict[str, float]]:
        """One dict a gold position: position, accuracy, logprob."""
        columns = zip(self.positions, self.values("accuracy").mean(0), self.logprob.mean(0), strict=True)
        return [{"position": p, "accuracy": float(a), "logprob": float(v)} for p, a, v in columns]

    def to_json(self) -> dict[str, Any]:
        """Plain data: sample size, by position, and mean, minimum and spread over positions (NaN is null)."""
        result: dict[str, Any] = {
            "contexts": len(self.logprob),
            "positions": list(self.positions),
            "tokens": self.tokens,
        }
        for kind in ("accuracy", "logprob"):
            by_position = self.values(kind).mean(0)
            result[kind] = {
                "by_position": [_number(value) for value in by_position],
                "mean": _number(by_position.mean()),
                "minimum": _number(by_position.min()),
                "spread": _number(spread(by_position)),
            }
        return result


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


@dataclass(frozen=True)
class _Group:
    """Questions that begin with the same tokens: computed as one prefix and one row of suffixes."""

    prefix: list[int]
    suffixes: list[list[int]]
    """Each: the rest of the prompt (at least its last token) and the answer but for its last token."""
    answers: list[list[int]]
    rows: list[int]
    """Indices of the questions in the list of examples."""

    @property
    def tokens(self) -> int:
        return len(self.prefix) + sum(len(suffix) for suffix in self.suffixes)


class Scorer:
    """Scores factors on fixed examples with one loaded model, whose factors are swapped in place."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        examples: Sequence[Example],
        *,
        batch_size: int | None = None,
        shared_prefixes: bool = True,
    ) -> None:
        """model: what `load_scaled` gives. batch_size: contexts in a batch; None lets the device decide.

        shared_prefixes=False computes every prompt whole and by itself, as is always done for models
        whose frequencies depend on the length of the call (dynamic, longrope) or whose window slides.

        Raises InputError when a prompt with its answer is longer than the model's positions.
        """
        self.model = model
        self.device = model.get_input_embeddings().weight.device
        # transformers 5.24 renamed it.
        self._cache_name = "cache" if "cache" in signature(model.base_model.forward).parameters else "past_key_values"
        self.batch_size = batch_size
        self.batch_tokens = BATCH_TOKENS.get(self.device.type, 4096)
        self.plain = (
            not shared_prefixes
            or model.base_model.rotary_emb.rope_type in LENGTH_DEPENDENT
            or bool(getattr(model.config, "use_sliding_window", False))
        )
        self.positions = tuple(dict.fromkeys(example.position for example in examples))
        contexts = list(dict.fromkeys(example.context for example in examples))
        if len(examples) != len(contexts) * len(self.positions):
            raise ValueError("every context must be asked once for every gold position")
        self.shape = (len(contexts), len(self.positions))
        self._cells = [
            contexts.index(example.context) * len(self.positions) + self.positions.index(example.position)
            for example in examples
        ]
        encoded = [encode(example, tokenizer) for example in examples]
        self._check_lengths(encoded)
        together: dict[int, list[int]] = {}
        for row, example in enumerate(examples):
            together.setdefault(row if self.plain else example.context, []).append(row)
        groups = [_group([encoded[row] for row in rows], rows) for rows in together.values()]
        # Like lengths together waste little on padding; longest first, so that memory runs out at once or never.
        self._groups = sorted(groups, key=lambda group: -group.tokens)

    def _check_lengths(self, encoded: Sequence[tuple[list[int], list[int]]]) -> None:
        longest = max(len(prompt) + len(answer) for prompt, answer in encoded)
        limit = self.model.config.max_position_embeddings
        if longest > limit:
            raise InputError(
                f"the longest prompt with its answer has {longest} tokens, but the model has only {limit} positions "
                "(max_position_embeddings); use fewer pairs or shorter keys"
            )

    def score(
        self, factors: Sequence[float] | None = None, on_progress: Callable[[float], None] | None = None
    ) -> Scores:
        """Score the model with `factors`, one a layer; None leaves the model as it is.

        on_progress is given the share of the work that is done, batch by batch.
        """
        if factors is not None:
            set_factors(self.model, factors)
        logprob = np.full(self.shape, np.nan)
        exact = np.zeros(self.shape, dtype=np.bool_)
        total = sum(group.tokens for group in self._groups)
        done = start = 0
        while start < len(self._groups):
            batch = self._groups[start : start + self._batch_length(start)]
            try:
                results = self._run(batch)
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                self._back_off(batch)
                continue
            rows = [row for group in batch for row in group.rows]
            for row, (value, right) in zip(rows, results, strict=True):
                logprob.flat[self._cells[row]] = value
                exact.flat[self._cells[row]] = right
            start += len(batch)
            done += sum(group.tokens for group in batch)
            if on_progress is not None:
                on_progress(done / total)
        return Scores(self.positions, logprob, exact, total)

    def _batch_length(self, start: int) -> int:
        """Groups in the batch that begins at `start`, whose first group is its longest."""
        if self.plain:
            return 1
        if self.batch_size is not None:
            return self.batch_size
        return max(1, self.batch_tokens // self._groups[start].tokens)

    def _back_off(self, batch: Sequence[_Group]) -> None:
        """After running out of memory: half the batch from now on."""
        if len(batch) == 1:
            raise InputError(
                f"out of memory on {self.device} with a single prompt of {batch[0].tokens} tokens; "
                "use shorter prompts, a smaller dtype or another device"
            )
        if self.batch_size is not None:
            self.batch_size = len(batch) // 2
        else:
            self.batch_tokens = sum(group.tokens for group in batch) // 2
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _run(self, batch: Sequence[_Group]) -> list[tuple[float, bool]]:
        """(log-probability, exact match) for each question of the batch, group by group."""
        hidden = self._plain_hidden(batch[0]) if self.plain else self._shared_hidden(batch)
        targets = self._tensor([token for group in batch for answer in group.answers for token in answer])
        logits = self.model.lm_head(hidden).float()
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
        right = (logits.argmax(-1) == targets) & ~logprobs.isnan()
        lengths = [len(answer) for group in batch for answer in group.answers]
        return [
            (float(values.double().mean()), bool(hits.all()))
            for values, hits in zip(logprobs.cpu().split(lengths), right.cpu().split(lengths), strict=True)
        ]

    def _plain_hidden(self, group: _Group) -> torch.Tensor:
        """Last hidden states where the answer of the group's only question is predicted: (tokens, hidden_size)."""
        tokens = self._tensor([group.prefix + group.suffixes[0]])
        hidden: torch.Tensor = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden[0, -len(group.answers[0]) :]

    def _shared_hidden(self, batch: Sequence[_Group]) -> torch.Tensor:
        """Last hidden states where answers are predicted, question by question: (tokens, hidden_size).

        Two calls: the prefixes fill a cache, then all suffixes of a group pass as one row beside it.
        """
        longest_prefix = max(len(group.prefix) for group in batch)
        cache = None
        if longest_prefix:
            # Padding stands on the right, where causal attention keeps it from all that comes before.
            prefixes = [group.prefix + [0] * (longest_prefix - len(group.prefix)) for group in batch]
            cache = DynamicCache()
            self.model.base_model(input_ids=self._tensor(prefixes), use_cache=True, **{self._cache_name: cache})
        tokens, positions, mask = _suffix_rows(batch, longest_prefix)
        hidden: torch.Tensor = self.model.base_model(
            input_ids=self._tensor(tokens),
            position_ids=self._tensor(positions),
            attention_mask=self._additive(mask),
            use_cache=cache is not None,
            **{self._cache_name: cache},
        ).last_hidden_state
        picks: list[int] = []
        for row, group in enumerate(batch):
            end = row * len(tokens[0])
            for suffix, answer in zip(group.suffixes, group.answers, strict=True):
                end += len(suffix)
                picks.extend(range(end - len(answer), end))
        return hidden.flatten(0, 1)[self._tensor(picks)]

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    def _additive(self, mask: NDArray[np.bool_]) -> torch.Tensor:
        """0 where a token may look, the dtype's minimum elsewhere: what every transformers version takes as is."""
        allowed = torch.from_numpy(mask).to(self.device)[:, None]
        dtype = self.model.dtype
        return torch.zeros(allowed.shape, dtype=dtype, device=self.device).masked_fill_(
            ~allowed, torch.finfo(dtype).min
        )


def _group(encoded: Sequence[tuple[list[int], list[int]]], rows: list[int]) -> _Group:
    """Split the prompts of one context into their common beginning and the rest."""
    prompts = [prompt for prompt, _ in encoded]
    # The last token of a prompt yields the answer's first logits, so it never belongs to the prefix.
    limit = min(len(prompt) for prompt in prompts) - 1
    first = prompts[0]
    common = next((i for i in range(limit) if any(prompt[i] != first[i] for prompt in prompts)), limit)
    return _Group(
        prefix=first[:common],
        suffixes=[prompt[common:] + answer[:-1] for prompt, answer in encoded],
        answers=[answer for _, answer in encoded],
        rows=rows,
    )


def _suffix_rows(
    batch: Sequence[_Group], longest_prefix: int
) -> tuple[list[list[int]], list[list[int]], NDArray[np.bool_]]:
    """All suffixes of a group in one row, padded: tokens, positions (groups, length), and the mask
    (groups, length, longest_prefix + length) that is true where a token may look: at its group's prefix and at
    its own suffix up to itself."""
    length = max(sum(len(suffix) for suffix in group.suffixes) for group in batch)
    tokens, positions = [], []
    mask = np.zeros((len(batch), length, longest_prefix + length), dtype=np.bool_)
    for row, group in enumerate(batch):
        ids: list[int] = []
        places: list[int] = []
        for suffix in group.suffixes:
            start, size = len(ids), len(suffix)
            mask[row, start : start + size, : len(group.prefix)] = True
            own = slice(longest_prefix + start, longest_prefix + start + size)
            mask[row, start : start + size, own] = np.tri(size, dtype=np.bool_)
            ids += suffix
            places += range(len(group.prefix), len(group.prefix) + size)
        padding = length - len(ids)
        # A row that may look nowhere is NaN in some kernels: padding looks at itself.
        for column in range(len(ids), length):
            mask[row, column, longest_prefix + column] = True
        tokens.append(ids + [0] * padding)
        positions.append(places + [0] * padding)
    return tokens, positions, mask


def _out_of_memory(error: RuntimeError) -> bool:
    text = str(error)
    return isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text
