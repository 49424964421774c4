"""Options that several commands have or that come from settings dataclasses, so that a name, a default and a help text
stand in one place; and the command that lists its options by group."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from typing import Any

import click

from lpes_bake.settings import MACHINE


class GroupedOption(click.Option):
    """An option and the heading that it is listed under."""

    def __init__(self, *arguments: Any, group: str = "Options", **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help lists options under the headings of their groups, in the order in which these begin."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options; those without a group stand under Options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx) if isinstance(one, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(one, "group", "Options"), []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


grouped = partial(click.option, cls=GroupedOption)

revision = grouped(
    "--revision", group=MACHINE, help="Branch, tag or commit of a model on the Hub.  [default: its main branch]"
)
trust_remote_code = grouped(
    "--trust-remote-code",
    group=MACHINE,
    is_flag=True,
    help="Run Python code that the model brings for its tokenizer. Read it first.",
)
quiet = click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")


def settings_options(settings: type, *names: str, group: str = "Options") -> Callable[[Any], Any]:
    """One option for each field of a settings dataclass, nested ones included. names: of these fields only.

    A field's metadata may hold help, choices, metavar, unset: what a default of None comes to, and group: the heading
    that its option, or those of the settings in it, are listed under, else the one given here.
    """

    def decorate(function: Any) -> Any:
        for one, hint, heading in reversed(flat_fields(settings, group)):
            if not names or one.name in names:
                function = field_option(one, hint, heading)(function)
        return function

    return decorate


def flat_fields(settings: type, group: str = "Options") -> list[tuple[Field[Any], Any, str]]:
    """(field, its type without None, its group) of a dataclass and of those in it, in order."""
    hints = typing.get_type_hints(settings)
    found: list[tuple[Field[Any], Any, str]] = []
    for one in fields(settings):
        hint, own = hints[one.name], one.metadata.get("group") or group
        if isinstance(hint, types.UnionType):
            hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
        found += flat_fields(hint, own) if isinstance(hint, type) and is_dataclass(hint) else [(one, hint, own)]
    return found


def field_option(one: Field[Any], hint: Any, group: str) -> Callable[[Any], Any]:
    """The option of one field. Settings that are tuples are given more than once, or with commas for numbers."""
    about = one.metadata
    default = one.default if one.default is not MISSING else None
    unset = about.get("unset")
    text = about["help"] + (f"  [default: {unset}]" if unset else "")
    keywords: dict[str, Any] = {"help": text, "default": default, "group": group}
    keywords["show_default"] = not unset and default is not None
    if about.get("choices"):
        keywords["type"] = click.Choice(about["choices"])
    elif typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is str:
        keywords |= {"multiple": True, "type": str}
    elif typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        keywords |= {"callback": partial(numbers, kind), "default": ",".join(f"{number:g}" for number in default or ())}
        keywords["metavar"] = "N,N,…" if kind is int else "S,S,…"
    else:
        keywords["type"] = hint
    if about.get("metavar"):
        keywords["metavar"] = about["metavar"]
    return grouped(f"--{one.name.replace('_', '-')}", **keywords)


def numbers(kind: type[float], context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    """Numbers given as 0.8,0.9, whole ones where `kind` is int."""
    try:
        return tuple(kind(part) for part in value.split(",") if part.strip())
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a list of "
            + ("whole numbers such as 4,2" if kind is int else "numbers such as 0.8,0.9,1.1")
        ) from None
