"""The library's own rotary embedding with another base: what several of the methods are made of."""

from __future__ import annotations

from typing import Any

from lpes_bake.loading import with_rope
from lpes_bake.search.errors import InputError
from lpes_bake.source import Source, rope_settings

# Those of Attention Buckets and MoICE, for a model whose own base is the first.
BASES = (10000.0, 17500.0, 18000.0, 19000.0, 20000.0, 22500.0, 25000.0)


def theta_of(source: Source) -> float:
    """The base of the model's frequencies. InputError for a model with two tables (Gemma 3)."""
    settings = rope_settings(source.config, source.name)
    if "sliding_attention" in settings:
        raise InputError(f"{source.name} has two bases, one for each kind of layers; this method changes a model's one")
    return float(settings["rope_theta"])


def bases_for(theta: float) -> tuple[float, ...]:
    """The seven bases in the same ratios to `theta` as to 10000."""
    return tuple(theta * base / BASES[0] for base in BASES)


def rotary_with_base(model: Any, base: float) -> Any:
    """A second rotary embedding of the model's own class, RoPE type and device, with another base."""
    own = model.base_model.rotary_emb
    return type(own)(with_rope(model.config, rope_theta=base)).to(own.inv_freq.device)
