"""Rules from Hugging Face tensors to parameters, and the one report of all that does not fit."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from convert.hf import HFFolder

_DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
_BLOCK_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Fills parameter `destination` from `sources`, each a tensor name and its expected shape.

    transpose False: one source, kept. True: matrices [out, in], stacked along `out`, become one
    kernel [in, out]. fill: for all else, it writes source number i into the parameter, whose
    shape is `filled_shape`.
    """

    destination: str
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    transpose: bool = False
    fill: Callable[[np.ndarray, int, np.ndarray], None] | None = None
    filled_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.filled_shape is not None:
            return self.filled_shape
        if not self.transpose:
            return self.sources[0][1]
        return (self.sources[0][1][1], sum(shape[0] for _, shape in self.sources))


def keep(destination: str, source: str, *shape: int) -> Rule:
    """A tensor stored as it is."""
    return Rule(destination=destination, sources=((source, shape),), transpose=False)


def linear(destination: str, columns: int, *sources: tuple[str, int]) -> Rule:
    """One kernel [columns, sum of rows] of linear weights [rows, columns]."""
    shapes = tuple((name, (rows, columns)) for name, rows in sources)
    return Rule(destination=destination, sources=shapes, transpose=True)


def find_problems(
    rules: Sequence[Rule],
    folder: HFFolder,
    expected: dict[str, tuple[int, ...]],
    ignored: Sequence[str],
) -> list[str]:
    """Everything that keeps `folder` from filling `expected` by `rules`, tensors named.

    expected: parameter name -> shape. ignored: patterns of tensors that may be left over.
    """
    problems = list(folder.problems)
    filled: dict[str, Rule] = {}
    used: set[str] = set()
    for rule in rules:
        if rule.destination in filled:
            problems.append(f"parameter {rule.destination} has two rules")
        filled[rule.destination] = rule
        for name, shape in rule.sources:
            used.add(name)
            tensor = folder.tensors.get(name)
            if tensor is None:
                problems.append(f"tensor {name} {list(shape)} is missing")
                continue
            if tensor.shape != shape:
                got = list(tensor.shape)
                problems.append(f"tensor {name} has shape {got}, expected {list(shape)}")
            if tensor.dtype not in _DTYPES:
                wanted = ", ".join(_DTYPES)
                problems.append(f"tensor {name} has dtype {tensor.dtype}, expected one of {wanted}")
    for name, shape in expected.items():
        if name not in filled:
            problems.append(f"parameter {name} has no rule")
        elif filled[name].shape != shape:
            problems.append(f"parameter {name}: rule gives {filled[name].shape}, expected {shape}")
    problems += [f"rule for unknown parameter {name}" for name in filled if name not in expected]
    problems += [
        f"tensor {name} is not expected in this architecture"
        for name in folder.tensors
        if name not in used and not any(re.fullmatch(pattern, name) for pattern in ignored)
    ]
    return problems


def report(problems: Sequence[str], folder: HFFolder) -> None:
    """Raises one ValueError with every problem, if there is any."""
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ValueError(f"{folder.path} cannot be converted; {len(problems)} problems:{lines}")


def apply(
    rules: Sequence[Rule], folder: HFFolder, on_bytes: Callable[[int], None]
) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters in rule order, one in memory at a time. `on_bytes` hears of each tensor read."""
    for rule in rules:
        yield rule.destination, _value(rule, folder, on_bytes)


def transpose_into(out: np.ndarray, value: np.ndarray) -> None:
    """out[...] = value.T. Block by block: a whole assignment misses the cache (4x slower)."""
    for row in range(0, value.shape[0], _BLOCK_ROWS):
        block = value[row : row + _BLOCK_ROWS]
        out[:, row : row + block.shape[0]] = block.T


def _value(rule: Rule, folder: HFFolder, on_bytes: Callable[[int], None]) -> np.ndarray:
    if not rule.transpose and rule.fill is None:
        name = rule.sources[0][0]
        value = folder.read(name)
        on_bytes(value.nbytes)
        return value
    dtypes = {folder.tensors[name].dtype for name, _ in rule.sources}
    # Neither 16-bit format holds the other: only float32 holds both.
    out = np.empty(rule.shape, _DTYPES[dtypes.pop() if len(dtypes) == 1 else "F32"])
    column = 0
    for number, (name, _) in enumerate(rule.sources):
        value = folder.read(name)
        if rule.fill is not None:
            rule.fill(out, number, value)
        else:
            transpose_into(out[:, column : column + value.shape[0]], value)
            column += value.shape[0]
        on_bytes(value.nbytes)
    return out
