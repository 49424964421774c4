"""What can stand behind --methods: names, with a value where one is needed, and the decoder that each means.

torch is imported inside functions only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_bake.baselines.rotary import bases_for, theta_of
from lpes_bake.factors import check_factors, load_factors
from lpes_bake.loading import library_config, load_library_model, load_model
from lpes_bake.search.errors import InputError
from lpes_bake.source import FLOAT32_RANGE, Source

if TYPE_CHECKING:
    from lpes_bake.baselines.decoder import Decoder
    from lpes_bake.search.tasks import Example

Check = Callable[[Source], object]
Load = Callable[[Source, Any, Any], "Decoder"]
Search = Callable[[Source, Any, Any, Any, str], str]


@dataclass(frozen=True)
class Method:
    """One method. label: how it was written, for tables. search: where something must be looked for in the model before
    it can be loaded, what does so once and for all, with a tokenizer and questions in a prompt format behind `load`'s
    arguments. It returns the method as it is written with what was found."""

    label: str
    _check: Check
    _load: Load
    reorders: bool = False
    search: Search | None = None

    def check(self, source: Source) -> None:
        """InputError where it cannot be applied to `source`. Reads no weight of the model."""
        self._check(source)

    def load(self, source: Source, device: Any, dtype: Any) -> Decoder:
        """The model of `source`, which may be baked, under this method. InputError where it cannot be applied."""
        self.check(source)
        return self._load(source, device, dtype)

    def rearrange(self, example: Example) -> Example:
        """The example as this method asks it: with its documents reordered, or as it is. InputError where a prompt has
        no documents to reorder."""
        if not self.reorders:
            return example
        from lpes_bake.baselines.reordering import rearranged

        return rearranged(example)


def parse_method(text: str) -> Method:
    """The method that was written as NAME or NAME=VALUE. InputError, one line, for what is none."""
    name, given, value = text.partition("=")
    if name not in METHODS:
        raise InputError(f"there is no method {name!r}; there are: {', '.join(METHODS)}")
    build, example = METHODS[name]
    if given and not value:
        raise InputError(f"method {text!r} has nothing behind its =; write it like {example}")
    search = _find_channel if name == "hidden-channel" and not value else None
    return Method(text, *build(text, value or None), reorders=name == "reorder", search=search)


def _no_value(check: Check, load: Load, text: str, value: str | None) -> tuple[Check, Load]:
    if value is not None:
        raise InputError(f"method {text!r}: it takes no value; leave out ={value}")
    return check, load


def _any_model(source: Source) -> None:
    """Nothing to check."""


def _factor(checker: str, loader: str, text: str, value: str | None) -> tuple[Check, Load]:
    """The functions of pi.py that are called so, the second with its factor."""
    try:
        factor = float(value or "")
    except ValueError:
        factor = math.nan
    if not FLOAT32_RANGE[0] <= factor <= FLOAT32_RANGE[1]:
        raise InputError(f"method {text!r}: it needs a positive factor, as in {text.partition('=')[0]}=1.5")

    def check(source: Source) -> None:
        from lpes_bake.baselines import pi

        getattr(pi, checker)(source)

    def load(source: Source, device: Any, dtype: Any) -> Decoder:
        from lpes_bake.baselines import pi

        decoder: Decoder = getattr(pi, loader)(source, device, dtype, factor)
        return decoder

    return check, load


def _base(source: Source, device: Any, dtype: Any) -> Decoder:
    from lpes_bake.baselines.decoder import ModelDecoder

    # Not our class with factors of 1, which gives the same numbers: what our class costs would not show.
    return ModelDecoder(load_library_model(source, device, dtype))


def _lpes(text: str, value: str | None) -> tuple[Check, Load]:
    factors = None if value is None else load_factors(Path(value))

    def check(source: Source) -> None:
        if factors is not None:
            check_factors(factors, source)
        elif source.factors is None:
            raise InputError(f"lpes: {source.name} is not baked; give the factors by lpes=FILE")

    def load(source: Source, device: Any, dtype: Any) -> Decoder:
        from lpes_bake.baselines.decoder import ModelDecoder
        from lpes_bake.search.models import set_factors

        model = load_model(source, device, dtype)
        set_factors(model, (source.factors or ()) if factors is None else factors.layer_rope_scaling)
        return ModelDecoder(model)

    return check, load


def _attention_buckets(source: Source, device: Any, dtype: Any) -> Decoder:
    from lpes_bake.baselines.attention_buckets import AttentionBuckets

    bases = bases_for(theta_of(source))
    return AttentionBuckets(load_library_model(source, device, dtype), bases)


def _llama_like(method: str, source: Source) -> None:
    from lpes_bake.baselines.own_attention import require_llama_like

    require_llama_like(source, method)


def _ms_poe(released: bool, source: Source, device: Any, dtype: Any) -> Decoder:
    from lpes_bake.baselines.ms_poe import MsPoE

    return MsPoE(load_library_model(source, device, dtype), released=released)


def _moice(text: str, value: str | None) -> tuple[Check, Load]:
    if value is None:
        raise InputError(f"method {text!r}: give the routers' folder, moice=DIR; lpes-bake train-moice makes one")

    def check(source: Source) -> None:
        from lpes_bake.baselines.moice import load_routers

        _llama_like("moice", source)
        _, bases, _ = load_routers(library_config(source), Path(value))
        # Of models of one shape, the base still tells some apart.
        if bases[0] != theta_of(source):
            raise InputError(
                f"method {text!r}: these routers are for a model with rope_theta {bases[0]:g}, and {source.name} has "
                f"{theta_of(source):g}; train routers for this one"
            )

    def load(source: Source, device: Any, dtype: Any) -> Decoder:
        from lpes_bake.baselines.moice import load_moice

        return load_moice(load_library_model(source, device, dtype), Path(value))

    return check, load


def _hidden_channel(text: str, value: str | None) -> tuple[Check, Load]:
    given: tuple[int, float] | None = None
    if value is not None:
        channel, _, scale = value.partition("/")
        try:
            given = int(channel), float(scale)
            if not math.isfinite(given[1]):
                raise ValueError
        except ValueError:
            raise InputError(f"method {text!r}: write the channel and its factor as hidden-channel=213/0.5") from None

    def check(source: Source) -> None:
        _llama_like("hidden-channel", source)
        channels = library_config(source).hidden_size
        if given is not None and not 0 <= given[0] < channels:
            raise InputError(f"method {text!r}: {source.name} has channels 0 to {channels - 1}")

    def load(source: Source, device: Any, dtype: Any) -> Decoder:
        from lpes_bake.baselines.hidden_channel import HiddenChannel, middle_layers

        assert given is not None, "the search comes first"
        layers = middle_layers(source.num_hidden_layers)
        return HiddenChannel(load_library_model(source, device, dtype), *given, layers)

    return check, load


def _find_channel(source: Source, device: Any, dtype: Any, tokenizer: Any, prompt_format: str) -> str:
    from lpes_bake.baselines.hidden_channel import find_channel

    found = find_channel(load_library_model(source, device, dtype), tokenizer, prompt_format)
    return f"hidden-channel={found.channel}/{found.scale:g}"


# Name → what makes its check and its loader from the text and its value, and an example.
METHODS: dict[str, tuple[Callable[[str, str | None], tuple[Check, Load]], str]] = {
    "base": (partial(_no_value, _any_model, _base), "base"),
    "lpes": (_lpes, "lpes=factors.json"),
    "pi": (partial(_factor, "require_linear", "position_interpolation"), "pi=1.5"),
    "ntk": (partial(_factor, "theta_of", "ntk"), "ntk=2"),
    "yarn": (partial(_factor, "require_unscaled", "yarn"), "yarn=2"),
    "attention-buckets": (partial(_no_value, theta_of, _attention_buckets), "attention-buckets"),
    "ms-poe": (partial(_no_value, partial(_llama_like, "ms-poe"), partial(_ms_poe, False)), "ms-poe"),
    "ms-poe-released": (partial(_no_value, partial(_llama_like, "ms-poe"), partial(_ms_poe, True)), "ms-poe-released"),
    "moice": (_moice, "moice=DIR"),
    "hidden-channel": (_hidden_channel, "hidden-channel=213/0.5"),
    "reorder": (partial(_no_value, _any_model, _base), "reorder"),
}
