"""Gemma 3 with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Gemma 3; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Gemma 3 has two such tables, one for layers that attend to everything and one for layers with a sliding
window. A layer's factor divides the frequencies of its own kind's table. To leave one kind of layers as
it is, name the other in config.json: "layer_rope_scaling_types": ["full_attention"].

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
Gemma3ForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3DecoderLayer,
    Gemma3ForCausalLM,
    Gemma3RotaryEmbedding,
    Gemma3TextModel,
)

from .layer_rope_scaling import (
    LENGTH_DEPENDENT,
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledForSequenceClassification,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesGemma3TextConfig,
)

if "layer_type" not in signature(Gemma3RotaryEmbedding.forward).parameters:
    raise ImportError("Gemma 3 with factors needs transformers 5: older ones keep its two tables apart")


class LpesGemma3TextRotaryEmbedding(LayerScaledRotaryEmbedding, Gemma3RotaryEmbedding):
    """Gemma 3's rotary embedding, its frequencies divided by each layer's factor."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str = "full_attention") -> Any:
        """What layers of one kind need to rotate; the model asks for each kind."""
        if self.rope_type[layer_type] in LENGTH_DEPENDENT:
            Gemma3RotaryEmbedding.forward(self, x, position_ids.max().reshape(1, 1), layer_type)
        inv_freq = getattr(self, f"{layer_type}_inv_freq")
        return self.tables(x, position_ids, inv_freq, getattr(self, f"{layer_type}_attention_scaling"))


class LpesGemma3TextDecoderLayer(LayerScaledDecoderLayer, Gemma3DecoderLayer):
    """Gemma 3's decoder layer with its own layer's (cos, sin)."""


class LpesGemma3TextModel(LayerScaledModel, Gemma3TextModel):
    """The bare model: hidden states out."""

    config_class = LpesGemma3TextConfig
    layer_class = LpesGemma3TextDecoderLayer
    rotary_class = LpesGemma3TextRotaryEmbedding
    _no_split_modules = ["LpesGemma3TextDecoderLayer"]


class LpesGemma3ForCausalLM(LayerScaledForCausalLM, Gemma3ForCausalLM):
    """The language model: logits out."""

    config_class = LpesGemma3TextConfig
    model_class = LpesGemma3TextModel


# Its base is not imported above: transformers before 4.57 lacks it, and shall say what it needs.
class LpesGemma3TextForSequenceClassification(
    LayerScaledForSequenceClassification, modeling_gemma3.Gemma3TextForSequenceClassification
):
    """A score for each label, from the last token."""

    config_class = LpesGemma3TextConfig
    model_class = LpesGemma3TextModel
