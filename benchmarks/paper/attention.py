"""How much attention the evidence of key-value retrieval gets, by gold position, before and after scaling.

    python -m benchmarks.paper.attention MODEL --factors FILE --out FILE [--task kv,pairs=16] [--contexts 10]

The mass is the attention that the prompt's last token, which predicts the answer's first, pays to the tokens of the
record asked for (key and value). Only that token's attention is computed eagerly, behind a cache of the others: the
matrices of whole prompts would take gigabytes a layer.
"""

from __future__ import annotations

import argparse
import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from benchmarks.paper.measuring import contexts_of, factors_of, load, opened, run, task_options_of, write
from lpes_bake.search.errors import InputError
from lpes_bake.search.models import cache_argument, device_of, set_factors
from lpes_bake.search.prompts import Encoded
from lpes_bake.search.tasks import Example


@torch.inference_mode()
def attention_mass(model: Any, prompt: Sequence[int], span: range) -> NDArray[np.float64]:
    """(layers, heads): the share of the last token's attention that goes to the tokens in `span`.

    model: what `load_scaled` gives. prompt: token ids.
    """
    masses = []

    def look(module: Any, arguments: Any, output: Any) -> None:
        masses.append(output[1][0, :, -1, span.start : span.stop].double().sum(-1).cpu().numpy())

    ids = torch.tensor([list(prompt)], device=device_of(model.get_input_embeddings()))
    cache = {cache_argument(model): DynamicCache()}
    model.base_model(input_ids=ids[:, :-1], use_cache=True, **cache)
    config, before = model.config, model.config._attn_implementation
    handles = [layer.self_attn.register_forward_hook(look) for layer in model.base_model.layers]
    try:
        config._attn_implementation = "eager"  # the one that hands its attention out
        model.base_model(input_ids=ids[:, -1:], use_cache=True, **cache)
    finally:
        config._attn_implementation = before
        for handle in handles:
            handle.remove()
    return np.stack(masses)


def evidence_of(example: Example) -> str:
    """The record asked for, as it stands among the others. InputError for a prompt of another task."""
    asked = re.search(r'\nKey: "(.*)"\n', example.prompt)
    record = f'"{asked[1]}": "{example.answer}"' if asked else ""
    if not record or example.prompt.count(record) != 1:
        raise InputError("only prompts of key-value retrieval say where their evidence stands; give --task kv")
    return record


def tokens_of(evidence: str, prompt: Sequence[int], tokenizer: Any) -> range:
    """The tokens that hold a part of the text `evidence`, which stands in the prompt once.

    By the lengths of what the first 0, 1, 2, … tokens decode to, whatever format the prompt is written in.
    """

    def length(tokens: int) -> int:
        return len(tokenizer.decode(prompt[:tokens], clean_up_tokenization_spaces=False))

    start = tokenizer.decode(prompt, clean_up_tokenization_spaces=False).index(evidence)
    counts = range(len(prompt) + 1)
    first = bisect_right(counts, start, key=length) - 1
    return range(first, bisect_left(counts, start + len(evidence), key=length))


def by_position(
    model: Any, tokenizer: Any, contexts: Sequence[Sequence[Encoded]], factors: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(positions, layers): the mass, mean over heads and contexts; and (positions,): the evidence's share of the
    prompt's tokens, which is its mass where attention is even."""
    set_factors(model, factors)
    masses, shares = [], []
    for context in contexts:
        spans = [tokens_of(evidence_of(one.example), one.prompt, tokenizer) for one in context]
        found = [attention_mass(model, one.prompt, span) for one, span in zip(context, spans, strict=True)]
        masses.append([one.mean(1) for one in found])
        shares.append([len(span) / len(one.prompt) for one, span in zip(context, spans, strict=True)])
    return np.mean(masses, axis=0), np.mean(shares, axis=0)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    return task_options_of(__doc__)


def main(arguments: list[str] | None = None) -> None:
    """Measure the base model, then the factors."""
    options = parser().parse_args(arguments)
    source, tokenizer = opened(options.model)
    candidates = factors_of(source, options.factors)
    contexts = contexts_of(options, source, tokenizer)
    for question in itertools.chain(*contexts):
        evidence_of(question.example)
    model = load(source)
    identity = (1.0,) * source.num_hidden_layers
    rows = []
    for label, factors in zip(["base", *map(str, options.factors)], [identity, *candidates], strict=True):
        mass, share = by_position(model, tokenizer, contexts, factors)
        rows.append({"factors": label, "by_position": mass.mean(1).tolist(), "by_layer": mass.tolist()})
    content = {
        "model": options.model,
        "task": options.task,
        "contexts": len(contexts),
        "positions": [one.example.position for one in contexts[0]],
        "share_of_tokens": share.tolist(),
        "candidates": rows,
    }
    write(options.out, content)


if __name__ == "__main__":
    run(main)
