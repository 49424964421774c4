"""What can be done with a baked checkpoint: a tiny random model of each family, in the tools around transformers.

    python -m benchmarks.stacks OUT --python /venvs/tools/bin/python --python /venvs/optimum/bin/python

A use (`uses.py` has them all) runs in the first of the environments that has its packages, offline, with empty caches
and where lpes_bake cannot be imported. It passes when what comes out equals the base model with its rotary tables
scaled by hand, and differs from the base model. Prints a Markdown table, and writes all there is to know to
OUT/stacks.json.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.uses import USES
from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.source import open_source
from tests.conftest import write_tiny
from tests.families import TINY_FAMILIES

FACTORS = (0.25, 4.0, 1.0, 2.0)


def prepare(out: Path, family: str) -> tuple[str, str]:
    """A tiny base model and its bake: their directories."""
    from transformers import AutoTokenizer

    # With larger weights, or a head that is the embedding, random models repeat one token, with factors and without.
    head = {"tie_word_embeddings": False} if family.startswith("gemma") else {}
    base = write_tiny(out / "bases" / family, family, initializer_range=0.15, **head)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token, tokenizer.eos_token = tokenizer.convert_ids_to_tokens([0, 2])
    tokenizer.save_pretrained(base)
    # A name with a dot, which some loaders take for a module's.
    baked = bake(open_source(str(base)), Factors(FACTORS), out / "baked" / f"{family}-2.5-lpes", overwrite=True).out
    return str(base.resolve()), str(baked)


def run(python: str, plan: list[tuple[str, str, str]], log: Path) -> Iterator[dict[str, Any]]:
    """What uses.py says about each [use, base, baked] of a plan, in an environment."""
    uses, live_checks = Path(__file__).with_name("uses.py"), importlib.resources.files("lpes_bake") / "live_checks.py"
    drop = ("PYTHONPATH", "HF_MODULES_CACHE", "HF_HUB_CACHE")
    while plan:
        with tempfile.TemporaryDirectory() as home, log.open("a", encoding="utf-8") as errors:
            (Path(home) / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
            environment = {name: value for name, value in os.environ.items() if name not in drop}
            environment |= {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_DATASETS_OFFLINE": "1"}
            words = [python, str(uses), str(live_checks), f"{home}/scratch", f"{home}/plan.json"]
            process = subprocess.Popen(
                words, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            assert process.stdout is not None
            for line in process.stdout:
                plan = plan[1:]
                yield json.loads(line)
        if process.wait() and plan:
            # It ended before its time: the use that it was at is to blame.
            yield {"use": plan[0][0], "directory": plan[0][2], "outcome": f"ended with {process.returncode}"}
            plan = plan[1:]


def row(use: str, versions: dict[str, str], outcomes: dict[str, str]) -> str:
    """A line of the table: the use, what it ran with, the families that pass, and what came of the others."""
    families = defaultdict(list)
    for family, outcome in outcomes.items():
        families[outcome].append(family)
    passed = families.pop("pass", [])
    others = "; ".join(f"{', '.join(names)}: {outcome}" for outcome, names in families.items())
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"| {use} | {packages} | {len(passed)} of {len(outcomes)} | {others} |"


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--python", "pythons", multiple=True, default=[sys.executable], help="Interpreter of an environment.")
@click.option("--use", "uses", multiple=True, help="Only these uses.", type=click.Choice([*USES]))
@click.option("--family", "families", multiple=True, help="Only these families.", type=click.Choice([*TINY_FAMILIES]))
def main(out: Path, pythons: tuple[str, ...], uses: tuple[str, ...], families: tuple[str, ...]) -> None:
    """Try what people do with checkpoints on baked ones of all families."""
    out.mkdir(parents=True, exist_ok=True)
    pairs = {family: prepare(out, family) for family in families or TINY_FAMILIES}
    plan = [(use, *pair) for use in uses or USES for pair in pairs.values()]
    names = {baked: family for family, (_, baked) in pairs.items()}
    record: dict[str, dict[str, Any]] = {}
    for number, python in enumerate(pythons):
        missing = []
        for step, message in zip(list(plan), run(python, plan, out / f"{number}.log"), strict=True):
            if message["outcome"] is None:
                missing.append(step)
                continue
            use = record.setdefault(message["use"], {"outcomes": {}})
            use["versions"] = message.get("versions") or use.get("versions", {})
            use["outcomes"][names[message["directory"]]] = message["outcome"]
            click.echo(f"{message['use']}, {names[message['directory']]}: {message['outcome']}", err=True)
            (out / "stacks.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        plan = missing
    click.echo("| use | with | passes | otherwise |\n|---|---|---|---|")
    for name, found in record.items():
        click.echo(row(name, found["versions"], found["outcomes"]))
    for name in dict.fromkeys(use for use, _, _ in plan):
        click.echo(f"| {name} | no environment has its packages | | |")


if __name__ == "__main__":
    main()
