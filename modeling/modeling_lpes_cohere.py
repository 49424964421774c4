"""Cohere with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Cohere; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
CohereForCausalLM: the weights are untouched.
"""

from __future__ import annotations

import torch
from transformers.models.cohere.modeling_cohere import (
    CohereDecoderLayer,
    CohereForCausalLM,
    CohereModel,
    CohereRotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledForCausalLM,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesCohereConfig,
)


class LpesCohereRotaryEmbedding(LayerScaledRotaryEmbedding, CohereRotaryEmbedding):
    """Cohere's rotary embedding, its frequencies divided by each layer's factor."""

    def spread(self, half: torch.Tensor) -> torch.Tensor:
        """Here, neighbouring dimensions share a frequency."""
        return half.repeat_interleave(2, dim=-1)


class LpesCohereDecoderLayer(LayerScaledDecoderLayer, CohereDecoderLayer):
    """Cohere's decoder layer with its own layer's (cos, sin)."""


class LpesCohereModel(LayerScaledModel, CohereModel):
    """The bare model: hidden states out."""

    config_class = LpesCohereConfig
    layer_class = LpesCohereDecoderLayer
    rotary_class = LpesCohereRotaryEmbedding
    _no_split_modules = ["LpesCohereDecoderLayer"]


class LpesCohereForCausalLM(LayerScaledForCausalLM, CohereForCausalLM):
    """The language model: logits out."""

    config_class = LpesCohereConfig
    model_class = LpesCohereModel
