"""That nothing is reported on questions which factors were searched on. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from lpes_bake.factors import Factors
from lpes_bake.search.errors import InputError
from lpes_bake.search.tasks import Example, Task, own_code


def check_unseen(label: str, factors: Factors, task: Task, questions: Sequence[Sequence[Example]]) -> None:
    """InputError when one of these questions is among those that the factors were searched on or chosen by, as far as
    their file says which these are. label: what to call the factors.

    A task that keeps its parts apart cannot fail here: what is reported on is the report part, which a search never
    draws from. One of the user's own may not keep them apart, or may have been changed since.
    """
    asked = {(one.prompt, one.lead): number for number, context in enumerate(questions) for one in context}
    for part, seed, count in searched(factors, task):
        with own_code(type(task)):
            for one in (one for context in islice(task.contexts(part, seed), count) for one in context):
                if (number := asked.get((one.prompt, one.lead))) is not None:
                    did = "searched on" if part == "search" else "chosen by"
                    raise InputError(
                        f"{label}: these factors were {did} context {one.context} of the {task.name} task's {part} "
                        f"part (seed {seed}), which is context {number} here; give other questions, or a task whose "
                        "parts share nothing (docs/tasks.md)"
                    )


def searched(factors: Factors, task: Task) -> Iterator[tuple[str, int, int]]:
    """(part, seed, contexts that were drawn) of the searches on a task of this name that a factors file tells of.

    Nothing where it does not say, as in a bare list.
    """
    try:
        seed = int((factors.search or {})["seed"])
        for one in (factors.scores or {})["tasks"]:
            if one["settings"]["task"] == task.name:
                for part in ("search", "selection"):
                    # Those that were too long were drawn, too.
                    yield part, seed, max(0, int(one["contexts"][part]) + int(one["too_long"].get(part, 0)))
    except (KeyError, TypeError, ValueError, AttributeError):
        return
