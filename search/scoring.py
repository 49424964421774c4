"""The scoring engine: how well a model with given factors answers the questions of a task.

The questions of a context are computed as one row: their common beginning once, then what each adds,
side by side and hidden from one another. One such teacher-forced pass gives the answers'
log-probabilities, and whether greedy decoding would begin with them; where the task's metric reads free
text, decoding goes on from the same cache. Logits are computed at answer positions only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from lpes_bake.search.errors import InputError
from lpes_bake.search.models import (
    cache_argument,
    checkpointed_layers,
    device_of,
    differentiable_factors,
    head_logits,
    set_factors,
)
from lpes_bake.search.prompts import Encoded
from lpes_bake.search.row_attention import ROW_ATTENTION, rows_fit
from lpes_bake.search.rows import Chain, Question, Row, chain_of, layout_of, tokens_of
from lpes_bake.search.tasks import Example, Task, own_code

# Tokens in one batch of contexts. A CPU gains nothing from a second context.
BATCH_TOKENS = {"cpu": 1, "cuda": 16384, "mps": 4096}


@dataclass(frozen=True)
class Scores:
    """Scores of one candidate. Rows are contexts, columns gold positions; NaN where the model gave NaN."""

    positions: tuple[int, ...]
    logprob: NDArray[np.float64]
    """(contexts, positions): mean log-probability of the answer's tokens, in nats."""
    probability: NDArray[np.float64]
    """(contexts, positions): probability of the whole answer under teacher forcing."""
    exact: NDArray[np.float64]
    """(contexts, positions): 1 where the answer was right, 0 where it was wrong; NaN also where that takes
    generated text, which was not asked for."""
    tokens: int
    """Tokens that went through the model, generated ones among them, padding left out."""
    outputs: list[list[str]]
    """(contexts, positions): generated text up to where the answer was decided; empty when nothing was generated."""

    def values(self, kind: str) -> NDArray[np.float64]:
        """(contexts, positions) of "logprob", "probability" or "accuracy"."""
        return {"logprob": self.logprob, "probability": self.probability, "accuracy": self.exact}[kind]


@dataclass(frozen=True)
class _Answer:
    """How one question was answered. logprobs: (tokens,); output: generated text, None where none was asked for."""

    question: Question
    logprobs: NDArray[np.float64]
    exact: float
    output: str | None


class Scorer:
    """Scores factors on fixed contexts of one task with one loaded model, whose factors are swapped in place.

    The scores of contexts [start, stop) depend on the model, the factors, start and stop alone, bit for bit,
    and never on what was scored before; on a CPU, which takes contexts one by one, not even on start and stop.
    Running out of memory may change last digits: the call goes on with smaller batches, and the next call
    starts with whole ones again.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        task: Task,
        contexts: Sequence[Sequence[Encoded]],
        *,
        batch_size: int | None = None,
        shared_prefixes: bool = True,
        checkpointing: bool | None = None,
    ) -> None:
        """model: what `load_scaled` gives. contexts: what `take` gives, encoded by this model's tokenizer.

        batch_size: contexts in a batch; None lets the device decide. shared_prefixes=False computes every
        prompt whole and by itself, as is always done where rows cannot (see `rows_fit`). checkpointing: whether
        `gradient` computes a layer's activations twice instead of keeping them; None does so on anything but a CPU.

        Raises InputError when a prompt with its answer is longer than the model's positions.
        """
        self.model, self.tokenizer, self.task = model, tokenizer, task
        self.device = device_of(model.get_input_embeddings())
        self.checkpointing = self.device.type != "cpu" if checkpointing is None else checkpointing
        self._cache_name = cache_argument(model)
        self.batch_tokens = BATCH_TOKENS.get(self.device.type, 4096)
        self.positions = tuple(one.example.position for one in contexts[0])
        if any(tuple(one.example.position for one in context) != self.positions for context in contexts):
            raise ValueError("every context must be asked once for every gold position, in one order")
        questions = [
            [Question(one.example, one.prompt, one.answer, number, column) for column, one in enumerate(context)]
            for number, context in enumerate(contexts)
        ]
        longest = self._longest([question for context in questions for question in context])
        self.plain = not (shared_prefixes and rows_fit(model, longest))
        self.batch_size = 1 if self.plain else batch_size
        # Of each context: one chain, or in plain mode one a question.
        self._chains: list[list[Chain]] = [
            [[Row([question], 0)] for question in context] if self.plain else [chain_of(context)]
            for context in questions
        ]

    def _longest(self, questions: Sequence[Question]) -> int:
        """Tokens of the longest prompt with its answer; InputError where the model has fewer positions."""
        generated = self.task.max_new_tokens if self.task.generates else 0
        longest = max(len(one.prompt) + max(len(one.answer), generated) for one in questions)
        limit = self.model.config.max_position_embeddings
        if longest > limit:
            raise InputError(
                f"the longest prompt with its answer has {longest} tokens, but the model has only {limit} positions "
                "(max_position_embeddings); use shorter contexts"
            )
        return longest

    def score(
        self,
        factors: Sequence[float] | None = None,
        start: int = 0,
        stop: int | None = None,
        accuracy: bool = False,
        on_progress: Callable[[float], None] | None = None,
    ) -> Scores:
        """Score contexts start … stop − 1 with `factors`, one a layer; None leaves the model as it is.

        accuracy: generate text where the task's metric reads it; elsewhere accuracy costs nothing and is always
        there. on_progress is given the share of the contexts that are done, batch by batch.
        """
        if factors is not None:
            set_factors(self.model, factors)
        contexts = self._between(start, stop)
        # The longest first, so that memory runs out at once or never.
        queue = sorted((chain for chains in contexts for chain in chains), key=tokens_of, reverse=True)
        total = limit = len(queue)
        tokens = sum(map(tokens_of, queue))
        answers: list[_Answer] = []
        with torch.inference_mode(), self._attention():
            while queue:
                batch = self._batch(queue, limit)
                try:
                    found, generated = self._answer(batch, accuracy and self.task.generates)
                except RuntimeError as error:
                    if not out_of_memory(error):
                        raise
                    if len(batch) == 1:
                        raise self._too_large(batch[0]) from error
                    limit = len(batch) // 2
                else:
                    answers += found
                    tokens += generated
                    del queue[: len(batch)]
                    if on_progress is not None:
                        on_progress(1 - len(queue) / total)
                    continue
                # Outside of the handler, which keeps the tensors of the failed call alive.
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
        return self._scores(answers, start, len(contexts), tokens)

    def gradient(
        self, factors: Sequence[float], start: int, stop: int, weights: Sequence[float]
    ) -> tuple[Scores, NDArray[np.float64]]:
        """The scores, and (layers,): d/d factor of Σ_p weights_p · mean over contexts of logprob[:, p].

        Row by row, each computed whole, so that memory holds one at a time. The tokens counted are those of the
        forward pass; the backward pass costs about as much again, and once more with checkpointing.
        """
        contexts = self._between(start, stop)
        rows = [Row(row.questions, row.shared) for chains in contexts for chain in chains for row in chain]
        gradient = np.zeros(self.model.config.num_hidden_layers)
        answers: list[_Answer] = []
        with (
            differentiable_factors(self.model, factors) as leaf,
            checkpointed_layers(self.model, self.checkpointing),
            self._attention(),
        ):
            for row in rows:
                try:
                    hidden, _ = self._hidden([row])
                    logprobs, best = self._judge([row], hidden)
                    shares = [
                        weights[question.column] / len(contexts) * values.mean()
                        for question, values in zip(row.questions, logprobs, strict=True)
                    ]
                    (part,) = torch.autograd.grad(torch.stack(shares).sum(), leaf)
                except RuntimeError as error:
                    if not out_of_memory(error):
                        raise
                    raise self._too_large([row]) from error
                gradient += part.cpu().double().numpy()
                answers += self._answers([row], logprobs, best)
        return self._scores(answers, start, len(contexts), sum(row.tokens for row in rows)), gradient

    def tokens(self, start: int = 0, stop: int | None = None, gradient: bool = False) -> int:
        """Tokens that `score`, or `gradient`, takes through the model for contexts; generated ones not counted."""
        rows = [row for chains in self._between(start, stop) for chain in chains for row in chain]
        return sum(row.tokens + (row.kept if gradient else 0) for row in rows)

    def _between(self, start: int, stop: int | None) -> list[list[Chain]]:
        """The chains of contexts start … stop − 1."""
        stop = len(self._chains) if stop is None else stop
        if not 0 <= start < stop <= len(self._chains):
            raise ValueError(f"contexts {start} to {stop} were asked for, but there are {len(self._chains)}")
        return self._chains[start:stop]

    def _batch(self, queue: Sequence[Chain], limit: int) -> list[Chain]:
        """The chains to compute together next: several only where each is a single row, and at most `limit`."""
        if len(queue[0]) > 1:
            return [queue[0]]
        size = self.batch_size or max(1, self.batch_tokens // queue[0][0].tokens)
        return list(takewhile(lambda chain: len(chain) == 1, queue[: min(size, limit)]))

    def _too_large(self, chain: Chain) -> InputError:
        return InputError(
            f"out of memory on {self.device} with a single context of {tokens_of(chain)} tokens; "
            "use shorter contexts, a smaller dtype or another device"
        )

    def _answer(self, batch: Sequence[Chain], generate: bool) -> tuple[list[_Answer], int]:
        """All answers of a batch, and how many tokens were generated and read again."""
        answers: list[_Answer] = []
        generated = 0
        cached = not self.plain and (generate or len(batch[0]) > 1)
        cache = DynamicCache() if cached else None
        for rows in zip(*batch, strict=True):
            hidden, mask = self._hidden(rows, cache)
            logprobs, best = self._judge(rows, hidden)
            outputs: list[str] | None = None
            if generate:
                outputs, read = self._generate(rows, cache, mask, [int(tokens[0]) for tokens in best])
                generated += read
            answers += self._answers(rows, logprobs, best, outputs)
        return answers, generated

    def _answers(
        self,
        rows: Sequence[Row],
        logprobs: Sequence[torch.Tensor],
        best: Sequence[torch.Tensor],
        outputs: Sequence[str] | None = None,
    ) -> list[_Answer]:
        """What `_judge` and `_generate` found, question by question."""
        questions = [question for row in rows for question in row.questions]
        found = []
        for i, question in enumerate(questions):
            values = logprobs[i].detach().cpu().double().numpy()
            output = None if outputs is None else outputs[i]
            if np.isnan(values).any() or (self.task.generates and output is None):
                exact = math.nan
            elif output is not None:
                exact = float(is_correct(self.task, question.example, output))
            else:
                exact = float(best[i].tolist() == question.answer)
            found.append(_Answer(question, values, exact, output))
        return found

    def _scores(self, answers: Sequence[_Answer], start: int, contexts: int, tokens: int) -> Scores:
        """The answers as a table whose first row is context `start`."""
        shape = (contexts, len(self.positions))
        logprob, probability, exact = np.full(shape, np.nan), np.full(shape, np.nan), np.full(shape, np.nan)
        texts = np.full(shape, "", dtype=object)
        for answer in answers:
            cell = answer.question.context - start, answer.question.column
            logprob[cell] = answer.logprobs.mean()
            probability[cell] = math.exp(answer.logprobs.sum())
            exact[cell] = answer.exact
            texts[cell] = answer.output
        generated = any(answer.output is not None for answer in answers)
        return Scores(self.positions, logprob, probability, exact, tokens, texts.tolist() if generated else [])

    def _hidden(self, rows: Sequence[Row], cache: Any = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Last hidden states where answers are predicted, question by question, (answer tokens, hidden_size), and
        the mask that they were computed with (see `layout_of`); None in plain mode."""
        if self.plain:
            (question,) = rows[0].questions
            tokens = self._tensor([question.prompt + question.answer[:-1]])
            states: torch.Tensor = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            return states[0, -len(question.answer) :], None
        if cache is not None and (surplus := cache.get_seq_length() - rows[0].kept):
            cache.crop(-surplus)
        layout = layout_of(rows)
        mask = torch.from_numpy(layout.mask).to(self.device)
        states = self._call(self._tensor(layout.tokens), self._tensor(layout.places), mask, cache)
        return states.flatten(0, 1)[torch.tensor(layout.picks, device=states.device)], mask

    def _call(self, tokens: torch.Tensor, places: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
        """Last hidden states (batch, tokens, hidden_size) under `row_attention`."""
        states: torch.Tensor = self.model.base_model(
            input_ids=tokens,
            position_ids=places,
            attention_mask=mask[:, None],
            use_cache=cache is not None,
            **{self._cache_name: cache},
        ).last_hidden_state
        return states

    def _judge(
        self, rows: Sequence[Row], hidden: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """For each question: the log-probabilities of its answer's tokens, and the likeliest tokens in their places."""
        answers = [question.answer for row in rows for question in row.questions]
        logits = head_logits(self.model, hidden)
        # float32, or more where the model has more.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = torch.tensor([token for answer in answers for token in answer], device=logits.device)
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
        lengths = [len(answer) for answer in answers]
        return logprobs.split(lengths), logits.argmax(-1).split(lengths)

    def _generate(
        self, rows: Sequence[Row], cache: Any, mask: torch.Tensor | None, first: list[int]
    ) -> tuple[list[str], int]:
        """Greedy decoding, until the task is content with the text, or the model ends it.

        first: each question's first token. Returns the texts, and how many tokens were generated and read again.
        """
        questions = [question for row in rows for question in row.questions]
        if mask is None:
            advance, tokens = self._advance_plain(questions[0]), first
        else:
            advance, tokens = self._advance(rows, cache, mask), first
        ends = end_tokens(self.model.generation_config)
        written: list[list[int]] = [[] for _ in questions]
        texts = [""] * len(questions)
        going = list(range(len(questions)))
        read = 0
        while True:
            for i in list(going):
                written[i].append(tokens[i])
                texts[i] = self.tokenizer.decode(written[i], skip_special_tokens=True)
                if decided(self.task, questions[i].example, written[i], texts[i], ends):
                    going.remove(i)
            if not going:
                return texts, read
            if mask is None and not read:
                read = len(questions[0].prompt)
            read += len(going)
            tokens = advance(tokens)

    def _advance(self, rows: Sequence[Row], cache: Any, mask: torch.Tensor) -> Callable[[list[int]], list[int]]:
        """A function from each question's last token to its next one, all questions of all rows at once.

        A question that has ended goes on beside the others, for nothing: in a call that waits for the weights
        to be read, its token is free.
        """
        width = max(len(row.questions) for row in rows)
        cells = [(row, column) for row, one in enumerate(rows) for column in range(len(one.questions))]
        # What a question sees: what the last token of its prompt sees, and then its own new tokens.
        seen = mask.new_zeros(len(rows), width, mask.shape[-1])
        for row, one in enumerate(rows):
            end = 0
            for column, (question, suffix) in enumerate(zip(one.questions, one.suffixes, strict=True)):
                end += len(suffix)
                seen[row, column] = mask[row, end - len(question.answer)]
        own = torch.eye(width, dtype=torch.bool, device=mask.device).expand(len(rows), -1, -1)
        place = self._tensor([[0] * width for _ in rows])
        token = place.clone()
        index = tuple(torch.tensor(one) for one in zip(*cells, strict=True))
        place[index] = self._tensor([len(question.prompt) for row in rows for question in row.questions])

        def advance(tokens: list[int]) -> list[int]:
            nonlocal seen, place
            seen = torch.cat((seen, own), dim=-1)
            token[index] = self._tensor(tokens)
            states = self._call(token, place, seen, cache)
            place = place + 1
            best: list[int] = head_logits(self.model, states[index]).argmax(-1).tolist()
            return best

        return advance

    def _advance_plain(self, question: Question) -> Callable[[list[int]], list[int]]:
        """The same for one question, as transformers' own generation does it."""
        cache: Any = None
        # The pass that judged the answer read it too, and a sliding cache cannot be cut: the prompt is read again.
        unread = question.prompt

        def advance(tokens: list[int]) -> list[int]:
            nonlocal cache, unread
            output = self.model.base_model(
                input_ids=self._tensor([[*unread, *tokens]]), use_cache=True, **{self._cache_name: cache}
            )
            cache, unread = output[self._cache_name], []
            return [int(head_logits(self.model, output.last_hidden_state[0, -1]).argmax())]

        return advance

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Within, the model attends as rows need it."""
        config, before = self.model.config, self.model.config._attn_implementation
        if not self.plain:
            config._attn_implementation = ROW_ATTENTION
        try:
            yield
        finally:
            config._attn_implementation = before


def decided(task: Task, example: Example, written: Sequence[int], text: str, ends: set[int]) -> bool:
    """Whether generation may stop: the model has ended the text, it is as long as it may be, or more would change
    nothing. written: its tokens; ends: those that end a text."""
    if written[-1] in ends or len(written) == task.max_new_tokens:
        return True
    with own_code(type(task)):
        finished = task.finished(text)
    return finished or is_correct(task, example, text)


def is_correct(task: Task, example: Example, text: str) -> bool:
    """Whether the text answers the question. InputError where a user's task fails to say so."""
    with own_code(type(task)):
        return task.correct(example, text)


def end_tokens(generation_config: Any) -> set[int]:
    """The tokens that end a text, of transformers' GenerationConfig."""
    ends = generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def out_of_memory(error: Exception) -> bool:
    """Whether it says that memory ran out."""
    text = str(error)
    return isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in text or "can't allocate memory" in text
