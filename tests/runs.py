"""Searches small enough for tests: a random model of two layers, short text, few questions; and the real command
in processes of its own that start in milliseconds."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from lpes_bake.cli import main
from tests.conftest import write_tiny

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
LAYERS = SMALL["num_hidden_layers"]
IDENTITY = (1.0,) * LAYERS

# With answers of one digit, some factors help this model by far more than noise; nothing here depends on its text.
OPTIONS: dict[str, Any] = {
    "task": "kv,pairs=4,key_width=1",
    "optimizer": "genetic",
    "contexts": 8,
    "first-block": 4,
    "gradient-contexts": 4,
    "gradient-batch": 2,
    "selection-contexts": 8,
    "report-contexts": 16,
    "population": 6,
    "generations": 3,
    "uniform": "0.5,0.8",
    "steps": 4,
    "check-every": 2,
    "leash": 0,
    "max-damage": 100,
    "device": "cpu",
}

# Children of a process that has imported all that is slow to import, so that a test can start many.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.runs", "lpes_bake.plots", "lpes_bake.search.evaluator", "torch.distributed"])


@dataclass(frozen=True)
class Small:
    """A model and a text file with paragraphs, and what to search them with."""

    model: Path
    text: Path

    def options(self, **changes: Any) -> list[str]:
        """Command-line options: those above but for `changes` (_ for -). None leaves one out, a list repeats it."""
        options = {**OPTIONS, "text": self.text, **{name.replace("_", "-"): value for name, value in changes.items()}}
        words = []
        for name, value in options.items():
            for one in value if isinstance(value, list) else [] if value is None else [value]:
                words += [f"--{name}", str(one)]
        return words

    def search(self, out: Path, *flags: str, **changes: Any) -> Result:
        """`lpes-bake search` within this process."""
        return invoke("search", self.model, "--out", out, *self.options(**changes), *flags)

    def run(self, out: Path, *flags: str, **changes: Any) -> dict[str, Any]:
        """A search that ends well: its result.json."""
        done = self.search(out, *flags, **changes)
        assert done.exit_code == 0, done.output
        content: dict[str, Any] = json.loads((out / "result.json").read_text())
        return content


def write_small(folder: Path, **changes: Any) -> Small:
    """Both, in a new folder."""
    model = write_tiny(folder / "small", "llama", **{**SMALL, **changes})
    text = folder / "text.txt"
    text.write_text("\n\n".join(f"Paragraph {number} of 19." for number in range(1, 20)))
    return Small(model, text)


def invoke(*arguments: object) -> Result:
    """A command within this process."""
    return CliRunner().invoke(main, [str(one) for one in arguments])


def one_line(result: Result) -> str:
    """The message of bad input: one line, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and result.stderr.endswith(f"{lines[0]}\n") and "Traceback" not in result.output
    return lines[0]


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def without_date(out: Path) -> dict[str, Any]:
    """factors.json but for its date."""
    content: dict[str, Any] = json.loads((out / "factors.json").read_text())
    del content["date"]
    return content


def content_of(out: Path) -> dict[str, Any]:
    """result.json but for what differs from run to run."""
    content: dict[str, Any] = json.loads((out / "result.json").read_text())
    for name in ("date", "seconds", "command"):
        del content[name]
    return content


def records(out: Path) -> list[dict[str, Any]]:
    """The units of a run's journal with their results."""
    lines = (out / "journal.jsonl").read_text().splitlines()
    return [json.loads(line)["record"] for line in lines[1:]]


def changed(model: Path, **config: object) -> Path:
    """The model with other settings."""
    content = json.loads((model / "config.json").read_text())
    rope = {"rope_parameters": {**content["rope_parameters"], **config}} if "rope_theta" in config else config
    (model / "config.json").write_text(json.dumps({**content, **config, **rope}))
    return model


class Command:
    """A command in a process of its own. environment: variables to set there."""

    def __init__(self, folder: Path, *arguments: object, **environment: str) -> None:
        self.output, self.errors = folder / "stdout", folder / "stderr"
        words = [str(one) for one in arguments]
        self._process = SERVER.Process(
            target=_work, args=(words, str(self.output), str(self.errors), environment), daemon=True
        )
        self._process.start()

    def fill_disk(self, size: int) -> None:
        """From now on, no file of the command grows beyond so many bytes: what it writes fails as on a full disk."""
        assert self._process.pid is not None
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (size, size))

    def stop_once(self, condition: Callable[[], bool], how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, as soon as the condition holds."""
        deadline = time.monotonic() + 60
        while self._process.is_alive() and not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert self._process.pid is not None
        os.kill(self._process.pid, how)

    def finish(self, timeout: float = 120) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, self.errors.read_text()
        return self._process.exitcode, self.output.read_text(), self.errors.read_text()


def _work(arguments: list[str], output: str, errors: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    # A shell that started the tests in the background has told all its children to ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, name in ((1, output), (2, errors)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
    sys.argv = ["lpes-bake", *arguments]
    main(arguments, prog_name="lpes-bake")


def write_mdqa(path: Path, rows: int = 40) -> Path:
    """A file in the format of the lost-in-the-middle authors, with two distractors in each row."""
    lines = []
    for row in range(rows):
        documents = [
            {"title": f"T{row}{place}", "text": f"Number {row} has {row * 7 + place} legs.", "isgold": place == row % 3}
            for place in range(3)
        ]
        answers = [str(row * 7 + row % 3), "e"]
        lines.append({"question": f"legs of {row}?", "answers": answers, "ctxs": documents})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_own(path: Path, rows: int = 40) -> Path:
    """A user's own questions, in the format that docs/tasks.md describes."""
    names = ("Tom", "Mia", "Ada", "Bob", "Eva")
    lines = [
        {
            "question": f"Who has lamp {row}?",
            "documents": [f"{names[row % 5]} has lamp {row}.", "It rained.", {"title": "Log", "text": "Snow fell."}],
            "answer": names[row % 5],
            "gold": 0,
        }
        for row in range(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
