"""What must hold for the task: prompts letter for letter, determinism, tokens as generation sees them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lpes_bake.search.errors import InputError
from lpes_bake.search.tasks import Example, KVRetrieval, encode, even_positions, kv_prompt


def tokenizer_of(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def test_prompt_is_the_authors_letter_for_letter() -> None:
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
    task = KVRetrieval(pairs=9, key_width=width, contexts=3)
    examples = task.examples()
    assert [(one.context, one.position) for one in examples] == [(c, p) for c in range(3) for p in (0, 4, 8)]
    for one in examples:
        data = one.prompt.split("JSON data:\n")[1].split("\n\nKey")[0]
        records = list(json.loads(data).items())
        key = one.prompt.split('Key: "')[1].split('"')[0]
        assert len(records) == 9
        assert records[one.position] == (key, one.answer)
        assert len(key) == len(one.answer) == (36 if width == "uuid" else width)


def test_uuids_are_version_4() -> None:
    import uuid

    example = KVRetrieval(pairs=2, key_width="uuid", contexts=1).examples()[0]
    assert uuid.UUID(example.answer).version == 4


def test_seed_decides_and_more_contexts_only_add() -> None:
    few = KVRetrieval(contexts=2, seed=5).examples()
    assert few == KVRetrieval(contexts=4, seed=5).examples()[: len(few)]
    assert few != KVRetrieval(contexts=2, seed=6).examples()


def test_questions_of_a_context_differ_only_in_key_and_answer() -> None:
    first, second, third = KVRetrieval(contexts=1).examples()
    heads = {one.prompt.split("Key:")[0] for one in (first, second, third)}
    assert len(heads) == 1


def test_positions_spread_evenly_as_in_the_literature() -> None:
    assert even_positions(140, 5) == (0, 34, 69, 104, 139)
    assert even_positions(10, 3) == (0, 4, 9)
    assert even_positions(3, 5) == (0, 1, 2)
    assert even_positions(1, 5) == (0,)
    assert KVRetrieval(pairs=1).gold_positions == (0,)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pairs": 0}, "pairs must be at least 1"),
        ({"contexts": 0}, "contexts must be at least 1"),
        ({"key_width": 1, "pairs": 16}, "key width 1 is too small for 16"),
        ({"key_width": "guid"}, "'guid'"),
        ({"positions": (16,)}, "gold position 16 does not exist among 16 pairs"),
        ({"positions": (-1,)}, "gold position -1"),
        ({"positions": ()}, "at least one"),
        ({"positions": (1, 1)}, "must differ"),
        ({"chat_template": "yes"}, "auto, on, off"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match="(?s)" + said) as caught:
        KVRetrieval(**settings)
    assert "\n" not in str(caught.value)


def test_without_a_chat_template_the_prompt_stands_alone(tiny_llama: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama)
    example = KVRetrieval(pairs=2, contexts=1).examples()[0]
    prompt, answer = encode(example, tokenizer)
    assert tokenizer.decode(prompt) == example.prompt + ' "'
    assert tokenizer.decode(answer) == example.answer
    with pytest.raises(InputError, match="no chat template"):
        encode(replace(example, chat_template="on"), tokenizer)


def test_chat_template_is_used_when_there_is_one_and_can_be_left_out(tiny_llama: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}{{ date_string }}"
    )
    example = KVRetrieval(pairs=2, contexts=1).examples()[0]
    prompt, answer = encode(example, tokenizer)
    # The date is fixed: prompts must not change overnight.
    assert tokenizer.decode(prompt) == f'<user>{example.prompt}</><assistant>01 Jan 2025Corresponding value: "'
    assert tokenizer.decode(answer) == example.answer
    prompt, _ = encode(replace(example, chat_template="off"), tokenizer)
    assert tokenizer.decode(prompt) == example.prompt + ' "'


def test_answer_that_would_merge_into_the_prompt_leaves_the_prompt_as_it_is() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["a", "b", "c", "ab"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")])))
    assert tokenizer("cabc")["input_ids"] == [2, 3, 2]
    prompt, answer = encode(Example(0, 0, prompt="c", lead="a", answer="bc"), tokenizer)
    assert (prompt, answer) == ([2, 0], [1, 2])


@pytest.mark.smollm2
def test_real_chat_prompt_ends_where_the_value_begins(smollm2: Path) -> None:
    tokenizer = tokenizer_of(smollm2)
    example = KVRetrieval(contexts=1).examples()[0]
    prompt, answer = encode(example, tokenizer)
    text = tokenizer.decode(prompt)
    assert text.endswith('Corresponding value:<|im_end|>\n<|im_start|>assistant\nCorresponding value: "')
    assert text.count("<|im_start|>system") == 1
    assert tokenizer.decode(answer) == example.answer
