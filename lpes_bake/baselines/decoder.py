"""A language model as the comparison sees it, and the plain one: a transformers model with its own cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from lpes_bake.search.models import cache_argument, device_of, head_logits, length_dependent


class Decoder(Protocol):
    """A causal language model as the comparison sees it: a prompt goes in once, then tokens follow.

    States can be copied with copy.deepcopy, and each goes its own way from there.
    """

    in_parts: bool
    """Whether tokens are read alike by `prefill` and by `decode`. Where not, for the end of the prompt, or its length,
    decides how all of it is read, a prompt must go in whole."""

    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Any]:
        """(B, S) left-padded token ids and their mask → log-probabilities (B, V) of the next token, and the state
        to go on from. The mask is 1 for tokens and 0 for padding."""

    def decode(self, state: Any, input_ids: Tensor) -> Tensor:
        """(B, T) further ids → log-probabilities (B, T, V) of what follows each; the state is moved on in place."""


@dataclass
class State:
    """What a ModelDecoder goes on from. mask: (B, tokens so far), 1 for tokens and 0 for padding."""

    cache: Any
    mask: Tensor


class ModelDecoder:
    """Any transformers model, with its own cache. Log-probabilities are float32."""

    def __init__(self, model: Any) -> None:
        self.model = model
        # Where frequencies depend on the length of a call, what was read first would have others than the rest.
        self.in_parts = not length_dependent(model)
        self._cache_argument = cache_argument(model)

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, State]:
        """See Decoder."""
        state = self.new_state(attention_mask)
        return self._logprobs(self._read(state, input_ids)[:, -1]), state

    @torch.inference_mode()
    def decode(self, state: State, input_ids: Tensor) -> Tensor:
        """See Decoder."""
        ones = state.mask.new_ones(input_ids.shape)
        state.mask = torch.cat((state.mask, ones), dim=1)
        return self._logprobs(self._read(state, input_ids))

    def new_state(self, attention_mask: Tensor) -> State:
        """The state before a prompt is read."""
        return State(DynamicCache(), attention_mask.to(device_of(self.model.get_input_embeddings())))

    def _read(self, state: State, input_ids: Tensor) -> Tensor:
        """Last hidden states (B, T, hidden_size) of ids whose mask the state has already."""
        # Padding stands at position 0: nothing sees it.
        positions = (state.mask.cumsum(-1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        hidden: Tensor = self.model.base_model(
            input_ids=input_ids.to(state.mask.device),
            attention_mask=state.mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_argument: state.cache},
        ).last_hidden_state
        return hidden

    def _logprobs(self, hidden: Tensor) -> Tensor:
        logits: Tensor = head_logits(self.model, hidden)
        return logits.float().log_softmax(-1)
