"""Documents reordered so that the most relevant stand at the edges of the prompt, and the least in its middle.

What LangChain's LongContextReorder and Haystack's LostInTheMiddleRanker do with what a retriever found. Here, relevance
is BM25 (Robertson and Zaragoza 2009) of the question against the documents of its prompt, titles among them. The best
document comes first, the second last, and so on inwards, as in Haystack; LangChain puts the best one last where the
number of documents is even.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from lpes_bake.search.errors import InputError
from lpes_bake.search.tasks import Example

# As Lucene has them.
K1, B = 1.2, 0.75

T = TypeVar("T")


def rearranged(example: Example) -> Example:
    """The example with its documents reordered and numbered anew. InputError for a prompt without documents."""
    head, documents, tail = split(example.prompt)
    question = tail.partition("Question:")[2].rpartition("\n")[0]
    scores = bm25(question, documents)
    order = edges_first(sorted(range(len(documents)), key=lambda one: -scores[one]))
    lines = (f"Document [{number}]{documents[one]}" for number, one in enumerate(order, 1))
    return replace(example, prompt=head + "\n".join(lines) + tail)


def split(prompt: str) -> tuple[str, list[str], str]:
    """What stands before the documents of a prompt of multi-document QA, the documents behind their numbers, and what
    stands behind them."""
    head, found, rest = prompt.partition("Document [1]")
    rest, last, question = rest.rpartition("\n\nQuestion:")
    if not found or not last:
        raise InputError(
            "reorder is for questions about documents (the tasks mdqa and qa), and this prompt has none: "
            f"{' '.join(prompt.split())[:60]!r}…"
        )
    documents: list[str] = []
    while True:
        document, more, rest = rest.partition(f"\nDocument [{len(documents) + 2}]")
        documents.append(document)
        if not more:
            return head, documents, last + question


def edges_first(ranked: Sequence[T]) -> list[T]:
    """Most relevant first → the first, third, fifth …, and from the end the second, fourth …"""
    return [*ranked[::2], *reversed(ranked[1::2])]


def bm25(query: str, documents: Sequence[str]) -> list[float]:
    """The relevance of each document:

    Σ over the query's words of log(1 + (N − n + ½) / (n + ½)) · f / (f + k1 (1 − b + b · length / mean length)), with f
    the times that the word stands in the document, and n of N documents that have it.
    """
    words = [Counter(re.findall(r"\w+", document.lower())) for document in documents]
    lengths = [one.total() for one in words]
    mean = sum(lengths) / len(lengths) or 1.0
    scores = [0.0] * len(documents)
    for word in re.findall(r"\w+", query.lower()):
        having = sum(word in one for one in words)
        weight = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
        for i, one in enumerate(words):
            scores[i] += weight * one[word] / (one[word] + K1 * (1 - B + B * lengths[i] / mean))
    return scores
