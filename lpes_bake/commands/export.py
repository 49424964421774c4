"""`lpes-bake export`, also called `lpes-bake bake`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import click


@click.command("export", short_help="Write a checkpoint directory with the factors in it.")
@click.argument("model")
@click.argument("factors", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--revision", help="Branch, tag or commit of MODEL on the Hub.  [default: its main branch]")
@click.option(
    "--weights",
    type=click.Choice(["copy", "hardlink", "symlink"]),
    default="copy",
    show_default=True,
    help="How the weights get there. copy costs no space either where the file system can clone files (btrfs, XFS). "
    "hardlink and symlink cost none anywhere, but are not the default: a later in-place save would change the base "
    "model too, and symlinks break when it moves. Weights that have to be converted are written anew in any case.",
)
@click.option("--rebake", is_flag=True, help="Take a baked MODEL for the base model that it was made from.")
@click.option("--overwrite", is_flag=True, help="Replace what is at OUT, whole.")
@click.option(
    "--base-model",
    metavar="ORG/NAME",
    help="MODEL's name on the Hub, for the model card of a local directory.  [default: its own name]",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
def command(
    model: str,
    factors: Path,
    out: Path,
    revision: str | None,
    weights: str,
    rebake: bool,
    overwrite: bool,
    base_model: str | None,
    as_json: bool,
) -> None:
    """Write MODEL with FACTORS to the directory OUT, as a checkpoint that anyone can load.

    MODEL is a local directory, a name on the Hub, or a GGUF file of a Llama or Qwen2. FACTORS is
    factors.json, the directory of a search or of another baked checkpoint, or a bare list of numbers
    (JSON, or one a line).

    OUT gets MODEL's own files byte for byte, config.json with the factors, the Python files that apply
    them, and a model card. Pickled weights (pytorch_model.bin) are converted to safetensors, one file at a
    time; nothing but plain tensors is ever unpickled. A GGUF file is dequantised, in memory.

    OUT appears at the end, whole; a bake that fails leaves nothing behind.
    """
    from rich.console import Console

    from lpes_bake.export import bake, check_place
    from lpes_bake.factors import load_factors
    from lpes_bake.source import base_form, open_source, user_path

    found = load_factors(factors)
    with Console(stderr=True).status("") as status, ExitStack() as stack:
        status.update(f"reading {model}")
        if model.endswith(".gguf") and user_path(model).is_file():
            from lpes_bake.gguf_source import open_gguf

            check_place(user_path(model), user_path(out), overwrite)
            source = stack.enter_context(open_gguf(user_path(model), user_path(out)))
            weights = "hardlink"
        else:
            source = open_source(model, revision=revision, baked=rebake)
            source = base_form(source)
        result = bake(
            source,
            found,
            out,
            weights=weights,  # type: ignore[arg-type]
            overwrite=overwrite,
            base_model=base_model,
            notify=lambda name: status.update(f"copying {name}"),
        )
    if found.is_identity:
        click.echo("all factors are 1: this checkpoint computes what its base model does", err=True)
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=2))
        return
    ways = sorted(set(result.files.values()))
    counts = ", ".join(f"{sum(way == how for how in result.files.values())} {way}" for way in ways)
    click.echo(f"{result.out}: {len(result.files)} files ({counts}), {result.bytes / 1e9:.3g} GB")
    for name, reason in result.left_out.items():
        click.echo(f"left out {name}: {reason}")
    if "/" not in result.base_model:
        click.echo(f"the model card calls the base model {result.base_model}; --base-model ORG/NAME gives its Hub name")
    click.echo(
        f"\nfrom transformers import {result.auto_class}, AutoTokenizer\n"
        f'model = {result.auto_class}.from_pretrained("{out}", trust_remote_code=True)\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{out}", trust_remote_code=True)'
    )
