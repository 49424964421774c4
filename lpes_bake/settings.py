"""The settings of a search: one dataclass, from which come the options, the journal's header and the docs.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lpes_bake.search.curve import CurveSettings
from lpes_bake.search.device import DTYPES
from lpes_bake.search.errors import InputError
from lpes_bake.search.genetic import GeneticSettings
from lpes_bake.search.gradient import GradientSettings
from lpes_bake.search.models import QUANTIZATIONS
from lpes_bake.search.objective import Objective
from lpes_bake.search.optimizers import OPTIMIZERS
from lpes_bake.search.prompts import PROMPT_FORMATS
from lpes_bake.search.study import StudySettings

DEFAULT_TASK = "kv"
# Optimizers that follow gradients, and so need contexts for them.
GRADIENT_OPTIMIZERS = ("gradient", "hybrid")

# Headings in the help.
QUESTIONS, OPTIMIZER, FITNESS, CONTEXTS = "Questions", "Optimizer and curve", "Fitness and leash", "Contexts"
MACHINE = "Model and machine"


def setting(
    default: Any, help_text: str, group: str = "", choices: tuple[str, ...] = (), unset: str = "", metavar: str = ""
) -> Any:
    """A field with what its option needs. group: its heading in the help; unset: what None comes to, in words."""
    about = {"help": help_text, "group": group, "choices": choices, "unset": unset, "metavar": metavar}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class SearchSettings:
    """All that decides the result of a search, but for the model."""

    task: tuple[str, ...] = setting(
        (DEFAULT_TASK,),
        "What factors are judged by: NAME[:FILE][,key=value…]. May be given more than once: all are searched together.",
        QUESTIONS,
        metavar="SPEC",
    )
    selection_task: tuple[str, ...] = setting(
        (),
        "Choose the winner among the finalists by this task instead. May be given more than once.",
        QUESTIONS,
        unset="the other questions of every --task",
        metavar="SPEC",
    )
    optimizer: str = setting(
        "gradient",
        "How factors are found: genetic is the paper's; gradient climbs the answers' log-probability; hybrid does one "
        "after the other; cma-es and random are there to compare with.",
        OPTIMIZER,
        choices=OPTIMIZERS,
    )
    objective: Objective = field(default_factory=Objective, metadata={"group": FITNESS})
    study: StudySettings = field(default_factory=StudySettings, metadata={"group": CONTEXTS})
    selection_contexts: int = setting(48, "Other contexts of each task, by which the winner is chosen.", CONTEXTS)
    report_contexts: int = setting(
        100, "Contexts of each task that nobody chose by, for the final comparison.", CONTEXTS
    )
    finalists: int = setting(5, "Best candidates of the search that meet on the selection contexts.", CONTEXTS)
    text: str | None = setting(
        None,
        "Text file with paragraphs for the leash, blank lines between them.",
        FITNESS,
        unset="paragraphs that come with lpes-bake",
        metavar="FILE",
    )
    prompt_format: str = setting(
        "auto",
        "How prompts are put to the model: auto uses the tokenizer's chat template when there is one.",
        QUESTIONS,
        choices=PROMPT_FORMATS,
    )
    seed: int = setting(0, "Seeds the search and the drawing of its questions.", QUESTIONS)
    start: str | None = setting(
        None,
        "Factors to go on from (factors.json, a run, a baked directory or a list), where no uniform factor is better. "
        "For --optimizer gradient.",
        OPTIMIZER,
        unset="the best uniform factor",
        metavar="FACTORS",
    )
    curve: CurveSettings = field(default_factory=CurveSettings, metadata={"group": OPTIMIZER})
    genetic: GeneticSettings = field(default_factory=GeneticSettings, metadata={"group": "Genetic algorithm"})
    gradient: GradientSettings = field(default_factory=GradientSettings, metadata={"group": "Gradient"})
    device: str | None = setting(None, "cpu, cuda, cuda:1, mps.", MACHINE, unset="the best there is")
    dtype: str | None = setting(
        None,
        "Precision of the model.",
        MACHINE,
        choices=DTYPES,
        unset="bfloat16 on a GPU that computes in it, else float32",
    )
    device_map: str | None = setting(
        None,
        "Spread a model too large for one device, as accelerate does: auto, balanced, …",
        MACHINE,
        metavar="MAP",
    )
    quantization: str | None = setting(
        None,
        "Load the weights quantised, with bitsandbytes. The factors are for any precision.",
        MACHINE,
        choices=QUANTIZATIONS,
    )
    batch_size: int | None = setting(
        None, "Contexts in a batch.", MACHINE, unset="what the device can take, less when memory is tight"
    )

    def __post_init__(self) -> None:
        if not self.task:
            raise InputError("no task is given; a search needs at least one")
        for tasks in (self.task, self.selection_task):
            if twice := next((one for one in tasks if tasks.count(one) > 1), None):
                raise InputError(f"the task {twice} is given twice; --task-weights makes one count more")
        for name, least in (
            ("selection_contexts", 2),
            ("report_contexts", 2),
            ("finalists", 1),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.optimizer in GRADIENT_OPTIMIZERS and not self.study.gradient_contexts:
            raise InputError(
                f"gradient_contexts is 0, but the optimizer {self.optimizer} follows gradients; "
                f"give at least {max(self.study.gradient_batch)}, or another optimizer"
            )
        if self.start is not None and self.optimizer != "gradient":
            raise InputError(f"start is for the optimizer gradient, not for {self.optimizer}: leave one of the two out")
        self.study.batches(len(self.task))
        self.objective.shares(len(self.task))
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"batch_size is {self.batch_size}; it must be at least 1")
        for one in fields(self):
            choices, value = one.metadata.get("choices"), getattr(self, one.name)
            if choices and value is not None and value not in choices:
                raise InputError(f"{one.name} must be one of {', '.join(choices)}; got {value!r}")

    def flat(self) -> dict[str, Any]:
        """All settings by the names of their options, as JSON values."""
        nested = asdict(self)
        parts = {name: nested.pop(name) for name in NESTED}
        flat = {**nested, **{key: value for part in parts.values() for key, value in part.items()}}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in flat.items()}

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> SearchSettings:
        """The settings from such a dict; names that are missing keep their defaults."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        parts = {
            name: part(**{one.name: values[one.name] for one in fields(part) if one.name in values})
            for name, part in NESTED.items()
        }
        own = {one.name: values[one.name] for one in fields(cls) if one.name in values and one.name not in NESTED}
        return cls(**own, **parts)


NESTED: dict[str, Any] = {
    "objective": Objective,
    "study": StudySettings,
    "curve": CurveSettings,
    "genetic": GeneticSettings,
    "gradient": GradientSettings,
}


def as_in_search(name: str) -> Any:
    """A field that another command has just as a search has it."""
    one = SearchSettings.__dataclass_fields__[name]
    return field(default=one.default, metadata=one.metadata)


# Sets of settings by name. "paper" is the paper's own algorithm at its own price of 800 evaluations: genetic,
# every candidate scored to the end by its share of right answers, nothing that guards other abilities.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "optimizer": "genetic",
        "uniform": (),
        "control_points": 4,
        "population": 40,
        "generations": 20,
        "contexts": 67,
        "fitness": "accuracy",
        "race": "off",
        "leash": 0.0,
        "max_damage": 1.0,
        "finalists": 1,
    },
}
