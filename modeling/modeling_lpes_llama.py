"""Llama with one RoPE scaling factor a layer (LPES).

What this does: the model is transformers' own Llama; the subclasses below only give each decoder
layer its own rotary table (`layer_rope_scaling.py` beside this file has the formula).

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
LlamaForCausalLM: the weights are untouched.
"""

from __future__ import annotations

from torch import nn
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRotaryEmbedding,
)

from .layer_rope_scaling import (
    LayerScaledDecoderLayer,
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
    _auto_class = "AutoModel"  # so that save_pretrained copies this file too
    _no_split_modules = ["LpesLlamaDecoderLayer"]

    def __init__(self, config: LpesLlamaConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(LpesLlamaDecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.rotary_emb = LpesLlamaRotaryEmbedding(config)
        self.post_init()


class LpesLlamaForCausalLM(LayerScaledModel, LlamaForCausalLM):
    """The language model: logits out."""

    config_class = LpesLlamaConfig
    _auto_class = "AutoModelForCausalLM"
    _no_split_modules = ["LpesLlamaDecoderLayer"]

    def __init__(self, config: LpesLlamaConfig) -> None:
        # LlamaForCausalLM.__init__ line for line, but for the class of self.model.
        LlamaPreTrainedModel.__init__(self, config)
        self.model = LpesLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class LpesLlamaForSequenceClassification(LayerScaledModel, LlamaForSequenceClassification):
    """A score for each label, from the last token."""

    config_class = LpesLlamaConfig
    _auto_class = "AutoModelForSequenceClassification"
    _no_split_modules = ["LpesLlamaDecoderLayer"]

    def __init__(self, config: LpesLlamaConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = LpesLlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
