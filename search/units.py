"""Units: the smallest pieces of work of a search, and what came of them.

A unit is deterministic given the model, and each is computed once, ever (see `ledger`). So the search
is a plain program over units, and a run that was killed goes on by running it again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

Factors = tuple[float, ...]

# The task number of short plain text, where damage is measured; it has no contexts.
TEXT = -1

# The fields of a result that hold numbers which may be NaN; JSON has null for it.
_NUMBERS = ("logprob", "probability", "kl", "gradient")


@dataclass(frozen=True)
class Unit:
    """One candidate on some contexts of one task. All fields together are its key in the journal."""

    kind: str
    """"score" or "gradient"."""
    part: str
    """"search", "selection" or "report": which of the three disjoint sets of contexts."""
    task: int
    """Index of the run's tasks, or TEXT."""
    start: int
    stop: int
    """Contexts start … stop − 1 of the part. Score units of TEXT take all paragraphs, and have 0 for both."""
    factors: Factors
    accuracy: bool = False
    """Generate text where the task's metric needs it."""
    weights: tuple[float, ...] = ()
    """Gradient units of tasks: how much each gold position counts. They sum to 1; single ones may be negative.
    Of TEXT: how much logprob counts, and how much less KL does."""

    def split(self, size: int) -> list[Unit]:
        """The same work as units of at most `size` contexts or paragraphs, for several processes to share."""
        starts = range(self.start, self.stop, size)
        return [replace(self, start=start, stop=min(start + size, self.stop)) for start in starts]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Unit:
        """The unit that `to_json` was made from."""
        return cls(**{**record, "factors": tuple(record["factors"]), "weights": tuple(record["weights"])})


@dataclass(frozen=True)
class Result:
    """What came of a unit. Where there is an error, nothing else has a meaning."""

    logprob: list[list[float]] = field(default_factory=list)
    """(contexts, positions): mean log-probability of the answer's tokens, in nats.
    TEXT: (paragraphs, 1), the mean log-probability of a paragraph's tokens."""
    probability: list[list[float]] = field(default_factory=list)
    """(contexts, positions): probability of the whole answer under teacher forcing. TEXT: empty."""
    exact: list[list[bool | None]] = field(default_factory=list)
    """(contexts, positions): whether the answer was right; None where that needs generation, which was not
    asked for. TEXT: empty."""
    kl: list[float] = field(default_factory=list)
    """TEXT: (paragraphs,), the mean KL(base ‖ candidate) of a token, in nats; else empty."""
    gradient: list[float] = field(default_factory=list)
    """Gradient units: (layers,), d/d factor of Σ_p weights_p · mean over contexts of logprob[:, p]; of TEXT, of
    weights_0 · mean of logprob − weights_1 · mean of kl. Else empty."""
    tokens: int = 0
    """Tokens that went through the model, padding left out."""
    seconds: float = 0.0
    error: str | None = None
    """Why the unit failed, in one line."""

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite."""
        return all(_finite(getattr(self, name)) for name in _NUMBERS)

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that are not finite become null."""
        return {**asdict(self), **{name: _with_null(getattr(self, name)) for name in _NUMBERS}}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Result:
        """The result that `to_json` was made from; null becomes NaN."""
        return cls(**{**record, **{name: _with_nan(record[name]) for name in _NUMBERS}})


def joined(results: Sequence[Result]) -> Result:
    """The result of a gradient unit, from those of the units that it was split into, none of which failed."""
    contexts = [len(result.logprob) for result in results]
    shares = [result.gradient for result in results]
    return Result(
        logprob=[row for result in results for row in result.logprob],
        probability=[row for result in results for row in result.probability],
        exact=[row for result in results for row in result.exact],
        kl=[one for result in results for one in result.kl],
        # Each is of a mean over its own contexts.
        gradient=np.average(shares, axis=0, weights=contexts).tolist(),
        tokens=sum(result.tokens for result in results),
        seconds=sum(result.seconds for result in results),
    )


def _finite(value: Any) -> bool:
    return all(map(_finite, value)) if isinstance(value, list) else math.isfinite(value)


def _with_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_null(one) for one in value]
    return value if math.isfinite(value) else None


def _with_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_nan(one) for one in value]
    return math.nan if value is None else value
