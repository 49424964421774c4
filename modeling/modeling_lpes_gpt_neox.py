"""GPT-NeoX with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own GPT-NeoX; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
GPTNeoXForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXForCausalLM,
    GPTNeoXForSequenceClassification,
    GPTNeoXLayer,
    GPTNeoXModel,
    GPTNeoXRotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesGPTNeoXConfig,
)


class LpesGPTNeoXRotaryEmbedding(LayerScaledRotaryEmbedding, GPTNeoXRotaryEmbedding):
    """GPT-NeoX's rotary embedding, its frequencies divided by each layer's factor."""


class LpesGPTNeoXLayer(LayerScaledDecoderLayer, GPTNeoXLayer):
    """GPT-NeoX's decoder layer with its own layer's (cos, sin)."""


class LpesGPTNeoXModel(LayerScaledModel, GPTNeoXModel):
    """The bare model: hidden states out."""

    config_class = LpesGPTNeoXConfig
    layer_class = LpesGPTNeoXLayer
    rotary_class = LpesGPTNeoXRotaryEmbedding
    _no_split_modules = ["LpesGPTNeoXLayer"]


class LpesGPTNeoXForCausalLM(LayerScaledForCausalLM, GPTNeoXForCausalLM):
    """The language model: logits out."""

    config_class = LpesGPTNeoXConfig
    model_class = LpesGPTNeoXModel


class LpesGPTNeoXForSequenceClassification(LayerScaledForSequenceClassification, GPTNeoXForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesGPTNeoXConfig
    model_class = LpesGPTNeoXModel
