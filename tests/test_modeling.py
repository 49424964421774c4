"""The scaled models compute what the formula says, whatever way they are run.

Expected values come from transformers' own models: the base class, its `rope_type: linear`, and the
base class with hand-written rotary tables.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from transformers import StaticCache

from lpes_bake.modeling import layer_rope_scaling
from lpes_bake.search.families import FAMILIES
from tests.families import TINY, TINY_FAMILIES, family_named

# What the families share is tried on these two in all its variants.
PAIR = ("llama", "qwen2")
EACH_FAMILY = pytest.mark.parametrize("family", TINY_FAMILIES)
EACH_ROPE = pytest.mark.parametrize(
    ("family", "rope"), [(family, rope) for family, tiny in TINY_FAMILIES.items() for rope in tiny.ropes]
)
FACTORS = [0.25, 4.0, 1.0, 2.0]
ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + i / 16 for i in range(16)],
        "long_factor": [2.0 + i / 4 for i in range(16)],
        "original_max_position_embeddings": 512,
    },
}


def make_config(family: str, rope: str = "default", **changes: Any) -> Any:
    """A tiny config whose prompts of 3,000 tokens lie beyond the positions it claims; the scaled one, given factors."""
    entry = family_named(family)
    fields = {**TINY, **TINY_FAMILIES[family].config, "max_position_embeddings": 1024, "rope_theta": 10000.0, **changes}
    if ROPE_TYPES[rope]:
        fields["rope_scaling"] = copy.deepcopy(ROPE_TYPES[rope])
    if "layer_rope_scaling" in changes:
        return getattr(layer_rope_scaling, entry.config)(**fields)
    return getattr(transformers, entry.base_config)(**fields)


def make_base(family: str, rope: str = "default", head: str = "ForCausalLM", **changes: Any) -> Any:
    config = make_config(family, rope, **changes)
    torch.manual_seed(0)
    return getattr(transformers, family_named(family).base_class(head))(config).eval()


def scaled_class(family: str, head: str = "ForCausalLM") -> Any:
    entry = family_named(family)
    module = importlib.import_module(f"lpes_bake.modeling.{entry.module}")
    return getattr(module, entry.architectures[entry.base_class(head)])


def make_scaled(
    base: Any, family: str, factors: list[float], rope: str = "default", head: str = "ForCausalLM", **changes: Any
) -> Any:
    """The scaled model with the weights of `base`."""
    config = make_config(family, rope, layer_rope_scaling=factors, **changes)
    scaled = scaled_class(family, head)(config).eval()
    assert scaled.state_dict().keys() == base.state_dict().keys()
    scaled.load_state_dict(base.state_dict())
    return scaled


def two_layers(family: str) -> dict[str, Any]:
    """Changes that leave the first two layers of a tiny config."""
    lists = {name: value[:2] for name, value in TINY_FAMILIES[family].config.items() if isinstance(value, list)}
    return {"num_hidden_layers": 2, **lists}


def tokens(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = model(ids, **kwargs).logits
    return out


def scale_by_hand(base: Any, factors: list[float], interleaved: bool) -> None:
    """Give each layer of a base model its own (cos, sin), from its own rotary's inv_freq.

    Angles are rounded to float32, as the library's are: 3,000 tokens on, the rounding is not small.
    """
    rotary = base.base_model.rotary_emb

    def hook(layer: int, factor: float) -> Any:
        # Gemma 3 has a table for each kind of layers.
        kind = f"{base.config.layer_types[layer]}_" if isinstance(rotary.rope_type, dict) else ""

        def replace(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            cos, _ = kwargs["position_embeddings"]
            frequencies = (getattr(rotary, f"{kind}inv_freq").double() / factor).float()
            angles = torch.stack([torch.outer(row.float(), frequencies) for row in kwargs["position_ids"]]).double()
            angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
            scale = getattr(rotary, f"{kind}attention_scaling")
            kwargs["position_embeddings"] = ((angles.cos() * scale).to(cos), (angles.sin() * scale).to(cos))
            return args, kwargs

        return replace

    for layer, (module, factor) in enumerate(zip(base.base_model.layers, factors, strict=True)):
        module.register_forward_pre_hook(hook(layer, factor), with_kwargs=True)


@EACH_ROPE
def test_factors_of_one_give_the_very_bits_of_the_base(family: str, rope: str) -> None:
    base = make_base(family, rope)
    scaled = make_scaled(base, family, [1.0] * 4, rope)
    # Long before short: dynamic and longrope must find their way back.
    for length in (20, 3001, 256, 257, 700):
        ids = tokens(length)
        assert torch.equal(logits(base, ids), logits(scaled, ids)), length


@EACH_FAMILY
def test_factors_of_one_give_the_very_bits_of_the_base_in_16_bits(family: str) -> None:
    base = make_base(family)
    scaled = make_scaled(base, family, [1.0] * 4)
    for parameter in (*base.parameters(), *scaled.parameters()):
        # As from_pretrained does: .to() would round the base's frequencies too.
        parameter.data = parameter.data.to(torch.bfloat16)
    for length in (20, 300):
        ids = tokens(length)
        assert torch.equal(logits(base, ids), logits(scaled, ids)), length


@pytest.mark.parametrize(
    ("family", "factor"),
    [(family, 1.3) for family, tiny in TINY_FAMILIES.items() if tiny.linear]
    + [(family, factor) for family in PAIR for factor in (0.5, 4.0)],
)
def test_a_uniform_factor_is_position_interpolation(family: str, factor: float) -> None:
    base = make_base(family)
    linear = make_base(family, rope_scaling={"rope_type": "linear", "factor": factor})
    linear.load_state_dict(base.state_dict())
    # Gemma 3's rope_scaling is for its layers with full attention only.
    kinds = base.config.layer_types if family == "gemma3_text" else ["full_attention"] * 4
    scaled = make_scaled(base, family, [factor if kind == "full_attention" else 1.0 for kind in kinds])
    for length in (20, 3001):
        ids = tokens(length)
        torch.testing.assert_close(logits(scaled, ids), logits(linear, ids), rtol=0, atol=0)


@EACH_ROPE
def test_every_rope_type_composes(family: str, rope: str) -> None:
    base = make_base(family, rope)
    scaled = make_scaled(base, family, FACTORS, rope)
    plain = {length: logits(base, tokens(length)) for length in (20, 3001)}
    scale_by_hand(base, FACTORS, TINY_FAMILIES[family].interleaved)
    for length, unscaled in plain.items():
        ids = tokens(length)
        expected, got = logits(base, ids), logits(scaled, ids)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-3)
        assert (got - unscaled).abs().max() > 0.5, "the factors must matter for this test to mean anything"


@EACH_FAMILY
def test_a_factor_changes_its_own_layer_and_later_ones_only(family: str) -> None:
    base = make_base(family)
    ids = tokens(300)
    before = base(ids, output_hidden_states=True).hidden_states
    after = make_scaled(base, family, [1.0, 1.0, 2.0, 1.0])(ids, output_hidden_states=True).hidden_states
    assert len(before) == len(after) == 5
    assert [torch.equal(b, a) for b, a in zip(before, after, strict=True)] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("family", "rope"),
    [(family, "default") for family in TINY_FAMILIES]
    + [(family, rope) for family in PAIR for rope in ("yarn", "llama3")],
)
def test_cached_generation_equals_uncached(family: str, rope: str) -> None:
    scaled = make_scaled(make_base(family, rope), family, FACTORS, rope)
    ids = tokens(300)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached = scaled.generate(ids, use_cache=True, **options)
    uncached = scaled.generate(ids, use_cache=False, **options)
    assert cached.shape[1] == 312
    assert torch.equal(cached, uncached)


@EACH_FAMILY
def test_experts_are_computed_as_the_bases_are(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(transformers.PreTrainedModel, "_can_set_experts_implementation"):
        pytest.skip("this version computes experts in one way only")
    for head in ("Model", "ForCausalLM"):
        for known in scaled_class(family, head).__mro__:  # what classes have found out about themselves in other tests
            if "_can_set_experts_implementation_cached_value" in vars(known):
                monkeypatch.delattr(known, "_can_set_experts_implementation_cached_value")
    configs = [make_config(family, layer_rope_scaling=FACTORS) for _ in range(2)]
    bare, scaled = scaled_class(family, "Model")(configs[0]), scaled_class(family)(configs[1])
    assert bare.config._experts_implementation == scaled.config._experts_implementation
    assert scaled.config._experts_implementation == make_base(family).config._experts_implementation


@EACH_FAMILY
def test_left_padding_equals_single(family: str) -> None:
    scaled = make_scaled(make_base(family), family, FACTORS)
    short, long = tokens(290, seed=1), tokens(400, seed=2)
    padded = torch.cat((torch.zeros(1, 110, dtype=torch.long), short), dim=1)
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[0, :110] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = logits(scaled, torch.cat((padded, long)), attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(batch[0, 110:], logits(scaled, short)[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(batch[1], logits(scaled, long)[0], rtol=1e-3, atol=1e-3)
    # As people call it: positions are left to the model, and the cache holds the padding.
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generated = scaled.generate(torch.cat((padded, long)), attention_mask=mask, **options)
    assert torch.equal(generated[0, -4:], scaled.generate(short, **options)[0, -4:])


def decode_compiled(model: Any, ids: torch.Tensor, steps: int) -> tuple[torch.Tensor, int]:
    """Greedy decoding with a static cache under fullgraph compilation: the sequence, the graphs compiled."""
    graphs = 0

    def count(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    compiled: Any = torch.compile(model.forward, fullgraph=True, backend=count, dynamic=False)
    cache = StaticCache(config=model.config, max_batch_size=1, max_cache_len=64, device="cpu", dtype=torch.float32)
    # Renamed in transformers 5.24.
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    step, start, sequence = ids, 0, ids
    with torch.no_grad():
        for _ in range(steps):
            where = torch.arange(start, start + step.shape[1])
            out = compiled(step, position_ids=where[None], cache_position=where, use_cache=True, **{argument: cache})
            start += step.shape[1]
            step = out.logits[:, -1:].argmax(-1)
            sequence = torch.cat((sequence, step), dim=1)
    return sequence, graphs


@EACH_FAMILY
def test_static_cache_and_fullgraph_compile(family: str) -> None:
    # Tracing a layer takes half a second: two layers show what four would.
    base = make_base(family, **two_layers(family))
    scaled = make_scaled(base, family, FACTORS[:2], **two_layers(family))
    ids = tokens(40)
    try:
        sequence, graphs = decode_compiled(scaled, ids, steps=3)
    except torch._dynamo.exc.Unsupported:
        with pytest.raises(torch._dynamo.exc.Unsupported):
            decode_compiled(base, ids, steps=3)
        pytest.skip("the base model itself does not compile to one graph with these versions")
    assert torch.equal(sequence, scaled.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None))
    # Nothing is compiled again for a layer, or for a token: a graph for the prompt, and one for all tokens that follow.
    # Where a window slides, the base has more.
    assert graphs == 2 or graphs == decode_compiled(base, ids, steps=3)[1]


def test_torch_export_leaves_the_length_open() -> None:
    scaled = make_scaled(make_base("llama", **two_layers("llama")), "llama", FACTORS[:2], **two_layers("llama"))
    lengths: dict[str, Any] = {"input_ids": {1: torch.export.Dim("tokens", min=2, max=4096)}, "use_cache": None}
    example = {"input_ids": tokens(40), "use_cache": False}
    graph: Any = torch.export.export(scaled, (), example, dynamic_shapes=lengths).module()
    for length in (20, 300):
        out = graph(input_ids=tokens(length), use_cache=False).logits
        torch.testing.assert_close(out, logits(scaled, tokens(length)))


@pytest.mark.parametrize("length", [50, 300])
@EACH_FAMILY
def test_gradient_checkpointing_gives_the_same_loss_and_gradients(family: str, length: int) -> None:
    scaled = make_scaled(make_base(family), family, FACTORS).train()
    ids = tokens(length)

    def step() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        scaled.zero_grad()
        loss = scaled(ids, labels=ids).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in scaled.named_parameters()}

    loss, gradients = step()
    for reentrant in (False, True):
        scaled.gradient_checkpointing_enable({"use_reentrant": reentrant})
        scaled.enable_input_require_grads()
        again, checkpointed = step()
        torch.testing.assert_close(again, loss)
        for name, gradient in gradients.items():
            torch.testing.assert_close(checkpointed[name], gradient, msg=name)


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16()])
@EACH_FAMILY
def test_frequencies_survive_every_cast_in_float32(family: str, cast: Any) -> None:
    scaled = make_scaled(make_base(family), family, FACTORS)
    rotary = scaled.base_model.rotary_emb
    kinds = [kind for kind in ("full_attention", "sliding_attention") if hasattr(rotary, f"{kind}_inv_freq")]
    name = "_".join([*kinds[:1], "inv_freq"])
    buffers = {name: buffer.clone() for name, buffer in rotary.named_buffers()}
    cast(scaled)
    assert scaled.dtype in (torch.float16, torch.bfloat16)
    assert {name, "layer_rope_scaling"} <= set(buffers)
    for key, buffer in rotary.named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, buffers[key])
    # What a rounded frequency would get wrong: the table far into a prompt.
    shared = rotary(torch.zeros(1), torch.tensor([[6001]]), *kinds[:1])
    cos, _ = layer_rope_scaling.layer_tables(shared, 3, torch.float32)
    exact = torch.cos(6001.0 * buffers[name][1].double() / FACTORS[3])
    assert math.isclose(cos[0, 0, 2 if TINY_FAMILIES[family].interleaved else 1], exact, abs_tol=5e-3)


@pytest.mark.parametrize("tokens_in_call", [1, 256, 257, 3000])
def test_tables_made_at_once_and_on_demand_are_the_same(tokens_in_call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = make_scaled(make_base("llama"), "llama", FACTORS).base_model.rotary_emb
    positions = torch.arange(tokens_in_call)[None] + 17
    tables = []
    for few in (0, 10_000):
        monkeypatch.setattr(layer_rope_scaling, "FEW_TOKENS", few)
        shared = rotary(torch.zeros(1), positions)
        tables.append([layer_rope_scaling.layer_tables(shared, layer, torch.float32) for layer in range(4)])
    for on_demand, at_once in zip(*tables, strict=True):
        assert torch.equal(on_demand[0], at_once[0])
        assert torch.equal(on_demand[1], at_once[1])


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ([1.0, 1.0, 1.0], "got 3 of them"),
        ([1.0] * 5, "got 5 of them"),
        ([1.0, 0.0, 1.0, 1.0], "got 0.0 for layer 1"),
        ([1.0, 1.0, -2.0, 1.0], "got -2.0 for layer 2"),
        ([math.nan, 1.0, 1.0, 1.0], "got nan for layer 0"),
        ([1.0, 1.0, 1.0, math.inf], "got inf for layer 3"),
        ([1.0, "1.0", 1.0, 1.0], "got '1.0' for layer 1"),
        ([1.0, True, 1.0, 1.0], "got True for layer 1"),
        ("1.0", "got '1.0'"),
        (2.0, "got 2.0"),
    ],
)
@pytest.mark.parametrize("family", PAIR)
def test_bad_factors_are_refused_with_field_value_and_number_of_layers(family: str, factors: Any, said: str) -> None:
    with pytest.raises(ValueError, match="layer_rope_scaling must be a list of 4 positive finite numbers") as error:
        make_config(family, layer_rope_scaling=factors)
    assert said in str(error.value)


@EACH_FAMILY
def test_a_model_without_factors_is_refused_not_silently_plain(family: str) -> None:
    config = make_config(family, layer_rope_scaling=None)
    with pytest.raises(ValueError, match=r"layer_rope_scaling must be a list of 4 .* got None"):
        scaled_class(family)(config)


@EACH_FAMILY
def test_loading_keeps_factors_and_frequencies(family: str, tmp_path: Path) -> None:
    scaled = make_scaled(make_base(family), family, FACTORS)
    scaled.save_pretrained(tmp_path)
    ids = tokens(300)
    for options in ({}, {"torch_dtype": torch.bfloat16}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}):
        again = type(scaled).from_pretrained(tmp_path, **options)
        rotary = again.base_model.rotary_emb
        assert rotary.layer_rope_scaling.tolist() == again.config.layer_rope_scaling == FACTORS
        for name, buffer in scaled.base_model.rotary_emb.named_buffers():
            assert torch.equal(getattr(rotary, name), buffer), name
        if again.dtype == torch.float32:
            assert torch.equal(logits(again, ids), logits(scaled, ids))


@EACH_FAMILY
def test_layers_offloaded_to_disk_give_the_same_logits(family: str, tmp_path: Path) -> None:
    scaled = make_scaled(make_base(family), family, FACTORS)
    scaled.save_pretrained(tmp_path / "model")
    inside = scaled.base_model_prefix
    places: dict[str, Any] = {name: "cpu" for name, _ in scaled.named_children() if name != inside}
    places |= {f"{inside}.{name}": "cpu" for name, _ in scaled.base_model.named_children() if name != "layers"}
    places |= {f"{inside}.layers.{layer}": "cpu" if layer % 2 else "disk" for layer in range(4)}
    offloaded = type(scaled).from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "off")
    assert {parameter.device.type for parameter in offloaded.parameters()} == {"cpu", "meta"}
    for length in (20, 300):
        torch.testing.assert_close(logits(offloaded, tokens(length)), logits(scaled, tokens(length)))


@EACH_FAMILY
def test_a_device_map_never_splits_a_layer(family: str) -> None:
    from accelerate import infer_auto_device_map

    scaled = make_scaled(make_base(family), family, FACTORS)
    layer = scaled.base_model.layers[0]
    assert type(layer).__name__ in scaled._no_split_modules
    # Room for half of the model and half a layer more, which tempts whoever does not know that layers are whole.
    room = sum(parameter.nbytes for parameter in (*scaled.parameters(), *layer.parameters())) // 2
    places = infer_auto_device_map(scaled, {"cpu": room}, no_split_module_classes=list(scaled._no_split_modules))
    assert set(places.values()) == {"cpu", "disk"}
    assert not [name for name in places if ".layers." in name and not name.rpartition(".")[2].isdigit()]


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("family", PAIR)
def test_rope_settings_are_found_as_either_major_version_writes_them(family: str, theta: float) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    base = make_base(family, rope_theta=theta, rope_scaling=scaling)
    config_class = getattr(layer_rope_scaling, family_named(family).config)
    ids = tokens(300)
    for written in (
        {"rope_theta": theta, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": theta, "rope_scaling": {**scaling, "type": "linear"}},
        {"rope_parameters": {"rope_theta": theta, **scaling}},
    ):
        scaled = scaled_class(family)(config_class(layer_rope_scaling=[1.0] * 4, **TINY, **written)).eval()
        scaled.load_state_dict(base.state_dict())
        assert torch.equal(logits(scaled, ids), logits(base, ids)), written


def test_factors_can_be_changed_in_place() -> None:
    base = make_base("llama")
    scaled = make_scaled(base, "llama", [1.0] * 4)
    scaled.base_model.rotary_emb.set_layer_rope_scaling(FACTORS)
    ids = tokens(300)
    assert torch.equal(logits(scaled, ids), logits(make_scaled(base, "llama", FACTORS), ids))
    assert scaled.config.layer_rope_scaling == FACTORS


def test_kinds_of_layers_that_are_left_out_are_the_bases() -> None:
    base = make_base("gemma3_text")
    scaled = make_scaled(base, "gemma3_text", FACTORS, layer_rope_scaling_types=["sliding_attention"])
    alike = make_scaled(base, "gemma3_text", [1.0, 4.0, 1.0, 2.0])
    for length in (20, 300):
        ids = tokens(length)
        assert torch.equal(logits(scaled, ids), logits(alike, ids))
        assert not torch.allclose(logits(scaled, ids), logits(base, ids), atol=0.1)


@pytest.mark.parametrize("kinds", [["full"], [], ["full_attention", "all"]])
def test_kinds_of_layers_that_do_not_exist_are_refused(kinds: list[str]) -> None:
    with pytest.raises(ValueError, match=r"must name some of \['full_attention', 'sliding_attention'\]; got"):
        make_config("gemma3_text", layer_rope_scaling=FACTORS, layer_rope_scaling_types=kinds)


def test_gemma3_says_which_transformers_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    # As versions 4.50 to 4.56 have it: no kinds of layers in its rotary embedding, and no classifier.
    library = importlib.import_module("transformers.models.gemma3.modeling_gemma3")
    monkeypatch.setattr(library.Gemma3RotaryEmbedding, "forward", lambda self, x, position_ids: None)
    monkeypatch.delattr(library, "Gemma3TextForSequenceClassification")
    ours = "lpes_bake.modeling.modeling_lpes_gemma3_text"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    with pytest.raises(ImportError, match="needs transformers 5"):
        importlib.import_module(ours)


WINDOWS: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_moe": {"use_sliding_window": True, "max_window_layers": 2},
    "smollm3": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
    **{family: {} for family in ("mistral", "mixtral", "phi3", "gemma2", "gemma3_text")},
}


@pytest.mark.parametrize("family", WINDOWS)
def test_sliding_windows_stay_on_the_layers_that_have_them(family: str) -> None:
    ids = tokens(300)
    seen = []
    # A window of 8,192 tokens hides nothing.
    for window in (64, 8192):
        changes = {**WINDOWS[family], "sliding_window": window}
        base = make_base(family, **changes)
        seen.append(logits(base, ids))
        scaled = make_scaled(base, family, [1.0] * 4, **changes)
        assert torch.equal(seen[-1], logits(scaled, ids))
        kinds = [getattr(layer, "attention_type", None) for layer in base.base_model.layers]
        assert kinds == [getattr(layer, "attention_type", None) for layer in scaled.base_model.layers]
    if transformers.__version__ >= "4.5":  # older versions ignore the window here
        assert not torch.equal(*seen)


@EACH_FAMILY
def test_lora_adapters_train_and_reload(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    small = two_layers(family)
    scaled = make_scaled(make_base(family, **small), family, FACTORS[:2], **small)
    plain = logits(scaled, ids := tokens(300))
    tuned, tuned_base = (
        peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
        for model in (scaled, make_base(family, **small))
    )
    # The experts of a mixture, too.
    assert peft.get_peft_model_state_dict(tuned).keys() == peft.get_peft_model_state_dict(tuned_base).keys()
    # Adam's steps are as large whatever a family's gradients are.
    optimizer = torch.optim.Adam(tuned.parameters(), lr=1e-2)
    for _ in range(2):
        tuned(ids, labels=ids).loss.backward()
        optimizer.step()
    tuned.save_pretrained(tmp_path)
    again = make_scaled(make_base(family, **small), family, FACTORS[:2], **small)
    again = peft.PeftModel.from_pretrained(again, tmp_path)
    assert torch.equal(logits(again.eval(), ids), logits(tuned.eval(), ids))
    assert not torch.allclose(logits(again, ids), plain, atol=1e-2)


@pytest.mark.parametrize(
    ("family", "head"),
    [(family, head) for family in TINY_FAMILIES for head in family_named(family).heads if head != "ForCausalLM"],
)
def test_other_heads_are_the_base_with_factors_of_one_and_differ_with_others(family: str, head: str) -> None:
    base = make_base(family, head=head)
    ids = tokens(300)
    with torch.no_grad():
        expected = base(ids)[0]
        assert torch.equal(make_scaled(base, family, [1.0] * 4, head=head)(ids)[0], expected)
        assert not torch.allclose(make_scaled(base, family, FACTORS, head=head)(ids)[0], expected, atol=0.1)


@EACH_FAMILY
def test_a_model_has_what_vllm_asks_of_it(family: str) -> None:
    """What its backend for transformers' models reads, as its documentation of custom models lists it."""
    base = make_base(family)
    config = make_config(family, layer_rope_scaling=FACTORS)
    with torch.device("meta"):
        scaled = scaled_class(family)(config)
    assert {parameter.device.type for parameter in scaled.parameters()} == {"meta"}
    assert type(scaled).__name__.endswith("ForCausalLM")
    assert getattr(scaled, "_supports_attention_backend", None) == getattr(base, "_supports_attention_backend", None)
    assert getattr(config, "base_model_tp_plan", None) == getattr(base.config, "base_model_tp_plan", None)
    attentions = [module for module in scaled.modules() if type(module).__name__.endswith("Attention")]
    # The base's own, as their source is read for the call of the attention interface.
    assert {type(module) for module in attentions} == {
        type(module) for module in base.modules() if type(module).__name__.endswith("Attention")
    }
    assert [module.layer_idx for module in attentions] == [0, 1, 2, 3]
    # It leaves out the model's own forward, and does to the head's logits what these fields of a config say.
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = base(ids).logits
        logits = base.get_output_embeddings()(base.base_model(ids).last_hidden_state)
    logits = logits * getattr(config, "logit_scale", 1.0)
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = (logits / cap).tanh() * cap
    torch.testing.assert_close(logits, expected)


def test_shipped_files_import_torch_transformers_and_one_another_only() -> None:
    import ast

    assert layer_rope_scaling.__file__ is not None
    folder = Path(layer_rope_scaling.__file__).parent
    for name in {name for family in FAMILIES for name in family.files}:
        source = (folder / name).read_text()
        names = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                assert node.id not in {"open", "exec", "eval", "compile", "__import__", "input", "print"}, name
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add("." if node.level else str(node.module).split(".")[0])
        assert names <= {
            "__future__",
            "collections",
            "functools",
            "importlib",
            "inspect",
            "math",
            "sys",
            "typing",
            "torch",
            "transformers",
            ".",
        }
        header = source.split('"""')[1]
        for part in ("What this does", "arXiv 2606.27705", "How to get the base model back"):
            assert part in header


def test_the_shared_file_refers_to_no_module_that_cannot_be_sent_by_value() -> None:
    # vLLM sends a config's class to its workers with all that it refers to; transformers, a lazy module, arrives empty.
    modules = {name for name, value in vars(layer_rope_scaling).items() if isinstance(value, ModuleType)}
    assert modules == {"math", "torch", "nn"}
