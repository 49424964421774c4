"""Options made from settings dataclasses, so that a name, a default and a help text stand in one place."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from typing import Any

import click


def settings_options(settings: type) -> Callable[[Any], Any]:
    """One option for each field of a settings dataclass, nested ones included.

    A field's metadata may hold help, choices, metavar, and unset: what a default of None comes to.
    """

    def decorate(function: Any) -> Any:
        for one in reversed(flat_fields(settings)):
            function = option(*one)(function)
        return function

    return decorate


def flat_fields(settings: type) -> list[tuple[Field[Any], Any]]:
    """(field, its type without None) of a dataclass and of those in it, in order."""
    hints = typing.get_type_hints(settings)
    found = []
    for one in fields(settings):
        hint = hints[one.name]
        if isinstance(hint, types.UnionType):
            hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
        found += flat_fields(hint) if isinstance(hint, type) and is_dataclass(hint) else [(one, hint)]
    return found


def option(one: Field[Any], hint: Any) -> Callable[[Any], Any]:
    """The option of one field. Settings that are tuples are given more than once, or with commas for numbers."""
    about = one.metadata
    default = one.default if one.default is not MISSING else None
    unset = about.get("unset")
    text = about["help"] + (f"  [default: {unset}]" if unset else "")
    keywords: dict[str, Any] = {"help": text, "default": default, "show_default": not unset and default is not None}
    if about.get("choices"):
        keywords["type"] = click.Choice(about["choices"])
    elif typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is str:
        keywords |= {"multiple": True, "type": str}
    elif typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        keywords |= {"callback": partial(numbers, kind), "default": ",".join(f"{number:g}" for number in default or ())}
        keywords["metavar"] = "N,N,…" if kind is int else "S,S,…"
    elif hint is bool:
        flag = one.name.replace("_", "-")
        return click.option(f"--{flag}/--no-{flag}", **keywords)
    else:
        keywords["type"] = hint
    if about.get("metavar"):
        keywords["metavar"] = about["metavar"]
    return click.option(f"--{one.name.replace('_', '-')}", **keywords)


def numbers(kind: type[float], context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    """Numbers given as 0.8,0.9, whole ones where `kind` is int."""
    try:
        return tuple(kind(part) for part in value.split(",") if part.strip())
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a list of "
            + ("whole numbers such as 4,2" if kind is int else "numbers such as 0.8,0.9,1.1")
        ) from None
