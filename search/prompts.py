"""From examples to tokens: prompt formats, and the contexts of a part that fit the model."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import Any

from lpes_bake.search.errors import InputError
from lpes_bake.search.tasks import PARTS, Example, Task, own_code

# For models that carry no chat template. Vicuna v1.1 (also 1.3 and 1.5) as in FastChat's conversation.py; Stable
# Beluga as its model card has it.
NAMED_FORMATS = {
    "vicuna": (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: {prompt} ASSISTANT:"
    ),
    "stable-beluga": (
        "### System:\nThis is a system prompt, please behave and help the user.\n\n"
        "### User:\n{prompt}\n\n### Assistant:\n"
    ),
}
PROMPT_FORMATS = ("auto", "chat", "plain", *NAMED_FORMATS)

# What chat templates take for today.
DATE = datetime.date(2025, 1, 1)

# Contexts that do not fit before giving up: generated ones never end. Fewer where each is many times too long, and
# takes as much longer to read.
PATIENCE = 100


@dataclass(frozen=True)
class Encoded:
    """An example as token ids: the prompt (with what opens the answer), and the answer as it continues it."""

    example: Example
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Taken:
    """The contexts of a part that are used, each a list of one example a position."""

    contexts: list[list[Encoded]]
    too_long: int
    """Contexts that were left out, because one of their examples does not fit the model."""

    @property
    def examples(self) -> list[list[Example]]:
        """The same as text."""
        return [[one.example for one in context] for context in self.contexts]


def encode(example: Example, tokenizer: Any, prompt_format: str = "auto") -> tuple[list[int], list[int]]:
    """The token ids of prompt and lead, and of the answer as it continues them.

    prompt_format: "chat" is the tokenizer's chat template, "plain" the prompt alone, "auto" chat when there is a
    template, the others are formats of models that have none. Where the prompt is a user's turn, the
    assistant's begins with the prompt's last line when that asks for something with a colon ("Answer:"), and the lead.

    The prompt's ids are fixed first, as for generation. The answer's are what the tokenizer adds when
    it reads both in one go; where that would merge across the border, and so change the prompt, the
    answer is tokenised alone.
    """
    text, special = _written(example.prompt, example.lead, tokenizer, prompt_format)
    prompt = _ids(text, tokenizer, special)
    both = _ids(text + example.answer, tokenizer, special)
    if both[: len(prompt)] == prompt:
        answer = both[len(prompt) :]
    else:
        answer = tokenizer(example.answer, add_special_tokens=False)["input_ids"]
    if not prompt or not answer:
        raise InputError(f"context {example.context} has no tokens in its {'answer' if prompt else 'prompt'}")
    return prompt, answer


def encode_prompt(prompt: str, tokenizer: Any, prompt_format: str = "auto") -> list[int]:
    """The token ids of a prompt alone, written as `encode` does."""
    text, special = _written(prompt, "", tokenizer, prompt_format)
    return _ids(text, tokenizer, special)


def _ids(text: str, tokenizer: Any, special: bool) -> list[int]:
    """The token ids of a text that goes on: special, those that the tokenizer begins it with, but none that end it.

    Tokenizers that were saved after training often end each text (add_eos_token); what a model says behind that is
    no answer.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    if not special:
        return ids
    whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    behind = (len(whole) - i - len(bare) for i in range(len(whole)) if bare and whole[i : i + len(bare)] == bare)
    return ids[: len(ids) - next(behind, 0)]


def _written(prompt: str, lead: str, tokenizer: Any, prompt_format: str) -> tuple[str, bool]:
    """Prompt and lead in a format, and whether the tokenizer has to add its special tokens."""
    if prompt_format not in PROMPT_FORMATS:
        raise InputError(f"prompt format must be one of {', '.join(PROMPT_FORMATS)}; got {prompt_format!r}")
    template = getattr(tokenizer, "chat_template", None)
    if prompt_format == "auto":
        prompt_format = "chat" if template else "plain"
    if prompt_format == "chat" and not template:
        raise InputError(
            f"the tokenizer has no chat template; use another prompt format: {', '.join(('plain', *NAMED_FORMATS))}"
        )
    text = prompt + lead if prompt_format == "plain" else _turns(prompt, lead, tokenizer, prompt_format)
    # A chat template writes the special tokens itself.
    return text, prompt_format != "chat"


def _turns(prompt: str, lead: str, tokenizer: Any, prompt_format: str) -> str:
    """The prompt as the user's turn, and the beginning of the assistant's."""
    last = prompt.rpartition("\n")[2]
    opening = (last if last.endswith(":") else "") + lead
    if prompt_format == "chat":
        # Templates that print today's date would make a search irreproducible. Those of Llama 3 take another from here.
        try:
            turns: str = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                tokenize=False,
                add_generation_prompt=True,
                chat_template=_dated(tokenizer.get_chat_template()),
                date_string=DATE.strftime("%d %b %Y"),
            )
        except Exception as error:  # whatever a template raises, or jinja of it, or a tokenizer that has several
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            others = ", ".join(("plain", *NAMED_FORMATS))
            raise InputError(
                f"the tokenizer's chat template cannot be used: {first_line}; mend it, or use another prompt format: "
                f"{others}"
            ) from error
        return turns + opening
    turns = NAMED_FORMATS[prompt_format].format(prompt=prompt)
    # Vicuna's turns stand on one line, with a space behind the colon.
    return f"{turns} {opening.lstrip()}" if opening and not turns.endswith("\n") else turns + opening


def _dated(template: str) -> str:
    """A chat template with DATE for today: those of Granite and SmolLM3 ask a function for it, in a format."""
    calls = r"""strftime_now\(\s*(['"])(.*?)\1\s*\)"""
    return re.sub(calls, lambda call: repr(DATE.strftime(call[2])), template)


def take(
    task: Task,
    part: str,
    seed: int,
    count: int,
    tokenizer: Any,
    prompt_format: str,
    limit: int,
    options: str = "--contexts",
) -> Taken:
    """The first `count` contexts of a part whose every example fits into `limit` tokens: prompt and answer, or, for a
    task that generates, prompt and the longer of answer and `max_new_tokens`.

    A context that does not fit is left out whole and counted: nothing is cut. Raises InputError when there
    are too few, or hardly any fits. options: what `count` was given by, for its message.
    """
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}; got {part!r}")
    if count < 1:
        raise InputError(f"at least 1 context is needed in the {part} part; got {count}")
    contexts: list[list[Encoded]] = []
    too_long: list[int] = []
    with own_code(type(task)):
        for examples in task.contexts(part, seed):
            if [example.position for example in examples] != list(task.positions):
                raise InputError(
                    f"the {task.name} task gave a context with positions {[example.position for example in examples]}; "
                    f"each must have one example for each of {list(task.positions)}, in this order"
                )
            encoded = [Encoded(example, *encode(example, tokenizer, prompt_format)) for example in examples]
            length = max(_length(task, one) for one in encoded)
            if length > limit:
                too_long.append(length)
            else:
                contexts.append(encoded)
            if len(contexts) == count:
                return Taken(contexts, len(too_long))
            if too_long and len(too_long) * min(too_long) > limit * (PATIENCE + 10 * len(contexts)):
                break
    gave = f"the {task.name} task gave {len(contexts) + len(too_long)} contexts for its {part} part"
    if too_long:
        raise InputError(
            f"{gave}, {len(too_long)} of them too long for the model's {limit} positions (the shortest of these needs "
            f"{min(too_long)}); asked for {count} ({options}): use shorter contexts, or ask for fewer"
        )
    raise InputError(f"{gave}; asked for {count} ({options}): ask for fewer, or bring more data")


def _length(task: Task, one: Encoded) -> int:
    answer = len(one.answer)
    return len(one.prompt) + (max(answer, task.max_new_tokens) if task.generates else answer)
