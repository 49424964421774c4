"""Key-value retrieval (Liu et al., "Lost in the Middle", arXiv 2307.03172): generated, or from the authors' files."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from lpes_bake.search.errors import InputError
from lpes_bake.search.jsonl import Row, read_rows, shown
from lpes_bake.search.tasks import Example, Task, check_positions, draw, even_positions, part_of

UUID = "uuid"
MAX_KEY_WIDTH = 64
LEAD = ' "'


def kv_prompt(records: Sequence[tuple[str, str]], key: str) -> str:
    """The prompt of key-value retrieval, letter for letter as in the authors' code."""
    lines = ",\n ".join(f'"{name}": "{value}"' for name, value in records)
    return (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        f'JSON data:\n{{{lines}}}\n\nKey: "{key}"\nCorresponding value:'
    )


@dataclass(frozen=True)
class KVRetrieval(Task):
    """Key-value retrieval: find the value of a key among random pairs, generated without end.

    The prompt is the authors'. They move one pair to each gold place; here the question asks for the
    pair that already stands there. With random pairs the prompts of a place are distributed alike, and
    all questions of a context share the records, which are then computed once.
    """

    name: ClassVar[str] = "kv"

    pairs: int = field(default=16, metadata={"help": "Key-value pairs in a context."})
    key_width: int | str = field(
        default=8, metadata={"help": 'Hex digits of a key and of a value, or "uuid" for UUID4 as in the paper.'}
    )
    positions: tuple[int, ...] = field(
        default=(), metadata={"help": "Places of the pair asked for, from 0: beginning, middle and end if left out."}
    )

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise InputError(f"pairs must be at least 1; got {self.pairs}")
        if self.key_width != UUID:
            if not isinstance(self.key_width, int):
                raise InputError(f'key_width must be a number of hex digits or "uuid"; got {self.key_width!r}')
            if not 1 <= self.key_width <= MAX_KEY_WIDTH:
                raise InputError(f"key_width must be from 1 to {MAX_KEY_WIDTH} hex digits; got {self.key_width}")
            if 16**self.key_width < 2 * self.pairs:
                raise InputError(
                    f"key_width {self.key_width} is too small for {self.pairs} different keys; use more hex digits"
                )
        if not self.positions:
            object.__setattr__(self, "positions", tuple(sorted({0, self.pairs // 2, self.pairs - 1})))
        check_positions(self.positions, self.pairs, "pairs")

    @property
    def title(self) -> str:
        """For headings."""
        return f"Key-value retrieval, {self.pairs} pairs"

    def contexts(self, part: str, seed: int) -> Iterator[list[Example]]:
        """Contexts without end. The records themselves say which part they belong to, so that none is in two."""
        rng = random.Random(f"lpes-bake kv-retrieval {part} {seed}")
        context = 0
        while True:
            keys: dict[str, str] = {}
            while len(keys) < self.pairs:
                keys[self._token(rng)] = self._token(rng)
            records = list(keys.items())
            if part_of(str(records)) != part:
                continue
            yield [
                Example(context, position, kv_prompt(records, key), value, LEAD)
                for position in self.positions
                for key, value in [records[position]]
            ]
            context += 1

    def _token(self, rng: random.Random) -> str:
        if self.key_width == UUID:
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        width = int(self.key_width)
        return f"{rng.getrandbits(4 * width):0{width}x}"


@dataclass(frozen=True)
class _Records:
    pairs: tuple[tuple[str, str], ...]
    gold: int

    @property
    def key(self) -> str:
        return self.pairs[self.gold][0]


@dataclass(frozen=True)
class KVRetrievalFile(Task):
    """Key-value retrieval from a file of the lost-in-the-middle authors (ordered_kv_records, key, value).

    The questions are the authors': the pair asked for is moved to each gold place, and the others keep their order.
    """

    name: ClassVar[str] = "kv"

    file: str
    positions: tuple[int, ...] = field(
        default=(), metadata={"help": "Places of the pair asked for, from 0: beginning, middle and end if left out."}
    )
    _rows: list[_Records] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows: list[_Records] = []
        for row in read_rows(Path(self.file)):
            rows.append(_records(row))
            if len(rows[-1].pairs) != len(rows[0].pairs):
                raise row.error(
                    f"{len(rows[-1].pairs)} records, but the first line has {len(rows[0].pairs)}, and places would "
                    "not mean the same; put them into two files"
                )
        object.__setattr__(self, "_rows", rows)
        if not self.positions:
            object.__setattr__(self, "positions", even_positions(self.pairs, 3))
        check_positions(self.positions, self.pairs, "pairs")

    @property
    def pairs(self) -> int:
        """Key-value pairs in each row."""
        return len(self._rows[0].pairs)

    @property
    def title(self) -> str:
        """For headings."""
        return f"Key-value retrieval, {self.pairs} pairs"

    def contexts(self, part: str, seed: int) -> Iterator[list[Example]]:
        """A context a row of the file."""
        for context, row in enumerate(draw(self._rows, lambda row: row.key, part, seed)):
            key, value = row.pairs[row.gold]
            others = row.pairs[: row.gold] + row.pairs[row.gold + 1 :]
            yield [
                Example(context, place, kv_prompt([*others[:place], (key, value), *others[place:]], key), value, LEAD)
                for place in self.positions
            ]


def _records(row: Row) -> _Records:
    """Check a row of the file."""
    pairs = []
    for index, one in enumerate(row.items("ordered_kv_records")):
        if not (isinstance(one, list) and len(one) == 2):
            raise row.error(f'"ordered_kv_records" holds {shown(one)}; each record must be [key, value]')
        key, value = (row.checked_text(text, f'record {index} of "ordered_kv_records"') for text in one)
        pairs.append((key, value))
    if len(dict(pairs)) != len(pairs):
        raise row.error('"ordered_kv_records" has a key twice; keys must differ')
    asked = (row.text("key"), row.text("value"))
    if asked not in pairs:
        raise row.error('"key" with "value" is not among "ordered_kv_records"; add the pair')
    return _Records(tuple(pairs), pairs.index(asked))
