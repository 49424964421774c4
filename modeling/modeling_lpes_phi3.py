"""Phi-3 with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Phi-3; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
Phi3ForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.phi3.modeling_phi3 import (
    Phi3DecoderLayer,
    Phi3ForCausalLM,
    Phi3ForSequenceClassification,
    Phi3Model,
    Phi3RotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesPhi3Config,
)


class LpesPhi3RotaryEmbedding(LayerScaledRotaryEmbedding, Phi3RotaryEmbedding):
    """Phi-3's rotary embedding, its frequencies divided by each layer's factor."""


class LpesPhi3DecoderLayer(LayerScaledDecoderLayer, Phi3DecoderLayer):
    """Phi-3's decoder layer with its own layer's (cos, sin)."""


class LpesPhi3Model(LayerScaledModel, Phi3Model):
    """The bare model: hidden states out."""

    config_class = LpesPhi3Config
    layer_class = LpesPhi3DecoderLayer
    rotary_class = LpesPhi3RotaryEmbedding
    _no_split_modules = ["LpesPhi3DecoderLayer"]


class LpesPhi3ForCausalLM(LayerScaledForCausalLM, Phi3ForCausalLM):
    """The language model: logits out."""

    config_class = LpesPhi3Config
    model_class = LpesPhi3Model


class LpesPhi3ForSequenceClassification(LayerScaledForSequenceClassification, Phi3ForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesPhi3Config
    model_class = LpesPhi3Model
