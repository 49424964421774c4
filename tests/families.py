"""The checklist's tiny configs: one entry a family, as docs/adding_a_family.md says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lpes_bake.search.families import FAMILIES, Family

TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    # Large, so that logits depend strongly on positions and a lost factor cannot hide.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class TinyFamily:
    """What the tests need to know about a family, written by hand from transformers' source.

    config: changes to TINY. ropes: the RoPE types that the checklist goes through. linear: whether "linear"
    is among those that the library takes. interleaved: whether
    neighbouring dimensions share a frequency. plain: whether the scorer takes each prompt by itself.
    """

    config: dict[str, Any] = field(default_factory=dict)
    ropes: tuple[str, ...] = ("default", "yarn")
    linear: bool = True
    interleaved: bool = False
    plain: bool = False


ALL_ROPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
TINY_FAMILIES = {
    "llama": TinyFamily(ropes=ALL_ROPES),
    "qwen2": TinyFamily(ropes=ALL_ROPES),
    "mistral": TinyFamily({"sliding_window": None}),
    "qwen3": TinyFamily({"head_dim": 48}),
    "phi3": TinyFamily({"original_max_position_embeddings": 512}, ("default", "longrope"), linear=False),
    "olmo2": TinyFamily(),
    "granite": TinyFamily({"attention_multiplier": 0.2, "logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "smollm3": TinyFamily({"no_rope_layers": [1, 0, 1, 1]}),
    "mixtral": TinyFamily({"num_local_experts": 4, "head_dim": 32}, ("default", "linear")),
    "qwen3_moe": TinyFamily({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}),
    "stablelm": TinyFamily({"partial_rotary_factor": 0.5}),
    "gpt_neox": TinyFamily({"rotary_pct": 0.5}),
    # Its attention is eager: slow.
    "gemma2": TinyFamily({"head_dim": 32, "num_attention_heads": 2, "sliding_window": 64}, ("default",), plain=True),
    "gemma3_text": TinyFamily(
        {"head_dim": 32, "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"] * 2},
        ("default",),
        plain=True,
    ),
    "cohere": TinyFamily({"logit_scale": 0.5}, interleaved=True),
    "glm4": TinyFamily({"head_dim": 32}),
    "deepseek_v3": TinyFamily(
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 16,
            "v_head_dim": 24,
            "first_k_dense_replace": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 48,
        }
    ),
}


def family_named(model_type: str) -> Family:
    """The entry in search/families.py."""
    return next(family for family in FAMILIES if family.base_model_type == model_type)
