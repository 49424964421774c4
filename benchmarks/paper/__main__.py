"""One of the paper's tables for one model, from nothing: docs/reproduce.md.

    python -m benchmarks.paper TABLE OUT --model vicuna-7b|stablebeluga-7b|qwen2.5-7b|smollm2 [--print]

Runs the commands of the table one after the other, those whose output is in OUT already left out, and writes
OUT/TABLE.md and OUT/TABLE.json. Tables of one model share their searches when they share OUT. Stopped half-way, the
same command goes on. --print shows the commands, which can be pasted, and runs nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks.paper.recipes import RECIPES, Files, Step
from benchmarks.paper.setups import SETUPS
from benchmarks.paper.tables import markdown
from lpes_bake.factors import finite, save_text
from lpes_bake.run import begun

PROGRAMS = {"lpes-bake": [sys.executable, "-m", "lpes_bake"], "python": [sys.executable]}
BAD_INPUT = 2
# In OUT: what made each of its files.
COMMANDS_FILE = "commands.json"


def run(step: Step, out: Path) -> None:
    """Do what a step says, unless that is done; a search or a comparison that was stopped goes on.

    What another command has made is not taken for done: that ends the program.
    """
    command = shlex.join(step.words)
    record, name = out / COMMANDS_FILE, str(step.made.relative_to(out))
    commands = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    if step.made.exists():
        if commands.get(name, command) != command:
            sys.exit(f"{step.made} was made by another command ({commands[name]}); give another OUT")
        print(f"# done: {command}", flush=True)
        return
    save_text(record, json.dumps({**commands, name: command}, indent=1) + "\n")
    print(command, flush=True)
    program, *arguments = step.words
    resume = ["--resume"] if begun(step.made.parent) else []
    try:
        code = subprocess.run([*PROGRAMS[program], *arguments, *resume]).returncode
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on.", file=sys.stderr)
        sys.exit(130)
    if code == BAD_INPUT and step.optional:
        print(f"# skipped, the line above says why: {command}", flush=True)
    elif code:
        sys.exit(code if code > 0 else 1)


def main(arguments: list[str] | None = None) -> None:
    """Run a recipe, or print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=RECIPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=SETUPS, required=True)
    parser.add_argument("--path", help="a local copy of the model  [default: its name on the Hub]")
    parser.add_argument("--factors", type=Path, help="factors to use; nothing is searched for, but by ablations")
    parser.add_argument("--mdqa", type=Path, default=Path("nq-open-oracle.jsonl.gz"), help="[default: %(default)s]")
    parser.add_argument("--moice", type=Path, help="main: routers from lpes-bake train-moice, for MoICE")
    parser.add_argument("--text", type=Path, help="general: text file with paragraphs")
    parser.add_argument("--print", action="store_true", help="show the commands, run nothing")
    options = parser.parse_args(arguments)
    setup = SETUPS[options.model]
    if options.path is not None:
        setup = dataclasses.replace(setup, model=options.path)
    recipe = RECIPES[options.table](
        setup, Files(options.out, options.mdqa, options.factors, options.moice, options.text)
    )
    if options.print:
        print("\n".join(shlex.join(step.words) for step in recipe.steps))
        return
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"{options.out} is a file; give a directory")
    words = [word for step in recipe.steps for word in step.words]
    for name in ("mdqa", "factors", "moice", "text"):
        # Commands say so themselves, but the last of them after the searches of the first.
        path = getattr(options, name)
        if path is not None and not path.exists() and any(str(path) in word for word in words):
            parser.error(f"--{name}: {path} does not exist")
    options.out.mkdir(parents=True, exist_ok=True)
    for step in recipe.steps:
        run(step, options.out)
    tables = recipe.gather()
    content = {
        "table": options.table,
        "model": setup.model,
        "commands": [shlex.join(step.words) for step in recipe.steps],
        "tables": [dataclasses.asdict(table) for table in tables],
    }
    save_text(options.out / f"{options.table}.json", json.dumps(finite(content), indent=1, ensure_ascii=False) + "\n")
    text = markdown(f"{options.table}: {setup.model}", tables)
    save_text(options.out / f"{options.table}.md", text)
    print(text)


if __name__ == "__main__":
    main()
