"""Shared fixtures: tiny random checkpoints of each family, and the real SmolLM2-135M-Instruct."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.families import TINY, TINY_FAMILIES, family_named

os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest_plugins = ["tests.searches"]

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model's directory, prepared by `make test` (examples/smollm2.py)."""
    path = Path(os.environ.get("LPES_SMOLLM2", ROOT / ".cache" / "SmolLM2-135M-Instruct"))
    if not (path / "config.json").exists():
        pytest.fail(f"{path} is missing: run python examples/smollm2.py {path}")
    return path


def write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer of exactly 256 tokens, trained on nothing: ids are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


def write_tiny(path: Path, family: str, **changes: object) -> Path:
    """A tiny random checkpoint of `family`, named by its model_type, with a tokenizer."""
    import torch
    import transformers

    entry = family_named(family)
    config = getattr(transformers, entry.base_config)(**{**TINY, **TINY_FAMILIES[family].config, **changes})
    torch.manual_seed(0)
    getattr(transformers, entry.base_class("ForCausalLM"))(config).save_pretrained(path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama checkpoint; do not write into it."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 checkpoint; do not write into it."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "qwen2", "qwen2")
