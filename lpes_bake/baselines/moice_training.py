"""Training MoICE's routers: all else of the model is frozen.

As published: language-model loss on all tokens + 0.3 × the load-balancing loss of Switch Transformers (Fedus et al.,
arXiv 2101.03961, eq. 4 to 6), a constant learning rate of 1e-4, 7 steps of 128 sequences of chat text (OpenHermes) of
up to 4,608 tokens; and as their trainer's defaults have it, AdamW without weight decay and gradients clipped to a norm
of 1.

With 7 experts of 7 in the top k, as published, each is always chosen: the balancing loss is the constant 7 and has no
gradient. It acts where top_k is smaller.

Sequences are read one by one, so nothing is padded, and their gradients averaged over a step. After each, the state is
written; a run that was stopped goes on from it to the very routers that it would have come to.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from lpes_bake.baselines.moice import MoICE, new_routers, save_routers
from lpes_bake.baselines.moice_settings import EXPERTS, MoICESettings
from lpes_bake.baselines.own_attention import require_llama_like
from lpes_bake.baselines.rotary import bases_for, theta_of
from lpes_bake.factors import save_bytes, save_text
from lpes_bake.loading import load_library_model, load_tokenizer, require_causal
from lpes_bake.plan import weights_digest
from lpes_bake.run import check_outside, check_writable
from lpes_bake.search.device import pick_device, pick_dtype
from lpes_bake.search.errors import InputError
from lpes_bake.search.journal import differences
from lpes_bake.search.jsonl import Row, read_rows
from lpes_bake.search.models import checkpointed_layers, head_logits
from lpes_bake.search.scoring import out_of_memory
from lpes_bake.source import Source, open_source

STATE_FILE = "state.pt"
# What a kill leaves while the state is written.
SCRATCH_FILE = f".{STATE_FILE}.part"
RECORD_FILE = "training.json"

# What the datasets of the Hub call a speaker, as chat templates call it.
ROLES = {"human": "user", "gpt": "assistant"}


def train_moice(
    model: str,
    data: Path,
    out: Path,
    settings: MoICESettings,
    *,
    resume: bool = False,
    revision: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    on_progress: Callable[[int, float], None] = lambda done, loss: None,
) -> dict[str, Any]:
    """Train routers for `model` and write them and a record of the training to the folder `out`.

    data: JSONL, one sequence a line: see `text_of`. on_progress is given the sequences that are done and the
    language-model loss of the last one. Returns the record. Raises InputError before any weight is read, or when
    the model gives a loss that is not finite.
    """
    source = open_source(model, revision=revision)
    require_causal(source)
    require_llama_like(source, "moice")
    check_writable(out)
    check_outside(out, source)
    if not resume and out.exists() and any(path.name != SCRATCH_FILE for path in out.iterdir()):
        raise InputError(f"{out} is not empty; go on with what is there by --resume, or give a new --out")
    if resume and not (out / STATE_FILE).is_file():
        raise InputError(f"{out} holds no training that could go on ({STATE_FILE}); leave out --resume")
    where = pick_device(device)
    precision = pick_dtype(dtype, where)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    sequences = read_sequences(data, tokenizer, settings, source.max_positions)
    header = {
        "model": source.name,
        "revision": source.revision,
        "weights": weights_digest(source),
        "dtype": str(precision).removeprefix("torch."),
        "data": data.name,
        "tokens_sha256": hashlib.sha256(json.dumps(sequences).encode()).hexdigest()[:16],
        **asdict(settings),
    }
    state = read_state(out, header, where) if resume else None
    training = Training(source, settings, header, where, precision)
    if state is not None:
        training.restore(state)
    out.mkdir(parents=True, exist_ok=True)
    while training.done < len(sequences):
        loss = training.learn(sequences[training.done])
        training.save(out)
        on_progress(training.done, loss)
    return training.finish(out)


class Training:
    """A model, its routers and their optimizer, somewhere on the way."""

    def __init__(
        self, source: Source, settings: MoICESettings, header: dict[str, Any], device: Any, dtype: Any
    ) -> None:
        self.settings, self.header = settings, header
        self.bases = bases_for(theta_of(source))
        self.model = load_library_model(source, device, dtype).requires_grad_(False)
        routers = new_routers(self.model.config, EXPERTS, settings.seed)
        self.moice = MoICE(self.model, routers, self.bases, settings.top_k)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.moice.routers.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        self.losses: list[tuple[float, float]] = []
        """Of each sequence: its language-model loss and its balancing loss."""

    @property
    def done(self) -> int:
        """Sequences that were learnt from."""
        return len(self.losses)

    def learn(self, tokens: list[int]) -> float:
        """Learn from one sequence; a step is made behind the last one of each. Returns its language-model loss."""
        try:
            language, balance = losses(
                self.moice,
                torch.tensor([tokens], device=self.device),
                self.settings,
                checkpointing=self.device.type != "cpu",
            )
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise InputError(
                f"out of memory on {self.device} with a sequence of {len(tokens)} tokens; give a smaller --max-length, "
                "and a new --out"
            ) from error
        if not math.isfinite(language + balance):
            raise InputError(
                f"the loss of sequence {self.done + 1} is not finite; look for NaN in the model's weights, or give "
                "a lower --learning-rate or another --dtype, and a new --out"
            )
        self.losses.append((language, balance))
        if self.done % self.settings.sequences == 0:
            nn.utils.clip_grad_norm_(self.moice.routers.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return language

    def save(self, out: Path) -> None:
        """Write the state, whole or not at all."""
        gates = dict(self.moice.routers.named_parameters())
        state = {
            "header": self.header,
            "losses": self.losses,
            "gates": {name: gate.detach() for name, gate in gates.items()},
            "gradients": {name: gate.grad for name, gate in gates.items() if gate.grad is not None},
            "optimizer": self.optimizer.state_dict(),
        }
        # By way of memory, since torch answers a full disk with an error of its own.
        content = io.BytesIO()
        torch.save(state, content)
        save_bytes(out / STATE_FILE, content.getvalue())

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a state that was written."""
        self.moice.routers.load_state_dict(state["gates"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, gate in self.moice.routers.named_parameters():
            gate.grad = state["gradients"].get(name)
        self.losses = [tuple(pair) for pair in state["losses"]]

    def finish(self, out: Path) -> dict[str, Any]:
        """Write the routers and the record, which is returned."""
        about = {**self.header, "bases": list(self.bases)}
        save_routers(self.moice.routers, out, about)
        count = self.settings.sequences
        steps = [self.losses[start : start + count] for start in range(0, self.done, count)]
        record = {
            **about,
            "loss_by_step": [
                {"language": sum(one for one, _ in step) / count, "balance": sum(one for _, one in step) / count}
                for step in steps
            ],
        }
        save_text(out / RECORD_FILE, json.dumps(record, indent=2) + "\n")
        return record


def read_state(out: Path, header: dict[str, Any], device: Any) -> dict[str, Any]:
    """The state that a training wrote to `out`. InputError when it had other settings, or the file is damaged."""
    try:
        state: dict[str, Any] = torch.load(out / STATE_FILE, map_location=device, weights_only=True)
        different = differences(state["header"], header)
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, EOFError, UnpicklingError) as error:
        raise InputError(
            f"{out / STATE_FILE} cannot be read as the state of a training; start again with a new --out"
        ) from error
    if different:
        raise InputError(
            f"{out} is a training with other settings ({'; '.join(different)}); give the same, or a new --out"
        )
    return state


def losses(
    moice: MoICE, tokens: Tensor, settings: MoICESettings, *, checkpointing: bool = False
) -> tuple[float, float]:
    """Language-model and balancing loss of one sequence (1, T); their gradient is added to the gates'.

    What is added is the gradient of (language + settings.balance · balancing loss) / settings.sequences.
    checkpointing: compute a layer's activations twice instead of keeping them.
    """
    model = moice.model
    moice.balance = []
    with checkpointed_layers(model, checkpointing):
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden = model.base_model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        language = nn.functional.cross_entropy(head_logits(model, hidden)[0, :-1].float(), tokens[0, 1:])
        balance = switch_loss(moice.balance)
        ((language + settings.balance * balance) / settings.sequences).backward()
    # Until here, for what is computed twice is also recorded twice.
    moice.balance = None
    return float(language.detach()), float(balance.detach())


def switch_loss(recorded: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The load-balancing loss N Σ_e f_e P_e, over all layers, heads and tokens together: f_e is how often expert e was
    among the top k, P_e its mean probability. recorded: both, (N,), of each layer."""
    shares, probabilities = (torch.stack(one).mean(0) for one in zip(*recorded, strict=True))
    loss: Tensor = len(shares) * (shares * probabilities).sum()
    return loss


def read_sequences(data: Path, tokenizer: Any, settings: MoICESettings, limit: int) -> list[list[int]]:
    """The token ids of the first rows of a file, each cut to max_length and the model's limit."""
    needed = settings.steps * settings.sequences
    sequences = []
    for row in islice(read_rows(data), needed):
        text, special = text_of(row, tokenizer)
        ids = tokenizer(text, add_special_tokens=special)["input_ids"][: min(settings.max_length, limit)]
        if len(ids) < 2:
            raise row.error("it has fewer than two tokens, so there is nothing to predict; take the line out")
        sequences.append(ids)
    if len(sequences) < needed:
        raise InputError(
            f"{data} has {len(sequences)} rows, and {settings.steps} steps of {settings.sequences} sequences need "
            f"{needed}; give more data, or fewer --steps or --sequences"
        )
    return sequences


def text_of(row: Row, tokenizer: Any) -> tuple[str, bool]:
    """The text of a row, and whether the tokenizer must add its special tokens.

    A row has "text", or a chat: "messages" with "role" and "content", or "conversations" with "from" and "value".
    A chat is written by the tokenizer's chat template or, where it has none, as the authors write it.
    """
    if "text" in row.values:
        return row.text("text"), True
    name, speaker, content = ("messages", "role", "content")
    if name not in row.values:
        name, speaker, content = ("conversations", "from", "value")
    if name not in row.values:
        raise row.error('there is neither "text" nor "messages" nor "conversations"; add one of them')
    turns = []
    for number, turn in enumerate(row.items(name)):
        if not isinstance(turn, dict):
            raise row.error(f'turn {number} of "{name}" is no object with "{speaker}" and "{content}"; mend it')
        role = row.checked_text(turn.get(speaker), f'"{speaker}" of turn {number}')
        said = row.checked_text(turn.get(content), f'"{content}" of turn {number}', may_be_empty=True)
        turns.append({"role": ROLES.get(role, role), "content": said})
    if getattr(tokenizer, "chat_template", None):
        try:
            return str(tokenizer.apply_chat_template(turns, tokenize=False)), False
        except Exception as error:  # a template raises what it likes, for turns in an order that it does not know
            raise row.error(f"the tokenizer's chat template does not take it: {error}; mend the turns") from error
    return "".join(
        turn["content"] + (tokenizer.eos_token or "")
        if turn["role"] == "assistant"
        else f"[INST]\n{turn['content']}\n[/INST]"
        for turn in turns
    ), True
