"""What a comparison needs of a model, whatever a method does inside it."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor

from lpes_bake.search.models import head_logits


class Decoder(Protocol):
    """A causal language model as the comparison sees it: a prompt goes in once, then tokens follow."""

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Any]:
        """(B, S) left-padded token ids and their mask → log-probabilities (B, V) of the next token, and the state to
        go on from."""

    def decode(self, state: Any, input_ids: Tensor) -> Tensor:
        """(B, T) further ids → log-probabilities (B, T, V) of what follows each; the state is moved on in place."""


@dataclass
class CacheState:
    """Where a ModelDecoder stands: the model's cache, and the mask (B, tokens so far) that it was filled with."""

    cache: Any
    mask: Tensor


class ModelDecoder:
    """Any transformers model, with its own cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        # transformers 5.24 renamed it.
        self._cache_name = "cache" if "cache" in signature(model.base_model.forward).parameters else "past_key_values"

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, CacheState]:
        """See `Decoder`."""
        state = CacheState(None, attention_mask)
        hidden = self._call(state, input_ids)
        return self._logprobs(hidden[:, -1]), state

    def decode(self, state: CacheState, input_ids: Tensor) -> Tensor:
        """See `Decoder`."""
        state.mask = torch.cat((state.mask, torch.ones_like(input_ids)), dim=-1)
        return self._logprobs(self._call(state, input_ids))

    @torch.inference_mode()
    def _call(self, state: CacheState, input_ids: Tensor) -> Tensor:
        """Last hidden states (B, T, hidden_size) of ids whose mask is the state's already."""
        places = (state.mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        output = self.model.base_model(
            input_ids=input_ids,
            attention_mask=state.mask,
            position_ids=places,
            use_cache=True,
            **{self._cache_name: state.cache},
        )
        state.cache = output[self._cache_name]
        hidden: Tensor = output.last_hidden_state
        return hidden

    @torch.inference_mode()
    def _logprobs(self, hidden: Tensor) -> Tensor:
        logits = head_logits(self.model, hidden)
        # float32, or more where the model has more.
        logprobs: Tensor = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        return logprobs
