"""How far factors move a model's hidden states from the base model's, layer by layer, on the same prompts.

    python -m benchmarks.paper.deviation MODEL --factors FILE --factors FILE --out FILE [--task kv] [--contexts 10]

We know no formula of the paper's for its "representation deviation", so there are three measures, each a mean over the
tokens of a prompt, then over prompts. With h and h' a token's states behind a layer in the base and the scaled model:

- relative L2: |h' − h| / |h|;
- 1 − cosine of h and h';
- step: what the layer's own step has changed, |cos(h', h'₋) − cos(h, h₋)|, h₋ being the state before the layer. It
  says how much of the layer-to-layer structure is disturbed.

The state behind the last layer is the one behind the final norm, as transformers hands it out.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.paper.measuring import contexts_of, factors_of, load, opened, run, task_options_of, write
from lpes_bake.search.models import device_of, set_factors

MEASURES = ("relative_l2", "one_minus_cosine", "step")


@dataclass(frozen=True)
class Deviation:
    """Of one candidate, each (layers,); 0 where nothing is moved."""

    relative_l2: NDArray[np.float64]
    one_minus_cosine: NDArray[np.float64]
    step: NDArray[np.float64]


def deviations(model: Any, prompts: Sequence[Sequence[int]], candidates: Sequence[Sequence[float]]) -> list[Deviation]:
    """The deviation under each candidate, factors one a layer. model: what `load_scaled` gives. prompts: token ids."""
    layers = model.config.num_hidden_layers
    sums = np.zeros((len(candidates), len(MEASURES), layers))
    for prompt in prompts:
        base = hidden_states(model, prompt, [1.0] * layers)
        for i, factors in enumerate(candidates):
            sums[i] += compare(base, hidden_states(model, prompt, factors))
    return [Deviation(*measures) for measures in sums / len(prompts)]


@torch.inference_mode()
def hidden_states(model: Any, prompt: Sequence[int], factors: Sequence[float]) -> tuple[torch.Tensor, ...]:
    """The embeddings and what stands behind each layer, layers + 1 of (tokens, hidden_size)."""
    set_factors(model, factors)
    ids = torch.tensor([list(prompt)], device=device_of(model.get_input_embeddings()))
    states = model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    return tuple(one[0] for one in states)


def compare(base: Sequence[torch.Tensor], scaled: Sequence[torch.Tensor]) -> NDArray[np.float64]:
    """(measures, layers) of one prompt. Layer by layer in float32, so that no second copy of all states is made."""
    columns = []
    for (before, after), (scaled_before, scaled_after) in zip(pairs(base), pairs(scaled), strict=True):
        moved = (scaled_after - after).norm(dim=-1) / after.norm(dim=-1)
        # |a − b|² / 2 = 1 − cos(a, b) of unit vectors, and exactly 0 where they are equal.
        turned = (unit(scaled_after) - unit(after)).square().sum(-1) / 2
        step = ((unit(scaled_before) * unit(scaled_after)).sum(-1) - (unit(before) * unit(after)).sum(-1)).abs()
        columns.append([float(one.mean()) for one in (moved, turned, step)])
    return np.asarray(np.array(columns).T)


def pairs(states: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The states before and behind each layer."""
    return list(itertools.pairwise(states))


def unit(states: torch.Tensor) -> torch.Tensor:
    """The same directions with length 1."""
    return torch.nn.functional.normalize(states.float(), dim=-1)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    return task_options_of(__doc__)


def main(arguments: list[str] | None = None) -> None:
    """Measure, with one question of each context: the one in the middle."""
    options = parser().parse_args(arguments)
    source, tokenizer = opened(options.model)
    candidates = factors_of(source, options.factors)
    contexts = contexts_of(options, source, tokenizer)
    found = deviations(load(source), [context[len(context) // 2].prompt for context in contexts], candidates)
    rows = [
        {"factors": str(path), **{name: getattr(one, name).tolist() for name in MEASURES}}
        for path, one in zip(options.factors, found, strict=True)
    ]
    write(options.out, {"model": options.model, "task": options.task, "prompts": len(contexts), "candidates": rows})


if __name__ == "__main__":
    run(main)
