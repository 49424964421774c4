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

from lpes_bake.factors import check_factors, load_factors
from lpes_bake.loading import load_library_model, load_model, load_tokenizer
from lpes_bake.search.errors import InputError
from lpes_bake.source import Source

if TYPE_CHECKING:
    from lpes_bake.baselines.decoder import Decoder
    from lpes_bake.search.tasks import Example

Load = Callable[[Source, Any, Any], "Decoder"]


@dataclass(frozen=True)
class Method:
    """One method. label: how it was written, for tables."""

    label: str
    _load: Load
    reorders: bool = False

    def load(self, source: Source, device: Any, dtype: Any) -> Decoder:
        """The model of `source`, which may be baked, under this method. InputError where it cannot be applied."""
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
    return Method(text, build(text, value or None), reorders=name == "reorder")


def _no_value(load: Load, text: str, value: str | None) -> Load:
    if value is not None:
        raise InputError(f"method {text!r}: it takes no value; leave out ={value}")
    return load


def _factor(loader: str, text: str, value: str | None) -> Load:
    """The function of pi.py that is called so, with its factor."""
    try:
        factor = float(value or "")
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise InputError(f"method {text!r}: it needs a positive factor, as in {text.partition('=')[0]}=1.5")

    def load(source: Source, device: Any, dtype: Any) -> Decoder:
        from lpes_bake.baselines import pi

        decoder: Decoder = getattr(pi, loader)(source, device, dtype, factor)
        return decoder

    return load


def _base(source: Source, device: Any, dtype: Any) -> Decoder:
    return _scaled(source, device, dtype, (1.0,) * source.num_hidden_layers)


def _lpes(text: str, value: str | None) -> Load:
    factors = None if value is None else load_factors(Path(value))

    def load(source: Source, device: Any, dtype: Any) -> Decoder:
        if factors is not None:
            check_factors(factors, source)
            return _scaled(source, device, dtype, factors.layer_rope_scaling)
        if source.factors is None:
            raise InputError(f"lpes: {source.name} is not baked; give the factors by lpes=FILE")
        return _scaled(source, device, dtype, tuple(source.factors))

    return load


def _scaled(source: Source, device: Any, dtype: Any, factors: tuple[float, ...]) -> Decoder:
    from lpes_bake.baselines.decoder import ModelDecoder
    from lpes_bake.search.models import set_factors

    model = load_model(source, device, dtype)
    set_factors(model, factors)
    return ModelDecoder(model)


def _attention_buckets(source: Source, device: Any, dtype: Any) -> Decoder:
    from lpes_bake.baselines.attention_buckets import AttentionBuckets
    from lpes_bake.baselines.rotary import bases_for, theta_of

    bases = bases_for(theta_of(source))
    return AttentionBuckets(load_library_model(source, device, dtype), bases)


def _ms_poe(released: bool, source: Source, device: Any, dtype: Any) -> Decoder:
    from lpes_bake.baselines.ms_poe import MsPoE
    from lpes_bake.baselines.own_attention import require_llama_like

    require_llama_like(source, "ms-poe")
    return MsPoE(load_library_model(source, device, dtype), released=released)


def _moice(text: str, value: str | None) -> Load:
    if value is None:
        raise InputError(f"method {text!r}: give the routers' folder, moice=DIR; lpes-bake train-moice makes one")

    def load(source: Source, device: Any, dtype: Any) -> Decoder:
        from lpes_bake.baselines.moice import load_moice
        from lpes_bake.baselines.own_attention import require_llama_like

        require_llama_like(source, "moice")
        return load_moice(load_library_model(source, device, dtype), Path(value))

    return load


def _hidden_channel(text: str, value: str | None) -> Load:
    given: tuple[int, float] | None = None
    if value is not None:
        channel, _, scale = value.partition("/")
        try:
            given = int(channel), float(scale)
            if not math.isfinite(given[1]):
                raise ValueError
        except ValueError:
            raise InputError(f"method {text!r}: write the channel and its factor as hidden-channel=213/0.5") from None

    def load(source: Source, device: Any, dtype: Any) -> Decoder:
        from lpes_bake.baselines.hidden_channel import HiddenChannel, find_channel, middle_layers
        from lpes_bake.baselines.own_attention import require_llama_like

        require_llama_like(source, "hidden-channel")
        model = load_library_model(source, device, dtype)
        if given is None:
            return find_channel(model, load_tokenizer(source, trust_remote_code=False))
        if not 0 <= given[0] < model.config.hidden_size:
            raise InputError(f"method {text!r}: {source.name} has channels 0 to {model.config.hidden_size - 1}")
        return HiddenChannel(model, *given, middle_layers(source.num_hidden_layers))

    return load


# Name → what makes its loader from the text and its value, and an example.
METHODS: dict[str, tuple[Callable[[str, str | None], Load], str]] = {
    "base": (partial(_no_value, _base), "base"),
    "lpes": (_lpes, "lpes=factors.json"),
    "pi": (partial(_factor, "position_interpolation"), "pi=1.5"),
    "ntk": (partial(_factor, "ntk"), "ntk=2"),
    "yarn": (partial(_factor, "yarn"), "yarn=2"),
    "attention-buckets": (partial(_no_value, _attention_buckets), "attention-buckets"),
    "ms-poe": (partial(_no_value, partial(_ms_poe, False)), "ms-poe"),
    "ms-poe-released": (partial(_no_value, partial(_ms_poe, True)), "ms-poe-released"),
    "moice": (_moice, "moice=DIR"),
    "hidden-channel": (_hidden_channel, "hidden-channel=213/0.5"),
    "reorder": (partial(_no_value, _base), "reorder"),
}
