"""The factors file: what a search found, what it found it on, and how. Imports no torch.

factors.json is meant to be read, diffed and kept under version control: one factor a line.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lpes_bake.search.errors import InputError
from lpes_bake.search.families import FAMILIES
from lpes_bake.source import Source, architecture_of, check_list, is_number, parse_json, rope_settings

VERSION = 1
MAX_BYTES = 16_000_000
LINE_LENGTH = 100


@dataclass(frozen=True)
class Factors:
    """One RoPE scaling factor a layer and, where they are known, the facts about it.

    base: see `base_facts`. curve: its control points as `points`, [[layer, factor], …], and its settings.
    search: the search's settings and seed. scores: with their sample sizes. date: ISO 8601.
    """

    layer_rope_scaling: tuple[float, ...]
    base: dict[str, Any] | None = None
    curve: dict[str, Any] | None = None
    search: dict[str, Any] | None = None
    scores: dict[str, Any] | None = None
    tool_version: str | None = None
    date: str | None = None

    @property
    def is_identity(self) -> bool:
        """Whether they change nothing."""
        return set(self.layer_rope_scaling) == {1.0}

    def to_json(self) -> dict[str, Any]:
        """The content of factors.json; what is not known is left out."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        content = {"version": VERSION, **known, "layer_rope_scaling": list(self.layer_rope_scaling)}
        return {name: finite(value) for name, value in content.items()}

    def to_text(self) -> str:
        """factors.json as text."""
        return dump(self.to_json()) + "\n"

    def save(self, path: Path) -> None:
        """Write factors.json, whole or not at all."""
        save_text(path, self.to_text())


def save_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    save_bytes(path, text.encode())


def save_bytes(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    scratch = path.with_name(f".{path.name}.part")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except OSError as error:  # a full disk's has no name of a file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        scratch.unlink(missing_ok=True)


def finite(value: Any) -> Any:
    """The same JSON value, with null for numbers that are not finite: JSON has none."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dump(value: Any, indent: str = "") -> str:
    """JSON with short things on one line, long lists of numbers wrapped, and one factor a line."""
    inner = indent + "  "
    if not isinstance(value, (dict, list, tuple)) or not value:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        items = []
        for key, item in value.items():
            text = (
                json.dumps(item, indent=2).replace("\n", "\n" + inner)
                if key == "layer_rope_scaling"
                else dump(item, inner)
            )
            items.append(f"{json.dumps(str(key), ensure_ascii=False)}: {text}")
        opening, closing = "{", "}"
    else:
        items = [dump(item, inner) for item in value]
        opening, closing = "[", "]"
    line = ", ".join(items)
    if indent and "\n" not in line and len(inner) + len(line) < LINE_LENGTH:
        return f"{opening}{line}{closing}"
    if not any(isinstance(item, (dict, list, tuple, str)) for item in value) and opening == "[":
        body = textwrap.fill(line, LINE_LENGTH, initial_indent=inner, subsequent_indent=inner)
    else:
        body = ",\n".join(inner + item for item in items)
    return f"{opening}\n{body}\n{indent}{closing}"


def base_facts(source: Source) -> dict[str, Any]:
    """What factors.json says about the base model: which it was, and what another must share with it."""
    return {
        "name": source.name,
        "revision": source.revision,
        "architecture": source.architecture,
        "model_type": source.family.base_model_type,
        "num_hidden_layers": source.num_hidden_layers,
        "rope": rope_settings(source.config, source.name),
    }


def load_factors(path: Path | str) -> Factors:
    """Read factors from factors.json, a search's run or a baked directory, or a bare list (JSON or one a line)."""
    path = Path(path)
    if path.is_dir():
        return load_from_directory(path)
    text = read_text(path)
    try:
        content = parse_json(text)
    except ValueError as error:
        if text.lstrip().startswith(("{", "[")):
            raise InputError(f"{path} is not valid JSON: {error}") from error
        return Factors(check_list(read_lines(text, path), str(path)))
    if isinstance(content, dict):
        return from_config(content, path) if "model_type" in content else from_json(content, path)
    # One number alone on its line is valid JSON too.
    return Factors(check_list(content if isinstance(content, list) else [content], str(path)))


def load_from_directory(path: Path) -> Factors:
    """A baked directory's factors are those in its config.json; factors.json says more where it agrees."""
    record = load_factors(path / "factors.json") if (path / "factors.json").is_file() else None
    if not (path / "config.json").is_file():
        if record is None:
            raise InputError(f"{path} holds neither factors.json nor the config.json of a baked checkpoint")
        return record
    effective = load_factors(path / "config.json")
    agrees = record is not None and record.layer_rope_scaling == effective.layer_rope_scaling
    return record if record is not None and agrees else effective


def read_text(path: Path) -> str:
    """A small text file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path} is too large to be a factors file ({path.stat().st_size} bytes)")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give factors.json, a baked directory or a list") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text file, so not a factors file") from error


def read_lines(text: str, path: Path) -> list[float]:
    """One number a line; empty lines do not count."""
    numbers = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            numbers.append(float(line))
        except ValueError as error:
            raise InputError(f"{path}, line {number}: {line.strip()[:80]!r} is not a number") from error
    return numbers


def from_config(config: Mapping[str, Any], path: Path) -> Factors:
    """The factors of a baked config.json, with the facts that the config knows about its base."""
    where = str(path)
    family = next((family for family in FAMILIES if family.model_type == config["model_type"]), None)
    if family is None:
        raise InputError(
            f"{path} has model_type {config['model_type']!r}: not a baked checkpoint, so it has no factors"
        )
    factors = check_list(config.get("layer_rope_scaling"), where, config.get("num_hidden_layers"))
    baked = {name: base for base, name in family.architectures.items()}
    architecture = architecture_of(config, where)
    base = {
        "name": None,
        "revision": None,
        "architecture": baked.get(architecture, architecture),
        "model_type": family.base_model_type,
        "num_hidden_layers": len(factors),
        "rope": rope_settings(config, where),
    }
    return Factors(factors, base=base)


def from_json(content: Mapping[str, Any], path: Path) -> Factors:
    """The content of a factors.json, checked."""
    version = content.get("version")
    if version != VERSION or not is_number(version):
        raise InputError(
            f"{path} has version {version!r}, and this lpes-bake reads factors files of version {VERSION}: "
            "upgrade lpes-bake, or give the bare list"
        )
    known = {field.name for field in fields(Factors)}
    unknown = sorted(set(content) - known - {"version"})
    if unknown:
        raise InputError(f"{path} has the unknown field {unknown[0]!r}; known: {', '.join(sorted(known))}")
    factors = check_list(content.get("layer_rope_scaling"), str(path))
    for name in ("base", "curve", "search", "scores"):
        if not isinstance(content.get(name), (dict, type(None))):
            raise InputError(f"{path}: {name} must be an object; got {content[name]!r}")
    for name in ("tool_version", "date"):
        if not isinstance(content.get(name), (str, type(None))):
            raise InputError(f"{path}: {name} must be a string; got {content[name]!r}")
    points = (content.get("curve") or {}).get("points", [])
    if not isinstance(points, list) or not all(is_point(point) for point in points):
        raise InputError(f"{path}: points of the curve must be [layer, factor] pairs; got {points!r}")
    layers = (content.get("base") or {}).get("num_hidden_layers")
    if layers is not None and layers != len(factors):
        raise InputError(f"{path} contradicts itself: {len(factors)} factors for a base model of {layers} layers")
    others = {name: content.get(name) for name in known if name != "layer_rope_scaling"}
    return Factors(factors, **others)


def is_point(value: Any) -> bool:
    """Whether a JSON value is a control point: [layer, factor]."""
    return isinstance(value, list) and len(value) == 2 and all(is_number(number) for number in value)


def check_factors(factors: Factors, source: Source) -> None:
    """InputError when the factors were found on a model of another kind, or are not one a layer."""
    check_list(factors.layer_rope_scaling, source.name, source.num_hidden_layers)
    if factors.base is None:
        return
    facts = base_facts(source)
    for fact in ("model_type", "architecture", "num_hidden_layers", "rope"):
        found_on = factors.base.get(fact)
        if found_on is not None and found_on != facts[fact]:
            raise InputError(
                f"these factors were found on {factors.base.get('name') or 'another model'} with {fact} {found_on!r}, "
                f"and {source.name} has {facts[fact]!r}: search again, or give the bare list if you know better"
            )
