"""What generation returns."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """accepted_lengths: root and accepted nodes of each verify round, before any cut by
    max_tokens or a stop, as the reference implementation counts. The first token of an output
    comes from prefill and belongs to no round."""

    accepted_lengths: tuple[int, ...]

    @property
    def rounds(self) -> int:
        return len(self.accepted_lengths)

    @property
    def mean_accepted_length(self) -> float:
        """Tokens committed a round, bonus included; nan without rounds."""
        return sum(self.accepted_lengths) / self.rounds if self.rounds else float("nan")


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundTrace:
    """One round of one request: its tree, and what the target wanted at each node.

    token, parent, depth, wanted: int32 [n]; node 0 is the root, whose parent is -1. log_prob:
    float32 [n], of the path to the node under the drafter. path: accepted nodes, root first.
    bonus: the target's token where the walk left the tree, the next root.
    """

    token: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    log_prob: np.ndarray
    wanted: np.ndarray
    path: tuple[int, ...]
    bonus: int


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One prompt's continuation. `text` is None without a tokenizer.

    A stop token is the last of `token_ids`, and shows in `text` unless it is special. A stop
    string is cut from `text`; `token_ids` end with the token that completed it. `trace` has an
    entry a round with LLM(trace=True), and is None without.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats
    trace: tuple[RoundTrace, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """An increment of the output of prompt `index`; `output` comes with the last one."""

    index: int
    text: str | None
    token_ids: tuple[int, ...]
    output: RequestOutput | None
