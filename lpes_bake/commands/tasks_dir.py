"""`lpes-bake tasks-dir`."""

from __future__ import annotations

import click


@click.command("tasks-dir", short_help="Where the tasks for lm-evaluation-harness are.")
def command() -> None:
    """Print the folder that holds the tasks for lm-evaluation-harness.

    \b
    lm_eval --include_path "$(lpes-bake tasks-dir)" --tasks lpes_kv_75 --model hf --model_args pretrained=MODEL
    """
    from lpes_bake.harness import TASKS_DIR

    click.echo(TASKS_DIR)
