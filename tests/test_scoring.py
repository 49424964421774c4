"""What must hold for the scoring engine: it gives what one plain forward pass, and greedy decoding, give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lpes_bake.search.errors import InputError
from lpes_bake.search.models import load_scaled, set_factors
from lpes_bake.search.scoring import Scorer, Scores
from lpes_bake.search.tasks import Example, KVRetrieval, encode
from tests.conftest import write_tiny

TASK = KVRetrieval(pairs=5, key_width=4, contexts=4)
FACTORS = (0.5, 1.3, 0.8, 2.0)


def tokenizer_of(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def float64(path: Path) -> Any:
    return load_scaled(path, dtype=torch.float64)


def plain_scores(model: Any, tokenizer: Any, examples: Sequence[Example]) -> tuple[list[float], list[bool]]:
    """Independent: logits of the whole model for one prompt after the other, softmax by hand."""
    logprobs, exact = [], []
    for example in examples:
        prompt, answer = encode(example, tokenizer)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0].double().numpy()
        total, right = 0.0, True
        for i, token in enumerate(answer):
            row = logits[len(prompt) + i - 1]
            total += row[token] - row.max() - math.log(np.exp(row - row.max()).sum())
            right &= int(row.argmax()) == token
        logprobs.append(total / len(answer))
        exact.append(right)
    return logprobs, exact


def same(actual: Any, expected: Any) -> None:
    """Equal but for rounding: norms and softmax work in float32 whatever the model's dtype."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_scores_equal_plain_forward_passes(family: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(f"tiny_{family}")
    model, tokenizer, examples = float64(path), tokenizer_of(path), TASK.examples()
    scores = Scorer(model, tokenizer, examples, batch_size=3).score(FACTORS)
    set_factors(model, FACTORS)
    expected, exact = plain_scores(model, tokenizer, examples)
    assert scores.logprob.shape == scores.exact.shape == (4, 3)
    same(scores.logprob.flatten(), expected)
    assert scores.exact.flatten().tolist() == exact
    # The factors matter here, so a lost one would have shown.
    other = Scorer(model, tokenizer, examples).score([1.0] * 4)
    assert np.abs(other.logprob - scores.logprob).max() > 0.01


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_identity_equals_the_base_models_own_class(family: str, request: pytest.FixtureRequest) -> None:
    from transformers import AutoModelForCausalLM

    path = request.getfixturevalue(f"tiny_{family}")
    tokenizer, examples = tokenizer_of(path), TASK.examples()
    base = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float64)
    expected, exact = plain_scores(base, tokenizer, examples)
    scores = Scorer(float64(path), tokenizer, examples).score()
    same(scores.logprob.flatten(), expected)
    assert scores.exact.flatten().tolist() == exact


def test_exact_match_is_what_greedy_decoding_begins_with(tiny_llama: Path) -> None:
    model, tokenizer = load_scaled(tiny_llama, dtype=torch.float32, factors=FACTORS), tokenizer_of(tiny_llama)
    examples = []
    for example in TASK.examples():
        prompt, _ = encode(example, tokenizer)
        made = greedy(model, prompt, 4)
        # A random model answers nothing; ask every other question for what it says.
        answer = tokenizer.decode(made) if example.context % 2 else example.answer
        examples.append(replace(example, answer=answer))
    scores = Scorer(model, tokenizer, examples).score()
    for example, exact in zip(examples, scores.exact.flatten(), strict=True):
        prompt, answer = encode(example, tokenizer)
        assert exact == (greedy(model, prompt, len(answer)) == answer)


def greedy(model: Any, prompt: list[int], length: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        # No early end: what is compared is the first tokens.
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, min_new_tokens=length, do_sample=False
        )
    return [int(token) for token in made[0, len(prompt) :]]


def test_batches_of_any_size_and_order_give_the_same(tiny_llama: Path) -> None:
    model, tokenizer = float64(tiny_llama), tokenizer_of(tiny_llama)
    # Prompts of different lengths in one batch.
    short = KVRetrieval(pairs=3, key_width=3, contexts=2, positions=(0, 2)).examples()
    long = KVRetrieval(pairs=9, key_width=6, contexts=2, positions=(0, 2), seed=1).examples()
    examples = short + [replace(one, context=one.context + 2) for one in long]
    reference, _ = plain_scores(model, tokenizer, examples)
    for size in (1, 2, 3, 4, None):
        scores = Scorer(model, tokenizer, examples, batch_size=size).score()
        same(scores.logprob.flatten(), reference)
    backwards = Scorer(model, tokenizer, examples[::-1], batch_size=3).score()
    same(backwards.logprob[::-1, ::-1].flatten(), reference)


def test_prompts_without_a_common_beginning_are_scored_too(tiny_llama: Path) -> None:
    model, tokenizer = float64(tiny_llama), tokenizer_of(tiny_llama)
    examples = [
        Example(0, 0, prompt="alpha", lead="", answer="xy"),
        Example(0, 1, prompt="beta gamma", lead="", answer="z"),
        Example(1, 0, prompt="delta one", lead="", answer="pqr"),
        Example(1, 1, prompt="delta two", lead="", answer="s"),
    ]
    expected, _ = plain_scores(model, tokenizer, examples)
    same(Scorer(model, tokenizer, examples).score().logprob.flatten(), expected)
    single = Scorer(model, tokenizer, examples[:2]).score()
    same(single.logprob.flatten(), expected[:2])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
        (
            "llama",
            {
                # Some of the prompts below are longer than this, some shorter.
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 16,
                    "long_factor": [3.0] * 16,
                    "factor": 4.0,
                    "original_max_position_embeddings": 215,
                },
                "original_max_position_embeddings": 215,
            },
        ),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}),
    ],
    ids=["dynamic", "longrope", "yarn", "sliding window"],
)
def test_rope_types_and_windows_score_as_plain_passes(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    path = write_tiny(tmp_path, family, **changes)
    model, tokenizer = float64(path), tokenizer_of(path)
    short = KVRetrieval(pairs=5, key_width=2, contexts=2, positions=(0, 4)).examples()
    long = KVRetrieval(pairs=7, key_width=6, contexts=2, positions=(0, 4)).examples()
    examples = short + [replace(one, context=one.context + 2) for one in long]
    lengths = [sum(map(len, encode(one, tokenizer))) for one in examples]
    assert min(lengths) < 215 < max(lengths)
    scores = Scorer(model, tokenizer, examples).score(FACTORS)
    expected, _ = plain_scores(model, tokenizer, examples)
    same(scores.logprob.flatten(), expected)


def test_tokens_are_counted_without_padding_and_sharing_saves_them(tiny_llama: Path) -> None:
    model, tokenizer, examples = load_scaled(tiny_llama, dtype=torch.float32), tokenizer_of(tiny_llama), TASK.examples()
    shared = Scorer(model, tokenizer, examples).score()
    plain = Scorer(model, tokenizer, examples, shared_prefixes=False).score()
    # The last token of an answer is never read.
    assert plain.tokens == sum(sum(map(len, encode(one, tokenizer))) - 1 for one in examples)
    assert shared.tokens < plain.tokens / 2
    same(shared.logprob, plain.logprob)


def test_prompts_longer_than_the_models_positions_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "llama", max_position_embeddings=100)
    with pytest.raises(InputError, match=r"has \d+ tokens, but the model has only 100 positions"):
        Scorer(load_scaled(path, dtype=torch.float32), tokenizer_of(path), TASK.examples())


def test_running_out_of_memory_halves_the_batch_and_goes_on(tiny_llama: Path) -> None:
    model, tokenizer, examples = float64(tiny_llama), tokenizer_of(tiny_llama), TASK.examples()
    expected = Scorer(model, tokenizer, examples).score()
    seen: list[int] = []

    def small_device(module: Any, args: Any, kwargs: Any) -> None:
        rows = len(kwargs["input_ids"])
        seen.append(rows)
        if rows > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    handle = model.base_model.register_forward_pre_hook(small_device, with_kwargs=True)
    for size in (4, None):
        scorer = Scorer(model, tokenizer, examples, batch_size=size)
        same(scorer.score().logprob, expected.logprob)
        assert max(seen) > 1
        seen.clear()
        # The smaller size is kept for the next candidate.
        scorer.score()
        assert max(seen) == 1
        seen.clear()
    handle.remove()


def test_a_single_prompt_that_does_not_fit_is_an_error_of_one_line(tiny_llama: Path) -> None:
    model = load_scaled(tiny_llama, dtype=torch.float32)

    def no_memory(module: Any, args: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    handle = model.base_model.register_forward_pre_hook(no_memory)
    with pytest.raises(InputError, match="out of memory on cpu with a single prompt of"):
        Scorer(model, tokenizer_of(tiny_llama), TASK.examples()).score()
    handle.remove()


def test_other_errors_are_not_taken_for_lack_of_memory(tiny_llama: Path) -> None:
    model = load_scaled(tiny_llama, dtype=torch.float32)

    def broken(module: Any, args: Any) -> None:
        raise RuntimeError("device-side assert triggered")

    handle = model.base_model.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="device-side assert"):
        Scorer(model, tokenizer_of(tiny_llama), TASK.examples()).score()
    handle.remove()


def test_nan_logits_give_nan_scores_that_never_win(tmp_path: Path) -> None:
    model = load_scaled(write_tiny(tmp_path, "llama"), dtype=torch.float32)
    with torch.no_grad():
        model.base_model.layers[2].mlp.up_proj.weight.fill_(math.nan)
    scores = Scorer(model, tokenizer_of(tmp_path), TASK.examples()).score()
    assert np.isnan(scores.logprob).all()
    assert not scores.exact.any()
    for kind in ("logprob", "accuracy"):
        assert math.isnan(scores.fitness(kind))
    assert scores.to_json()["accuracy"]["mean"] is None


def test_progress_ends_with_all_done(tiny_llama: Path) -> None:
    shares: list[float] = []
    model = load_scaled(tiny_llama, dtype=torch.float32)
    Scorer(model, tokenizer_of(tiny_llama), TASK.examples(), batch_size=1).score(on_progress=shares.append)
    assert shares == sorted(shares) and len(shares) == 4 and shares[-1] == 1.0


def test_scores_are_summed_up_by_position() -> None:
    scores = Scores((0, 8), np.array([[-1.0, -2.0], [-3.0, -4.0]]), np.array([[True, False], [True, True]]), 7)
    assert scores.fitness("accuracy") == 0.75
    assert scores.fitness("logprob") == -2.5
    assert scores.by_position() == [
        {"position": 0, "accuracy": 1.0, "logprob": -2.0},
        {"position": 8, "accuracy": 0.5, "logprob": -3.0},
    ]
    assert scores.to_json() == {
        "contexts": 2,
        "positions": [0, 8],
        "tokens": 7,
        "accuracy": {"by_position": [1.0, 0.5], "mean": 0.75, "minimum": 0.5, "spread": 0.5},
        "logprob": {"by_position": [-2.0, -3.0], "mean": -2.5, "minimum": -3.0, "spread": 1.0},
    }
    with pytest.raises(InputError, match="logprob, accuracy"):
        scores.fitness("bleu")


@pytest.mark.smollm2
def test_real_prompts_exact_match_equals_greedy_generation(smollm2: Path) -> None:
    model, tokenizer = load_scaled(smollm2, dtype=torch.float32), tokenizer_of(smollm2)
    # Easy questions and, among more pairs, harder ones: both outcomes must occur.
    easy = KVRetrieval(pairs=2, key_width=3, contexts=2, positions=(0, 1)).examples()
    hard = KVRetrieval(pairs=8, key_width=8, contexts=1, positions=(0, 4)).examples()
    outcomes = set()
    for examples in (easy, hard):
        scores = Scorer(model, tokenizer, examples).score()
        expected, _ = plain_scores(model, tokenizer, examples)
        same(scores.logprob.flatten(), expected)
        for example, exact in zip(examples, scores.exact.flatten(), strict=True):
            prompt, answer = encode(example, tokenizer)
            assert exact == (greedy(model, prompt, len(answer)) == answer)
            outcomes.add(bool(exact))
    assert outcomes == {True, False}
