"""Loading what is scored: a source's tokenizer and its model, base or baked, through lpes_bake's own files.

torch and transformers are imported inside functions only.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from lpes_bake.search.errors import InputError
from lpes_bake.source import Source, base_form, open_source, require_tokenizer


def open_sources(models: Sequence[str], revision: str | None = None) -> list[Source]:
    """Models that are scored side by side: base or baked directories, or names on the Hub, causal all of them."""
    # Revisions belong to the Hub; a local directory beside a model of the Hub has none.
    sources = [open_source(one, revision=None if Path(one).is_dir() else revision, baked=True) for one in models]
    if revision is not None and all(Path(one).is_dir() for one in models):
        raise InputError("--revision is for models on the Hub, and all models given are local directories")
    for source in sources:
        require_causal(source)
    return sources


def require_causal(source: Source) -> None:
    """InputError for a model that answers nothing."""
    if not source.architecture.endswith("ForCausalLM"):
        raise InputError(f"{source.name} is a {source.architecture}, which answers nothing; give a causal LM")


def load_tokenizer(source: Source, *, trust_remote_code: bool) -> Any:
    """The model's tokenizer. Code of the source runs only when it is trusted; nothing is ever asked on stdin."""
    from transformers import AutoTokenizer

    require_tokenizer(source)
    try:
        return AutoTokenizer.from_pretrained(source.path, trust_remote_code=trust_remote_code)
    except Exception as error:  # many kinds, from many libraries
        if "trust_remote_code" in str(error):
            raise InputError(
                f"the tokenizer of {source.name} brings its own Python code: read it, then give --trust-remote-code"
            ) from error
        raise InputError(f"the tokenizer of {source.name} cannot be loaded: {first_line(error)}") from error


def load_model(
    source: Source, device: Any, dtype: Any, *, device_map: str | None = None, quantization: str | None = None
) -> Any:
    """The model in eval mode: a base one as its LPES class with factors of 1, a baked one with its own."""
    from transformers.utils import logging

    from lpes_bake.search.models import load_scaled

    logging.disable_progress_bar()
    with _errors_in_one_line(source, device):
        if source.factors is None:
            return load_scaled(
                source.path, dtype=dtype, device=device, device_map=device_map, quantization=quantization
            )
        modeling = importlib.import_module(f"lpes_bake.modeling.{source.family.module}")
        model_class = getattr(modeling, source.family.architectures[source.family.base_class("ForCausalLM")])
        return _load_on(device, model_class, source, torch_dtype=dtype)


def library_config(source: Source) -> Any:
    """The base model's config as transformers' own class."""
    import transformers

    from lpes_bake.modeling.layer_rope_scaling import config_fields

    family = source.family
    # Version 4's own class would overlook what version 5 wrote, and take its default theta.
    fields = config_fields(base_form(source).config, family.base_model_type)
    return getattr(transformers, family.base_config).from_dict(fields)


def load_library_model(source: Source, device: Any, dtype: Any, **rope: Any) -> Any:
    """The base model in eval mode as transformers' own class, without any factors.

    rope: changes to its RoPE settings, see `with_rope`.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    with _errors_in_one_line(source, device):
        model_class = getattr(transformers, source.family.base_class("ForCausalLM"))
        config = with_rope(library_config(source), **rope)
        return _load_on(device, model_class, source, config=config, torch_dtype=dtype)


def _load_on(device: Any, model_class: Any, source: Source, **kwargs: Any) -> Any:
    """The whole model on one device, in eval mode. kwargs go to from_pretrained."""
    from lpes_bake.search.models import load_whole

    if source.config.get("quantization_config"):
        # Once it is loaded, it cannot be moved.
        return load_whole(model_class, source.path, device_map={"": device}, **kwargs).eval()
    return load_whole(model_class, source.path, **kwargs).to(device).eval()


def with_rope(config: Any, **changes: Any) -> Any:
    """A copy of a transformers config with other RoPE settings (rope_theta, rope_type, factor), where the version of
    transformers at hand keeps them."""
    config = copy.deepcopy(config)
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = {**config.rope_parameters, **changes}
    elif changes:
        config.rope_theta = changes.pop("rope_theta", config.rope_theta)
        config.rope_scaling = {**(config.rope_scaling or {}), **changes} or None
    return config


@contextmanager
def _errors_in_one_line(source: Source, device: Any) -> Iterator[None]:
    """Within, what keeps a model from being loaded becomes an InputError."""
    try:
        yield
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, ImportError, EOFError, UnpicklingError) as error:
        raise InputError(f"{source.name} cannot be loaded on {device}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """An error in one line, without its traceback."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
