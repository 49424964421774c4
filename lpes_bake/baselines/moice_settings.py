"""How MoICE's routers are trained; the defaults are the published ones. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lpes_bake.search.errors import InputError

EXPERTS = 7


@dataclass(frozen=True)
class MoICESettings:
    """Settings of a training; steps · sequences rows of the data are read, from the first on."""

    steps: int = field(default=7, metadata={"help": "Steps of the optimizer."})
    sequences: int = field(default=128, metadata={"help": "Sequences in a step."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Learning rate, constant."})
    balance: float = field(default=0.3, metadata={"help": "Weight of the load-balancing loss."})
    top_k: int = field(default=EXPERTS, metadata={"help": f"Experts that a token uses, of {EXPERTS}."})
    max_length: int = field(default=4608, metadata={"help": "Tokens of a sequence at most; what is longer is cut."})
    seed: int = field(default=0, metadata={"help": "Seeds the routers' first weights."})

    def __post_init__(self) -> None:
        for name in ("steps", "sequences", "top_k"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.top_k > EXPERTS:
            raise InputError(f"top_k is {self.top_k}; there are only {EXPERTS} experts")
        if self.max_length < 2:
            raise InputError(f"max_length is {self.max_length}; a token is predicted from one before, so it must be 2")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed}; it must be 0 or more, and below 2**63")
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"learning_rate is {self.learning_rate}; it must be positive")
        if not 0 <= self.balance < math.inf:
            raise InputError(f"balance is {self.balance}; it must be 0 or more")
