"""What must hold for the check on short text: the library's own loss and KL, no drift without a change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lpes_bake.search.errors import InputError
from lpes_bake.search.models import load_scaled, set_factors
from lpes_bake.search.short_text import FEWEST_PARAGRAPHS, PARAGRAPHS, Drift, TextScores, read_paragraphs
from lpes_bake.search.tasks import PARTS
from tests.conftest import write_tiny
from tests.test_scoring import all_float64, tokenizer_of

TEXTS = PARAGRAPHS[:3]
FACTORS = (0.5, 1.3, 0.8, 2.0)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_numbers_are_the_librarys_own_loss_and_divergence(family: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(f"tiny_{family}")
    model, tokenizer = load_scaled(path, dtype=torch.float32), tokenizer_of(path)
    drift = Drift(model, tokenizer, TEXTS)
    scores = drift.measure(FACTORS)
    assert scores.logprob.shape == scores.kl.shape == (3,)
    for text, logprob, kl in zip(TEXTS, scores.logprob, scores.kl, strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        predictions = []
        for factors in ((1.0,) * 4, FACTORS):
            set_factors(model, factors)
            with torch.no_grad():
                output = model(input_ids=ids, labels=ids)
            predictions.append(output.logits[0, :-1].log_softmax(-1))
        assert logprob == pytest.approx(-float(output.loss), abs=1e-5)
        base, candidate = predictions
        expected = torch.nn.functional.kl_div(candidate, base, reduction="batchmean", log_target=True)
        assert kl == pytest.approx(float(expected), rel=1e-4)
        assert kl > 0.01
    assert scores.tokens == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)


def test_the_base_model_does_not_drift_at_all(tiny_llama: Path) -> None:
    drift = Drift(load_scaled(tiny_llama, dtype=torch.float32), tokenizer_of(tiny_llama), TEXTS)
    first = drift.measure((1.0,) * 4)
    assert first.kl.tolist() == [0.0, 0.0, 0.0]
    drift.measure(FACTORS)
    assert drift.measure((1.0,) * 4).logprob.tolist() == first.logprob.tolist()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_finite_differences(checkpointing: bool, tmp_path: Path) -> None:
    # Small weights: smooth enough for finite differences.
    path = write_tiny(tmp_path, "llama", initializer_range=0.05)
    model, tokenizer = all_float64(path), tokenizer_of(path)
    drift = Drift(model, tokenizer, TEXTS, checkpointing=checkpointing)
    factors = (0.8, 1.2, 0.9, 1.1)
    scores, gradient = drift.gradient(factors, 0, 3, 1.0, 0.0)
    _, kl_gradient = drift.gradient(factors, 0, 3, 0.0, -1.0)
    alone = drift.measure(factors)
    np.testing.assert_allclose(scores.logprob, alone.logprob, atol=1e-7)
    np.testing.assert_allclose(scores.kl, alone.kl, atol=1e-7)
    for found, value in (
        (gradient, lambda moved: drift.measure(moved).logprob.mean()),
        (kl_gradient, lambda moved: drift.measure(moved).kl.mean()),
    ):
        expected = differences(value, factors)
        np.testing.assert_allclose(found, expected, rtol=5e-3, atol=1e-6)
        assert np.abs(expected).min() > 1e-4
    # Of some paragraphs alone.
    some, part = drift.gradient(factors, 1, 3, 1.0, -1.0)
    expected = differences(lambda moved: total_of(drift.measure(moved))[1:].mean(), factors)
    np.testing.assert_allclose(part, expected, rtol=5e-3, atol=1e-6)
    assert some.logprob.tolist() == scores.logprob[1:].tolist() and 0 < some.tokens < scores.tokens


def total_of(scores: TextScores) -> NDArray[np.float64]:
    return scores.logprob + scores.kl


def differences(value: Callable[[list[float]], float], factors: Sequence[float]) -> NDArray[np.float64]:
    """Central differences. Factors are set in float32, so the step must not be too small."""
    step = 2e-4
    units = step * np.eye(len(factors))
    above, below = (np.array([value((np.array(factors) + one).tolist()) for one in ends]) for ends in (units, -units))
    found: NDArray[np.float64] = (above - below) / (2 * step)
    return found


def test_paragraphs_too_long_for_the_model_or_too_short_to_predict_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "llama", max_position_embeddings=50)
    model, tokenizer = load_scaled(path, dtype=torch.float32), tokenizer_of(path)
    with pytest.raises(InputError, match=r"the paragraph 'The baker opened her shop.*has \d+ tokens; .* 2 to 50"):
        Drift(model, tokenizer, TEXTS)
    with pytest.raises(InputError, match="the paragraph 'I'… has 1 tokens"):
        Drift(model, tokenizer, ["I"])


def test_each_part_has_paragraphs_of_its_own() -> None:
    parts = read_paragraphs()
    assert tuple(parts) == PARTS
    assert [len(part) for part in parts.values()] == [32, 32, 32]
    assert {text for part in parts.values() for text in part} == set(PARAGRAPHS)
    assert len(set(PARAGRAPHS)) == 96
    # Each kind, of which six stand together, is in every part.
    for start in range(0, 96, 6):
        kind = PARAGRAPHS[start : start + 6]
        assert [len(set(kind) & set(part)) for part in parts.values()] == [2, 2, 2]


@pytest.mark.smollm2
def test_paragraphs_are_short(smollm2: Path) -> None:
    tokenizer = tokenizer_of(smollm2)
    lengths = [len(tokenizer(text)["input_ids"]) for text in PARAGRAPHS]
    assert min(lengths) >= 35
    assert max(lengths) <= 80
    assert 4000 < sum(lengths) < 5500


def test_a_users_file_is_read_paragraph_by_paragraph(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    blocks = [f"Paragraph {number}.\nIts second line." for number in range(FEWEST_PARAGRAPHS * len(PARTS))]
    # Blank lines may hold spaces, and be many; a paragraph that is there twice would be in two parts.
    path.write_text("\n\n" + "\n \n\n".join([*blocks, blocks[0]]) + "\n")
    parts = read_paragraphs(path)
    assert parts["search"] == [blocks[i] for i in (0, 3, 6, 9)]
    assert parts["selection"] == [blocks[i] for i in (1, 4, 7, 10)]
    assert parts["report"] == [blocks[i] for i in (2, 5, 8, 11)]
    assert min(map(len, parts.values())) == FEWEST_PARAGRAPHS
    # As Windows writes it.
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(blocks).encode())
    assert read_paragraphs(path) == parts
    # One less is too few.
    path.write_text("\n\n".join(blocks[1:]))
    with pytest.raises(InputError, match="has 11 different paragraphs"):
        read_paragraphs(path)


def test_files_that_give_no_paragraphs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("One.\n\nTwo.\n\nOne.\n")
    with pytest.raises(InputError, match=r"mine\.txt has 2 different paragraphs .* needs 12, 4 for each"):
        read_paragraphs(path)
    path.write_bytes(b"caf\xe9\n\n" * 20)
    with pytest.raises(InputError, match=r"mine\.txt cannot be read as UTF-8 text"):
        read_paragraphs(path)
    with pytest.raises(InputError, match=r"none\.txt cannot be read"):
        read_paragraphs(tmp_path / "none.txt")
