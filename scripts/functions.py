"""Function documents: single functions cut out of files, written as HumanEval writes them."""

import ast
import builtins
import hashlib
import re
import textwrap
from typing import NamedTuple

_NAMES = ("List", "Dict", "Tuple", "Optional", "Any", "Union", "Set", "Iterable", "Callable")
_TYPING = re.compile(rf"\b({'|'.join(_NAMES)})\b")
_KNOWN = frozenset(dir(builtins)) | {"math", "re"} | set(_NAMES)
MAX_LINES = 60


class FunctionText(NamedTuple):
    """A standalone function. `header` runs to the end of the docstring, or of the signature.

    pure: uses only its arguments, its own names and builtins.
    """

    header: str
    body: str
    documented: bool
    pure: bool
    digest: bytes


def _is_pure(node: ast.FunctionDef) -> bool:
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    known = {argument.arg for argument in arguments} | {node.name}
    if not arguments or arguments[0].arg in ("self", "cls"):
        return False
    loaded = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            (loaded if isinstance(inner.ctx, ast.Load) else known).add(inner.id)
        elif isinstance(inner, ast.arg):
            known.add(inner.arg)
        elif isinstance(inner, (ast.Import, ast.ImportFrom)):
            known.update((alias.asname or alias.name).split(".")[0] for alias in inner.names)
        elif isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
            known.add(inner.name)
        elif isinstance(inner, ast.ExceptHandler) and inner.name:
            known.add(inner.name)
    return loaded <= known | _KNOWN


def _cut(node: ast.FunctionDef, lines: list[str]) -> FunctionText | None:
    first, last = node.lineno - 1, node.end_lineno
    # A decorated function without its decorator would mislead about what it is called with.
    if not 3 <= last - first <= MAX_LINES or node.decorator_list:
        return None
    documented = ast.get_docstring(node, clean=False) is not None
    pure = _is_pure(node)
    rest = node.body[1:] if documented else node.body
    if not rest or not (documented or pure):
        return None
    cut = node.body[0].end_lineno if documented else node.body[0].lineno - 1
    # One-liners and a statement behind the docstring on its line have no clean cut.
    if not first < cut < rest[0].lineno:
        return None
    source = textwrap.dedent("\n".join(lines[first:last]) + "\n")
    if not source.startswith("def "):
        return None
    parts = source.splitlines(keepends=True)
    header, body = "".join(parts[: cut - first]), "".join(parts[cut - first :])
    names = sorted(set(_TYPING.findall(header)))
    if names:
        header = f"from typing import {', '.join(names)}\n\n\n{header}"
    digest = hashlib.blake2b(" ".join(source.split()).encode(), digest_size=12).digest()
    return FunctionText(header, body.rstrip() + "\n", documented, pure, digest)


def functions_of(text: str) -> list[FunctionText]:
    """Documented functions and self-contained ones, at most `MAX_LINES` lines each."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = text.split("\n")
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = (_cut(node, lines) for node in nodes)
    return [function for function in found if function is not None]
