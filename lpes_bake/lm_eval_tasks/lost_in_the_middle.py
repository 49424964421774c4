"""What the YAML files beside this one cannot say: questions from the user's files, and how answers are judged.

Prompts, gold places and metrics are those of `lpes-bake search` and `eval`, by the same code. Files are named by
environment variables, or by the same names in lower case in `--metadata '{"lpes_kv_file": …}'`:

- LPES_MDQA_FILE: as `--task mdqa:FILE` takes it, with as many documents in a row as are asked for, or with gold
  passages only.
- LPES_KV_FILE: as `--task kv:FILE` takes it. Without it, random pairs with UUID keys are generated.

Nothing is ever downloaded. The metadata may also hold lpes_contexts and lpes_seed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from typing import Any

try:
    from lpes_bake.search.errors import InputError
    from lpes_bake.search.kv_retrieval import UUID, KVRetrieval, KVRetrievalFile
    from lpes_bake.search.metrics import best_subspan_em, first_line
    from lpes_bake.search.multi_document import MultiDocumentQA
    from lpes_bake.search.tasks import Task
except ModuleNotFoundError as error:
    if error.name != "lpes_bake":
        raise
    raise ModuleNotFoundError(
        "the lpes_… tasks need lpes-bake in the environment that lm_eval runs in: pip install lpes-bake there",
        name=error.name,
    ) from error

# As many as there are questions in the authors' files of key-value retrieval.
CONTEXTS = 500
SEED = 1


def documents(documents: int, positions: Sequence[int], **metadata: Any) -> dict[str, Any]:
    """The test split of multi-document QA with so many documents."""
    file = _file("LPES_MDQA_FILE", metadata)
    if file is None:
        raise InputError(
            "LPES_MDQA_FILE is not set; give it the path of a file of the lost-in-the-middle authors, such as "
            "nq-open-oracle.jsonl.gz"
        )
    return _split(MultiDocumentQA(file, documents, tuple(positions)), metadata)


def pairs(pairs: int, positions: Sequence[int], **metadata: Any) -> dict[str, Any]:
    """The test split of key-value retrieval with so many pairs."""
    file = _file("LPES_KV_FILE", metadata)
    if file is None:
        return _split(KVRetrieval(pairs, UUID, tuple(positions)), metadata)
    task = KVRetrievalFile(file, tuple(positions))
    if task.pairs != pairs:
        raise InputError(f"LPES_KV_FILE {file} has {task.pairs} pairs in a row, and lpes_kv_{pairs} asks for {pairs}")
    return _split(task, metadata)


def judge_text(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Accuracy of a generated answer, in all and at its gold place."""
    return _at_place(doc, best_subspan_em(first_line(results[0]), doc["answers"]))


def judge_value(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, float]:
    """Whether greedy decoding begins with the value, in all and at its gold place."""
    ((_, greedy),) = results
    return _at_place(doc, greedy)


def _at_place(doc: dict[str, Any], right: bool) -> dict[str, float]:
    return {"acc": float(right), f"acc_at_{doc['position']}": float(right)}


def _file(variable: str, metadata: dict[str, Any]) -> str | None:
    return metadata.get(variable.lower()) or os.environ.get(variable)


def _split(task: Task, metadata: dict[str, Any]) -> dict[str, Any]:
    """The contexts of the report part, which no search sees, place by place."""
    from datasets import Dataset

    contexts = task.contexts("report", metadata.get("lpes_seed", SEED))
    rows = [
        {
            "context": example.context,
            "position": example.position,
            "prompt": example.prompt + example.lead,
            "answers": list(example.accepted) or [example.answer],
        }
        for context in islice(contexts, metadata.get("lpes_contexts", CONTEXTS))
        for example in context
    ]
    if not rows:
        raise InputError(f"{task.title}: the file gives no context for its report part; bring more rows")
    return {"test": Dataset.from_list(rows)}
