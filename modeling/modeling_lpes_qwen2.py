"""Qwen2 with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Qwen2; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
Qwen2ForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from torch import nn
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Model,
    Qwen2PreTrainedModel,
    Qwen2RotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
    LayerScaledModel,
    LayerScaledRotaryEmbedding,
    LpesQwen2Config,
)


class LpesQwen2RotaryEmbedding(LayerScaledRotaryEmbedding, Qwen2RotaryEmbedding):
    """Qwen2's rotary embedding, its frequencies divided by each layer's factor."""


class LpesQwen2DecoderLayer(LayerScaledDecoderLayer, Qwen2DecoderLayer):
    """Qwen2's decoder layer with its own layer's (cos, sin)."""


class LpesQwen2Model(LayerScaledModel, Qwen2Model):
    """The bare model: hidden states out."""

    config_class = LpesQwen2Config
    _auto_class = "AutoModel"  # so that save_pretrained copies this file too
    _no_split_modules = ["LpesQwen2DecoderLayer"]

    def __init__(self, config: LpesQwen2Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(LpesQwen2DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.rotary_emb = LpesQwen2RotaryEmbedding(config)
        self.post_init()


class LpesQwen2ForCausalLM(LayerScaledModel, Qwen2ForCausalLM):
    """The language model: logits out."""

    config_class = LpesQwen2Config
    _auto_class = "AutoModelForCausalLM"
    _no_split_modules = ["LpesQwen2DecoderLayer"]

    def __init__(self, config: LpesQwen2Config) -> None:
        # Qwen2ForCausalLM.__init__ line for line, but for the class of self.model.
        Qwen2PreTrainedModel.__init__(self, config)
        self.model = LpesQwen2Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class LpesQwen2ForSequenceClassification(LayerScaledModel, Qwen2ForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesQwen2Config
    _auto_class = "AutoModelForSequenceClassification"
    _no_split_modules = ["LpesQwen2DecoderLayer"]

    def __init__(self, config: LpesQwen2Config) -> None:
        Qwen2PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = LpesQwen2Model(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
