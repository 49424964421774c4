"""The model families that can be scaled, as data. Needs neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lpes_bake.search.errors import InputError


@dataclass(frozen=True)
class Family:
    """One family: what its base checkpoints are called, and what a baked one is called.

    base_prefix: what class names begin with in transformers. heads: what they end with, for the classes that exist.
    language_model: the one with "ForCausalLM", where it begins with something else. needs: the oldest version of
    transformers that loads a bake.
    """

    base_model_type: str
    base_prefix: str
    heads: tuple[str, ...] = ("ForCausalLM", "ForSequenceClassification", "Model")
    language_model: str | None = None
    needs: str = "4.48"

    @property
    def base_config(self) -> str:
        """The base's config class in transformers."""
        return f"{self.base_prefix}Config"

    def base_class(self, head: str) -> str:
        """The base's model class in transformers; head is one of `heads`."""
        if head == "ForCausalLM" and self.language_model:
            return self.language_model
        return f"{self.base_prefix}{head}"

    @property
    def model_type(self) -> str:
        """`model_type` of a baked config.json: never the base's, or the factors would be ignored."""
        return f"lpes_{self.base_model_type}"

    @property
    def prefix(self) -> str:
        """What class names of this family begin with."""
        return f"Lpes{self.base_prefix}"

    @property
    def config(self) -> str:
        """The config class of a baked checkpoint."""
        return f"Lpes{self.base_config}"

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
        return {self.base_class(head): f"Lpes{self.base_class(head)}" for head in self.heads}

    @property
    def auto_map(self) -> dict[str, str]:
        """`auto_map` of a baked config.json. vLLM needs AutoModel too."""
        models = {f"Auto{'' if head == 'Model' else 'ModelFor'}{head.removeprefix('For')}": head for head in self.heads}
        return {
            "AutoConfig": f"{SHARED_MODULE}.{self.config}",
            **{auto: f"{self.module}.{self.architectures[self.base_class(head)]}" for auto, head in models.items()},
        }


# The module that all families share. transformers before 4.57 resolves a relative import in a
# directory with a dot in its name (Qwen2.5-…) only when that module is loaded already, and the
# config's always is: so this one file makes the config classes and holds all that modeling files share.
SHARED_MODULE = "layer_rope_scaling"

# Granite and Cohere have no classifier, OLMo 2 and DeepSeek-V3 only in versions of transformers newer than they are.
WITHOUT_CLASSIFIER = ("ForCausalLM", "Model")
FAMILIES = (
    Family("llama", "Llama"),
    Family("qwen2", "Qwen2"),
    Family("mistral", "Mistral"),
    Family("qwen3", "Qwen3", needs="4.51"),
    Family("phi3", "Phi3"),
    Family("olmo2", "Olmo2", WITHOUT_CLASSIFIER),
    Family("granite", "Granite", WITHOUT_CLASSIFIER),
    Family("smollm3", "SmolLM3", needs="4.53"),
    Family("mixtral", "Mixtral"),
    Family("qwen3_moe", "Qwen3Moe", needs="4.51"),
    Family("stablelm", "StableLm"),
    Family("gpt_neox", "GPTNeoX"),
    Family("gemma2", "Gemma2"),
    Family("gemma3_text", "Gemma3Text", language_model="Gemma3ForCausalLM", needs="5.0"),
    Family("cohere", "Cohere", WITHOUT_CLASSIFIER),
    Family("glm4", "Glm4", needs="4.51"),
    Family("deepseek_v3", "DeepseekV3", WITHOUT_CLASSIFIER, needs="4.51"),
)


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a base model's config.json; `where` names the model in the error."""
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type == family.base_model_type:
            return family
        if model_type == family.model_type:
            raise InputError(
                f"{where} is already baked (model_type {model_type!r}); give its base model instead, or export it "
                "with --rebake"
            )
    supported = ", ".join(family.base_model_type for family in FAMILIES)
    raise InputError(f"{where} has model_type {model_type!r}, which is not supported; supported: {supported}")
