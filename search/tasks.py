"""What factors are judged by: questions whose evidence stands at known places of the prompt.

`Task` is the one class to write for a task of your own (docs/tasks.md), `parse_task` the registry that
turns what stands behind --task into one. The tasks that come along have a module each.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import random
import re
import sys
import traceback
import types
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from lpes_bake.search.errors import InputError

PARTS = ("search", "selection", "report")
"""Three sets of contexts that share nothing: to search on, to choose the winner on, to report."""

# What can be written behind --task, and the class in a module of this folder that it means.
BUILT_IN = {
    "kv": "kv_retrieval.KVRetrieval",
    "kv:FILE": "kv_retrieval.KVRetrievalFile",
    "mdqa:FILE": "multi_document.MultiDocumentQA",
    "qa:FILE": "own_data.OwnData",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Example:
    """One question.

    `lead` opens the answer: it is given to the model, so that what is scored is whether the evidence was
    found, and not whether the model would have said "The value is" first.
    """

    context: int
    """Number of the context inside its part, from 0: the sampling unit of all intervals."""
    position: int
    """Gold position: one of the task's `positions`."""
    prompt: str
    answer: str
    """The text whose log-probability is scored, as it stands right behind prompt and lead."""
    lead: str = ""
    accepted: tuple[str, ...] = ()
    """All answers that count, for a task that judges generated text."""


class Task(ABC):
    """A kind of question whose evidence can be put at several places. Write `positions` and `contexts`.

    Settings are the fields of the dataclass that a subclass is; they can be given behind --task.
    """

    name: ClassVar[str]
    """Short name for messages and the journal."""
    generates: ClassVar[bool] = False
    """Whether accuracy is `correct` on freely generated text. Otherwise it is whether greedy decoding
    begins with the answer, which one teacher-forced pass tells."""
    max_new_tokens: ClassVar[int] = 100
    """Length of generated text at most."""
    position_unit: ClassVar[str] = "place"
    """What positions count, for axes: "place" from 0, or "%" of the depth."""

    @property
    def title(self) -> str:
        """For headings of tables and plots."""
        return self.name

    @property
    @abstractmethod
    def positions(self) -> tuple[int, ...]:
        """The gold positions that every context is asked at."""

    @abstractmethod
    def contexts(self, part: str, seed: int) -> Iterator[list[Example]]:
        """The contexts of a part ("search", "selection" or "report"), one after another, without end or until
        the data are used up: each a list of one example a position, in the order of `positions`.

        The same part and seed give the same contexts; different parts share none, whatever the seeds.
        """

    def correct(self, example: Example, output: str) -> bool:
        """Whether generated text answers the question. Needed where `generates` is true.

        Must not turn from true to false as the output grows: generation stops once it is true.
        """
        raise NotImplementedError(f"{type(self).__name__} generates, but does not say what is correct")

    def finished(self, output: str) -> bool:
        """Whether no further text can change `correct`, so that generation may stop."""
        return False

    def describe(self) -> dict[str, Any]:
        """What identifies the questions, as JSON: settings; name and SHA-256 (16 digits) of the data file, which
        is the setting `file`, and of a task's own code when it came from outside."""
        settings: dict[str, Any] = {"task": self.name}
        for one in task_fields(type(self)):
            value = getattr(self, one.name)
            settings[one.name] = list(value) if isinstance(value, tuple) else value
        settings["positions"] = list(self.positions)
        if isinstance(settings.get("file"), str):
            path = Path(settings["file"])
            settings.update(file=path.name, sha256=_digest(path))
        if (code := own_file(type(self))) is not None:
            settings["code_sha256"] = _digest(code)
        return settings


def part_of(question: str) -> str:
    """The part that a question belongs to for ever, whatever the seed: a quarter each to "search" and "selection",
    half to "report"."""
    return ("search", "selection", "report", "report")[zlib.crc32(question.encode("utf-8", "surrogatepass")) % 4]


def draw(rows: Sequence[T], question: Callable[[T], str], part: str, seed: int) -> list[T]:
    """The rows of a file that belong to a part, in the order that the seed gives."""
    chosen = [row for row in rows if part_of(question(row)) == part]
    random.Random(f"{part} {seed}").shuffle(chosen)
    return chosen


def even_positions(places: int, count: int) -> tuple[int, ...]:
    """`count` gold positions spread evenly over `places`, both ends among them (140, 5: 0 34 69 104 139)."""
    if count < 2:
        return (0,)
    return tuple(sorted({(places - 1) * i // (count - 1) for i in range(count)}))


def check_positions(positions: Sequence[int], places: int, things: str) -> None:
    """InputError unless the positions are different numbers from 0 to places - 1."""
    for position in positions:
        if not 0 <= position < places:
            raise InputError(f"gold position {position} does not exist among {places} {things}, numbered from 0")
    if len(set(positions)) != len(positions):
        raise InputError(f"gold positions must differ; got {'/'.join(map(str, positions))}")


def task_fields(task: type[Task]) -> list[Field[Any]]:
    """The settings of a task that can be given."""
    return [one for one in fields(task) if one.init] if is_dataclass(task) else []


def parse_task(spec: str) -> Task:
    """The task that a text such as "kv,pairs=75,key_width=uuid" or "my_task.py:MyTask,size=3" means.

    NAME[:FILE] or FILE.py:CLASS, then settings; lists are written with slashes, as in positions=0/4/9.
    A .py file is run. Raises InputError for what does not exist or cannot work.
    """
    # A comma belongs to a file's name unless a setting stands behind it.
    head, *options = re.split(r",(?=\w+=)", spec)
    own = re.fullmatch(r"(.+\.py):(\w+)", head)
    given: dict[str, str] = {}
    if own:
        task = _own_class(Path(own[1]), own[2])
    else:
        name, _, file = head.partition(":")
        task = _built_in(spec, name, file)
        if file:
            given["file"] = file
    known = {one.name: one for one in task_fields(task)}
    for option in options:
        key, _, text = option.partition("=")
        if key not in known:
            raise InputError(f"--task {spec}: there is no setting {key!r}; there are: {_settings(task)}")
        if key in given:
            raise InputError(f"--task {spec}: {key} is given twice; leave one out")
        given[key] = text
    missing = [key for key, one in known.items() if key not in given and _required(one)]
    if missing:
        raise InputError(f"--task {spec}: {missing[0]} is missing; add ,{missing[0]}=…")
    with own_code(task):
        hints = get_type_hints(task) if given else {}
        made = task(**{key: _value(spec, key, text, hints[key]) for key, text in given.items()})
        if own:
            _check_own(made)
    return made


def own_file(task: type[Task]) -> Path | None:
    """The user's file that a task comes from; None for those that come along."""
    return None if task.__module__.startswith("lpes_bake.search.") else Path(inspect.getfile(task))


@contextmanager
def own_code(task: type[Task]) -> Iterator[None]:
    """Within, an exception of a user's task becomes an InputError that names their line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if (path := own_file(task)) is None:
            raise
        raise InputError(f"{task.__name__} in {path} fails with {_in_line(error, path)}; mend the file") from error


def _in_line(error: BaseException, path: Path) -> str:
    """An exception in one line, with the line of `path` that it came through last."""
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if Path(one.filename) == path]
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first_line}" + (f" (line {lines[-1]})" if lines else "")


def _check_own(task: Task) -> None:
    """InputError for what a class of the user's could get wrong, and what would show after hours only."""
    what = f"{type(task).__name__} in {own_file(type(task))}"
    positions = task.positions
    if not positions or any(type(one) is not int for one in positions) or len(set(positions)) < len(positions):
        raise InputError(f"{what}: positions are {positions!r}; they must be different whole numbers, at least one")
    for name, kind in (("title", str), ("position_unit", str), ("max_new_tokens", int)):
        if not isinstance(getattr(task, name), kind):
            raise InputError(f"{what}: {name} is {getattr(task, name)!r}; it must be {_in_words(kind)}")
    if task.max_new_tokens < 1:
        raise InputError(f"{what}: max_new_tokens is {task.max_new_tokens}; it must be at least 1")
    try:
        json.dumps(task.describe(), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what}: what describe gives is no JSON: {error}") from error


def task_help() -> str:
    """The tasks that come along with their settings, defaults and help, for --help."""
    lines = []
    for name in BUILT_IN:
        task = _class_of(name)
        lines.append(f"{name}  {(task.__doc__ or '').splitlines()[0]}")
        for one in task_fields(task):
            if one.name != "file":
                lines.append(f"  {_shown(one)}  {one.metadata['help']}")
    lines.append("FILE.py:CLASS  A task of your own; docs/tasks.md shows how to write one.")
    lines.append("Settings stand behind commas, lists with slashes: kv,pairs=75,key_width=uuid,positions=0/37/74")
    return "\n".join(lines)


def _class_of(name: str) -> type[Task]:
    module, _, attribute = BUILT_IN[name].partition(".")
    # Those modules need this one, so they are imported when they are asked for.
    task: type[Task] = getattr(importlib.import_module(f"lpes_bake.search.{module}"), attribute)
    return task


def _built_in(spec: str, name: str, file: str) -> type[Task]:
    if file and f"{name}:FILE" in BUILT_IN:
        return _class_of(f"{name}:FILE")
    if not file and name in BUILT_IN:
        return _class_of(name)
    if not file and f"{name}:FILE" in BUILT_IN:
        raise InputError(f"--task {spec}: this task reads a file; give it as {name}:FILE")
    raise InputError(f"there is no task {spec!r}; there are: {', '.join(BUILT_IN)}, FILE.py:CLASS")


def _own_class(path: Path, name: str) -> type[Task]:
    """The class `name` of the user's file, which is run."""
    if not path.is_file():
        raise InputError(f"{path} does not exist; give the path of the file that holds the class {name}")
    module_name = f"task:{path.resolve()}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise InputError(f"{path} cannot be run: {_in_line(error, path)}; mend the file") from error
    task = getattr(module, name, None)
    if not (isinstance(task, type) and issubclass(task, Task)):
        found = [
            one.__name__
            for one in vars(module).values()
            if isinstance(one, type) and issubclass(one, Task) and one.__module__ == module_name
        ]
        there = f"there are: {', '.join(found)}" if found else "there is none; docs/tasks.md shows how to write one"
        raise InputError(f"{path} has no subclass {name} of lpes_bake.search.tasks.Task; {there}")
    missing = sorted(getattr(task, "__abstractmethods__", ()))
    if not isinstance(getattr(task, "name", None), str):
        missing.append("name")
    if task.generates and task.correct is Task.correct:
        missing.append("correct")
    if missing:
        raise InputError(f"{name} in {path} lacks {', '.join(missing)}; docs/tasks.md shows how to write a task")
    return task


def _required(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _shown(one: Field[Any]) -> str:
    """A setting with its default as it would be given."""
    default = one.default if one.default_factory is MISSING else one.default_factory()
    if isinstance(default, tuple):
        default = "/".join(map(str, default))
    return f"{one.name}={'…' if default in (MISSING, None, '') else default}"


def _settings(task: type[Task]) -> str:
    return ", ".join(_shown(one) for one in task_fields(task)) or "none"


def _value(spec: str, key: str, text: str, hint: Any) -> Any:
    """`text` as the type of the field, the first that fits of a union."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in kinds:
        try:
            return _converted(text, kind)
        except ValueError:
            continue
    words = " or ".join(_in_words(kind) for kind in kinds if kind is not type(None))
    raise InputError(f"--task {spec}: {key} is {text!r}; it must be {words}")


def _converted(text: str, kind: Any) -> Any:
    """ValueError when the text is nothing of the kind."""
    if get_origin(kind) is tuple:
        return tuple(_converted(part, get_args(kind)[0]) for part in text.split("/"))
    if kind is bool:
        return {"true": True, "false": False}[text] if text in ("true", "false") else _not(text)
    return kind(text) if kind in (int, float, str) else _not(text)


def _not(text: str) -> Any:
    raise ValueError(text)


def _in_words(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"{_in_words(get_args(kind)[0])}, or several with slashes between them"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return words.get(kind, f"set in the code: a {kind} cannot be written here")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
