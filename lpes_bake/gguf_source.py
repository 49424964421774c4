"""GGUF files as sources: a plain checkpoint made of one, through transformers' own reader.

Needs the package gguf and torch, both imported inside functions only.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lpes_bake.export import require_space
from lpes_bake.search.errors import InputError
from lpes_bake.source import Source, open_source

# Those whose tensors transformers' reader is known here to bring over whole.
ARCHITECTURES = ("llama", "qwen2")


@contextmanager
def open_gguf(path: Path, out: Path) -> Iterator[Source]:
    """The model in a GGUF file as a checkpoint, which lies beside `out` (so that it can be linked) until the end."""
    place = next(parent for parent in out.resolve().parents if parent.is_dir())
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}.", dir=place) as scratch:
        try:
            write_checkpoint(path, Path(scratch))
        except OSError as error:
            raise InputError(
                f"{path} could not be written out in {place}, and nothing was left behind: {error}"
            ) from error
        yield replace(open_source(scratch), name=path.stem)


def write_checkpoint(gguf: Path, out: Path) -> None:
    """Write the model and the tokenizer in a GGUF file to the directory `out`, dequantised, as safetensors.

    Weights are float32 or float16 where all matrices of the file are, else bfloat16. InputError for a
    file with anything that transformers would leave out without a word: RoPE scaling first of all.
    """
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"{gguf} is a GGUF file, and reading one needs gguf: pip install 'lpes-bake[gguf]'")
    import transformers
    from safetensors import SafetensorError
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    dtype, tensors, size = inspect(gguf)
    require_space(out.parent, size, "free some, or choose another disk")
    where: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, torch_dtype=dtype, **where)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **where)
    except Exception as error:  # many kinds, from many libraries
        raise InputError(f"{gguf} cannot be read by transformers: {' '.join(str(error).split())[:300]}") from error
    # A tied output is listed once here, and not at all there.
    held = {parameter.data_ptr() for parameter in model.parameters()}
    if len(held) != tensors:
        raise InputError(
            f"{gguf} has {tensors} tensors, of which transformers knows {len(held)}: take the original checkpoint"
        )
    # The weights are whole again: nothing may claim that they are quantised.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    model.config.architectures = [type(model).__name__]
    try:
        model.save_pretrained(out)
    except SafetensorError as error:  # what the library makes of a disk that is full
        raise OSError(str(error)) from error
    tokenizer.save_pretrained(out)
    # safetensors makes files for their owner's eyes only.
    for path in out.glob("*.safetensors"):
        shutil.copymode(out / "config.json", path)
    # The name that transformers 4 knows this kind of tokenizer by; version 5 takes it too.
    settings = out / "tokenizer_config.json"
    text = settings.read_text(encoding="utf-8")
    settings.write_text(text.replace("TokenizersBackend", "PreTrainedTokenizerFast"), encoding="utf-8")


def inspect(path: Path) -> tuple[Any, int, int]:
    """The torch dtype that a GGUF file's matrices need, how many tensors it has, and their bytes in that dtype;
    InputError for one that transformers' reader would get wrong."""
    import torch
    from gguf import GGMLQuantizationType, GGUFReader

    try:
        reader = GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
    except Exception as error:  # many kinds
        raise InputError(f"{path} is not a whole GGUF file: fetch it again") from error
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"{path} has architecture {architecture!r}, which is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    known = {
        name: reader.fields[f"{architecture}.rope.{name}"].contents()
        for name in ("scaling.type", "scaling.factor", "scale_linear")
        if f"{architecture}.rope.{name}" in reader.fields
    }
    # Without a type, as in files of 2023, llama.cpp takes a factor for linear scaling. 0 stands for none.
    factors = {known.get("scaling.factor", 1.0), known.get("scale_linear", 1.0)}
    scaled = known["scaling.type"] != "none" if "scaling.type" in known else not factors <= {0.0, 1.0}
    if scaled or any(tensor.name.startswith("rope_") for tensor in reader.tensors):
        raise InputError(
            f"{path} scales RoPE (Llama 3.1 and its like), which transformers does not read from GGUF files: "
            "take the original checkpoint"
        )
    types = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    full, half = {GGMLQuantizationType.F32}, {GGMLQuantizationType.F32, GGMLQuantizationType.F16}
    dtype = torch.float32 if types <= full else torch.float16 if types <= half else torch.bfloat16
    return dtype, len(reader.tensors), sum(int(tensor.n_elements) for tensor in reader.tensors) * dtype.itemsize
