"""Attention Buckets (Chen et al., "Fortify the Shortest Stave in Attention", arXiv 2312.04455).

The model reads everything N times, each time with another RoPE base; the N distributions of the next token are summed,
each weighted by its own largest probability, which is how sure that pass is:

    p(token) = Σ_n c_n p_n(token) / Σ_n c_n,    c_n = max p_n

Here the passes are N · B rows of one batch, so each has its own part of the KV cache: N times the compute and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lpes_bake.baselines.decoder import ModelDecoder, State
from lpes_bake.baselines.rotary import rotary_with_base


class BucketRotary(nn.Module):
    """The rotary embeddings of equal parts of a batch, which may differ."""

    def __init__(self, rotaries: Sequence[nn.Module]) -> None:
        super().__init__()
        self.rotaries = nn.ModuleList(rotaries)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """cos and sin (batch, tokens, rotated dimensions) for positions (batch, tokens)."""
        parts = position_ids.chunk(len(self.rotaries))
        tables = [rotary(x, part) for rotary, part in zip(self.rotaries, parts, strict=True)]
        return tuple(torch.cat(one) for one in zip(*tables, strict=True))


class AttentionBuckets:
    """A decoder of N passes, for N bases. model: one of transformers' own, which it takes over."""

    def __init__(self, model: Any, bases: Sequence[float]) -> None:
        self._decoder = ModelDecoder(model)
        self.in_parts = self._decoder.in_parts
        self.passes = len(bases)
        model.base_model.rotary_emb = BucketRotary([rotary_with_base(model, base) for base in bases])

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, State]:
        """See Decoder."""
        logprobs, state = self._decoder.prefill(input_ids.repeat(self.passes, 1), attention_mask.repeat(self.passes, 1))
        return self._mixture(logprobs), state

    def decode(self, state: State, input_ids: Tensor) -> Tensor:
        """See Decoder."""
        return self._mixture(self._decoder.decode(state, input_ids.repeat(self.passes, 1)))

    def _mixture(self, logprobs: Tensor) -> Tensor:
        """(N · B, …, V) log-probabilities of all passes → (B, …, V) of their weighted sum."""
        passes = logprobs.unflatten(0, (self.passes, -1))
        confidence = passes.amax(-1, keepdim=True)
        mixed: Tensor = (passes + confidence).logsumexp(0) - confidence.logsumexp(0)
        return mixed
