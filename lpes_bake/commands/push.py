"""`lpes-bake push`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from lpes_bake.commands.verify import Checklist, live_options, live_settings


@click.command("push", short_help="Put a baked directory on the Hub.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("repo", metavar="REPO")
@click.option("--private", is_flag=True, help="Create the repository as a private one.  [default: your account's]")
@click.option("--revision", metavar="BRANCH", help="Branch to commit to; created from main if new.  [default: main]")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing to the branch.")
@click.option("--message", help="The commit's message.  [default: says what was baked]")
@click.option("--base", metavar="MODEL", help="The base model, directory or Hub name, to compare with.")
@click.option("--static", is_flag=True, help="Verify by reading files only, for a DIR that passed `verify` before.")
@live_options
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def command(
    directory: Path,
    repo: str,
    private: bool,
    revision: str | None,
    create_pr: bool,
    message: str | None,
    base: str | None,
    static: bool,
    prompt_tokens: int,
    device: str | None,
    dtype: Any,
    as_json: bool,
) -> None:
    """Put the baked directory DIR on the Hub as REPO (name or namespace/name).

    First come the login, the right to write and the model card, then all that `lpes-bake verify`
    checks, and only then the upload: one commit, with the checkpoint's own files and nothing else.
    If it breaks off, the repository is as it was; run the same command again.

    Prints the lines of Python that load exactly this commit. Log in with `hf auth login` before.
    """
    from lpes_bake.push import NotVerified, push
    from lpes_bake.source import open_source

    source = open_source(base) if base is not None else None
    live = live_settings(static, prompt_tokens, device, dtype)
    with Checklist(quiet=as_json, stderr=True) as checklist:
        try:
            pushed = push(
                directory,
                repo,
                private=private,
                revision=revision,
                create_pr=create_pr,
                message=message,
                base=source,
                live=live,
                notify=checklist.show,
                doing=checklist.doing,
            )
        except NotVerified as error:
            if as_json:
                click.echo(json.dumps({"pushed": False, **error.report.to_json()}, indent=2))
            raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps({"pushed": True, **pushed.to_json()}, indent=2))
        return
    for name in pushed.left_out:
        click.echo(f"left out: {name}", err=True)
    for name in pushed.removed:
        click.echo(f"removed from the repository, as it belongs to another model: {name}", err=True)
    where = pushed.pull_request or pushed.url
    click.echo(f"{where}: {len(pushed.files)} files, commit {pushed.commit}\n")
    click.echo(pushed.loading_lines())
