"""Qwen3-MoE with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Qwen3-MoE; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
Qwen3MoeForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeDecoderLayer,
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
    Qwen3MoeModel,
    Qwen3MoeRotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesQwen3MoeConfig,
)


class LpesQwen3MoeRotaryEmbedding(LayerScaledRotaryEmbedding, Qwen3MoeRotaryEmbedding):
    """Qwen3-MoE's rotary embedding, its frequencies divided by each layer's factor."""


class LpesQwen3MoeDecoderLayer(LayerScaledDecoderLayer, Qwen3MoeDecoderLayer):
    """Qwen3-MoE's decoder layer with its own layer's (cos, sin)."""


class LpesQwen3MoeModel(LayerScaledModel, Qwen3MoeModel):
    """The bare model: hidden states out."""

    config_class = LpesQwen3MoeConfig
    layer_class = LpesQwen3MoeDecoderLayer
    rotary_class = LpesQwen3MoeRotaryEmbedding
    _no_split_modules = ["LpesQwen3MoeDecoderLayer"]


class LpesQwen3MoeForCausalLM(LayerScaledForCausalLM, Qwen3MoeForCausalLM):
    """The language model: logits out."""

    config_class = LpesQwen3MoeConfig
    model_class = LpesQwen3MoeModel


class LpesQwen3MoeForSequenceClassification(LayerScaledForSequenceClassification, Qwen3MoeForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesQwen3MoeConfig
    model_class = LpesQwen3MoeModel
