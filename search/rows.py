"""Rows: how the questions of a context are laid out so that what they share is computed once.

Plain data, no model: which tokens go through the model, at which positions, and what each may look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lpes_bake.search.prompts import Encoded

# Tokens that the questions of one row add to their common beginning. They need a mask with so many rows, so it
# must stay short; what adds more gets a row of its own, which takes over from the cache what both begin with.
PACKED_TOKENS = 512


@dataclass(frozen=True)
class Question(Encoded):
    """An encoded question and its place in the table of scores."""

    context: int
    column: int


@dataclass(frozen=True)
class Row:
    """Questions that are computed together: `shared` tokens that all their prompts begin with, then what each
    adds: the rest of its prompt (at least the last token, which predicts the answer's first) and the answer but
    for its last token."""

    questions: list[Question]
    shared: int
    kept: int = 0
    """Of the shared tokens, those that the row before leaves in the cache."""

    @property
    def beginning(self) -> list[int]:
        """The tokens that all questions share, but for those kept."""
        return self.questions[0].prompt[self.kept : self.shared]

    @property
    def suffixes(self) -> list[list[int]]:
        """What each question adds."""
        return [question.prompt[self.shared :] + question.answer[:-1] for question in self.questions]

    @property
    def tokens(self) -> int:
        """Tokens that the row takes through the model."""
        return self.shared - self.kept + sum(len(suffix) for suffix in self.suffixes)


# Rows to be computed one after the other, each taking over a part of the cache that the one before leaves.
Chain = list[Row]


def tokens_of(chain: Chain) -> int:
    """Tokens that a chain takes through the model."""
    return sum(row.tokens for row in chain)


def chain_of(questions: Sequence[Question]) -> Chain:
    """The questions of a context as rows.

    In the order of their tokens, neighbours have the most in common: one row takes as many as add no more than
    PACKED_TOKENS, and each row takes over from the one before what their prompts have in common. So a beginning
    is computed once, however many questions share it: all (one document list, many questions) or only some (a
    document that moves through the list).
    """
    rows: Chain = []
    together: list[Question] = []
    for question in sorted(questions, key=lambda one: one.prompt):
        row = row_of([*together, question])
        if together and sum(len(suffix) for suffix in row.suffixes) > PACKED_TOKENS:
            rows.append(row_of(together))
            together = []
        together.append(question)
    rows.append(row_of(together))
    for i in range(1, len(rows)):
        before, row = rows[i - 1], rows[i]
        pair = [before.questions[0].prompt[: before.shared], row.questions[0].prompt[: row.shared]]
        rows[i] = Row(row.questions, row.shared, kept=common(pair))
    return rows


def row_of(questions: list[Question]) -> Row:
    """One row. The last token of a prompt yields the answer's first logits, so it is never shared."""
    return Row(questions, common([question.prompt[:-1] for question in questions]))


def common(lists: Sequence[list[int]]) -> int:
    """How many tokens all lists begin with."""
    low, high = min(lists), max(lists)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


@dataclass(frozen=True)
class Layout:
    """Rows as arrays: `shared` columns of beginnings, padded, then `added` columns of suffixes, padded.

    tokens, places: (rows, shared + added), ids and positions. mask: (rows, added, kept + shared + added), true
    where an added token may look: at its row's beginning and at its own suffix up to itself. picks: where
    answers are predicted, indices into the flattened tokens.
    """

    tokens: NDArray[np.int64]
    places: NDArray[np.int64]
    mask: NDArray[np.bool_]
    picks: list[int]


def layout_of(rows: Sequence[Row]) -> Layout:
    """Rows that are computed side by side, as arrays; all of them keep the same number of tokens."""
    kept = rows[0].kept
    shared = max(len(row.beginning) for row in rows)
    added = max(sum(len(suffix) for suffix in row.suffixes) for row in rows)
    tokens = np.zeros((len(rows), shared + added), dtype=np.int64)
    # Padding stands on the right of a beginning, where causal attention keeps it from all that comes before.
    places = np.tile(np.arange(kept, kept + shared + added), (len(rows), 1))
    mask = np.zeros((len(rows), added, kept + shared + added), dtype=np.bool_)
    picks: list[int] = []
    for i, row in enumerate(rows):
        tokens[i, : len(row.beginning)] = row.beginning
        end = 0
        for question, suffix in zip(row.questions, row.suffixes, strict=True):
            start, end = end, end + len(suffix)
            tokens[i, shared + start : shared + end] = suffix
            places[i, shared + start : shared + end] = np.arange(row.shared, row.shared + len(suffix))
            mask[i, start:end, : row.shared] = True
            mask[i, start:end, kept + shared + start : kept + shared + end] = np.tri(len(suffix), dtype=np.bool_)
            first = i * tokens.shape[1] + shared + end - len(question.answer)
            picks += range(first, first + len(question.answer))
        # A token that may look nowhere is NaN in some kernels: padding looks at itself.
        mask[i, end:, kept + shared + end :] |= np.eye(added - end, dtype=np.bool_)
    return Layout(tokens, places, mask, picks)
