"""GLM-4 with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own GLM-4; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
Glm4ForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.glm4.modeling_glm4 import (
    Glm4DecoderLayer,
    Glm4ForCausalLM,
    Glm4ForSequenceClassification,
    Glm4Model,
    Glm4RotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesGlm4Config,
)


class LpesGlm4RotaryEmbedding(LayerScaledRotaryEmbedding, Glm4RotaryEmbedding):
    """GLM-4's rotary embedding, its frequencies divided by each layer's factor."""


class LpesGlm4DecoderLayer(LayerScaledDecoderLayer, Glm4DecoderLayer):
    """GLM-4's decoder layer with its own layer's (cos, sin)."""


class LpesGlm4Model(LayerScaledModel, Glm4Model):
    """The bare model: hidden states out."""

    config_class = LpesGlm4Config
    layer_class = LpesGlm4DecoderLayer
    rotary_class = LpesGlm4RotaryEmbedding
    _no_split_modules = ["LpesGlm4DecoderLayer"]


class LpesGlm4ForCausalLM(LayerScaledForCausalLM, Glm4ForCausalLM):
    """The language model: logits out."""

    config_class = LpesGlm4Config
    model_class = LpesGlm4Model


class LpesGlm4ForSequenceClassification(LayerScaledForSequenceClassification, Glm4ForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesGlm4Config
    model_class = LpesGlm4Model
