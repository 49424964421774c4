"""What a method costs beside the base model: time to read a prompt, time of each further token, peak memory.

Both are loaded and take turns, so that what slows the machine down for a while slows both.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lpes_bake.baselines.decoder import Decoder
from lpes_bake.search.scoring import out_of_memory

# Rounds that count, behind one that warms up, and tokens that are decoded in each.
ROUNDS = 5
DECODED = 16

Load = Callable[[], Decoder]


@dataclass
class Times:
    """One decoder's rounds. prefill, decode: seconds of the prompt, and of each further token.

    memory: bytes at the peak, weights among them; None where nothing tells (see `Memory`).
    """

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    memory: int | None = None


@dataclass(frozen=True)
class Timing:
    """A method and the base model. in_turn: whether they were loaded at once and took turns."""

    base: Times
    method: Times
    in_turn: bool

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class Clock:
    """Measures decoders on one prompt, of which DECODED tokens are read again behind it, one by one."""

    def __init__(self, prompt: Sequence[int], device: Any) -> None:
        self._prompt = torch.tensor([prompt], dtype=torch.long, device=device)
        self._mask = torch.ones_like(self._prompt)
        self._device = device
        self._memory = Memory(device)

    def warm_up(self, load: Load) -> None:
        """The first model in a process brings libraries into memory, which must not count for it."""
        self._round(load())

    def beside(self, base: Load, method: Load) -> Timing:
        """A method and the base model in turn, or one after the other where memory does not hold both."""
        try:
            first, second = self._measured([base, method])
            return Timing(first, second, in_turn=True)
        except _TooLarge:
            pass
        # Outside of the handler, which keeps the models alive.
        ((alone,), (other,)) = self._measured([base]), self._measured([method])
        return Timing(alone, other, in_turn=False)

    def _measured(self, loads: Sequence[Load]) -> list[Times]:
        """The rounds of decoders that are loaded together."""
        found = [Times() for _ in loads]
        self._memory.free()
        try:
            weights: list[int | None] = []
            decoders: list[Decoder] = []
            for load in loads:
                before = self._memory.held()
                if weights and self._memory.lacks(weights[-1]):
                    raise _TooLarge
                decoders.append(load())
                self._round(decoders[-1])
                weights.append(_difference(self._memory.held(), before))
            added: list[list[int | None]] = [[] for _ in loads]
            for _ in range(ROUNDS):
                for times, decoder, peaks in zip(found, decoders, added, strict=True):
                    before = self._memory.held()
                    self._memory.reset_peak()
                    prefill, decode = self._round(decoder)
                    peaks.append(_difference(self._memory.peak(), before))
                    times.prefill.append(prefill)
                    times.decode.append(decode)
        except Exception as error:
            # A loader tells of it in an error of its own.
            if len(loads) > 1 and out_of_memory(error):
                raise _TooLarge from None
            raise
        for times, own, peaks in zip(found, weights, added, strict=True):
            known = [one for one in peaks if one is not None]
            times.memory = own + max(known) if own is not None and known else None
        return found

    @torch.inference_mode()
    def _round(self, decoder: Decoder) -> tuple[float, float]:
        """Seconds of the prompt, and of one further token."""
        started = self._now()
        _, state = decoder.prefill(self._prompt, self._mask)
        read = self._now()
        for i in range(DECODED):
            decoder.decode(state, self._prompt[:, i % self._prompt.shape[1]][:, None])
        return read - started, (self._now() - read) / DECODED

    def _now(self) -> float:
        """The time when the device has done all that it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()


class _TooLarge(Exception):
    """Two models do not fit into memory together."""


class Memory:
    """Bytes in use: those that torch has allocated on a GPU; on a CPU those of the process, where Linux tells."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._resettable = False

    def held(self) -> int | None:
        """Now."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
            # What was freed goes back to the system, and so does not count.
            trim(0)
        return _kilobytes("/proc/self/status", "VmRSS") if self._device.type == "cpu" else None

    def peak(self) -> int | None:
        """The most since `reset_peak`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _kilobytes("/proc/self/status", "VmHWM") if self._resettable else None

    def reset_peak(self) -> None:
        """Forget what was in use before."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._device.type == "cpu":
            # 5: the high-water mark becomes what is in use now.
            self._resettable = _write("/proc/self/clear_refs", "5")

    def free(self) -> None:
        """Give back what nothing uses any more; models hold on to themselves until they are collected."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def lacks(self, wanted: int | None) -> bool:
        """Whether a CPU's memory has no room for so much; a GPU says so by itself."""
        room = _kilobytes("/proc/meminfo", "MemAvailable") if self._device.type == "cpu" else None
        return room is not None and wanted is not None and room < wanted


def _kilobytes(path: str, name: str) -> int | None:
    """A line such as "VmRSS:  123 kB" of a file of Linux, in bytes; None where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _write(path: str, text: str) -> bool:
    """Whether it could be written."""
    try:
        Path(path).write_text(text)
    except OSError:
        return False
    return True


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before
