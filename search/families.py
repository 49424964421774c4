"""The model families that can be scaled, as data. Needs neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lpes_bake.search.errors import InputError


@dataclass(frozen=True)
class Family:
    """One family: what its base checkpoints are called, and what a baked one is called."""

    base_model_type: str
    base_prefix: str

    @property
    def model_type(self) -> str:
        """`model_type` of a baked config.json: never the base's, or the factors would be ignored."""
        return f"lpes_{self.base_model_type}"

    @property
    def prefix(self) -> str:
        """What class names of this family begin with."""
        return f"Lpes{self.base_prefix}"

    @property
    def module(self) -> str:
        """The modeling module, in `lpes_bake.modeling` and in a baked directory."""
        return f"modeling_{self.model_type}"

    @property
    def files(self) -> tuple[str, ...]:
        """The Python files that ship in a baked directory."""
        return (f"{SHARED_MODULE}.py", f"{self.module}.py")

    @property
    def architectures(self) -> dict[str, str]:
        """Base architecture name → baked architecture name."""
        heads = ("ForCausalLM", "ForSequenceClassification", "Model")
        return {f"{self.base_prefix}{head}": f"{self.prefix}{head}" for head in heads}

    @property
    def auto_map(self) -> dict[str, str]:
        """`auto_map` of a baked config.json. vLLM needs AutoModel too."""
        return {
            "AutoConfig": f"{SHARED_MODULE}.{self.prefix}Config",
            "AutoModel": f"{self.module}.{self.prefix}Model",
            "AutoModelForCausalLM": f"{self.module}.{self.prefix}ForCausalLM",
            "AutoModelForSequenceClassification": f"{self.module}.{self.prefix}ForSequenceClassification",
        }


# The module that all families share. transformers before 4.57 resolves a relative import in a
# directory with a dot in its name (Qwen2.5-…) only when that module is loaded already, and the
# config's always is: so this one file holds the config classes and all that modeling files share.
SHARED_MODULE = "layer_rope_scaling"

FAMILIES = (Family("llama", "Llama"), Family("qwen2", "Qwen2"), Family("mistral", "Mistral"), Family("qwen3", "Qwen3"))


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a base model's config.json; `where` names the model in the error."""
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type == family.base_model_type:
            return family
        if model_type == family.model_type:
            raise InputError(f"{where} is already baked (model_type {model_type!r}); give its base model instead")
    supported = ", ".join(family.base_model_type for family in FAMILIES)
    raise InputError(f"{where} has model_type {model_type!r}, which is not supported; supported: {supported}")
