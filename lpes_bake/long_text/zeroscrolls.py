"""ZeroSCROLLS (Shaham et al., arXiv 2305.14196): ten tasks in one format; prompts, cuts and metrics are the authors'.

Files are the authors' JSONL. The references of their test split are private, so it is the validation split, about 20
questions a task, that can be scored here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lpes_bake.long_text.metrics import (
    Metric,
    concordance,
    exponential_similarity,
    letter_accuracy,
    rouge,
    token_f1,
)
from lpes_bake.long_text.questions import Benchmark, Question, fetch_file, packed_rows
from lpes_bake.search.jsonl import Row, shown

REPO = "tau/zero_scrolls"


@dataclass(frozen=True)
class Kind:
    """How a task is scored, and how long its answers may be (experiments/api/api.py of the authors)."""

    metric_name: str
    metric: Metric
    max_new_tokens: int


TASKS = {
    "gov_report": Kind("ROUGE", rouge, 1024),
    "summ_screen_fd": Kind("ROUGE", rouge, 512),
    "qmsum": Kind("ROUGE", rouge, 512),
    "squality": Kind("ROUGE", rouge, 512),
    "qasper": Kind("F1", token_f1, 128),
    "narrative_qa": Kind("F1", token_f1, 64),
    "musique": Kind("F1", token_f1, 32),
    "quality": Kind("accuracy", letter_accuracy, 10),
    "space_digest": Kind("exponential similarity", exponential_similarity, 36),
    "book_sum_sort": Kind("concordance index", concordance, 256),
}


def fetch(task: str) -> list[Row]:
    """The validation split from the Hub."""
    return packed_rows(fetch_file(REPO, f"{task}.zip"), "validation.jsonl")


def benchmark(task: str, rows: Sequence[Row]) -> Benchmark:
    """The task's questions. Rows of one id are one question with several references."""
    by_id: dict[str, list[Row]] = {}
    for row in rows:
        by_id.setdefault(row.text("id"), []).append(row)
    kind = TASKS[task]
    questions = tuple(map(question, by_id.values()))
    return Benchmark(f"zeroscrolls/{task}", questions, kind.metric_name, kind.metric, kind.max_new_tokens)


def question(rows: Sequence[Row]) -> Question:
    """Rows with one id. The document is all from its beginning to the query, behind which the prompt asks for the
    answer; what stands in for a cut part comes with the row."""
    row = rows[0]
    text = row.text("input")
    begin, query = (_index(row, name, text) for name in ("document_start_index", "query_start_index"))
    references = tuple(map(_reference, rows))
    mark = row.checked_text(row.values.get("truncation_seperator"), '"truncation_seperator"', may_be_empty=True)
    document = text[begin:query]
    return Question(text[:begin], document, text[query:], references, document, mark)


def _reference(row: Row) -> str:
    if row.values.get("output") is None:
        raise row.error('"output" is missing: the test split has none, only the validation split can be scored')
    return row.text("output")


def _index(row: Row, name: str, text: str) -> int:
    value = row.values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= len(text):
        raise row.error(f'"{name}" is {shown(value)}; it must count letters of "input", from 0 to {len(text)}')
    return value
