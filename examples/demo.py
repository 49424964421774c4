"""From a base model to a debiased checkpoint and its proof, by the commands a user would type.

    python examples/demo.py MODEL_DIR RUN_DIR

`make demo` runs this on SmolLM2-135M-Instruct. Everything is sized for two CPU cores.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# A pair is short and asked for at five places: much signal from few tokens. Without its chat template
# the model answers with the value at once.
TASK = ["--task", "kv,key_width=4,positions=0/3/7/11/15", "--prompt-format", "plain"]
SEARCH = ["--contexts", "12", "--gradient-contexts", "40", "--selection-contexts", "12", "--report-contexts", "40"]
SEARCH += ["--steps", "8", "--finalists", "2"]
EVALUATION = ["--contexts", "50"]


def lpes_bake(*arguments: str) -> None:
    """Show a command, then run it."""
    print(f"\n$ lpes-bake {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "lpes_bake", *arguments], check=True)


def main() -> None:
    """Search, show, bake, verify, evaluate."""
    model, run = sys.argv[1], Path(sys.argv[2])
    baked = run / f"{Path(model).name}-lpes"
    plot = run / "base-and-baked.png"
    resume = ["--resume"] if (run / "search" / "journal.jsonl").exists() else []
    lpes_bake("search", model, "--out", str(run / "search"), *TASK, *SEARCH, *resume)
    lpes_bake("show", str(run / "search"))
    lpes_bake("export", model, str(run / "search" / "factors.json"), str(baked), "--overwrite")
    lpes_bake("verify", str(baked), "--base", model)
    lpes_bake("eval", model, str(baked), *TASK, *EVALUATION, "--plot", str(plot))
    print(f"\nThe search as a page: {run / 'search' / 'report' / 'report.html'}\nThe picture: {plot}\n")
    print("To load the debiased model anywhere, without lpes-bake:\n")
    print("from transformers import AutoModelForCausalLM, AutoTokenizer")
    print(f'model = AutoModelForCausalLM.from_pretrained("{baked}", trust_remote_code=True)')
    print(f'tokenizer = AutoTokenizer.from_pretrained("{baked}", trust_remote_code=True)')


if __name__ == "__main__":
    main()
