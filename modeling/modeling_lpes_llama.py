"""Llama with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Llama; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
LlamaForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    LlamaRotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesLlamaConfig,
)


class LpesLlamaRotaryEmbedding(LayerScaledRotaryEmbedding, LlamaRotaryEmbedding):
    """Llama's rotary embedding, its frequencies divided by each layer's factor."""


class LpesLlamaDecoderLayer(LayerScaledDecoderLayer, LlamaDecoderLayer):
    """Llama's decoder layer with its own layer's (cos, sin)."""


class LpesLlamaModel(LayerScaledModel, LlamaModel):
    """The bare model: hidden states out."""

    config_class = LpesLlamaConfig
    layer_class = LpesLlamaDecoderLayer
    rotary_class = LpesLlamaRotaryEmbedding
    _no_split_modules = ["LpesLlamaDecoderLayer"]


class LpesLlamaForCausalLM(LayerScaledForCausalLM, LlamaForCausalLM):
    """The language model: logits out."""

    config_class = LpesLlamaConfig
    model_class = LpesLlamaModel


class LpesLlamaForSequenceClassification(LayerScaledForSequenceClassification, LlamaForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesLlamaConfig
    model_class = LpesLlamaModel
