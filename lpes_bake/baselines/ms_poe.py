"""Ms-PoE, multi-scale positional encoding (Zhang et al., "Found in the Middle", arXiv 2403.04797).

From layer 2 on, each head rotates a token at position m as if it stood at m / r, with its own ratio r out of

    r_i = r_min + (r_max − r_min) · i / H,    i = 0 … H − 1

(so r_max is never reached). A head's score is the share of keys whose attention is above 3 times the mean, from
unrotated queries and keys, for the last token of the prompt: the most position-aware head gets the smallest ratio.
Which head gets which is decided when the prompt is read, and stays. Here each row of a batch decides for itself, over
its own tokens.

As released, two things are otherwise: head i gets r_order[i], where order lists heads by falling score, so an argsort
stands where ranks are meant, and the most position-aware head gets any ratio; and where query heads share a key head,
keys are rotated by the ratio of the first of them. As described, a query meets keys of its own ratio, so the cache
holds rotated keys for each query head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpes_bake.baselines.decoder import ModelDecoder, State
from lpes_bake.baselines.own_attention import attention, key_positions, rotated, take_over

FIRST_LAYER = 2
RATIO_MIN, RATIO_MAX = 1.2, 1.8
# A key stands out when its attention is above so many times the mean.
OUTLIER = 3


@dataclass
class MsPoEState(State):
    """ratios: layer → (B, H), filled while the prompt is read."""

    ratios: dict[int, Tensor]


class MsPoE(ModelDecoder):
    """model: one of transformers' own with Llama's attention, which it takes over."""

    def __init__(
        self, model: Any, *, released: bool, ratio_min: float = RATIO_MIN, ratio_max: float = RATIO_MAX
    ) -> None:
        super().__init__(model)
        self.in_parts = False  # The prompt's last token sets the ratios.
        config = model.config
        self.released = released
        heads = config.num_attention_heads
        self.ratios = [ratio_min + (ratio_max - ratio_min) * i / heads for i in range(heads)]
        self._decided: dict[int, Tensor] = {}
        layers = range(FIRST_LAYER, config.num_hidden_layers)
        take_over(model, layers, self._attend)
        self._head_dim = model.base_model.layers[0].self_attn.head_dim
        self._group = heads // config.num_key_value_heads
        if not released and self._group > 1:
            for layer in layers:
                model.base_model.layers[layer].self_attn.k_proj.register_forward_hook(self._for_each_query_head)

    def new_state(self, attention_mask: Tensor) -> MsPoEState:
        """The state before a prompt is read: no ratios yet."""
        state = super().new_state(attention_mask)
        return MsPoEState(state.cache, state.mask, {})

    def _read(self, state: State, input_ids: Tensor) -> Tensor:
        assert isinstance(state, MsPoEState)
        self._decided = state.ratios
        return super()._read(state, input_ids)

    def _for_each_query_head(self, module: Any, args: Any, keys: Tensor) -> Tensor:
        """(B, T, key heads · d) → (B, T, H · d)."""
        heads: Tensor = keys.unflatten(-1, (-1, self._head_dim))
        return heads.repeat_interleave(self._group, dim=-2).flatten(-2)

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
        if layer not in self._decided:
            real = key_positions(positions, key.shape[2]) >= 0
            self._decided[layer] = self.ratios_of(awareness(query[:, :, -1], key, real, scale)).to(query.device)
        ratios = self._decided[layer]
        new = positions.shape[1]
        # In place: the cache keeps its keys in this very tensor, and those before are rotated already.
        key[:, :, -new:] = rotated(
            key[:, :, -new:], *self._tables(key, positions, ratios[:, :: query.shape[1] // key.shape[1]])
        )
        return attention(rotated(query, *self._tables(query, positions, ratios)), key, value, mask, scale)

    def ratios_of(self, scores: Tensor) -> Tensor:
        """(B, H) scores of heads → (B, H) ratios. Among equal scores, the first head counts as the higher one."""
        order = scores.argsort(dim=-1, descending=True, stable=True)
        ratios = torch.tensor(self.ratios, device=scores.device)
        return ratios[order if self.released else order.argsort(dim=-1)]

    def _tables(self, like: Tensor, positions: Tensor, ratios: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (B, heads, T, d) for positions (B, T) divided by ratios (B, heads), by the model's own rotary."""
        scaled = positions[:, None] / ratios[:, :, None]
        cos, sin = self.model.base_model.rotary_emb(like, scaled.flatten(0, 1))
        return cos.unflatten(0, ratios.shape), sin.unflatten(0, ratios.shape)


def awareness(query: Tensor, key: Tensor, real: Tensor, scale: float) -> Tensor:
    """(B, H): the share of keys whose attention is above OUTLIER times the mean.

    query: (B, H, d), one token's; key: (B, key heads, S, d); real: (B, S), false for padding.
    """
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = (keys @ query[..., None])[..., 0].float() * scale
    weights = logits.masked_fill(~real[:, None], -torch.inf).softmax(-1)
    count = real.sum(-1)[:, None]
    return (weights * count[..., None] > OUTLIER).sum(-1) / count
