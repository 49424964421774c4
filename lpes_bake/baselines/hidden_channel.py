"""Scaling the positional channel of hidden states (Yu et al., arXiv 2406.02536, Findings of ACL 2025).

Some channel of a model's hidden states grows or falls with the position of the token. In the middle layers it is scaled
by a factor s where the last token attends: that token's query, and all keys that it meets, are computed from attention
inputs h whose channel c is multiplied by s; values are not. All tokens before attend as always, so nothing else of the
prompt changes. While decoding, every new token is the last one in its turn.

From the paper:
- The channel is found on random strings (`find_channel`): hidden states are averaged over them, a cubic polynomial of
  the position is fitted to each channel in each layer; channels whose fit is monotone in more than a quarter of the
  layers are candidates; the 10 smoothest of these, by the integral of the squared second derivative, are tried with
  s = 0 on key-value retrieval; the one with the lowest loss wins. Then s is the best of 0.5, 0, −0.5 and −1.
- The layers are the middle ones: 10 to 25 of 32.

Chosen here, where the paper leaves it open or its code does otherwise:
- h is the attention's input, behind the layer's norm, as in the authors' code.
- Layers of a model of L layers: those from 10/32 to 26/32 of the depth.
- 64 strings of 1,000 tokens (the paper: 2,000; its code: 200), printable characters, the first 30 tokens left out.
- Before its smoothness is taken, a channel is brought to the range from 0 to 1 and averaged over windows of 100 tokens;
  second differences stand for the derivative, and their mean over the channel's monotone layers counts.
- 32 generated contexts of key-value retrieval (16 pairs), each asked at the beginning, in the middle and at the end: 96
  questions (the paper: 100), in the prompt format of the comparison, and from the part that searches use, so that none
  is a question of a comparison. A channel that does not lower the loss is taken all the same: s = 1 is not among the
  paper's factors.
"""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lpes_bake.baselines.decoder import ModelDecoder, State
from lpes_bake.search.errors import InputError
from lpes_bake.search.kv_retrieval import KVRetrieval
from lpes_bake.search.models import device_of
from lpes_bake.search.prompts import Encoded, take

STRINGS, STRING_TOKENS, SKIPPED, WINDOW = 64, 1000, 30, 100
CANDIDATES = 10
SCALES = (0.5, 0.0, -0.5, -1.0)
CONTEXTS = 32


def middle_layers(layers: int) -> range:
    """The layers that are scaled: 10 to 25 of 32."""
    return range(round(layers * 10 / 32), round(layers * 26 / 32))


class TwofoldCache(DynamicCache):
    """Of keys that come twice, plain and scaled, it keeps the scaled ones and hands back the plain ones."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys have twice as many heads as values where they come twice; only into an empty cache."""
        if key_states.shape[1] == value_states.shape[1]:
            found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            return found
        plain, scaled = key_states.chunk(2, dim=1)
        super().update(scaled, value_states, layer_idx, *args, **kwargs)
        return plain, value_states


class HiddenChannel(ModelDecoder):
    """model: one of transformers' own with Llama's attention, which it takes over.

    All tokens of a prompt but its last are read first: in `layers`, k_proj gives their keys twice, so that they
    attend with the plain ones, and the last token meets the scaled ones in the cache.
    """

    def __init__(self, model: Any, channel: int, scale: float, layers: Iterable[int]) -> None:
        super().__init__(model)
        self.in_parts = False  # `decode` takes every token for the last one in its turn.
        self.channel, self.scale = channel, scale
        self._last = True
        for layer in layers:
            module = model.base_model.layers[layer].self_attn
            for projection in (module.q_proj, module.k_proj):
                projection.register_forward_pre_hook(self._scale_for_last)
            module.k_proj.register_forward_hook(self._twice_for_others)

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, State]:
        """See Decoder."""
        state = self.new_state(attention_mask[:, :-1])
        if state.mask.shape[1]:
            self._last = False
            try:
                self._read(state, input_ids[:, :-1])
            finally:
                self._last = True
        return self.decode(state, input_ids[:, -1:])[:, 0], state

    def new_state(self, attention_mask: Tensor) -> State:
        """The state before a prompt is read."""
        return State(TwofoldCache(), super().new_state(attention_mask).mask)

    def _scale_for_last(self, module: Any, args: tuple[Tensor]) -> tuple[Tensor] | None:
        return (self._scaled(args[0]),) if self._last else None

    def _twice_for_others(self, module: Any, args: tuple[Tensor], keys: Tensor) -> Tensor:
        return keys if self._last else torch.cat((keys, module.forward(self._scaled(args[0]))), dim=-1)

    def _scaled(self, hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        hidden[..., self.channel] *= self.scale
        return hidden


def find_channel(
    model: Any, tokenizer: Any, prompt_format: str, *, strings: int = STRINGS, contexts: int = CONTEXTS
) -> HiddenChannel:
    """The model with the channel and the factor that its loss on key-value retrieval is lowest with.

    prompt_format: how its questions are put, as in a comparison. Raises InputError when no channel is positional.
    """
    candidates = positional_channels(mean_hidden_states(model, tokenizer, strings))[:CANDIDATES]
    if not candidates:
        raise InputError(
            "no channel of this model's hidden states is monotone in the position in more than a quarter of its "
            "layers; give one: hidden-channel=CHANNEL/SCALE"
        )
    task = KVRetrieval()
    limit = model.config.max_position_embeddings
    questions = [
        one
        for context in take(task, "search", 0, contexts, tokenizer, prompt_format, limit).contexts
        for one in context
    ]
    decoder = HiddenChannel(model, candidates[0], 0.0, middle_layers(model.config.num_hidden_layers))

    @functools.cache
    def loss(channel: int, scale: float) -> float:
        decoder.channel, decoder.scale = channel, scale
        return sum(answer_loss(decoder, question) for question in questions) / len(questions)

    channel = min(candidates, key=lambda one: loss(one, 0.0))
    losses = {scale: loss(channel, scale) for scale in SCALES}
    decoder.channel, decoder.scale = channel, min(losses, key=losses.__getitem__)
    return decoder


def answer_loss(decoder: ModelDecoder, question: Encoded) -> float:
    """Mean negative log-probability of the answer's tokens, in nats."""
    prompt, answer = torch.tensor([question.prompt]), torch.tensor([question.answer])
    first, state = decoder.prefill(prompt, torch.ones_like(prompt))
    parts = [first[:, None]]
    if answer.shape[1] > 1:
        parts.append(decoder.decode(state, answer[:, :-1]))
    logprobs = torch.cat(parts, dim=1)
    return -float(logprobs.gather(-1, answer.to(logprobs.device)[..., None]).mean())


@torch.inference_mode()
def mean_hidden_states(model: Any, tokenizer: Any, strings: int) -> Tensor:
    """(layers − 1, tokens, hidden_size), float32: what goes from layer to layer, averaged over random strings."""
    rng = random.Random(0)
    length = min(STRING_TOKENS, model.config.max_position_embeddings)
    total: Any = 0.0
    for _ in range(strings):
        # Ten characters a token are more than enough: no vocabulary has many words in noise.
        text = "".join(rng.choices(string.ascii_letters + string.digits + string.punctuation, k=10 * length))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:length]
        inputs = torch.tensor([ids], device=device_of(model.get_input_embeddings()))
        states = model.base_model(input_ids=inputs, use_cache=False, output_hidden_states=True).hidden_states
        # The first are the embeddings, the last are behind the final norm.
        total = total + torch.cat(states[1:-1]).float().cpu()
    mean: Tensor = total / strings
    return mean


def positional_channels(states: Tensor) -> Sequence[int]:
    """The channels of states (layers, tokens, channels) that are monotone in the position, the smoothest first."""
    states = states[:, SKIPPED:]
    tokens = states.shape[1]
    powers = torch.linspace(-1, 1, tokens, dtype=torch.float64)[:, None] ** torch.arange(4)
    steps = (powers @ (torch.linalg.pinv(powers) @ states.double())).diff(dim=1)
    rising, falling = (steps >= 0).all(dim=1), (steps <= 0).all(dim=1)
    low = states.amin(dim=1, keepdim=True)
    span = states.amax(dim=1, keepdim=True) - low
    # A channel rises in some layers and may fall in others: the larger number counts. One that stands still is neither.
    monotone = torch.where(rising.sum(0) >= falling.sum(0), rising, falling) & (span[:, 0] > 0)
    smooth = ((states - low) / span.clamp(min=1e-30)).unfold(1, min(WINDOW, tokens - 2), 1).mean(-1)
    roughness = smooth.diff(n=2, dim=1).square().sum(1)
    mean = (roughness * monotone).sum(0) / monotone.sum(0)
    candidates = (monotone.sum(0) > (len(states) + 1) / 4).nonzero()[:, 0].tolist()
    return sorted(candidates, key=lambda channel: float(mean[channel]))
