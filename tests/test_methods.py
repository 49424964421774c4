"""Methods as they are written on the command line, and documents reordered to the edges of a prompt."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lpes_bake.baselines.methods import METHODS, parse_method
from lpes_bake.baselines.reordering import bm25, edges_first, split
from lpes_bake.search.errors import InputError
from lpes_bake.search.kv_retrieval import kv_prompt
from lpes_bake.search.multi_document import Document, qa_prompt
from lpes_bake.search.tasks import Example


def test_every_method_is_parsed_from_its_example_and_keeps_how_it_was_written(tmp_path: Path) -> None:
    factors = tmp_path / "factors.json"
    factors.write_text("[1.0, 1.0]")
    for name, (_, example) in METHODS.items():
        text = example.replace("factors.json", str(factors))
        method = parse_method(text)
        assert method.label == text and text.startswith(name)
        assert method.reorders == (name == "reorder")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mspoe", "there is no method 'mspoe'; there are: base, lpes, pi, ntk, yarn, attention-buckets, ms-poe, "),
        ("pi", "method 'pi': it needs a positive factor, as in pi=1.5"),
        ("pi=", "method 'pi=' has nothing behind its =; write it like pi=1.5"),
        ("yarn=fast", "method 'yarn=fast': it needs a positive factor, as in yarn=1.5"),
        ("ntk=-1", "method 'ntk=-1': it needs a positive factor, as in ntk=1.5"),
        ("pi=inf", "method 'pi=inf': it needs a positive factor"),
        ("base=2", "method 'base=2': it takes no value; leave out =2"),
        ("ms-poe=1.2", "method 'ms-poe=1.2': it takes no value; leave out =1.2"),
        ("reorder=bm25", "method 'reorder=bm25': it takes no value"),
        ("moice", "method 'moice': give the routers' folder, moice=DIR; lpes-bake train-moice makes one"),
        ("lpes=nowhere.json", "nowhere.json"),
        ("hidden-channel=x", "method 'hidden-channel=x': write the channel and its factor as hidden-channel=213/0.5"),
    ],
)
def test_what_is_no_method_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(InputError) as error:
        parse_method(text)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_parsing_imports_no_torch() -> None:
    code = "import sys; from lpes_bake.baselines.methods import parse_method as p; p('pi=2'); assert 'torch' not in "
    code += "sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_most_relevant_stand_at_the_edges() -> None:
    # As Haystack's LostInTheMiddleRanker gives them, by its documentation and source.
    assert edges_first([1, 2, 3, 4, 5]) == [1, 3, 5, 4, 2]
    assert edges_first([1, 2, 3, 4]) == [1, 3, 4, 2]
    assert edges_first([1]) == [1]


def test_bm25_is_its_formula() -> None:
    # Three documents of 2, 4 and 3 words; "cat" stands in two, "hat" in one, "the" in none of them.
    found = bm25("The cat's hat, cat?", ["Cat sat", "a cat, Cat! here", "dogs run off"])
    cat = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    # "cat" is asked for twice; k1 1.2 and b 0.75.
    once = 1 / (1 + 1.2 * (0.25 + 0.75 * 2 / 3))
    twice = 2 / (2 + 1.2 * (0.25 + 0.75 * 4 / 3))
    assert found == pytest.approx([2 * cat * once, 2 * cat * twice, 0.0])


DOCUMENTS = [
    Document("It rained in May.", "Weather"),
    Document("The lamp was repaired by Tom.\nHe has tools.", "Lamp"),
    Document("Tom fed the cat."),
    Document("Nothing else is known of the lamp.", "Log [3]"),
]
QUESTION = "Who repaired the lamp?\nGive a name."


def example(documents: list[Document]) -> Example:
    return Example(3, 50, qa_prompt(QUESTION, documents), " Tom", "", ("Tom", "Thomas"))


def test_documents_are_reordered_and_numbered_anew_and_nothing_else_changes() -> None:
    # By words in common with the question: the lamp (repaired, the, lamp), the log (the, lamp), the cat (the), May.
    expected = example([DOCUMENTS[1], DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[3]])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        assert parse_method("reorder").rearrange(example([DOCUMENTS[one] for one in order])) == expected


def test_a_prompt_is_split_at_its_documents() -> None:
    head, documents, tail = split(example(DOCUMENTS).prompt)
    assert head.endswith("(some of which might be irrelevant).\n\n")
    assert documents[0] == "(Title: Weather) It rained in May." and documents[2] == " Tom fed the cat."
    assert tail == f"\n\nQuestion: {QUESTION}\nAnswer:"


def test_other_methods_leave_examples_alone_and_reorder_refuses_prompts_without_documents() -> None:
    asked = replace(example(DOCUMENTS), prompt=kv_prompt([("a", "b"), ("c", "d")], "a"))
    assert parse_method("ms-poe").rearrange(asked) is asked
    with pytest.raises(InputError, match="reorder is for questions about documents"):
        parse_method("reorder").rearrange(asked)
