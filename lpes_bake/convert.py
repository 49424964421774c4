"""Weights in other formats than safetensors, brought into that one. Imports torch, inside functions only.

A pickle can run code when it is loaded, so only what torch.load(weights_only=True) takes is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from lpes_bake.search.errors import InputError
from lpes_bake.source import INDEX_FILE, SINGLE_FILE, check_complete

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def convert_pickles(
    files: Mapping[Path, set[str]],
    out: Path,
    config: Mapping[str, Any],
    notify: Callable[[str], None] = lambda name: None,
) -> list[str]:
    """Write the tensors of pickled weight files into `out` as safetensors; the names of the new files.

    files: as `weight_files` gives them. Files come one after the other and are mapped, not read: memory
    holds what torch had to copy of one of them. InputError for a file with anything but plain tensors, OSError when
    they cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    written: list[str] = []
    weight_map: dict[str, str] = {}
    size = 0
    for number, (path, wanted) in enumerate(files.items(), 1):
        notify(path.name)
        tensors = independent(load_pickle(path), tied=config.get("tie_word_embeddings") is True)
        if missing := wanted - set(tensors) - ({HEAD} if EMBEDDING in tensors else set()):
            raise InputError(f"{path} lacks {min(missing)}, which its index looks for in it: fetch it again")
        name = SINGLE_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        # safetensors makes files for their owner's eyes only; these are files like any other.
        (out / name).touch()
        mode = (out / name).stat().st_mode
        try:
            save_file(tensors, out / name, metadata={"format": "pt"})
        except ValueError as error:
            raise InputError(f"{path} holds tensors that safetensors cannot: {str(error).splitlines()[0]}") from error
        except SafetensorError as error:  # what the library makes of a disk that is full
            raise OSError(str(error)) from error
        (out / name).chmod(mode)
        written.append(name)
        weight_map |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
        del tensors  # before the next file is loaded
    check_complete(weight_map, config, str(next(iter(files)).parent))
    if len(files) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        written.append(INDEX_FILE)
    return written


def check_converted(pickles: Iterable[Path], places: Mapping[str, Path], config: Mapping[str, Any]) -> None:
    """InputError unless safetensors files hold the tensors of pickles to the bit, and no others.

    places: tensor name → the safetensors file that it is in. config: the pickled model's.
    """
    import torch
    from safetensors import safe_open

    names: set[str] = set()
    for path in pickles:
        for name, wanted in independent(load_pickle(path), tied=config.get("tie_word_embeddings") is True).items():
            names.add(name)
            if name not in places:
                raise InputError(f"{name} of {path} is missing")
            with safe_open(places[name], "pt") as file:
                found = file.get_tensor(name)
            same = (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            if not same or not torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)):
                raise InputError(f"{name} in {places[name].name} is another than in {path}")
    if extra := set(places) - names:
        raise InputError(f"{min(extra)} is not in the base model")


def load_pickle(path: Path) -> dict[str, Any]:
    """The tensors of a pickle by name, mapped from the file where its layout (torch 1.6 and newer) allows it."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:  # whatever a damaged or malicious file makes the unpickler say
        raise InputError(
            f"{path} is damaged or holds more than plain tensors ({type(error).__name__}), and nothing else is ever "
            "unpickled, as it could run code: fetch it again, or take a source with safetensors"
        ) from error
    if not isinstance(state, dict) or not state:
        raise InputError(f"{path} holds a {type(state).__name__}, not a model's tensors by name")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InputError(f"{path} holds {name!r}, which is no tensor: save the model's state_dict alone")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            raise InputError(f"{path} holds {name}, a tensor of a kind that safetensors has none of: save it dense")
    return {name: tensor.detach() for name, tensor in state.items()}


def independent(tensors: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The same tensors, each with memory of its own and contiguous, as safetensors wants them.

    tied: the config ties the output to the embedding, so that an output which is the embedding goes.
    """
    storages: set[int] = set()
    found: dict[str, Any] = {}
    embedding = tensors.get(EMBEDDING)
    for name, tensor in tensors.items():
        if tied and name == HEAD and embedding is not None and tensor.data_ptr() == embedding.data_ptr():
            continue
        storage = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if storage in storages else tensor.contiguous()
        storages.add(storage)
    return found
