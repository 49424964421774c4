"""StableLM with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own StableLM; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
StableLmForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.stablelm.modeling_stablelm import (
    StableLmDecoderLayer,
    StableLmForCausalLM,
    StableLmForSequenceClassification,
    StableLmModel,
    StableLmRotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesStableLmConfig,
)


class LpesStableLmRotaryEmbedding(LayerScaledRotaryEmbedding, StableLmRotaryEmbedding):
    """StableLM's rotary embedding, its frequencies divided by each layer's factor."""


class LpesStableLmDecoderLayer(LayerScaledDecoderLayer, StableLmDecoderLayer):
    """StableLM's decoder layer with its own layer's (cos, sin)."""


class LpesStableLmModel(LayerScaledModel, StableLmModel):
    """The bare model: hidden states out."""

    config_class = LpesStableLmConfig
    layer_class = LpesStableLmDecoderLayer
    rotary_class = LpesStableLmRotaryEmbedding
    _no_split_modules = ["LpesStableLmDecoderLayer"]


class LpesStableLmForCausalLM(LayerScaledForCausalLM, StableLmForCausalLM):
    """The language model: logits out."""

    config_class = LpesStableLmConfig
    model_class = LpesStableLmModel


class LpesStableLmForSequenceClassification(LayerScaledForSequenceClassification, StableLmForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesStableLmConfig
    model_class = LpesStableLmModel
