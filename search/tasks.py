"""The tasks that factors are judged by: questions whose evidence stands at known places of the prompt."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lpes_bake.search.errors import InputError

CHAT_TEMPLATES = ("auto", "on", "off")
UUID = "uuid"


@dataclass(frozen=True)
class Example:
    """One question. `context` numbers the sampled context, `position` is the gold position (0-based).

    `lead` opens the answer: it is given to the model, so that what is scored is whether the evidence was
    found, and not whether the model would have said "The value is" first.
    """

    context: int
    position: int
    prompt: str
    lead: str
    answer: str
    chat_template: str = "auto"


@dataclass(frozen=True)
class KVRetrieval:
    """Key-value retrieval (Liu et al., "Lost in the Middle", arXiv 2307.03172), generated from a seed.

    The prompt is the authors'. They move one pair to each gold place; here the question asks for the
    pair that already stands there. With random pairs the prompts of a place are distributed alike, and
    all questions of a context share the records, which are then computed once.
    """

    pairs: int = 16
    """Key-value pairs in a context."""
    key_width: int | str = 8
    """Hex digits of a key and of a value, or "uuid" for UUID4 as in the paper."""
    contexts: int = 100
    """Contexts, each asked once for every gold position; the sampling unit of all intervals."""
    positions: tuple[int, ...] | None = None
    """Gold positions, 0-based; None is the beginning, the middle and the end: 0, pairs // 2, pairs - 1."""
    seed: int = 0
    """Seeds keys and values. Two seeds share no context."""
    chat_template: str = "auto"
    """Put the prompt through the tokenizer's chat template: "auto" when it has one, "on", "off"."""

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise InputError(f"pairs must be at least 1; got {self.pairs}")
        if self.contexts < 1:
            raise InputError(f"contexts must be at least 1; got {self.contexts}")
        if self.key_width != UUID:
            if not isinstance(self.key_width, int):
                raise InputError(f'key width must be a number of hex digits or "uuid"; got {self.key_width!r}')
            if self.key_width < 1 or 16**self.key_width < 2 * self.pairs:
                raise InputError(
                    f"key width {self.key_width} is too small for {self.pairs} different keys; use more hex digits"
                )
        if self.chat_template not in CHAT_TEMPLATES:
            raise InputError(f"chat template must be one of {', '.join(CHAT_TEMPLATES)}; got {self.chat_template!r}")
        if self.positions is not None and not self.positions:
            raise InputError("positions must name at least one gold position")
        for position in self.gold_positions:
            if not 0 <= position < self.pairs:
                raise InputError(f"gold position {position} does not exist among {self.pairs} pairs, numbered from 0")
        if len(set(self.gold_positions)) != len(self.gold_positions):
            raise InputError(f"gold positions must differ; got {list(self.gold_positions)}")

    @property
    def gold_positions(self) -> tuple[int, ...]:
        """The positions asked for, with the default filled in."""
        if self.positions is not None:
            return self.positions
        return tuple(sorted({0, self.pairs // 2, self.pairs - 1}))

    def examples(self) -> list[Example]:
        """All questions, context by context, each context in the order of `gold_positions`."""
        rng = random.Random(f"lpes-bake kv-retrieval {self.seed}")
        examples = []
        for context in range(self.contexts):
            keys: dict[str, str] = {}
            while len(keys) < self.pairs:
                keys[self._token(rng)] = self._token(rng)
            records = list(keys.items())
            for position in self.gold_positions:
                key, value = records[position]
                examples.append(Example(context, position, kv_prompt(records, key), ' "', value, self.chat_template))
        return examples

    def _token(self, rng: random.Random) -> str:
        if self.key_width == UUID:
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        width = int(self.key_width)
        return f"{rng.getrandbits(4 * width):0{width}x}"


def even_positions(pairs: int, count: int) -> tuple[int, ...]:
    """`count` gold positions spread evenly over `pairs` places, both ends among them (140, 5: 0 34 69 104 139)."""
    if count < 2:
        return (0,)
    return tuple(sorted({(pairs - 1) * i // (count - 1) for i in range(count)}))


def kv_prompt(records: Sequence[tuple[str, str]], key: str) -> str:
    """The prompt of key-value retrieval, letter for letter as in the authors' code."""
    lines = ",\n ".join(f'"{name}": "{value}"' for name, value in records)
    return (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        f'JSON data:\n{{{lines}}}\n\nKey: "{key}"\nCorresponding value:'
    )


def encode(example: Example, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The token ids of prompt and lead, and of the answer as it continues them.

    In a chat, the prompt is the user's turn, and the assistant's begins with the prompt's last line (for
    key-value retrieval "Corresponding value:") and the lead.

    The prompt's ids are fixed first, as for generation. The answer's are what the tokenizer adds when
    it reads both in one go; where that would merge across the border, and so change the prompt, the
    answer is tokenised alone.
    """
    template = getattr(tokenizer, "chat_template", None)
    chat = example.chat_template == "on" or (example.chat_template == "auto" and bool(template))
    if chat and not template:
        raise InputError("the tokenizer has no chat template; use --chat-template off (or auto)")
    text = example.prompt
    if chat:
        # Templates that print today's date would make a search irreproducible: those of Llama 3 take it from here.
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, date_string="01 Jan 2025"
        )
        text = turn + text.rpartition("\n")[2]
    text += example.lead
    # A chat template writes the special tokens itself.
    prompt: list[int] = tokenizer(text, add_special_tokens=not chat)["input_ids"]
    both: list[int] = tokenizer(text + example.answer, add_special_tokens=not chat)["input_ids"]
    if both[: len(prompt)] == prompt:
        return prompt, both[len(prompt) :]
    alone: list[int] = tokenizer(example.answer, add_special_tokens=False)["input_ids"]
    return prompt, alone
