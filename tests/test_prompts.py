"""What must hold from examples to tokens: formats letter for letter, borders, nothing cut and nothing unsaid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lpes_bake.search.errors import InputError
from lpes_bake.search.kv_retrieval import KVRetrieval
from lpes_bake.search.prompts import Encoded, encode, encode_prompt, take
from lpes_bake.search.tasks import Example, Task, parse_task

EXAMPLE = Example(0, 0, "Find {it}.\n\nKey: k\nValue:", "v1", ' "')
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ date_string }}"
)


def tokenizer_of(path: Path, template: Any = None) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("prompt_format", "template", "text"),
    [
        ("plain", TEMPLATE, 'Find {it}.\n\nKey: k\nValue: "'),
        ("auto", None, 'Find {it}.\n\nKey: k\nValue: "'),
        # The date is fixed: prompts must not change overnight.
        ("auto", TEMPLATE, '<user>Find {it}.\n\nKey: k\nValue:</><assistant>01 Jan 2025Value: "'),
        ("chat", TEMPLATE, '<user>Find {it}.\n\nKey: k\nValue:</><assistant>01 Jan 2025Value: "'),
        (
            "chat",
            "{% set day = strftime_now('%B %d, %Y') %}{{ day }} {{ strftime_now( \"%H:%M\" ) }} "
            "{{ messages[0].content }}",
            'January 01, 2025 00:00 Find {it}.\n\nKey: k\nValue:Value: "',
        ),
        (
            "vicuna",
            None,
            "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
            "detailed, and polite answers to the user's questions. USER: Find {it}.\n\nKey: k\nValue: ASSISTANT: "
            'Value: "',
        ),
        (
            "stable-beluga",
            TEMPLATE,
            "### System:\nThis is a system prompt, please behave and help the user.\n\n### User:\n"
            'Find {it}.\n\nKey: k\nValue:\n\n### Assistant:\nValue: "',
        ),
    ],
)
def test_formats_are_the_models_own_letter_for_letter(
    tiny_llama: Path, prompt_format: str, template: str | None, text: str
) -> None:
    tokenizer = tokenizer_of(tiny_llama, template)
    prompt, answer = encode(EXAMPLE, tokenizer, prompt_format)
    assert tokenizer.decode(prompt) == text
    assert tokenizer.decode(answer) == "v1"


def test_a_prompt_that_asks_for_nothing_with_a_colon_is_not_said_again(tiny_llama: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama, TEMPLATE)
    example = Example(0, 0, "Tom repaired the lamp. Who did it?", " Tom")
    assert tokenizer.decode(encode(example, tokenizer, "chat")[0]).endswith("it?</><assistant>01 Jan 2025")
    for lead, end in (("", "it? ASSISTANT:"), (" It was", "it? ASSISTANT: It was")):
        example = Example(0, 0, "Tom repaired the lamp. Who did it?", " Tom", lead)
        text: str = tokenizer.decode(encode(example, tokenizer, "vicuna")[0])
        assert text.endswith(end)


def test_formats_that_cannot_be_had_are_refused(tiny_llama: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama)
    with pytest.raises(InputError, match="no chat template; use another prompt format: plain, vicuna, stable-beluga"):
        encode(EXAMPLE, tokenizer, "chat")
    with pytest.raises(InputError, match="auto, chat, plain, vicuna, stable-beluga; got 'alpaca'"):
        encode(EXAMPLE, tokenizer, "alpaca")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for x in %}", "Expected an expression"),
        ("{{ raise_exception('Tools only') }}", "Tools only"),
        ({"rag": "a", "tool_use": "b"}, "multiple chat templates with no default"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused_in_one_line(tiny_llama: Path, template: Any, said: str) -> None:
    tokenizer = tokenizer_of(tiny_llama, template)
    with pytest.raises(
        InputError, match=f"chat template cannot be used: .*{said}.* prompt format: plain, vic"
    ) as caught:
        encode(EXAMPLE, tokenizer)
    assert "\n" not in str(caught.value)


def test_answer_that_would_merge_into_the_prompt_leaves_the_prompt_as_it_is() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["a", "b", "c", "ab"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")])))
    assert tokenizer("cabc")["input_ids"] == [2, 3, 2]
    prompt, answer = encode(Example(0, 0, prompt="c", lead="a", answer="bc"), tokenizer)
    assert (prompt, answer) == ([2, 0], [1, 2])


def test_a_prompt_is_not_ended_by_a_tokenizer_that_ends_each_text() -> None:
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(["a", "b", "c", "<s>", "</s>"])}, merges=[])
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 4)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer("cab")["input_ids"] == [3, 2, 0, 1, 4]
    assert encode(Example(0, 0, "ca", "b"), tokenizer, "plain") == ([3, 2, 0], [1])
    assert encode_prompt("ca", tokenizer, "plain") == [3, 2, 0]


def test_an_example_without_tokens_is_refused(tiny_llama: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama)
    with pytest.raises(InputError, match="no tokens in its answer"):
        encode(Example(3, 0, "Question:", ""), tokenizer)
    with pytest.raises(InputError, match="no tokens in its prompt"):
        encode(Example(3, 0, "", " yes"), tokenizer)


@dataclass(frozen=True)
class Lengths(Task):
    """Contexts whose second prompt has the lengths given, in tokens of one byte."""

    name: ClassVar[str] = "lengths"
    max_new_tokens: ClassVar[int] = 7

    lengths: tuple[int, ...]
    asked: tuple[int, ...] = (0, 1)
    answer: str = "abc"

    @property
    def positions(self) -> tuple[int, ...]:
        return (0, 1)

    def contexts(self, part: str, seed: int) -> Iterator[list[Example]]:
        for context, length in enumerate(self.lengths):
            yield [Example(context, one, "x" * (length if one else 1), self.answer) for one in self.asked]


class Generating(Lengths):
    generates: ClassVar[bool] = True


def test_the_first_contexts_that_fit_are_taken_and_the_others_counted(tiny_llama: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama)
    # Prompt and answer: 7 + 3 tokens just fit, 8 + 3 do not.
    taken = take(Lengths((7, 8, 5, 9, 6, 8)), "search", 0, 3, tokenizer, "auto", 10)
    assert [[one.example.context for one in context] for context in taken.contexts] == [[0, 0], [2, 2], [4, 4]]
    assert taken.too_long == 2
    first = taken.contexts[0][1]
    assert first == Encoded(first.example, *encode(first.example, tokenizer))
    assert (len(first.prompt), len(first.answer)) == (7, 3)


def test_generated_text_must_fit_too(tiny_llama: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama)
    taken = take(Generating((3, 4)), "report", 0, 1, tokenizer, "auto", 10)
    assert taken.too_long == 0
    with pytest.raises(InputError, match=r"1 of them too long.*\(the shortest of these needs 11\)"):
        take(Generating((3, 4)), "report", 0, 2, tokenizer, "auto", 10)
    # An answer of 9 tokens is longer than what may be generated.
    with pytest.raises(InputError, match=r"needs 12\)"):
        take(Generating((3,), answer="123456789"), "report", 0, 1, tokenizer, "auto", 10)


def test_too_few_contexts_are_said_with_numbers(tiny_llama: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama)
    with pytest.raises(InputError) as caught:
        take(Lengths((7, 30, 20, 6)), "report", 0, 3, tokenizer, "auto", 10)
    assert str(caught.value) == (
        "the lengths task gave 4 contexts for its report part, 2 of them too long for the model's 10 positions (the "
        "shortest of these needs 23); asked for 3 (--contexts): use shorter contexts, or ask for fewer"
    )
    with pytest.raises(InputError, match=r"its search part; asked for 3 \(--contexts\): ask for fewer, or bring"):
        take(Lengths((7, 6)), "search", 0, 3, tokenizer, "auto", 10)
    with pytest.raises(InputError, match="at least 1 context"):
        take(Lengths((7, 6)), "search", 0, 0, tokenizer, "auto", 10)


def test_contexts_without_end_of_which_none_fits_come_to_an_end(tiny_llama: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama)
    (found,) = take(KVRetrieval(), "search", 0, 1, tokenizer, "auto", 8192).contexts
    length = max(len(one.prompt) + len(one.answer) for one in found)
    with pytest.raises(InputError, match=f"100 of them too long for the model's {length - 1} positions"):
        take(KVRetrieval(), "search", 0, 5, tokenizer, "auto", length - 1)
    # The longer they are, the sooner.
    with pytest.raises(InputError, match="10 of them too long"):
        take(KVRetrieval(), "search", 0, 5, tokenizer, "auto", length // 10)


OWN = """
from lpes_bake.search.tasks import Example, Task

class Mine(Task):
    name, positions = "mine", (0,)
    def contexts(self, part, seed):
        yield [Example(0, 0, "q", " a")]
        BAD

class Text(Mine):
    def contexts(self, part, seed):
        yield [Example(0, 0, 5, " a")]

class Record(Mine):
    def contexts(self, part, seed):
        yield [{"position": 0}]

class Nothing(Mine):
    def contexts(self, part, seed):
        return None

class Half(Mine):
    def contexts(self, part, seed):
        yield [Example(0, 0, "\\ud800", " a")]
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Mine", r"Mine in .*own\.py fails with NameError: name 'BAD' is not defined \(line 8\); mend the file"),
        ("Text", r"Text in .* fails with TypeError"),
        ("Record", r"Record in .* fails with AttributeError"),
        ("Nothing", r"Nothing in .* fails with TypeError"),
        ("Half", r"Half in .* fails with TypeError"),
    ],
)
def test_a_users_task_that_fails_is_named_with_its_line(tmp_path: Path, tiny_llama: Path, name: str, said: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    with pytest.raises(InputError, match=said) as caught:
        take(parse_task(f"{path}:{name}"), "search", 0, 2, tokenizer_of(tiny_llama), "plain", 64)
    assert "\n" not in str(caught.value)


def test_a_context_that_lacks_a_position_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(InputError, match=r"gave a context with positions \[1, 0\].* each of \[0, 1\], in this order"):
        take(Lengths((7, 6), asked=(1, 0)), "search", 0, 1, tokenizer_of(tiny_llama), "auto", 64)


@pytest.mark.smollm2
def test_real_chat_prompt_ends_where_the_value_begins(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    example = next(KVRetrieval().contexts("search", 0))[0]
    prompt, answer = encode(example, tokenizer)
    text = tokenizer.decode(prompt)
    assert text.endswith('Corresponding value:<|im_end|>\n<|im_start|>assistant\nCorresponding value: "')
    assert text.count("<|im_start|>system") == 1
    assert tokenizer.decode(answer) == example.answer
