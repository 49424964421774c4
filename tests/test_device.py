"""What must hold for choosing where and in which precision to compute."""

from __future__ import annotations

import pytest
import torch

from lpes_bake.search.device import pick_device, pick_dtype
from lpes_bake.search.errors import InputError


def test_best_device_is_taken() -> None:
    expected = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert pick_device().type == expected
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "xpu", ""])
def test_device_that_cannot_be_used_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"device '{name}'") as caught:
        pick_device(name)
    assert "\n" not in str(caught.value)


def test_dtype_by_name_or_by_device() -> None:
    assert pick_dtype(None, torch.device("cpu")) == torch.float32
    assert pick_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    with pytest.raises(InputError, match="'int8'"):
        pick_dtype("int8", torch.device("cpu"))
