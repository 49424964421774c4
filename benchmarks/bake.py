"""What a bake costs: time and peak memory of `lpes-bake export`, in a process of its own.

Two checkpoints are made for it in a scratch directory:

- a Llama of 8B parameters (16 GB in four shards) whose weights are holes in the files, for bakes that link
  or clone: what they cost does not depend on what the weights are;
- a smaller Llama with all its bytes on the disk, for a bake that copies, against transformers' way to the
  same end, from_pretrained and save_pretrained.

    python benchmarks/bake.py [--folder DIR] [--gigabytes 0.5] [--repeats 5] [--json FILE]

Times are medians of interleaved runs of whole processes, from their start to their end; nobody waits for
the disk (no fsync), and the files read are in the page cache after the first round, which is not counted.
On a machine that is busy with other things, compare the seconds of CPU.
Cloning is measured where DIR's file system can clone files (btrfs, XFS).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lpes_bake.export import clone

SHARDS = 4
CHUNK = 1 << 24
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
# The shape of TinyLlama; as many layers as the size asks for.
SMALL = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
SAVE = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], torch_dtype="auto").save_pretrained(sys.argv[2])
"""
BYTES = 2  # of a bfloat16
TARGET_SECONDS, TARGET_MEGABYTES, TARGET_TIMES, TARGET_MEMORY_TIMES = 2.0, 150.0, 20.0, 10.0


@dataclass(frozen=True)
class Figures:
    """One line of the table: medians over the repeats, and the highest memory of any."""

    what: str
    gigabytes: float
    seconds: float
    slowest: float
    cpu_seconds: float
    peak_mb: float


def layer_shapes(shape: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """The tensors of one decoder layer."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def count(shape: tuple[int, ...]) -> int:
    """Numbers in a tensor."""
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def write_checkpoint(folder: Path, shape: dict[str, int], *, sparse: bool) -> float:
    """A Llama of this shape in four shards; its size in gigabytes. sparse: weights that take no room."""
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 500000.0, **shape}
    config |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "factors.json").write_text(json.dumps([1.0] * shape["num_hidden_layers"]))
    outside = (shape["vocab_size"], shape["hidden_size"])
    tensors = {"model.embed_tokens.weight": outside, "model.norm.weight": (shape["hidden_size"],)}
    for layer in range(shape["num_hidden_layers"]):
        tensors |= {f"model.layers.{layer}.{name}": size for name, size in layer_shapes(shape).items()}
    tensors["lm_head.weight"] = outside
    total = BYTES * sum(map(count, tensors.values()))
    random = os.urandom(CHUNK)
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(SHARDS)]
    done = 0
    for name, size in tensors.items():
        shards[min(SHARDS - 1, done * SHARDS // total)][name] = size
        done += BYTES * count(size)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{SHARDS:05}.safetensors"
        weight_map |= dict.fromkeys(shard, path.name)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, size in shard.items():
            begin, end = end, end + BYTES * count(size)
            header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            if sparse:
                file.truncate(file.tell() + end)
            else:
                for begin in range(0, end, CHUNK):
                    file.write(random[: min(CHUNK, end - begin)])
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total / 1e9


def small_shape(gigabytes: float) -> dict[str, int]:
    """The small model with as many layers as come closest to this size."""
    outside = 2 * BYTES * SMALL["vocab_size"] * SMALL["hidden_size"]
    layer = BYTES * sum(map(count, layer_shapes(SMALL).values()))
    return {**SMALL, "num_hidden_layers": max(1, round((gigabytes * 1e9 - outside) / layer))}


def measure(command: list[str]) -> tuple[float, float, float]:
    """Seconds, seconds of computing, and the highest resident megabytes of a process. This one stays small: on
    Linux a child's figure begins with its parent's."""
    quiet = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_DUP2, 1, 2)]
    start = time.perf_counter()
    child = os.posix_spawn(sys.executable, [sys.executable, *command], os.environ, file_actions=quiet)
    _, status, usage = os.wait4(child, 0)
    seconds = time.perf_counter() - start
    if status:
        sys.exit(f"{' '.join(command)} failed")
    unit = 1 if sys.platform == "darwin" else 1024
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit / 1e6


def can_clone(folder: Path) -> bool:
    """Whether the file system can."""
    (folder / "probe").write_text("x")
    return clone(folder / "probe", folder / "probed")


def compare(commands: dict[str, tuple[float, list[str]]], out: Path, repeats: int) -> list[Figures]:
    """Each command in turn, after a round that is not counted. All write to `out`."""
    runs: dict[str, list[tuple[float, float, float]]] = {what: [] for what in commands}
    for repeat in range(repeats + 1):
        for what, (_, command) in commands.items():
            run = measure(command)
            shutil.rmtree(out)
            if repeat:
                runs[what].append(run)
    figures = []
    for what, (gigabytes, _) in commands.items():
        seconds, computing, memory = zip(*runs[what], strict=True)
        figures.append(
            Figures(
                what, gigabytes, statistics.median(seconds), max(seconds), statistics.median(computing), max(memory)
            )
        )
    return figures


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; needs room for twice --gigabytes")
    parser.add_argument("--gigabytes", type=float, default=0.5, help="size of the checkpoint that is copied")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lpes-bake-", dir=options.folder) as scratch:
        folder = Path(scratch)
        large, small, out = folder / "large", folder / "small", folder / "out"
        large_size = write_checkpoint(large, LLAMA_8B, sparse=True)
        small_size = write_checkpoint(small, small_shape(options.gigabytes), sparse=False)

        def export(model: Path, weights: str) -> list[str]:
            factors = str(model / "factors.json")
            return ["-m", "lpes_bake", "export", str(model), factors, str(out), "--weights", weights]

        clones = can_clone(folder)
        copying = "lpes-bake, clone" if clones else "lpes-bake, copy"
        commands = {"lpes-bake, hardlink": (large_size, export(large, "hardlink"))}
        if clones:
            commands["lpes-bake, clone (large)"] = (large_size, export(large, "copy"))
        commands |= {
            copying: (small_size, export(small, "copy")),
            "from_pretrained + save_pretrained": (small_size, ["-c", SAVE, str(small), str(out)]),
        }
        figures = compare(commands, out, options.repeats)
    print("| what | checkpoint | seconds (slowest) | seconds of CPU | peak memory |")
    print("|---|---|---|---|---|")
    for line in figures:
        times = f"{line.seconds:.2f} ({line.slowest:.2f}) | {line.cpu_seconds:.2f}"
        print(f"| {line.what} | {line.gigabytes:.1f} GB | {times} | {line.peak_mb:.0f} MB |")
    link, (copy, save) = figures[0], figures[-2:]
    print(
        f"\n{options.repeats} repeats. The large checkpoint: {link.seconds:.2f} s and {link.peak_mb:.0f} MB "
        f"(targets {TARGET_SECONDS:g} s, {TARGET_MEGABYTES:g} MB).\nThe small one: copied "
        f"{save.seconds / copy.seconds:.1f} times faster than by transformers, "
        f"{save.cpu_seconds / copy.cpu_seconds:.1f} times by CPU (target {TARGET_TIMES:g}), with "
        f"{save.peak_mb / copy.peak_mb:.1f} times less memory (target {TARGET_MEMORY_TIMES:g})."
    )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(line) for line in figures], indent=2) + "\n")


if __name__ == "__main__":
    main()
