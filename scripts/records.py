"""Result lines of a sweep: appended so that a kill loses none, read, and pooled into cells.

tau of a cell pools its prompts: all accepted lengths over all rounds. A speed-up is tokens/s over
tokens/s of autoregressive decoding in the same context, over the prompts that both have.
"""

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cells import CONTEXT, EMBEDDED

Line = dict[str, Any]
LONGEST_PERIOD = 40
NEEDED = ("cell", "settings", "prompt", "tokens", "accepted_lengths", "seconds")


def context() -> dict[str, str | None]:
    """Device, versions and commit, for every line of results."""
    import jax  # here, so that plots and tables start without it

    import ddtree_jax

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "ddtree_jax": ddtree_jax.__version__,
        "commit": commit.stdout.strip() or None,
    }


def loops(tokens: tuple[int, ...]) -> bool:
    """Whether an output ends in three or more repetitions of at most 40 tokens."""
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // 3) + 1):
        unit = tokens[-period:]
        repeats = max(3, -(-12 // period))  # short units must repeat longer
        if len(tokens) >= repeats * period and tokens[-repeats * period :] == unit * repeats:
            return True
    return False


def append(path: Path, lines: Iterable[Line]) -> None:
    """Adds lines in one write, on the disk before it returns."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def repair(path: Path, *, needed: Iterable[str] = NEEDED, script: str = "sweep.py") -> list[Line]:
    """Cuts a torn last line off the file and returns the complete ones; no file is none."""
    if not path.exists():
        return []
    data = path.read_bytes()
    complete = data.rfind(b"\n") + 1
    if complete < len(data):
        with path.open("r+b") as file:
            file.truncate(complete)
    return read_lines(path, needed=needed, script=script)


def read_lines(
    path: Path, *, needed: Iterable[str] = NEEDED, script: str = "sweep.py"
) -> list[Line]:
    """The lines of a result file; a torn last one, of a `script` that still runs, is left out.

    Raises ValueError, naming file and line, on anything else that is no result line.
    """
    *complete, _ = path.read_bytes().split(b"\n")
    lines = []
    for number, text in enumerate(complete, 1):
        try:
            line = json.loads(text)
            missing = [name for name in needed if name not in line]
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError):
            missing = ["JSON object"]
        if missing:
            raise ValueError(
                f"{path}:{number} is no line of {script}, it lacks {missing}; remove the line or "
                "give another file"
            )
        lines.append(line)
    return lines


@dataclass(kw_only=True)
class Result:
    """A cell with its lines, one a prompt."""

    settings: dict[str, Any]
    lines: dict[tuple[int, str], Line] = field(default_factory=dict)

    @property
    def context(self) -> tuple:
        return tuple(self.settings[name] for name in CONTEXT)

    @property
    def accepted(self) -> Counter[int]:
        """How many rounds committed each number of tokens."""
        return Counter(n for line in self.lines.values() for n in line["accepted_lengths"])

    @property
    def tau(self) -> float:
        accepted = self.accepted
        rounds = accepted.total()
        return sum(n * count for n, count in accepted.items()) / rounds if rounds else float("nan")

    def tokens_per_second(self, prompts: Iterable[tuple[int, str]] | None = None) -> float:
        chosen = [self.lines[p] for p in (self.lines if prompts is None else prompts)]
        return sum(line["tokens"] for line in chosen) / sum(line["seconds"] for line in chosen)

    @property
    def stage_ms(self) -> dict[str, float]:
        """Mean milliseconds of each stage a round, over the lines that measured them."""
        measured = [line["stage_ms"] for line in self.lines.values() if line.get("stage_ms")]
        names = dict.fromkeys(name for stages in measured for name in stages)
        return {name: sum(s.get(name, 0) for s in measured) / len(measured) for name in names}

    @property
    def is_tree(self) -> bool:
        return self.settings["method"] == "ddtree" and self.settings["acceptance"] == "tree_walk"

    @property
    def variant(self) -> str:
        """autoregressive, chain, best-first, spine, static or linear."""
        settings = self.settings
        if settings["method"] != "ddtree":
            return {"dflash": "chain"}.get(settings["method"], settings["method"])
        if settings["acceptance"] == "linear":
            return "linear"
        return "spine" if settings["spine"] else settings["tree_shape"].replace("_", "-")


class Results:
    """All cells of some lines; of a prompt that a cell has twice the later line counts."""

    def __init__(self, lines: Iterable[Line]):
        self.cells: dict[str, Result] = {}
        for line in lines:
            cell = self.cells.setdefault(line["cell"], Result(settings=line["settings"]))
            cell.lines[line["prompt"], line.get("prompt_sha256", "")] = line
        if not self.cells:
            raise ValueError("RESULTS holds no complete line; run sweep.py first")

    @classmethod
    def of(cls, paths: Iterable[Path]) -> "Results":
        return cls(line for path in paths for line in read_lines(path))

    def find(self, context: tuple, variant: str) -> list[Result]:
        return [r for r in self.cells.values() if r.context == context and r.variant == variant]

    def speedup(self, result: Result) -> float | None:
        """None without an autoregressive cell of the same context and shared prompts."""
        for base in self.find(result.context, "autoregressive"):
            shared = [prompt for prompt in result.lines if prompt in base.lines]
            if shared:
                return result.tokens_per_second(shared) / base.tokens_per_second(shared)
        return None

    def trees(self, context: tuple) -> list[Result]:
        """Cells with trees of any shape, by budget; linear acceptance is no tree decoding."""
        found = [r for r in self.cells.values() if r.context == context and r.is_tree]
        return sorted(found, key=lambda r: (r.settings["tree_budget"], r.variant))

    def best_tree(self, context: tuple) -> Result | None:
        """The fastest tree; of equals the smallest."""
        found = self.trees(context)
        return max(found, key=lambda r: r.tokens_per_second()) if found else None

    def contexts(self) -> list[tuple]:
        return list(dict.fromkeys(result.context for result in self.cells.values()))


def pair_name(pair: str) -> str:
    """Short name of a pair: the target's."""
    return pair if pair == EMBEDDED else pair.partition(",")[0].rstrip("/").rpartition("/")[2]


def differing(contexts: Iterable[tuple], among: Iterable[str]) -> list[str]:
    """The settings of `among` that have more than one value."""
    contexts = list(contexts)
    return [name for name in among if len({c[CONTEXT.index(name)] for c in contexts}) > 1]


def setting(context: tuple, name: str) -> Any:
    return context[CONTEXT.index(name)]
