"""What must hold for the tasks: prompts letter for letter, parts that share nothing, lines that are checked."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import re
import uuid
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lpes_bake.search.errors import InputError
from lpes_bake.search.kv_retrieval import KVRetrieval, KVRetrievalFile, kv_prompt
from lpes_bake.search.multi_document import Document, MultiDocumentQA, qa_prompt
from lpes_bake.search.own_data import OwnData
from lpes_bake.search.tasks import BUILT_IN, PARTS, Example, Task, even_positions, parse_task, part_of, task_help

from .conftest import ROOT

INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results (some of which might "
    "be irrelevant)."
)


def some(task: Task, part: str = "search", seed: int = 0, count: int = 10_000) -> list[list[Example]]:
    return list(itertools.islice(task.contexts(part, seed), count))


def write(path: Path, rows: Iterable[Any]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def question_of(example: Example) -> str:
    return example.prompt.rpartition("\n\nQuestion: ")[2].removesuffix("\nAnswer:")


def documents_of(example: Example) -> list[str]:
    head, _, rest = example.prompt.partition("\n\n")
    assert head == INSTRUCTION
    return rest.partition("\n\nQuestion: ")[0].split("\n")


# Key-value retrieval, generated


def test_kv_prompt_is_the_authors_letter_for_letter() -> None:
    assert kv_prompt([("a1", "b1"), ("a2", "b2"), ("a3", "b3")], "a2") == (
        "Extract the value corresponding to the specified key in the JSON object below.\n"
        "\n"
        "JSON data:\n"
        '{"a1": "b1",\n'
        ' "a2": "b2",\n'
        ' "a3": "b3"}\n'
        "\n"
        'Key: "a2"\n'
        "Corresponding value:"
    )


@pytest.mark.parametrize("width", [4, 8, "uuid"])
def test_answer_is_the_value_at_the_gold_position(width: int | str) -> None:
    contexts = some(KVRetrieval(pairs=9, key_width=width), count=3)
    assert [[(one.context, one.position) for one in context] for context in contexts] == [
        [(c, p) for p in (0, 4, 8)] for c in range(3)
    ]
    for one in itertools.chain(*contexts):
        data = one.prompt.split("JSON data:\n")[1].split("\n\nKey")[0]
        records = list(json.loads(data).items())
        key = one.prompt.split('Key: "')[1].split('"')[0]
        assert len(records) == 9
        assert records[one.position] == (key, one.answer)
        assert len(key) == len(one.answer) == (36 if width == "uuid" else width)
        assert one.lead == ' "'


def test_uuids_are_version_4() -> None:
    assert uuid.UUID(some(KVRetrieval(pairs=2, key_width="uuid"), count=1)[0][0].answer).version == 4


def test_seed_and_part_decide_and_more_contexts_only_add() -> None:
    task = KVRetrieval()
    few = some(task, seed=5, count=2)
    assert few == some(task, seed=5, count=4)[:2]
    assert few != some(task, seed=6, count=2)
    assert few != some(task, "report", seed=5, count=2)


def test_questions_of_a_generated_context_differ_only_in_key_and_answer() -> None:
    (context,) = some(KVRetrieval(), count=1)
    assert len({one.prompt.split("Key:")[0] for one in context}) == 1
    assert len({one.prompt for one in context}) == 3


def test_generated_parts_share_nothing_even_where_there_are_few_contexts() -> None:
    # 256 contexts in all: parts drawn at random would share some.
    task = KVRetrieval(pairs=1, key_width=1)
    seen = [
        {one.prompt for context in some(task, part, seed, 200) for one in context} for seed, part in enumerate(PARTS)
    ]
    assert all(len(one) > 40 for one in seen)
    assert not any(first & second for first, second in itertools.combinations(seen, 2))


def test_positions_spread_evenly_as_in_the_literature() -> None:
    assert even_positions(140, 5) == (0, 34, 69, 104, 139)
    assert even_positions(10, 3) == (0, 4, 9)
    assert even_positions(20, 5) == (0, 4, 9, 14, 19)
    assert even_positions(3, 5) == (0, 1, 2)
    assert even_positions(1, 5) == (0,)
    assert KVRetrieval(pairs=1).positions == (0,)
    assert KVRetrieval(pairs=16).positions == (0, 8, 15)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pairs": 0}, "pairs must be at least 1"),
        ({"key_width": 1, "pairs": 16}, "key_width 1 is too small for 16"),
        ({"key_width": 0}, "from 1 to 64 hex digits; got 0"),
        ({"key_width": 10**9}, "from 1 to 64 hex digits"),
        ({"key_width": "guid"}, "'guid'"),
        ({"positions": (16,)}, "gold position 16 does not exist among 16 pairs"),
        ({"positions": (-1,)}, "gold position -1"),
        ({"positions": (1, 1)}, "must differ; got 1/1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match="(?s)" + said) as caught:
        KVRetrieval(**settings)
    assert "\n" not in str(caught.value)


# Key-value retrieval, the authors' files


def kv_rows(count: int = 40, pairs: int = 4) -> list[dict[str, Any]]:
    rows = []
    for i in range(count):
        records = [[f"k{i}-{j}", f"v{i}-{j}"] for j in range(pairs)]
        rows.append({"ordered_kv_records": records, "key": f"k{i}-1", "value": f"v{i}-1"})
    return rows


def test_the_pair_of_a_file_is_moved_and_the_others_keep_their_order(tmp_path: Path) -> None:
    task = KVRetrievalFile(write(tmp_path / "kv.jsonl.gz", kv_rows()), (0, 3))
    context = next(one for one in some(task, part_by_hand("k2-1")) if one[0].answer == "v2-1")
    assert [(one.position, one.answer, one.lead) for one in context] == [(0, "v2-1", ' "'), (3, "v2-1", ' "')]
    assert context[0].prompt == kv_prompt(
        [("k2-1", "v2-1"), ("k2-0", "v2-0"), ("k2-2", "v2-2"), ("k2-3", "v2-3")], "k2-1"
    )
    assert context[1].prompt == kv_prompt(
        [("k2-0", "v2-0"), ("k2-2", "v2-2"), ("k2-3", "v2-3"), ("k2-1", "v2-1")], "k2-1"
    )


def part_by_hand(question: str) -> str:
    return {0: "search", 1: "selection", 2: "report", 3: "report"}[zlib.crc32(question.encode()) % 4]


def test_rows_of_a_file_are_dealt_to_parts_once_and_for_ever(tmp_path: Path) -> None:
    rows = kv_rows()
    task = KVRetrievalFile(write(tmp_path / "kv.jsonl", rows))
    assert task.positions == (0, 1, 3)
    for part in PARTS:
        mine = {row["value"] for row in rows if part_by_hand(row["key"]) == part}
        orders = []
        for seed in (0, 1):
            contexts = some(task, part, seed)
            assert [one.context for context in contexts for one in context[:1]] == list(range(len(mine)))
            orders.append([context[0].answer for context in contexts])
            assert set(orders[-1]) == mine
        assert orders[0] != orders[1]
    assert {part_of(row["key"]) for row in rows} == set(PARTS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ordered_kv_records": []}, '"ordered_kv_records" is .*list in brackets'),
        (
            {"ordered_kv_records": [["a", "b", "c"]]},
            r"holds \[\"a\", \"b\", \"c\"\]; each record must be \[key, value\]",
        ),
        ({"ordered_kv_records": [["a", 1]]}, 'record 0 of "ordered_kv_records" is 1; it must be text'),
        ({"ordered_kv_records": [["a", "b"], ["a", "c"]]}, "a key twice"),
        ({"key": "other"}, "is not among"),
        ({"value": None}, '"value" is null; it must be text'),
        ({"ordered_kv_records": [["k1-1", "v1-1"]]}, "1 records, but the first line has 4"),
    ],
)
def test_a_bad_row_of_kv_records_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    rows = kv_rows(3)
    rows[1].update(change)
    with pytest.raises(InputError, match=r"kv\.jsonl, line 2: .*" + said):
        KVRetrievalFile(write(tmp_path / "kv.jsonl", rows))


# Multi-document QA


def test_qa_prompt_is_the_authors_letter_for_letter() -> None:
    documents = [Document("Tom slept {x}.", "Log [1]"), Document("It rained.", ""), Document("Mia read.")]
    assert qa_prompt("who slept", documents) == (
        "Write a high-quality answer for the given question using only the provided search results (some of which "
        "might be irrelevant).\n"
        "\n"
        "Document [1](Title: Log [1]) Tom slept {x}.\n"
        "Document [2](Title: ) It rained.\n"
        # The authors have no document without a title; ours go without the brackets.
        "Document [3] Mia read.\n"
        "\n"
        "Question: who slept\n"
        "Answer:"
    )


def retrieved_rows(count: int = 40) -> list[dict[str, Any]]:
    """The authors' format with the gold document third of five."""
    rows = []
    for i in range(count):
        ctxs: list[dict[str, Any]] = [
            {
                "id": str(j),
                "title": f"T{j}",
                "text": f"Text {i} {j}.",
                "score": "0.9",
                "hasanswer": False,
                "isgold": False,
            }
            for j in range(4)
        ]
        gold = {"title": "Gold", "text": f"The hero is Name{i}, they say.", "hasanswer": True, "isgold": True}
        ctxs.insert(2, gold)
        answers = [f"name{i}", f"Name{i}"]
        rows.append({"question": f"who is hero {i}", "answers": answers, "ctxs": ctxs, "nq_annotated_gold": {}})
    return rows


def test_the_gold_document_is_moved_among_the_best_ranked_distractors(tmp_path: Path) -> None:
    task = MultiDocumentQA(write(tmp_path / "nq.jsonl.gz", retrieved_rows()), documents=4)
    assert task.positions == (0, 1, 3)
    contexts = {question_of(one[0]): one for part in PARTS for one in some(task, part)}
    assert len(contexts) == 40
    context = contexts["who is hero 7"]
    gold = "(Title: Gold) The hero is Name7, they say."
    first, second, third = (f"(Title: T{j}) Text 7 {j}." for j in range(3))
    orders = {0: [gold, first, second, third], 1: [first, gold, second, third], 3: [first, second, third, gold]}
    for one in context:
        assert documents_of(one) == [f"Document [{i}]{text}" for i, text in enumerate(orders[one.position], 1)]
        # The first answer that stands there letter for letter, not the first.
        assert one.answer == " Name7"
        assert one.accepted == ("name7", "Name7")


def test_rows_whose_gold_passage_does_not_hold_the_answer_are_skipped_and_counted(tmp_path: Path) -> None:
    rows = retrieved_rows()
    rows[3]["answers"] = ["Nobody"]
    rows[4]["answers"] = ["The", "*"]
    rows[5]["answers"] = ["nobody", "NAME5, they"]
    task = MultiDocumentQA(write(tmp_path / "nq.jsonl", rows), documents=5)
    described = task.describe()
    assert (described["questions"], described["skipped"]) == (38, 2)
    contexts = {question_of(one[0]): one for part in PARTS for one in some(task, part)}
    assert len(contexts) == 38
    # It stands there but for capitals.
    assert contexts["who is hero 5"][0].answer == " NAME5, they"


def oracle_rows(count: int = 120) -> list[dict[str, Any]]:
    """The format of nq-open-oracle. Neighbours disturb each other: a passage holds the next four answers, too."""
    names = [f"Name{i:03}" for i in range(count)]
    rows = []
    for i, name in enumerate(names):
        others = " or ".join(names[(i + j) % count] for j in range(1, 5))
        gold = {"title": f"T{i:03}", "text": f"{name}, not {others}.", "hasanswer": True, "isgold": True}
        rows.append({"question": f"who is hero {i:03}", "answers": [name], "ctxs": [gold]})
    return rows


def test_one_context_of_gold_passages_serves_all_places(tmp_path: Path) -> None:
    task = MultiDocumentQA(write(tmp_path / "oracle.jsonl.gz", oracle_rows()), documents=6, positions=(1, 3, 5))
    asked: list[str] = []
    passages: list[set[str]] = []
    for part in PARTS:
        contexts = some(task, part)
        passages.append(set())
        for number, context in enumerate(contexts):
            assert [(one.context, one.position) for one in context] == [(number, 1), (number, 3), (number, 5)]
            assert len({one.prompt.rpartition("Question:")[0] for one in context}) == 1
            documents = documents_of(context[0])
            assert len(set(documents)) == 6
            passages[-1].update(text.partition("]")[2] for text in documents)
            for one in context:
                name = one.answer.strip()
                assert one.accepted == (name,)
                assert question_of(one) == f"who is hero {name[4:]}"
                # Its own passage, and that alone, holds the answer.
                assert [i for i, text in enumerate(documents) if name in text] == [one.position]
                asked.append(question_of(one))
        # Nearly every question of the part is asked, once.
        mine = [row for row in oracle_rows() if part_by_hand(row["question"]) == part]
        assert len(mine) - 6 <= 3 * len(contexts) <= len(mine)
        assert contexts == some(task, part)
        assert contexts != some(task, part, seed=1)
    assert len(set(asked)) == len(asked)
    assert not any(first & second for first, second in itertools.combinations(passages, 2))


def test_an_answer_that_all_passages_hold_is_skipped_and_counted(tmp_path: Path) -> None:
    rows = oracle_rows(60)
    rows[8]["answers"] = ["n"]
    task = MultiDocumentQA(write(tmp_path / "oracle.jsonl", rows), documents=3)
    assert task.describe()["skipped"] == 1
    asked = [question_of(one) for part in PARTS for context in some(task, part) for one in context]
    assert "who is hero 008" not in asked and len(asked) > 40


def test_questions_that_all_disturb_one_another_give_no_context(tmp_path: Path) -> None:
    rows = oracle_rows(40)
    for row in rows:
        row["ctxs"][0]["text"] = row["answers"][0]
    # A passage with all answers beside one that answers nobody else: each can be asked alone, two never.
    everyone = " ".join(row["answers"][0] for row in rows)
    for row in rows[:-1]:
        row["ctxs"][0]["text"] = everyone
    task = MultiDocumentQA(write(tmp_path / "oracle.jsonl", rows), documents=2, positions=(0, 1))
    assert [some(task, part) for part in PARTS] == [[], [], []]


def test_best_subspan_of_the_first_line_decides(tmp_path: Path) -> None:
    task = MultiDocumentQA(write(tmp_path / "nq.jsonl", retrieved_rows(1)), 5)
    example = Example(0, 0, "", " Paris", "", ("Paris", "the city of light"))
    assert task.generates and task.max_new_tokens == 100
    assert task.correct(example, " It is Paris.")
    assert task.correct(example, "\n\nCity of Light")
    assert not task.correct(example, " London\nParis")
    assert [task.finished(text) for text in ("\n", " \n Par", " Paris", " Paris\n", "\nParis\nL")] == [
        False,
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"question": 3}, '"question" is 3; it must be text in quotes'),
        ({"question": " "}, '"question" is empty'),
        ({"question": "\ud800"}, "half a character"),
        ({"answers": "Paris"}, '"answers" is "Paris"; it must be a list in brackets'),
        ({"answers": []}, "with something in it"),
        ({"answers": [None]}, "an answer is null"),
        ({"ctxs": ["text"]}, '"ctxs" holds "text"; it must be an object'),
        ({"ctxs": [{"title": "T", "isgold": True}]}, '"text" of document 0 is null'),
        ({"ctxs": [{"title": "T", "text": "t"}]}, '0 of the documents in "ctxs" have "isgold": true'),
        ({"ctxs": [{"title": "T", "text": "t", "isgold": True}] * 2}, '2 of the documents in "ctxs"'),
        ({"ctxs": [{"title": "T", "text": "t", "isgold": True}]}, "1 documents, but 5 are asked for; use documents="),
    ],
)
def test_a_bad_row_of_the_authors_format_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    rows = retrieved_rows(3)
    rows[2].update(change)
    with pytest.raises(InputError, match=r"nq\.jsonl, line 3: .*" + said) as caught:
        MultiDocumentQA(write(tmp_path / "nq.jsonl", rows), documents=5)
    assert "\n" not in str(caught.value)


def test_the_two_kinds_of_files_are_not_mixed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"line 2: .* 5 documents, but the first line has only its gold passage"):
        MultiDocumentQA(write(tmp_path / "nq.jsonl", [*oracle_rows(1), *retrieved_rows(1)]), documents=2)
    with pytest.raises(InputError, match="gold position 10 does not exist among 10 documents"):
        MultiDocumentQA("missing.jsonl", positions=(10,))


# Own data


def own_row(**change: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "question": "Who repaired the lamp?",
        "documents": ["Mia fed the cat.", {"title": "Log", "text": "Tom repaired it."}, {"text": "It rained."}],
        "answers": ["Thomas", "Tom"],
        "gold": 1,
    }
    row.update(change)
    return {name: value for name, value in row.items() if value is not ...}


def test_own_documents_are_moved_to_beginning_middle_and_end(tmp_path: Path) -> None:
    task = OwnData(write(tmp_path / "mine.jsonl", [own_row()]))
    assert (task.position_unit, task.positions, task.generates) == ("%", (0, 50, 100), True)
    (context,) = some(task, part_by_hand("Who repaired the lamp?"))
    gold, cat, rain = "(Title: Log) Tom repaired it.", " Mia fed the cat.", " It rained."
    assert [one.position for one in context] == [0, 50, 100]
    for one, order in zip(context, ([gold, cat, rain], [cat, gold, rain], [cat, rain, gold]), strict=True):
        assert documents_of(one) == [f"Document [{i}]{text}" for i, text in enumerate(order, 1)]
        assert question_of(one) == "Who repaired the lamp?"
        assert (one.answer, one.accepted) == (" Tom", ("Thomas", "Tom"))


def test_percent_of_the_depth_means_the_authors_places(tmp_path: Path) -> None:
    documents = [f"d{i}" for i in range(10)]
    row = own_row(documents=documents, gold=5, answers=..., answer="no words of it")
    task = OwnData(write(tmp_path / "mine.jsonl", [row]), positions=(0, 25, 50, 75, 100))
    (context,) = some(task, part_by_hand(row["question"]))
    assert [[text.endswith("d5") for text in documents_of(one)].index(True) for one in context] == [0, 2, 4, 6, 9]
    # An answer need not stand in the document: it may be said in other words.
    assert {one.answer for one in context} == {" no words of it"}


def test_lines_in_the_authors_format_and_lines_of_other_lengths_are_read(tmp_path: Path) -> None:
    rows = [*retrieved_rows(20), *(own_row(question=f"lamp {i}?") for i in range(20)), own_row(question="lamp 0?")]
    task = OwnData(write(tmp_path / "mine.jsonl.gz", rows))
    contexts = [one for part in PARTS for one in some(task, part)]
    assert len(contexts) == task.describe()["questions"] == 41
    # The same question twice lands in one part.
    assert sum(question_of(one[0]) == "lamp 0?" for one in some(task, part_by_hand("lamp 0?"))) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([1], r"is \[1\]; it must be a JSON object"),
        (own_row(question=...), '"question" is missing; add it'),
        (own_row(documents=...), '"documents" is missing'),
        (own_row(documents={"a": 1}), '"documents" is .*; it must be a list'),
        (own_row(documents=["a", 7, "c"]), "document 1 is 7; it must be text"),
        (own_row(documents=["a", " ", "c"]), "document 1 is empty"),
        (own_row(documents=["a", {"title": "t"}, "c"]), '"text" of document 1 is null'),
        (own_row(documents=["a", {"title": 5, "text": "t"}, "c"]), '"title" of document 1 is 5'),
        (own_row(answers=...), '"answers" is missing'),
        (own_row(answer="Tom"), 'both "answer" and "answers"'),
        (own_row(answers=["!", "the"]), 'the answer "!" has no letters'),
        (retrieved_rows(1)[0] | {"answers": ["!", "the"]}, 'the answer "!" has no letters'),
        (own_row(gold=...), '"gold" is null; it must be the number .* from 0 to 2'),
        (own_row(gold=3), '"gold" is 3'),
        (own_row(gold=-1), '"gold" is -1'),
        (own_row(gold=True), '"gold" is true'),
        (own_row(gold="1"), '"gold" is "1"'),
        (own_row(documents=["a", "b"]), "2 documents have no different places for 0/50/100 % of the depth; add"),
    ],
)
def test_a_bad_line_of_own_data_is_named(tmp_path: Path, row: Any, said: str) -> None:
    path = tmp_path / "mine.jsonl"
    write(path, [own_row()])
    # An empty line counts as a line.
    path.write_text(path.read_text() + "\n" + json.dumps(row) + "\n" + json.dumps(own_row(gold=99)) + "\n")
    with pytest.raises(InputError, match=r"mine\.jsonl, line 3:? .*" + said) as caught:
        OwnData(str(path))
    assert "\n" not in str(caught.value)


def test_a_gold_document_that_is_counted_from_one_is_found_out(tmp_path: Path) -> None:
    wrong, unlike = own_row(gold=2), own_row(gold=2, question="Did it rain?", answers=["yes"])
    with pytest.raises(InputError, match=r'in all lines of .*mine\.jsonl .*: "gold" counts from 0'):
        OwnData(write(tmp_path / "mine.jsonl", [wrong, {**wrong, "question": "Who?"}]))
    # An answer need not stand in any document.
    assert OwnData(write(tmp_path / "mine.jsonl", [wrong, unlike])).describe()["questions"] == 2


@pytest.mark.parametrize(
    ("positions", "said"), [((), "at least one"), ((0, 101), "101 is not a percentage"), ((50, 50), "must differ")]
)
def test_percentages_that_cannot_work_are_refused(positions: tuple[int, ...], said: str) -> None:
    with pytest.raises(InputError, match=said):
        OwnData("missing.jsonl", positions)


# Files


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.jsonl", None, "does not exist or is not a file"),
        ("empty.jsonl", b"", "is empty; it must hold one JSON object a line"),
        ("blank.jsonl", b"\n \n", "is empty"),
        # mtime: the names of tests hold these bytes, and must be the same in every process that runs some of them.
        ("empty.jsonl.gz", gzip.compress(b"", mtime=0), "is empty"),
        ("plain.jsonl.gz", b'{"question": "q"}\n', r"no whole gzip file.*take \.gz off"),
        ("cut.jsonl.gz", gzip.compress(json.dumps(own_row()).encode() * 50)[:-20], "no whole gzip file"),
        ("latin.jsonl", b'{"question": "caf\xe9"}\n', "line 1 is not UTF-8 at byte 17; save"),
        ("packed.jsonl", gzip.compress(b"{}", mtime=0), "line 1 is not UTF-8"),
        ("broken.jsonl", b'{"question" "q"}\n', "line 1 is not JSON: .* at column 13; write one"),
        ("array.jsonl", b"[\n", "line 1 is not JSON"),
        ("deep.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("huge.jsonl", b'{"question": "' + b"x" * (64 << 20), "line 1 is longer than 64 MiB"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(name) + "[, ].*" + said) as caught:
        parse_task(f"qa:{path}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(own_row()).encode() + b"\r\n" + json.dumps(own_row()).encode())
    assert OwnData(str(path)).describe()["questions"] == 2


# The registry


def test_a_text_names_a_task_with_its_settings(tmp_path: Path) -> None:
    assert parse_task("kv") == KVRetrieval()
    assert parse_task("kv,pairs=75,key_width=uuid,positions=0/37/74") == KVRetrieval(75, "uuid", (0, 37, 74))
    assert parse_task("kv,key_width=6,positions=3") == KVRetrieval(key_width=6, positions=(3,))
    kv = write(tmp_path / "kv,a.jsonl.gz", kv_rows())
    assert parse_task(f"kv:{kv},positions=1/2") == KVRetrievalFile(kv, (1, 2))
    nq = write(tmp_path / "nq.jsonl", retrieved_rows())
    assert parse_task(f"mdqa:{nq},documents=3") == MultiDocumentQA(nq, 3)
    mine = write(tmp_path / "mine.jsonl", [own_row()])
    assert parse_task(f"qa:{mine}") == OwnData(mine)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "there is no task ''; there are: kv, kv:FILE, mdqa:FILE, qa:FILE, FILE.py:CLASS"),
        ("mmlu", "there is no task 'mmlu'"),
        ("mmlu:file.jsonl", "there is no task 'mmlu:file.jsonl'"),
        ("kv,pairs", "there is no task 'kv,pairs'"),
        ("mdqa", "this task reads a file; give it as mdqa:FILE"),
        ("kv,size=3", "no setting 'size'; there are: pairs=16, key_width=8, positions=…"),
        ("kv,pairs=many", "pairs is 'many'; it must be a whole number"),
        ("kv,pairs=", "pairs is ''"),
        ("kv,positions=0/x", "positions is '0/x'; it must be a whole number, or several with slashes"),
        ("kv,pairs=3,pairs=4", "pairs is given twice"),
        ("kv,pairs=0", "pairs must be at least 1; got 0"),
        ("qa:missing.jsonl,file=x", "file is given twice"),
        ("missing.py:Mine", "missing.py does not exist"),
    ],
)
def test_texts_that_name_no_task_are_refused(spec: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        parse_task(spec)
    assert "\n" not in str(caught.value)


def test_help_names_every_task_and_setting_with_its_default() -> None:
    text = task_help()
    for name in BUILT_IN:
        assert f"\n{name}  " in f"\n{text}"
    for setting in ("pairs=16", "key_width=8", "documents=10", "positions=0/50/100", "FILE.py:CLASS"):
        assert setting in text


def test_a_description_tells_questions_apart(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    name = write(path, kv_rows())
    before = KVRetrievalFile(name).describe()
    assert before == {
        "task": "kv",
        "file": "kv.jsonl",
        "positions": [0, 1, 3],
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
    }
    write(path, kv_rows(41))
    assert KVRetrievalFile(name).describe() != before
    assert KVRetrieval().describe() == {"task": "kv", "pairs": 16, "key_width": 8, "positions": [0, 8, 15]}
    nq = MultiDocumentQA(write(tmp_path / "nq.jsonl", retrieved_rows()), 3).describe()
    assert json.loads(json.dumps(nq)) == nq


# A task from outside

OWN = """
from dataclasses import dataclass
from lpes_bake.search.errors import InputError
from lpes_bake.search.tasks import Example, Task

@dataclass(frozen=True)
class Mine(Task):
    name = "mine"
    size: int
    rate: float = 0.5
    loud: bool = False
    words: tuple[str, ...] = ("a", "b")
    limit: int | None = None
    inner: dict[str, int] | None = None
    def __post_init__(self):
        if self.size < 1:
            raise InputError("size must be at least 1")
    @property
    def positions(self):
        return (0,)
    def contexts(self, part, seed):
        yield [Example(0, 0, part, " x")]

class Plain(Mine):
    name = "plain"

class Unfinished(Task):
    pass

class Judge(Mine):
    generates = True

class Broken(Mine):
    def __post_init__(self):
        return {}["size"]

class Endless(Mine):
    max_new_tokens = 0

class Nowhere(Mine):
    positions = ()

class Halfway(Mine):
    positions = (0, 0.5)

class Twice(Mine):
    positions = (1, 1)

class Nameless(Mine):
    title = None

class Odd(Mine):
    def describe(self):
        return {"set": {1}}
"""


def test_a_class_from_a_file_becomes_a_task(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    task: Any = parse_task(f"{path}:Mine,size=3,rate=1e-3,loud=true,words=x/y z,limit=7")
    assert (task.size, task.rate, task.loud, task.words, task.limit) == (3, 1e-3, True, ("x", "y z"), 7)
    assert task.title == "mine"
    assert some(task, "report") == [[Example(0, 0, "report", " x")]]
    described = task.describe()
    assert described["size"] == 3
    assert described["code_sha256"] == hashlib.sha256(OWN.encode()).hexdigest()[:16]
    path.write_text(OWN + "# changed\n")
    assert parse_task(f"{path}:Plain,size=3").describe()["code_sha256"] != described["code_sha256"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("Nobody", r"has no subclass Nobody of .*Task; there are: Mine, Plain, Unfinished, Judge, Broken, "),
        ("InputError", "has no subclass InputError"),
        ("Unfinished", "Unfinished in .* lacks contexts, positions, name"),
        ("Judge,size=3", "lacks correct"),
        ("Mine", "size is missing; add ,size=…"),
        ("Mine,size=0", "size must be at least 1"),
        ("Mine,size=3,colour=red", "no setting 'colour'; there are: size=…, rate=0.5, loud=False, words=a/b, limit=…"),
        ("Mine,size=3,rate=fast", "rate is 'fast'; it must be a number"),
        ("Mine,size=3,loud=yes", "loud is 'yes'; it must be true or false"),
        ("Mine,size=3,inner=1", "inner is '1'; it must be set in the code"),
        ("Broken,size=3", r"Broken in .*own\.py fails with KeyError: 'size' \(line 35\); mend the file"),
        ("Endless,size=3", "max_new_tokens is 0; it must be at least 1"),
        ("Nowhere,size=3", r"positions are \(\); they must be different whole numbers, at least one"),
        ("Halfway,size=3", r"positions are \(0, 0\.5\)"),
        ("Twice,size=3", r"positions are \(1, 1\)"),
        ("Nameless,size=3", "title is None; it must be a text"),
        ("Odd,size=3", "what describe gives is no JSON: Object of type set"),
    ],
)
def test_classes_that_are_no_task_are_refused(tmp_path: Path, spec: str, said: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    with pytest.raises(InputError, match=said):
        parse_task(f"{path}:{spec}")


def test_a_file_that_does_not_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("import nothing_of_that_name\n")
    with pytest.raises(InputError, match=r"own\.py cannot be run: ModuleNotFoundError: .*; mend the file"):
        parse_task(f"{path}:Mine")
    path.write_text("import sys\n\nsys.exit(0)\n")
    with pytest.raises(InputError, match=r"own\.py cannot be run: SystemExit: 0 \(line 3\); mend the file"):
        parse_task(f"{path}:Mine")
    path.write_text("x = 1\n")
    with pytest.raises(InputError, match=r"there is none; docs/tasks\.md shows"):
        parse_task(f"{path}:Mine")


def test_the_documented_example_works(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "needle.py"
    path.write_text(code)
    task = parse_task(f"{path}:Needle,sentences=10")
    first, second = some(task, count=2)
    assert [one.prompt.split(". ").index(f"The code is{one.answer}") for one in first[:2]] == [0, 5]
    assert first[2].prompt.startswith("Street") and f"The code is{first[2].answer}.\n" in first[2].prompt
    assert first[0].answer != second[0].answer
    assert some(task, count=2) == [first, second]
    assert some(task, "report", count=2) != [first, second]


def test_the_documented_line_of_own_data_is_read_and_every_task_is_documented(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "mine.jsonl"
    path.write_text(line)
    (context,) = [one for part in PARTS for one in some(OwnData(str(path)), part)]
    assert context[0].answer == " Tom"
    for name in BUILT_IN:
        assert f"\n| `{name}` |" in text
