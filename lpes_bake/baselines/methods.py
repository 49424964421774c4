"""What can stand behind --methods: names, with a value where one is needed, and the decoder that each means.

torch is imported inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpes_bake.factors import check_factors, load_factors
from lpes_bake.loading import load_model
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

    def load(self, source: Source, device: Any, dtype: Any) -> Decoder:
        """The model of `source`, which may be baked, under this method. InputError where it cannot be applied."""
        return self._load(source, device, dtype)

    def rearrange(self, example: Example) -> Example:
        """The example as this method asks it."""
        return example


def parse_method(text: str) -> Method:
    """The method that was written as NAME or NAME=VALUE. InputError, one line, for what is none."""
    name, _, value = text.partition("=")
    if name not in METHODS:
        raise InputError(f"there is no method {name!r}; there are: {', '.join(METHODS)}")
    return Method(text, METHODS[name][0](text, value or None))


def _base(text: str, value: str | None) -> Load:
    return lambda source, device, dtype: _scaled(source, device, dtype, (1.0,) * source.num_hidden_layers)


def _interpolated(text: str, value: str | None) -> Load:
    try:
        factor = float(value or "")
    except ValueError:
        raise InputError(f"method {text!r}: it needs a positive factor, as in pi=1.5") from None
    return lambda source, device, dtype: _scaled(source, device, dtype, (factor,) * source.num_hidden_layers)


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


# Name → what makes its loader from the text and its value, and an example.
METHODS: dict[str, tuple[Callable[[str, str | None], Load], str]] = {
    "base": (_base, "base"),
    "lpes": (_lpes, "lpes=factors.json"),
    "pi": (_interpolated, "pi=1.5"),
}
