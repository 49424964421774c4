"""The user's own questions about documents, from a JSONL file; docs/tasks.md shows the format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from lpes_bake.search.errors import InputError
from lpes_bake.search.jsonl import Row, read_rows, shown
from lpes_bake.search.multi_document import (
    Document,
    DocumentQA,
    Question,
    answers_of,
    authors_question,
    qa_example,
)
from lpes_bake.search.tasks import Example, draw


@dataclass(frozen=True)
class OwnData(DocumentQA):
    """Your own questions about documents, the one that holds the answer moved to each place.

    Rows may have different numbers of documents, so places are given in percent of the depth. The other documents
    keep their order. Prompt and metric are those of multi-document QA.
    """

    name: ClassVar[str] = "qa"
    position_unit: ClassVar[str] = "%"

    file: str
    positions: tuple[int, ...] = field(
        default=(0, 50, 100), metadata={"help": "Places of the document that holds the answer, % of the depth."}
    )
    _rows: list[Question] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.positions:
            raise InputError("positions must name at least one place, in percent of the depth")
        for position in self.positions:
            if not 0 <= position <= 100:
                raise InputError(f"position {position} is not a percentage of the depth; use 0 to 100")
        if len(set(self.positions)) != len(self.positions):
            raise InputError(f"positions must differ; got {'/'.join(map(str, self.positions))}")
        rows = []
        for row in read_rows(Path(self.file)):
            question = authors_question(row) if "ctxs" in row.values else own_question(row)
            if not question.usable:
                raise row.error(
                    f"the answer {shown(question.answers[0])} has no letters or digits to compare; give another"
                )
            places = [_place(position, len(question.documents)) for position in self.positions]
            if len(set(places)) != len(places):
                raise row.error(
                    f"{len(question.documents)} documents have no different places for "
                    f"{'/'.join(map(str, self.positions))} % of the depth; add documents or give fewer positions"
                )
            rows.append(question)
        if all(counts_from_one(row) for row in rows):
            raise InputError(
                f'in all lines of {self.file} the answer stands in the document before the one that "gold" names: '
                '"gold" counts from 0'
            )
        object.__setattr__(self, "_rows", rows)

    @property
    def title(self) -> str:
        """For headings."""
        return f"Questions of {Path(self.file).name}"

    def contexts(self, part: str, seed: int) -> Iterator[list[Example]]:
        """A context a row of the file."""
        for context, row in enumerate(draw(self._rows, lambda row: row.text, part, seed)):
            count = len(row.documents)
            yield [
                qa_example(context, position, row, row.with_gold_at(_place(position, count), count))
                for position in self.positions
            ]

    def describe(self) -> dict[str, Any]:
        """The settings and the number of questions."""
        return {**super().describe(), "questions": len(self._rows)}


def _place(percent: int, documents: int) -> int:
    """The place from 0 at that depth, rounded down as the authors' middle is (10 documents: 0, 4, 9)."""
    return percent * (documents - 1) // 100


def counts_from_one(row: Question) -> bool:
    """Whether the answer stands in the document before the one that is called gold, and not in that one."""
    return row.gold > 0 and row.found is None and row.documents[row.gold - 1].answers(row)


def own_question(row: Row) -> Question:
    """A row in this tool's format: question, documents, answers or answer, gold."""
    documents = tuple(_document(row, index, one) for index, one in enumerate(row.items("documents")))
    if "answer" in row.values and "answers" in row.values:
        raise row.error('both "answer" and "answers" are there; keep one')
    answers = answers_of(row, [row.text("answer")] if "answer" in row.values else row.items("answers"))
    gold = row.values.get("gold")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(documents):
        raise row.error(
            f'"gold" is {shown(gold)}; it must be the number of the document that holds the answer, '
            f"from 0 to {len(documents) - 1}"
        )
    return Question(row.text("question"), answers, documents, gold)


def _document(row: Row, index: int, one: Any) -> Document:
    what = f"document {index}"
    if isinstance(one, dict):
        title = one.get("title")
        return Document(
            row.checked_text(one.get("text"), f'"text" of {what}'),
            None if title is None else row.checked_text(title, f'"title" of {what}'),
        )
    return Document(row.checked_text(one, what))
