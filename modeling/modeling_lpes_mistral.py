"""Mistral with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Mistral; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
MistralForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.mistral.modeling_mistral import (
    MistralDecoderLayer,
    MistralForCausalLM,
    MistralForSequenceClassification,
    MistralModel,
    MistralRotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesMistralConfig,
)


class LpesMistralRotaryEmbedding(LayerScaledRotaryEmbedding, MistralRotaryEmbedding):
    """Mistral's rotary embedding, its frequencies divided by each layer's factor."""


class LpesMistralDecoderLayer(LayerScaledDecoderLayer, MistralDecoderLayer):
    """Mistral's decoder layer with its own layer's (cos, sin)."""


class LpesMistralModel(LayerScaledModel, MistralModel):
    """The bare model: hidden states out."""

    config_class = LpesMistralConfig
    layer_class = LpesMistralDecoderLayer
    rotary_class = LpesMistralRotaryEmbedding
    _no_split_modules = ["LpesMistralDecoderLayer"]


class LpesMistralForCausalLM(LayerScaledForCausalLM, MistralForCausalLM):
    """The language model: logits out."""

    config_class = LpesMistralConfig
    model_class = LpesMistralModel


class LpesMistralForSequenceClassification(LayerScaledForSequenceClassification, MistralForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesMistralConfig
    model_class = LpesMistralModel
