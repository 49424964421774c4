"""Asking a decoder the questions of a context, by the one plain path that all methods of a comparison take.

A prompt is read, then the answer's tokens are fed for their log-probabilities, or the likeliest ones for a text. What
the questions of a context have in common is read once, by methods that can read a prompt in parts.
The factors' own scoring engine (lpes_bake.search.scoring) comes to the same numbers faster, but for factors only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lpes_bake.baselines.decoder import Decoder
from lpes_bake.search.errors import InputError
from lpes_bake.search.prompts import Encoded
from lpes_bake.search.rows import common
from lpes_bake.search.scoring import decided, is_correct, out_of_memory
from lpes_bake.search.tasks import Task


@dataclass(frozen=True)
class Answers:
    """What came of the questions of one context, in their order."""

    logprob: list[float | None]
    """Mean log-probability of the answer's tokens, in nats; None where the model gave NaN."""
    exact: list[bool | None]
    """Whether the answer was right."""
    outputs: list[str]
    """Generated text up to where the answer was decided; empty for a task that does not generate."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class _Start:
    """So many tokens that prompts begin with, and a decoder's state behind them."""

    tokens: int
    state: Any


class Interview:
    """Puts questions to decoders. tokenizer, device: of all of them; ends: tokens that end a text (`end_tokens`).

    batch_size: questions of one context at a time, padded on the left. 1 keeps padding away from every method.
    """

    def __init__(self, tokenizer: Any, ends: set[int], device: Any, batch_size: int = 1) -> None:
        self.tokenizer, self.ends, self.device, self.batch_size = tokenizer, ends, device, batch_size

    @torch.inference_mode()
    def ask(self, decoder: Decoder, task: Task, questions: Sequence[Encoded]) -> Answers:
        """All questions of a context. Where memory runs out, fewer at a time, and each prompt by itself; InputError
        when one alone is too much."""
        size, shared = min(self.batch_size, len(questions)), decoder.in_parts
        while True:
            try:
                start = self._common(decoder, questions) if size == 1 and shared else None
                parts = [
                    self._batch(decoder, task, questions[first : first + size], start)
                    for first in range(0, len(questions), size)
                ]
                return Answers(
                    [one for part in parts for one in part.logprob],
                    [one for part in parts for one in part.exact],
                    [one for part in parts for one in part.outputs],
                )
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                if size == 1 and not shared:
                    longest = max(len(one.prompt) for one in questions)
                    raise InputError(
                        f"out of memory on {self.device} with a single prompt of up to {longest} tokens; use shorter "
                        "contexts, a smaller dtype or another device"
                    ) from error
            # Outside of the handler, which keeps the tensors of the failed call alive.
            size, shared = max(1, size // 2), shared and size > 1
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _batch(self, decoder: Decoder, task: Task, questions: Sequence[Encoded], start: _Start | None) -> Answers:
        first, state = self._read(decoder, questions) if start is None else self._go_on(decoder, questions[0], start)
        # A state is moved on in place, and a text begins where the prompt ended.
        forced = copy.deepcopy(state) if task.generates else state
        logprobs, best = self._forced(decoder, questions, first, forced)
        if task.generates:
            outputs = self._generated(decoder, task, questions, first, state)
            right = [is_correct(task, one.example, text) for one, text in zip(questions, outputs, strict=True)]
        else:
            outputs = []
            right = [tokens == one.answer for one, tokens in zip(questions, best, strict=True)]
        known = [math.isfinite(value) for value in logprobs]
        return Answers(
            [value if finite else None for value, finite in zip(logprobs, known, strict=True)],
            [one if finite else None for one, finite in zip(right, known, strict=True)],
            outputs,
        )

    def _forced(
        self, decoder: Decoder, questions: Sequence[Encoded], first: Tensor, state: Any
    ) -> tuple[list[float], list[list[int]]]:
        """The mean log-probability of each answer's tokens, and the likeliest tokens in their places.

        first: (questions, V) log-probabilities behind the prompts, with the state there."""
        steps = [first[:, None]]
        longest = max(len(one.answer) for one in questions)
        if longest > 1:
            # Shorter answers are filled up on the right, where nothing that counts looks.
            steps.append(decoder.decode(state, self._tensor([_filled(one.answer, longest)[:-1] for one in questions])))
        logprobs = torch.cat(steps, dim=1)
        answers = self._tensor([_filled(one.answer, longest) for one in questions])
        found = logprobs.gather(-1, answers[..., None])[..., 0].double()
        best: list[list[int]] = logprobs.argmax(-1).tolist()
        lengths = [len(one.answer) for one in questions]
        return (
            [float(found[row, :length].mean()) for row, length in enumerate(lengths)],
            [tokens[:length] for tokens, length in zip(best, lengths, strict=True)],
        )

    def _generated(
        self, decoder: Decoder, task: Task, questions: Sequence[Encoded], logprobs: Tensor, state: Any
    ) -> list[str]:
        """Greedy decoding, until the task is content with the text, or the model ends it."""
        written: list[list[int]] = [[] for _ in questions]
        texts = [""] * len(questions)
        going = set(range(len(questions)))
        while True:
            tokens = logprobs.argmax(-1)
            for i, token in enumerate(tokens.tolist()):
                if i not in going:
                    continue
                written[i].append(token)
                texts[i] = self.tokenizer.decode(written[i], skip_special_tokens=True)
                if decided(task, questions[i].example, written[i], texts[i], self.ends):
                    going.remove(i)
            if not going:
                return texts
            logprobs = decoder.decode(state, tokens[:, None])[:, -1]

    def _read(self, decoder: Decoder, questions: Sequence[Encoded]) -> tuple[Tensor, Any]:
        """The prompts, padded on the left."""
        longest = max(len(one.prompt) for one in questions)
        padding = [longest - len(one.prompt) for one in questions]
        ids = [[0] * empty + one.prompt for one, empty in zip(questions, padding, strict=True)]
        mask = [[0] * empty + [1] * len(one.prompt) for one, empty in zip(questions, padding, strict=True)]
        return decoder.prefill(self._tensor(ids), self._tensor(mask))

    def _common(self, decoder: Decoder, questions: Sequence[Encoded]) -> _Start | None:
        """What all prompts begin with, read; None where they begin with nothing in common."""
        # The last token of a prompt is left to it, for what follows it is asked for.
        tokens = common([one.prompt[:-1] for one in questions])
        if not tokens:
            return None
        ids = self._tensor([questions[0].prompt[:tokens]])
        return _Start(tokens, decoder.prefill(ids, torch.ones_like(ids))[1])

    def _go_on(self, decoder: Decoder, question: Encoded, start: _Start) -> tuple[Tensor, Any]:
        """The rest of one prompt behind what is read already."""
        state = copy.deepcopy(start.state)
        return decoder.decode(state, self._tensor([question.prompt[start.tokens :]]))[:, -1], state

    def _tensor(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def _filled(tokens: Sequence[int], length: int) -> list[int]:
    return [*tokens, *[0] * (length - len(tokens))]
