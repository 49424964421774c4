"""Layer-specific RoPE scaling (LPES): the config classes of this checkpoint and what its models share.

What this does: in decoder layer h, queries and keys of a token at position m are rotated as if it
stood at m / s_h, where s = config.layer_rope_scaling holds one factor a layer:

    inv_freq[h, i] = inv_freq[i] / s_h

The division acts on the frequencies of the model's own RoPE type (default, linear, dynamic, yarn,
llama3, longrope). Weights, attention and cache are the base model's. Factors of 1 change nothing.

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
the base model's own class (LlamaForCausalLM, Qwen2ForCausalLM): the weights are untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, Qwen2Config
from transformers import __version__ as transformers_version

# With up to this many tokens in a call (decoding, mostly), the tables of all layers are made at
# once: a handful of kernels for the whole model. With more, each layer makes its own when it runs,
# so that a long prompt never holds more than one layer's table.
FEW_TOKENS = 256

Tables = tuple[torch.Tensor, torch.Tensor]


def check_layer_rope_scaling(factors: Any, num_hidden_layers: int) -> list[float]:
    """The factors as floats; a ValueError that says what is wrong unless there is a valid one a layer."""
    wanted = f"layer_rope_scaling must be a list of {num_hidden_layers} positive finite numbers, one for each layer"
    if not isinstance(factors, (list, tuple)):
        raise ValueError(f"{wanted}; got {factors!r}")
    if len(factors) != num_hidden_layers:
        raise ValueError(f"{wanted}; got {len(factors)} of them: {list(factors)!r}")
    for layer, factor in enumerate(factors):
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not number or not math.isfinite(factor) or factor <= 0:
            raise ValueError(f"{wanted}; got {factor!r} for layer {layer}")
    return [float(factor) for factor in factors]


def config_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """A config's fields as every version of transformers reads and saves them right.

    Version 5 writes rope_parameters, which version 4 would overlook in favour of its default theta.
    Version 4 writes "repository--" before the modules of a model loaded from the Hub, and would save
    that, so that the copy asked the Hub for code which lies beside it.
    """
    fields = dict(fields)
    if isinstance(fields.get("auto_map"), dict):
        fields["auto_map"] = {auto: name.split("--")[-1] for auto, name in fields["auto_map"].items()}
    if transformers_version.startswith("4.") and fields.get("rope_parameters"):
        rope = dict(fields.pop("rope_parameters"))
        if "rope_theta" in rope:
            fields["rope_theta"] = rope.pop("rope_theta")
        fields["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    return fields


class LpesLlamaConfig(LlamaConfig):
    """LlamaConfig with `layer_rope_scaling`, one positive factor a layer."""

    model_type = "lpes_llama"

    def __init__(self, layer_rope_scaling: list[float] | None = None, **kwargs: Any) -> None:
        super().__init__(**config_fields(kwargs))
        # transformers builds configs without arguments to compare with; a model refuses None.
        if layer_rope_scaling is not None:
            layer_rope_scaling = check_layer_rope_scaling(layer_rope_scaling, self.num_hidden_layers)
        self.layer_rope_scaling = layer_rope_scaling


class LpesQwen2Config(Qwen2Config):
    """Qwen2Config with `layer_rope_scaling`, one positive factor a layer."""

    model_type = "lpes_qwen2"

    def __init__(self, layer_rope_scaling: list[float] | None = None, **kwargs: Any) -> None:
        super().__init__(**config_fields(kwargs))
        if layer_rope_scaling is not None:
            layer_rope_scaling = check_layer_rope_scaling(layer_rope_scaling, self.num_hidden_layers)
        self.layer_rope_scaling = layer_rope_scaling


def cos_sin(position_ids: torch.Tensor, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype) -> Tables:
    """The rotary tables for positions (batch, tokens): each (..., batch, tokens, head_dim).

    inv_freq is (head_dim / 2) for one layer or (layers, 1, 1, head_dim / 2) for all. Angles are
    computed in float32, as the base model's are, so that a factor of 1 gives its very bits.
    """
    angles = position_ids[..., None].float() * inv_freq
    cos, sin = ((table * scale).to(dtype) for table in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


class LayerScaledRotaryEmbedding(nn.Module):
    """Stands before the family's rotary embedding in the list of bases and divides its frequencies."""

    # The family's class brings these,
    config: Any
    rope_type: str
    attention_scaling: float
    inv_freq: torch.Tensor
    # and this one is new: (layers,), float32
    layer_rope_scaling: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        factors = check_layer_rope_scaling(config.layer_rope_scaling, config.num_hidden_layers)
        self.register_buffer("layer_rope_scaling", torch.tensor(factors, dtype=torch.float32), persistent=False)

    def set_layer_rope_scaling(self, factors: Sequence[float]) -> None:
        """Give each layer a new factor, in place: the next forward pass uses them."""
        factors = check_layer_rope_scaling(list(factors), self.config.num_hidden_layers)
        self.config.layer_rope_scaling = factors
        with torch.no_grad():
            self.layer_rope_scaling.copy_(torch.tensor(factors, dtype=torch.float32))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[Any, ...]:
        """What the layers need to rotate: see `layer_tables`, which takes it apart."""
        if self.rope_type in ("dynamic", "longrope"):
            # Their frequencies depend on the longest position: the base class updates inv_freq.
            super().forward(x, position_ids.max().reshape(1, 1))
        inv_freq = self.inv_freq.to(x.device) / self.layer_rope_scaling.to(x.device)[:, None]
        if torch.compiler.is_compiling() or position_ids.numel() > FEW_TOKENS:
            return position_ids, inv_freq, self.attention_scaling
        return cos_sin(position_ids, inv_freq[:, None, None], self.attention_scaling, x.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """Let buffers follow the model to a device, but never to another dtype: rounded frequencies
        go wrong a few thousand tokens into a prompt."""
        exact = dict(self.named_buffers(recurse=False))
        super()._apply(fn, *args, **kwargs)
        for name, buffer in exact.items():
            moved = getattr(self, name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self


def layer_tables(shared: tuple[Any, ...], layer: int, dtype: torch.dtype) -> Tables:
    """One layer's (cos, sin), picked from the tables of all layers or made on demand."""
    if len(shared) == 2:
        cos, sin = shared
        return cos[layer], sin[layer]
    position_ids, inv_freq, scale = shared
    return cos_sin(position_ids, inv_freq[layer], scale, dtype)


class LayerScaledDecoderLayer(nn.Module):
    """Stands before the family's decoder layer in the list of bases and hands it its own (cos, sin)."""

    self_attn: Any

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "position_embeddings" not in kwargs:
            # Gradient checkpointing before transformers 4.53 passes all by position, and these last.
            *rest, kwargs["position_embeddings"] = args
            args = tuple(rest)
        kwargs["position_embeddings"] = layer_tables(
            kwargs["position_embeddings"], self.self_attn.layer_idx, hidden_states.dtype
        )
        return super().forward(hidden_states, *args, **kwargs)


class LayerScaledModel(nn.Module):
    """Stands before a family's model class in the list of bases."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LayerScaledRotaryEmbedding):
            # Loading may build the model on the meta device and ask here for what no file holds.
            module.set_layer_rope_scaling(list(module.config.layer_rope_scaling))
