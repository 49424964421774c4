"""What must hold for the metric: the authors' cases, and the two pitfalls of their script."""

from __future__ import annotations

import pytest

from lpes_bake.search.metrics import best_subspan_em, first_line, normalise


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Beatles", "beatles"),
        ("A  day in\tthe\n Life!", "day in life"),
        ("an Anthem for the theatre", "anthem for theatre"),
        ("co-op's (U.S.)", "coops us"),
        # Punctuation goes before articles do, so these letters become a word.
        ("t.h.e", ""),
        ("snake_case", "snakecase"),
        # ASCII punctuation only.
        ("1914–1918 «Ende»", "1914–1918 «ende»"),
        ("The", ""),
        ("*", ""),
        ("", ""),
    ],
)
def test_normalisation_is_that_of_squad(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("prediction", "answers", "right"),
    [
        ("It was Wilhelm Conrad Röntgen.", ["Wilhelm Conrad Röntgen"], True),
        ("wilhelm conrad röntgen", ["Wilhelm Conrad Röntgen"], True),
        ("Röntgen", ["Wilhelm Conrad Röntgen"], False),
        ("Answer: the May 18, 2018 date", ["May 18 2018"], True),
        ("It is in Beatles", ["Rolling Stones", "The Beatles"], True),
        # Articles are dropped between words, too.
        ("king of the hill", ["King of Hill"], True),
        # A substring, not a whole word.
        ("Tirana", ["Iran"], True),
        ("I do not know", ["Paris"], False),
        ("", ["Paris"], False),
        ("Paris", [], False),
    ],
)
def test_an_answer_inside_the_prediction_counts(prediction: str, answers: list[str], right: bool) -> None:
    assert best_subspan_em(prediction, answers) is right


def test_an_answer_of_which_nothing_is_left_matches_nothing() -> None:
    assert not best_subspan_em("anything at all", ["The", "*"])
    assert not best_subspan_em("", ["The"])
    assert best_subspan_em("a saltire", ["*", "saltire"])


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (" Paris\nQuestion: next", "Paris"),
        ("\n\nParis\nLondon", "Paris"),
        (" \n\t\n Paris  ", "Paris"),
        ("Paris", "Paris"),
        ("\n\n", ""),
        ("", ""),
    ],
)
def test_the_first_line_that_is_not_blank_counts(output: str, line: str) -> None:
    assert first_line(output) == line
