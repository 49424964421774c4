"""Layer-specific RoPE scaling (LPES): the config of this checkpoint and what models of all families share.

What this does: in decoder layer h, queries and keys of a token at position m are rotated as if it
stood at m / s_h, where s = config.layer_rope_scaling holds one factor a layer:

    inv_freq[h, i] = inv_freq[i] / s_h

The division acts on the frequencies of the model's own RoPE type (default, linear, dynamic, yarn,
llama3, longrope). Weights, attention and cache are the base model's. Factors of 1 change nothing.
Where config.layer_rope_scaling_types names kinds of layers (of config.layer_types: "full_attention",
"sliding_attention"), the factors of all other kinds count as 1.

Paper: "Mitigating Position Bias in Transformers via Layer-Specific Positional Embedding Scaling",
arXiv 2606.27705.

How to get the base model back: set every factor in config.json to 1.0, or load the directory with
the base model's own class (LlamaForCausalLM and its like): the weights are untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# By its value, and no module: vLLM sends the config's class to its workers with what it refers to, and transformers
# itself does not survive that.
from transformers import __version__ as transformers_version

# With up to this many tokens in a call (decoding, mostly), the tables of all layers are made at
# once: a handful of kernels for the whole model. With more, each layer makes its own when it runs,
# so that a long prompt never holds more than one layer's table.
FEW_TOKENS = 256
# The frequencies of these RoPE types depend on the longest position: the base class updates them.
LENGTH_DEPENDENT = ("dynamic", "longrope")

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


def config_fields(fields: dict[str, Any], base_type: str) -> dict[str, Any]:
    """A config's fields as every version of transformers reads and saves them right.

    Version 5 writes rope_parameters, which version 4 would overlook in favour of its default theta, and from
    5.1 on Qwen3-MoE's num_experts under another name, which older ones overlook in favour of 128.
    Version 4 writes "repository--" before the modules of a model loaded from the Hub, and would save
    that, so that the copy asked the Hub for code which lies beside it.
    """
    fields = dict(fields)
    if isinstance(fields.get("auto_map"), dict):
        fields["auto_map"] = {auto: name.split("--")[-1] for auto, name in fields["auto_map"].items()}
    if base_type == "qwen3_moe" and "num_local_experts" in fields:
        fields["num_experts"] = fields["num_local_experts"]
    if transformers_version.startswith("4.") and fields.get("rope_parameters"):
        rope = dict(fields.pop("rope_parameters"))
        neox = base_type == "gpt_neox"
        for new, old in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
            if new in rope:
                fields[old if neox else new] = rope.pop(new)
        fields["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
    return fields


@cache
def scaled_config(base_name: str) -> Any:
    """The config class of a family, from the name of its base: MistralConfig gives LpesMistralConfig."""
    import transformers

    if not hasattr(transformers, base_name):
        raise ImportError(f"this model needs a transformers that has {base_name}; {transformers_version} has not")
    base: Any = getattr(transformers, base_name)

    class LayerScaledConfig(base):
        """The base model's config with `layer_rope_scaling`, one positive factor a layer."""

        model_type = f"lpes_{base.model_type}"

        def __init__(self, layer_rope_scaling: list[float] | None = None, **kwargs: Any) -> None:
            super().__init__(**config_fields(kwargs, base.model_type))
            # transformers builds configs without arguments to compare with; a model refuses None.
            if layer_rope_scaling is not None:
                layer_rope_scaling = check_layer_rope_scaling(layer_rope_scaling, self.num_hidden_layers)
            self.layer_rope_scaling = layer_rope_scaling
            kinds, known = getattr(self, "layer_rope_scaling_types", None), getattr(self, "layer_types", None) or []
            if kinds is not None and not (kinds and set(kinds) <= set(known)):
                raise ValueError(f"layer_rope_scaling_types must name some of {sorted(set(known))}; got {kinds!r}")
            if base.model_type == "granite":
                # vLLM computes the logits of a model of transformers itself, and knows them to be scaled by this name.
                self.logit_scale = 1 / self.logits_scaling

    LayerScaledConfig.__name__ = LayerScaledConfig.__qualname__ = f"Lpes{base_name}"
    return LayerScaledConfig


def __getattr__(name: str) -> Any:
    """`LpesMistralConfig` and its like, made when first asked for.

    This file serves every family, on versions of transformers that lack some of them; and the config
    stands here, because old versions find a file beside the first one only if it is loaded already.
    """
    if name.startswith("Lpes") and name.endswith("Config"):
        return scaled_config(name.removeprefix("Lpes"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class LayerScaledRotaryEmbedding(nn.Module):
    """Stands before the family's rotary embedding in the list of bases and divides its frequencies."""

    # The family's class brings these,
    config: Any
    rope_type: Any
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
        """What the layers need to rotate: see `tables`."""
        if self.rope_type in LENGTH_DEPENDENT:
            super().forward(x, position_ids.max().reshape(1, 1))
        return self.tables(x, position_ids, self.inv_freq, self.attention_scaling)

    def tables(self, x: torch.Tensor, position_ids: torch.Tensor, inv_freq: torch.Tensor, scale: float) -> Any:
        """The tables of all layers, or what a layer makes its own from: see `layer_tables`, which takes it apart."""
        inv_freq = inv_freq.to(x.device) / self.factors().to(x.device)[:, None]
        if torch.compiler.is_compiling() or position_ids.numel() > FEW_TOKENS:
            return position_ids, inv_freq, scale, self.cos_sin
        return self.cos_sin(position_ids, inv_freq[:, None, None], scale, x.dtype)

    def factors(self) -> torch.Tensor:
        """The factors (layers,), but 1 for layers of a kind that config.layer_rope_scaling_types leaves out."""
        kinds = getattr(self.config, "layer_rope_scaling_types", None)
        if kinds is None:
            return self.layer_rope_scaling
        acting = torch.tensor(
            [kind in kinds for kind in self.config.layer_types], device=self.layer_rope_scaling.device
        )
        return torch.where(acting, self.layer_rope_scaling, 1.0)

    def cos_sin(self, position_ids: torch.Tensor, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype) -> Tables:
        """The rotary tables for positions (batch, tokens): each (..., batch, tokens, rotated dimensions).

        inv_freq is (rotated dimensions / 2) for one layer or (layers, 1, 1, the same) for all. Angles are
        computed in float32, as the base model's are, so that a factor of 1 gives its very bits.
        """
        angles = position_ids[..., None].float() * inv_freq
        return self.spread((angles.cos() * scale).to(dtype)), self.spread((angles.sin() * scale).to(dtype))

    def spread(self, half: torch.Tensor) -> torch.Tensor:
        """One value a frequency to one a dimension: here, dimensions i and i + half of them share a frequency."""
        return torch.cat((half, half), dim=-1)

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


class LayerScaledDecoderLayer(nn.Module):
    """Stands before the family's decoder layer in the list of bases and hands it its own (cos, sin)."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "position_embeddings" not in kwargs:
            # Gradient checkpointing before transformers 4.53 passes all by position.
            _, *names = signature(super().forward).parameters
            kwargs, args = dict(zip(names, args, strict=False)), ()
        kwargs["position_embeddings"] = layer_tables(kwargs["position_embeddings"], self.layer_idx, hidden_states.dtype)
        return super().forward(hidden_states, *args, **kwargs)


def layer_tables(shared: tuple[Any, ...], layer: int, dtype: torch.dtype) -> Tables:
    """One layer's (cos, sin), picked from the tables of all layers or made on demand."""
    if len(shared) == 2:
        cos, sin = shared
        return cos[layer], sin[layer]
    position_ids, inv_freq, scale, cos_sin = shared
    tables: Tables = cos_sin(position_ids, inv_freq[layer], scale, dtype)
    return tables


def keep_weight_names(name: str) -> None:
    """Let files of weights be read under a new class name or model_type as they are under the base's.

    From version 5 on, transformers renames some families' weights while it reads them (GPT-NeoX) and puts
    experts together (Mixtral), and knows by these names which. By the same names PEFT finds the experts for an adapter.
    """
    # Not above, for vLLM sends its workers what this module refers to by value, and cannot send this.
    from sys import modules

    try:
        from transformers import conversion_mapping
    except ImportError:
        return
    base_name = name.removeprefix("Lpes").removeprefix("lpes_")
    mapping = conversion_mapping.get_checkpoint_conversion_mapping(base_name)
    if mapping is None:
        return
    conversion_mapping.register_checkpoint_conversion_mapping(name, mapping, overwrite=True)
    # PEFT copies transformers' list of names when it makes its first adapter: that may have been for another model.
    for module in (conversion_mapping, modules.get("peft.utils.transformers_weight_conversion")):
        alike = getattr(module, "_MODEL_TO_CONVERSION_PATTERN", {})
        alike[name] = alike.get(base_name, base_name)


class LayerScaledPreTrainedModel(nn.Module):
    """What the three classes below share."""

    config_class: Any
    post_init: Callable[[], None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "config_class" in vars(cls):
            keep_weight_names(cls.__name__)
            keep_weight_names(cls.config_class.model_type)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As the family's own class says: transformers looks for the answer in the source of a class's module, and
        would compute the experts of this one in a slow loop."""
        family: Any = next(base for base in cls.__mro__ if base.__module__.startswith("transformers."))
        return family._can_set_experts_implementation()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LayerScaledRotaryEmbedding):
            # Loading may build the model on the meta device and ask here for what no file holds.
            module.set_layer_rope_scaling(list(module.config.layer_rope_scaling))


class LayerScaledModel(LayerScaledPreTrainedModel):
    """Stands before the family's bare model: the same, with layers and rotary embedding from above."""

    layer_class: type[LayerScaledDecoderLayer]
    rotary_class: type[LayerScaledRotaryEmbedding]
    _auto_class = "AutoModel"  # so that save_pretrained copies these files too

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(self.layer_class(config, layer) for layer in range(config.num_hidden_layers))
        self.rotary_emb = self.rotary_class(config)
        self.post_init()


class LayerScaledForCausalLM(LayerScaledPreTrainedModel):
    """Stands before the family's language model: the same, around the scaled bare model."""

    model_class: type[LayerScaledModel]
    base_model_prefix: str
    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.model_class(config))
        self.post_init()


class LayerScaledForSequenceClassification(LayerScaledPreTrainedModel):
    """Stands before the family's classifier: the same, around the scaled bare model."""

    model_class: type[LayerScaledModel]
    base_model_prefix: str
    _auto_class = "AutoModelForSequenceClassification"

    def __init__(self, config: Any) -> None:
        # The family's own __init__ looks its bare model up by the config, and does not know this one.
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.model_class(config))
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()
