"""Multi-document question answering (MDQA; Liu et al., "Lost in the Middle", arXiv 2307.03172).

The prompts and the metric are the authors'; so are the files, of which there are two kinds: those with
retrieved distractors in every row, and nq-open-oracle.jsonl.gz with gold passages only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from lpes_bake.search.errors import InputError
from lpes_bake.search.jsonl import Row, read_rows, shown
from lpes_bake.search.metrics import best_subspan_em, first_line, normalise
from lpes_bake.search.tasks import PARTS, Example, Task, check_positions, draw, even_positions, part_of


@dataclass(frozen=True)
class Document:
    """One of the documents of a prompt. The authors' all have titles; a user's need not."""

    text: str
    title: str | None = None

    @cached_property
    def words(self) -> str:
        """All that the prompt shows of it."""
        return self.text if self.title is None else f"{self.title} {self.text}"

    @cached_property
    def normal(self) -> str:
        """Its words as the metric reads them."""
        return normalise(self.words)

    def answers(self, question: Question) -> bool:
        """Whether it holds one of the question's answers, as the metric reads them."""
        return any(answer in self.normal for answer in question.normal)


@dataclass(frozen=True, eq=False)
class Question:
    """A row of a file: a question, its answers, and documents of which one, `gold`, holds the answer."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]
    gold: int

    @cached_property
    def usable(self) -> tuple[str, ...]:
        """The answers of which something is left when the metric reads them; the others can never match."""
        return tuple(answer.strip() for answer in self.answers if normalise(answer))

    @cached_property
    def normal(self) -> tuple[str, ...]:
        """The usable answers as the metric reads them."""
        return tuple(map(normalise, self.usable))

    @cached_property
    def found(self) -> str | None:
        """The answer to score: the first that stands in the gold document letter for letter, else the first that
        stands there as the metric reads it, else None."""
        gold = self.documents[self.gold]
        verbatim = (answer for answer in self.usable if answer in gold.words)
        normal = (answer for answer in self.usable if normalise(answer) in gold.normal)
        return next(verbatim, next(normal, None))

    def with_gold_at(self, place: int, documents: int) -> list[Document]:
        """`documents` of them, the gold one at `place`, the others the first ones in their order."""
        others = self.documents[: self.gold] + self.documents[self.gold + 1 :]
        return [*others[:place], self.documents[self.gold], *others[place : documents - 1]]


def qa_prompt(question: str, documents: Sequence[Document]) -> str:
    """The prompt of multi-document QA, letter for letter as in the authors' code; a document without a title, which
    they do not have, goes without the brackets for it."""
    lines = "\n".join(
        f"Document [{number}]{'' if one.title is None else f'(Title: {one.title})'} {one.text}"
        for number, one in enumerate(documents, 1)
    )
    return (
        "Write a high-quality answer for the given question using only the provided search results "
        f"(some of which might be irrelevant).\n\n{lines}\n\nQuestion: {question}\nAnswer:"
    )


class DocumentQA(Task):
    """What all tasks of questions about documents share: the prompt and the metric."""

    generates: ClassVar[bool] = True

    def correct(self, example: Example, output: str) -> bool:
        """The authors' metric on the first line of the output.

        It grows with the text, but for an answer that ends in the word "t" or "th", which may become "the".
        """
        return best_subspan_em(first_line(output), example.accepted)

    def finished(self, output: str) -> bool:
        """Whether the first line is complete."""
        return "\n" in output.lstrip()


def qa_example(context: int, position: int, question: Question, documents: Sequence[Document]) -> Example:
    """A question about documents. What is scored follows "Answer:" with a space."""
    answer = question.found or question.usable[0]
    return Example(context, position, qa_prompt(question.text, documents), f" {answer}", "", question.answers)


@dataclass(frozen=True)
class MultiDocumentQA(DocumentQA):
    """Questions about documents of which one holds the answer, from a file of the lost-in-the-middle authors.

    Where rows bring retrieved distractors, the gold document is moved to each place and the best-ranked distractors
    keep their order, as the authors do.

    Where rows have only their gold passage, other questions' gold passages are the distractors (the authors' "random
    distractors"), and one context serves all places: each place is asked for with the question whose
    passage stands there. Which passage comes to stand where is drawn, so question, passage and distractors are
    distributed alike at all places, as they are when one passage is moved; and the documents are computed once.
    No passage of a context holds an answer to another question asked about it. A question is asked once a part.
    """

    name: ClassVar[str] = "mdqa"

    file: str
    documents: int = field(default=10, metadata={"help": "Documents in a context, the gold one among them."})
    positions: tuple[int, ...] = field(
        default=(), metadata={"help": "Places of the gold document, from 0: first, middle and last if left out."}
    )
    _rows: list[Question] = field(init=False, repr=False, compare=False)
    _asked: list[Question] = field(init=False, repr=False, compare=False)
    """The rows that can be asked. The others can still be distractors."""

    def __post_init__(self) -> None:
        if self.documents < 1:
            raise InputError(f"documents must be at least 1; got {self.documents}")
        if not self.positions:
            object.__setattr__(self, "positions", even_positions(self.documents, 3))
        check_positions(self.positions, self.documents, "documents")
        rows: list[Question] = []
        for row in read_rows(Path(self.file)):
            rows.append(authors_question(row))
            if _retrieved(rows) and len(rows[-1].documents) < self.documents:
                raise row.error(
                    f'"ctxs" has {len(rows[-1].documents)} documents, but {self.documents} are asked for; '
                    "use documents=… with fewer, or a file that has more"
                )
            if not _retrieved(rows) and len(rows[-1].documents) > 1:
                raise row.error(
                    f'"ctxs" has {len(rows[-1].documents)} documents, but the first line has only its gold passage; '
                    "put the two kinds into two files"
                )
        object.__setattr__(self, "_rows", rows)
        asked = [row for row in rows if row.found is not None]
        if not _retrieved(rows):
            pools = {part: [row for row in rows if part_of(row.text) == part] for part in PARTS}
            asked = [row for row in asked if _enough(row, pools[part_of(row.text)], self.documents - 1)]
        object.__setattr__(self, "_asked", asked)

    @property
    def title(self) -> str:
        """For headings."""
        return f"Multi-document QA, {self.documents} documents"

    def describe(self) -> dict[str, Any]:
        """The settings, the rows that are asked, and those skipped because they cannot be: the gold passage holds
        none of the answers, or (an answer such as "s") all other passages hold one."""
        asked = len(self._asked)
        return {**super().describe(), "questions": asked, "skipped": len(self._rows) - asked}

    def contexts(self, part: str, seed: int) -> Iterator[list[Example]]:
        """Contexts until no more can be made of the rows of the part."""
        asked = draw(self._asked, lambda row: row.text, part, seed)
        if _retrieved(self._rows):
            return self._moved(asked)
        rows = [row for row in self._rows if part_of(row.text) == part]
        return self._shared(asked, rows, random.Random(f"{part} {seed} places"))

    def _moved(self, rows: Sequence[Question]) -> Iterator[list[Example]]:
        for context, row in enumerate(rows):
            yield [qa_example(context, place, row, row.with_gold_at(place, self.documents)) for place in self.positions]

    def _shared(self, asked: list[Question], rows: list[Question], rng: random.Random) -> Iterator[list[Example]]:
        """One context for all positions: questions that do not disturb one another, and distractors for all of them."""
        context = 0
        while asked:
            chosen: list[Question] = []
            waiting: list[Question] = []
            # Passages that answer none of the chosen questions.
            others = rows
            for row in asked:
                if len(chosen) < len(self.positions) and not any(_disturb(row, one) for one in chosen):
                    left = [one for one in others if one is not row and not one.documents[0].answers(row)]
                    if len(chosen) + 1 + len(left) >= self.documents:
                        chosen.append(row)
                        others = left
                        continue
                waiting.append(row)
            if len(chosen) < len(self.positions):
                # The first goes with none of the rest.
                asked = [*chosen[1:], *waiting]
                continue
            # Those that had to wait came first: drawn again, so that no place gets the odd ones.
            rng.shuffle(chosen)
            golden = dict(zip(self.positions, chosen, strict=True))
            drawn = iter(rng.sample(others, self.documents - len(chosen)))
            questions = [golden.get(place) or next(drawn) for place in range(self.documents)]
            documents = [one.documents[0] for one in questions]
            yield [qa_example(context, place, golden[place], documents) for place in self.positions]
            context += 1
            asked = waiting


def _retrieved(rows: Sequence[Question]) -> bool:
    """Whether a file's rows bring their distractors."""
    return len(rows[0].documents) > 1


def _disturb(first: Question, second: Question) -> bool:
    """Whether the passage of one answers the other."""
    return first.documents[0].answers(second) or second.documents[0].answers(first)


def _enough(question: Question, rows: Sequence[Question], count: int) -> bool:
    """Whether `count` of the rows have a passage that does not answer the question."""
    for row in rows:
        if count <= 0:
            break
        count -= not row.documents[0].answers(question)
    return count <= 0


def authors_question(row: Row) -> Question:
    """A row in the authors' format: question, answers, ctxs with title, text and isgold."""
    documents, golden = [], []
    for index, one in enumerate(row.items("ctxs")):
        if not isinstance(one, dict):
            raise row.error(f'"ctxs" holds {shown(one)}; it must be an object with "title" and "text"')
        title = row.checked_text(one.get("title"), f'"title" of document {index}', may_be_empty=True)
        text = row.checked_text(one.get("text"), f'"text" of document {index}')
        documents.append(Document(text, title))
        if one.get("isgold") is True:
            golden.append(index)
    if len(golden) != 1:
        raise row.error(f'{len(golden)} of the documents in "ctxs" have "isgold": true; exactly one must')
    return Question(row.text("question"), answers_of(row, row.items("answers")), tuple(documents), golden[0])


def answers_of(row: Row, values: Sequence[Any]) -> tuple[str, ...]:
    """The answers of a row, checked to be text."""
    return tuple(row.checked_text(value, "an answer") for value in values)
