"""Proving that a baked directory is right: what can be read off its files, then what it computes.

The static checks read files and import no torch. The live checks run `live_checks.py` in fresh
processes that cannot import lpes_bake, as a stranger's Python would meet the checkpoint.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from lpes_bake.export import survey
from lpes_bake.factors import load_factors
from lpes_bake.search.errors import InputError
from lpes_bake.search.families import FAMILIES, Family
from lpes_bake.source import (
    INDEX_FILE,
    ROPE_KEYS,
    SINGLE_FILE,
    WEIGHT_SUFFIXES,
    Source,
    check_complete,
    check_list,
    num_layers,
    packed_maps,
    read_config,
    read_header,
    read_json,
    rope_settings,
    weight_files,
)

Status = Literal["pass", "fail", "skip"]
Stack = Literal["transformers", "vllm", "vllm-compiled"]

# What loads the directory, and the parts of live_checks.py that try it.
STACKS: dict[Stack, tuple[str, str]] = {
    "transformers": ("directory", "copy"),
    "vllm": ("greedy", "vllm"),
    "vllm-compiled": ("greedy", "vllm-compiled"),
}
# What a part needs from an earlier one.
HANDED_OVER = {"copy": "outputs.pt", "vllm": "greedy.pt", "vllm-compiled": "greedy.pt"}

# What the bake writes into config.json; all else in it is the base model's.
BAKED_KEYS = ("model_type", "architectures", "auto_map", "layer_rope_scaling")
REQUIRED_AUTO_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
# Loaders put these onto the model without being asked.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Check:
    """One line of the checklist."""

    name: str
    status: Status
    reason: str


@dataclass(frozen=True)
class Unchecked:
    """Something that a run left open, and how it is checked."""

    what: str
    how: str


@dataclass
class Report:
    """What verify found out about a directory, and what it did not look at."""

    directory: str
    base: str | None
    checks: list[Check] = field(default_factory=list)
    not_checked: list[Unchecked] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No check failed. Skipped ones do not count."""
        return all(check.status != "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {
            "directory": self.directory,
            "base": self.base,
            "ok": self.ok,
            "checks": [asdict(check) for check in self.checks],
            "not_checked": [asdict(one) for one in self.not_checked],
        }


@dataclass(frozen=True)
class LiveSettings:
    """How the live checks run.

    prompt_tokens: length of the long prompt; a model with fewer positions gets as many as it has.
    device: a torch device, None for cuda or mps where there is one. dtype: the one computed in.
    trust_remote_code: run the directory's Python files even if they are not the ones we ship. stacks: what it is
    loaded in, each installed.
    """

    prompt_tokens: int = 3072
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    trust_remote_code: bool = False
    stacks: tuple[Stack, ...] = ("transformers",)


Notify = Callable[[Check], None]
Doing = Callable[[str], None]


def verify(
    directory: Path,
    base: Source | None = None,
    *,
    live: LiveSettings | None,
    notify: Notify = lambda check: None,
    doing: Doing = lambda what: None,
) -> Report:
    """Check a baked directory, against its base model where that is given.

    live: None leaves out whatever needs torch. notify gets each check as soon as it is done, doing the
    name of what starts. Raises InputError when `directory` holds no checkpoint of a known family.
    """
    report = Report(str(directory), base.name if base else None)

    def add(check: Check) -> None:
        report.checks.append(check)
        notify(check)

    for check in static_checks(directory, base, doing):
        add(check)
    run_checks(report, directory, live, add, doing)
    report.not_checked += not_checked(report, read_config(directory, str(directory)), base, live)
    return report


def run_checks(report: Report, directory: Path, live: LiveSettings | None, add: Notify, doing: Doing) -> None:
    """The live checks, unless the static ones say that the directory must not or need not be run."""
    if live is None:
        return
    failed = {check.name for check in report.checks if check.status == "fail"}
    # A wrong base says nothing against running the directory, but these do.
    reasons = failed & {"model type", "architectures", "auto_map", "factors", "rope settings", "weights"}
    if "python files" in failed and not live.trust_remote_code:
        reasons.add("python files")
    if reasons:
        add(Check("loads", "skip", f"not run, because of: {', '.join(sorted(reasons))}"))
        return
    for check in live_checks(directory, live, doing):
        add(check)


def not_checked(
    report: Report, config: Mapping[str, Any], base: Source | None, live: LiveSettings | None
) -> list[Unchecked]:
    """What a run left open, and how it is checked."""
    found = [Unchecked(check.name, check.reason) for check in report.checks if check.status == "skip"]
    if base is None:
        found.append(Unchecked("whether the weights and all other files are the base model's", "--base MODEL"))
    if live is None:
        unread = "" if base else ", and of the weights more than the headers"
        found.append(Unchecked(f"what it computes{unread}", "leave out --static"))
        return found
    if "transformers" not in live.stacks:
        found.append(Unchecked("the outputs, the cache, saving, the tokenizer", "--stack transformers"))
    for stack, name in (("vllm", "vLLM"), ("vllm-compiled", "vLLM compiled, as it runs unless told otherwise")):
        if stack not in live.stacks:
            install = "" if is_installed("vllm") else "install vLLM beside lpes-bake, then "
            found.append(Unchecked(name, f"{install}--stack {','.join([*live.stacks, stack])}"))
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and positions > live.prompt_tokens:
        found.append(Unchecked(f"positions from {live.prompt_tokens} to {positions}", f"--prompt-tokens {positions}"))
    if config.get("quantization_config"):
        found.append(
            Unchecked("errors that quantised weights hide", "verify a bake of the weights before quantisation")
        )
    elif live.dtype == "float32":
        found.append(Unchecked("16-bit precision", "--dtype bfloat16"))
    else:
        found.append(Unchecked("errors that 16-bit rounding hides", "--dtype float32"))
    here = f"transformers {version('transformers')}, torch {version('torch')}"
    found.append(Unchecked(f"other versions than {here}, and other devices", "run verify there"))
    found.append(
        Unchecked("padding, torch.compile, training, offloading", "lpes-bake's tests, on a tiny model of this family")
    )
    return found


def is_installed(package: str) -> bool:
    """Whether this Python could import a package; it is not imported."""
    return importlib.util.find_spec(package) is not None


def check_stacks(names: Iterable[str]) -> tuple[Stack, ...]:
    """The stacks of these names. InputError for one that is unknown or not installed."""
    wanted = tuple(dict.fromkeys(names))
    for name in wanted:
        if name not in STACKS:
            raise InputError(f"--stack {name!r} is unknown; known: {', '.join(STACKS)}")
        package = name.partition("-")[0]
        if not is_installed(package):
            raise InputError(
                f"--stack {name} needs {package}, which {sys.executable} does not have: install it, or leave it out"
            )
    return cast("tuple[Stack, ...]", wanted)


def static_checks(directory: Path, base: Source | None, doing: Doing = lambda what: None) -> Iterator[Check]:
    """All that can be told without running anything of the directory."""
    where = str(directory)
    if not directory.is_dir():
        raise InputError(f"{where} is not a directory: give one that `lpes-bake export` wrote")
    config = read_config(directory, where)
    family = guess_family(directory, config)
    yield run("model type", check_model_type, config, family)
    yield run("architectures", check_architectures, config, family)
    yield run("auto_map", check_auto_map, config, family)
    yield run("factors", check_factors_field, config, directory)
    yield run("rope settings", check_rope, config, directory, base)
    yield run("python files", check_python_files, directory, family)
    yield run("weights", check_weights, config, directory)
    yield run("model card", check_card, directory)
    if base is None:
        return
    yield run("base config", check_base_config, config, base)
    yield run("base files", check_base_files, directory, base)
    doing("comparing the weights with the base model's")
    yield run("base weights", check_base_weights, directory, base)


def run(name: str, check: Callable[..., str | None], *arguments: Any) -> Check:
    """One check's line: it returns what holds, None when it does not apply, and raises InputError when it fails."""
    try:
        reason = check(*arguments)
    except InputError as error:
        return Check(name, "fail", str(error))
    return Check(name, "pass", reason) if reason is not None else Check(name, "skip", "there is none")


def guess_family(directory: Path, config: Mapping[str, Any]) -> Family:
    """Which family the directory was baked for, even if somebody edited some of the places that say so."""
    signs = json.dumps([config.get("model_type"), config.get("architectures"), config.get("auto_map")])
    words = set(re.findall(r"\w+", signs))
    for family in FAMILIES:
        names = {family.model_type, family.module, family.config, *family.architectures.values()}
        if names & words or (directory / f"{family.module}.py").exists():
            return family
    raise InputError(
        f"{directory} is not a baked checkpoint (model_type {config.get('model_type')!r}): "
        "give a directory that `lpes-bake export` wrote"
    )


def check_model_type(config: Mapping[str, Any], family: Family) -> str:
    """A base model's model_type would load the base model and ignore the factors, without a word."""
    found = config.get("model_type")
    if found != family.model_type:
        raise InputError(
            f"model_type is {found!r}, must be {family.model_type!r}: loaders without trust_remote_code would take "
            "the base model and ignore the factors"
        )
    return family.model_type


def check_architectures(config: Mapping[str, Any], family: Family) -> str:
    """A base model's architecture name would make vLLM take its own implementation of it."""
    found = config.get("architectures")
    baked = list(family.architectures.values())
    if not isinstance(found, list) or len(found) != 1 or found[0] not in baked:
        raise InputError(
            f"architectures is {found!r}, must be one of {', '.join(baked)}: vLLM would take the base model and "
            "ignore the factors"
        )
    return str(found[0])


def check_auto_map(config: Mapping[str, Any], family: Family) -> str:
    """auto_map is complete, and points to the files in this directory."""
    found = config.get("auto_map")
    if not isinstance(found, dict):
        raise InputError(f"auto_map is {found!r}, must name the classes in this directory's Python files")
    elsewhere = {key: target for key, target in found.items() if "--" in str(target)}
    if elsewhere:
        raise InputError(f"auto_map points to another repository, so it does not load offline: {elsewhere}")
    for auto_class in REQUIRED_AUTO_CLASSES:
        if auto_class not in found:
            refused = "; vLLM refuses such a checkpoint" if auto_class == "AutoModel" else ""
            raise InputError(f"auto_map lacks {auto_class}{refused}")
    for auto_class, target in found.items():
        if target != family.auto_map.get(auto_class):
            raise InputError(f"auto_map: {auto_class} is {target!r}, must be {family.auto_map.get(auto_class)!r}")
    return f"{', '.join(found)}, all in this directory"


def check_factors_field(config: Mapping[str, Any], directory: Path) -> str:
    """layer_rope_scaling is valid, and the same as in the factors.json beside it."""
    factors = check_list(config.get("layer_rope_scaling"), "config.json", num_layers(config, "config.json"))
    found = f"{len(factors)} factors, {min(factors):g} to {max(factors):g}"
    if not (directory / "factors.json").is_file():
        return found
    record = load_factors(directory / "factors.json").layer_rope_scaling
    if record != factors:
        layer = next((h for h, pair in enumerate(zip(record, factors, strict=False)) if pair[0] != pair[1]), None)
        which = (
            f"layer {layer} has {factors[layer]:g}, there {record[layer]:g}" if layer is not None else "other length"
        )
        raise InputError(f"layer_rope_scaling in config.json is not what factors.json says: {which}")
    return f"{found}, as in factors.json"


def check_rope(config: Mapping[str, Any], directory: Path, base: Source | None) -> str:
    """The base model's RoPE settings are all there: the factors divide the frequencies that these give."""
    found = rope_settings(config, "config.json")
    wanted, whose = None, ""
    if base is not None:
        wanted, whose = rope_settings(base.config, base.name), f"{base.name}'s"
    elif (directory / "factors.json").is_file():
        wanted = (load_factors(directory / "factors.json").base or {}).get("rope")
        whose = "those that factors.json was made for"
    text = f"{found['rope_type']}, theta {found['rope_theta']:g}"
    if wanted is None:
        return text
    changed = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    if changed:
        key = changed[0]
        raise InputError(f"{key} is {found.get(key)!r} and not {wanted.get(key)!r}: the settings must be {whose}")
    return f"{text}, as {whose}"


def check_python_files(directory: Path, family: Family) -> str:
    """The Python files are ours to the byte, and there are no others."""
    shipped = importlib.resources.files("lpes_bake.modeling")
    for name in family.files:
        if not (directory / name).is_file():
            raise InputError(f"{name} is missing: no loader finds the factors' code without it")
        if (directory / name).read_bytes() != (shipped / name).read_bytes():
            raise InputError(f"{name} is not the file that this lpes-bake ships: somebody edited it, or bake again")
    # transformers follows links to folders (custom_generate/), into hidden ones too; rglob does not.
    links = {path for path in directory.rglob("*") if path.is_symlink() and path.is_dir()}
    present = {path.relative_to(directory).as_posix() for path in {*directory.rglob("*.py"), *links}}
    extra = sorted(name for name in present - set(family.files) if not is_hidden(name))
    if extra:
        raise InputError(f"{extra[0]} is no part of a bake: remove it")
    tokenizer = directory / "tokenizer_config.json"
    if tokenizer.is_file() and read_json(tokenizer, str(directory)).get("auto_map"):
        raise InputError(f"{tokenizer.name} has an auto_map, which makes loaders run other code: remove it")
    return f"{', '.join(family.files)}: byte for byte those that lpes-bake ships"


def is_hidden(name: str) -> bool:
    """Whether a relative path is no part of the checkpoint: .git, .cache, __pycache__ and their like."""
    return any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))


def check_weights(config: Mapping[str, Any], directory: Path) -> str:
    """The weights can be read, are whole and marked as PyTorch's, and nothing else could be taken for them."""
    used = weight_files(directory)
    for path in used:
        if path.suffix == ".bin":
            raise InputError(f"{path.name} is a pickle: a baked checkpoint has safetensors")
        if "format" not in read_header(path).metadata:
            raise InputError(f'{path.name} lacks the metadata {{"format": "pt"}}, and loaders refuse it')
    tensors = set().union(*used.values())
    check_complete(tensors, config, "the directory")
    for name in ADAPTER_FILES:
        if (directory / name).exists():
            raise InputError(f"{name}: loaders would put this adapter onto the baked model; remove it")
    names = {path.name for path in used}
    stale = sorted(
        path.name
        for path in directory.iterdir()
        if (path.suffix.lower() in WEIGHT_SUFFIXES and path.name not in names)
        or (path.name.endswith(".index.json") and (path.name != INDEX_FILE or SINGLE_FILE in names))
    )
    if stale:
        raise InputError(f"{stale[0]} belongs to no part of this model, and some loaders would take it; remove it")
    size = sum(path.stat().st_size for path in used)
    found = f"{len(used)} safetensors file{'s' * (len(used) > 1)}, {size / 1e9:.3g} GB, none left over"
    if not (quantization := config.get("quantization_config")):
        return found
    packed = len(packed_maps(tensors, config))
    return (
        f"{found}; {quantization.get('quant_method')}: every layer has the maps of the others"
        + f", and none of {packed} packed ones lacks a tensor" * (packed > 0)
    )


def check_card(directory: Path) -> str | None:
    """The model card's metadata can be read, as far as that can be told without the Hub."""
    return validate_card(directory / "README.md") if (directory / "README.md").is_file() else None


def validate_card(path: Path) -> str:
    """What the card says the base model is. InputError unless the Hub will be able to read its metadata."""
    from huggingface_hub import ModelCard

    try:
        card = ModelCard(path.read_text(encoding="utf-8"))
    except Exception as error:  # whatever YAML's parser, or the Hub's classes of metadata, object to
        raise InputError(f"{path.name}: metadata cannot be read: {' '.join(str(error).split())}") from error
    data: dict[str, Any] = card.data.to_dict()  # type: ignore[no-untyped-call]
    if not data:
        raise InputError(f"{path.name} has no metadata: a block between two lines of --- at its top")
    for key in ("license", "library_name", "pipeline_tag", "base_model_relation"):
        if not isinstance(data.get(key, ""), (str, list)):
            raise InputError(f"{path.name}: {key} must be text; got {data[key]!r}")
    for key in ("tags", "language", "datasets"):
        values = data.get(key) or []
        if isinstance(values, list) and not all(isinstance(value, str) for value in values):
            raise InputError(f"{path.name}: {key} must hold text only; got {values!r}")
    base = data.get("base_model")
    return f"valid metadata, base model {base}" if base else "valid metadata"


def check_base_config(config: Mapping[str, Any], base: Source) -> str:
    """Beyond what the bake changes, config.json is the base model's. RoPE settings have a line of their own."""
    own = (*BAKED_KEYS, *ROPE_KEYS, "layer_rope_scaling_types")
    found = {key: value for key, value in config.items() if key not in own}
    wanted = {key: value for key, value in base.config.items() if key not in own}
    for key in sorted({*found, *wanted}):
        if found.get(key) != wanted.get(key) or (key in found) != (key in wanted):
            there, here = wanted.get(key, "absent"), found.get(key, "absent")
            raise InputError(f"{key} is {here!r} in config.json, {there!r} in {base.name}'s")
    architecture = base.family.architectures[base.architecture]
    if config.get("architectures") != [architecture]:
        raise InputError(f"architectures is {config.get('architectures')!r}; {base.name} bakes to {architecture}")
    return f"equals {base.name}'s beyond {', '.join(BAKED_KEYS)}"


def check_base_files(directory: Path, base: Source) -> str:
    """Tokenizer, generation config, licence and all others are the base model's, byte for byte."""
    weights = weight_files(base.path)
    names = [name for name in survey(base, weights)[0] if base.path / name not in weights and name != INDEX_FILE]
    for name in names:
        if not (directory / name).is_file():
            raise InputError(f"{name} of {base.name} is missing")
        if not same_file(base.path / name, directory / name):
            raise InputError(f"{name} differs from {base.name}'s")
    return f"{len(names)} files of {base.name} carried over byte for byte"


def check_base_weights(directory: Path, base: Source) -> str:
    """Every tensor is the base model's, byte for byte, however they are spread over files."""
    ours, theirs = list(weight_files(directory)), list(weight_files(base.path))
    same_names = [path.name for path in ours] == [path.name for path in theirs]
    if any(path.suffix == ".bin" for path in theirs):
        from lpes_bake.convert import check_converted

        places = {name: place.path for name, place in all_places(ours).items()}
        check_converted(theirs, places, base.config)
        return f"{len(places)} tensors equal those in {base.name}'s pickled weights, to the bit"
    if same_names and all(same_file(a, b) for a, b in zip(ours, theirs, strict=True)):
        return f"{len(ours)} file{'s' * (len(ours) > 1)}, byte for byte {base.name}'s"
    found, wanted = (all_places(paths) for paths in (ours, theirs))
    if set(found) != set(wanted):
        missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
        raise InputError(f"other tensors than {base.name}'s: missing {missing[:3]}, extra {extra[:3]}")
    for tensor in sorted(found):
        a, b = found[tensor], wanted[tensor]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            raise InputError(f"{tensor} is {a.dtype} {list(a.shape)}, in {base.name} {b.dtype} {list(b.shape)}")
        if not same_span(a, b):
            raise InputError(f"{tensor} in {a.path.name} has other values than in {base.name}")
    return f"{len(found)} tensors equal {base.name}'s, byte for byte (in other files, or with other headers)"


@dataclass(frozen=True)
class Place:
    """Where one tensor's bytes lie."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def all_places(paths: Iterable[Path]) -> dict[str, Place]:
    """Tensors of several safetensors files."""
    places = {}
    for path in paths:
        header = read_header(path)
        for name, entry in header.tensors.items():
            begin, end = (header.start + offset for offset in entry["data_offsets"])
            places[name] = Place(path, entry["dtype"], tuple(entry["shape"]), begin, end)
    return places


def same_file(a: Path, b: Path) -> bool:
    """Whether two files hold the same bytes. Two links to one file are not read."""
    if a.samefile(b):
        return True
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as first, b.open("rb") as second:
        return same_bytes(first, second, a.stat().st_size)


def same_span(a: Place, b: Place) -> bool:
    """Whether two tensors hold the same bytes."""
    if a.end - a.begin != b.end - b.begin:
        return False
    with a.path.open("rb") as first, b.path.open("rb") as second:
        first.seek(a.begin)
        second.seek(b.begin)
        return same_bytes(first, second, a.end - a.begin)


def same_bytes(first: BinaryIO, second: BinaryIO, length: int) -> bool:
    """Whether two open files go on with the same `length` bytes."""
    while length > 0:
        chunk = min(CHUNK_BYTES, length)
        if first.read(chunk) != second.read(chunk):
            return False
        length -= chunk
    return True


def live_checks(
    directory: Path, settings: LiveSettings, doing: Doing = lambda what: None, python: str = sys.executable
) -> Iterator[Check]:
    """Load the directory in each stack: compare it with the reference, generate, save, and load what was saved.

    python: the interpreter whose transformers and vLLM these are; it needs no lpes-bake.
    """
    with tempfile.TemporaryDirectory(prefix="lpes-bake-verify-") as scratch:
        for part in dict.fromkeys(part for stack in settings.stacks for part in STACKS[stack]):
            if part in HANDED_OVER and not (Path(scratch) / HANDED_OVER[part]).exists():
                continue
            arguments = [part, str(directory.resolve()), scratch, "--device", settings.device or "auto"]
            arguments += ["--dtype", settings.dtype, "--prompt-tokens", str(settings.prompt_tokens)]
            yield from run_live(python, arguments, Path(scratch), doing)


def run_live(python: str, arguments: list[str], scratch: Path, doing: Doing) -> Iterator[Check]:
    """One run of live_checks.py: its checks as they come, and one more if it dies."""
    script = Path(__file__).with_name("live_checks.py")
    home = Path(tempfile.mkdtemp(prefix="home-", dir=scratch))
    # No hub, no token for the checkpoint's code to find, no modules cached by an earlier load. The
    # process starts in an empty directory, and has nobody to ask.
    environment = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    environment |= {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_MODULES_CACHE": str(home / "modules")}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment |= {"VLLM_CACHE_ROOT": str(home / "vllm"), "VLLM_NO_USAGE_STATS": "1"}
    # A long prompt on a busy CPU takes more than the five minutes that vLLM waits.
    environment |= {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "86400"}
    errors = home / "stderr"
    last = "the start"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [python, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=home,
            env=environment,
            text=True,
            encoding="utf-8",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                message = json.loads(line)
                if "doing" in message:
                    last = message["doing"]
                    doing(last)
                else:
                    yield Check(**{**message, "reason": with_cause(message["reason"], errors)})
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        lines = errors.read_text(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit code {process.returncode}"
        yield Check(last, "fail", f"the process died ({process.returncode}) during {last}: {why[:300]}")


def with_cause(reason: str, errors: Path) -> str:
    """A check's reason; where vLLM says that the root cause stands above, that cause, from the process's stderr."""
    if "root cause" not in reason:
        return reason
    cause = re.search(r"\b\w+(Error|Exception): .+", errors.read_text(errors="replace"))
    return cause[0].strip()[:300] if cause else reason
