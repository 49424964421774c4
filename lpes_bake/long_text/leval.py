"""L-Eval (An et al., arXiv 2307.11088): closed tasks with right answers, open ones scored by F1 or ROUGE.

Files are the authors' JSONL: a document a line, with several instructions and their outputs. Prompts are those of their
script for Llama 2 chat, odd spellings and all; what goes to that model as a system prompt stands first in the user's
turn here, as not all models have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lpes_bake.long_text.metrics import (
    Metric,
    code_output,
    contained,
    final_number,
    multiple_choice,
    rouge,
    several_choices,
    token_f1,
    true_or_false,
)
from lpes_bake.long_text.questions import Benchmark, Question, fetch_file
from lpes_bake.search.jsonl import Row, read_rows, shown

REPO = "L4NLP/LEval"
MAX_NEW_TOKENS = 512
OPEN_METRICS: dict[str, tuple[str, Metric]] = {"rouge": ("ROUGE", rouge), "f1": ("F1", token_f1)}
# Other kinds of evaluation: by people, and by other models.
JUDGED = ("human", "LLM")

EXAM = (
    "Now you are given a very long document. Please follow the instruction based on this document. For multi-choice "
    "questions, there is only a sinlge correct option. Please only provide the letter corresponding to the answer "
    "(like A or B) when answering. For other questions, please directly give the concise and accurate answer. "
)
OPEN = (
    "Now you are given a very long document. Please follow the instruction after this document. These instructions "
    "may include summarizing a document, answering questions based on the document, or writing a required paragraph. "
)
COURSERA = (
    "Now you are given a very long document. Please follow the instruction based on this document. For multi-choice "
    "questions, there could be a sinlge correct option or multiple correct options. Please only provide the letter "
    "corresponding to the answer (like A or AB) when answering. "
)
GSM = (
    "Given several question answer pairs, you need to follow a similar format to answer the last question. Make sure "
    "the response is end with The answer is _ . "
)
TOPIC = (
    "Below is a record of our previous conversation on many different topics. You are the ASSISTANT, and I am the "
    "USER. At the beginning of each topic, the USER will say 'I would like to discuss the topic of <TOPIC>'. Memorize "
    "each <TOPIC>. At the end of the record, I will ask you to retrieve the first/second/third topic names. Now the "
    "record start. "
)
CODE = (
    "Now you are given a code base consisting of a large amount of functions and the corresponding comments. In the "
    "end, I will call some functions defined in the code base. Please carefully read these codes and comments and "
    "answer the question."
)
FICTION = (
    'Now you are given a scientific fiction. I will ask you some questions and the answer should be "True" or '
    '"False". Notice that you should answer the question based on the evidence in the document instead of your '
    "background knowledge."
)
IN_THE_DOCUMENT = "based on the world described in the document."
IN_THE_WORLD = "based on the real-world knowledge and facts up until your last training"


@dataclass(frozen=True)
class Closed:
    """How a closed task is asked and scored. bare: document and instruction follow one another without a word."""

    system: str
    metric: Metric
    bare: bool = False


CLOSED = {
    "coursera": Closed(COURSERA, several_choices),
    "quality": Closed(EXAM, multiple_choice),
    "tpo": Closed(EXAM, multiple_choice),
    "topic_retrieval_longchat": Closed(TOPIC, contained, bare=True),
    "gsm100": Closed(GSM, final_number, bare=True),
    "codeU": Closed(CODE, code_output, bare=True),
    "sci_fi": Closed(FICTION, true_or_false),
}
OPEN_TASKS = (
    "financial_qa", "gov_report_summ", "legal_contract_qa", "meeting_summ", "multidoc_qa", "narrative_qa",
    "natural_question", "news_summ", "paper_assistant", "patent_summ", "review_summ", "scientific_qa", "tv_show_summ",
)  # fmt: skip
TASKS = (*CLOSED, *OPEN_TASKS)


def fetch(task: str) -> list[Row]:
    """The task's file from the Hub."""
    return list(read_rows(fetch_file(REPO, f"LEval/{'Exam' if task in CLOSED else 'Generation'}/{task}.jsonl")))


def benchmark(task: str, rows: Sequence[Row]) -> Benchmark:
    """The task's questions, one an instruction."""
    if task in CLOSED:
        questions = tuple(question for row in rows for question in _closed(task, row))
        return Benchmark(f"leval/{task}", questions, "accuracy", CLOSED[task].metric, MAX_NEW_TOKENS)
    judged = [row for row in rows if row.values.get("evaluation") in JUDGED]
    scored = [row for row in rows if row.values.get("evaluation") not in JUDGED]
    kinds = {row.values.get("evaluation"): row for row in scored}
    for kind, row in kinds.items():
        if kind not in OPEN_METRICS or len(kinds) > 1:
            raise row.error(
                f'"evaluation" is {shown(kind)}; all rows but {" and ".join(JUDGED)} must have f1, or rouge'
            )
    if not scored:
        raise judged[0].error(f'"evaluation" is {" or ".join(JUDGED)} in all rows, so nothing can be scored here')
    ((name, metric),) = (OPEN_METRICS[str(kind)] for kind in kinds)
    questions = tuple(question for row in scored for question in _open(row))
    left_out = sum(len(_pairs(row)) for row in judged)
    return Benchmark(f"leval/{task}", questions, name, metric, MAX_NEW_TOKENS, left_out)


def _closed(task: str, row: Row) -> Iterator[Question]:
    kind = CLOSED[task]
    document = _document(row)
    for instruction, output in _pairs(row):
        if kind.bare:
            before, after = kind.system, f"\n\n{instruction}"
        else:
            before = f"{kind.system}Document is as follows. "
            after = (
                f" \nQuestion: {instruction}.  Please directly give answer without any additonal output or explanation "
                "\nAnswer:"
            )
        # SciFi's outputs may also say what holds in the real world, which is asked without the document.
        loyal, _, fact = output.partition("[fact:")
        yield Question(before, document, after, (loyal.strip(),), row.where, cut_at_beginning=task == "codeU")
        if fact:
            asked = instruction.replace(IN_THE_DOCUMENT, IN_THE_WORLD)
            yield Question("", "", f"{asked}\nAnswer:", (fact.removesuffix("]").strip(),), row.where)


def _open(row: Row) -> Iterator[Question]:
    document = _document(row)
    for instruction, output in _pairs(row):
        after = f" Instruction: {instruction} \nAnswer this question with {len(output.split())} words."
        yield Question(f"{OPEN}Document is as follows. ", document, after, (output,), row.where)


def _document(row: Row) -> str:
    # GSM's examples stand in the instructions.
    return row.checked_text(row.values.get("input"), '"input"', may_be_empty=True)


def _pairs(row: Row) -> list[tuple[str, str]]:
    """Each instruction with its output."""
    instructions, outputs = row.items("instructions"), row.items("outputs")
    if len(instructions) != len(outputs):
        raise row.error(f'{len(instructions)} "instructions", but {len(outputs)} "outputs"; each must have one')
    return [
        (row.checked_text(instruction, "an instruction"), row.checked_text(output, "an output"))
        for instruction, output in zip(instructions, outputs, strict=True)
    ]
