"""OLMo 2 with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own OLMo 2; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
Olmo2ForCausalLM: the weights are untouched.
"""

from __future__ import annotations

import torch
import transformers
from transformers.models.olmo2.modeling_olmo2 import (
    Olmo2DecoderLayer,
    Olmo2ForCausalLM,
    Olmo2Model,
    Olmo2RotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesOlmo2Config,
    Tables,
)

FLOAT32_TABLES = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (4, 52)


class LpesOlmo2RotaryEmbedding(LayerScaledRotaryEmbedding, Olmo2RotaryEmbedding):
    """OLMo 2's rotary embedding, its frequencies divided by each layer's factor."""

    def cos_sin(self, position_ids: torch.Tensor, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype) -> Tables:
        """As in other families, but in float32 whatever the model's dtype is, where OLMo 2's own tables are."""
        return super().cos_sin(position_ids, inv_freq, scale, torch.float32 if FLOAT32_TABLES else dtype)


class LpesOlmo2DecoderLayer(LayerScaledDecoderLayer, Olmo2DecoderLayer):
    """OLMo 2's decoder layer with its own layer's (cos, sin)."""


class LpesOlmo2Model(LayerScaledModel, Olmo2Model):
    """The bare model: hidden states out."""

    config_class = LpesOlmo2Config
    layer_class = LpesOlmo2DecoderLayer
    rotary_class = LpesOlmo2RotaryEmbedding
    _no_split_modules = ["LpesOlmo2DecoderLayer"]


class LpesOlmo2ForCausalLM(LayerScaledForCausalLM, Olmo2ForCausalLM):
    """The language model: logits out."""

    config_class = LpesOlmo2Config
    model_class = LpesOlmo2Model
