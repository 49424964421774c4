"""What measurements inside a model share: their options, the model, the prompts and the factors that they take, and how
bad input reaches the user."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lpes_bake.factors import check_factors, finite, load_factors, save_text
from lpes_bake.loading import load_model, load_tokenizer
from lpes_bake.search.device import pick_device, pick_dtype
from lpes_bake.search.errors import InputError
from lpes_bake.search.prompts import Encoded, take
from lpes_bake.search.tasks import parse_task
from lpes_bake.source import Source, open_source

# That of `eval` and `compare`.
SEED = 1


def run(main: Callable[[], None]) -> None:
    """Run a command. Bad input is one line on stderr and exit code 2, as for lpes-bake."""
    try:
        main()
    except InputError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)


def options_of(about: str | None) -> argparse.ArgumentParser:
    """The options that all measurements have. about: the module's docstring."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a local directory, or a name on the Hub")
    parser.add_argument("--factors", type=Path, action="append", required=True, help="may be given more than once")
    parser.add_argument("--out", type=file_to_write, required=True, help="JSON file to write")
    return parser


def file_to_write(text: str) -> Path:
    """An option's path; argparse's error unless its directory exists."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: give a file name in a directory that exists")
    return path


def task_options_of(about: str | None) -> argparse.ArgumentParser:
    """Those, and the options of measurements on a task's prompts."""
    parser = options_of(about)
    parser.add_argument("--task", default="kv", help="as for lpes-bake eval")
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--prompt-format", default="auto")
    return parser


def factors_of(source: Source, paths: Sequence[Path]) -> list[tuple[float, ...]]:
    """The factors of these files. InputError for those that do not fit the model."""
    found = [load_factors(path) for path in paths]
    for one in found:
        check_factors(one, source)
    return [one.layer_rope_scaling for one in found]


def opened(name: str) -> tuple[Source, Any]:
    """A base model's source and its tokenizer: enough to check all else before `load` reads the weights."""
    source = open_source(name)
    return source, load_tokenizer(source, trust_remote_code=False)


def load(source: Source) -> Any:
    """The model with factors of 1 on the best device."""
    device = pick_device()
    return load_model(source, device, pick_dtype(None, device))


def contexts_of(options: argparse.Namespace, source: Source, tokenizer: Any) -> list[list[Encoded]]:
    """The questions that `task_options_of` asks for: a list a context, one for each gold position."""
    task = parse_task(options.task)
    limit = source.max_positions
    return take(task, "report", SEED, options.contexts, tokenizer, options.prompt_format, limit).contexts


def write(path: Path, content: dict[str, Any]) -> None:
    """The result as JSON, whole or not at all."""
    save_text(path, json.dumps(finite(content), indent=1) + "\n")
