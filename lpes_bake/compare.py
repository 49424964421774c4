"""A comparison of methods: the same questions to each, by gold position, and what each costs beside the base model.

DIR holds journal.jsonl (what each method is, and each piece of work as it was done: one method on one context, its
timing, or what it looked for in the model), and, once all is done, comparison.json and what
`lpes_bake.compare_files` makes of it. A comparison that goes on may have other methods: those that are in the journal
are not asked again. torch is imported inside functions only.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import hashlib
import itertools
import json
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lpes_bake import __version__
from lpes_bake.baselines.methods import METHODS, Method, parse_method
from lpes_bake.comparison import METRICS, side_by_side, task_facts
from lpes_bake.conclusion import environment_of
from lpes_bake.factors import Factors, base_facts, finite, load_factors
from lpes_bake.loading import load_tokenizer, require_causal
from lpes_bake.plan import weights_digest
from lpes_bake.run import JOURNAL_FILE, check_out, check_outside, together
from lpes_bake.search.errors import InputError
from lpes_bake.search.journal import Journal
from lpes_bake.search.ledger import open_journal
from lpes_bake.search.processes import Processes, connected, too_few
from lpes_bake.search.prompts import Encoded, encode
from lpes_bake.search.tasks import Task, parse_task
from lpes_bake.settings import DEFAULT_TASK, MACHINE, QUESTIONS, as_in_search, setting
from lpes_bake.source import Source, base_form, open_source, rope_settings
from lpes_bake.unseen import check_unseen

if TYPE_CHECKING:
    from lpes_bake.answers import Interview
    from lpes_bake.search.prompts import Taken

BASE = "base"

# A method, and the index of a task and of one of its contexts.
Unit = tuple[str, int, int]


@dataclass(frozen=True)
class CompareSettings:
    """All that decides the result of a comparison, but for the model."""

    methods: tuple[str, ...] = setting(
        (),
        "What is compared, commas between: base (always there), lpes=FILE and its rivals. May be given more than once.",
        metavar="NAME[=VALUE],…",
    )
    task: tuple[str, ...] = setting(
        (DEFAULT_TASK,),
        "What is asked: NAME[:FILE][,key=value…], as for search. May be given more than once.",
        QUESTIONS,
        metavar="SPEC",
    )
    contexts: int = setting(
        100,
        "Contexts of each task, each asked at every position. The standard error at accuracy 0.5 is 5 points with 100, "
        "2.2 with 500.",
        QUESTIONS,
    )
    seed: int = setting(
        1, "Seeds the drawing of questions. They are never those of a search, whatever its seed.", QUESTIONS
    )
    prompt_format: str = as_in_search("prompt_format")
    batch_size: int = setting(
        1,
        "Questions of a context that are answered together, padded on the left; less when memory is tight. "
        "1 keeps padding away from every method.",
        MACHINE,
    )
    timing_tokens: int | None = setting(
        None,
        "Length of the prompt that times and memory are measured on; 0 measures none.",
        MACHINE,
        unset="the first task's prompt of median length",
    )
    device: str | None = as_in_search("device")
    dtype: str | None = as_in_search("dtype")

    def __post_init__(self) -> None:
        for name, least in (("contexts", 1), ("seed", 0), ("batch_size", 1), ("timing_tokens", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} is {value}; it must be at least {least}")


@dataclass(frozen=True)
class Events:
    """Where a comparison reports to: what it is doing, how many units of how many are done, and what the user should
    know now."""

    status: Callable[[str], None] = lambda _: None
    progress: Callable[[int, int], None] = lambda done, total: None
    warning: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class Plan:
    """A comparison that passed its checks: no weight has been read.

    methods: by the name that tables give them, the base first. facts: what each is, the content of its files among it.
    taken: the questions, a task each.
    settings: with device and dtype as "auto" came to. prompt: the ids that times are measured on; None for no timing.
    """

    source: Source
    settings: CompareSettings
    methods: dict[str, Method]
    facts: dict[str, dict[str, Any]]
    tasks: tuple[Task, ...]
    taken: list[Taken]
    tokenizer: Any
    device: Any
    dtype: Any
    prompt: list[int] | None
    header: dict[str, Any]

    def units(self) -> list[Unit]:
        """All the work but for timing, in its order."""
        counts = [len(one.contexts) for one in self.taken]
        return [(name, i, k) for name in self.methods for i, count in enumerate(counts) for k in range(count)]

    def questions(self, unit: Unit) -> list[Encoded]:
        """What a method is asked about a context."""
        name, task, context = unit
        found = []
        for one in self.taken[task].contexts[context]:
            example = self.methods[name].rearrange(one.example)
            changed = example.prompt != one.example.prompt
            found.append(
                Encoded(example, *encode(example, self.tokenizer, self.settings.prompt_format)) if changed else one
            )
        return found


def compare(
    model: str,
    out: Path,
    settings: CompareSettings,
    *,
    revision: str | None = None,
    resume: bool = False,
    trust_remote_code: bool = False,
    command: str = "",
    events: Events | None = None,
) -> dict[str, Any] | None:
    """Compare the methods on `model`, with a journal in `out`: the content of comparison.json, on the first process.

    Checks come first: InputError before any weight is read, and before `out` is made. command: what comparison.json
    says to reproduce it with. Every process of `accelerate launch` runs this; units are dealt out, and the first one
    writes.
    """
    events = events or Events()
    if (lonely := too_few()) is not None:
        events.warning(lonely)
    with connected() as processes:
        together(processes, lambda: check_out(out, resume=resume))
        plan = make_plan(
            model,
            settings,
            revision=revision,
            trust_remote_code=trust_remote_code,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")) if processes.world_size > 1 else None,
        )
        check_outside(out, plan.source)
        together(processes, lambda: out.mkdir(parents=True, exist_ok=True))
        with open_journal(out / JOURNAL_FILE, plan.header, processes) as journal:
            together(processes, lambda: enrol(plan, journal))
            plan = settle(plan, journal, processes, events)
            timings = measure(plan, journal, processes, events)
            results = answer(plan, journal, processes, events)
    for line in without_numbers(plan, results):
        events.warning(line)
    return conclude(plan, timings, results, command) if processes.rank == 0 else None


def make_plan(
    model: str,
    settings: CompareSettings,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_rank: int | None = None,
) -> Plan:
    """Check everything that can be checked before a weight is read. Raises InputError.

    local_rank: number of this process on its machine, where there are several; it picks the GPU.
    """
    source = open_source(model, revision=revision, baked=True)
    require_causal(source)
    from lpes_bake.modeling.layer_rope_scaling import LENGTH_DEPENDENT

    rope_type = rope_settings(source.config, source.name)["rope_type"]
    if settings.batch_size > 1 and rope_type in LENGTH_DEPENDENT:
        raise InputError(
            f"batch_size is {settings.batch_size}, but under RoPE type {rope_type!r} of {source.name} the longest "
            "question of a batch would set the frequencies of all; leave it at 1"
        )
    methods = named_methods(settings.methods)
    for method in methods.values():
        method.check(source)
    tasks = [parse_task(spec) for spec in settings.task]
    known = {name: found for name, method in methods.items() if (found := factors_of(method, source)) is not None}

    from transformers.utils import logging

    from lpes_bake.search.device import pick_device, pick_dtype
    from lpes_bake.search.prompts import take

    # Loading a baked directory's tokenizer without its code makes transformers warn of a model type it does not know.
    logging.set_verbosity_error()
    device = pick_device(settings.device, local_rank)
    dtype = pick_dtype(settings.dtype, device)
    settings = dataclasses.replace(settings, device=device.type, dtype=str(dtype).removeprefix("torch."))
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    taken = [
        take(task, "report", settings.seed, settings.contexts, tokenizer, settings.prompt_format, source.max_positions)
        for task in tasks
    ]
    for name, factors in known.items():
        for task, one in zip(tasks, taken, strict=True):
            check_unseen(name, factors, task, one.examples)
    for method in methods.values():
        for example in itertools.chain(*(context for one in taken for context in one.examples)):
            method.rearrange(example)
    header = {
        "base": base_facts(source),
        "weights": weights_digest(source),
        "questions": {str(number): task.describe() for number, task in enumerate(tasks, 1)},
        **{
            name: value
            for name, value in dataclasses.asdict(settings).items()
            if name not in ("methods", "task")  # they hold paths; what they come to stands elsewhere
        },
    }
    facts = {
        name: {"method": method.label.partition("=")[0], **held(method, known.get(name))}
        for name, method in methods.items()
    }
    return Plan(
        source,
        settings,
        methods,
        facts,
        tuple(tasks),
        taken,
        tokenizer,
        device,
        dtype,
        timing_prompt(settings, taken[0], source.max_positions),
        json.loads(json.dumps(header)),
    )


def named_methods(texts: Iterable[str]) -> dict[str, Method]:
    """The methods by the name that tables give them: as they were written, but for the folders of files where names
    differ without them. The base comes first, whether it was named or not."""
    # A comma belongs to a file's name unless a method stands behind it.
    border = rf",\s*(?=(?:{'|'.join(map(re.escape, METHODS))})(?:[=,]|$))"
    specs = [spec for text in texts for spec in re.split(border, text)]
    if not [spec for spec in specs if spec != BASE]:
        raise InputError(
            f"there is nothing to compare with the base: give --methods, some of "
            f"{', '.join(example for _, example in METHODS.values())}"
        )
    for spec in specs:
        if specs.count(spec) > 1:
            raise InputError(f"method {spec!r} is given twice; leave one out")
    specs = [BASE, *(spec for spec in specs if spec != BASE)]
    short = [short_name(spec) for spec in specs]
    names = [spec if short.count(name) > 1 else name for spec, name in zip(specs, short, strict=True)]
    return {name: parse_method(spec) for name, spec in zip(names, specs, strict=True)}


def short_name(spec: str) -> str:
    """A method as it was written, a file without its folders."""
    name, given, value = spec.partition("=")
    return f"{name}{given}{Path(value).name}" if value and Path(value).exists() else spec


def factors_of(method: Method, source: Source) -> Factors | None:
    """What an LPES method scales with, and what its file tells of the search; None for other methods."""
    name, _, value = method.label.partition("=")
    if name != "lpes":
        return None
    return load_factors(Path(value) if value else source.path)


def held(method: Method, factors: Factors | None) -> dict[str, Any]:
    """What a method's files hold, for the journal: factors, or the digest of routers."""
    name, _, value = method.label.partition("=")
    if name == "moice":
        from lpes_bake.baselines.moice import ROUTERS_FILE

        return {"routers_sha256": hashlib.sha256((Path(value) / ROUTERS_FILE).read_bytes()).hexdigest()[:16]}
    return {} if factors is None else {"layer_rope_scaling": list(factors.layer_rope_scaling)}


def timing_prompt(settings: CompareSettings, taken: Taken, limit: int) -> list[int] | None:
    """The ids that times are measured on: the first task's prompt of median length, as long as was asked for."""
    from lpes_bake.timing import DECODED

    if settings.timing_tokens == 0:
        return None
    prompts = sorted((one.prompt for context in taken.contexts for one in context), key=len)
    prompt = prompts[len(prompts) // 2]
    length = min(len(prompt), limit - DECODED) if settings.timing_tokens is None else settings.timing_tokens
    if not 0 < length <= limit - DECODED:
        raise InputError(
            f"timing_tokens is {length}, but {DECODED} more must fit into the model's {limit} positions; give at most "
            f"{limit - DECODED}"
        )
    return list(itertools.islice(itertools.cycle(prompt), length))


def enrol(plan: Plan, journal: Journal | None) -> None:
    """Write down the methods that the journal does not know; InputError where it has another one by the same name."""
    if journal is None:
        return
    known = {one["method"]: one["facts"] for one in journal.records[1:] if "facts" in one}
    for name, facts in plan.facts.items():
        if name in known and known[name] != facts:
            raise InputError(
                f"{journal.path} has answers of another {name}, whose file has changed since; give this one another "
                "name, or a new --out"
            )
    for name, facts in plan.facts.items():
        if name not in known:
            journal.append({"method": name, "facts": facts})


def settle(plan: Plan, journal: Journal | None, processes: Processes, events: Events) -> Plan:
    """The plan with methods that look for nothing: what they look for is found by the first process, once, and written
    down."""
    known = {one["method"]: one["settled"] for one in journal.records[1:] if "settled" in one} if journal else {}
    methods, facts = {**plan.methods}, {**plan.facts}
    for name, method in plan.methods.items():
        if method.search is None:
            continue
        if journal is not None and name not in known:
            events.status(f"looking for the {name} of {plan.source.name}")
            known[name] = method.search(
                plan.source, plan.device, plan.dtype, plan.tokenizer, plan.settings.prompt_format
            )
            journal.append({"method": name, "settled": known[name]})
        text = processes.broadcast(known.get(name, ""))
        methods[name] = parse_method(text)
        facts[name] = {**facts[name], "settled": text}
    return dataclasses.replace(plan, methods=methods, facts=facts)


def measure(plan: Plan, journal: Journal | None, processes: Processes, events: Events) -> dict[str, dict[str, Any]]:
    """The timing of each method but the base, as `timing.Timing` has it. The first process measures, the others wait:
    they would be in one another's way."""
    records = processes.broadcast([] if journal is None else journal.records[1:])
    known: dict[str, dict[str, Any]] = {
        one["method"]: one["timing"] for one in records if "timing" in one and one["method"] in plan.methods
    }
    if plan.prompt is None:
        return known
    if processes.rank == 0 and any(name not in known for name in plan.methods if name != BASE):
        from lpes_bake.timing import Clock

        clock = Clock(plan.prompt, plan.device)
        events.status(f"loading {plan.source.name} on {plan.device} in {plan.settings.dtype}")

        def loader(name: str) -> Callable[[], Any]:
            return lambda: plan.methods[name].load(plan.source, plan.device, plan.dtype)

        clock.warm_up(loader(BASE))
        for name in plan.methods:
            if name == BASE or name in known:
                continue
            events.status(f"timing {name} beside the base model")
            known[name] = clock.beside(loader(BASE), loader(name)).to_json()
            if journal is not None:
                journal.append({"method": name, "timing": known[name]})
    return processes.broadcast({name: known[name] for name in plan.methods if name in known})


def answer(plan: Plan, journal: Journal | None, processes: Processes, events: Events) -> dict[Unit, dict[str, Any]]:
    """What came of all units: those that the journal knows, and the others, computed side by side."""
    records = processes.broadcast([] if journal is None else journal.records[1:])
    units = plan.units()
    known = {_unit(one["unit"]): one["result"] for one in records if "unit" in one}
    results: dict[Unit, dict[str, Any]] = {unit: known[unit] for unit in units if unit in known}
    interview = make_interview(plan)
    events.progress(len(results), len(units))
    for name, own in itertools.groupby(units, key=lambda unit: unit[0]):
        missing = [unit for unit in own if unit not in results]
        if not missing:
            continue
        events.status(f"loading {name}")
        decoder = plan.methods[name].load(plan.source, plan.device, plan.dtype)
        events.status(f"asking {name}")
        for start in range(0, len(missing), processes.world_size):
            dealt = missing[start : start + processes.world_size]
            mine = None
            if processes.rank < len(dealt):
                unit = dealt[processes.rank]
                mine = interview.ask(decoder, plan.tasks[unit[1]], plan.questions(unit)).to_json()
            for unit, result in zip(dealt, processes.gather(mine), strict=False):
                assert result is not None
                if journal is not None:
                    journal.append({"unit": list(unit), "result": result})
                results[unit] = result
            events.progress(len(results), len(units))
        # The model goes before the next one comes: together they may not fit.
        del decoder
        gc.collect()
    return results


def without_numbers(plan: Plan, results: dict[Unit, dict[str, Any]]) -> list[str]:
    """What to say of methods under which the model gave NaN: their means are missing."""
    said = []
    for name in plan.methods:
        given = [one for unit in plan.units() if unit[0] == name for one in results[unit]["logprob"]]
        if lost := given.count(None):
            said.append(f"{name}: the model gave NaN for {lost} of {len(given)} questions, so it has no mean")
    return said


def make_interview(plan: Plan) -> Interview:
    """What puts the questions, with the tokens that end a text as the library reads them from the model's files."""
    import transformers

    from lpes_bake.answers import Interview
    from lpes_bake.search.scoring import end_tokens

    try:
        generation = transformers.GenerationConfig.from_pretrained(plan.source.path)
    except OSError:
        config_class = getattr(transformers, plan.source.family.base_config)
        config = config_class.from_dict(base_form(plan.source).config)
        generation = transformers.GenerationConfig.from_model_config(config)
    return Interview(plan.tokenizer, end_tokens(generation), plan.device, plan.settings.batch_size)


def _unit(record: Sequence[Any]) -> Unit:
    name, task, context = record
    return name, task, context


def conclude(
    plan: Plan, timings: dict[str, dict[str, Any]], results: dict[Unit, dict[str, Any]], command: str
) -> dict[str, Any]:
    """All there is to know, as comparison.json has it. Numbers that are not finite are null."""
    tasks = []
    for i, (spec, task, taken) in enumerate(zip(plan.settings.task, plan.tasks, plan.taken, strict=True)):
        # None stands where the model gave NaN.
        values = {
            name: {
                metric: np.array([results[name, i, k][key] for k in range(len(taken.contexts))], dtype=np.float64)
                for metric, key in zip(METRICS, ("exact", "logprob"), strict=True)
            }
            for name in plan.methods
        }
        tasks.append(
            {
                **task_facts(spec, task),
                "contexts": len(taken.contexts),
                "too_long": taken.too_long,
                "methods": side_by_side(values, BASE),
            }
        )
    content = {
        "version": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tool_version": __version__,
        "command": command,
        "base": plan.header["base"],
        "settings": {**plan.header, "methods": plan.facts},
        "environment": environment_of(plan.device, plan.settings.dtype),
        "methods": list(plan.methods),
        "tasks": tasks,
        "costs": costs_of(timings, plan),
    }
    found: dict[str, Any] = finite(content)
    return found


def costs_of(timings: dict[str, dict[str, Any]], plan: Plan) -> dict[str, Any] | None:
    """What each method costs: medians of its rounds, and as `ratio` [median, lowest, highest] to the base model, round
    by round where they took turns. None where nothing was measured."""
    if plan.prompt is None:
        return None
    from lpes_bake.timing import DECODED, ROUNDS

    methods = {}
    for name, timing in timings.items():
        ours, theirs, in_turn = timing["method"], timing["base"], timing["in_turn"]
        methods[name] = {
            **summary(ours),
            "ratio": {
                "prefill": ratio_of(ours["prefill"], theirs["prefill"], in_turn),
                "decode": ratio_of(ours["decode"], theirs["decode"], in_turn),
                "memory": [ours["memory"] / theirs["memory"] if theirs["memory"] else None, None, None],
            },
            "base": summary(theirs),
            "in_turn": in_turn,
        }
    first = next(iter(methods.values()))["base"]
    return {"tokens": len(plan.prompt), "decoded": DECODED, "rounds": ROUNDS, "base": first, "methods": methods}


def summary(times: dict[str, Any]) -> dict[str, float | None]:
    """Seconds of a prompt and of a further token, and bytes of memory."""
    return {
        "prefill": statistics.median(times["prefill"]),
        "decode": statistics.median(times["decode"]),
        "memory": times["memory"],
    }


def ratio_of(ours: Sequence[float], theirs: Sequence[float], in_turn: bool) -> list[float | None]:
    """[median, lowest, highest] of the rounds' ratios; of rounds that were not taken in turn, that of the medians."""
    if not in_turn:
        return [statistics.median(ours) / statistics.median(theirs), None, None]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [statistics.median(ratios), min(ratios), max(ratios)]
