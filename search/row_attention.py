"""Attention of rows, as transformers calls it: causal at their beginning, by a mask where questions part.

Importing this module puts it into transformers' registry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lpes_bake.search.models import length_dependent

# The name that `row_attention` goes by in transformers' registry.
ROW_ATTENTION = "lpes_rows"


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of rows: as many last queries as `attention_mask` has rows are masked by it, those before are causal.

    query: (batch, heads, queries, head_dim); key: (batch, key heads, keys, head_dim), the cache's first; value: the
    same, or narrower. attention_mask: (batch, 1, masked, keys), true where a query may look. Returns (batch, queries,
    heads, width of value). A mask for all queries would keep fast kernels out and be of quadratic size.
    """
    batch, heads, queries, width = query.shape
    group = heads // key.shape[1]
    masked = attention_mask.shape[2]
    shared, known = queries - masked, key.shape[2] - masked
    parts = []
    if shared:
        beginning = query[:, :, :shared], key[:, :, :known], value[:, :, :known]
        if shared == known:
            parts.append(sdpa_attention_forward(module, *beginning, None, scaling=scaling)[0])
        else:
            # Behind a cache, is_causal would align the first query with the first key.
            first, *others = beginning
            keys, values = (one.repeat_interleave(group, dim=1) for one in others)
            mask = causal_lower_right(shared, known)
            seen = torch.nn.functional.scaled_dot_product_attention(first, keys, values, attn_mask=mask, scale=scaling)
            parts.append(seen.transpose(1, 2))
    # Heads that share keys and values become rows of one head, so that nothing is copied for each of them.
    folded = query[:, :, shared:].reshape(batch, -1, group * masked, width)
    added = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask.repeat(1, 1, group, 1), scale=scaling
    )
    parts.append(added.reshape(batch, heads, masked, -1).transpose(1, 2))
    return torch.cat(parts, dim=1), None


ALL_ATTENTION_FUNCTIONS[ROW_ATTENTION] = row_attention


def rows_fit(model: Any, longest: int) -> bool:
    """Whether `row_attention` gives what the model's own attention gives, for prompts of up to `longest` tokens.

    It does not for frequencies that depend on the length of a call (dynamic, longrope), for a window that
    slides within a prompt, and for attention scores that are capped (Gemma 2).
    """
    config = model.config
    if length_dependent(model) or getattr(config, "attn_logit_softcapping", None):
        return False
    kinds = getattr(config, "layer_types", None)
    slides = getattr(config, "use_sliding_window", True) if kinds is None else {*kinds} != {"full_attention"}
    window = getattr(config, "sliding_window", None)
    return not slides or window is None or longest <= window
