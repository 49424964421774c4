"""Reading a user's JSONL file, plain or gzipped, with errors that name the line and the mend."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpes_bake.search.errors import InputError

# No prompt is as long as this. A file that is not JSONL at all may be one single line.
MAX_LINE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Row:
    """One line of a file."""

    values: dict[str, Any]
    where: str
    """File and line, for errors."""

    def error(self, what: str) -> InputError:
        """The error that this row has; `what` says what is wrong and how to mend it."""
        return InputError(f"{self.where}: {what}")

    def text(self, name: str) -> str:
        """A field that holds text."""
        if name not in self.values:
            raise self.error(f'"{name}" is missing; add it')
        return self.checked_text(self.values[name], f'"{name}"')

    def checked_text(self, value: Any, what: str, *, may_be_empty: bool = False) -> str:
        """`value` if it is text that a model can read, which half a surrogate pair is not."""
        if not isinstance(value, str):
            raise self.error(f"{what} is {shown(value)}; it must be text in quotes")
        if not value.strip() and not may_be_empty:
            raise self.error(f"{what} is empty; fill it in or take the line out")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.error(f"{what} holds half a character (a lone surrogate such as \\ud800); mend it") from None
        return value

    def items(self, name: str) -> list[Any]:
        """A field that holds a list with something in it."""
        if name not in self.values:
            raise self.error(f'"{name}" is missing; add it')
        value = self.values[name]
        if not isinstance(value, list) or not value:
            raise self.error(f'"{name}" is {shown(value)}; it must be a list in brackets with something in it')
        return value


def shown(value: Any) -> str:
    """A value of a file as JSON, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, empty lines left out. A name that ends in .gz is a gzip file.

    Raises InputError, which names the file and the line: no such file, no rows, not gzip, cut off, not UTF-8, not
    JSON, not an object, or a line of more than 64 MiB.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist or is not a file; give the path of a JSONL file")
    number = 0
    empty = True
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                row = _row(line, f"{path}, line {number}", first=number == 1)
                if row is not None:
                    empty = False
                    yield row
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            f"{path}, behind line {number}: this is no whole gzip file, as its name says it is ({error}); "
            "fetch it again, or take .gz off the name of a plain file"
        ) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}; check the file") from error
    if empty:
        raise InputError(f"{path} is empty; it must hold one JSON object a line")


def _row(line: bytes, where: str, *, first: bool) -> Row | None:
    if len(line) > MAX_LINE_BYTES:
        raise InputError(f"{where} is longer than {MAX_LINE_BYTES >> 20} MiB; a JSONL file has one question a line")
    try:
        # Editors on Windows put a byte order mark first.
        text = line.decode("utf-8-sig" if first else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 at byte {error.start}; save the file as UTF-8") from error
    if not text:
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        # The error's own line number would be that inside this line.
        what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise InputError(f"{where} is not JSON: {what}; write one JSON object a line") from error
    if not isinstance(values, dict):
        raise InputError(f"{where} is {shown(values)}; it must be a JSON object in braces")
    return Row(values, where)
