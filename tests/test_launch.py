"""Several processes, one search: the same result as alone, one of them writes and speaks, none is left waiting."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.runs import Command, Small, records, without_date


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def test_a_launched_search_finds_what_a_single_process_finds(small: Small, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    content = small.run(alone)
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--main_process_port", free_port()),
        *("-m", "lpes_bake", "search", str(small.model), "--out", str(together), *small.options()),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert without_date(together) == without_date(alone)
    assert '"processes": 2' in (together / "result.json").read_text()
    # One journal, each unit once; one voice.
    units = [str(record["unit"]) for record in records(together)]
    assert sorted(units) == sorted(str(record["unit"]) for record in records(alone))
    assert done.stdout.count(content["message"]) == 1 and done.stdout.count("lpes-bake export") == 1
    assert done.stderr.count("loading small on cpu") == 1
    assert done.stderr.count("choosing the winner") == 1


def launched(folder: Path, *arguments: object, ranks: tuple[tuple[object, ...], ...] = ((), ())) -> list[Command]:
    """Two processes as a launcher would start them, which does not end one when the other ends. ranks: own options."""
    port = free_port()
    commands = []
    for rank, own in enumerate(ranks):
        (folder / str(rank)).mkdir()
        meeting = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        commands.append(
            Command(folder / str(rank), *arguments, *own, **meeting, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        )
    return commands


def test_bad_input_ends_all_processes_at_once(small: Small, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for options, words in ((["--task", "kv,pairs=0"], "pairs must be at least 1"), ([], "is not empty")):
        folder = tmp_path / f"{len(options)}"
        folder.mkdir()
        place = tmp_path / "new" if options else out
        for command in launched(folder, "search", small.model, "--out", place, *small.options(), *options):
            code, printed, errors = command.finish(60)
            assert code == 2 and printed == "" and words in errors and "Traceback" not in errors
    assert not (tmp_path / "new").exists() and [path.name for path in out.iterdir()] == ["notes.txt"]


def test_an_error_of_one_process_ends_the_others_with_a_word(small: Small, tmp_path: Path) -> None:
    # The second has a device that is not there, as where one machine has fewer GPUs than another.
    arguments = ("search", small.model, "--out", tmp_path / "run", *small.options())
    first, second = launched(tmp_path, *arguments, ranks=((), ("--device", "cuda:77")))
    code, printed, errors = second.finish(60)
    assert code == 2 and "cuda:77" in errors
    code, printed, errors = first.finish(60)
    assert code == 1 and printed == "" and "Traceback" not in errors
    assert "another process of this run has ended; its own message says why" in errors
    assert not (tmp_path / "run" / "factors.json").exists()


def test_a_limit_that_is_too_small_is_said_once(small: Small, tmp_path: Path) -> None:
    arguments = ("search", small.model, "--out", tmp_path / "run", *small.options(), "--max-tokens", 1)
    first, second = launched(tmp_path, *arguments)
    code, printed, errors = first.finish(60)
    assert code == 1 and printed == "" and "before the model itself" in errors
    assert second.finish(60) == (1, "", "")


def test_several_processes_that_were_given_one_are_warned(small: Small, tmp_path: Path) -> None:
    # What accelerate launch sets where it starts a single process in spite of --num_processes 2.
    lonely = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}
    arguments = ("search", small.model, "--out", tmp_path / "run", *small.options(), "--max-evaluations", 1)
    code, _, errors = Command(tmp_path, *arguments, **lonely).finish(60)
    assert code == 0 and "accelerate launch has started one process only" in errors
