"""What layer_rope_scaling costs at inference, beside the base model.

Two ways to give L layers their own (cos, sin) are compared by their tables alone:

- at once:   the tables of all layers before the first layer runs (few kernels, L times the memory);
- on demand: each layer makes its own (one table alive, a few kernels a layer).

What ships does the first for up to FEW_TOKENS tokens in a call and the second above. It is compared with the base model
on whole models: MODEL_DIR, and a random Llama that is wider and has few layers.

    python benchmarks/inference.py MODEL_DIR [--lengths 128,1024,8192] [--repeats 15] [--compiled] [--json FILE]

On this machine's CPU, float32. Calls are run in turn; ratios are those of a round, their median and quartiles. Memory
is the model's weights and what a call adds to the process at its peak.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lpes_bake.modeling import layer_rope_scaling
from lpes_bake.modeling.layer_rope_scaling import LpesLlamaConfig
from lpes_bake.modeling.modeling_lpes_llama import LpesLlamaRotaryEmbedding
from lpes_bake.search.models import cache_argument, load_scaled, set_factors
from lpes_bake.timing import Memory

LAYERS = 32  # of a 7B model, for the tables alone
TABLE_LENGTHS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
WIDE = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=4096,
    max_position_embeddings=16_384,
)
DECODED_BEHIND = 128  # tokens in the cache of a decode step
SLOW = 2048  # tokens from which fewer rounds are run


class CountKernels(TorchDispatchMode):
    """Counts the operations that compute something: views launch no kernel."""

    kernels: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run one operation."""
        self.kernels += not func.is_view
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Cost:
    """A call of the base model and of the scaled one. seconds: the base's median; ratio: quartiles and median of the
    rounds' ratios, low to high. bytes: (base, scaled), weights and all. kernels: (base, scaled); None if compiled."""

    model: str
    mode: str
    call: str
    seconds: float
    ratio: tuple[float, float, float]
    bytes: tuple[int, int]
    kernels: tuple[int, int] | None


def seconds_of(run: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def medians(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each run, the runs taken in turn, behind a round that warms up."""
    rounds = [{name: seconds_of(run) for name, run in runs.items()} for _ in range(repeats + 1)][1:]
    return {name: statistics.median(one[name] for one in rounds) for name in runs}


def tables_alone(lengths: Sequence[int], repeats: int) -> Table:
    """The tables of a 7B model's 32 layers, without the model: milliseconds and the megabytes alive at once."""
    table = Table("tokens", "base ms", "at once ms", "MB", "on demand ms", "MB", title="tables alone, bfloat16")
    factors = [0.8 + 0.4 * layer / LAYERS for layer in range(LAYERS)]
    config = LpesLlamaConfig(factors, hidden_size=4096, num_attention_heads=32, num_hidden_layers=LAYERS)
    base, scaled = LlamaRotaryEmbedding(config), LpesLlamaRotaryEmbedding(config)
    hidden = torch.empty(1, dtype=torch.bfloat16)
    shipped = layer_rope_scaling.FEW_TOKENS
    for length in lengths:
        positions = torch.arange(length)[None]

        def tables(few_tokens: int, positions: torch.Tensor = positions) -> None:
            layer_rope_scaling.FEW_TOKENS = few_tokens
            shared = scaled(hidden, positions)
            for layer in range(LAYERS):
                layer_rope_scaling.layer_tables(shared, layer, hidden.dtype)

        times = medians(
            {
                "base": partial(base, hidden, positions),
                "at once": partial(tables, length),
                "on demand": partial(tables, 0),
            },
            repeats,
        )
        megabytes = sum(one.nbytes for one in base(hidden, positions)) / 1e6
        table.add_row(
            f"{length:,}",
            f"{1e3 * times['base']:.2f}",
            f"{1e3 * times['at once']:.2f}",
            f"{LAYERS * megabytes:.1f}",
            f"{1e3 * times['on demand']:.2f}",
            f"{megabytes:.2f}",
        )
    layer_rope_scaling.FEW_TOKENS = shipped
    return table


@torch.inference_mode()
def costs_of(name: str, model_dir: Path, lengths: list[int], repeats: int, compiled: bool) -> Iterator[Cost]:
    """A decode step behind 128 tokens, and a prefill of each length."""
    base = AutoModelForCausalLM.from_pretrained(model_dir, torch_dtype=torch.float32).eval()
    scaled = load_scaled(model_dir, dtype=torch.float32)
    layers = scaled.config.num_hidden_layers
    set_factors(scaled, [0.8 + 0.4 * layer / layers for layer in range(layers)])
    vocabulary = base.config.vocab_size
    weights = sum(one.nbytes for one in base.parameters())
    calls = [("decode", 1, DECODED_BEHIND), *((f"prefill {length:,}", length, 0) for length in lengths)]
    for call, length, past in calls:
        torch.compiler.reset()
        ids, before = torch.randint(vocabulary, (1, length)), torch.randint(vocabulary, (1, past))
        runs = [caller(model, ids, before, compiled) for model in (base, scaled)]
        kernels = None if compiled else (kernels_of(runs[0]), kernels_of(runs[1]))
        for run in runs:
            run()
        times, added = in_turn(runs, repeats if length < SLOW else max(3, repeats // 3))
        low, middle, high = statistics.quantiles([ours / theirs for theirs, ours in times], n=4, method="inclusive")
        yield Cost(
            name,
            "compiled" if compiled else "eager",
            call,
            statistics.median(theirs for theirs, _ in times),
            (low, middle, high),
            (weights + added[0], weights + added[1]),
            kernels,
        )


def caller(model: Any, ids: torch.Tensor, before: torch.Tensor, compiled: bool) -> Callable[[], Any]:
    """A call of the model on `ids`, with `before` in the cache, or without a cache where there is nothing before."""
    forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
    if not before.shape[1]:
        return lambda: forward(ids, use_cache=False, logits_to_keep=1)
    name = cache_argument(model)
    cache = model(before, use_cache=True)[name]

    def step() -> None:
        forward(ids, use_cache=True, **{name: cache})
        cache.crop(-ids.shape[1])

    return step


def kernels_of(run: Callable[[], Any]) -> int:
    """How many kernels a call launches."""
    with CountKernels() as counter:  # type: ignore[no-untyped-call]
        run()
    count: int = counter.kernels
    return count


def in_turn(runs: list[Callable[[], Any]], repeats: int) -> tuple[list[tuple[float, float]], list[int]]:
    """Seconds of both runs, round by round, and of each the median of the bytes that it adds at its peak."""
    memory = Memory(torch.device("cpu"))
    times, added = [], []
    for number in range(repeats):
        seconds, peaks = [0.0, 0.0], [0, 0]
        # Who comes first changes, so that neither has the warmer machine.
        for index in (0, 1) if number % 2 else (1, 0):
            held = memory.held() or 0
            memory.reset_peak()
            seconds[index] = seconds_of(runs[index])
            peaks[index] = (memory.peak() or held) - held
        times.append((seconds[0], seconds[1]))
        added.append(peaks)
    return times, [int(statistics.median(one[index] for one in added)) for index in (0, 1)]


def table_of(costs: list[Cost]) -> Table:
    """Costs of whole models."""
    table = Table("model", "mode", "call", "base ms", "scaled", "base MB", "scaled", "base kernels", "scaled")
    for one in costs:
        low, middle, high = one.ratio
        table.add_row(
            one.model,
            one.mode,
            one.call,
            f"{1e3 * one.seconds:,.1f}",
            f"{middle:.3f} [{low:.3f}, {high:.3f}]",
            f"{one.bytes[0] / 1e6:,.0f}",
            f"{one.bytes[1] / one.bytes[0]:.4f}",
            *([""] * 2 if one.kernels is None else [str(count) for count in one.kernels]),
        )
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a local checkpoint")
    parser.add_argument("--repeats", type=int, default=15, help="rounds; a third from 2,048 tokens on")
    parser.add_argument("--lengths", default="128,1024,8192", help="of prefills, in tokens  [default: %(default)s]")
    parser.add_argument("--compiled", action="store_true", help="whole models under torch.compile too")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    console = Console(width=140)
    console.print(tables_alone(TABLE_LENGTHS, options.repeats))
    costs: list[Cost] = []
    with TemporaryDirectory() as folder:
        LlamaForCausalLM(WIDE).save_pretrained(folder)
        for name, model_dir in ((options.model.name, options.model), ("random, 2,048 wide", Path(folder))):
            for compiled in (False, True) if options.compiled else (False,):
                for cost in costs_of(name, model_dir, lengths, options.repeats, compiled):
                    costs.append(cost)
                    print(cost, flush=True)
    console.print(table_of(costs))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in costs], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
