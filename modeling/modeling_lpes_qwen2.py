"""Qwen2 with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Qwen2; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
Qwen2ForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Model,
    Qwen2RotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesQwen2Config,
)


class LpesQwen2RotaryEmbedding(LayerScaledRotaryEmbedding, Qwen2RotaryEmbedding):
    """Qwen2's rotary embedding, its frequencies divided by each layer's factor."""


class LpesQwen2DecoderLayer(LayerScaledDecoderLayer, Qwen2DecoderLayer):
    """Qwen2's decoder layer with its own layer's (cos, sin)."""


class LpesQwen2Model(LayerScaledModel, Qwen2Model):
    """The bare model: hidden states out."""

    config_class = LpesQwen2Config
    layer_class = LpesQwen2DecoderLayer
    rotary_class = LpesQwen2RotaryEmbedding
    _no_split_modules = ["LpesQwen2DecoderLayer"]


class LpesQwen2ForCausalLM(LayerScaledForCausalLM, Qwen2ForCausalLM):
    """The language model: logits out."""

    config_class = LpesQwen2Config
    model_class = LpesQwen2Model


class LpesQwen2ForSequenceClassification(LayerScaledForSequenceClassification, Qwen2ForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesQwen2Config
    model_class = LpesQwen2Model
