"""What the tables are made of for each model: its tasks and their sizes, and what its searches take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Words = tuple[str, ...]
Options = Mapping[str, str | None]
"""Options of a command by name; None for a flag."""


@dataclass(frozen=True)
class Asked:
    """A task at one size. spec: as behind --task; {mdqa} stands for the file. contexts: asked at every position."""

    spec: str
    contexts: int


@dataclass(frozen=True)
class Setup:
    """One model. tasks: by name; each has a size that is searched on, and another length behind "-other"."""

    model: str
    prompt_format: str
    tasks: Mapping[str, Asked]
    searched: Mapping[str, str]
    """What a search is given behind --task: the same sizes, with the evidence at the beginning, middle and end."""
    search: Options
    """Options of every search."""
    pi: str
    """The factor of Positional Interpolation."""
    optimizers: Mapping[str, Options]
    """What is added to them for each optimizer of the ablation."""
    control_points: tuple[int, ...]
    """Besides those of `search`, 4."""
    instances: tuple[int, ...]
    """Contexts of a search besides those of `search`; each is asked at three places."""
    draws: int
    """Noisy and shuffled copies of the found factors, each."""
    few: int
    """Contexts for measurements inside the model: deviation and attention."""
    harness: Options
    """What lm-evaluation-harness is asked."""


# 67 contexts at three places are the paper's "about 200 instances". force: a table shows what a search found, also
# where that does not beat the base model beyond noise.
PAPER: Options = MappingProxyType({"preset": "paper", "force": None})
# Gradients need a fitness that has some, and all optimizers the same one.
LOGPROB = {"fitness": "logprob", "race": "probable"}
MMLU = MappingProxyType({"harness": "mmlu,ceval-valid", "num-fewshot": "5"})
MDQA_20 = Asked("mdqa:{mdqa},documents=20,positions=0/4/9/14/19", 250)
MDQA_10 = Asked("mdqa:{mdqa},documents=10,positions=0/4/9", 400)


def of_7b(model: str, prompt_format: str, pairs: int, positions: str, other_pairs: int, other_positions: str) -> Setup:
    """A 7B model, with as many key-value pairs as its positions hold."""
    kv = f"kv,pairs={pairs},key_width=uuid"
    return Setup(
        model=model,
        prompt_format=prompt_format,
        tasks=MappingProxyType(
            {
                "kv": Asked(f"{kv},positions={positions}", 500),
                "kv-other": Asked(f"kv,pairs={other_pairs},key_width=uuid,positions={other_positions}", 500),
                "mdqa": MDQA_20,
                "mdqa-other": MDQA_10,
            }
        ),
        searched=MappingProxyType({"kv": kv, "mdqa": "mdqa:{mdqa},documents=20"}),
        search=PAPER,
        pi="1.5",
        optimizers=MappingProxyType(
            {name: {**LOGPROB, "optimizer": name} for name in ("genetic", "gradient", "hybrid", "cma-es", "random")}
        ),
        control_points=(2, 3, 6, 8),
        instances=(8, 17, 33),
        draws=5,
        few=50,
        harness=MMLU,
    )


SETUPS = {
    # 75 pairs of UUIDs are some 5,400 tokens of a tokenizer like Llama 2's: more than these two have positions.
    "vicuna-7b": of_7b("lmsys/vicuna-7b-v1.5", "vicuna", 50, "0/12/25/37/49", 25, "0/6/12/18/24"),
    "stablebeluga-7b": of_7b("stabilityai/StableBeluga-7B", "stable-beluga", 50, "0/12/25/37/49", 25, "0/6/12/18/24"),
    "qwen2.5-7b": of_7b("Qwen/Qwen2.5-7B", "plain", 140, "0/34/69/104/139", 75, "0/18/37/55/74"),
    "smollm2": Setup(
        model=".cache/SmolLM2-135M-Instruct",
        prompt_format="plain",
        tasks=MappingProxyType(
            {
                "kv": Asked("kv,pairs=16,positions=0/4/8/12/15", 20),
                "kv-other": Asked("kv,pairs=32,positions=0/8/16/24/31", 10),
                "mdqa": Asked("mdqa:{mdqa},documents=8,positions=0/2/4/5/7", 6),
                "mdqa-other": Asked("mdqa:{mdqa},documents=4,positions=0/1/3", 8),
            }
        ),
        searched=MappingProxyType({"kv": "kv", "mdqa": "mdqa:{mdqa},documents=8"}),
        # Gradients, for the paper's algorithm needs hundreds of evaluations.
        search=MappingProxyType(
            {
                "contexts": "6",
                "gradient-contexts": "16",
                "steps": "12",
                "check-every": "4",
                "uniform": "0.9,0.95",
                "finalists": "1",
                "selection-contexts": "6",
                "report-contexts": "10",
                "max-tokens": "40000",
                "force": None,
            }
        ),
        pi="0.95",
        optimizers=MappingProxyType({name: {"optimizer": name} for name in ("genetic", "random")}),
        control_points=(2,),
        instances=(3,),
        draws=3,
        few=8,
        harness=MappingProxyType({"harness": "mmlu_nutrition", "num-fewshot": "0", "limit": "100"}),
    ),
}
