"""A baked directory loads in whichever way people start it: many processes at once, ".", a trailing slash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.source import open_source

# Imports once, and forks into processes that load at the same moment into one empty cache of modules.
LOAD = """
import os, sys, traceback
import torch
from transformers import AutoModelForCausalLM

def load(name):
    os.read(start, 1)
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)
    total = model(torch.arange(3, 40)[None]).logits.double().sum().item()
    os.write(1, f"{type(model).__name__} {total}\\n".encode())

start, begin = os.pipe()
children = []
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            load(name)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    children.append(child)
os.write(begin, b"x" * len(children))
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


def test_processes_that_load_at_once_with_an_empty_cache_all_succeed(tiny_llama: Path, tmp_path: Path) -> None:
    out = bake(open_source(str(tiny_llama)), Factors((0.25, 4.0, 1.0, 2.0)), tmp_path / "tiny-2.5-lpes").out
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(out), f"{out}/", str(out), "."],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"},
        cwd=out,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 4
    assert len(set(answers)) == 1
    assert answers[0].startswith("LpesLlamaForCausalLM ")
