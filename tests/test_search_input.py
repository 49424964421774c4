"""`lpes-bake search`: what it refuses, in one line."""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from lpes_bake.cli import main
from lpes_bake.factors import load_factors
from lpes_bake.run import search
from lpes_bake.search.errors import InputError
from lpes_bake.settings import SearchSettings
from tests.runs import Small, changed, invoke, one_line, write_mdqa, write_own


def test_a_directory_that_is_not_empty_is_refused(small: Small, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty" in one_line(small.search(tmp_path))
    assert "holds a run; go on with it with --resume" in one_line(small.search(whole))
    assert "is a file" in one_line(small.search(tmp_path / "notes.txt"))
    assert "cannot be written" in one_line(small.search(tmp_path / "notes.txt" / "run"))


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("journal", [None, b"", b'{"crc32": "0000'])
def test_a_run_that_was_killed_before_its_first_record_can_start_again(
    journal: bytes | None, small: Small, tmp_path: Path
) -> None:
    (tmp_path / "settings.json").write_text("{}")
    if journal is not None:
        (tmp_path / "journal.jsonl").write_bytes(journal)
        assert "no run to resume" in one_line(small.search(tmp_path, "--resume"))
    small.run(tmp_path, generations=1, population=2, uniform="")
    assert load_factors(tmp_path).search is not None


def test_resuming_nothing_is_refused(small: Small, tmp_path: Path) -> None:
    assert "no run to resume" in one_line(small.search(tmp_path / "new", "--resume"))


@pytest.mark.parametrize("change", [(b"population", b"popularity"), (b'"journal": 2', b'"journal": 1')])
def test_a_journal_whose_header_is_not_ours_is_refused(
    change: tuple[bytes, bytes], whole: Path, small: Small, tmp_path: Path
) -> None:
    header, rest = (whole / "journal.jsonl").read_bytes().split(b"\n", 1)
    assert change[0] in header
    (tmp_path / "journal.jsonl").write_bytes(header.replace(*change) + b"\n" + rest)
    message = one_line(invoke("search", small.model, "--out", tmp_path, "--resume"))
    assert "does not begin as this version of lpes-bake writes it" in message


def test_a_run_inside_the_model_is_refused(small: Small, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(small.model)
    for out in (small.model / "run", link / "deep" / "run"):
        assert "inside the model's directory" in one_line(small.search(out))
        assert not out.exists()


def test_a_run_that_another_process_has_open_and_a_damaged_one_are_refused_before_a_weight_is_read(
    whole: Path, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lpes_bake.search.journal import Journal

    monkeypatch.setattr("lpes_bake.plan.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    journal = out / "journal.jsonl"
    with Journal(journal):
        assert "in use by a run that is still going" in one_line(small.search(out, "--resume"))
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"half a line\n", *lines[3:]]))
    assert f"line 3 of {journal} is damaged" in one_line(small.search(out, "--resume"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": "nonsense"}, "there is no task 'nonsense'; there are: kv"),
        ({"task": "mdqa"}, "give it as mdqa:FILE"),
        ({"task": "kv,size=3"}, "there is no setting 'size'; there are: pairs=16"),
        ({"task": "kv:nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        ({"task": "own.py:Own"}, "own.py does not exist"),
        ({"task": "kv,pairs=4,positions=0/9"}, "gold position 9"),
        ({"task": "mdqa:{mdqa},documents=4"}, '"ctxs" has 3 documents, but 4'),
        (
            {"task": "mdqa:{mdqa},documents=3", "selection-contexts": "30"},
            "its selection part; asked for 30 (--selection-contexts)",
        ),
        ({"task": "qa:{own}", "report-contexts": "70"}, "for its report part; asked for 70 (--report-contexts)"),
        ({"task": "qa:{own}", "optimizer": "gradient", "gradient-contexts": "70"}, "(--contexts and --gradient"),
        ({"selection-task": "nonsense"}, "there is no task 'nonsense'"),
        ({"optimizer": "nonsense"}, "'nonsense' is not one of 'genetic'"),
        ({"optimizer": "hybrid", "gradient-contexts": "0"}, "gradient_contexts is 0"),
        ({"optimizer": "gradient", "gradient-batch": "9"}, "gradient_contexts is 4"),
        ({"optimizer": "gradient", "steps": "0"}, "steps is 0"),
        ({"task-weights": "2,1"}, "task_weights has 2 numbers for 1 task"),
        ({"optimizer": "gradient", "start": "nowhere"}, "nowhere: No such file"),
        ({"optimizer": "hybrid", "start": "nowhere"}, "start is for the optimizer gradient, not for hybrid"),
        ({"fitness": "loss"}, "'loss' is not one of 'logprob'"),
        ({"over": "best"}, "'best' is not one of 'mean'"),
        ({"race": "fair"}, "'fair' is not one of 'probable'"),
        ({"leash": "-1"}, "leash is -1"),
        ({"leash-kl": "nan"}, "leash_kl is nan"),
        ({"max-damage": "-0.1"}, "max_damage is -0.1"),
        ({"max-damage": "inf"}, "max_damage is inf"),
        ({"contexts": "0"}, "contexts is 0"),
        ({"first-block": "0"}, "first_block is 0"),
        ({"selection-contexts": "1"}, "selection_contexts is 1"),
        ({"report-contexts": "1"}, "report_contexts is 1"),
        ({"finalists": "0"}, "finalists is 0"),
        ({"population": "1"}, "population is 1"),
        ({"y-low": "0.52"}, "y_low"),
        ({"uniform": "0.8,x"}, "is not a list of numbers"),
        ({"uniform": "0.8,-1"}, "uniform holds -1.0"),
        ({"seed": "-1"}, "seed is -1"),
        ({"text": "nowhere.txt"}, "nowhere.txt cannot be read"),
        ({"text": "{short}"}, "has 2 different paragraphs"),
        ({"text": "{long}"}, "the paragraph 'wordword"),
        ({"text": "{model}"}, "cannot be read"),
        ({"prompt-format": "chat"}, "no chat template"),
        ({"prompt-format": "nonsense"}, "'nonsense' is not one of 'auto'"),
        ({"device": "nonsense"}, "nonsense"),
        ({"dtype": "int8"}, "'int8' is not one of 'float32'"),
        ({"quantization": "2bit"}, "'2bit' is not one of '4bit'"),
        ({"batch-size": "0"}, "batch_size is 0"),
        ({"max-evaluations": "0"}, "max_evaluations is 0"),
        ({"max-tokens": "-5"}, "max_tokens is -5"),
        ({"max-time": "nan"}, "max_time is nan"),
        ({"preset": "best"}, "'best' is not one of 'default'"),
    ],
    ids=lambda value: " ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_in_one_line_before_a_weight_is_read(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], words: str
) -> None:
    monkeypatch.setattr("lpes_bake.plan.load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "short.txt").write_text("One.\n\nTwo.")
    (tmp_path / "long.txt").write_text("\n\n".join(f"{'word' * 2100} {i}" for i in range(19)))
    paths = {name: str(tmp_path / f"{name}.txt") for name in ("short", "long")} | {"model": str(small.model)}
    if any("{mdqa}" in value or "{own}" in value for value in change.values()):
        paths |= {"mdqa": str(write_mdqa(tmp_path / "mdqa.jsonl")), "own": str(write_own(tmp_path / "own.jsonl"))}
    changes = {name.replace("-", "_"): value.format(**paths) for name, value in change.items()}
    assert words in one_line(small.search(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"device_map": "nonsense"}, "nonsense"), ({"quantization": "4bit"}, "needs bitsandbytes")],
)
def test_what_only_loading_shows_is_refused_in_one_line_and_leaves_nothing(
    small: Small, tmp_path: Path, change: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where bitsandbytes is not installed.
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert words in one_line(small.search(tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()


def test_models_that_cannot_be_searched_are_refused(small: Small, tmp_path: Path) -> None:
    def copy(name: str, **config: object) -> Small:
        return replace(small, model=changed(Path(shutil.copytree(small.model, tmp_path / name)), **config))

    out = tmp_path / "run"
    assert "no such" in one_line(replace(small, model=tmp_path / "nowhere").search(out)).lower()
    narrow = copy("narrow", max_position_embeddings=150)
    assert "too long for the model's 150 positions" in one_line(narrow.search(out))
    gpt2 = copy("gpt2", model_type="gpt2", architectures=["GPT2LMHeadModel"])
    assert "'gpt2'" in one_line(gpt2.search(out))
    assert "give a causal LM" in one_line(copy("bare", architectures=["LlamaModel"]).search(out))
    mute = copy("mute")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (mute.model / name).unlink()
    assert "no tokenizer" in one_line(mute.search(out))
    assert not out.exists()


class Yes(io.BytesIO):
    """A stdin that would say yes to everything, and notes when somebody asks."""

    asked = False

    def read1(self, size: int | None = -1, /) -> bytes:
        self.asked = True
        return super().read1(size)


@pytest.mark.parametrize("command", ["search", "eval", "compare --methods pi=2"])
def test_code_that_a_tokenizer_brings_does_not_run_unless_trusted_and_nobody_is_asked(
    command: str, small: Small, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(small.model, tmp_path / "model"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": "Evil"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    stdin = Yes(b"y\n" * 9)
    arguments = [*command.split(), str(model), "--out", str(tmp_path / "run")]
    message = one_line(CliRunner().invoke(main, arguments, input=stdin))
    assert "--trust-remote-code" in message and not (tmp_path / "ran").exists()
    assert not stdin.asked


def test_a_broken_input_is_an_input_error_for_callers_too(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        search(str(tmp_path), tmp_path / "run", SearchSettings())
