"""MoICE, a mixture of in-context experts (Lin et al., arXiv 2406.19598).

Seven RoPE bases are experts. In every layer a router weighs them anew for each token and head, from the query that is
rotated by base 0, the model's own:

    logits = gate_2(act(gate_1 q) · gate_3 q)

without biases, softmax over the experts, those beyond the top k set to 0, the rest divided by their sum; the attention
*outputs* of the experts are added up with these weights. The heads of a layer share a router. Keys are cached
unrotated, and rotated and attended to seven times in every call.

Chosen here: gates are float32, whatever the model's precision, and so are their inputs (the authors' are bfloat16).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from transformers.activations import ACT2FN

from lpes_bake.baselines.decoder import ModelDecoder
from lpes_bake.baselines.own_attention import attention, key_positions, rotated, take_over
from lpes_bake.baselines.rotary import rotary_with_base
from lpes_bake.factors import save_bytes
from lpes_bake.search.errors import InputError

ROUTERS_FILE = "routers.safetensors"


class Router(nn.Module):
    """The gates of one layer."""

    def __init__(self, head_dim: int, experts: int, activation: str) -> None:
        super().__init__()
        self.gate_1 = nn.Linear(head_dim, experts, bias=False)
        self.gate_2 = nn.Linear(experts, experts, bias=False)
        self.gate_3 = nn.Linear(head_dim, experts, bias=False)
        self._activation = ACT2FN[activation]

    def forward(self, query: Tensor) -> Tensor:
        """Logits (…, experts) of queries (…, head_dim)."""
        query = query.to(self.gate_1.weight.dtype)
        logits: Tensor = self.gate_2(self._activation(self.gate_1(query)) * self.gate_3(query))
        return logits


def new_routers(config: Any, experts: int, seed: int = 0) -> nn.ModuleList:
    """A router for each layer of a model's config, drawn as the authors' are: normal, with its initializer_range."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    routers = nn.ModuleList(Router(head_dim, experts, config.hidden_act) for _ in range(config.num_hidden_layers))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for gate in routers.parameters():
            gate.normal_(std=config.initializer_range, generator=generator)
    return routers


class MoICE(ModelDecoder):
    """model: one of transformers' own with Llama's attention, which it takes over. routers: one for each layer."""

    def __init__(self, model: Any, routers: nn.ModuleList, bases: Sequence[float], top_k: int) -> None:
        super().__init__(model)
        own = model.base_model.rotary_emb
        self.routers = routers.to(own.inv_freq.device)
        self.top_k = top_k
        self.balance: list[tuple[Tensor, Tensor]] | None = None
        """Where a list, each layer adds (experts,) how often each expert was among the top k, and its mean
        probability."""
        self._rotaries = [rotary_with_base(model, base) for base in bases]
        self._positions: Tensor | None = None
        take_over(model, range(model.config.num_hidden_layers), self._attend)

    def _attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        positions: Tensor,
        scale: float,
    ) -> Tensor:
        new = positions.shape[1]
        weights = None
        # Added up as they come: seven outputs at once would be memory that the method does not need.
        mixed = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        for expert, (cos, sin) in enumerate(self._tables(value, positions, key.shape[2])):
            turned = rotated(query, cos[:, :, -new:], sin[:, :, -new:])
            if weights is None:
                weights = self._weigh(layer, turned).to(query.dtype)
            seen = attention(turned, rotated(key, cos, sin), value, mask, scale)
            mixed = mixed + weights[..., expert, None] * seen
        return mixed.to(query.dtype)

    def _tables(self, like: Tensor, positions: Tensor, keys: int) -> list[tuple[Tensor, Tensor]]:
        """For each expert, cos and sin (B, 1, keys, d). The layers of a forward pass share them."""
        if self._positions is not positions:
            where = key_positions(positions, keys)
            tables = [rotary(like, where) for rotary in self._rotaries]
            self._positions, self._shared = positions, [(cos[:, None], sin[:, None]) for cos, sin in tables]
        return self._shared

    def _weigh(self, layer: int, query: Tensor) -> Tensor:
        """(B, H, T, experts): the experts' weights for queries (B, H, T, d)."""
        logits = self.routers[layer](query)
        probabilities = logits.softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter(-1, logits.topk(self.top_k, dim=-1).indices, 1.0)
        if self.balance is not None:
            self.balance.append((chosen.flatten(0, -2).mean(0), probabilities.flatten(0, -2).mean(0)))
        kept: Tensor = probabilities * chosen
        return kept / kept.sum(-1, keepdim=True)


def save_routers(routers: nn.ModuleList, folder: Path, about: dict[str, Any]) -> None:
    """Write the routers into a folder. about: JSON values; `bases` and `top_k` must be among them."""
    tensors = {name: gate.detach().cpu().contiguous() for name, gate in routers.state_dict().items()}
    save_bytes(folder / ROUTERS_FILE, save(tensors, metadata={"moice": json.dumps(about)}))


def load_moice(model: Any, folder: Path) -> MoICE:
    """The model with the routers that were saved in a folder. InputError where there are none that fit."""
    return MoICE(model, *load_routers(model.config, folder))


def load_routers(config: Any, folder: Path) -> tuple[nn.ModuleList, list[float], int]:
    """The routers that were saved in a folder, for a model of that config; the experts' bases, and how many of them a
    token uses. InputError where there are none that fit."""
    path = folder / ROUTERS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["moice"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 — it is no dict
        routers = new_routers(config, len(about["bases"]))
        routers.load_state_dict(tensors)
        bases, top_k = about["bases"], about["top_k"]
    except FileNotFoundError:
        raise InputError(f"{folder} has no {ROUTERS_FILE}; train routers with lpes-bake train-moice") from None
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InputError(f"{path} holds no routers of lpes-bake train-moice; train them again") from error
    except RuntimeError as error:
        raise InputError(f"{path} holds routers of another model; train them for this one") from error
    return routers, bases, top_k
