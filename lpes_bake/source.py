"""Reading a source checkpoint: finding it, and refusing early what cannot work. Imports no torch.

Everything here looks at config.json, at file names and at the headers of safetensors files; no tensor
is read, so a large model takes no longer than a small one. A model on the Hub is judged by its
config.json before its weights are downloaded.
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from lpes_bake.search.errors import InputError
from lpes_bake.search.families import FAMILIES, Family, family_of

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
# Before it, what torch.load(weights_only=True) refuses to run could be run all the same (CVE-2025-32434).
SAFE_TORCH = (2, 6)

# Endings of files that hold weights, whatever their format. Pickles (.bin, .pt, …) among them: they
# can run code when they are loaded.
# fmt: off
WEIGHT_SUFFIXES = frozenset({
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".gguf", ".ggml", ".llamafile", ".onnx",
    ".onnx_data", ".msgpack", ".h5", ".ot", ".tflite", ".mlmodel", ".npz", ".nemo", ".engine",
})
# fmt: on

# Where config.json may have RoPE settings, in all families and layouts; `rope_settings` reads them.
ROPE_KEYS = (
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_emb_base", "rotary_pct",
    "rope_local_base_freq",
)  # fmt: skip

# What each RoPE type cannot do without; the types that transformers knows for these families.
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}

# quant_method → the tensors that stand for one linear map, in each layout that it has. Some have more, not always.
PACKED_LAYOUTS = {
    "gptq": (("qweight", "qzeros", "scales"),),
    "awq": (("qweight", "qzeros", "scales"),),
    "bitsandbytes": (("weight", "weight.absmax", "weight.quant_map"), ("weight", "SCB")),
}

# The safetensors library itself refuses longer headers.
MAX_HEADER_BYTES = 100_000_000

# Positive numbers that float32, in which models hold their factors, knows to its full precision.
FLOAT32_RANGE = (1.1754943508222875e-38, 3.4028234663852886e38)


@dataclass(frozen=True)
class Source:
    """A checkpoint that passed the checks.

    name: the Hub name ("org/model") where it is known, else the directory's own name; never a path.
    revision: the resolved commit on the Hub, where it is known. config: config.json as it was written.
    factors: the layer_rope_scaling of a baked directory, None for a base model.
    """

    name: str
    path: Path
    revision: str | None
    config: dict[str, Any]
    family: Family
    factors: list[float] | None = None

    @property
    def num_hidden_layers(self) -> int:
        """The number of decoder layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def max_positions(self) -> int:
        """Tokens that a prompt may have; without end where the config names no limit."""
        limit = self.config.get("max_position_embeddings")
        return limit if isinstance(limit, int) else sys.maxsize

    @property
    def architecture(self) -> str:
        """The base model's architecture name, for a baked directory too."""
        name = architecture_of(self.config, self.name)
        base = {baked: base for base, baked in self.family.architectures.items()}
        return base.get(name, name)


def open_source(model: str, *, revision: str | None = None, baked: bool = False) -> Source:
    """Find and check a model: a local directory, or a name on the Hub (downloaded into its cache).

    baked: also accept a directory that this tool wrote. Raises InputError, one line, for all else.
    """
    path = user_path(model)
    if path.is_dir():
        if revision is not None:
            raise InputError(f"{model} is a local directory: --revision is for models on the Hub")
        name, commit = local_name(path)
        config = read_config(path, model)
        family = check_config(config, model, baked=baked)
    elif path.exists():
        hint = " (a .gguf file can only be exported)" if path.suffix == ".gguf" else ""
        raise InputError(f"{model} is a file, not a directory: give the directory that holds config.json{hint}")
    elif looks_like_path(model):
        raise InputError(f"{model}: no such directory")
    else:
        name = model
        folder = Path(fetch_config(model, revision))
        commit = folder.name
        config = read_config(folder, model)
        family = check_config(config, model, baked=baked)
        path = Path(fetch_snapshot(model, commit))
    factors = config.get("layer_rope_scaling") if config["model_type"] == family.model_type else None
    source = Source(name, path, commit, config, family, factors)
    check_complete(set().union(*weight_files(path).values()), config, model)
    if (source.path / "adapter_config.json").is_file():
        raise InputError(f"{model} holds an adapter, which loaders put onto the model: merge it or move it away")
    return source


def base_form(source: Source) -> Source:
    """The base model that a baked directory was made from, in the same files: a bake leaves the weights as they are.

    A base model is returned as it is. Which one it is, the model card says; without one factors.json, although its
    factors may have been found on another.
    """
    if source.factors is None:
        return source
    record, card = source.path / "factors.json", source.path / "README.md"
    base = read_json(record, source.name).get("base") if record.is_file() else None
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    name, revision = source.name, source.revision
    if made := re.search(r"^lpes-bake export (.+?)(?: --revision (\S+))? factors\.json ", text, re.MULTILINE):
        name, revision = made[1], made[2]
    elif isinstance(base, dict) and isinstance(base.get("name"), str):
        name, revision = base["name"], base.get("revision")
    config = {**source.config, "model_type": source.family.base_model_type, "architectures": [source.architecture]}
    config = {key: value for key, value in config.items() if key not in ("auto_map", "layer_rope_scaling")}
    return replace(source, name=name, revision=revision, config=config, factors=None)


def user_path(name: Path | str) -> Path:
    """A path as it was typed; InputError for ~ of a user that does not exist."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise InputError(f"{name}: no such user") from error


def local_name(path: Path) -> tuple[str, str | None]:
    """The name of a directory and its commit: both are in the path where the Hub's cache made it."""
    absolute = path.absolute()
    for place in (absolute, path.resolve()):
        repo = place.parent.parent.name
        if (
            place.parent.name == "snapshots"
            and repo.startswith("models--")
            and re.fullmatch("[0-9a-f]{40}", place.name)
        ):
            return repo.removeprefix("models--").replace("--", "/"), place.name
    return path.resolve().name, None


def looks_like_path(model: str) -> bool:
    """Whether a name that does not exist was meant as a path: Hub names are `name` or `org/name`."""
    return not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) or model.startswith((".", "/", "~"))


def fetch_config(model: str, revision: str | None) -> str:
    """Download config.json alone; the folder it lies in is named after the commit."""
    from huggingface_hub import hf_hub_download

    try:
        return str(Path(hf_hub_download(model, "config.json", revision=revision)).parent)
    except Exception as error:
        raise hub_error(error, model, revision) from error


def fetch_snapshot(model: str, commit: str) -> str:
    """Download the rest at that commit: safetensors weights or, where there are none, pickled ones."""
    from huggingface_hub import snapshot_download

    others = [f"*{suffix}" for suffix in sorted(WEIGHT_SUFFIXES - {".safetensors"})]
    # Copies of the whole model for other programs; Mistral's and Meta's own layouts.
    others += ["original/*", "consolidated*.safetensors"]
    try:
        folder = str(snapshot_download(model, revision=commit, ignore_patterns=others))
        if not any((Path(folder) / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
            snapshot_download(model, revision=commit, allow_patterns="pytorch_model*.bin")
        return folder
    except Exception as error:
        raise hub_error(error, model, commit) from error


def hub_error(error: Exception, model: str, revision: str | None) -> InputError:
    """What went wrong on the Hub, in one line that never quotes a header or an address."""
    from huggingface_hub import errors

    at = f"{model} at revision {revision}" if revision else model
    if isinstance(error, errors.GatedRepoError):
        why = "is gated: accept its terms on its page on the Hub and log in with `hf auth login`"
    elif isinstance(error, errors.RepositoryNotFoundError):
        why = "is neither a local directory nor a model on the Hub that you can see (a private one needs a login)"
    elif isinstance(error, errors.RevisionNotFoundError):
        why = "does not exist on the Hub: no such revision"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        why = "is not a local directory, and the Hub cannot be reached and its cache here does not hold it all"
    elif isinstance(error, errors.EntryNotFoundError):
        why = "has no config.json on the Hub: not a transformers checkpoint (an adapter is merged into its base first)"
    elif isinstance(error, errors.HFValidationError):
        why = "is neither a local directory nor a valid Hub name"
    else:
        why = f"could not be fetched from the Hub ({type(error).__name__}); try again, or give a local directory"
    return InputError(f"{at} {why}")


def parse_json(text: str | bytes) -> Any:
    """json.loads, for which nesting that is too deep is a ValueError like all else."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path, where: str) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{where}: {path.name} cannot be read as JSON: {reason}") from error
    if not isinstance(content, dict):
        raise InputError(f"{where}: {path.name} holds a JSON {type(content).__name__}, not an object")
    return content


def read_config(path: Path, where: str) -> dict[str, Any]:
    """config.json of a checkpoint, as it was written."""
    if not (path / "config.json").is_file():
        hint = ""
        if (path / "adapter_config.json").is_file():
            hint = "; it is an adapter: merge it into its base model first (peft's merge_and_unload)"
        elif (path / "factors.json").is_file():
            hint = "; it has a factors.json: give the model that was searched, and export the factors into a checkpoint"
        raise InputError(f"{where} has no config.json: not a transformers checkpoint{hint}")
    return read_json(path / "config.json", where)


def check_config(config: Mapping[str, Any], where: str, *, baked: bool) -> Family:
    """The family of a config that can be scaled; InputError for one that cannot."""
    is_baked = config.get("model_type") in [family.model_type for family in FAMILIES]
    if is_baked and baked:
        family = next(family for family in FAMILIES if family.model_type == config["model_type"])
    else:
        family = family_of(config, where)
        if "layer_rope_scaling" in config:
            raise InputError(
                f"{where} has layer_rope_scaling and model_type {family.base_model_type!r}, so loaders ignore its "
                "factors: bake it again from its base model"
            )
        if config.get("auto_map"):
            raise InputError(
                f"{where} brings its own modeling code (auto_map in config.json), which baking would replace: remove "
                f"auto_map from a local copy if transformers' own {family.base_prefix} does the same"
            )
    architecture = architecture_of(config, where)
    known = family.architectures.values() if is_baked else family.architectures
    if architecture not in known:
        raise InputError(
            f"{where} has architecture {architecture!r}, which is not supported; supported: {', '.join(known)}"
        )
    layers = num_layers(config, where)
    rope_settings(config, where)
    kinds = config.get("layer_rope_scaling_types")
    if kinds not in (None, ["full_attention"], ["sliding_attention"], ["full_attention", "sliding_attention"]):
        raise InputError(
            f"{where}: layer_rope_scaling_types in config.json must be a list of full_attention, sliding_attention or "
            f"both; got {kinds!r}"
        )
    if is_baked:
        check_list(config.get("layer_rope_scaling"), where, layers)
    return family


def num_layers(config: Mapping[str, Any], where: str) -> int:
    """The number of decoder layers."""
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise InputError(f"{where}: num_hidden_layers in config.json must be a positive integer; got {layers!r}")
    return layers


def architecture_of(config: Mapping[str, Any], where: str) -> str:
    """The one entry of `architectures`; without any, the family's causal-LM head is meant."""
    architectures = config.get("architectures")
    if not architectures:
        family = next(f for f in FAMILIES if config.get("model_type") in (f.base_model_type, f.model_type))
        base = family.base_class("ForCausalLM")
        return base if config["model_type"] == family.base_model_type else family.architectures[base]
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise InputError(f"{where}: architectures in config.json must be a list of one name; got {architectures!r}")
    return architectures[0]


def rope_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The RoPE settings of config.json in one form: rope_theta, rope_type and the type's own.

    Reads the layout of transformers 4 (`rope_theta` and `rope_scaling`) and that of transformers 5
    (`rope_parameters`); where both stand, transformers goes by rope_scaling. A missing rope_theta is
    an error: a guess would go wrong silently. The settings of a model with two tables (Gemma 3) are those
    of its layers with full attention, and "sliding_attention" holds those of the others.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get(key) or {}
    if not isinstance(scaling, dict):
        raise InputError(f"{where}: {key} in config.json must be an object; got {scaling!r}")
    # GPT-NeoX has names of its own.
    top = {
        "rope_theta": config.get("rope_theta", config.get("rotary_emb_base")),
        "partial_rotary_factor": config.get("partial_rotary_factor", config.get("rotary_pct")),
    }
    full, sliding = scaling.get("full_attention"), scaling.get("sliding_attention")
    if isinstance(full, dict) and isinstance(sliding, dict):
        tables = [table_settings(full, {}, where, f"{key}.full_attention")]
        tables += [table_settings(sliding, {}, where, f"{key}.sliding_attention")]
    elif config.get("rope_local_base_freq") is not None:
        local = {"rope_theta": config["rope_local_base_freq"]}
        tables = [table_settings(scaling, top, where, key), table_settings({}, local, where, "rope_local_base_freq")]
    else:
        return table_settings(scaling, top, where, key)
    return {**tables[0], "sliding_attention": tables[1]}


def table_settings(scaling: Mapping[str, Any], top: Mapping[str, Any], where: str, key: str) -> dict[str, Any]:
    """The settings of one rotary table: `scaling` is what stands at `key` in config.json, `top` what stands above."""
    thetas = [place["rope_theta"] for place in (scaling, top) if place.get("rope_theta") is not None]
    if not thetas:
        raise InputError(
            f"{where}: config.json has no rope_theta, neither at its top nor in {key}; add to a local copy the value "
            "that the model was trained with (10000.0 for the first Llamas)"
        )
    for theta in thetas:
        if not is_number(theta) or not math.isfinite(theta) or theta <= 0:
            raise InputError(f"{where}: rope_theta in config.json must be a positive number; got {theta!r}")
    theta = thetas[0]
    if thetas[-1] != theta:
        raise InputError(f"{where}: config.json has two values of rope_theta: {thetas[-1]!r}, and {theta!r} in {key}")
    types = [scaling[name] for name in ("rope_type", "type") if scaling.get(name) is not None]
    if types[1:] and types[0] != types[1]:
        raise InputError(
            f"{where}: {key} in config.json has rope_type {types[0]!r} and type {types[1]!r}, and transformers 4 goes "
            "by type, 5 by rope_type: leave the right one in a local copy"
        )
    rope_type = types[0] if types else "default"
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise InputError(f"{where}: RoPE type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    missing = [name for name in ROPE_TYPES[rope_type] if scaling.get(name) is None]
    if missing:
        raise InputError(f"{where}: {key} of type {rope_type!r} in config.json lacks {', '.join(missing)}")
    for name in ROPE_TYPES[rope_type]:
        numbers = scaling[name] if rope_type == "longrope" else [scaling[name]]
        if not isinstance(numbers, list) or not all(is_number(number) and number > 0 for number in numbers):
            raise InputError(f"{where}: {name} in {key} in config.json must be positive; got {scaling[name]!r}")
    others = {name: value for name, value in scaling.items() if name not in ("rope_theta", "rope_type", "type")}
    if top.get("partial_rotary_factor") is not None:
        others.setdefault("partial_rotary_factor", top["partial_rotary_factor"])
    return {"rope_theta": float(theta), "rope_type": rope_type, **others}


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number; true and false are none, nor are integers that no float can hold."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, float)


def check_list(factors: Any, where: str, num_hidden_layers: int | None = None) -> tuple[float, ...]:
    """The factors as floats; InputError unless each is a positive finite number and there is one a layer."""
    if not isinstance(factors, (list, tuple)) or not factors:
        raise InputError(f"{where}: layer_rope_scaling must be a list of numbers, one a layer; got {factors!r}")
    for layer, factor in enumerate(factors):
        if not is_number(factor) or not FLOAT32_RANGE[0] <= factor <= FLOAT32_RANGE[1]:
            raise InputError(
                f"{where}: factors must be positive numbers within float32's range; layer {layer} has {factor!r}"
            )
    if num_hidden_layers is not None and len(factors) != num_hidden_layers:
        raise InputError(
            f"{where}: {len(factors)} factors for a model of {num_hidden_layers} layers; one a layer needed"
        )
    return tuple(float(factor) for factor in factors)


def weight_files(path: Path) -> dict[Path, set[str]]:
    """The files of weights that a loader reads, and the names of the tensors in each.

    Like transformers, takes model.safetensors where it exists, then its index, then pytorch_model.bin,
    then that one's index. safetensors files are checked header by header; of a pickle no more is known
    than what an index says about it.
    """
    for single, index in ((SINGLE_FILE, INDEX_FILE), (PICKLED_FILE, PICKLED_INDEX_FILE)):
        if (path / single).is_symlink() or (path / single).exists():
            return {path / single: file_tensors(path / single)}
        if (path / index).is_file():
            return indexed_files(path / index)
    raise InputError(no_weights(path))


def indexed_files(index: Path) -> dict[Path, set[str]]:
    """The files that an index names, with their tensors."""
    weight_map = read_json(index, str(index.parent)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map that says which file holds which tensor")
    suffix = ".bin" if index.name == PICKLED_INDEX_FILE else ".safetensors"
    tensors: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not is_inside(shard) or not shard.endswith(suffix):
            raise InputError(f"{index} names {shard!r}, which is not a {suffix} file inside the directory")
        tensors.setdefault(shard, set()).add(tensor)
    files: dict[Path, set[str]] = {}
    for shard, wanted in sorted(tensors.items()):
        found = file_tensors(index.parent / shard) or wanted
        if wanted - found:
            raise InputError(f"{index} looks for {min(wanted - found)} in {shard}, which does not hold it")
        files[index.parent / shard] = found
    return files


def file_tensors(path: Path) -> set[str]:
    """The names of a safetensors file's tensors; none of a pickle, which would have to be loaded."""
    if path.suffix == ".bin":
        check_pickle(path)
        return set()
    header = read_header(path)
    made_by = header.metadata.get("format", "pt")
    if made_by != "pt":
        raise InputError(f"{path} says that it holds weights for {made_by!r}, not PyTorch's: save it from PyTorch")
    return set(header.tensors)


def check_pickle(path: Path) -> None:
    """InputError for a pickle that is broken at first sight, or that the torch at hand cannot load safely."""
    installed = version("torch")
    if tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) < SAFE_TORCH:
        raise InputError(f"{path} is a pickle, which torch {installed} cannot load safely: install torch 2.6 or newer")
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    check_pointer(path, prefix)
    if prefix.startswith(b"PK") and not zipfile.is_zipfile(path):
        raise InputError(f"{path} is truncated: fetch it again")


def check_pointer(path: Path, prefix: bytes) -> None:
    """InputError for a file of weights that git has not fetched."""
    if prefix == b"version ":
        raise InputError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in that directory")


def check_complete(tensors: Iterable[str], config: Mapping[str, Any], where: str) -> None:
    """InputError when weights lack tensors of the model, which loaders would make up at random.

    Needs no list of a family's tensors: each layer must have what any layer has. No tensors at all are a
    pickle's, of which nothing is known.
    """
    # Bare models' names lack the prefix; old Llama checkpoints hold a table that loaders compute.
    names = {
        name.removeprefix("model.").removeprefix("gpt_neox.")
        for name in tensors
        if not name.endswith("rotary_emb.inv_freq")
    }
    if not names:
        return
    # As most families call them, and as GPT-NeoX does.
    wanted = [("embed_tokens.", "embed_in."), ("norm.", "final_layer_norm.")]
    if architecture_of(config, where).endswith("ForCausalLM") and config.get("tie_word_embeddings") is False:
        wanted.append(("lm_head.", "embed_out."))
    missing = [f"{either[0]}weight" for either in wanted if not any(name.startswith(either) for name in names)]
    # Of a mixture of experts, some layers may be dense.
    mixed = bool(config.get("mlp_only_layers") or config.get("first_k_dense_replace")) or config.get(
        "decoder_sparse_step"
    ) not in (None, 1)
    # Fewer tensors than layers are too few, however many layers a broken config claims.
    layers: dict[int, set[str]] = {layer: set() for layer in range(min(num_layers(config, where), len(names)))}
    for name in names:
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if match and int(match[1]) in layers and not (mixed and match[2].startswith("mlp.")):
            # Of quantised linear maps some may be packed in several tensors and others left as they were.
            part = re.sub(r"\.(weight.*|[^.]+)$", "", match[2]) if config.get("quantization_config") else match[2]
            layers[int(match[1])].add(part)
    every = set().union(*layers.values())
    missing += [f"layers.{layer}.{part}" for layer, parts in layers.items() for part in sorted(every - parts)]
    missing += [f"{name}.{part}" for name, lost in packed_maps(names, config).items() for part in sorted(lost)]
    if missing or not every:
        raise InputError(f"{where} lacks {missing[0] if missing else 'all layers'} in its weights: fetch it again")


def packed_maps(names: Collection[str], config: Mapping[str, Any]) -> dict[str, set[str]]:
    """Quantised linear map → tensors of its layout that the weights lack. Empty for layouts not known here."""
    settings = config.get("quantization_config") or {}
    if not isinstance(settings, dict):
        raise InputError(f"quantization_config in config.json must be an object; got {settings!r}")
    method = settings.get("quant_method")
    found: dict[str, set[str]] = {}
    for layout in PACKED_LAYOUTS.get(str(method), ()):
        # A map that was left as it was has a "weight", too.
        signs = tuple(f".{part}" for part in layout if part != "weight")
        for name in names:
            if sign := next((sign for sign in signs if name.endswith(sign)), None):
                whole = name.removesuffix(sign)
                found[whole] = {part for part in layout if f"{whole}.{part}" not in names}
    return found


def is_inside(name: str) -> bool:
    """Whether a relative name stays below its directory (links of the Hub's cache aside)."""
    pure = PurePosixPath(name)
    return bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts and not {"\\", "\0"} & set(name)


def no_weights(path: Path) -> str:
    """Says that there are no usable weights, and what to do about those that are there."""
    names = sorted(file.name for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    wanted = f"{path} has none of {SINGLE_FILE}, {INDEX_FILE}, {PICKLED_FILE}, {PICKLED_INDEX_FILE}"
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        return f"{wanted}; to bake {ggufs[0]}, give that file's own name"
    return f"{wanted}; {names[0]} is not a format that can be baked" if names else f"{wanted}: it has no weights"


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about itself.

    tensors: name → its entry, with dtype, shape and data_offsets from `start`, a position in the file.
    """

    tensors: dict[str, dict[str, Any]]
    metadata: dict[str, str]
    start: int


def read_header(path: Path) -> Header:
    """The header of a safetensors file, which must account for every byte of it.

    Layout: 8 bytes, the header's length as a little-endian integer; the header, JSON with each
    tensor's [begin, end) in the rest; the rest. https://huggingface.co/docs/safetensors
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            sane = 0 < length <= min(size - 8, MAX_HEADER_BYTES)
            header = file.read(length) if sane else b""
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    check_pointer(path, prefix)
    if not sane:
        raise InputError(f"{path} is not a safetensors file, or is truncated ({size} bytes): fetch it again")
    try:
        entries = parse_json(header)
        metadata = entries.pop("__metadata__", None) or {}
        spans = sorted(span_of(entry) for entry in entries.values())
        if not isinstance(metadata, dict):
            raise TypeError("the metadata is no object")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{path} has an unreadable safetensors header: fetch it again") from error
    if not spans:
        raise InputError(f"{path} holds no tensor: fetch it again")
    end = 0
    for begin, stop in spans:
        if begin != end or stop < begin:
            raise InputError(f"{path} has a safetensors header whose tensors overlap or leave gaps: fetch it again")
        end = stop
    if 8 + length + end != size:
        raise InputError(f"{path} is truncated or too long: {size} bytes where its header says {8 + length + end}")
    return Header(entries, metadata, 8 + length)


def span_of(entry: Mapping[str, Any]) -> tuple[int, int]:
    """Where a tensor lies, from its entry in a header; an exception unless the entry is complete."""
    begin, end = entry["data_offsets"]
    numbers = [begin, end, *entry["shape"]]
    if not isinstance(entry["dtype"], str) or not all(type(number) is int for number in numbers):
        raise TypeError("an entry needs a dtype and whole numbers")
    return begin, end


def require_tokenizer(source: Source) -> None:
    """InputError unless the checkpoint brings a tokenizer, which searching and evaluating need."""
    if not any((source.path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise InputError(
            f"{source.name} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json): copy the base model's "
            f"tokenizer files into {source.path}"
        )
