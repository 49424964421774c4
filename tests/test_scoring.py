"""What must hold for the scoring engine: it gives what plain forward passes, greedy decoding and differences give."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from lpes_bake.search import memory, rows
from lpes_bake.search.errors import InputError
from lpes_bake.search.kv_retrieval import KVRetrieval
from lpes_bake.search.memory import memory_estimate
from lpes_bake.search.models import checkpointed_layers, differentiable_factors, load_scaled, set_factors
from lpes_bake.search.prompts import Encoded, encode, take
from lpes_bake.search.scoring import Scorer
from lpes_bake.search.tasks import Example, Task
from tests.conftest import write_tiny

TASK = KVRetrieval(pairs=5, key_width=4)
FACTORS = (0.5, 1.3, 0.8, 2.0)
Contexts = list[list[Encoded]]


@dataclass(frozen=True)
class Moved(Task):
    """A needle that moves through a text: its questions share their prompts in part only. Judged by generated text."""

    name: ClassVar[str] = "moved"
    generates: ClassVar[bool] = True
    max_new_tokens: ClassVar[int] = 12

    lines: int = 6
    wanted: str = "e"

    @property
    def positions(self) -> tuple[int, ...]:
        return 0, self.lines // 2, self.lines - 1

    def contexts(self, part: str, seed: int) -> Iterator[list[Example]]:
        rng = random.Random(f"{part} {seed}")
        context = 0
        while True:
            others = [f"line {rng.getrandbits(40):x}" for _ in range(self.lines - 1)]
            needle = f"needle {rng.getrandbits(24):x}"
            yield [
                Example(context, place, "\n".join([*others[:place], needle, *others[place:], "needle"]), needle[6:])
                for place in self.positions
            ]
            context += 1

    def correct(self, example: Example, output: str) -> bool:
        return self.wanted in output

    def finished(self, output: str) -> bool:
        return "\n" in output.lstrip()


def tokenizer_of(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def float64(path: Path) -> Any:
    return load_scaled(path, dtype=torch.float64)


def contexts_of(task: Task, tokenizer: Any, count: int = 4, seed: int = 0) -> Contexts:
    return take(task, "search", seed, count, tokenizer, "plain", 8192).contexts


def own_contexts(tokenizer: Any, *contexts: Sequence[Example]) -> Contexts:
    return [[Encoded(one, *encode(one, tokenizer, "plain")) for one in context] for context in contexts]


def flat(contexts: Contexts) -> list[Encoded]:
    return [one for context in contexts for one in context]


@dataclass(frozen=True)
class Plain:
    logprob: list[float]
    probability: list[float]
    exact: list[bool]


def plain_scores(model: Any, contexts: Contexts) -> Plain:
    """Independent: logits of the whole model for one prompt after the other, softmax by hand."""
    found = Plain([], [], [])
    for one in flat(contexts):
        with torch.no_grad():
            logits = model(torch.tensor([one.prompt + one.answer])).logits[0].double().numpy()
        total, right = 0.0, True
        for i, token in enumerate(one.answer):
            row = logits[len(one.prompt) + i - 1]
            total += row[token] - row.max() - math.log(np.exp(row - row.max()).sum())
            right &= int(row.argmax()) == token
        found.logprob.append(total / len(one.answer))
        found.probability.append(math.exp(total))
        found.exact.append(right)
    return found


def same(actual: Any, expected: Any) -> None:
    """Equal but for rounding: norms and softmax work in float32 whatever the model's dtype."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def greedy(model: Any, prompt: list[int], length: int, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, **options
        )
    return [int(token) for token in made[0, len(prompt) :]]


# Teacher-forced scores


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_scores_equal_plain_forward_passes(family: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(f"tiny_{family}")
    model, tokenizer = float64(path), tokenizer_of(path)
    contexts = contexts_of(TASK, tokenizer)
    scores = Scorer(model, tokenizer, TASK, contexts, batch_size=3).score(FACTORS)
    set_factors(model, FACTORS)
    expected = plain_scores(model, contexts)
    assert scores.positions == TASK.positions
    assert scores.logprob.shape == scores.exact.shape == (4, 3)
    same(scores.logprob.flatten(), expected.logprob)
    np.testing.assert_allclose(scores.probability.flatten(), expected.probability, rtol=1e-3)
    assert scores.exact.flatten().tolist() == expected.exact
    # The factors matter here, so a lost one would have shown.
    other = Scorer(model, tokenizer, TASK, contexts).score([1.0] * 4)
    assert np.abs(other.logprob - scores.logprob).max() > 0.01


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_identity_equals_the_base_models_own_class(family: str, request: pytest.FixtureRequest) -> None:
    from transformers import AutoModelForCausalLM

    path = request.getfixturevalue(f"tiny_{family}")
    tokenizer = tokenizer_of(path)
    contexts = contexts_of(TASK, tokenizer)
    expected = plain_scores(AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float64), contexts)
    scores = Scorer(float64(path), tokenizer, TASK, contexts).score()
    same(scores.logprob.flatten(), expected.logprob)
    assert scores.exact.flatten().tolist() == expected.exact


def test_exact_match_is_what_greedy_decoding_begins_with(tiny_llama: Path) -> None:
    model, tokenizer = load_scaled(tiny_llama, dtype=torch.float32, factors=FACTORS), tokenizer_of(tiny_llama)
    contexts = [
        # A random model answers nothing; every other context is asked for what the model says.
        [replace(one, answer=greedy(model, one.prompt, 4, min_new_tokens=4)) if number % 2 else one for one in context]
        for number, context in enumerate(contexts_of(TASK, tokenizer))
    ]
    scores = Scorer(model, tokenizer, TASK, contexts).score()
    assert scores.exact.mean() == 0.5
    for one, exact in zip(flat(contexts), scores.exact.flatten(), strict=True):
        length = len(one.answer)
        assert exact == (greedy(model, one.prompt, length, min_new_tokens=length) == one.answer)


def test_batches_of_any_size_give_the_same(tiny_llama: Path) -> None:
    model, tokenizer = float64(tiny_llama), tokenizer_of(tiny_llama)
    # Prompts of different lengths in one batch, short and long ones in turn.
    short = contexts_of(KVRetrieval(pairs=3, key_width=3, positions=(0, 2)), tokenizer, 2)
    long = contexts_of(KVRetrieval(pairs=9, key_width=6, positions=(0, 2)), tokenizer, 2)
    contexts = [short[0], long[0], short[1], long[1]]
    expected = plain_scores(model, contexts).logprob
    for size in (1, 2, 3, 4, None):
        same(Scorer(model, tokenizer, TASK, contexts, batch_size=size).score().logprob.flatten(), expected)


def test_scores_do_not_depend_on_what_was_scored_before_or_beside(tiny_llama: Path) -> None:
    model, tokenizer = load_scaled(tiny_llama, dtype=torch.float32), tokenizer_of(tiny_llama)
    scorer = Scorer(model, tokenizer, TASK, contexts_of(TASK, tokenizer))
    whole = scorer.score(FACTORS)
    scorer.score([1.0] * 4, 1, 2)
    parts = [scorer.score(FACTORS, 1, 3), scorer.score(FACTORS, 3), scorer.score(FACTORS, 0, 1)]
    # To the last bit.
    for name in ("logprob", "probability", "exact"):
        joined = np.concatenate([getattr(parts[i], name) for i in (2, 0, 1)])
        assert joined.tolist() == getattr(whole, name).tolist()
    assert sum(part.tokens for part in parts) == whole.tokens
    assert [scorer.tokens(1, 3), scorer.tokens()] == [parts[0].tokens, whole.tokens]
    with pytest.raises(ValueError, match="contexts 3 to 5 were asked for, but there are 4"):
        scorer.score(FACTORS, 3, 5)


def test_prompts_without_a_common_beginning_are_scored_too(tiny_llama: Path) -> None:
    model, tokenizer = float64(tiny_llama), tokenizer_of(tiny_llama)
    contexts = own_contexts(
        tokenizer,
        [Example(0, 0, "alpha", "xy"), Example(0, 1, "beta gamma", "z")],
        [Example(1, 0, "delta one", "pqr"), Example(1, 1, "delta two", "s")],
    )
    expected = plain_scores(model, contexts).logprob
    for size in (1, 2):
        same(Scorer(model, tokenizer, TASK, contexts, batch_size=size).score().logprob.flatten(), expected)


@pytest.mark.parametrize("packed", [0, 60, 10_000])
def test_what_only_some_questions_share_is_computed_once_too(
    packed: int, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PACKED_TOKENS", packed)
    model, tokenizer = float64(tiny_llama), tokenizer_of(tiny_llama)
    contexts = contexts_of(Moved(), tokenizer, 2)
    scores = Scorer(model, tokenizer, Moved(), contexts, batch_size=2).score(FACTORS)
    set_factors(model, FACTORS)
    same(scores.logprob.flatten(), plain_scores(model, contexts).logprob)
    # Every different beginning of a prompt is one token of a prefix tree. Its last token and the answer stand alone.
    tree = sum(
        len({tuple(one.prompt[:length]) for one in context for length in range(1, len(one.prompt))})
        for context in contexts
    )
    least = tree + sum(len(one.answer) for one in flat(contexts))
    whole = sum(len(one.prompt) + len(one.answer) - 1 for one in flat(contexts))
    assert least < whole
    assert scores.tokens == least if packed == 0 else least <= scores.tokens <= whole


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
def test_rope_types_and_windows_score_and_generate_as_plain_passes(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    path = write_tiny(tmp_path, family, **changes)
    model, tokenizer = float64(path), tokenizer_of(path)
    task = Moved(wanted="impossible")
    short, long = contexts_of(Moved(lines=3), tokenizer, 1), contexts_of(Moved(lines=20), tokenizer, 1)
    long[0] = [replace(one, example=replace(one.example, position=i)) for i, one in enumerate(long[0])]
    contexts = [*short, *long]
    lengths = [len(one.prompt) + len(one.answer) for one in flat(contexts)]
    assert min(lengths) < 215 < max(lengths)
    scores = Scorer(model, tokenizer, task, contexts).score(FACTORS, accuracy=True)
    set_factors(model, FACTORS)
    same(scores.logprob.flatten(), plain_scores(model, contexts).logprob)
    expected = [until_decided(model, tokenizer, task, one) for one in flat(contexts)]
    assert [text for context in scores.outputs for text in context] == expected


def test_prefixes_are_shared_as_long_as_no_prompt_reaches_beyond_the_window(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_tiny(tmp_path / "any", "mistral"))
    contexts = contexts_of(TASK, tokenizer, 2)
    longest = max(len(one.prompt) + len(one.answer) for one in flat(contexts))
    for window, plain in ((longest, False), (longest - 1, True), (longest // 2, True)):
        model = float64(write_tiny(tmp_path / str(window), "mistral", sliding_window=window))
        scorer = Scorer(model, tokenizer, TASK, contexts)
        assert scorer.plain == plain
        same(scorer.score(FACTORS).logprob.flatten(), plain_scores(model, contexts).logprob)


def test_tokens_are_counted_without_padding_and_sharing_saves_them(tiny_llama: Path) -> None:
    model, tokenizer = load_scaled(tiny_llama, dtype=torch.float32), tokenizer_of(tiny_llama)
    contexts = contexts_of(TASK, tokenizer)
    shared = Scorer(model, tokenizer, TASK, contexts, batch_size=4).score()
    plain = Scorer(model, tokenizer, TASK, contexts, shared_prefixes=False).score()
    # The last token of an answer is never read.
    assert plain.tokens == sum(len(one.prompt) + len(one.answer) - 1 for one in flat(contexts))
    assert shared.tokens < plain.tokens / 2
    same(shared.logprob, plain.logprob)


def test_prompts_longer_than_the_models_positions_are_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "llama", max_position_embeddings=100)
    model, tokenizer = load_scaled(path, dtype=torch.float32), tokenizer_of(path)
    with pytest.raises(InputError, match=r"has \d+ tokens, but the model has only 100 positions"):
        Scorer(model, tokenizer, TASK, contexts_of(TASK, tokenizer))
    # Here it is the text to be generated that has no room.
    one = Example(0, 0, "x" * 90, "y")
    Scorer(model, tokenizer, TASK, own_contexts(tokenizer, [one]))
    with pytest.raises(InputError, match="has 102 tokens"):
        Scorer(model, tokenizer, Moved(), own_contexts(tokenizer, [one]))


def test_nan_logits_give_nan_scores_that_never_win(tmp_path: Path) -> None:
    model = load_scaled(write_tiny(tmp_path, "llama"), dtype=torch.float32)
    with torch.no_grad():
        model.base_model.layers[2].mlp.up_proj.weight.fill_(math.nan)
    tokenizer = tokenizer_of(tmp_path)
    scores = Scorer(model, tokenizer, TASK, contexts_of(TASK, tokenizer)).score()
    for kind in ("logprob", "probability", "accuracy"):
        assert np.isnan(scores.values(kind)).all()


def test_progress_ends_with_all_done(tiny_llama: Path) -> None:
    shares: list[float] = []
    tokenizer = tokenizer_of(tiny_llama)
    scorer = Scorer(load_scaled(tiny_llama, dtype=torch.float32), tokenizer, TASK, contexts_of(TASK, tokenizer))
    scorer.score(on_progress=shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]


# Memory


def test_running_out_of_memory_halves_the_batch_until_the_call_ends(tiny_llama: Path) -> None:
    model, tokenizer = float64(tiny_llama), tokenizer_of(tiny_llama)
    contexts = contexts_of(TASK, tokenizer)
    expected = Scorer(model, tokenizer, TASK, contexts).score()
    seen: list[int] = []

    def small_device(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(len(kwargs["input_ids"]))
        if seen[-1] > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    scorer = Scorer(model, tokenizer, TASK, contexts, batch_size=4)
    handle = model.base_model.register_forward_pre_hook(small_device, with_kwargs=True)
    scores = scorer.score()
    assert seen == [4, 2, 1, 1, 1, 1]
    same(scores.logprob, expected.logprob)
    assert scores.tokens == expected.tokens
    handle.remove()
    # With memory again, the next call has whole batches again.
    seen.clear()
    handle = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    scorer.score()
    assert seen == [4]
    handle.remove()


@pytest.mark.parametrize("call", ["score", "gradient"])
def test_a_single_context_that_does_not_fit_is_an_error_of_one_line(call: str, tiny_llama: Path) -> None:
    model, tokenizer = load_scaled(tiny_llama, dtype=torch.float32), tokenizer_of(tiny_llama)

    def no_memory(module: Any, args: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    scorer = Scorer(model, tokenizer, TASK, contexts_of(TASK, tokenizer))
    expected = scorer.score(FACTORS)
    handle = model.base_model.register_forward_pre_hook(no_memory)
    with pytest.raises(InputError, match="out of memory on cpu with a single context of"):
        _call(scorer, call)
    handle.remove()
    # The model is as it was.
    assert scorer.score(FACTORS).logprob.tolist() == expected.logprob.tolist()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("call", ["score", "gradient"])
def test_other_errors_are_not_taken_for_lack_of_memory(call: str, tiny_llama: Path) -> None:
    model, tokenizer = load_scaled(tiny_llama, dtype=torch.float32), tokenizer_of(tiny_llama)

    def broken(module: Any, args: Any) -> None:
        raise RuntimeError("device-side assert triggered")

    scorer = Scorer(model, tokenizer, TASK, contexts_of(TASK, tokenizer))
    handle = model.base_model.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="device-side assert"):
        _call(scorer, call)
    handle.remove()


def _call(scorer: Scorer, call: str) -> None:
    if call == "score":
        scorer.score(FACTORS)
    else:
        scorer.gradient(FACTORS, 0, 1, (1.0, 0.0, 0.0))


# Generation


def until_decided(model: Any, tokenizer: Any, task: Task, one: Encoded) -> str:
    """Independent: transformers' own greedy text, cut after the first token that decides the answer."""
    made = greedy(model, one.prompt, task.max_new_tokens)
    texts: list[str] = [tokenizer.decode(made[:length], skip_special_tokens=True) for length in range(1, len(made) + 1)]
    decided = (text for text in texts if task.correct(one.example, text) or task.finished(text))
    return next(decided, texts[-1])


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("packed", [0, 10_000])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_generated_text_is_transformers_own_up_to_where_the_answer_is_decided(
    family: str, packed: int, batch_size: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "PACKED_TOKENS", packed)
    path = request.getfixturevalue(f"tiny_{family}")
    model, tokenizer = float64(path), tokenizer_of(path)
    contexts = contexts_of(Moved(), tokenizer, 3)
    # Prompts of different lengths in a batch.
    contexts[1] = [replace(one, prompt=one.prompt[20:]) for one in contexts[1]]
    set_factors(model, FACTORS)
    made = [greedy(model, one.prompt, Moved.max_new_tokens) for one in flat(contexts)]
    # A letter that only some of the texts have, and a token that ends some of them: all ways to stop occur.
    letters = {letter for tokens in made for letter in tokenizer.decode(tokens)}
    letter = min(letters, key=lambda one: (abs(sum(one in tokenizer.decode(tokens) for tokens in made) - 4), one))
    monkeypatch.setattr(model.generation_config, "eos_token_id", [made[4][5], 255])
    task = Moved(wanted=letter)
    expected = [until_decided(model, tokenizer, task, one) for one in flat(contexts)]
    scores = Scorer(model, tokenizer, task, contexts, batch_size=batch_size).score(FACTORS, accuracy=True)
    assert [text for context in scores.outputs for text in context] == expected
    assert scores.exact.flatten().tolist() == [letter in text for text in expected]
    assert 0 < scores.exact.mean() < 1
    set_factors(model, FACTORS)
    same(scores.logprob.flatten(), plain_scores(model, contexts).logprob)


def test_generation_costs_only_the_tokens_that_are_needed(tiny_llama: Path) -> None:
    model, tokenizer = float64(tiny_llama), tokenizer_of(tiny_llama)
    contexts = contexts_of(Moved(), tokenizer, 1)
    judged = Scorer(model, tokenizer, Moved(), contexts).score()
    assert np.isnan(judged.exact).all() and judged.outputs == []
    # The last token of a text is never read; the first one costs nothing, since the prompt predicts it.
    endless = Scorer(model, tokenizer, Moved(wanted="impossible"), contexts).score(accuracy=True)
    assert endless.tokens == judged.tokens + 3 * (Moved.max_new_tokens - 1)
    easy = Scorer(model, tokenizer, Moved(wanted=""), contexts).score(accuracy=True)
    assert easy.tokens == judged.tokens
    assert easy.exact.tolist() == [[1, 1, 1]]
    plain = Scorer(model, tokenizer, Moved(wanted="impossible"), contexts, shared_prefixes=False)
    # Whole prompts: once to judge the answer, once to go on from.
    whole = sum(2 * len(one.prompt) + len(one.answer) - 1 for one in flat(contexts))
    assert plain.score(accuracy=True).tokens == whole + 3 * (Moved.max_new_tokens - 1)


def test_accuracy_asked_for_changes_nothing_where_no_text_is_needed(tiny_llama: Path) -> None:
    model, tokenizer = load_scaled(tiny_llama, dtype=torch.float32), tokenizer_of(tiny_llama)
    scorer = Scorer(model, tokenizer, TASK, contexts_of(TASK, tokenizer))
    first, second = scorer.score(FACTORS), scorer.score(FACTORS, accuracy=True)
    assert first.logprob.tolist() == second.logprob.tolist()
    assert first.exact.tolist() == second.exact.tolist()
    assert (first.tokens, first.outputs) == (second.tokens, second.outputs)


# Gradient


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with small weights: smooth enough for finite differences."""
    return write_tiny(tmp_path_factory.mktemp("smooth") / "llama", "llama", initializer_range=0.08)


def all_float64(path: Path) -> Any:
    """A model without a float32 step, so that small differences mean something: its factors and norms have one."""
    model = float64(path)
    rotary = model.base_model.rotary_emb
    rotary.layer_rope_scaling = rotary.layer_rope_scaling.double()
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(
                torch.nn.functional.rms_norm,
                normalized_shape=module.weight.shape,
                weight=module.weight,
                eps=module.variance_epsilon,
            )
    return model


def differences(value: Callable[[], float], model: Any, factors: Sequence[float]) -> list[float]:
    """Central differences of `value` in each factor."""
    buffer, step, found = model.base_model.rotary_emb.layer_rope_scaling, 1e-5, []
    for layer in range(len(factors)):
        ends = []
        for sign in (1, -1):
            moved = torch.tensor(factors, dtype=torch.float64)
            moved[layer] += sign * step
            buffer.copy_(moved)
            ends.append(value())
        found.append((ends[0] - ends[1]) / (2 * step))
    return found


WEIGHTS = (0.7, 0.5, -0.2)


@pytest.mark.parametrize("options", [{}, {"checkpointing": True}, {"shared_prefixes": False}], ids=str)
def test_gradient_equals_finite_differences(options: dict[str, bool], smooth: Path) -> None:
    model, tokenizer = all_float64(smooth), tokenizer_of(smooth)
    factors = (0.8, 1.2, 0.9, 1.1)
    scorer = Scorer(model, tokenizer, TASK, contexts_of(TASK, tokenizer), **options)
    scores, gradient = scorer.gradient(factors, 1, 3, WEIGHTS)
    expected = differences(lambda: float(scorer.score(None, 1, 3).logprob.mean(0) @ WEIGHTS), model, factors)
    assert gradient.shape == (4,)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    # Each layer has its say.
    assert np.abs(expected).min() > 1e-5
    alone = scorer.score(factors, 1, 3)
    same(scores.logprob, alone.logprob)
    assert (scores.exact.tolist(), scores.tokens) == (alone.exact.tolist(), alone.tokens)


def test_gradient_of_questions_that_share_in_part_equals_that_of_whole_prompts(
    smooth: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = all_float64(smooth), tokenizer_of(smooth)
    contexts = contexts_of(Moved(), tokenizer, 2)
    plain, expected = Scorer(model, tokenizer, Moved(), contexts, shared_prefixes=False).gradient(
        FACTORS, 0, 2, WEIGHTS
    )
    monkeypatch.setattr(rows, "PACKED_TOKENS", 60)
    scorer = Scorer(model, tokenizer, Moved(), contexts)
    scores, gradient = scorer.gradient(FACTORS, 0, 2, WEIGHTS)
    # No row takes anything over from another one.
    assert scorer.tokens(0, 2) < scorer.tokens(0, 2, gradient=True) == scores.tokens
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    same(scores.logprob, plain.logprob)
    assert np.isnan(scores.exact).all()


def test_gradient_leaves_the_model_as_it_was(tiny_llama: Path) -> None:
    model, tokenizer = load_scaled(tiny_llama, dtype=torch.float32), tokenizer_of(tiny_llama)
    scorer = Scorer(model, tokenizer, TASK, contexts_of(TASK, tokenizer), checkpointing=True)
    expected = scorer.score(FACTORS).logprob.tolist()
    buffer = model.base_model.rotary_emb.layer_rope_scaling
    first = scorer.gradient(FACTORS, 0, 2, WEIGHTS)[1]
    assert model.base_model.rotary_emb.layer_rope_scaling is buffer and not buffer.requires_grad
    assert not model.training
    assert all("forward" not in vars(layer) for layer in model.base_model.layers)
    assert all(one.grad is None for one in model.parameters())
    assert scorer.score(FACTORS).logprob.tolist() == expected
    assert scorer.gradient(FACTORS, 0, 2, WEIGHTS)[1].tolist() == first.tolist()


def kept_for_backward(model: Any, scorer: Scorer, checkpointing: bool) -> int:
    """Bytes of all tensors that a backward pass through one context would need, weights left out."""
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    row = scorer._chains[0][0][0]
    with (
        differentiable_factors(model, FACTORS),
        checkpointed_layers(model, checkpointing),
        scorer._attention(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        hidden, _ = scorer._hidden([row])
        scorer._judge([row], hidden)
        return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_on_paper_is_what_a_backward_pass_keeps(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = KVRetrieval(pairs=30, key_width=8)
    path = write_tiny(tmp_path, "llama", num_hidden_layers=4, intermediate_size=512)
    model, tokenizer = load_scaled(path, dtype=dtype), tokenizer_of(path)
    scorer = Scorer(model, tokenizer, task, contexts_of(task, tokenizer, 1))
    (row,) = scorer._chains[0][0]
    # The mask has as many rows as there are tokens behind the common beginning.
    monkeypatch.setattr(memory, "PACKED_TOKENS", row.tokens - row.shared)

    def on_paper(**options: bool) -> int:
        return memory_estimate(model.config, row.tokens, dtype, **options) - memory_estimate(
            model.config, 0, dtype, **options
        )

    # What is computed again for one layer, and the gradients of one, come on top of what is kept.
    one_layer = on_paper(checkpointing=False) // 5
    kept = kept_for_backward(model, scorer, checkpointing=False)
    assert 0.9 < (on_paper(checkpointing=False) - one_layer) / kept < 1.1
    inputs = kept_for_backward(model, scorer, checkpointing=True)
    assert 0.5 < (on_paper(checkpointing=True) - 2 * one_layer) / inputs < 1.1
    assert inputs < kept / 8


def test_memory_on_paper_counts_all_weights(tiny_qwen2: Path, tmp_path: Path) -> None:
    llama = write_tiny(tmp_path / "llama", "llama", tie_word_embeddings=True, head_dim=16)
    for path in (tiny_qwen2, llama, write_tiny(tmp_path / "mixtral", "mixtral")):
        model = load_scaled(path, dtype=torch.bfloat16)
        # Biases and routers are small.
        names = [name for name, _ in model.named_parameters() if not name.endswith(("bias", ".gate.weight"))]
        expected = sum(2 * model.get_parameter(name).numel() for name in names)
        logits = rows.PACKED_TOKENS * 256 * 12
        assert memory_estimate(model.config, 0, torch.bfloat16) == expected + logits


def test_a_7b_model_at_4k_tokens_fits_80_gigabytes() -> None:
    from transformers import GPTNeoXConfig, LlamaConfig

    # The library's default Llama is the 7B one.
    assert 14e9 < memory_estimate(LlamaConfig(), 4096, torch.bfloat16) < 20e9
    assert 30e9 < memory_estimate(LlamaConfig(), 4096, torch.bfloat16, checkpointing=False) < 40e9
    # GPT-NeoX, whose MLP has two matrices and not three, and whose config names no key heads: the 20B model.
    assert 40e9 < memory_estimate(GPTNeoXConfig(), 0, torch.bfloat16, gradient=False) < 60e9


# Loading


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_spread_over_memory_and_disk_scores_as_a_whole_one(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(f"tiny_{family}")
    tokenizer = tokenizer_of(path)
    contexts = contexts_of(Moved(), tokenizer, 2)
    places = {
        "model.embed_tokens": "disk",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
        "model.layers.3": "cpu",
        "model.norm": "disk",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    }
    spread = load_scaled(path, dtype=torch.float32, device_map=places, offload_folder=str(tmp_path))
    assert {one.device.type for one in spread.parameters()} == {"cpu", "meta"}
    scorers = [
        Scorer(model, tokenizer, Moved(), contexts, checkpointing=True)
        for model in (load_scaled(path, dtype=torch.float32), spread)
    ]
    whole, other = (scorer.score(FACTORS, accuracy=True) for scorer in scorers)
    assert whole.logprob.tolist() == other.logprob.tolist()
    assert whole.outputs == other.outputs
    # Twice: the layers' hooks must have survived the first time.
    for _ in range(2):
        whole_gradient, other_gradient = (scorer.gradient(FACTORS, 0, 1, WEIGHTS)[1] for scorer in scorers)
        assert whole_gradient.tolist() == other_gradient.tolist()


def test_quantisation_that_cannot_be_had_is_an_error_of_one_line(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="'4bit' needs bitsandbytes, which is not installed; pip install"):
        load_scaled(tiny_llama, dtype=torch.float32, quantization="4bit")
    with pytest.raises(InputError, match="quantization must be one of 4bit, 8bit; got '3bit'"):
        load_scaled(tiny_llama, dtype=torch.float32, quantization="3bit")
    config = json.loads((tiny_llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(InputError, match="is quantised already"):
        load_scaled(tmp_path, dtype=torch.float32, quantization="8bit")


def test_a_checkpoints_own_quantisation_reaches_the_library(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "aqlm"}}))
    # It is the library that knows the methods, and what each of them needs.
    with pytest.raises(ImportError, match="aqlm"):
        load_scaled(path, dtype=torch.float32)


# The real model


@pytest.mark.smollm2
def test_real_prompts_exact_match_equals_greedy_generation(smollm2: Path) -> None:
    model, tokenizer = load_scaled(smollm2, dtype=torch.float32), tokenizer_of(smollm2)
    # Easy questions and, among more pairs, harder ones: both outcomes must occur.
    outcomes = set()
    for pairs, width, count in ((2, 3, 2), (8, 8, 1)):
        task = KVRetrieval(pairs=pairs, key_width=width, positions=(0, pairs // 2))
        contexts = take(task, "search", 0, count, tokenizer, "auto", 8192).contexts
        scores = Scorer(model, tokenizer, task, contexts).score()
        same(scores.logprob.flatten(), plain_scores(model, contexts).logprob)
        for one, exact in zip(flat(contexts), scores.exact.flatten(), strict=True):
            assert exact == (greedy(model, one.prompt, len(one.answer)) == one.answer)
            outcomes.add(bool(exact))
    assert outcomes == {True, False}


@pytest.mark.smollm2
def test_real_text_is_what_the_library_generates(smollm2: Path) -> None:
    model, tokenizer = load_scaled(smollm2, dtype=torch.float32), tokenizer_of(smollm2)
    contexts = own_contexts(
        tokenizer,
        [
            Example(0, 0, "The capital of France is a city on the Seine. Question: Which city?\nAnswer:", " Paris"),
            Example(0, 1, "The capital of France is a city on the Seine. Question: Which river?\nAnswer:", " Seine"),
        ],
    )
    task = Moved(wanted="Seine")
    scores = Scorer(model, tokenizer, task, contexts).score(accuracy=True)
    assert scores.outputs == [[until_decided(model, tokenizer, task, one) for one in contexts[0]]]
