"""A sweep's grid, from flags or TOML, and its cells: settings under a stable key."""

import ast
import hashlib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from prompts import set_name

EMBEDDED = "embedded"
METHODS = (
    "autoregressive",
    "mtp",
    "dflash",
    "ddtree",
    "ddtree:spine",
    "ddtree:static",
    "ddtree:linear",
)
# What two cells must share for their speeds to be compared.
CONTEXT = (
    "pair",
    "prompts",
    "temperature",
    "slots",
    "max_tokens",
    "max_length",
    "dtype",
    "seed",
    "device",
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the grid, in canonical form: equal programs have equal cells.

    tree_budget is None for the drafter's chain, whose length is its block, and of "mtp" the tokens
    that the target's own block drafts.
    """

    pair: str
    method: str
    tree_shape: str | None
    tree_budget: int | None
    tree_choices: tuple[tuple[int, ...], ...] | None
    spine: bool
    acceptance: str
    prompts: str
    temperature: float
    slots: int
    max_tokens: int
    max_length: int
    dtype: str
    seed: int
    device: str

    @property
    def settings(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))

    @property
    def key(self) -> str:
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def llm_arguments(self) -> dict[str, Any]:
        """Arguments of `LLM`: cells with equal ones share a loaded model."""
        target, _, draft = (self.pair if self.pair != EMBEDDED else "").partition(",")
        arguments = {
            "target": target or None,
            "draft": draft or None,
            "method": self.method,
            "max_slots": self.slots,
            "max_length": self.max_length,
            "dtype": self.dtype,
        }
        if self.method == "mtp":
            arguments |= {"mtp_tokens": self.tree_budget}
        elif self.method == "ddtree" and self.tree_shape == "static":
            arguments |= {"tree_choices": self.tree_choices}
        elif self.method == "ddtree":
            arguments |= {"tree_budget": self.tree_budget, "spine": self.spine}
        if self.acceptance != "tree_walk":
            arguments |= {"acceptance": self.acceptance}
        return arguments


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to sweep; a field is a flag of sweep.py and a key of its TOML file.

    pair: "embedded", "TARGET,DRAFT" or a TARGET that decodes alone. method: one of METHODS; the
    budgets are of "ddtree", "ddtree:spine" and "ddtree:linear". tree_choices: of "ddtree:static".
    mtp_tokens: of "mtp", which needs a target with an MTP block.
    baseline: autoregressive decoding and the chain are added wherever a tree is.

    Raises ValueError on a value that no cell could have.
    """

    pair: tuple[str, ...] = (EMBEDDED,)
    method: tuple[str, ...] = ("ddtree",)
    budget: tuple[int, ...] = (63,)
    mtp_tokens: tuple[int, ...] = (3,)
    temperature: tuple[float, ...] = (0.0,)
    prompts: tuple[str, ...] = ("humaneval",)
    slots: tuple[int, ...] = (1,)
    tree_choices: str | tuple | None = None
    max_tokens: int = 128
    max_length: int = 4096
    dtype: str = "auto"
    seed: int = 0
    limit: int | None = None
    baseline: bool = True

    def __post_init__(self) -> None:
        for name in ("pair", "method", "budget", "mtp_tokens", "temperature", "prompts", "slots"):
            value = getattr(self, name)
            values = tuple(value) if isinstance(value, list | tuple) else (value,)
            _require(len(values) > 0, name, "at least one value", value)
            object.__setattr__(self, name, values)
        for name in ("pair", "prompts"):
            for value in getattr(self, name):
                _require(isinstance(value, str) and value != "", name, "text", value)
        for value in self.method:
            _require(value in METHODS, "method", f"one of {METHODS}", value)
        _require(
            "mtp" not in self.method or EMBEDDED not in self.pair,
            "pair",
            "targets with an MTP block for `method` 'mtp'; the embedded one has none",
            self.pair,
        )
        for name, low in (("budget", 0), ("mtp_tokens", 1), ("slots", 1)):
            for value in getattr(self, name):
                _require_integer(name, value, low)
        for name, low in (("max_tokens", 1), ("max_length", 2), ("seed", 0), ("limit", 1)):
            if name != "limit" or self.limit is not None:
                _require_integer(name, getattr(self, name), low)
        for value in self.temperature:
            _require(
                isinstance(value, int | float) and not isinstance(value, bool) and value >= 0,
                "temperature",
                "0 (greedy) or positive",
                value,
            )
        names = {set_name(name) for name in self.prompts}
        _require(len(names) == len(set(self.prompts)), "prompts", "different names", self.prompts)
        _require(
            ("ddtree:static" in self.method) == (self.tree_choices is not None),
            "tree_choices",
            "given exactly when `method` has 'ddtree:static'",
            self.tree_choices,
        )
        object.__setattr__(self, "tree_choices", _choices(self.tree_choices))

    @classmethod
    def of(cls, config: Path | None = None, **flags: Any) -> "Grid":
        """The grid of a TOML file; flags that are not None go before its values."""
        values = {} if config is None else tomllib.loads(config.read_text(encoding="utf-8"))
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"`{name}` in {config} is no setting; there are {known}")
        return cls(**(values | {name: v for name, v in flags.items() if v is not None}))

    def cells(self, device: str) -> list[Cell]:
        """All cells; those of one LLM follow each other, baselines first."""
        found: dict[str, Cell] = {}
        for pair, slots in product(self.pair, self.slots):
            for shape in self._shapes(pair):
                for prompts, temperature in product(self.prompts, self.temperature):
                    cell = Cell(
                        pair=pair,
                        prompts=set_name(prompts),
                        temperature=float(temperature),
                        slots=slots,
                        max_tokens=self.max_tokens,
                        max_length=self.max_length,
                        dtype=self.dtype,
                        seed=self.seed,
                        device=device,
                        **shape,
                    )
                    found.setdefault(cell.key, cell)
        return list(found.values())

    def _shapes(self, pair: str) -> Iterable[dict[str, Any]]:
        if self.baseline:
            yield _shape("autoregressive")
            if pair == EMBEDDED or "," in pair:
                yield _shape("dflash")
        for name in self.method:
            budgets = self.budget if name in ("ddtree", "ddtree:spine", "ddtree:linear") else (0,)
            for budget in self.mtp_tokens if name == "mtp" else budgets:
                yield _shape(name, budget, self.tree_choices)


def _shape(name: str, budget: int = 0, choices: tuple | None = None) -> dict[str, Any]:
    """The tree fields of a cell."""
    method, _, kind = name.partition(":")
    shape = {
        "method": method,
        "tree_shape": None,
        "tree_budget": 0,
        "tree_choices": None,
        "spine": False,
        "acceptance": "tree_walk",
    }
    if method == "dflash":
        return shape | {"tree_shape": "chain", "tree_budget": None}
    if method == "mtp":
        return shape | {"tree_shape": "chain", "tree_budget": budget}
    if kind == "static":
        return shape | {
            "tree_shape": "static",
            "tree_budget": len(choices),
            "tree_choices": choices,
        }
    if method == "autoregressive" or budget == 0:
        return shape | {"method": "autoregressive"}
    return shape | {
        "tree_shape": "best_first",
        "tree_budget": budget,
        "spine": kind == "spine",
        "acceptance": "linear" if kind == "linear" else "tree_walk",
    }


def _choices(value: Any) -> tuple[tuple[int, ...], ...] | None:
    """Rank paths in depth-first order; `LLM` checks what they say."""
    if value is None:
        return None
    try:
        paths = ast.literal_eval(value) if isinstance(value, str) else value
        return tuple(sorted(tuple(int(rank) for rank in path) for path in paths))
    except (ValueError, SyntaxError, TypeError) as error:
        raise ValueError(
            f"`tree_choices` must be rank paths such as [(0,), (0, 0), (1,)], got {value!r:.80}"
        ) from error


def _require(holds: bool, name: str, expected: str, got: Any) -> None:
    if not holds:
        raise ValueError(f"`{name}` must be {expected}, got {got!r}")


def _require_integer(name: str, value: Any, low: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _require(whole and value >= low, name, f"an integer of at least {low}", value)
