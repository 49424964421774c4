"""SmolLM3 with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own SmolLM3; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
SmolLM3ForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.smollm3.modeling_smollm3 import (
    SmolLM3DecoderLayer,
    SmolLM3ForCausalLM,
    SmolLM3ForSequenceClassification,
    SmolLM3Model,
    SmolLM3RotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesSmolLM3Config,
)


class LpesSmolLM3RotaryEmbedding(LayerScaledRotaryEmbedding, SmolLM3RotaryEmbedding):
    """SmolLM3's rotary embedding, its frequencies divided by each layer's factor."""


class LpesSmolLM3DecoderLayer(LayerScaledDecoderLayer, SmolLM3DecoderLayer):
    """SmolLM3's decoder layer with its own layer's (cos, sin)."""


class LpesSmolLM3Model(LayerScaledModel, SmolLM3Model):
    """The bare model: hidden states out."""

    config_class = LpesSmolLM3Config
    layer_class = LpesSmolLM3DecoderLayer
    rotary_class = LpesSmolLM3RotaryEmbedding
    _no_split_modules = ["LpesSmolLM3DecoderLayer"]


class LpesSmolLM3ForCausalLM(LayerScaledForCausalLM, SmolLM3ForCausalLM):
    """The language model: logits out."""

    config_class = LpesSmolLM3Config
    model_class = LpesSmolLM3Model


class LpesSmolLM3ForSequenceClassification(LayerScaledForSequenceClassification, SmolLM3ForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesSmolLM3Config
    model_class = LpesSmolLM3Model
