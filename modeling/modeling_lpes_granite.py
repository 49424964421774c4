"""Granite with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Granite; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
GraniteForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.granite.modeling_granite import (
    GraniteDecoderLayer,
    GraniteForCausalLM,
    GraniteModel,
    GraniteRotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesGraniteConfig,
)


class LpesGraniteRotaryEmbedding(LayerScaledRotaryEmbedding, GraniteRotaryEmbedding):
    """Granite's rotary embedding, its frequencies divided by each layer's factor."""


class LpesGraniteDecoderLayer(LayerScaledDecoderLayer, GraniteDecoderLayer):
    """Granite's decoder layer with its own layer's (cos, sin)."""


class LpesGraniteModel(LayerScaledModel, GraniteModel):
    """The bare model: hidden states out."""

    config_class = LpesGraniteConfig
    layer_class = LpesGraniteDecoderLayer
    rotary_class = LpesGraniteRotaryEmbedding
    _no_split_modules = ["LpesGraniteDecoderLayer"]


class LpesGraniteForCausalLM(LayerScaledForCausalLM, GraniteForCausalLM):
    """The language model: logits out."""

    config_class = LpesGraniteConfig
    model_class = LpesGraniteModel
