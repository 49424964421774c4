"""The model card of a baked checkpoint: README.md with metadata that the Hub accepts. Imports no torch."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lpes_bake import __version__
from lpes_bake.factors import Factors
from lpes_bake.pages import SCALES, difference, fixed
from lpes_bake.source import Source

# What a base model's card says that holds for the bake too.
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
# Class name's end → the auto class that loads it, the Hub's task.
HEADS = {
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "Model": ("AutoModel", "feature-extraction"),
}
BARS = "▁▂▃▄▅▆▇█"


def model_card(source: Source, factors: Factors, *, base_model: str, title: str) -> str:
    """README.md for `source` baked with `factors`. title: the checkpoint's name."""
    import jinja2

    template = importlib.resources.files("lpes_bake.templates").joinpath("README.md.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    base = factors.base or {}
    search = dict(factors.search or {})
    return environment.from_string(template).render(
        metadata=card_metadata(source, base_model),
        title=title,
        base_model=base_model,
        # A link only where there is surely something to link to.
        on_hub="/" in base_model,
        revision=source.revision,
        found_on=base.get("name") if base.get("name") != source.name else None,
        auto_class=auto_class(source.architecture),
        generates=source.architecture.endswith("ForCausalLM"),
        base_class=source.architecture,
        files=source.family.files,
        needs=source.family.needs,
        factors=factors.layer_rope_scaling,
        sparkline=sparkline(factors.layer_rope_scaling),
        rows=[factors.layer_rope_scaling[i : i + 8] for i in range(0, len(factors.layer_rope_scaling), 8)],
        scores=search_scores(factors.scores or {}),
        other_scores=list(leaves(factors.scores or {})),
        verdict=search.pop("verdict", None),
        curve=json.dumps(factors.curve) if factors.curve else None,
        search=json.dumps(search) if search else None,
        date=factors.date,
        version=__version__,
    )


def card_metadata(source: Source, base_model: str) -> str:
    """The card's YAML block."""
    from huggingface_hub import ModelCardData

    # The Hub knows adapter, merge, quantized and finetune, and takes any other change for the last.
    relation = {"base_model": base_model, "base_model_relation": "finetune"} if is_hub_name(base_model) else {}
    facts = {
        **relation,
        "library_name": "transformers",
        "pipeline_tag": task(source.architecture),
        **base_metadata(source),
        "tags": ["lpes", "rope-scaling", "long-context", "custom_code", "arxiv:2606.27705"],
    }
    return str(ModelCardData(**facts).to_yaml())


def base_metadata(source: Source) -> dict[str, Any]:
    """License, language and task of the base model's own card, where it has a readable one.

    Not through the Hub's ModelCard: its import takes longer than a bake.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        block = re.match(r"\s*---\n(.*?)\n---", (source.path / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        found = yaml.safe_load(block[1]) if block else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):  # no card, or one that is not text or not YAML
        return {}
    return {key: found[key] for key in CARRIED if is_text(found.get(key))} if isinstance(found, dict) else {}


def is_text(value: Any) -> bool:
    """Whether metadata is text, or a list of texts: YAML takes the language `no` for False."""
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(item, str) and item for item in values)


def is_hub_name(name: str) -> bool:
    """Whether the Hub would take `name` for that of a model: not every directory's name will do."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def auto_class(architecture: str) -> str:
    """The transformers class that loads an architecture by name of its directory."""
    return next(name for end, (name, _) in HEADS.items() if architecture.endswith(end))


def task(architecture: str) -> str:
    """The Hub's pipeline_tag of an architecture."""
    return next(tag for end, (_, tag) in HEADS.items() if architecture.endswith(end))


def sparkline(factors: Sequence[float]) -> str:
    """One bar a layer, from the smallest factor to the largest; all in the middle when they are equal."""
    low, high = min(factors), max(factors)
    if low == high:
        return BARS[len(BARS) // 2] * len(factors)
    return "".join(BARS[round((factor - low) / (high - low) * (len(BARS) - 1))] for factor in factors)


def search_scores(scores: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scores that a search leaves, in words and tables; None for scores of any other shape."""
    try:
        text = scores["text"]
        return {
            "tasks": [task_scores(one) for one in scores["tasks"]],
            "text": {who: f"{text[who]:.3f}" for who in ("base", "lpes") if who in text},
            "paragraphs": text["paragraphs"],
        }
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def task_scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    """One task's scores: its name, what was asked, and a table a metric."""
    tables = []
    for kind, (title, factor, digits) in SCALES.items():
        rows = []
        for who, name in (("base", "base model"), ("lpes", "this model")):
            if who in scores:
                found = scores[who][kind]
                means = [one[0] for one in [*found["by_position"], found["mean"]]]
                rows.append([name, *(fixed(value, digits, factor) for value in [*means, found["minimum"]])])
        if "difference" in scores:
            gain = scores["difference"][kind]
            gains = (difference(value, digits, factor) for value in [*gain["by_position"], gain["mean"]])
            rows.append(["difference", *gains, ""])
        unit = "%" if scores["position_unit"] == "%" else ""
        tables.append((title, [f"place {place}{unit}" for place in scores["positions"]], rows))
    return {
        "title": scores["title"],
        "contexts": scores["contexts"]["report"],
        "settings": json.dumps(scores["settings"], ensure_ascii=False),
        "tables": tables,
    }


def leaves(scores: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The numbers in the scores as rows of a table: what, how much."""
    for key, value in scores.items():
        name = f"{prefix} {str(key).replace('_', ' ')}".strip()
        if isinstance(value, Mapping):
            yield from leaves(value, f"{name}:" if not prefix else f"{name},")
        elif isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
            yield from leaves({f"{key} {i}": item for i, item in enumerate(value, 1)}, prefix)
        elif isinstance(value, (list, tuple)):
            yield name, " ".join(short(item) for item in value)
        else:
            yield name, short(value)


def short(value: Any) -> str:
    """A value for the eye: numbers to four digits, whole ones in full."""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(short(item) for item in value)})"
    return str(value).replace("|", "\\|")
