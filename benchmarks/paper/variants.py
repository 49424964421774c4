"""Copies of factors that are shuffled over the layers, or noisy: what a smooth curve is compared with.

    python -m benchmarks.paper.variants FACTORS FOLDER --draws 5 --noise 0.1

Writes shuffled-0.json, … and noisy-0.json, … to FOLDER. Draw k is seeded with k.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.paper.measuring import run
from lpes_bake.factors import load_factors, save_text
from lpes_bake.search.curve import FACTOR_DECIMALS


def shuffled(factors: Sequence[float], seed: int) -> list[float]:
    """The same values, (layers,), in another order of the layers."""
    return [float(one) for one in np.random.default_rng(seed).permutation(factors)]


def noisy(factors: Sequence[float], noise: float, seed: int) -> list[float]:
    """Each value, (layers,), times e^(noise · z) with z ~ N(0, 1), so that it stays positive and on average, in the
    logarithm, where it was (our choice)."""
    z = np.random.default_rng(seed).standard_normal(len(factors))
    return [round(float(one), FACTOR_DECIMALS) for one in np.array(factors) * np.exp(noise * z)]


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("factors", type=Path)
    options.add_argument("folder", type=Path)
    options.add_argument("--draws", type=int, default=5, help="of each kind")
    options.add_argument("--noise", type=float, default=0.1, help="standard deviation of the logarithm")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Write the files."""
    options = parser().parse_args(arguments)
    factors = load_factors(options.factors).layer_rope_scaling
    options.folder.mkdir(parents=True, exist_ok=True)
    for draw in range(options.draws):
        for kind, values in (("shuffled", shuffled(factors, draw)), ("noisy", noisy(factors, options.noise, draw))):
            save_text(options.folder / f"{kind}-{draw}.json", json.dumps(values) + "\n")


if __name__ == "__main__":
    run(main)
