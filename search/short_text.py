"""A check for damage that the search's own task cannot see: how well a model predicts short, plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lpes_bake.search.models import set_factors

# Written for this check, so that no model was trained on them when it was released; short, so that
# nothing about long prompts is measured; on many subjects.
PARAGRAPHS = (
    "The baker opened her shop at five in the morning, when the street was still dark. By six the first loaves lay "
    "on the shelf and the smell of rye had reached the bus stop. Nobody who waited there could resist it for long.",
    "Water boils at a lower temperature on a mountain than at the sea, because the air presses less on its surface. "
    "A cook in the hills must therefore leave the potatoes in the pot for longer, however hard the water bubbles.",
    "Dear Mr. Holm, thank you for your letter of the third of May. We are sorry that the lamp arrived with a broken "
    "shade. A new one has been sent to you today, and you need not return the old one.",
    "To repair a flat tire, lift the wheel from the frame and pull off one side of the tire with two levers. Take out "
    "the tube, pump it up and hold it under water: the bubbles show you where the hole is.",
    "def mean(values):\n    total = 0.0\n    for x in values:\n        total += x\n    return total / len(values)"
    "\n\n\ndef variance(values):\n    center = mean(values)\n    return mean([(x - center) ** 2 for x in values])\n",
    "The council met on Tuesday to discuss the new bridge. Supporters said that it would bring customers to the old "
    "town, while opponents feared the noise of the trucks. A vote is expected before the end of the year.",
    "Owls hunt at night and rely on their ears more than on their eyes. Their feathers have soft edges that let them "
    "fly without a sound, so that a mouse seldom notices the danger before it is too late.",
    "If a train leaves at noon and travels at eighty kilometers an hour, it has covered two hundred kilometers by half "
    "past two. A second train that leaves an hour later must be faster to arrive at the same time.",
    "In the seventeenth century, merchants in the Netherlands paid fortunes for the bulbs of rare tulips. When the "
    "prices fell within a few weeks, many of them were left with flowers and debts.",
    "My grandfather kept his letters in a tin box under the stairs. After his funeral we opened it and found, beside "
    "the letters, a ticket for a ship that he had never boarded. None of us knew why he had stayed.",
    "A contract is formed when one side makes an offer and the other side accepts it. It need not be written down, "
    "but without paper or witnesses it is hard to prove in court what was agreed.",
    "Plants take in carbon dioxide through small openings in their leaves and, with the energy of sunlight, turn it "
    "into sugar. The oxygen that we breathe is what they leave over.",
)


@torch.inference_mode()
def text_logprob(model: Any, tokenizer: Any, factors: Sequence[float]) -> NDArray[np.float64]:
    """(paragraphs,): the mean log-probability of a paragraph's tokens after its first, in nats."""
    set_factors(model, factors)
    device = model.get_input_embeddings().weight.device
    scores = []
    for paragraph in PARAGRAPHS:
        tokens = torch.tensor([tokenizer(paragraph)["input_ids"]], device=device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        scores.append(float(logits.log_softmax(-1).gather(-1, tokens[0, 1:, None]).mean()))
    return np.array(scores)
