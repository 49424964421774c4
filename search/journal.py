"""The journal of a study: an append-only file of JSON lines that survives a kill at any moment.

Each line is one record with a checksum, written in one go, flushed and synced before the study goes
on. A last line that was torn by a kill is dropped; damage anywhere else is an error. The first record
is the header: the settings of the run that owns the journal.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from lpes_bake.search.errors import InputError

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing guards against two runs at once there
    fcntl = None  # type: ignore[assignment]

Record = dict[str, Any]


def encode(record: Record) -> bytes:
    """One line: the record with the CRC-32 of its JSON text."""
    text = json.dumps(record, ensure_ascii=True, allow_nan=False)
    return f'{{"crc32": "{zlib.crc32(text.encode()):08x}", "record": {text}}}\n'.encode()


def decode_line(line: bytes) -> Record | None:
    """The record of a line, or None when the line is not exactly what `encode` wrote."""
    try:
        record = json.loads(line)["record"]
        return record if isinstance(record, dict) and encode(record) == line else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class Journal:
    """Opens the journal at `path`, makes it when it is missing, and holds it until closed.

    `records` are those that were there. Raises InputError when a line other than the last is damaged,
    or another process has the journal open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        new = not path.exists()
        self._file: BinaryIO = path.open("ab+")
        try:
            self._lock()
            self._file.seek(0)
            self.records, whole = self._parse(self._file.read())
            # The torn end of a killed run: what is appended next must start on a line of its own.
            self._file.truncate(whole)
            if new:
                self._sync_folder()
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Record) -> None:
        """Write a record. When this returns, it is on the disk."""
        self._file.write(encode(record))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records.append(record)

    def close(self) -> None:
        """Close the file and let others open it."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _parse(self, content: bytes) -> tuple[list[Record], int]:
        """The records and the number of bytes that they take."""
        lines = content.splitlines(keepends=True)
        records: list[Record] = []
        for number, line in enumerate(lines, start=1):
            record = decode_line(line)
            if record is None:
                if number < len(lines):
                    raise InputError(
                        f"line {number} of {self.path} is damaged; "
                        "to go on from before it, remove that line and all that follow"
                    )
                return records, len(content) - len(line)
            records.append(record)
        return records, len(content)

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{self.path} is in use by a run that is still going; wait for it or stop it") from None
        except OSError:
            return  # a file system without locks: better unguarded than unusable

    def _sync_folder(self) -> None:
        """Make the new file's name durable too, where folders can be synced."""
        try:
            folder = os.open(self.path.parent, os.O_RDONLY)
        except OSError:
            return
        try:
            os.fsync(folder)
        except OSError:
            pass
        finally:
            os.close(folder)
