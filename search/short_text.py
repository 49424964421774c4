"""A check for damage that the tasks cannot see: how a model predicts short, plain text.

Two numbers a paragraph: the mean log-probability of its tokens, and how far the candidate's predictions
are from those of the base model (all factors 1), as KL(base ‖ candidate).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lpes_bake.search.errors import InputError
from lpes_bake.search.models import checkpointed_layers, device_of, differentiable_factors, set_factors
from lpes_bake.search.tasks import PARTS

# A part with fewer paragraphs says nothing about damage.
FEWEST_PARAGRAPHS = 4

# Written for this check, so that no model was trained on them when it was released; short, so that
# nothing about long prompts is measured; on many subjects. Three of a kind stand together, one for each part.
PARAGRAPHS = (
    # stories
    "The baker opened her shop at five in the morning, when the street was still dark. By six the first loaves lay "
    "on the shelf and the smell of rye had reached the bus stop. Nobody who waited there could resist it for long.",
    "My grandfather kept his letters in a tin box under the stairs. After his funeral we opened it and found, beside "
    "the letters, a ticket for a ship that he had never boarded. None of us knew why he had stayed.",
    "The lighthouse keeper's daughter learned to read from the log book. Every evening she traced the words with a "
    "finger: wind from the west, two sails, rain after dark. When she was grown she still wrote that way.",
    # letters
    "Dear Mr. Holm, thank you for your letter of the third of May. We are sorry that the lamp arrived with a broken "
    "shade. A new one has been sent to you today, and you need not return the old one.",
    "Hi Sara, I got the keys from your neighbour and watered everything on the balcony. The basil looks sad, but the "
    "tomatoes are fine. Your parcel came too; I left it on the kitchen table. Have a good trip back!",
    "To all residents: on Thursday the water will be turned off between nine and eleven while the pump in the cellar "
    "is replaced. Please fill a bucket beforehand and keep your taps closed. We apologise for the trouble.",
    # instructions
    "To repair a flat tire, lift the wheel from the frame and pull off one side of the tire with two levers. Take out "
    "the tube, pump it up and hold it under water: the bubbles show you where the hole is.",
    "Peel two onions and cut them into thin rings. Melt a spoon of butter in a heavy pan, add the onions with a pinch "
    "of salt, and let them brown slowly for half an hour. Stir often, and add a little water if they stick.",
    "Before you paint the fence, brush off the moss and let the wood dry for two days. Put on a thin first coat along "
    "the grain. Wait until it no longer feels sticky, sand it lightly, and then give it the second coat.",
    # code
    "def mean(values):\n    total = 0.0\n    for x in values:\n        total += x\n    return total / len(values)"
    "\n\n\ndef variance(values):\n    center = mean(values)\n    return mean([(x - center) ** 2 for x in values])\n",
    "class Counter {\n  constructor() {\n    this.counts = new Map();\n  }\n\n  add(word) {\n"
    "    const seen = this.counts.get(word) || 0;\n    this.counts.set(word, seen + 1);\n  }\n}\n",
    "SELECT customer.name, COUNT(*) AS orders\nFROM customer\nJOIN purchase ON purchase.customer_id = customer.id\n"
    "WHERE purchase.paid = TRUE\nGROUP BY customer.name\nHAVING COUNT(*) > 3\nORDER BY orders DESC;\n",
    # news
    "The council met on Tuesday to discuss the new bridge. Supporters said that it would bring customers to the old "
    "town, while opponents feared the noise of the trucks. A vote is expected before the end of the year.",
    "Heavy snow closed the mountain road on Sunday night and left some forty drivers in their cars until morning. "
    "Nobody was hurt. The army brought blankets and tea, and by noon one lane was open again.",
    "The home team lost its third match in a row on Saturday, although it had led by two goals at the break. The coach "
    "blamed tired legs and a muddy field. He will decide this week whether to rest his captain.",
    # nature
    "Owls hunt at night and rely on their ears more than on their eyes. Their feathers have soft edges that let them "
    "fly without a sound, so that a mouse seldom notices the danger before it is too late.",
    "Plants take in carbon dioxide through small openings in their leaves and, with the energy of sunlight, turn it "
    "into sugar. The oxygen that we breathe is what they leave over.",
    "Salmon hatch in small rivers, live for years in the open sea, and come back to the very stream in which they were "
    "born. They seem to find it by its smell. Most of them die soon after they have laid their eggs.",
    # numbers
    "If a train leaves at noon and travels at eighty kilometers an hour, it has covered two hundred kilometers by half "
    "past two. A second train that leaves an hour later must be faster to arrive at the same time.",
    "Invoice 2047: 12 chairs at 45.00 each make 540.00, and 3 tables at 120.00 make 360.00. With a discount of 10 "
    "percent, 810.00 are due within 30 days.",
    "Of the 60 people who were asked, 24 came by bicycle, 18 by bus and 12 on foot; the other 6 took a car. So 40 "
    "percent cycled, and only one in ten drove. Five years ago it had been one in four.",
    # history
    "In the seventeenth century, merchants in the Netherlands paid fortunes for the bulbs of rare tulips. When the "
    "prices fell within a few weeks, many of them were left with flowers and debts.",
    "The first railway passengers were warned that the speed might harm their lungs. Within a generation people "
    "thought nothing of crossing a country in a day, and towns that had refused a station regretted it.",
    "Paper reached Europe by way of the Arab world, hundreds of years after it was invented in China. Monks were slow "
    "to trust it, because parchment lasts longer, but printers could not have worked without it.",
    # society
    "A contract is formed when one side makes an offer and the other side accepts it. It need not be written down, "
    "but without paper or witnesses it is hard to prove in court what was agreed.",
    "A library lends books for three weeks, and longer if nobody else has asked for them. Whoever returns a book too "
    "late pays a small fine. Children pay nothing, because they are meant to come back.",
    "When many people want to rent in the same town and few flats are built, rents rise. A limit on rents helps those "
    "who have a flat already, but it may also make it less attractive to build new ones.",
    # science
    "Water boils at a lower temperature on a mountain than at the sea, because the air presses less on its surface. "
    "A cook in the hills must therefore leave the potatoes in the pot for longer, however hard the water bubbles.",
    "Iron rusts when it meets both water and oxygen. Salt speeds this up, so cars near the coast suffer most. A coat "
    "of zinc protects the metal even where it is scratched, because the zinc is eaten away first.",
    "The moon always turns the same side to us, since it spins once on its axis in the time it takes to circle the "
    "earth. Its far side was unknown until a spacecraft took pictures of it.",
    # talk
    '"Did you lock the door?" she asked. "I thought you had," he said. They stood on the platform and looked at each '
    'other. "The train leaves in four minutes," she said at last. "Then let us hope that nobody is curious."',
    "Doctor: How long have you had this cough? Patient: Since the beginning of the month. Doctor: Is it worse at "
    "night? Patient: Yes, I hardly sleep. Doctor: Do you smoke? Patient: I stopped last week. Doctor: Good for you.",
    "Tom: Are we still on for Friday? Lena: Yes, but can we make it seven instead of six? I have a meeting. Tom: Sure. "
    "Shall I book a table? Lena: Please do, somewhere quiet, and not the place with the loud music again.",
    # places
    "The island lies forty kilometers off the coast and can be reached by ferry twice a day. About three hundred "
    "people live there, most of them from fishing. Its only hill is crowned by the ruin of a small castle.",
    "The river rises in the northern hills, flows through two lakes and reaches the sea in a wide delta. Its lower "
    "course has been navigable since the eighteenth century, when the rapids near the old mill were blasted.",
    "The museum was founded by a wealthy brewer, who left his collection of clocks to the city. It moved into the "
    "former post office after the war. Among its treasures is a clock that shows the tides.",
)


def read_paragraphs(path: Path | None = None) -> dict[str, list[str]]:
    """The paragraphs of each part of a search, which share none: those above, or those of a text file.

    In a file, blank lines part paragraphs; one that is there twice counts once. They are dealt in turn. Raises
    InputError when the file cannot be read, or has too few.
    """
    paragraphs = PARAGRAPHS if path is None else _from_file(path)
    return {part: list(paragraphs[i :: len(PARTS)]) for i, part in enumerate(PARTS)}


def _from_file(path: Path) -> tuple[str, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}; give another file") from error
    found = tuple(dict.fromkeys(block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()))
    needed = FEWEST_PARAGRAPHS * len(PARTS)
    if len(found) < needed:
        raise InputError(
            f"{path} has {len(found)} different paragraphs with blank lines between them; a search needs {needed}, "
            f"{FEWEST_PARAGRAPHS} for each of its parts"
        )
    return found


@dataclass(frozen=True)
class TextScores:
    """How one candidate predicts the paragraphs."""

    logprob: NDArray[np.float64]
    """(paragraphs,): mean log-probability of the tokens after the first, in nats."""
    kl: NDArray[np.float64]
    """(paragraphs,): mean KL(base ‖ candidate) of a token's prediction, in nats."""
    tokens: int


class Drift:
    """Measures how far factors move a model's predictions of fixed paragraphs from those of the base model."""

    def __init__(
        self, model: Any, tokenizer: Any, paragraphs: Sequence[str], *, checkpointing: bool | None = None
    ) -> None:
        """Computes the base model's predictions once and keeps them, (tokens, vocabulary) in the model's dtype.

        checkpointing: as for `Scorer`. Raises InputError when a paragraph is longer than the model's positions.
        """
        self.model = model
        self.device = device_of(model.get_input_embeddings())
        self.checkpointing = self.device.type != "cpu" if checkpointing is None else checkpointing
        ids = [tokenizer(paragraph)["input_ids"] for paragraph in paragraphs]
        limit = model.config.max_position_embeddings
        for paragraph, one in zip(paragraphs, ids, strict=True):
            if not 2 <= len(one) <= limit:
                raise InputError(
                    f"the paragraph {paragraph[:40]!r}… has {len(one)} tokens; it must have 2 to {limit}, the "
                    "model's positions"
                )
        self._ids = [torch.tensor([one], device=self.device) for one in ids]
        set_factors(model, [1.0] * model.config.num_hidden_layers)
        with torch.inference_mode():
            self._base = [self._logits(one) for one in self._ids]

    @torch.inference_mode()
    def measure(self, factors: Sequence[float]) -> TextScores:
        """The scores of the model with `factors`, one a layer."""
        set_factors(self.model, factors)
        return self._scores([(float(logprob), float(kl)) for logprob, kl in self._each()])

    def gradient(self, factors: Sequence[float]) -> tuple[TextScores, NDArray[np.float64], NDArray[np.float64]]:
        """The scores, and two arrays (layers,): d/d factor of the mean of logprob, and of the mean of kl."""
        gradients = np.zeros((2, self.model.config.num_hidden_layers))
        scores = []
        with (
            differentiable_factors(self.model, factors) as leaf,
            checkpointed_layers(self.model, self.checkpointing),
        ):
            for logprob, kl in self._each():
                for row, value, keep in ((0, logprob, True), (1, kl, False)):
                    (part,) = torch.autograd.grad(value / len(self._ids), leaf, retain_graph=keep)
                    gradients[row] += part.cpu().double().numpy()
                scores.append((float(logprob.detach()), float(kl.detach())))
        return self._scores(scores), gradients[0], gradients[1]

    def _each(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Mean log-probability and mean KL of a token, paragraph by paragraph."""
        for ids, base in zip(self._ids, self._base, strict=True):
            before, after = _log_softmax(base), _log_softmax(self._logits(ids))
            logprob = after.gather(-1, ids[0, 1:, None].to(after.device)).mean()
            yield logprob, (before.exp() * (before - after)).sum(-1).mean()

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        """(tokens − 1, vocabulary): what predicts each token but the first."""
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits: torch.Tensor = self.model.lm_head(hidden[0, :-1])
        return logits

    def _scores(self, scores: Sequence[tuple[float, float]]) -> TextScores:
        table = np.array(scores, dtype=np.float64).reshape(-1, 2)
        return TextScores(table[:, 0], table[:, 1], sum(ids.shape[1] for ids in self._ids))


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """In float32, or more where the model has more."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
