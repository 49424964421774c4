"""The lost-in-the-middle tasks in lm-evaluation-harness and in `lpes-bake eval`: same model, same questions.

python -m benchmarks.harness MODEL_DIR MDQA_FILE [CONTEXTS]

Prints both accuracies at each place, and how many seconds each took. The plain prompt format, the CPU, float32.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from lpes_bake.evaluate import evaluate
from lpes_bake.harness import TASKS_DIR
from lpes_bake.search.tasks import parse_task


def in_harness(model: str, task: str, contexts: int) -> dict[str, Any]:
    """lm-eval's results of one of our tasks."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    metadata = {"lpes_contexts": contexts}
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": model, "dtype": "float32"},
        tasks=[task],
        device="cpu",
        log_samples=False,
        task_manager=TaskManager(include_path=str(TASKS_DIR), include_defaults=False, metadata=metadata),
    )["results"][task]
    return results


def main(model: str, file: str, contexts: int = 10) -> None:
    """Both tasks, first in `eval`, then in lm-eval."""
    os.environ["LPES_MDQA_FILE"] = file
    specs = {
        "lpes_mdqa_10": f"mdqa:{file},documents=10,positions=0/4/9",
        "lpes_kv_75": "kv,pairs=75,key_width=uuid,positions=0/24/49/74",
    }
    for name, spec in specs.items():
        task = parse_task(spec)
        start = time.monotonic()
        evaluation = evaluate(
            [model], [task], contexts=contexts, seed=1, prompt_format="plain", device="cpu", dtype="float32"
        )
        middle = time.monotonic()
        results = in_harness(model, name, contexts)
        end = time.monotonic()
        accuracies = evaluation.entries[0].values(0, "accuracy").mean(0)
        for place, accuracy in zip(task.positions, accuracies, strict=True):
            print(f"{name} at {place}: eval {accuracy:.3f}, lm-eval {results[f'acc_at_{place},none']:.3f}")
        print(f"{name}: {contexts} contexts, eval {middle - start:.0f} s, lm-eval {end - middle:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:4]))
