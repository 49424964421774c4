"""The processes of one run: one, or several that `accelerate launch` or `torchrun` started.

Every process runs the same search from the same seed. They exchange what they computed and nothing
else, so that a connection for plain objects over the CPU (gloo) is enough, whatever computes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

Object = TypeVar("Object")

# How long one process may be behind the others. A unit is minutes at most, loading a model not much longer.
PATIENCE = timedelta(hours=2)


class Processes(Protocol):
    """What the ledger needs to know of the processes. All of them must call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """Number of this process; 0 is the one that writes."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def gather(self, value: Object) -> list[Object]:
        """The values of all processes, in order of rank, on each of them."""

    def broadcast(self, value: Object) -> Object:
        """Process 0's value, on each of them."""


class PeerLost(RuntimeError):
    """Another process of the run has ended, so that this one cannot go on."""


class Single:
    """The only process."""

    rank = 0
    world_size = 1

    def gather(self, value: Object) -> list[Object]:
        """See `Processes`."""
        return [value]

    def broadcast(self, value: Object) -> Object:
        """See `Processes`."""
        return value


class Distributed:
    """One of the processes of torch.distributed, whose process group is up.

    When a process dies of an error or a signal, its connections close, and what the others wait for
    raises PeerLost: none of them hangs.
    """

    def __init__(self) -> None:
        import torch.distributed

        self._torch = torch.distributed
        self.rank: int = torch.distributed.get_rank()
        self.world_size: int = torch.distributed.get_world_size()

    def gather(self, value: Object) -> list[Object]:
        """See `Processes`."""
        values: list[Any] = [None] * self.world_size
        try:
            self._torch.all_gather_object(values, value)
        except RuntimeError as error:
            raise PeerLost("another process of this run has ended; its own message says why") from error
        return values

    def broadcast(self, value: Object) -> Object:
        """See `Processes`."""
        values: list[Any] = [value if self.rank == 0 else None]
        try:
            self._torch.broadcast_object_list(values)
        except RuntimeError as error:
            raise PeerLost("another process of this run has ended; its own message says why") from error
        received: Object = values[0]
        return received


def too_few() -> str | None:
    """Why there is one process although the launcher was told to start more; None where that is not so.

    `accelerate launch --num_processes 2` starts a single process on a machine without several GPUs, sets
    the address at which processes would meet, and says nothing.
    """
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        return (
            "accelerate launch has started one process only, as it does where it sees no second GPU; "
            "with --multi_gpu it starts all of them, on a CPU too"
        )
    return None


@contextmanager
def connected() -> Iterator[Processes]:
    """The processes of this run, as the launcher's environment variables (WORLD_SIZE, RANK, …) describe them."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Single()
        return
    import torch.distributed

    torch.distributed.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield Distributed()
    finally:
        torch.distributed.destroy_process_group()
