"""`lpes-bake verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


def live_options(function: Any) -> Any:
    """The options that say how the live checks run; `push` has them too."""
    options = [
        click.option(
            "--prompt-tokens",
            type=click.IntRange(min=32),
            default=3072,
            show_default=True,
            help="Length of the prompt compared with the reference, in tokens; at most the model's positions.",
        ),
        click.option("--device", help="torch device to compute on.  [default: cuda, else mps, else cpu]"),
        click.option(
            "--dtype",
            type=click.Choice(["float32", "bfloat16", "float16"]),
            default="float32",
            show_default=True,
            help="Precision to compute in. The 16-bit ones need half the memory and find coarse errors only.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def live_settings(
    static: bool,
    prompt_tokens: int,
    device: str | None,
    dtype: Any,
    trust: bool = False,
    stacks: str = "transformers",
) -> Any:
    """What those options say, None for static checks alone. InputError for a device or a stack that is not there."""
    from lpes_bake.verify import LiveSettings, check_stacks

    known = check_stacks(stacks.split(","))
    if static:
        return None
    if device is not None:
        from lpes_bake.search.device import pick_device

        pick_device(device)
    return LiveSettings(prompt_tokens, device, dtype, trust, known)


@click.command("verify", short_help="Prove that a baked directory is right.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--base", metavar="MODEL", help="The base model (directory or Hub name): compare weights and files with it."
)
@click.option("--static", is_flag=True, help="Only read files: takes seconds, needs no torch, runs nothing of DIR.")
@click.option(
    "--stack",
    "stacks",
    metavar="NAME,…",
    default="transformers",
    show_default=True,
    help="What to load it in, if installed: transformers, vllm, vllm-compiled.",
)
@live_options
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run DIR's Python files although they are not the ones that lpes-bake ships.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    directory: Path,
    base: str | None,
    static: bool,
    stacks: str,
    prompt_tokens: int,
    device: str | None,
    dtype: Any,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Prove that a baked directory is right.

    Reads its files first: config.json, the Python files, the weights, the model card, and with --base
    whether all else is the base model's to the byte. Then loads it in a fresh process that cannot
    import lpes_bake, compares its outputs on a long prompt with a hand-written reference, generates
    with and without cache, saves it and loads the copy. With --stack vllm, vLLM must generate what
    transformers generates. Python files that are not the ones that lpes-bake ships are never run
    without --trust-remote-code. What the run did not check is listed at the end.

    Exit code 1 when a check fails, 2 when DIR is no baked checkpoint.
    """
    from lpes_bake.source import open_source
    from lpes_bake.verify import verify

    live = live_settings(static, prompt_tokens, device, dtype, trust_remote_code, stacks)
    source = open_source(base) if base is not None else None
    with Checklist(quiet=as_json) as checklist:
        report = verify(directory, source, live=live, notify=checklist.show, doing=checklist.doing)
        checklist.show_open(report.not_checked)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
    raise SystemExit(0 if report.ok else 1)


class Checklist:
    """Prints checks on stdout as they come, and what is being done on stderr while it is a terminal."""

    def __init__(self, quiet: bool, stderr: bool = False) -> None:
        from rich.console import Console

        self.quiet = quiet
        self.console = Console(stderr=stderr, highlight=False, soft_wrap=True)
        self.status = Console(stderr=True).status("reading files")

    def __enter__(self) -> Checklist:
        self.status.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.status.stop()

    def doing(self, what: str) -> None:
        """Say what starts now; nothing for something that shows its own progress."""
        if what:
            self.status.update(f"{what} …")
        else:
            self.status.stop()

    def show(self, check: Any) -> None:
        """One line of the checklist."""
        from rich.text import Text

        if self.quiet:
            return
        mark, style = {"pass": ("✓", "green"), "fail": ("✗", "bold red"), "skip": ("–", "dim")}[check.status]
        self.console.print(Text.assemble((mark, style), f" {check.name:<16} {check.reason}"))

    def show_open(self, not_checked: Any) -> None:
        """What was not checked, and how it is."""
        if self.quiet:
            return
        self.console.print("\nNot checked in this run:")
        for one in not_checked:
            self.console.print(f"- {one.what}: {one.how}", markup=False)
