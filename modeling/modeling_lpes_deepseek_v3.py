"""DeepSeek-V3 with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own DeepSeek-V3; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
DeepseekV3ForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3ForCausalLM,
    DeepseekV3Model,
    DeepseekV3RotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesDeepseekV3Config,
)


class LpesDeepseekV3RotaryEmbedding(LayerScaledRotaryEmbedding, DeepseekV3RotaryEmbedding):
    """DeepSeek-V3's rotary embedding, its frequencies divided by each layer's factor."""


class LpesDeepseekV3DecoderLayer(LayerScaledDecoderLayer, DeepseekV3DecoderLayer):
    """DeepSeek-V3's decoder layer with its own layer's (cos, sin)."""


class LpesDeepseekV3Model(LayerScaledModel, DeepseekV3Model):
    """The bare model: hidden states out."""

    config_class = LpesDeepseekV3Config
    layer_class = LpesDeepseekV3DecoderLayer
    rotary_class = LpesDeepseekV3RotaryEmbedding
    _no_split_modules = ["LpesDeepseekV3DecoderLayer"]


class LpesDeepseekV3ForCausalLM(LayerScaledForCausalLM, DeepseekV3ForCausalLM):
    """The language model: logits out."""

    config_class = LpesDeepseekV3Config
    model_class = LpesDeepseekV3Model
