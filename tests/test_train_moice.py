"""Training MoICE's routers: the published losses; only gates learn; a training that was stopped comes to the same."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lpes_bake.baselines.moice import MoICE, Router, load_moice, new_routers
from lpes_bake.baselines.moice_settings import MoICESettings
from lpes_bake.baselines.moice_training import losses, switch_loss, text_of, train_moice
from lpes_bake.baselines.rotary import BASES
from lpes_bake.search.errors import InputError
from lpes_bake.search.jsonl import Row
from tests.conftest import write_tiny
from tests.runs import Command, digests, invoke, one_line

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "rope_theta": 10000.0}
OPTIONS = ("--steps", 3, "--sequences", 4, "--learning-rate", 0.01, "--top-k", 2, "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("moice") / "small", "llama", **SMALL)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moice") / "data.jsonl"
    rows: list[dict[str, Any]] = [{"text": f"Row {number} of a text that goes on." * 2} for number in range(6)]
    rows += [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}"}]}
        for n in range(4)
    ]
    rows += [
        {"conversations": [{"from": "human", "value": f"Say {n}."}, {"from": "gpt", "value": f"{n}"}]} for n in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(model: Path, data: Path, out: Path, *options: object) -> dict[str, Any]:
    done = invoke("train-moice", model, data, "--out", out, "--json", *OPTIONS, *options)
    assert done.exit_code == 0, done.output
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def sequence() -> torch.Tensor:
    return torch.randint(3, 256, (1, 30), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("top_k", "checkpointing"), [(2, False), (2, True), (7, False)])
def test_the_losses_are_the_published_ones(top_k: int, checkpointing: bool, model: Path) -> None:
    library = AutoModelForCausalLM.from_pretrained(model).eval().requires_grad_(False)
    moice = MoICE(library, new_routers(library.config, 7), BASES, top_k)
    gates = list(moice.routers.parameters())
    settings = MoICESettings(top_k=top_k, sequences=2, balance=0.3)
    language, balance = losses(moice, sequence(), settings, checkpointing=checkpointing)
    found = [gate.grad for gate in gates]
    # A second pass, of which the language-model loss is transformers' own, and the balancing loss is added up over all
    # tokens and heads of all layers, one by one.
    seen: list[torch.Tensor] = []
    for router in moice.routers:
        router.register_forward_hook(lambda module, args, logits: seen.append(logits))
    library_loss = library(sequence(), labels=sequence(), use_cache=False).loss
    rows = torch.cat([logits.flatten(0, -2) for logits in seen])
    counts, sums = [0] * 7, torch.zeros(7)
    for row in rows:
        sums = sums + row.softmax(-1)
        for expert in row.argsort(descending=True)[:top_k].tolist():
            counts[expert] += 1
    switch = 7 * (torch.tensor(counts) / len(rows) * sums / len(rows)).sum()
    assert language == pytest.approx(library_loss.item(), abs=1e-5)
    assert balance == pytest.approx(switch.item(), abs=1e-4)
    # The gradient is that of their sum, for this sequence's share of a step.
    wanted = torch.autograd.grad((library_loss + 0.3 * switch) / 2, gates)
    for got, one in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-3, atol=1e-6)


def test_with_all_experts_in_the_top_k_the_balancing_loss_is_a_constant() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = switch_loss([(torch.ones(7), logits.softmax(-1).mean(0))])
    assert float(loss.detach()) == pytest.approx(7.0)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.abs().max() < 1e-6


def test_training_moves_all_gates_and_writes_routers_that_load(model: Path, data: Path, tmp_path: Path) -> None:
    record = train(model, data, tmp_path / "out")
    assert len(record["loss_by_step"]) == 3 and record["bases"] == list(BASES)
    library = AutoModelForCausalLM.from_pretrained(model).eval()
    before = dict(new_routers(library.config, 7).named_parameters())
    after = load_file(tmp_path / "out" / "routers.safetensors")
    assert after.keys() == before.keys()
    # Adam's first steps are as long as the learning rate, so all gates have moved, and not far.
    for name, gate in after.items():
        moved = (gate - before[name]).abs()
        assert 0.005 < moved.mean() < 0.03, name
    moice = load_moice(library, tmp_path / "out")
    assert moice.top_k == 2 and all(torch.equal(gate, after[name]) for name, gate in moice.routers.named_parameters())
    assert isinstance(moice.routers[0], Router)
    shown = invoke("train-moice", model, data, "--out", tmp_path / "again", *OPTIONS)
    assert shown.exit_code == 0 and f"written: {tmp_path / 'again'}" in shown.stdout and "step 3: " in shown.stdout
    assert digests(tmp_path / "again")["routers.safetensors"] == digests(tmp_path / "out")["routers.safetensors"]


def test_repeated_training_on_one_text_lowers_its_loss(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"text": "The same text again and again, as it was."}) + "\n")
    path.write_text(path.read_text() * 12)
    record = train(
        model, path, tmp_path / "out", "--sequences", 1, "--steps", 12, "--learning-rate", 0.05, "--balance", 0
    )
    losses = [step["language"] for step in record["loss_by_step"]]
    assert losses[-1] < losses[0] - 1e-3


def test_a_training_stopped_within_a_step_goes_on_to_the_same_routers(model: Path, data: Path, tmp_path: Path) -> None:
    train(model, data, tmp_path / "whole")
    out = tmp_path / "stopped"
    words = ("train-moice", model, data, "--out", out, *OPTIONS)

    def stop(done: int, loss: float) -> None:
        if done == 6:
            raise KeyboardInterrupt

    settings = MoICESettings(steps=3, sequences=4, learning_rate=0.01, top_k=2)
    with pytest.raises(KeyboardInterrupt):
        train_moice(str(model), data, out, settings, device="cpu", on_progress=stop)
    assert not (out / "routers.safetensors").exists()
    assert "is not empty; go on with what is there by --resume" in one_line(invoke(*words))
    other = one_line(invoke(*words, "--resume", "--seed", 3))
    assert "is a training with other settings (seed: 0 → 3)" in other
    # A model that has changed in its place is another one, too.
    changed = Path(shutil.copytree(model, tmp_path / model.name))
    weights = load_file(changed / "model.safetensors")
    weights["lm_head.weight"] *= 2
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    other = one_line(invoke("train-moice", changed, *words[2:], "--resume"))
    assert "is a training with other settings (weights: " in other
    train(model, data, out, "--resume")
    whole, resumed = (digests(folder) for folder in (tmp_path / "whole", out))
    assert whole["routers.safetensors"] == resumed["routers.safetensors"]
    assert whole["training.json"] == resumed["training.json"]


def test_a_full_disk_is_said_in_one_line_and_a_mended_training_goes_on(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("train-moice", model, data, "--out", out, "--device", "cpu", *OPTIONS)
    train(model, data, out)
    routers = (out / "routers.safetensors").read_bytes()
    state = next(out.glob("*.pt"))
    (out / "routers.safetensors").unlink()
    for name, others in (("routers.safetensors", ["--resume"]), (state.name, [])):
        assert state.stat().st_size > 1000 and len(routers) > 1000
        if not others:
            shutil.rmtree(out)
        command = Command(tmp_path, *words, *others)
        command.fill_disk(1000)
        code, _, errors = command.finish()
        assert code == 2 and "Traceback" not in errors
        assert errors.splitlines()[-1] == f"Error: {out / name}: File too large"
    assert not list(out.iterdir())
    train(model, data, out)
    assert (out / "routers.safetensors").read_bytes() == routers


def test_chats_are_written_by_the_template_or_as_the_authors_write_them(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model, eos_token="</s>")
    chat = Row({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, "file, line 1")
    same = Row({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}, "file, line 2")
    for row in (chat, same):
        assert text_of(row, tokenizer) == ("[INST]\nQ\n[/INST]A</s>", True)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    for row in (chat, same):
        assert text_of(row, tokenizer) == ("<user>Q<assistant>A", False)
    assert text_of(Row({"text": "T"}, "file, line 3"), tokenizer) == ("T", True)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "x"}, 'there is neither "text" nor "messages" nor "conversations"; add one of them'),
        ({"messages": ["x"]}, 'turn 0 of "messages" is no object with "role" and "content"; mend it'),
        ({"messages": [{"role": "user"}]}, '"content" of turn 0 is null; it must be text in quotes'),
        ({"text": "x"}, "it has fewer than two tokens"),
    ],
)
def test_bad_rows_are_named_with_their_line(row: dict[str, Any], said: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"text": "a good row"}) + "\n" + json.dumps(row) + "\n")
    message = one_line(invoke("train-moice", model, path, "--out", tmp_path / "out", *OPTIONS))
    assert f"{path}, line 2: {said}" in message and not (tmp_path / "out").exists()


def test_bad_settings_and_too_few_rows_are_refused(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    message = one_line(invoke("train-moice", model, data, "--out", out))
    assert "has 14 rows, and 7 steps of 128 sequences need 896" in message
    assert "there are only 7 experts" in one_line(invoke("train-moice", model, data, "--out", out, "--top-k", 8))
    assert "holds no training that could go on" in one_line(
        invoke("train-moice", model, data, "--out", out, *OPTIONS, "--resume")
    )
    for changes in ({"steps": 0}, {"learning_rate": 0.0}, {"balance": -1.0}, {"max_length": 1}):
        with pytest.raises(InputError, match=next(iter(changes))):
            MoICESettings(**changes)
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_refused_before_a_weight_is_read(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lpes_bake.baselines.moice_training.load_library_model", lambda *_: pytest.fail("a model was loaded")
    )
    for out, said in (
        (data, "is a file; give a directory"),
        (data / "deeper", f"cannot be written, because of {data}"),
        (model / "routers", "lies inside the model's directory"),
    ):
        assert said in one_line(invoke("train-moice", model, data, "--out", out, *OPTIONS))
    assert not (model / "routers").exists()


def test_a_state_that_was_cut_off_by_a_kill_and_a_damaged_one(model: Path, data: Path, tmp_path: Path) -> None:
    # What a kill leaves while the very first state is written: nothing that keeps a training from starting.
    (tmp_path / ".state.pt.part").write_bytes(b"half")
    train(model, data, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"state.pt", "routers.safetensors", "training.json"}
    whole = (tmp_path / "state.pt").read_bytes()
    for damaged in (b"", b"half", whole[: len(whole) // 2]):
        (tmp_path / "state.pt").write_bytes(damaged)
        message = one_line(invoke("train-moice", model, data, "--out", tmp_path, *OPTIONS, "--resume"))
        assert "state.pt cannot be read as the state of a training; start again with a new --out" in message


def test_a_loss_that_is_not_finite_ends_the_training_in_one_line(model: Path, data: Path, tmp_path: Path) -> None:
    options = (*OPTIONS, "--learning-rate", 1e30)
    message = one_line(invoke("train-moice", model, data, "--out", tmp_path / "out", *options))
    assert "the loss of sequence 5 is not finite" in message and not (tmp_path / "out" / "routers.safetensors").exists()


def test_ctrl_c_says_how_to_go_on(model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = Command(tmp_path, "train-moice", model, data, "--out", out, *OPTIONS)
    command.stop_once((out / "state.pt").exists, signal.SIGINT)
    code, printed, errors = command.finish()
    assert code == 130 and printed == "" and "Traceback" not in errors
    assert errors.endswith("Interrupted. Go on with the same command and --resume.\n")
    train(model, data, out, "--resume")
