"""The journal of a run: an append-only file of JSON lines that survives a kill at any moment.

Each line is one record with a checksum, written in one go, flushed and synced before the run goes
on. A last line that was torn by a kill is dropped; damage anywhere else is an error. The first record
is the header: the settings of the run that owns the journal. What the other records are, `ledger` says.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from lpes_bake.search.errors import InputError

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing guards against two runs at once there
    fcntl = None  # type: ignore[assignment]

JOURNAL_FORMAT = 2

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
        """Write a record. When this returns, it is on the disk. OSError with the file's name where the disk is full."""
        try:
            self._file.write(encode(record))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.records.append(record)

    def close(self) -> None:
        """Close the file and let others open it."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except OSError:
            # Closing tries once more to write what a full disk did not take.
            if error is None:
                raise

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


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Each setting that differs as "name: old → new", nested ones with dots."""
    found: list[str] = []
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name}: {before!r} → {after!r}")
    return found


def check_header(journal: Journal, settings: Mapping[str, Any]) -> None:
    """Write the header of a new journal, or compare an old one's.

    settings: JSON values that identify the run. Raises InputError when they differ, or the journal is of
    another format.
    """
    header = {"journal": JOURNAL_FORMAT, "settings": dict(settings)}
    if not journal.records:
        journal.append(header)
        return
    first = journal.records[0]
    if first.get("journal") != JOURNAL_FORMAT:
        raise InputError(
            f"{journal.path} has journal format {first.get('journal')!r}, this version of lpes-bake reads "
            f"{JOURNAL_FORMAT}; go on with the version that wrote it, or start a new run"
        )
    if different := differences(first["settings"], settings):
        raise InputError(
            f"{journal.path} belongs to a run with other settings ({'; '.join(different)}); "
            "give the same ones, or a new output directory"
        )
