"""Mixtral with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Mixtral; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
MixtralForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.mixtral.modeling_mixtral import (
    MixtralDecoderLayer,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    MixtralModel,
    MixtralRotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesMixtralConfig,
)


class LpesMixtralRotaryEmbedding(LayerScaledRotaryEmbedding, MixtralRotaryEmbedding):
    """Mixtral's rotary embedding, its frequencies divided by each layer's factor."""


class LpesMixtralDecoderLayer(LayerScaledDecoderLayer, MixtralDecoderLayer):
    """Mixtral's decoder layer with its own layer's (cos, sin)."""


class LpesMixtralModel(LayerScaledModel, MixtralModel):
    """The bare model: hidden states out."""

    config_class = LpesMixtralConfig
    layer_class = LpesMixtralDecoderLayer
    rotary_class = LpesMixtralRotaryEmbedding
    _no_split_modules = ["LpesMixtralDecoderLayer"]


class LpesMixtralForCausalLM(LayerScaledForCausalLM, MixtralForCausalLM):
    """The language model: logits out."""

    config_class = LpesMixtralConfig
    model_class = LpesMixtralModel


class LpesMixtralForSequenceClassification(LayerScaledForSequenceClassification, MixtralForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesMixtralConfig
    model_class = LpesMixtralModel
