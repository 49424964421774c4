"""A slow, obvious Llama and Qwen2: one sequence, no cache, float64, each head by itself. The weights are those of a
transformers model; nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# (layer's number, its attention module, its input (S, hidden_size)) → (H, S, head_dim)
Heads = Callable[[int, Any, torch.Tensor], torch.Tensor]


@torch.no_grad()
def logprobs_by_hand(model: Any, ids: torch.Tensor, heads: Heads) -> torch.Tensor:
    """(S, V) log-probabilities of what follows each of the ids (S,), with the attention heads that `heads` computes."""
    hidden = model.model.embed_tokens.weight[ids].double()
    for number, layer in enumerate(model.model.layers):
        seen = heads(number, layer.self_attn, norm(layer.input_layernorm, hidden))
        hidden = hidden + linear(layer.self_attn.o_proj, torch.cat(list(seen), dim=-1))
        inner = norm(layer.post_attention_layernorm, hidden)
        gate = torch.nn.functional.silu(linear(layer.mlp.gate_proj, inner))
        hidden = hidden + linear(layer.mlp.down_proj, gate * linear(layer.mlp.up_proj, inner))
    return linear(model.lm_head, norm(model.model.norm, hidden)).log_softmax(-1)


def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm."""
    scale = (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
    found: torch.Tensor = x * scale * module.weight.double()
    return found


def linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    """x W^T + b."""
    found: torch.Tensor = x @ module.weight.double().T
    return found if module.bias is None else found + module.bias.double()


def projected(projection: Any, x: torch.Tensor, head_dim: int) -> list[torch.Tensor]:
    """What a projection gives to each head: (S, head_dim) each."""
    return list(linear(projection, x).split(head_dim, dim=-1))


def turned(x: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """RoPE of x (S, d) at positions (S,): dimensions i and i + d/2 are a complex number, turned by m theta^(−2i/d)."""
    half = x.shape[-1] // 2
    angles = torch.outer(positions.double(), theta ** (-torch.arange(half, dtype=torch.float64) / half))
    result = torch.complex(x[:, :half], x[:, half:]) * torch.exp(1j * angles)
    return torch.cat((result.real, result.imag), dim=-1)


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one head, (S, d) each."""
    scores = query @ key.T / query.shape[-1] ** 0.5
    hidden = torch.ones_like(scores).triu(1).bool()
    weights: torch.Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return weights @ value
