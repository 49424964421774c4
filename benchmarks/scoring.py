"""What the scoring engine saves: the same candidates on the same questions, against the plain path.

The plain path is lost-in-the-middle's own: model.generate for one prompt after the other, greedy, 100 new
tokens. A second one stops as early as could be, as a careful script would: after as many tokens as the answer
has (key-value retrieval), or after the first line (multi-document QA).

    python benchmarks/scoring.py MODEL_DIR [--data nq-open-oracle.jsonl.gz] [--repeats 3] [--json FILE]

All paths must give the same accuracy, question by question, and the engine the log-probabilities of a plain
forward pass. Times are medians of interleaved runs on this machine's CPU in float32. Peak memory is each
path's own, in a process of its own, beyond the loaded model. The share of the machine's peak counts products
with weights only, against one large matrix product in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from lpes_bake.search.models import load_scaled, set_factors
from lpes_bake.search.prompts import PROMPT_FORMATS, Encoded, take
from lpes_bake.search.scoring import Scorer
from lpes_bake.search.tasks import Task, even_positions, parse_task
from lpes_bake.timing import Memory

PATHS = ("engine", "plain, 100 tokens", "plain, stops early")
NEW_TOKENS = 100
TARGETS = {"kv": 8.0, "mdqa": 3.0}
PLACES = 5


@dataclass(frozen=True)
class Run:
    """One path over all questions of a task: what it found and what went through the model."""

    exact: list[list[bool]]
    tokens: int


class Bench:
    """The model, and the questions of one task."""

    def __init__(self, model_dir: Path, task: Task, contexts: int, prompt_format: str) -> None:
        self.model = load_scaled(model_dir, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.task = task
        limit = self.model.config.max_position_embeddings
        self.contexts = take(task, "report", 0, contexts, self.tokenizer, prompt_format, limit).contexts
        self.scorer = Scorer(self.model, self.tokenizer, task, self.contexts)
        layers = self.model.config.num_hidden_layers
        self.candidates = [np.linspace(first, last, layers).tolist() for first, last in ((1.0, 1.0), (1.05, 0.85))]

    def run(self, path: str, factors: Sequence[float]) -> Run:
        """All questions with one candidate."""
        if path == "engine":
            scores = self.scorer.score(factors, accuracy=True)
            return Run(scores.exact.astype(bool).tolist(), scores.tokens)
        set_factors(self.model, factors)
        exact, tokens = [], 0
        for context in self.contexts:
            row = []
            for one in context:
                made = self._generate(one, early=path == PATHS[2])
                row.append(self._correct(one, made))
                tokens += len(one.prompt) + len(made) - 1
            exact.append(row)
        return Run(exact, tokens)

    def _generate(self, one: Encoded, early: bool) -> list[int]:
        ids = torch.tensor([one.prompt])
        stopping = StoppingCriteriaList()
        length = NEW_TOKENS
        if early and self.task.generates:
            stopping.append(Finished(self.task, self.tokenizer, len(one.prompt)))
        elif early:
            length = len(one.answer)
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=length,
            stopping_criteria=stopping,
            pad_token_id=0,
        )
        return [int(token) for token in made[0, len(one.prompt) :]]

    def _correct(self, one: Encoded, made: list[int]) -> bool:
        if self.task.generates:
            text: Any = self.tokenizer.decode(made, skip_special_tokens=True)
            return self.task.correct(one.example, text)
        return made[: len(one.answer)] == one.answer

    def check_logprobs(self, factors: Sequence[float]) -> float:
        """The largest difference between the engine's log-probabilities and plain forward passes of whole prompts."""
        found = self.scorer.score(factors).logprob
        largest = 0.0
        for row, context in enumerate(self.contexts):
            for column, one in enumerate(context):
                with torch.inference_mode():
                    logits = self.model(torch.tensor([one.prompt + one.answer])).logits[0, len(one.prompt) - 1 : -1]
                expected = logits.log_softmax(-1).gather(-1, torch.tensor(one.answer)[:, None]).mean()
                largest = max(largest, abs(float(expected) - float(found[row, column])))
        return largest

    @cached_property
    def judged_tokens(self) -> int:
        """Tokens that the engine takes to judge the answers, before it generates any."""
        return self.scorer.score().tokens

    def weight_products(self, path: str, run: Run) -> float:
        """Floating point operations of a run in products with weights: all layers for each token, and the output's
        where a token is predicted."""
        questions = list(chain.from_iterable(self.contexts))
        if path == "engine":
            predicted = sum(len(one.answer) for one in questions) + run.tokens - self.judged_tokens
        else:
            predicted = run.tokens - sum(len(one.prompt) - 1 for one in questions)
        layers = sum(one.numel() for one in self.model.base_model.layers.parameters())
        output = int(self.model.lm_head.weight.numel())
        return 2.0 * float(layers * run.tokens + output * predicted)


class Finished(StoppingCriteria):
    """Ends a text when the task says that nothing can change any more."""

    def __init__(self, task: Task, tokenizer: Any, start: int) -> None:
        self.task, self.tokenizer, self.start = task, tokenizer, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """One truth value a text of the batch."""
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :], skip_special_tokens=True)
        return torch.tensor([self.task.finished(text) for text in texts], device=input_ids.device)


@dataclass(frozen=True)
class Figures:
    """One line of the table."""

    task: str
    path: str
    seconds: float
    times_engine: float
    tokens: int
    tokens_per_second: float
    share_of_peak: float
    memory_mb: float | None
    accuracy: float
    logprob_difference: float


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """How long a call takes, and what it gives."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def matmul_peak(size: int = 3072) -> float:
    """Floating point operations a second of one large float32 matrix product, the best of some."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    return 2 * size**3 / min(seconds(lambda: a @ b)[0] for _ in range(10))


def compare(name: str, bench: Bench, repeats: int, peak: float, memory: dict[str, float | None]) -> list[Figures]:
    """All paths in turn; AssertionError unless they agree on every question."""
    times: dict[str, list[float]] = {path: [] for path in PATHS}
    runs: dict[str, list[Run]] = {path: [] for path in PATHS}
    difference = max(bench.check_logprobs(factors) for factors in bench.candidates)  # warms up too
    assert difference < 1e-3, f"{name}: log-probabilities differ by {difference}"
    for _ in range(repeats):
        for factors in bench.candidates:
            found = {}
            for path in PATHS:
                took, found[path] = seconds(lambda path=path, factors=factors: bench.run(path, factors))  # type: ignore[misc]
                times[path].append(took)
                runs[path].append(found[path])
            for path in PATHS[1:]:
                assert found[path].exact == found["engine"].exact, f"{name}: {path} differs from the engine"
    engine = statistics.median(times["engine"])
    lines = []
    for path in PATHS:
        took = statistics.median(times[path])
        tokens = round(statistics.mean(run.tokens for run in runs[path]))
        products = statistics.mean(bench.weight_products(path, run) for run in runs[path])
        lines.append(
            Figures(
                task=name,
                path=path,
                seconds=took,
                times_engine=took / engine,
                tokens=tokens,
                tokens_per_second=tokens / took,
                share_of_peak=products / took / peak,
                memory_mb=memory[path],
                accuracy=float(np.mean([run.exact for run in runs[path]])),
                logprob_difference=difference,
            )
        )
    return lines


def memory_of(path: str, bench: Bench) -> float | None:
    """Megabytes that one run adds at its peak; None where the system does not tell."""
    # Weights are mapped from the file: one token brings them all in.
    bench.model(torch.tensor([[0]]))
    memory = Memory(torch.device("cpu"))
    before = memory.held()
    memory.reset_peak()
    bench.run(path, bench.candidates[0])
    peak = memory.peak()
    return None if before is None or peak is None else (peak - before) / 1e6


def specs(options: argparse.Namespace) -> dict[str, str]:
    """The tasks to measure."""
    found = {"kv": f"kv,pairs=16,key_width=8,positions={_places(16)}"}
    if options.data is not None:
        found["mdqa"] = f"mdqa:{options.data},documents={options.documents},positions={_places(options.documents)}"
    return found


def _places(count: int) -> str:
    return "/".join(map(str, even_positions(count, PLACES)))


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a local checkpoint")
    parser.add_argument("--data", type=Path, help="nq-open-oracle.jsonl.gz: measure multi-document QA too")
    parser.add_argument("--documents", type=int, default=8, help="documents in a context of multi-document QA")
    parser.add_argument("--contexts", type=int, default=3, help=f"contexts of a task, each asked at {PLACES} places")
    parser.add_argument(
        "--prompt-format",
        default="plain",
        choices=PROMPT_FORMATS,
        help="plain is what the authors' scripts send; in a chat a model may end its answer long before 100 tokens",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--memory-of", nargs=2, metavar=("TASK", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if options.memory_of:
        name, path = options.memory_of
        print(
            json.dumps(
                memory_of(path, Bench(options.model, parse_task(specs(options)[name]), 1, options.prompt_format))
            )
        )
        return
    console = Console(width=140)
    if options.data is None:
        console.print("Multi-document QA is left out: it needs --data nq-open-oracle.jsonl.gz")
    peak = matmul_peak()
    figures: list[Figures] = []
    for name, spec in specs(options).items():
        memory: dict[str, float | None] = {}
        for path in PATHS:
            command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name, path]
            memory[path] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        bench = Bench(options.model, parse_task(spec), options.contexts, options.prompt_format)
        figures += compare(name, bench, options.repeats, peak, memory)
    console.print(table(figures, peak, options))
    for line in figures:
        if line.path == PATHS[1]:
            console.print(
                f"{line.task}: {line.times_engine:.1f} times less time than the plain path (target "
                f"{TARGETS[line.task]:g}); all paths agree on every question, log-probabilities to "
                f"{line.logprob_difference:.1e}"
            )
    if options.json is not None:
        options.json.write_text(
            json.dumps(
                {
                    "model": options.model.name,
                    "threads": torch.get_num_threads(),
                    "matmul_gflops": peak / 1e9,
                    "tasks": specs(options),
                    "prompt_format": options.prompt_format,
                    "contexts": options.contexts,
                    "repeats": options.repeats,
                    "figures": [asdict(line) for line in figures],
                },
                indent=2,
            )
            + "\n"
        )


def table(figures: Sequence[Figures], peak: float, options: argparse.Namespace) -> Table:
    """The figures for people."""
    result = Table(
        "task",
        "path",
        "s a candidate",
        "times the engine",
        "tokens",
        "tokens/s",
        "of matmul peak",
        "peak MB",
        "accuracy",
        title=f"{options.model.name}, {options.contexts} contexts at {PLACES} places, {options.prompt_format} prompts, "
        f"float32, {torch.get_num_threads()} threads, matmul peak {peak / 1e9:.0f} GFLOP/s",
    )
    for line in figures:
        result.add_row(
            line.task,
            line.path,
            f"{line.seconds:.2f}",
            f"{line.times_engine:.2f}",
            f"{line.tokens:,}",
            f"{line.tokens_per_second:,.0f}",
            f"{line.share_of_peak:.0%}",
            "" if line.memory_mb is None else f"{line.memory_mb:,.0f}",
            f"{line.accuracy:.2f}",
        )
    return result


if __name__ == "__main__":
    main()
