"""The metrics of ZeroSCROLLS and L-Eval on published examples, and on others worked by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lpes_bake.long_text.metrics import (
    Metric,
    code_output,
    concordance,
    contained,
    exponential_similarity,
    final_number,
    letter_accuracy,
    multiple_choice,
    rouge,
    score_of,
    several_choices,
    token_f1,
    true_or_false,
)


def test_rouge_is_what_the_reference_package_publishes() -> None:
    pytest.importorskip("rouge_score")
    # From the README of rouge-score, but for ROUGE-2: 2 bigrams of 8 and of 7 are common, so F is 4 / 15.
    reference, answer = "The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log."
    expected = (70.58823529411765, 400 / 15, 58.82352941176471)
    assert rouge(answer, [reference]) == pytest.approx(expected)
    assert rouge(answer, ["nothing of it"]) == (0, 0, 0)


def test_each_part_of_rouge_has_the_reference_that_suits_it_best() -> None:
    pytest.importorskip("rouge_score")
    # Of "c b a" all words are there, of "a b x y" two of three and four, next to one another.
    assert rouge("a b c", ["c b a", "a b x y"]) == pytest.approx((100, 200 / 5, 400 / 7))


def test_rouge_counts_words_as_they_stand() -> None:
    pytest.importorskip("rouge_score")
    assert rouge("dogs jump", ["dog jumps"]) == (0, 0, 0)


def test_a_score_is_the_geometric_mean_of_the_means() -> None:
    answers = np.array([[80.0, 10.0, 50.0], [40.0, 30.0, 30.0]])
    # Means 60, 20 and 40: the cube root of 48,000. Of the answers' own geometric means the mean would be 33.6.
    assert score_of(answers.mean(0)) == pytest.approx(36.342411856642793)
    assert score_of(np.array([[30.0], [20.0]])) == pytest.approx([30.0, 20.0])


@pytest.mark.parametrize(
    ("metric", "answer", "references", "expected"),
    [
        # "cat sat" and "cat sat on mat": 2 words of 2 and of 4 are common.
        (token_f1, "The cat sat.", ["a cat sat on the mat"], 200 * 2 / 6),
        (token_f1, "cat cat", ["cat"], 200 / 3),
        (token_f1, "dog", ["the cat", "A dog!"], 100),
        (token_f1, "", ["cat"], 0),
        (letter_accuracy, "The answer is (C), not B.", ["C"], 100),
        (letter_accuracy, "Because of that, B", ["B"], 100),
        (letter_accuracy, "ABCD", ["A"], 0),
        (letter_accuracy, "c", ["C"], 0),
        # Half as much for every ten points.
        (exponential_similarity, "50%", ["50%"], 100),
        (exponential_similarity, "About 40% of them, or 50%", ["50%"], 50),
        (exponential_similarity, "75.5%", ["50.5%"], 100 * 2**-2.5),
        (exponential_similarity, "50", ["50%"], 0),
        # Of the six pairs of 2, 1, 3, 4 five stand as in 1, 2, 3, 4; of 4, 3, 2, 1 none does.
        (concordance, "2, 1, 3, 4", ["1, 2, 3, 4"], 500 / 6),
        (concordance, "4,3,2,1", ["1, 2, 3, 4"], 0),
        (concordance, "The order is: 3, 1, 2.", ["3, 1, 2"], 100),
        # Summary 2 should come first: 2 before 3 and 2 before 1 are right, 3 before 1 is not.
        (concordance, "2, 1, 3", ["2, 3, 1"], 200 / 3),
        (concordance, "1, 2, 3", ["1, 2, 3, 4"], 0),
        (concordance, "1, 1, 2", ["1, 2, 3"], 0),
        (concordance, "first, second", ["1, 2"], 0),
    ],
)
def test_zeroscrolls(metric: Metric, answer: str, references: Sequence[str], expected: float) -> None:
    assert metric(answer, references) == pytest.approx((expected,))


@pytest.mark.parametrize(
    ("metric", "answer", "references", "expected"),
    [
        (multiple_choice, "B", ["B"], 100),
        (multiple_choice, "the right one is C", ["C. all of it"], 100),
        (multiple_choice, "Certainly: B", ["B"], 0),
        (multiple_choice, "no idea", ["A"], 100),
        (multiple_choice, "AB", ["A"], 0),
        # The authors' example: AC where ABC is right gives a quarter.
        (several_choices, "AC", ["ABC"], 25),
        (several_choices, "ACB", ["ABC"], 100),
        (several_choices, "ABD", ["ABC"], 0),
        (several_choices, "A. data\nC. science", ["AC"], 100),
        (several_choices, "They are B) and D)\nQuestion: A. or C.", ["BD"], 100),
        (several_choices, "none", ["A"], 100),
        (final_number, "So 3 and 4. The answer is 1,200.", ["The answer is 1200"], 100),
        (final_number, "He has $18.50 left", ["The answer is 18"], 100),
        (final_number, "5 and 7\n\nno, 9", ["The answer is 7"], 100),
        (final_number, "none", ["The answer is 7"], 0),
        (
            contained,
            "\nThe first topic is The  Benefits of volunteering.\nNot x",
            ["the benefits of Volunteering"],
            100,
        ),
        (contained, "The second\nthe benefits of volunteering", ["benefits"], 0),
        (contained, "15", ["5"], 0),
        (contained, "5", ["5.0"], 100),
        (code_output, "First 7, then the final output is [1, 2]", ["[1,2]"], 100),
        (code_output, "The value of the code would be 3 4", ["3 4"], 100),
        (code_output, "9 8 7 6 5 and more words here now", ["9"], 0),
        (true_or_false, "It is false, not true.", ["False"], 100),
        (true_or_false, "Untrue? true", ["False"], 0),
        (true_or_false, "maybe", ["True"], 0),
    ],
)
def test_leval(metric: Metric, answer: str, references: Sequence[str], expected: float) -> None:
    assert metric(answer, references) == (expected,)
