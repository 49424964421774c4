"""Qwen3 with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Qwen3; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
Qwen3ForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    Qwen3RotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesQwen3Config,
)


class LpesQwen3RotaryEmbedding(LayerScaledRotaryEmbedding, Qwen3RotaryEmbedding):
    """Qwen3's rotary embedding, its frequencies divided by each layer's factor."""


class LpesQwen3DecoderLayer(LayerScaledDecoderLayer, Qwen3DecoderLayer):
    """Qwen3's decoder layer with its own layer's (cos, sin)."""


class LpesQwen3Model(LayerScaledModel, Qwen3Model):
    """The bare model: hidden states out."""

    config_class = LpesQwen3Config
    layer_class = LpesQwen3DecoderLayer
    rotary_class = LpesQwen3RotaryEmbedding
    _no_split_modules = ["LpesQwen3DecoderLayer"]


class LpesQwen3ForCausalLM(LayerScaledForCausalLM, Qwen3ForCausalLM):
    """The language model: logits out."""

    config_class = LpesQwen3Config
    model_class = LpesQwen3Model


class LpesQwen3ForSequenceClassification(LayerScaledForSequenceClassification, Qwen3ForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesQwen3Config
    model_class = LpesQwen3Model
