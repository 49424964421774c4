"""How answers are scored in ZeroSCROLLS (Shaham et al., arXiv 2305.14196) and L-Eval (An et al., arXiv 2307.11088).

A metric is a function of an answer and its references that gives one number or several, 0 to 100, the more the
better; `score_of` makes the score of a task from their means. Formulas are those of the authors' scripts; where an
oddity of a script is left out, the function says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lpes_bake.search.errors import InputError
from lpes_bake.search.metrics import normalise

Metric = Callable[[str, Sequence[str]], tuple[float, ...]]
"""(answer, references) → parts, 0 to 100: three for ROUGE, one for all others."""

LETTERS = "ABCD"


def score_of(means: NDArray[np.float64]) -> NDArray[np.float64]:
    """(…, parts) means over answers → (…,): their geometric mean, which of one part is the part itself."""
    scores: NDArray[np.float64] = means.prod(-1) ** (1 / means.shape[-1])
    return scores


def rouge(answer: str, references: Sequence[str]) -> tuple[float, ...]:
    """ROUGE-1, ROUGE-2 and ROUGE-L (F measure, no stemming), each with the reference that suits it best."""
    scorer = _rouge_scorer()
    scores = [scorer.score(reference, answer) for reference in references]
    return tuple(100 * max(score[kind].fmeasure for score in scores) for kind in ROUGE_KINDS)


ROUGE_KINDS = ("rouge1", "rouge2", "rougeL")


@lru_cache
def _rouge_scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as error:
        raise InputError(
            "summaries are scored with rouge-score, which is not installed: pip install 'lpes-bake[benchmarks]'"
        ) from error
    return RougeScorer(list(ROUGE_KINDS), use_stemmer=False)


def token_f1(answer: str, references: Sequence[str]) -> tuple[float, ...]:
    """SQuAD's F1 of words (Rajpurkar et al. 2016), lower case, without punctuation and articles; the best reference.

    ZeroSCROLLS' script also turns letters with accents into plain ones.
    """
    return (100 * max(_f1(normalise(answer).split(), normalise(one).split()) for one in references),)


def _f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference)) if common else 0.0


def letter_accuracy(answer: str, references: Sequence[str]) -> tuple[float, ...]:
    """Whether the first letter from A to D that stands alone is that of a reference."""
    found = _lone_letter(answer)
    return (100.0 * (found is not None and found in map(_lone_letter, references)),)


def _lone_letter(text: str) -> str | None:
    found = re.search(rf"\b[{LETTERS}]\b", text)
    return found and found.group()


def exponential_similarity(answer: str, references: Sequence[str]) -> tuple[float, ...]:
    """ZeroSCROLLS: half as much for every 10 points between the first percentage and the reference's; 0 without one."""
    found = _percentage(answer)
    if found is None:
        return (0.0,)
    distances = [abs(found - one) for one in map(_percentage, references) if one is not None]
    return (max((100 * 0.5 ** (distance / 10) for distance in distances), default=0.0),)


def _percentage(text: str) -> float | None:
    found = re.search(r"(\d+\.?\d*)%", text)
    return float(found[1]) if found else None


def concordance(answer: str, references: Sequence[str]) -> tuple[float, ...]:
    """ZeroSCROLLS: the share of pairs that stand in the reference's order; 0 where the answer is not an
    arrangement of its numbers."""
    return (100 * max(_concordance(_numbers(answer), _numbers(one)) for one in references),)


def _numbers(text: str) -> list[int]:
    """The numbers in a text, read as the authors do: all but digits, white space and commas is taken out first."""
    return [int(number) for number in re.findall(r"\d+", re.sub(r"[^0-9\s,]", "", text))]


def _concordance(found: Sequence[int], wanted: Sequence[int]) -> float:
    if sorted(found) != sorted(wanted):
        return 0.0
    place = {number: index for index, number in enumerate(found)}
    ordered = [place[first] < place[second] for first, second in combinations(wanted, 2)]
    return sum(ordered) / len(ordered) if ordered else 1.0


def multiple_choice(answer: str, references: Sequence[str]) -> tuple[float, ...]:
    """L-Eval, one right option: the first capital letter from A to D, wherever it stands; A where there is none. An
    answer of several letters and nothing else is wrong."""
    found = answer if answer and answer in LETTERS else next((letter for letter in answer if letter in LETTERS), "A")
    return (100.0 * (found in map(_options_wanted, references)),)


def several_choices(answer: str, references: Sequence[str]) -> tuple[float, ...]:
    """L-Eval's Coursera, several right options: a quarter for a part of them, nothing where a wrong one is among them.

    Options are the letters at the beginning or, where that is at most one, also those that a space, a full stop or a
    bracket follows; A where there is none.
    """
    leading = "".join(_leading_letters(answer))
    found = set(leading)
    if len(found) < 2:
        rest = answer[len(leading) :].split("Question")[0]
        found |= {letter for letter in re.findall(r"[A-Z](?=[\s.)])", rest) if letter in LETTERS}
    found = found or {"A"}
    wanted = [set(_options_wanted(one)) for one in references]
    return (max(100.0 if found == one else 25.0 if found < one else 0.0 for one in wanted),)


def _leading_letters(text: str) -> list[str]:
    end = next((index for index, letter in enumerate(text) if letter not in LETTERS), len(text))
    return list(text[:end])


def _options_wanted(reference: str) -> str:
    """The letters in the first word of a reference."""
    first = (reference.split() or [""])[0]
    return "".join(letter for letter in first if letter in LETTERS) or "A"


def final_number(answer: str, references: Sequence[str]) -> tuple[float, ...]:
    """L-Eval's GSM: the whole number behind "The answer is", else the last number of the first paragraph."""
    found = _final_number(answer)
    return (100.0 * (found is not None and found in map(_final_number, references)),)


def _final_number(text: str) -> int | None:
    said = re.search(r"The answer is (\S+)", text)
    words = [said[1]] if said else text.split("\n\n")[0].split(" ")[::-1]
    word = next((word for word in words if re.search(r"\d", word)), "")
    digits = re.sub(r"\D", "", word.split(".")[0])
    return int(digits) if digits else None


def contained(answer: str, references: Sequence[str]) -> tuple[float, ...]:
    """L-Eval: whether a reference is in the answer's first line of more than one letter, but for case and spaces; of
    two numbers, whether they are equal."""
    return (100.0 * any(_contained(answer, one) for one in references),)


def _contained(answer: str, reference: str) -> bool:
    try:
        return float(answer) == float(reference)
    except ValueError:
        line = next((line for line in answer.split("\n") if len(line) > 1), answer)
        return reference.lower().replace(" ", "") in line.lower().replace(" ", "")


def code_output(answer: str, references: Sequence[str]) -> tuple[float, ...]:
    """L-Eval's CodeU: whether the printed value is among as many words as it has, and three more, behind "the final
    output" or else at the end of the answer."""
    text = _plain_code(answer)
    for phrase in ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed"):
        text = text.replace(phrase, "")
    _, said, behind = text.rpartition("the final output")
    words = re.split(r"\s+", behind)
    right = False
    for reference in references:
        count = len(reference.split()) + 3
        right |= _contained(" ".join(words[:count] if said else words[-count:]), _plain_code(reference))
    return (100.0 * right,)


def _plain_code(text: str) -> str:
    """Without what printed lists may or may not have."""
    text = re.sub(r"\s+", " ", text)
    for mark in (",", "'", "\\", ".0"):
        text = text.replace(mark, "")
    return text.replace("] [", "][").replace("[ [", "[[").replace("] ]", "]]")


def true_or_false(answer: str, references: Sequence[str]) -> tuple[float, ...]:
    """L-Eval's SciFi: the first word that holds true or false is that of a reference."""
    words = (re.search("true|false", word) for word in answer.lower().split())
    found = next((word.group() for word in words if word), None)
    return (100.0 * (found is not None and any(found in one.lower() for one in references)),)
