"""Pages that stand alone: templates with their figures inside; and how numbers are printed, there and elsewhere."""

from __future__ import annotations

import base64
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Scale(NamedTuple):
    """How a metric is printed: its name, the factor to its unit, digits."""

    name: str
    factor: float
    digits: int


SCALES = {
    "accuracy": Scale("Accuracy, %", 100, 1),
    "logprob": Scale("Log-probability of the answer, nats a token", 1, 3),
}


def render_page(template: str, figures: Mapping[str, Path], **content: Any) -> str:
    """A template as HTML. figures: name → PNG, which becomes a part of the page."""
    import jinja2

    # Names of models, tasks and errors are data: all of them are escaped.
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read_template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        fixed=fixed, signed=signed, between=between, change=change, count=count, duration=duration, value=value
    )
    inside = {
        name: f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" for name, path in figures.items()
    }
    return environment.get_template(template).render(figures=inside, scales=SCALES, **content)


def read_template(name: str) -> str:
    """A template that comes along."""
    return importlib.resources.files("lpes_bake.templates").joinpath(name).read_text(encoding="utf-8")


def fixed(number: float | None, digits: int, factor: float = 1.0) -> str:
    """A number with so many digits, a true minus, and a dash for one that is not known."""
    return "–" if number is None else f"{number * factor + 0.0:.{digits}f}".replace("-", "−")


def signed(number: float | None, digits: int, factor: float = 1.0) -> str:
    """A difference, with its sign."""
    return "–" if number is None else f"{number * factor + 0.0:+.{digits}f}".replace("-", "−")


def between(interval: Sequence[float | None], digits: int, factor: float = 1.0) -> str:
    """The two ends of (mean, low, high)."""
    return f"{fixed(interval[1], digits, factor)} to {fixed(interval[2], digits, factor)}"


def change(interval: Sequence[float | None], digits: int, factor: float = 1.0) -> str:
    """The two ends of a difference (mean, low, high), with their signs."""
    return f"{signed(interval[1], digits, factor)} to {signed(interval[2], digits, factor)}"


def estimate(interval: Sequence[float | None], digits: int, factor: float = 1.0) -> str:
    """(mean, low, high): the mean, and the ends in brackets."""
    return f"{fixed(interval[0], digits, factor)} [{between(interval, digits, factor)}]"


def difference(interval: Sequence[float | None], digits: int, factor: float = 1.0) -> str:
    """A difference (mean, low, high), all with their signs."""
    return f"{signed(interval[0], digits, factor)} [{change(interval, digits, factor)}]"


def count(number: float | None) -> str:
    """A whole number with its thousands apart."""
    return "–" if number is None else f"{number:,.0f}"


def duration(seconds: float | None) -> str:
    """A time for the eye."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def value(content: Any) -> str:
    """A setting of any kind."""
    if content is None:
        return "–"
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
