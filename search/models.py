"""Loading a base model through the very files that ship, and changing its factors in place.

torch is imported inside functions: a quantisation that cannot be had is refused before it loads.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from lpes_bake.search.errors import InputError
from lpes_bake.search.families import SHARED_MODULE, family_of

QUANTIZATIONS = ("4bit", "8bit")


def load_scaled(
    model_dir: Path,
    *,
    dtype: Any,
    device: Any = "cpu",
    factors: Sequence[float] | None = None,
    device_map: Any = None,
    quantization: str | None = None,
    **kwargs: Any,
) -> Any:
    """The base model in `model_dir` as its LPES class, in eval mode.

    dtype: a torch.dtype. factors: one a layer; None is the identity. device_map: as from_pretrained takes
    it ("auto", or module → device), for models that no single device holds; None puts all on `device`.
    quantization: "4bit" or "8bit" through bitsandbytes. A checkpoint that is quantised already (its
    config.json has quantization_config) is loaded as it says. kwargs go to from_pretrained.
    """
    config_dict = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    family = family_of(config_dict, str(model_dir))
    if quantization is not None:
        if config_dict.get("quantization_config"):
            raise InputError(f"{model_dir} is quantised already; leave out the quantization {quantization!r}")
        kwargs["quantization_config"] = bitsandbytes_config(quantization, dtype)
    # A quantised model cannot be moved once it is loaded.
    if device_map is None and (quantization is not None or config_dict.get("quantization_config")):
        device_map = {"": device}
    shared = importlib.import_module(f"lpes_bake.modeling.{SHARED_MODULE}")
    modeling = importlib.import_module(f"lpes_bake.modeling.{family.module}")
    config_class = getattr(shared, family.config)
    identity = [1.0] * int(config_dict["num_hidden_layers"])
    config = config_class.from_dict(
        {
            **config_dict,
            "model_type": family.model_type,
            "layer_rope_scaling": identity if factors is None else list(factors),
        }
    )
    model_class = getattr(modeling, family.architectures[family.base_class("ForCausalLM")])
    if device_map is not None:
        kwargs["device_map"] = device_map
    model = load_whole(model_class, model_dir, config=config, torch_dtype=dtype, **kwargs)
    if device_map is None:
        model = model.to(device)
    return model.eval()


def bitsandbytes_config(quantization: str, dtype: Any) -> Any:
    """transformers' BitsAndBytesConfig for "4bit" (NF4, computing in dtype) or "8bit"."""
    if quantization not in QUANTIZATIONS:
        raise InputError(f"quantization must be one of {', '.join(QUANTIZATIONS)}; got {quantization!r}")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            f"quantization {quantization!r} needs bitsandbytes, which is not installed; "
            "pip install bitsandbytes, or load the model without it"
        )
    from transformers import BitsAndBytesConfig

    if quantization == "4bit":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    return BitsAndBytesConfig(load_in_8bit=True)


def load_whole(model_class: Any, model_dir: Path, **kwargs: Any) -> Any:
    """from_pretrained, with an InputError for weights that are missing: it would make them up at random."""
    model, info = model_class.from_pretrained(model_dir, output_loading_info=True, **kwargs)
    if missing := sorted(info["missing_keys"]):
        raise InputError(f"{model_dir} lacks weights of {model_class.__name__}: {', '.join(missing[:3])}")
    return model


def head_logits(model: Any, hidden: Any) -> Any:
    """Logits (…, vocabulary) of last hidden states (…, hidden_size), as the model's own forward makes them."""
    logits = model.get_output_embeddings()(hidden)
    # Granite's, Cohere's and Gemma's forward does this to them; other configs have no such fields. A scaled Granite has
    # both of the first two, which say the same.
    if divisor := getattr(model.config, "logits_scaling", None):
        logits = logits / divisor
    elif factor := getattr(model.config, "logit_scale", None):
        logits = logits * factor
    if cap := getattr(model.config, "final_logit_softcapping", None):
        logits = (logits / cap).tanh() * cap
    return logits


def length_dependent(model: Any) -> bool:
    """Whether the model's rotary frequencies depend on the length of a call: RoPE types dynamic and longrope."""
    from lpes_bake.modeling.layer_rope_scaling import LENGTH_DEPENDENT

    rope_type = model.base_model.rotary_emb.rope_type
    rope_types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return not {*rope_types}.isdisjoint(LENGTH_DEPENDENT)


def set_factors(model: Any, factors: Sequence[float]) -> None:
    """Give a loaded model other factors: a matter of microseconds, nothing is reloaded."""
    model.base_model.rotary_emb.set_layer_rope_scaling(factors)


@contextmanager
def differentiable_factors(model: Any, factors: Sequence[float]) -> Iterator[Any]:
    """Within, the model computes with `factors` as a leaf tensor (layers,), which is handed out.

    All weights are frozen, here and from now on: nothing but the factors is ever trained.
    """
    import torch

    set_factors(model, factors)
    model.requires_grad_(False)
    rotary = model.base_model.rotary_emb
    buffer = rotary.layer_rope_scaling
    leaf = torch.tensor(list(factors), dtype=buffer.dtype, device=buffer.device, requires_grad=True)
    rotary.layer_rope_scaling = leaf
    try:
        yield leaf
    finally:
        rotary.layer_rope_scaling = buffer


@contextmanager
def checkpointed_layers(model: Any, enabled: bool = True) -> Iterator[None]:
    """Within, a layer's activations are dropped after its forward pass and computed again for its backward pass.

    transformers' own switch would do the same, but works in training mode only, where a config may ask for dropout.
    """
    from torch.utils.checkpoint import checkpoint

    layers = list(model.base_model.layers) if enabled else []
    # accelerate's hooks for several devices live in the same attribute, so what was there must come back.
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def cache_argument(model: Any) -> str:
    """What the bare model's forward calls its cache, as argument and in its output: transformers 5.24 renamed it."""
    return "cache" if "cache" in signature(model.base_model.forward).parameters else "past_key_values"


def device_of(module: Any) -> Any:
    """The torch.device that `module` computes on; weights that are offloaded stand elsewhere meanwhile."""
    import torch

    hook = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return torch.device(device) if device is not None else module.weight.device
