"""Attention of one's own in chosen layers of a transformers model, whatever its family's code does around it.

The layers get tables that rotate nothing (cos 1, sin 0), so that queries, keys and what is cached come out unrotated,
and an attention function in transformers' registry that rotates them as the method wants.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lpes_bake.modeling.layer_rope_scaling import LENGTH_DEPENDENT
from lpes_bake.search.errors import InputError
from lpes_bake.source import Source, rope_settings

# The name in transformers' registry.
OWN_ATTENTION = "lpes_own"

# Families whose attention is Llama's but for biases, norms of single heads and a window: separate q_proj and k_proj,
# and halves of a whole head that are rotated against each other.
LLAMA_LIKE = ("llama", "qwen2", "mistral", "qwen3", "qwen3_moe", "mixtral", "granite")


class Attend(Protocol):
    """The attention of one layer."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        scale: float,
    ) -> Tensor:
        """query (B, H, T, d); key, value (B, key heads, S, d), the cache's first; positions (B, T) of the queries.

        mask: (B, 1, T, S), true where a query may look, or None for all that is not behind it. Returns (B, H, T, d).
        """


def require_llama_like(source: Source, method: str) -> None:
    """InputError for a model whose attention cannot be taken over."""
    if source.family.base_model_type not in LLAMA_LIKE:
        raise InputError(
            f"{method} does not know the attention of {source.name} (model_type {source.family.base_model_type!r}); it "
            f"knows: {', '.join(LLAMA_LIKE)}"
        )
    rope_type = rope_settings(source.config, source.name)["rope_type"]
    if rope_type in LENGTH_DEPENDENT:
        raise InputError(
            f"{method} cannot be joined with RoPE type {rope_type!r} of {source.name}, whose frequencies change with "
            "the length of the prompt"
        )


def take_over(model: Any, layers: Iterable[int], attend: Attend) -> None:
    """Let `attend` compute the attention of these layers from now on."""
    for index in layers:
        module = model.base_model.layers[index].self_attn
        module.config = copy.copy(module.config)
        module.config._attn_implementation = OWN_ATTENTION
        module.attend = attend
        module.register_forward_pre_hook(_without_rotation, with_kwargs=True)


def _without_rotation(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    cos, sin = kwargs["position_embeddings"]
    return args, {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


def _own_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    position_ids: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: returns (B, T, H, d)."""
    seen = module.attend(module.layer_idx, query, key, value, attention_mask, position_ids, scaling)
    return seen.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS[OWN_ATTENTION] = _own_attention


def key_positions(positions: Tensor, keys: int) -> Tensor:
    """(B, keys) positions of all keys, from those (B, T) of the last ones. Negative ones are left padding."""
    return torch.arange(1 - keys, 1, device=positions.device) + positions[:, -1:]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x (B, heads, tokens, d), with tables (B, heads or 1, tokens, d)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax attention (B, H, T, d) of rotated queries and keys; heads of keys and values may be fewer than H."""
    heads = query.shape[1]
    key, value = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (key, value))
    causal = mask is None and query.shape[2] > 1
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale
    )
