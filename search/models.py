"""Loading a base model through the very files that ship, with factors that can be changed in place."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lpes_bake.search.errors import InputError
from lpes_bake.search.families import SHARED_MODULE, family_of


def load_scaled(
    model_dir: Path, *, dtype: Any, device: Any = "cpu", factors: Sequence[float] | None = None, **kwargs: Any
) -> Any:
    """The base model in `model_dir` as its LPES class, in eval mode.

    dtype: a torch.dtype. factors: one a layer; None is the identity. kwargs go to from_pretrained.
    """
    import json

    import torch

    config_dict = json.loads((model_dir / "config.json").read_text())
    family = family_of(config_dict, str(model_dir))
    shared = importlib.import_module(f"lpes_bake.modeling.{SHARED_MODULE}")
    modeling = importlib.import_module(f"lpes_bake.modeling.{family.module}")
    config_class = getattr(shared, f"{family.prefix}Config")
    identity = [1.0] * int(config_dict["num_hidden_layers"])
    config = config_class.from_dict(
        {
            **config_dict,
            "model_type": family.model_type,
            "layer_rope_scaling": identity if factors is None else list(factors),
        }
    )
    model_class = getattr(modeling, f"{family.prefix}ForCausalLM")
    model = load_whole(model_class, model_dir, config=config, torch_dtype=dtype, **kwargs)
    if "device_map" not in kwargs:
        model = model.to(torch.device(device))
    return model.eval()


def load_whole(model_class: Any, model_dir: Path, **kwargs: Any) -> Any:
    """from_pretrained, with an InputError for weights that are missing: it would make them up at random."""
    model, info = model_class.from_pretrained(model_dir, output_loading_info=True, **kwargs)
    if missing := sorted(info["missing_keys"]):
        raise InputError(f"{model_dir} lacks weights of {model_class.__name__}: {', '.join(missing[:3])}")
    return model


def set_factors(model: Any, factors: Sequence[float]) -> None:
    """Give a loaded model other factors: a matter of microseconds, nothing is reloaded."""
    model.base_model.rotary_emb.set_layer_rope_scaling(factors)
