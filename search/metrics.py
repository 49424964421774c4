"""How generated answers are judged: the metric of multi-document question answering."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, without a, an and the, with single spaces: as SQuAD's script does."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def first_line(output: str) -> str:
    """What counts of a model's output: the text up to the first newline, blank lines before it left out.

    Otherwise a model could copy the whole context, which holds the answer. The authors' script does not leave out
    blank lines, and gives 0 to every answer that begins with one.
    """
    return output.lstrip().partition("\n")[0].strip()


def best_subspan_em(prediction: str, answers: Sequence[str]) -> bool:
    """Whether one of the answers, normalised, is in the normalised prediction (Liu et al., arXiv 2307.03172).

    An answer that normalises to nothing ("The", "*") matches nothing; in the authors' script it matches everything.
    """
    normal = normalise(prediction)
    return any(answer in normal for answer in map(normalise, answers) if answer)
