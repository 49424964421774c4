"""What a context takes of a device's memory, on paper."""

from __future__ import annotations

from typing import Any

import torch

from lpes_bake.search.rows import PACKED_TOKENS


def memory_estimate(
    config: Any, tokens: int, dtype: torch.dtype, *, gradient: bool = True, checkpointing: bool = True
) -> int:
    """Bytes on paper for one context of `tokens` tokens: to score it, or with gradient=True to differentiate it.

    config: its weights are counted in dtype, quantised or not, as a Llama's: other families differ by little. Of a
    mixture of experts all count for the weights, and those that a token meets for a layer. With b bytes a number,
    hidden size h, q = heads · head_dim, k = key heads · head_dim, MLP size i, vocabulary v and L layers:

        weights       b · (v·h, twice unless tied, + L · (2·h·q + 2·h·k + 3·h·i + 2·h) + h)
        layer         tokens · (8·h + b · (4·q + 4·k + 3·i + rows)): what a layer keeps for its backward pass:
                      the input of both norms in float32; queries and keys before and behind rotation, their
                      rotated halves, values and output; gate, its activation and up; a mask of `rows` rows a
                      key head, PACKED_TOKENS at most
        logits        PACKED_TOKENS · v · (2·b + 8), at answer positions only
        scoring       weights + layer + logits + tokens · 2·L·k·b, a cache
        gradient      weights + L · layer + layer for the gradients of the layer at work + logits; with
                      checkpointing L · layer shrinks to tokens · L·h·b, the layers' inputs, and one layer

    A 7B Llama (Vicuna) in bfloat16 at 4096 tokens: 13.5 GB of weights, 16 GB in all with checkpointing, 36 GB without.
    """
    size = dtype.itemsize
    hidden, inner, layers = int(config.hidden_size), int(config.intermediate_size), int(config.num_hidden_layers)
    vocabulary = int(config.vocab_size)
    # GPT-NeoX has a key head for each head, and no name for it.
    heads = int(config.num_attention_heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    experts = int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)
    if experts:
        inner = int(getattr(config, "moe_intermediate_size", None) or inner)
    met = inner * int(config.num_experts_per_tok) if experts else inner
    head = int(getattr(config, "head_dim", None) or hidden // heads)
    queries, keys = heads * head, key_heads * head
    matrices = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner * (experts or 1) + 2 * hidden
    embeddings = vocabulary * hidden * (1 if config.tie_word_embeddings else 2)
    weights = size * (embeddings + layers * matrices + hidden)
    rows = heads // key_heads * PACKED_TOKENS
    layer = tokens * (8 * hidden + size * (4 * queries + 4 * keys + 3 * met + rows))
    logits = PACKED_TOKENS * vocabulary * (2 * size + 8)
    if not gradient:
        return weights + layer + logits + tokens * 2 * layers * keys * size
    kept = tokens * layers * hidden * size + layer if checkpointing else layers * layer
    return weights + kept + layer + logits
