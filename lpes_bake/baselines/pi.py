"""One RoPE scale for the whole model, by the library's own RoPE types.

Positional Interpolation (Chen et al., arXiv 2306.15595) is `rope_type: linear`: every layer's frequencies divided by
one factor. YaRN (Peng et al., arXiv 2309.00071) is `rope_type: yarn`, for the model's max_position_embeddings.
NTK-aware scaling is the base change of `rope_type: dynamic`, b · factor^(d / (d − 2)) with d rotated dimensions, as a
fixed base: the library's own changes with the length of each call, and only beyond max_position_embeddings, where
prompts that fit into the model never are.
"""

from __future__ import annotations

from typing import Any

from lpes_bake.baselines.decoder import ModelDecoder
from lpes_bake.baselines.rotary import rotary_with_base, theta_of
from lpes_bake.loading import load_library_model
from lpes_bake.search.errors import InputError
from lpes_bake.source import Source, rope_settings


def require_linear(source: Source) -> None:
    """InputError for a model that `position_interpolation` is not for."""
    rope_type = rope_settings(source.config, source.name)["rope_type"]
    if rope_type not in ("default", "linear"):
        raise InputError(
            f"{source.name} has RoPE type {rope_type!r}, which transformers cannot join with linear; compare with "
            "lpes=FILE, where FILE has the same factor for all layers"
        )


def position_interpolation(source: Source, device: Any, dtype: Any, factor: float) -> ModelDecoder:
    """The model with positions divided by `factor`, on top of a linear factor that it may have already."""
    factor *= rope_settings(source.config, source.name).get("factor", 1.0)
    return ModelDecoder(load_library_model(source, device, dtype, rope_type="linear", factor=factor))


def require_unscaled(source: Source) -> None:
    """InputError for a model that `yarn` is not for."""
    rope_type = rope_settings(source.config, source.name)["rope_type"]
    if rope_type != "default":
        raise InputError(f"{source.name} has RoPE type {rope_type!r} already, which yarn would replace; leave yarn out")


def yarn(source: Source, device: Any, dtype: Any, factor: float) -> ModelDecoder:
    """The model with YaRN for `factor` times as many positions."""
    return ModelDecoder(load_library_model(source, device, dtype, rope_type="yarn", factor=factor))


def ntk(source: Source, device: Any, dtype: Any, factor: float) -> ModelDecoder:
    """The model with a base that stretches its slowest frequency `factor` times and leaves the fastest one."""
    theta = theta_of(source)
    model = load_library_model(source, device, dtype)
    rotated = 2 * model.base_model.rotary_emb.inv_freq.shape[-1]
    model.base_model.rotary_emb = rotary_with_base(model, theta * factor ** (rotated / (rotated - 2)))
    return ModelDecoder(model)
