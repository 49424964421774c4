"""What factors do to the prediction of short plain text: log-probability and KL a token, against the base model.

    python -m benchmarks.paper.short_text MODEL --factors FILE --out FILE [--text FILE]

On the paragraphs of the report part, which no search keeps its leash by.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.paper.measuring import factors_of, load, opened, options_of, run, write
from lpes_bake.search.short_text import Drift, read_paragraphs
from lpes_bake.search.statistics import paired_interval


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    options = options_of(__doc__)
    options.add_argument("--text", type=Path, help="text file with paragraphs  [default: those of lpes-bake]")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Measure the base model and the factors."""
    options = parser().parse_args(arguments)
    paragraphs = read_paragraphs(options.text)["report"]
    source, tokenizer = opened(options.model)
    candidates = factors_of(source, options.factors)
    drift = Drift(load(source), tokenizer, paragraphs)
    base = drift.measure((1.0,) * source.num_hidden_layers)
    rows = [{"factors": "base", "logprob": base.logprob.mean(), "difference": None, "kl": base.kl.mean()}]
    for path, factors in zip(options.factors, candidates, strict=True):
        scores = drift.measure(factors)
        difference = list(paired_interval(scores.logprob, base.logprob))
        row = {"logprob": scores.logprob.mean(), "difference": difference, "kl": scores.kl.mean()}
        rows.append({"factors": str(path), **row})
    write(options.out, {"model": options.model, "paragraphs": len(paragraphs), "candidates": rows})


if __name__ == "__main__":
    run(main)
