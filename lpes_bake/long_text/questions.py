"""Questions about long documents: how they are read from a file or the Hub, and cut to what a model can read."""

from __future__ import annotations

import tempfile
import zipfile
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpes_bake.long_text.metrics import Metric
from lpes_bake.search.errors import InputError
from lpes_bake.search.jsonl import Row, read_rows
from lpes_bake.search.prompts import encode_prompt

# Tokens with more letters than that on the average do not happen: what lies beyond is not even tokenised.
LETTERS_PER_TOKEN = 16


@dataclass(frozen=True)
class Question:
    """One prompt: `before`, the document, `after`. What does not fit is cut from the document's end, or from its
    beginning, and `mark` stands in its place.

    references: the answers it is scored against. unit: names the document, for intervals; questions of one unit are
    drawn together.
    """

    before: str
    document: str
    after: str
    references: tuple[str, ...]
    unit: str
    mark: str = ""
    cut_at_beginning: bool = False

    def prompt(self, letters: int | None = None) -> str:
        """The prompt with that many letters of the document; None is all of it."""
        if letters is None:
            return self.before + self.document + self.after
        if self.cut_at_beginning:
            return self.before + self.mark + self.document[len(self.document) - letters :] + self.after
        return self.before + self.document[:letters] + self.mark + self.after


@dataclass(frozen=True)
class Benchmark:
    """A task of a benchmark: its questions, and how they are answered and scored.

    name: as behind --benchmark, without a file. left_out: questions that only people or other models can judge.
    """

    name: str
    questions: tuple[Question, ...]
    metric_name: str
    metric: Metric
    max_new_tokens: int
    left_out: int = 0


def fitted(question: Question, tokenizer: Any, prompt_format: str, limit: int) -> tuple[list[int], bool]:
    """The token ids of the question's prompt, at most `limit`, and whether the document was cut for that.

    As much of the document stays as fits. Raises InputError when the rest is too long already.
    """

    def length(letters: int) -> int:
        return len(encode_prompt(question.prompt(letters), tokenizer, prompt_format))

    longest = limit * LETTERS_PER_TOKEN
    if len(question.prompt()) <= longest:
        whole = encode_prompt(question.prompt(), tokenizer, prompt_format)
        if len(whole) <= limit:
            return whole, False
    letters = bisect_right(range(min(len(question.document), longest) + 1), limit, key=length) - 1
    if letters < 0:
        raise InputError(
            f"a prompt without its document has {length(0)} tokens, but there is room for {max(0, limit)}; use a "
            "model with more positions"
        )
    return encode_prompt(question.prompt(letters), tokenizer, prompt_format), True


def read_benchmark(spec: str, limit: int | None = None) -> Benchmark:
    """The benchmark that a text such as "zeroscrolls/qasper" or "leval/tpo:FILE" means, with its first `limit`
    questions. Without a file, it is fetched from the Hub. Raises InputError for what does not exist or cannot be read.
    """
    from lpes_bake.long_text import leval, zeroscrolls

    suites: dict[str, tuple[Iterable[str], Callable[[str, list[Row]], Benchmark], Callable[[str], list[Row]]]] = {
        "zeroscrolls": (zeroscrolls.TASKS, zeroscrolls.benchmark, zeroscrolls.fetch),
        "leval": (leval.TASKS, leval.benchmark, leval.fetch),
    }
    name, _, file = spec.partition(":")
    suite, _, task = name.partition("/")
    if suite not in suites:
        raise InputError(f"--benchmark {spec}: there is no benchmark {suite!r}; there are: {', '.join(suites)}")
    tasks, make, fetch = suites[suite]
    if task not in tasks:
        raise InputError(f"--benchmark {spec}: {suite} has no task {task!r}; it has: {', '.join(tasks)}")
    made = make(task, list(read_rows(Path(file))) if file else fetch(task))
    return replace(made, questions=made.questions[:limit])


def fetch_file(repo: str, name: str) -> Path:
    """A file of a data set on the Hub, in its cache."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, name, repo_type="dataset"))
    except Exception as error:  # many kinds: no network, no such file, no access
        raise InputError(
            f"{name} of the data set {repo} could not be fetched from the Hub ({type(error).__name__}); try again, or "
            "give the path of a file behind a colon"
        ) from error


def packed_rows(archive: Path, name: str) -> list[Row]:
    """The rows of the file called `name` in a zip archive, in whichever folder of it."""
    try:
        with zipfile.ZipFile(archive) as packed, tempfile.TemporaryDirectory() as folder:
            member = next((one for one in packed.namelist() if Path(one).name == name), None)
            if member is None:
                raise InputError(f"{archive} holds no {name}; give the path of a file behind a colon")
            return list(read_rows(Path(packed.extract(member, folder))))
    except zipfile.BadZipFile as error:
        raise InputError(f"{archive} is no whole zip archive ({error}); fetch it again") from error
