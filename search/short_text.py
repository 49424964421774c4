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
# nothing about long prompts is measured; on many subjects. Six of a kind stand together, so that every part has each.
# Each part has 32 of the 96: with 12, damage had a standard error as large as its limit.
PARAGRAPHS = (
    # stories
    "The baker opened her shop at five in the morning, when the street was still dark. By six the first loaves lay "
    "on the shelf and the smell of rye had reached the bus stop. Nobody who waited there could resist it for long.",
    "My grandfather kept his letters in a tin box under the stairs. After his funeral we opened it and found, beside "
    "the letters, a ticket for a ship that he had never boarded. None of us knew why he had stayed.",
    "The lighthouse keeper's daughter learned to read from the log book. Every evening she traced the words with a "
    "finger: wind from the west, two sails, rain after dark. When she was grown she still wrote that way.",
    "Every autumn the twins buried something in the garden: a marble, a spoon, once their father's watch. They drew a "
    "map, and every spring they could not read it. The watch was found years later by a dog, and it still ran for an "
    "hour.",
    "The last bus had gone, so Irena walked along the canal with her cello on her back. A boatman offered to take her "
    "as far as the lock. She paid him with a tune, and he switched off the engine to hear it.",
    "Nobody in the village had ever seen the new doctor run. On the night of the fire he ran twice, once up the hill "
    "and once down again, with a child under each arm. In the morning he walked to work as slowly as before.",
    # letters
    "Dear Mr. Holm, thank you for your letter of the third of May. We are sorry that the lamp arrived with a broken "
    "shade. A new one has been sent to you today, and you need not return the old one.",
    "Hi Sara, I got the keys from your neighbour and watered everything on the balcony. The basil looks sad, but the "
    "tomatoes are fine. Your parcel came too; I left it on the kitchen table. Have a good trip back!",
    "To all residents: on Thursday the water will be turned off between nine and eleven while the pump in the cellar "
    "is replaced. Please fill a bucket beforehand and keep your taps closed. We apologise for the trouble.",
    "Dear Ms. Okafor, I am writing to apply for the position of gardener that you advertised last week. I have looked "
    "after a public park for six years and know fruit trees well. I could begin on the first of April.",
    "Subject: Minutes of Monday's meeting. Hello everyone, please find attached what we agreed on. Jonas will ask two "
    "more printers for an offer, and Mei checks the list of addresses. If I have left something out, tell me by "
    "Wednesday.",
    "Dear Grandma, the camp is great, but the food is not. We swam across the lake yesterday and I was third. My tent "
    "leaks a little on the left side, so I sleep on the right. Please send socks. Love, Emil",
    # instructions
    "To repair a flat tire, lift the wheel from the frame and pull off one side of the tire with two levers. Take out "
    "the tube, pump it up and hold it under water: the bubbles show you where the hole is.",
    "Peel two onions and cut them into thin rings. Melt a spoon of butter in a heavy pan, add the onions with a pinch "
    "of salt, and let them brown slowly for half an hour. Stir often, and add a little water if they stick.",
    "Before you paint the fence, brush off the moss and let the wood dry for two days. Put on a thin first coat along "
    "the grain. Wait until it no longer feels sticky, sand it lightly, and then give it the second coat.",
    "To reset the thermostat, press the round button and hold it until the display goes blank, which takes about ten "
    "seconds. Let go, wait for the clock to blink, and set the time with the arrows. Your weekly program is kept.",
    "Fold the sheet in half along its longer side and open it again. Bring the two upper corners down to the crease, "
    "so that a point appears. Fold the slanted edges to the middle once more, turn the paper over, and bend down the "
    "wings.",
    "If someone has fainted, lay them on their back and raise their legs. Loosen a tight collar and open a window. If "
    "they do not come round within a minute, or do not breathe normally, call an ambulance.",
    # code
    "def mean(values):\n    total = 0.0\n    for x in values:\n        total += x\n    return total / len(values)"
    "\n\n\ndef variance(values):\n    center = mean(values)\n    return mean([(x - center) ** 2 for x in values])\n",
    "class Counter {\n  constructor() {\n    this.counts = new Map();\n  }\n\n  add(word) {\n"
    "    const seen = this.counts.get(word) || 0;\n    this.counts.set(word, seen + 1);\n  }\n}\n",
    "SELECT customer.name, COUNT(*) AS orders\nFROM customer\nJOIN purchase ON purchase.customer_id = customer.id\n"
    "WHERE purchase.paid = TRUE\nGROUP BY customer.name\nHAVING COUNT(*) > 3\nORDER BY orders DESC;\n",
    "import csv\nfrom pathlib import Path\n\n\ndef named_rows(path: Path) -> list[dict[str, str]]:\n    with "
    "path.open(newline='', encoding='utf-8') as file:\n        return [row for row in csv.DictReader(file) if "
    "row['name']]\n",
    '#!/bin/sh\nset -eu\nfor file in photos/*.jpg; do\n  day=$(date -r "$file" +%Y-%m-%d)\n  mkdir -p '
    '"sorted/$day"\n  mv "$file" "sorted/$day/"\ndone\necho done\n',
    "CREATE TABLE loan (\n  id INTEGER PRIMARY KEY,\n  book_id INTEGER NOT NULL REFERENCES book (id),\n  lent DATE "
    "NOT NULL,\n  returned DATE,\n  CHECK (returned >= lent)\n);\n",
    # news
    "The council met on Tuesday to discuss the new bridge. Supporters said that it would bring customers to the old "
    "town, while opponents feared the noise of the trucks. A vote is expected before the end of the year.",
    "Heavy snow closed the mountain road on Sunday night and left some forty drivers in their cars until morning. "
    "Nobody was hurt. The army brought blankets and tea, and by noon one lane was open again.",
    "The home team lost its third match in a row on Saturday, although it had led by two goals at the break. The coach "
    "blamed tired legs and a muddy field. He will decide this week whether to rest his captain.",
    "The brewery on Mill Street will close in June after more than a century. Its owner said that energy had become "
    "too expensive and that no buyer had been found. Thirty-one people will lose their jobs; the town wants to turn "
    "the hall into a market.",
    "Two teenagers who found an envelope with four thousand euros in a park handed it in at the police station. It "
    "belonged to a retired teacher who had meant to pay for a new roof. He has invited both of them to lunch.",
    "The number of passengers at the regional airport rose by six percent last year, the operator reported on Monday. "
    "Most flew to islands in the south. Residents, who have long complained about flights after midnight, demand that "
    "the new terminal be dropped.",
    # nature and biology
    "Owls hunt at night and rely on their ears more than on their eyes. Their feathers have soft edges that let them "
    "fly without a sound, so that a mouse seldom notices the danger before it is too late.",
    "Plants take in carbon dioxide through small openings in their leaves and, with the energy of sunlight, turn it "
    "into sugar. The oxygen that we breathe is what they leave over.",
    "Salmon hatch in small rivers, live for years in the open sea, and come back to the very stream in which they were "
    "born. They seem to find it by its smell. Most of them die soon after they have laid their eggs.",
    "Honeybees tell each other where to find flowers by dancing on the comb. The direction of the dance shows the "
    "angle to the sun, and the longer a bee waggles, the farther away the food is. Her sisters follow her in the dark "
    "of the hive.",
    "The human heart has four chambers. The right side pumps blood to the lungs, where it takes up oxygen, and the "
    "left side, whose walls are thicker, drives it through the rest of the body. Valves keep it from flowing back.",
    "Mushrooms are only the fruit of a fungus. Most of it is a web of fine threads in the soil or in rotting wood, "
    "which may live for many years. Some fungi trade minerals with the roots of trees and get sugar in return.",
    # numbers
    "If a train leaves at noon and travels at eighty kilometers an hour, it has covered two hundred kilometers by half "
    "past two. A second train that leaves an hour later must be faster to arrive at the same time.",
    "Invoice 2047: 12 chairs at 45.00 each make 540.00, and 3 tables at 120.00 make 360.00. With a discount of 10 "
    "percent, 810.00 are due within 30 days.",
    "Of the 60 people who were asked, 24 came by bicycle, 18 by bus and 12 on foot; the other 6 took a car. So 40 "
    "percent cycled, and only one in ten drove. Five years ago it had been one in four.",
    "A tank holds 240 liters and is filled by two pipes. The first brings 8 liters a minute, the second 4. Together "
    "they bring 12 liters a minute, so the empty tank is full after 240 / 12 = 20 minutes.",
    "17 + 26 = 43, 43 - 9 = 34, 34 * 2 = 68, and 68 / 4 = 17, which is where we began. If we begin with 10 instead, "
    "we get 36, 27, 54 and 13.5.",
    "A square garden has sides of 15 meters. Its area is 225 square meters and its fence is 60 meters long. If every "
    "side grows by a third, to 20 meters, the fence becomes 80 meters long, but the area 400 square meters.",
    # history
    "In the seventeenth century, merchants in the Netherlands paid fortunes for the bulbs of rare tulips. When the "
    "prices fell within a few weeks, many of them were left with flowers and debts.",
    "The first railway passengers were warned that the speed might harm their lungs. Within a generation people "
    "thought nothing of crossing a country in a day, and towns that had refused a station regretted it.",
    "Paper reached Europe by way of the Arab world, hundreds of years after it was invented in China. Monks were slow "
    "to trust it, because parchment lasts longer, but printers could not have worked without it.",
    "In 1815 a volcano called Tambora erupted in what is now Indonesia. Its ash dimmed the sun over much of the "
    "world, and the following year had hardly a summer in Europe and New England. Harvests failed and bread became "
    "dear.",
    "The Rosetta Stone bears the same decree in three scripts, one of them Greek. French soldiers found it in Egypt "
    "in 1799, and with its help Champollion worked out in the 1820s how hieroglyphs were read.",
    "Before clocks were common, villages lived by the bell of the church. It rang for prayer, but also for work, for "
    "fire and for the closing of the gates. Only when railways needed timetables did towns give up their own local "
    "time.",
    # law and society
    "A contract is formed when one side makes an offer and the other side accepts it. It need not be written down, "
    "but without paper or witnesses it is hard to prove in court what was agreed.",
    "A library lends books for three weeks, and longer if nobody else has asked for them. Whoever returns a book too "
    "late pays a small fine. Children pay nothing, because they are meant to come back.",
    "When many people want to rent in the same town and few flats are built, rents rise. A limit on rents helps those "
    "who have a flat already, but it may also make it less attractive to build new ones.",
    "In many countries an accused person need not prove anything. It is for the prosecution to show guilt, and if a "
    "reasonable doubt remains, the court must acquit. The rule accepts that some of the guilty go free so that fewer "
    "innocents are punished.",
    "A patent gives an inventor the right to keep others from using an invention, as a rule for twenty years. In "
    "return it must be described so clearly that a skilled reader could build it. Afterwards anyone may do so.",
    "Article 4. The tenant may keep small animals without asking. Dogs and cats need the written consent of the "
    "landlord, which may be refused only for good reason. Consent may be withdrawn if other tenants are disturbed "
    "despite a warning.",
    # science and technology
    "Water boils at a lower temperature on a mountain than at the sea, because the air presses less on its surface. "
    "A cook in the hills must therefore leave the potatoes in the pot for longer, however hard the water bubbles.",
    "Iron rusts when it meets both water and oxygen. Salt speeds this up, so cars near the coast suffer most. A coat "
    "of zinc protects the metal even where it is scratched, because the zinc is eaten away first.",
    "The moon always turns the same side to us, since it spins once on its axis in the time it takes to circle the "
    "earth. Its far side was unknown until a spacecraft took pictures of it.",
    "A battery stores energy in chemicals rather than as electricity. When a lithium cell is charged, ions move from "
    "one electrode to the other through a liquid; when it is used, they move back, and electrons take the way round "
    "through the device.",
    "A packet of data seldom travels straight to its goal. Each router reads the address, looks up which neighbour "
    "lies on the way, and passes the packet on. If one line fails, the next packets simply take another.",
    "The transistor was invented at Bell Labs in 1947. It did the work of a vacuum tube but needed no heating, so it "
    "could be made ever smaller. A modern chip of the size of a fingernail holds billions of them.",
    # talk
    '"Did you lock the door?" she asked. "I thought you had," he said. They stood on the platform and looked at each '
    'other. "The train leaves in four minutes," she said at last. "Then let us hope that nobody is curious."',
    "Doctor: How long have you had this cough? Patient: Since the beginning of the month. Doctor: Is it worse at "
    "night? Patient: Yes, I hardly sleep. Doctor: Do you smoke? Patient: I stopped last week. Doctor: Good for you.",
    "Tom: Are we still on for Friday? Lena: Yes, but can we make it seven instead of six? I have a meeting. Tom: Sure. "
    "Shall I book a table? Lena: Please do, somewhere quiet, and not the place with the loud music again.",
    '"Is this seat taken?" "Only by my hat." The old man lifted it and she sat down. "You get on here every day," he '
    'said, "and you always get off before I do." "Then one of us is going too far," she answered.',
    "Customer: This radio stopped working after two days. Clerk: Do you have the receipt? Customer: Here it is. "
    "Clerk: Would you like a new one or your money back? Customer: A new one, please, but from another maker.",
    "Teacher: Why is the sea salty? Paul: Because of the fish? Teacher: Not quite. Rivers wash salt out of the rocks. "
    "Ada: But rivers are not salty. Teacher: They carry only a little. The water leaves the sea again, though, and "
    "the salt does not.",
    # places and geography
    "The island lies forty kilometers off the coast and can be reached by ferry twice a day. About three hundred "
    "people live there, most of them from fishing. Its only hill is crowned by the ruin of a small castle.",
    "The river rises in the northern hills, flows through two lakes and reaches the sea in a wide delta. Its lower "
    "course has been navigable since the eighteenth century, when the rapids near the old mill were blasted.",
    "The museum was founded by a wealthy brewer, who left his collection of clocks to the city. It moved into the "
    "former post office after the war. Among its treasures is a clock that shows the tides.",
    "Lake Baikal in Siberia is the deepest lake on Earth, more than sixteen hundred meters from surface to bottom. It "
    "holds about a fifth of the world's unfrozen fresh water at the surface. A seal lives there, far from any ocean.",
    "Lisbon is built on hills above the mouth of the Tagus. An earthquake destroyed much of the city in 1755, and the "
    "lower town was laid out anew in a grid of straight streets. Yellow trams still climb the steep lanes around it.",
    "The Atacama Desert in northern Chile is among the driest places in the world. At some weather stations years "
    "pass without rain. Fog drifts in from the cold Pacific, and in some villages nets are put up to catch its "
    "droplets.",
    # astronomy and weather
    "Jupiter is the largest planet of the solar system, with more than twice the mass of all the others together. "
    "Galileo saw four of its moons in 1610. That they circled another body than the earth was hard to square with the "
    "old teaching.",
    "Tomorrow will start with fog in the valleys, which clears toward noon. In the afternoon it stays dry, with "
    "temperatures around twelve degrees and a light wind from the southeast. On Thursday rain spreads from the west "
    "and reaches the mountains by evening.",
    "A thunderstorm begins when warm, moist air rises quickly into colder layers. Grains of ice rub against each "
    "other and part the electric charges. Count the seconds between flash and thunder: every three of them mean about "
    "one kilometer.",
    "The light of the nearest star beyond the sun takes more than four years to reach us. Most stars that we see with "
    "the naked eye are much farther away, some of them thousands of light-years, so we see them as they were long ago.",
    "A comet is a lump of ice and dust. When it comes near the sun, some of the ice turns to gas and carries dust "
    "along. The tail points away from the sun, so on its way out a comet travels behind its own tail.",
    "Warning of severe weather: between six in the evening and midnight, gusts of up to 100 kilometers an hour are "
    "expected along the coast. Secure loose objects, keep away from trees, and do not drive on the dam. The harbour "
    "is closed until further notice.",
    # art and music
    "A fugue begins with a single voice that states a short theme. A second voice takes it up while the first goes on "
    "with something else, then a third and perhaps a fourth. The listener's pleasure is to notice the theme wherever "
    "it returns.",
    "Watercolor cannot be corrected as oil can. The white in such a picture is mostly the paper itself, so the "
    "painter must know beforehand which places to leave dry. What runs and blooms by chance belongs to the charm.",
    "Hokusai was about seventy when he designed The Great Wave, a woodblock print in which Mount Fuji looks tiny "
    "behind a towering sea. It was sold cheaply in thousands of copies, and decades later it delighted painters in "
    "Paris.",
    "The strings of a violin are tuned in fifths: G, D, A and E. A bow of horsehair, rubbed with rosin, grips a "
    "string and lets it go hundreds of times a second. The wooden body makes the sound loud enough for a hall.",
    "The choir meets on Tuesdays at half past seven in the school hall. This spring we rehearse a requiem and three "
    "folk songs. You need not read music, but you should be able to hold a tune next to a loud bass.",
    "The sculptor left the back of the figure rough, because it was meant for a niche in which nobody would ever see "
    "it. Now it stands free in the middle of the hall, and visitors walk round it and photograph the marks of the "
    "chisel.",
    # food and sports
    "Sourdough needs no yeast from a shop. Flour and water are left standing until wild yeasts and bacteria multiply "
    "in them, and a part is kept back for the next loaf. The acid gives the bread its taste and lets it keep longer.",
    "In tennis a player must win at least four points and lead by two to take a game. The points are called fifteen, "
    "thirty and forty. At forty all it is deuce, and the next point gives only an advantage.",
    "A marathon is a little more than forty-two kilometers long. Many runners feel strong until the thirtieth, when "
    "the body's store of sugar runs low and every step becomes hard. Those who started too fast are overtaken here by "
    "the patient.",
    "Coffee beans are the seeds of a fruit that is red when it is ripe. They are green until they are roasted; at "
    "about two hundred degrees they crack, turn brown and begin to smell. Light roasts keep more of the acid, dark "
    "ones taste bitter.",
    "Bean soup for four: soak a pound of white beans overnight. Simmer them with a bay leaf, two carrots and a stalk "
    "of celery for ninety minutes. Salt at the end, stir in olive oil, and serve with toasted bread.",
    "Kickoff was delayed by a quarter of an hour because a cat had settled in the goal. Once the match began, the "
    "visitors pressed early and hit the post twice, but the only goal came from a corner in the last minute.",
    # lists
    "Shopping list:\n- 2 liters of milk\n- a dozen eggs\n- rye bread, sliced\n- 500 g of mushrooms\n- parsley\n- "
    "washing powder\n- batteries for the smoke detector\n- something nice for Aunt Vera's birthday\n",
    "Opening hours\nMonday: closed\nTuesday to Friday: 10 a.m. to 6 p.m.\nSaturday: 10 a.m. to 2 p.m.\nSunday: only "
    "for groups that have booked\nAdmission: adults 7.50, children 4.00\n",
    "To pack for the hut:\n1. sleeping bag\n2. head torch and spare batteries\n3. rain jacket\n4. two pairs of dry "
    "socks\n5. matches in a plastic bag\n6. map and compass\n7. chocolate\n",
    "Agenda\n1. Welcome and apologies for absence\n2. Minutes of the last meeting\n3. Report of the treasurer\n4. "
    "Repair of the boathouse roof\n5. Summer party: who brings what?\n6. Any other business\n",
    "The planets in order from the sun: Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune. The first four "
    "are small and rocky. Pluto, which used to be counted as the ninth, has been called a dwarf planet since 2006.",
    "| stop | arrives | leaves |\n|---|---|---|\n| Harbour | | 8:05 |\n| Old Market | 8:12 | 8:14 |\n| Hospital | "
    "8:21 | 8:22 |\n| Stadium | 8:30 | |\n",
)


def read_paragraphs(path: Path | None = None) -> dict[str, list[str]]:
    """The paragraphs of each part of a search, which share none: those above, or those of a text file.

    In a file, blank lines part paragraphs; one that is there twice counts once. The parts take turns. Raises
    InputError when the file cannot be read, or has too few.
    """
    paragraphs = PARAGRAPHS if path is None else _from_file(path)
    return {part: list(paragraphs[i :: len(PARTS)]) for i, part in enumerate(PARTS)}


def _from_file(path: Path) -> tuple[str, ...]:
    try:
        # Editors on Windows put a byte order mark first.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as UTF-8 text: {error}; give another file") from error
    found = tuple(dict.fromkeys(block.strip() for block in re.split(r"\n\s*\n", text) if block.strip()))
    if len(found) < (fewest := FEWEST_PARAGRAPHS * len(PARTS)):
        raise InputError(
            f"{path} has {len(found)} different paragraphs with blank lines between them; a search needs "
            f"{fewest}, {FEWEST_PARAGRAPHS} for each of its parts"
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
        every = slice(None)
        return self._scores([(float(logprob), float(kl)) for logprob, kl in self._each(every)], every)

    def gradient(
        self, factors: Sequence[float], start: int, stop: int, leash: float, leash_kl: float
    ) -> tuple[TextScores, NDArray[np.float64]]:
        """The scores of paragraphs start … stop − 1, and (layers,): d/d factor of leash · mean of logprob − leash_kl ·
        mean of kl."""
        gradient = np.zeros(self.model.config.num_hidden_layers)
        scores = []
        paragraphs = slice(start, stop)
        with (
            differentiable_factors(self.model, factors) as leaf,
            checkpointed_layers(self.model, self.checkpointing),
        ):
            for logprob, kl in self._each(paragraphs):
                (part,) = torch.autograd.grad((leash * logprob - leash_kl * kl) / (stop - start), leaf)
                gradient += part.cpu().double().numpy()
                scores.append((float(logprob.detach()), float(kl.detach())))
        return self._scores(scores, paragraphs), gradient

    def _each(self, paragraphs: slice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Mean log-probability and mean KL of a token, paragraph by paragraph."""
        for ids, base in zip(self._ids[paragraphs], self._base[paragraphs], strict=True):
            before, after = _log_softmax(base), _log_softmax(self._logits(ids))
            logprob = after.gather(-1, ids[0, 1:, None].to(after.device)).mean()
            yield logprob, (before.exp() * (before - after)).sum(-1).mean()

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        """(tokens − 1, vocabulary): what predicts each token but the first."""
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0, :-1]
        return logits

    def _scores(self, scores: Sequence[tuple[float, float]], paragraphs: slice) -> TextScores:
        table = np.array(scores, dtype=np.float64).reshape(-1, 2)
        return TextScores(table[:, 0], table[:, 1], sum(ids.shape[1] for ids in self._ids[paragraphs]))


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """In float32, or more where the model has more."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
