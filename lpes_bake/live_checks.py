"""The script that `verify` runs in fresh processes: loads a baked directory as any user would, and tests it.

The parts, a process each: "directory" and "copy" are what transformers makes of it and of what it saves; "greedy"
leaves what transformers generates to "vllm" and "vllm-compiled", which compare.

It is never imported by the package: `verify` starts it by its path. Nothing of lpes_bake can be
imported here (the first lines see to that), so what passes here works for people who never heard of
it. The reference model below is written by hand for this purpose and shares no code with the files
in the checkpoint.

Standard output carries one JSON object a line and nothing else:
{"doing": what starts now} or {"name": check, "status": "pass" | "fail" | "skip", "reason": one line}.
"""

from __future__ import annotations

import argparse
import gc
import importlib.abc
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class NoLpesBake(importlib.abc.MetaPathFinder):
    """Refuses lpes_bake, whichever way it is installed: as a folder, a link, or an import hook."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        """Raise for our own package, and leave all others to the finders that follow."""
        if fullname.partition(".")[0] == "lpes_bake":
            raise ModuleNotFoundError(f"{fullname}: a baked checkpoint must load without it", name=fullname)


# Python puts the script's own folder first on the path: it holds nothing that a user would have.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
sys.meta_path.insert(0, NoLpesBake())

# Whatever a library prints goes to stderr; stdout is for the results.
RESULTS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

NEW_TOKENS = 16
# How many of the last positions are compared: each of them attends to the whole prompt.
COMPARED_POSITIONS = 64
# The long prompt is read twice only, by the loaded model and by the reference: this is what costs.
# All else is told from its first tokens.
SHORT_PROMPT = 256
# Largest difference allowed, as a share of the logits' standard deviation. In float32 the two
# implementations differ by rounding only; in 16 bits one unit in the last place is 1/256.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
TOKENIZER_SAMPLE = "The pass-key is 49152.\n  Què diu?  def f(x):\treturn x  # 位置"


def say(**message: Any) -> None:
    """One line of results."""
    RESULTS.write(json.dumps(message) + "\n")


def result(name: str, passed: bool | None, reason: str) -> None:
    """One check's outcome; None means that it was skipped."""
    say(name=name, status={True: "pass", False: "fail", None: "skip"}[passed], reason=reason)


def one_line(error: Exception) -> str:
    """What went wrong, without the lines that follow."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def attempt(name: str, check: Callable[[], tuple[bool | None, str]]) -> bool:
    """Run one check; an exception inside it is its failure. True unless it failed."""
    say(doing=name)
    try:
        passed, reason = check()
    except Exception as error:
        traceback.print_exc()
        passed, reason = False, one_line(error)
    result(name, passed, reason)
    return passed is not False


class Settings:
    """What the command line asked for, and what follows from the directory's config.json."""

    def __init__(self, directory: str, device: str, dtype: str, prompt_tokens: int) -> None:
        import torch
        from transformers import AutoConfig

        self.directory = directory
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        self.device = device
        self.config = json.loads(Path(directory, "config.json").read_text(encoding="utf-8"))
        self.architecture: str = self.config["architectures"][0]
        self.head = next(h for h in ("ForCausalLM", "ForSequenceClassification", "Model") if h in self.architecture)
        self.auto_class = {"Model": "AutoModel"}.get(self.head, f"AutoModel{self.head}")
        self.factors: list[float] = self.config["layer_rope_scaling"]
        self.quantized = "quantization_config" in self.config
        # A quantised model computes in the dtype that it was made for.
        self.dtype = "auto" if self.quantized else getattr(torch, dtype)
        self.tolerance = TOLERANCE["bfloat16" if self.quantized else dtype]
        generator = torch.Generator().manual_seed(0)
        # What config.json leaves out is as the base model's class has it.
        self.known = known = {
            **AutoConfig.for_model(self.config["model_type"].removeprefix("lpes_")).to_dict(),
            **self.config,
        }
        self.positions = int(known["max_position_embeddings"])
        length = min(prompt_tokens, self.positions)
        self.prompt = torch.randint(0, int(known["vocab_size"]), (1, length), generator=generator)
        self.short = self.prompt[:, :SHORT_PROMPT]
        # One on each side of the length up to which a model makes the tables of all its layers at once.
        self.neutral_prompts = (self.short, self.prompt[:, : 2 * SHORT_PROMPT])
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        # Beyond these positions longrope and dynamic change all frequencies, and cached keys keep the old ones:
        # there the base model's ways with and without a cache differ too.
        limit = min(self.positions, int(rope.get("original_max_position_embeddings") or 1 << 30))
        self.generates_after = max(1, limit - NEW_TOKENS)

    def cache_bytes(self, length: int) -> int:
        """Memory for the keys and values of some prompts of `length` tokens, with room to spare."""
        values = 2 * length * int(self.known["num_hidden_layers"]) * int(self.known["hidden_size"])
        return max(256 << 20, 2 * 4 * values)

    def load(self, auto_class: str, directory: str | None = None) -> Any:
        """Plain from_pretrained, as in the model card. Returns (model, loading info)."""
        import transformers

        model, info = getattr(transformers, auto_class).from_pretrained(
            directory or self.directory,
            trust_remote_code=True,
            torch_dtype=self.dtype,
            output_loading_info=True,
            **({"device_map": self.device} if self.quantized else {}),
        )
        return (model if self.quantized else model.to(self.device)).eval(), info

    def outputs(self, model: Any, prompt: Any) -> Any:
        """The first output (logits, or hidden states of a bare model) at the prompt's last positions, in float32."""
        import inspect

        import torch

        # Its name until transformers 4.49 was num_logits_to_keep; full logits of a long prompt are gigabytes.
        known = inspect.signature(model.forward).parameters
        keep = {name: COMPARED_POSITIONS for name in ("logits_to_keep", "num_logits_to_keep") if name in known}
        with torch.no_grad():
            output = model(input_ids=prompt.to(self.device), use_cache=False, **keep)[0]
        return output.float().cpu() if output.dim() == 2 else output[:, -COMPARED_POSITIONS:].float().cpu()


def reference_model(settings: Settings) -> Any:
    """The base model's own class on the same weights, all its layers rotating as the base does."""
    import transformers

    base_type = settings.config["model_type"].removeprefix("lpes_")
    ours = ("model_type", "architectures", "auto_map", "layer_rope_scaling", "layer_rope_scaling_types")
    config_dict = {key: value for key, value in settings.config.items() if key not in ours}
    if base_type == "qwen3_moe" and "num_local_experts" in config_dict:
        # Older base classes would overlook this new name, and take their default.
        config_dict["num_experts"] = config_dict["num_local_experts"]
    if transformers.__version__.startswith("4.") and config_dict.get("rope_parameters"):
        # Version 4's base class would overlook what version 5 wrote, and take its default theta.
        rope = dict(config_dict.pop("rope_parameters"))
        for new, neox in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
            if new in rope:
                config_dict[neox if base_type == "gpt_neox" else new] = rope.pop(new)
        config_dict["rope_scaling"] = rope if rope.get("rope_type") != "default" else None
    config = transformers.AutoConfig.for_model(base_type, **config_dict)
    model_class = getattr(transformers, settings.architecture.removeprefix("Lpes"))
    model = model_class.from_pretrained(
        settings.directory,
        config=config,
        torch_dtype=settings.dtype,
        **({"device_map": settings.device} if settings.quantized else {}),
    )
    return (model if settings.quantized else model.to(settings.device)).eval()


def scale_by_hand(model: Any, factors: Sequence[float]) -> list[Any]:
    """Replace the rotary table that each decoder layer of a base model is given by one with m / s_h for m.

    Returns the hooks' handles: removing them gives the base model back.

    The table is the base model's own, asked for again with divided frequencies: the layout that its attention
    wants (halves, neighbours, a part of the dimensions) and its RoPE type's attention scaling come with it.
    """
    import inspect

    import torch

    rotary = model.base_model.rotary_emb
    # Underneath its decorators, which would compute the frequencies of dynamic and longrope anew.
    table = inspect.unwrap(type(rotary).forward)

    def give_own_table(layer: int) -> Callable[..., Any]:
        # Gemma 3 has a table for each kind of layers, and wants to be told which.
        kind = [model.config.layer_types[layer]] if isinstance(rotary.rope_type, dict) else []
        name = "_".join([*kind, "inv_freq"])

        def before_forward(module: Any, args: Any, kwargs: Any) -> Any:
            hidden_states = args[0] if args else kwargs["hidden_states"]
            positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
            frequencies = getattr(rotary, name)
            setattr(rotary, name, frequencies.float() / factors[layer])
            with torch.no_grad():
                kwargs = {**kwargs, "position_embeddings": table(rotary, hidden_states, positions, *kind)}
            setattr(rotary, name, frequencies)
            return args, kwargs

        return before_forward

    layers = model.base_model.layers
    return [layers[h].register_forward_pre_hook(give_own_table(h), with_kwargs=True) for h in range(len(factors))]


def difference(a: Any, b: Any) -> float:
    """Largest absolute difference, as a share of b's standard deviation; infinite where not comparable."""
    if a.shape != b.shape or not bool(a.isfinite().all()):
        return float("inf")
    return float((a - b).abs().max() / b.std())


def check_cached_generation(settings: Settings, model: Any) -> tuple[bool | None, str]:
    """Greedy tokens with the key-value cache equal those without; a near-tie may fall either way."""
    from transformers import GenerationConfig

    if settings.head != "ForCausalLM":
        return None, f"{settings.architecture} does not generate"
    prompt = settings.short[:, : settings.generates_after].to(settings.device)
    ways = []
    for use_cache in (True, False):
        greedy = GenerationConfig(
            do_sample=False,
            use_cache=use_cache,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ways.append(model.generate(prompt, generation_config=greedy, attention_mask=prompt.new_ones(prompt.shape)))
    cached, uncached = ways
    new = [way.sequences[0, prompt.shape[1] :].tolist() for way in ways]
    for step, (a, b) in enumerate(zip(cached.logits, uncached.logits, strict=True)):
        apart = difference(a.float(), b.float())
        if apart > settings.tolerance:
            return False, f"logits differ by {apart:.1e} standard deviations at new token {step + 1}"
        if new[0][step] != new[1][step]:
            return True, f"equal up to a tie at new token {step + 1} of {NEW_TOKENS}, after {prompt.shape[1]} tokens"
    return True, f"{NEW_TOKENS} greedy tokens after {prompt.shape[1]} are the same with and without the cache"


def neutral_outputs(settings: Settings, model: Any) -> list[Any]:
    """The outputs with all factors 1, for each of the neutral prompts; the model gets its own factors back."""
    rotary = model.base_model.rotary_emb
    rotary.set_layer_rope_scaling([1.0] * len(settings.factors))
    outputs = [settings.outputs(model, prompt) for prompt in settings.neutral_prompts]
    rotary.set_layer_rope_scaling(settings.factors)
    return outputs


def check_reference(settings: Settings, outputs: Any, neutral: list[Any]) -> tuple[bool | None, str]:
    """The loaded model computes what scaled RoPE computes; with factors of 1, the base model's very bits."""
    model = reference_model(settings)
    base, base_longer = (settings.outputs(model, prompt) for prompt in settings.neutral_prompts)
    apart = max(difference(neutral[0], base), difference(neutral[1], base_longer))
    # Two runs of one model may round differently on a GPU, or through a quantisation's kernels.
    if apart > (0.0 if settings.device == "cpu" and not settings.quantized else settings.tolerance):
        return False, f"with factors of 1, outputs {apart:.1e} standard deviations from the base model's"
    factors = settings.factors
    if kinds := settings.config.get("layer_rope_scaling_types"):
        factors = [f if k in kinds else 1.0 for f, k in zip(factors, model.config.layer_types, strict=True)]
    hooks = scale_by_hand(model, factors)
    effect = difference(base, settings.outputs(model, settings.short))
    error = difference(outputs, settings.outputs(model, settings.prompt))
    what = (
        f"outputs {error:.1e} standard deviations from a hand-written reference, on {settings.prompt.shape[1]} tokens"
    )
    if error > settings.tolerance:
        for hook in hooks:
            hook.remove()
        ignored = difference(outputs, settings.outputs(model, settings.prompt)) <= settings.tolerance
        return False, f"{what}; at most {settings.tolerance:g} allowed" + ("; the factors are ignored" * ignored)
    what += "; with factors of 1, " + ("the base model's bits" if apart == 0 else f"{apart:.1e} from the base model")
    if all(factor == 1.0 for factor in settings.factors):
        return True, f"{what}; all factors are 1"
    if effect <= 10 * error:
        return False, f"{what}; the base model is no further away ({effect:.1e}): the factors change nothing"
    return True, f"{what}; without the factors {effect:.1e}"


def check_refusal(settings: Settings) -> tuple[bool | None, str]:
    """Whoever does not trust the directory's code gets an error, never the base model without its factors."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(settings.directory, trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        return True, "without trust_remote_code it does not load"
    return False, f"loads as {type(config).__name__} without trust_remote_code, and the factors are ignored"


def check_bare_model(settings: Settings, hidden: Any) -> tuple[bool | None, str]:
    """AutoModel gives the same hidden states as the model with its head."""
    model, _ = settings.load("AutoModel")
    same = difference(settings.outputs(model, settings.short), hidden) <= settings.tolerance
    return same, f"AutoModel gives {type(model).__name__}" + ("" if same else ", but other hidden states")


def check_tokenizer(settings: Settings) -> tuple[bool | None, str]:
    """AutoTokenizer finds, for the new model_type, the tokenizer that it finds for the base's."""
    from transformers import AutoConfig, AutoTokenizer

    if not any(Path(settings.directory).glob("tokenizer*")) and not any(Path(settings.directory).glob("vocab*")):
        return None, "no tokenizer files in the directory"
    base_config = AutoConfig.for_model(settings.config["model_type"].removeprefix("lpes_"))
    try:
        base = AutoTokenizer.from_pretrained(settings.directory, config=base_config, trust_remote_code=True)
    except Exception as error:
        return None, f"the base model's own does not load here either: {one_line(error)}"
    tokenizer = AutoTokenizer.from_pretrained(settings.directory, trust_remote_code=True)
    ids = tokenizer(TOKENIZER_SAMPLE)["input_ids"]
    if ids != base(TOKENIZER_SAMPLE)["input_ids"]:
        return False, f"{type(tokenizer).__name__} gives other tokens than the base model's {type(base).__name__}"
    return True, f"{type(tokenizer).__name__} gives the base model's tokens"


def save_copy(settings: Settings, model: Any, copy: Path) -> str | None:
    """save_pretrained into `copy`. Returns why not, when there is no room."""
    from transformers import GenerationConfig

    needed = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    free = shutil.disk_usage(copy.parent).free
    if free < needed * 1.05:
        return (
            f"no room for a copy: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free in {copy.parent} (set TMPDIR)"
        )
    # Some bases ship a generation_config.json that save_pretrained refuses (Vicuna's). It is carried
    # over as it is, and its flaws are no fault of the bake.
    model.generation_config = GenerationConfig()
    model.save_pretrained(copy)
    return None


def check_directory(settings: Settings, scratch: Path) -> None:
    """All checks on the directory itself; leaves a saved copy and its expected outputs in `scratch`."""
    import torch

    loaded: list[Any] = []

    def load() -> tuple[bool, str]:
        model, info = settings.load(settings.auto_class)
        loaded.append(model)
        missing = sorted(info["missing_keys"])
        # Old Llama checkpoints store this buffer; transformers recomputes it.
        unexpected = sorted(key for key in info["unexpected_keys"] if not key.endswith("rotary_emb.inv_freq"))
        if type(model).__name__ != settings.architecture:
            return False, f"config.json promises {settings.architecture}, got {type(model).__name__}"
        if list(getattr(model.config, "layer_rope_scaling", None) or []) != settings.factors:
            return False, f"config.layer_rope_scaling is lost in loading: {model.config.layer_rope_scaling!r}"
        if missing or unexpected:
            return False, f"weights do not fit: missing {missing[:3]}, unexpected {unexpected[:3]}"
        if any(name.partition(".")[0] == "lpes_bake" for name in sys.modules):
            return False, "loading imported lpes_bake"
        return True, f"{settings.auto_class} gives {settings.architecture} where lpes_bake cannot be imported"

    attempt("refusal", lambda: check_refusal(settings))
    if not attempt("loads", load):
        return
    say(doing="outputs of the loaded model")
    neutral = neutral_outputs(settings, loaded[0])
    outputs = settings.outputs(loaded[0], settings.prompt)
    hidden = settings.outputs(loaded[0].base_model, settings.short)
    attempt("generation", lambda: check_cached_generation(settings, loaded[0]))
    say(doing="save")
    try:
        no_room = save_copy(settings, loaded[0], scratch / "copy")
        if no_room:
            result("save and reload", None, no_room)
        else:
            torch.save(settings.outputs(loaded[0], settings.short), scratch / "outputs.pt")
    except Exception as error:
        traceback.print_exc()
        # transformers 5 saves no bitsandbytes weights that it has loaded, of any model.
        kept = settings.quantized and isinstance(error, NotImplementedError)
        why = "this transformers cannot save weights of this quantisation" if kept else one_line(error)
        result("save and reload", None if kept else False, f"save_pretrained: {why}")
    # One model in memory at a time: these may be large.
    loaded.clear()
    gc.collect()
    attempt("reference", lambda: check_reference(settings, outputs, neutral))
    gc.collect()
    attempt("bare model", lambda: check_bare_model(settings, hidden))
    attempt("tokenizer", lambda: check_tokenizer(settings))


def tensor_names(directory: Path) -> set[str]:
    """The tensors in a directory's files of weights."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


def check_copy(settings: Settings, scratch: Path) -> None:
    """The saved copy, in a process of its own: same outputs, and nothing lost from its config."""
    import torch

    def reload() -> tuple[bool, str]:
        saved = json.loads((scratch / "copy" / "config.json").read_text(encoding="utf-8"))
        if saved.get("layer_rope_scaling") != settings.factors:
            return False, f"the saved config.json has layer_rope_scaling {saved.get('layer_rope_scaling')!r}"
        auto_map = saved.get("auto_map") or {}
        if any("--" in str(target) for target in auto_map.values()):
            return False, f"the saved auto_map points to another repository: {auto_map}"
        lost = [key for key in settings.config["auto_map"] if key not in auto_map]
        if lost:
            return False, f"the saved auto_map lost {', '.join(lost)}"
        model, info = settings.load(settings.auto_class, str(scratch / "copy"))
        twice = tensor_names(scratch / "copy") - tensor_names(Path(settings.directory))
        if info["missing_keys"] or twice:
            return (
                False,
                f"the saved weights lack {sorted(info['missing_keys'])[:3]}, and have {sorted(twice)[:3]} besides",
            )
        expected = torch.load(scratch / "outputs.pt", weights_only=True)
        apart = difference(settings.outputs(model, settings.short), expected)
        return apart <= settings.tolerance, f"a copy from save_pretrained gives outputs {apart:.1e} from the original's"

    attempt("save and reload", reload)


def check_greedy(settings: Settings, scratch: Path) -> None:
    """Leave in `scratch` what transformers generates after the long prompt, and how sure the base model is of that."""
    import torch
    from transformers import GenerationConfig

    def greedy() -> tuple[bool | None, str]:
        if settings.head != "ForCausalLM":
            return None, f"{settings.architecture} does not generate"
        prompt = settings.prompt[:, : settings.generates_after].to(settings.device)
        model, _ = settings.load(settings.auto_class)
        # Without the checkpoint's own settings of sampling, penalties and ends.
        model.generation_config = GenerationConfig()
        once = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
        sequence = model.generate(prompt, generation_config=once, attention_mask=prompt.new_ones(prompt.shape))
        new = sequence[0, prompt.shape[1] :].cpu()
        logits = settings.outputs(model, sequence[:, :-1])[0, -NEW_TOKENS:]
        del model
        gc.collect()
        base = settings.outputs(reference_model(settings), sequence[:, :-1])[0, -NEW_TOKENS:]
        torch.save({"prompt": prompt[0].cpu(), "new": new, "logits": logits, "base": base}, scratch / "greedy.pt")
        others = "the same" if torch.equal(base.argmax(-1), new) else "others"
        return True, f"{NEW_TOKENS} after {prompt.shape[1]} in transformers; without the factors {others}"

    attempt("greedy tokens", greedy)


def check_vllm(settings: Settings, scratch: Path, compiled: bool) -> None:
    """vLLM generates the tokens that transformers does and is as sure of each; a near-tie may fall either way."""
    import torch

    def same() -> tuple[bool | None, str]:
        from vllm import LLM, SamplingParams

        wanted = torch.load(scratch / "greedy.pt", weights_only=True)
        prompt, new = wanted["prompt"].tolist(), wanted["new"].tolist()
        logits, plain = wanted["logits"], wanted["base"]
        length = len(prompt) + NEW_TOKENS
        llm = LLM(
            settings.directory,
            trust_remote_code=True,
            dtype="auto" if settings.quantized else str(settings.dtype).removeprefix("torch."),
            max_model_len=length,
            max_num_seqs=4,
            kv_cache_memory_bytes=settings.cache_bytes(length),
            enforce_eager=not compiled,
        )
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
        output = llm.generate([{"prompt_token_ids": prompt}], sampling)[0].outputs[0]
        found = list(output.token_ids)
        # What follows another token is not comparable.
        steps = next((k + 1 for k in range(NEW_TOKENS) if found[k] != new[k]), NEW_TOKENS)
        chosen = torch.arange(steps), torch.tensor(found[:steps])
        spread = float(logits.std())
        behind = float(logits[steps - 1].max() - logits[steps - 1, found[steps - 1]]) / spread
        if behind > settings.tolerance:
            ignored = ", the base model's: the factors are ignored" * (found[steps - 1] == plain[steps - 1].argmax())
            return False, f"other tokens than transformers' from new token {steps} on{ignored}"
        logprobs = torch.tensor([output.logprobs[k][found[k]].logprob for k in range(steps)])
        expected, base = (one.log_softmax(-1)[chosen] for one in (logits, plain))
        error, effect = (float((one - expected).abs().max()) / spread for one in (logprobs, base))
        tie = f", up to a tie at new token {steps}" * (found != new)
        what = f"transformers' {NEW_TOKENS} greedy tokens after {len(prompt)}{tie}, log-probabilities {error:.1e} apart"
        if error > settings.tolerance:
            return False, f"{what}; at most {settings.tolerance:g} allowed"
        if any(factor != 1.0 for factor in settings.factors) and effect <= 10 * error:
            return None, f"{what}; the base model's are {effect:.1e} away, too near to tell: try --dtype float32"
        return True, f"{what}; without the factors {effect:.1e}"

    attempt("vLLM, compiled" if compiled else "vLLM", same)


def main() -> None:
    """Parse what `verify` asks for and run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["directory", "copy", "greedy", "vllm", "vllm-compiled"])
    parser.add_argument("directory")
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    arguments = parser.parse_args()
    settings = Settings(arguments.directory, arguments.device, arguments.dtype, arguments.prompt_tokens)
    if arguments.part.startswith("vllm"):
        check_vllm(settings, arguments.scratch, compiled=arguments.part == "vllm-compiled")
    else:
        parts = {"directory": check_directory, "copy": check_copy, "greedy": check_greedy}
        parts[arguments.part](settings, arguments.scratch)


if __name__ == "__main__":
    main()
