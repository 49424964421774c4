"""Where to compute, and in which precision."""

from __future__ import annotations

from typing import Any

from lpes_bake.search.errors import InputError

DTYPES = ("float32", "bfloat16", "float16")


def pick_device(name: str | None = None, local_rank: int | None = None) -> Any:
    """The torch.device called `name` ("cpu", "cuda", "cuda:1", "mps"), or the best there is: cuda, mps, cpu.

    local_rank: number of this process on its machine, where there are several; each takes a GPU of its own.
    """
    import torch

    if name is None:
        if torch.cuda.is_available():
            name = "cuda"
        else:
            return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if name == "cuda" and local_rank is not None:
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
        # The only test that holds for every kind of device, and for the number behind the colon.
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {name!r} cannot be used here: {reason}; try cpu") from error
    if device.type == "meta":
        raise InputError("device 'meta' holds no numbers; use cpu, cuda or mps")
    return device


def pick_dtype(name: str | None, device: Any) -> Any:
    """The torch.dtype called `name`, or the one that is fast on `device`.

    bfloat16 on a GPU that computes in it, else float32: on most CPUs bfloat16 is many times slower.
    """
    import torch

    if name is None:
        fast = torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if fast else torch.float32
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is not known; use one of {', '.join(DTYPES)}")
    return getattr(torch, name)
