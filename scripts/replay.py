"""Rounds of chain and tree drafting replayed over a text whose tokens are known.

The deterministic tree is verified by walking along the target's own draws, so over a fixed draw
of the text the replay is exact.
"""

import heapq

import numpy as np


def tree_hits(text: np.ndarray, logs: np.ndarray, tokens: np.ndarray, budget: int) -> int:
    """Tokens of `text` that the `budget` most likely prefixes hold, in sequence.

    logs, tokens [J, M]: candidates of each depth, best first.
    """
    depths, width = logs.shape
    # (minus log-probability of the prefix, depth, rank, whether it follows `text` so far)
    heap = [(-logs[0, 0], 0, 0, True)]
    hits = 0
    for _ in range(budget):
        if not heap:
            break
        cost, depth, rank, parent_right = heapq.heappop(heap)
        right = parent_right and depth < len(text) and tokens[depth, rank] == text[depth]
        hits = max(hits, depth + 1) if right else hits
        if rank + 1 < width:
            next_cost = cost + logs[depth, rank] - logs[depth, rank + 1]
            heapq.heappush(heap, (next_cost, depth, rank + 1, parent_right))
        if depth + 1 < depths:
            heapq.heappush(heap, (cost - logs[depth + 1, 0], depth + 1, 0, right))
    return hits


def chain_hits(text: np.ndarray, tokens: np.ndarray) -> int:
    count = min(len(text), len(tokens))
    wrong = np.flatnonzero(tokens[:count, 0] != text[:count])
    return int(wrong[0]) if len(wrong) else count


def simulate(
    text: np.ndarray, logs: np.ndarray, tokens: np.ndarray, budget: int
) -> tuple[int, int]:
    """(tokens committed, rounds) over `text`; logs, tokens [len(text), J, M]: row i drafts the
    tokens from text[i] on. Budget 0 is the chain. The last, cut-off round is left out."""
    at = rounds = 0
    logs, tokens = logs.astype(np.float64), tokens.astype(np.int64)
    text = text.astype(np.int64)
    while at < len(text):
        if budget:
            hits = tree_hits(text[at:], logs[at], tokens[at], budget)
        else:
            hits = chain_hits(text[at:], tokens[at])
        if at + hits >= len(text):
            break
        at, rounds = at + hits + 1, rounds + 1
    return at, rounds
