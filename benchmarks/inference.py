"""What layer_rope_scaling costs at inference, and which of two designs makes the tables.

Three ways to give L layers their own (cos, sin) are compared with the base model, which makes one:

- at once:   the tables of all layers before the first layer runs (few kernels, L times the memory);
- on demand: each layer makes its own (one table alive, a few kernels a layer);
- shipped:   at once for up to FEW_TOKENS tokens in a call, on demand above.

    python benchmarks/inference.py MODEL_DIR [--repeats 7] [--longest 4096] [--compiled]

Times are medians of interleaved runs in eager mode on this machine's CPU, float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from lpes_bake.modeling import layer_rope_scaling
from lpes_bake.search.models import load_scaled

DESIGNS = {"at once": 1 << 62, "on demand": 0, "shipped": layer_rope_scaling.FEW_TOKENS}
LAYERS, HEAD_DIM = 32, 128  # of a 7B model, for the tables alone


class CountKernels(TorchDispatchMode):
    """Counts the operations that compute something: views launch no kernel."""

    kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and run one operation."""
        self.kernels += not func.is_view
        return func(*args, **(kwargs or {}))


def medians(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each run, the runs taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repeat:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def with_design(design: str, run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` under one design."""

    def under() -> Any:
        layer_rope_scaling.FEW_TOKENS = DESIGNS[design]
        return run()

    return under


def tables_alone(lengths: list[int], repeats: int) -> Table:
    """The tables of a 7B model's 32 layers, without the model: milliseconds and the megabytes alive at once."""
    table = Table("tokens", "base ms", "at once ms", "MB", "on demand ms", "MB", title="tables alone, bfloat16")
    inv_freq = torch.rand(HEAD_DIM // 2)
    factors = torch.linspace(0.8, 1.2, LAYERS)[:, None]
    dtype = torch.bfloat16
    for length in lengths:
        positions = torch.arange(length)[None]

        def base(positions: torch.Tensor = positions) -> Any:
            return layer_rope_scaling.cos_sin(positions, inv_freq, 1.0, dtype)

        def at_once(positions: torch.Tensor = positions) -> Any:
            shared = layer_rope_scaling.cos_sin(positions, (inv_freq / factors)[:, None, None], 1.0, dtype)
            return [layer_rope_scaling.layer_tables(shared, layer, dtype) for layer in range(LAYERS)]

        def on_demand(positions: torch.Tensor = positions) -> None:
            shared = (positions, inv_freq / factors, 1.0)
            for layer in range(LAYERS):
                layer_rope_scaling.layer_tables(shared, layer, dtype)

        times = medians({"base": base, "at once": at_once, "on demand": on_demand}, repeats)
        megabytes = 2 * length * HEAD_DIM * 2 / 1e6
        table.add_row(
            f"{length:,}",
            f"{1e3 * times['base']:.2f}",
            f"{1e3 * times['at once']:.2f}",
            f"{LAYERS * megabytes:.1f}",
            f"{1e3 * times['on demand']:.2f}",
            f"{megabytes:.2f}",
        )
    return table


@torch.inference_mode()
def whole_model(model_dir: Path, lengths: list[int], repeats: int, compiled: bool) -> Table:
    """Prefill at each length and one decode step behind 128 tokens, as ratios to the base model."""
    base = AutoModelForCausalLM.from_pretrained(model_dir, torch_dtype=torch.float32).eval()
    scaled = load_scaled(model_dir, dtype=torch.float32)
    layers = scaled.config.num_hidden_layers
    scaled.model.rotary_emb.set_layer_rope_scaling([0.8 + 0.4 * layer / layers for layer in range(layers)])
    mode = "compiled" if compiled else "eager"
    table = Table("call", "base ms", *DESIGNS, "base kernels", *DESIGNS, title=f"{model_dir.name}, float32, {mode}")
    calls: list[tuple[str, int, int]] = [("decode", 1, 128), *[(f"prefill {n:,}", n, 0) for n in lengths]]
    for name, length, past in calls:
        ids = torch.randint(0, scaled.config.vocab_size, (1, length))
        context = torch.randint(0, scaled.config.vocab_size, (1, past)) if past else None
        runs: dict[str, Callable[[], Any]] = {}
        kernels: dict[str, int] = {}
        for label, model in (("base", base), *((design, scaled) for design in DESIGNS)):
            forward = torch.compile(model, fullgraph=True, dynamic=False) if compiled else model
            cache = model(context, use_cache=True) if context is not None else None
            key = "cache" if cache is not None and "cache" in cache else "past_key_values"

            def run(forward: Any = forward, cache: Any = cache, key: str = key, ids: torch.Tensor = ids) -> Any:
                if cache is None:
                    return forward(ids, use_cache=False, logits_to_keep=1)
                out = forward(ids, use_cache=True, **{key: cache[key]})
                cache[key].crop(-ids.shape[1])
                return out

            runs[label] = run if label == "base" else with_design(label, run)
            if not compiled:
                with CountKernels() as counter:  # type: ignore[no-untyped-call]
                    runs[label]()
                kernels[label] = counter.kernels
        times = medians(runs, repeats if length < 2048 else max(3, repeats // 3))
        table.add_row(
            name,
            f"{1e3 * times['base']:.1f}",
            *[f"{times[design] / times['base']:.3f}" for design in DESIGNS],
            *[str(kernels.get(label, "")) for label in ("base", *DESIGNS)],
        )
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a local checkpoint")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--longest", type=int, default=4096, help="longest prefill of the whole model, in tokens")
    parser.add_argument("--compiled", action="store_true", help="the whole model under torch.compile too")
    options = parser.parse_args()
    lengths = [1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    console = Console(width=140)
    console.print(tables_alone(lengths, options.repeats))
    prefills = [n for n in (128, 256, 512, 1024, 4096, 8192, 16384) if n <= options.longest]
    console.print(whole_model(options.model, prefills, options.repeats, compiled=False))
    if options.compiled:
        console.print(whole_model(options.model, prefills[:1], options.repeats, compiled=True))


if __name__ == "__main__":
    main()
