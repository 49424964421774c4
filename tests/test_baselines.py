"""The methods that LPES is compared with compute what their descriptions say: the expected values come from
transformers' own models and from an attention written by hand, head by head; prompts are read in batches with left
padding, and what follows them from the cache, in pieces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lpes_bake.baselines.attention_buckets import AttentionBuckets
from lpes_bake.baselines.decoder import Decoder, ModelDecoder
from lpes_bake.baselines.hidden_channel import (
    HiddenChannel,
    answer_loss,
    find_channel,
    mean_hidden_states,
    middle_layers,
    positional_channels,
)
from lpes_bake.baselines.methods import parse_method
from lpes_bake.baselines.moice import MoICE, load_moice, new_routers, save_routers
from lpes_bake.baselines.ms_poe import MsPoE
from lpes_bake.baselines.own_attention import LLAMA_LIKE
from lpes_bake.baselines.rotary import BASES, bases_for
from lpes_bake.export import bake
from lpes_bake.factors import Factors
from lpes_bake.search.errors import InputError
from lpes_bake.search.prompts import Encoded
from lpes_bake.search.tasks import Example
from lpes_bake.source import open_source
from lpes_bake.timing import Memory
from tests.by_hand import attended, linear, logprobs_by_hand, projected, turned
from tests.conftest import write_tiny
from tests.families import TINY_FAMILIES

THETA = 10000.0
# Of two rows: the tokens of their prompts, and how many more follow.
PROMPTS, FOLLOWING = (23, 40), 4

# (ids (S,), tokens of the prompt) → log-probabilities (S, V) of what follows each
Reference = Callable[[torch.Tensor, int], torch.Tensor]


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 256, (length + FOLLOWING,), generator=generator) for length in PROMPTS]


def check(decoder: Decoder, reference: Reference, atol: float = 2e-3) -> None:
    """Both rows in one batch, and what follows the prompts as 1, 2 and 1 tokens."""
    rows, width = sequences(), max(PROMPTS)
    ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    for row, length in enumerate(PROMPTS):
        ids[row, width - length :], mask[row, width - length :] = rows[row][:length], 1
    following = torch.stack([row[-FOLLOWING:] for row in rows])
    first, state = decoder.prefill(ids, mask)
    pieces = [first[:, None], *(decoder.decode(state, piece) for piece in following.split([1, 2, 1], dim=1))]
    assert [piece.shape for piece in pieces] == [(2, count, 256) for count in (1, 1, 2, 1)]
    found = torch.cat(pieces, dim=1)
    for row, length in enumerate(PROMPTS):
        expected = reference(rows[row], length)[length - 1 :]
        torch.testing.assert_close(found[row].double(), expected.double(), rtol=0, atol=atol)
        if decoder.in_parts:
            _, start = decoder.prefill(rows[row][None, :7], torch.ones(1, 7, dtype=torch.long))
            for state in (copy.deepcopy(start), start):
                again = decoder.decode(state, rows[row][None, 7:])[0, length - 8 :]
                torch.testing.assert_close(again.double(), expected.double(), rtol=0, atol=atol)


def plain(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path).eval()


def as_library(model: Any) -> Reference:
    """What transformers' own forward gives, without a cache."""

    @torch.no_grad()
    def reference(ids: torch.Tensor, prompt: int) -> torch.Tensor:
        found: torch.Tensor = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
        return found

    return reference


def differs(one: Decoder, reference: Reference) -> None:
    """A method that did nothing would pass a test of its special case."""
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check(one, reference, atol=0.05)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny checkpoints with theta 10000, one for each family and changes; the weights of a family are the same."""
    paths: dict[str, Path] = {}

    def path(family: str = "llama", **changes: Any) -> Path:
        key = f"{family} {changes}"
        if key not in paths:
            paths[key] = write_tiny(tmp_path_factory.mktemp("tiny"), family, **{"rope_theta": THETA, **changes})
        return paths[key]

    return path


def load(text: str, path: Path) -> Decoder:
    return parse_method(text).load(open_source(str(path), baked=True), "cpu", torch.float32)


BOTH = pytest.mark.parametrize("family", ["llama", "qwen2"])


@BOTH
def test_the_reference_by_hand_is_the_model(family: str, tiny: Any) -> None:
    def heads(number: int, module: Any, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(len(x))
        keys, values = (projected(p, x, module.head_dim) for p in (module.k_proj, module.v_proj))
        return torch.stack(
            [
                attended(turned(query, at), turned(keys[head // 2], at), values[head // 2])
                for head, query in enumerate(projected(module.q_proj, x, module.head_dim))
            ]
        )

    model, ids = plain(tiny(family)), sequences()[1]
    torch.testing.assert_close(
        logprobs_by_hand(model, ids, heads), as_library(model)(ids, 0).double(), rtol=0, atol=2e-3
    )


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_base_is_the_library_s_model(family: str, tiny: Any) -> None:
    base = load("base", tiny(family))
    check(base, as_library(plain(tiny(family))))
    # Not only in numbers: what others cost is measured beside it, LPES' own classes among them.
    assert isinstance(base, ModelDecoder) and type(base.model) is type(plain(tiny(family)))


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_a_window_that_slides_within_the_prompt_is_kept(family: str, tiny: Any) -> None:
    path = tiny(family, sliding_window=16)
    model = plain(path)
    check(load("base", path), as_library(model))
    if family == "mistral":
        for name in ("ms-poe", "moice", "hidden-channel"):
            check(special_case(name, copy.deepcopy(model)), as_library(model))


def test_lpes_are_the_factors_of_a_file_or_of_a_baked_directory_and_base_has_none(tiny: Any, tmp_path: Path) -> None:
    factors = tmp_path / "factors.json"
    factors.write_text("[0.5, 1.0, 2.0, 1.5]")
    baked = bake(open_source(str(tiny())), Factors((0.5, 1.0, 2.0, 1.5)), tmp_path / "baked").out
    reference = as_library(AutoModelForCausalLM.from_pretrained(baked, trust_remote_code=True).eval())
    check(load(f"lpes={factors}", tiny()), reference)
    check(load("lpes", baked), reference)
    check(load("base", baked), as_library(plain(tiny())))
    with pytest.raises(InputError, match="is not baked; give the factors by lpes=FILE"):
        load("lpes", tiny())


@BOTH
def test_pi_is_the_library_s_linear_type_on_top_of_a_factor_that_is_there(family: str, tiny: Any) -> None:
    once = as_library(plain(tiny(family, rope_scaling={"rope_type": "linear", "factor": 1.5})))
    check(load("pi=1.5", tiny(family)), once)
    twice = as_library(plain(tiny(family, rope_scaling={"rope_type": "linear", "factor": 3.0})))
    check(load("pi=2", tiny(family, rope_scaling={"rope_type": "linear", "factor": 1.5})), twice)
    check(load("pi=1", tiny(family)), as_library(plain(tiny(family))))


@BOTH
def test_yarn_and_ntk_are_the_library_s(family: str, tiny: Any) -> None:
    check(
        load("yarn=2", tiny(family)), as_library(plain(tiny(family, rope_scaling={"rope_type": "yarn", "factor": 2.0})))
    )
    # 32 dimensions a head.
    check(load("ntk=2", tiny(family)), as_library(plain(tiny(family, rope_theta=THETA * 2 ** (32 / 30)))))


def test_rope_types_that_cannot_be_joined_are_refused(tiny: Any) -> None:
    path = tiny(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    for text in ("pi=2", "yarn=2", "ms-poe", "hidden-channel=3/0"):
        with pytest.raises(InputError, match="RoPE type 'dynamic'"):
            load(text, path)


def weighted_sum(references: list[Reference]) -> Reference:
    """The formula, token by token."""

    def reference(ids: torch.Tensor, prompt: int) -> torch.Tensor:
        passes = [one(ids, prompt).exp() for one in references]
        rows = []
        for place in range(len(ids)):
            confidences = [max(one[place].tolist()) for one in passes]
            total = sum(c * one[place].double() for c, one in zip(confidences, passes, strict=True))
            rows.append((total / sum(confidences)).log())
        return torch.stack(rows)

    return reference


@BOTH
def test_attention_buckets_are_separate_models_weighted_by_their_confidence(family: str, tiny: Any) -> None:
    assert bases_for(THETA) == BASES == (10000, 17500, 18000, 19000, 20000, 22500, 25000)
    models = [as_library(plain(tiny(family, rope_theta=base))) for base in BASES]
    check(load("attention-buckets", tiny(family)), weighted_sum(models))
    differs(load("attention-buckets", tiny(family)), models[0])


@pytest.mark.parametrize("family", [one for one in TINY_FAMILIES if one != "gemma3_text"])
def test_one_bucket_with_the_model_s_own_base_is_the_model_in_every_family(family: str, tiny: Any) -> None:
    model = plain(tiny(family))
    check(AttentionBuckets(copy.deepcopy(model), [THETA]), as_library(model))


def head_scores(module: Any, x: torch.Tensor) -> list[float]:
    """Ms-PoE's statistic for the last token of x, in words of its description."""
    keys = projected(module.k_proj, x, module.head_dim)
    scores = []
    for head, query in enumerate(projected(module.q_proj, x, module.head_dim)):
        weights = (query[-1] @ keys[head // 2].T / module.head_dim**0.5).softmax(-1).tolist()
        mean = sum(weights) / len(weights)
        scores.append(sum(weight > 3 * mean for weight in weights) / len(weights))
    return scores


def ms_poe_by_hand(model: Any, released: bool) -> Reference:
    ratios = [1.2 + 0.6 * i / 4 for i in range(4)]

    def reference(ids: torch.Tensor, prompt: int) -> torch.Tensor:
        def heads(number: int, module: Any, x: torch.Tensor) -> torch.Tensor:
            at = torch.arange(len(x)).double()
            keys, values = (projected(p, x, module.head_dim) for p in (module.k_proj, module.v_proj))
            scores = head_scores(module, x[:prompt])
            order = sorted(range(4), key=lambda head: -scores[head])
            own = [ratios[order[head]] if released else ratios[order.index(head)] for head in range(4)]
            if number < 2:
                own = [1.0] * 4
            key_ratio = [own[head // 2 * 2] if released else own[head] for head in range(4)]
            return torch.stack(
                [
                    attended(
                        turned(query, at / own[head]), turned(keys[head // 2], at / key_ratio[head]), values[head // 2]
                    )
                    for head, query in enumerate(projected(module.q_proj, x, module.head_dim))
                ]
            )

        return logprobs_by_hand(model, ids, heads)

    return reference


@pytest.mark.parametrize("name", ["ms-poe", "ms-poe-released"])
@BOTH
def test_ms_poe_is_the_rotation_by_hand(family: str, name: str, tiny: Any) -> None:
    model = plain(tiny(family))
    check(load(name, tiny(family)), ms_poe_by_hand(model, name == "ms-poe-released"))
    differs(load(name, tiny(family)), ms_poe_by_hand(model, name != "ms-poe-released"))
    differs(load(name, tiny(family)), as_library(model))


def test_ms_poe_without_grouped_keys_is_the_rotation_by_hand(tiny: Any) -> None:
    # Its own two key heads, each for two query heads, are four heads by themselves.
    grouped, path = plain(tiny()), tiny(num_key_value_heads=4)
    alone = plain(path)
    weights = grouped.state_dict()
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weight.unflatten(0, (2, 32)).repeat_interleave(2, dim=0).flatten(0, 1)
    alone.load_state_dict(weights)
    check(MsPoE(alone, released=False), ms_poe_by_hand(grouped, released=False))


def test_the_most_aware_head_of_four_gets_the_smallest_ratio_as_described_and_another_as_released(tiny: Any) -> None:
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    for released, expected in ((False, [1.65, 1.2, 1.5, 1.35]), (True, [1.35, 1.65, 1.5, 1.2])):
        found = MsPoE(plain(tiny()), released=released).ratios_of(scores)
        torch.testing.assert_close(found, torch.tensor([expected]))


def routers_for(model: Any, spread: float = 1.0) -> Any:
    """Routers that make a difference: those that training begins with weigh all experts nearly the same."""
    routers = new_routers(model.config, len(BASES))
    with torch.no_grad():
        for gate in routers.parameters():
            gate.mul_(spread)
    return routers


def moice_by_hand(model: Any, routers: Any, top_k: int) -> Reference:
    def reference(ids: torch.Tensor, prompt: int) -> torch.Tensor:
        def heads(number: int, module: Any, x: torch.Tensor) -> torch.Tensor:
            at, router = torch.arange(len(x)), routers[number]
            keys, values = (projected(p, x, module.head_dim) for p in (module.k_proj, module.v_proj))
            outputs = []
            for head, query in enumerate(projected(module.q_proj, x, module.head_dim)):
                zeroth = turned(query, at, BASES[0])
                gate = linear(router.gate_1, zeroth)
                logits = linear(router.gate_2, gate * gate.sigmoid() * linear(router.gate_3, zeroth))
                total = torch.zeros_like(query)
                for place in range(len(x)):
                    best = sorted(range(7), key=lambda one: -float(logits[place, one]))[:top_k]
                    shares = torch.stack([logits[place, one].exp() for one in best])
                    for expert, share in zip(best, shares / shares.sum(), strict=True):
                        turn = {"theta": BASES[expert]}
                        seen = attended(
                            turned(query[: place + 1], at[: place + 1], **turn),
                            turned(keys[head // 2][: place + 1], at[: place + 1], **turn),
                            values[head // 2][: place + 1],
                        )
                        total[place] += share * seen[-1]
                outputs.append(total)
            return torch.stack(outputs)

        return logprobs_by_hand(model, ids, heads)

    return reference


@pytest.mark.parametrize(("family", "top_k"), [("llama", 7), ("qwen2", 2)])
def test_moice_is_the_weighted_outputs_by_hand(family: str, top_k: int, tiny: Any, tmp_path: Path) -> None:
    model = plain(tiny(family, num_hidden_layers=2))
    routers = routers_for(model)
    save_routers(routers, tmp_path, {"bases": list(BASES), "top_k": top_k})
    decoder = load(f"moice={tmp_path}", tiny(family, num_hidden_layers=2))
    check(decoder, moice_by_hand(model, routers, top_k))
    differs(decoder, as_library(model))


def test_only_gates_get_a_gradient(tiny: Any) -> None:
    model = plain(tiny()).requires_grad_(False)
    moice = MoICE(model, routers_for(model), BASES, 7)
    model(sequences()[0][None], labels=sequences()[0][None], use_cache=False).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    gates = dict(moice.routers.named_parameters())
    assert len(gates) == 12 and all(gate.grad is not None and gate.grad.abs().sum() > 0 for gate in gates.values())


def test_the_outputs_of_moice_s_experts_are_not_held_all_at_once() -> None:
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=32, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=8
    )
    model = LlamaForCausalLM(config).eval()
    moice, memory = MoICE(model, new_routers(config, 7), BASES, 7), Memory(torch.device("cpu"))
    query, key, positions = torch.randn(1, 32, 3000, 16), torch.randn(1, 2, 3000, 16), torch.arange(3000)[None]
    # The first call brings more into memory than tensors.
    for _ in range(2):
        memory.free()
        before = memory.held()
        memory.reset_peak()
        with torch.inference_mode():
            moice._attend(0, query, key, key, None, positions, 0.25)
        peak = memory.peak()
    if before is None or peak is None:
        pytest.skip("this system does not tell the peak of a process")
    # 14 times one output with its queries, keys and weights; seven outputs and their copies would make it 25.
    assert peak - before < 19 * query.nbytes


def test_routers_of_another_model_and_none_are_refused(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no routers.safetensors; train routers with lpes-bake train-moice"):
        load_moice(plain(tiny()), tmp_path)
    save_routers(new_routers(plain(tiny(num_hidden_layers=2)).config, 7), tmp_path, {"bases": list(BASES), "top_k": 7})
    with pytest.raises(InputError, match="holds routers of another model; train them for this one"):
        load_moice(plain(tiny()), tmp_path)
    (tmp_path / "routers.safetensors").write_bytes(b"no header")
    with pytest.raises(InputError, match="holds no routers of lpes-bake train-moice"):
        load_moice(plain(tiny()), tmp_path)


def hidden_channel_by_hand(model: Any, channel: int, scale: float, layers: range) -> Reference:
    def reference(ids: torch.Tensor, prompt: int) -> torch.Tensor:
        def heads(number: int, module: Any, x: torch.Tensor) -> torch.Tensor:
            at, scaled = torch.arange(len(x)), x.clone()
            scaled[:, channel] *= scale if number in layers else 1.0
            values = projected(module.v_proj, x, module.head_dim)

            def each(x: torch.Tensor) -> list[torch.Tensor]:
                keys = projected(module.k_proj, x, module.head_dim)
                queries = projected(module.q_proj, x, module.head_dim)
                return [
                    attended(turned(query, at), turned(keys[head // 2], at), values[head // 2])
                    for head, query in enumerate(queries)
                ]

            # The prompt's last token and all that follow were each the last one in their turn.
            return torch.stack(
                [torch.cat((a[: prompt - 1], b[prompt - 1 :])) for a, b in zip(each(x), each(scaled), strict=True)]
            )

        return logprobs_by_hand(model, ids, heads)

    return reference


@pytest.mark.parametrize("scale", [0.0, -1.0])
@BOTH
def test_a_hidden_channel_is_scaled_for_the_last_token_only(family: str, scale: float, tiny: Any) -> None:
    model = plain(tiny(family))
    assert [list(middle_layers(count)) for count in (4, 32)] == [[1, 2], list(range(10, 26))]
    # A channel that is as large as a positional one of a real model.
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] += 20
    decoder = HiddenChannel(copy.deepcopy(model), 5, scale, middle_layers(4))
    check(decoder, hidden_channel_by_hand(model, 5, scale, range(1, 3)))
    differs(decoder, as_library(model))


def test_a_prompt_of_one_token_is_its_last(tiny: Any) -> None:
    model, ids = plain(tiny()), sequences()[0][:3]
    decoder = HiddenChannel(copy.deepcopy(model), 5, 0.0, middle_layers(4))
    first, state = decoder.prefill(ids[None, :1], torch.ones(1, 1, dtype=torch.long))
    found = torch.cat((first, decoder.decode(state, ids[None, 1:])[0]))
    expected = hidden_channel_by_hand(model, 5, 0.0, range(1, 3))(ids, 1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-3)


def special_case(name: str, model: Any) -> Decoder:
    """Each method where it must change nothing."""
    if name == "ms-poe":
        return MsPoE(model, released=False, ratio_min=1.0, ratio_max=1.0)
    if name == "moice":
        return MoICE(model, new_routers(model.config, 2), (THETA, THETA), 2)
    return HiddenChannel(model, 5, 1.0, range(4))


@pytest.mark.parametrize("name", ["ms-poe", "moice", "hidden-channel"])
@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_ratios_of_one_equal_bases_and_a_scale_of_one_are_the_model(family: str, name: str, tiny: Any) -> None:
    model = plain(tiny(family))
    check(special_case(name, copy.deepcopy(model)), as_library(model))


@pytest.mark.parametrize("family", [one for one in TINY_FAMILIES if one not in LLAMA_LIKE])
def test_other_attentions_are_refused(family: str, tiny: Any, tmp_path: Path) -> None:
    for text in ("ms-poe", "ms-poe-released", f"moice={tmp_path}", "hidden-channel=3/0"):
        with pytest.raises(InputError, match=f"model_type '{family}'"):
            load(text, tiny(family))


def test_channels_that_are_monotone_in_many_layers_are_found_the_smoothest_first() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(7, 400, 12, generator=generator)
    depth = torch.linspace(0, 1, 400)
    states[2:5, :, 3] = -10 * depth.sqrt()  # falls in three of eight layers, bent at its beginning
    states[2:5, :, 8] = 10 * depth  # rises, straight
    states[2:4, :, 5] = 10 * depth  # rises in two layers only
    states[:, :, 9] = (20 * depth).sin()
    states[:, :, 0] = 3.0  # stands still
    assert positional_channels(states)[:2] == [8, 3]
    assert not {0, 5, 9} & set(positional_channels(states))


def test_the_channel_with_the_lowest_loss_is_taken_with_the_best_scale(tiny: Any) -> None:
    path = tiny(num_hidden_layers=4)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = plain(path)
    candidates = positional_channels(mean_hidden_states(model, tokenizer, 1))[:10]
    assert candidates
    found = find_channel(model, tokenizer, "plain", strings=1, contexts=1)
    assert isinstance(found, HiddenChannel)
    assert found.channel in candidates and found.scale in (0.5, 0.0, -0.5, -1.0)


def test_the_loss_of_an_answer_is_the_library_s(tiny: Any) -> None:
    model, ids = plain(tiny()), sequences()[0]
    for answer in (1, 4):
        prompt = ids[:-answer].tolist()
        labels = torch.cat((torch.full((len(prompt),), -100), ids[-answer:]))[None]
        with torch.no_grad():
            expected = float(model(ids[None], labels=labels).loss)
        question = Encoded(Example(0, 0, "", ""), prompt, ids[-answer:].tolist())
        assert answer_loss(ModelDecoder(model), question) == pytest.approx(expected, abs=1e-4)
