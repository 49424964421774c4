"""Gemma 2 with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Gemma 2; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
Gemma2ForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.gemma2.modeling_gemma2 import (
    Gemma2DecoderLayer,
    Gemma2ForCausalLM,
    Gemma2ForSequenceClassification,
    Gemma2Model,
    Gemma2RotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesGemma2Config,
)


class LpesGemma2RotaryEmbedding(LayerScaledRotaryEmbedding, Gemma2RotaryEmbedding):
    """Gemma 2's rotary embedding, its frequencies divided by each layer's factor."""


class LpesGemma2DecoderLayer(LayerScaledDecoderLayer, Gemma2DecoderLayer):
    """Gemma 2's decoder layer with its own layer's (cos, sin)."""


class LpesGemma2Model(LayerScaledModel, Gemma2Model):
    """The bare model: hidden states out."""

    config_class = LpesGemma2Config
    layer_class = LpesGemma2DecoderLayer
    rotary_class = LpesGemma2RotaryEmbedding
    _no_split_modules = ["LpesGemma2DecoderLayer"]


class LpesGemma2ForCausalLM(LayerScaledForCausalLM, Gemma2ForCausalLM):
    """The language model: logits out."""

    config_class = LpesGemma2Config
    model_class = LpesGemma2Model


class LpesGemma2ForSequenceClassification(LayerScaledForSequenceClassification, Gemma2ForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesGemma2Config
    model_class = LpesGemma2Model
