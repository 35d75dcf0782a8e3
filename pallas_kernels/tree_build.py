"""Growth of the draft tree: the rank paths of the greatest probability under a node budget.

`tree_build` is the public op; `definition` is what it means. It runs after draft, before verify.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels import dispatch, tree_build_pallas

_MAX_DEPTHS = 31
_MAX_CANDIDATES = 1024


class TreeShape(NamedTuple):
    """The shape of each slot's tree: T = budget + 1 nodes, parents before children.

    parent: index of the parent; -1 for the root and for padding.
    depth: 0 for the root and for padding.
    rank: which candidate of its depth the node is; -1 for the root and for padding.
    valid: whether the node exists.
    score: sum of the path's log-probs; 0 for the root, -inf for padding.
    """

    parent: Int32[Array, "B T"]
    depth: Int32[Array, "B T"]
    rank: Int32[Array, "B T"]
    valid: Bool[Array, "B T"]
    score: Float32[Array, "B T"]


def tree_build(
    log_prob: Float32[Array, "B J M"],
    *,
    budget: int,
    spine: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> TreeShape:
    """Takes the `budget` rank paths of the greatest sum of log-probs, best first.

    A rank path (r_1, .., r_d) takes candidate r_i at depth i. The order is that of a heap over
    (-score, ranks) which starts with (0,) and, for each path popped, gets its next sibling and
    its first child: score descending, ties by rank path as Python orders tuples. Scores are
    float32 sums along the path: score[parent] + log_prob[depth - 1, rank].

    Args:
      log_prob: log-probs of the M likeliest tokens of each depth, descending along M. NaN and
        +inf count as -inf; a path of score -inf is never taken.
      budget: nodes beside the root. If fewer exist, the rest is padding.
      spine: whether the chain of rank 0 is taken first, in depth order, as far as the budget
        and finite scores go, and the best of all other paths after it.
      implementation: None, "xla" or "pallas", see `dispatch.choose`. Trees are bit-identical.

    Raises:
      ValueError: `log_prob` is not float32 [B, J, M] with 1 <= J <= 31 and 1 <= M <= 1024, or
        `budget` is negative.
      NotImplementedError: the named implementation cannot run here.

    Source: DDTree, arXiv 2604.12989 (best-first tree of the marginals of one block).
    """
    _check(log_prob, budget)
    chosen = dispatch.choose("tree_build", implementation, tree_build_pallas.unsupported(budget))
    # No path deeper than the budget and no rank beyond it can be taken: each needs its ancestors
    # and its better siblings before it.
    reach = max(budget, 1)
    log_prob = log_prob[:, :reach, :reach]
    if chosen == "xla":
        return definition(log_prob, budget=budget, spine=spine)
    tree = tree_build_pallas.tree_build(
        log_prob, budget=budget, spine=spine, interpret=dispatch.interpret()
    )
    return TreeShape(*tree)


def definition(log_prob: Float32[Array, "B J M"], *, budget: int, spine: bool) -> TreeShape:
    """The meaning of `tree_build` in plain jnp."""
    return jax.vmap(functools.partial(_build_slot, budget=budget, spine=spine))(log_prob)


class _Frontier(NamedTuple):
    """Paths that may be popped next, one a lane; a lane of score -inf is empty.

    Each pop frees its lane for the sibling and opens lane n for the first child of node n, so
    budget + 1 lanes always suffice.
    """

    score: jax.Array  # float32 [T]
    parent: jax.Array  # int32 [T], a node of the tree
    depth: jax.Array  # int32 [T]
    path: jax.Array  # int32 [T, J], rank + 1 for each depth, 0 behind the path


def _build_slot(log_prob: jax.Array, *, budget: int, spine: bool) -> TreeShape:
    """`definition` for one slot: log_prob is [J, M]."""
    depths, candidates = log_prob.shape
    log_prob = jnp.where(log_prob < jnp.inf, log_prob, -jnp.inf)  # NaN fails the comparison
    nodes = budget + 1
    absent = jnp.full((nodes,), -1, jnp.int32)
    zeros = jnp.zeros((nodes,), jnp.int32)
    closed = jnp.full((nodes,), -jnp.inf, jnp.float32)
    tree = TreeShape(
        parent=absent,
        depth=zeros,
        rank=absent,
        valid=jnp.arange(nodes) == 0,
        score=closed.at[0].set(0.0),
    )
    frontier = _Frontier(
        score=closed.at[0].set(log_prob[0, 0]),
        parent=zeros,
        depth=zeros.at[0].set(1),
        path=jnp.zeros((nodes, depths), jnp.int32).at[0, 0].set(1),
    )

    def pop(node: jax.Array, state: tuple[TreeShape, _Frontier]) -> tuple[TreeShape, _Frontier]:
        tree, frontier = state
        lane = _best_lane(frontier)
        if spine:
            # Lane node - 1 holds the first child of node - 1. It continues the chain of rank 0
            # exactly if it is as deep as the tree would then have nodes.
            chain = node - 1
            continues = (frontier.depth[chain] == node) & (frontier.score[chain] > -jnp.inf)
            lane = jnp.where(continues, chain, lane)
        return _take(log_prob, tree, frontier, lane, node)

    return jax.lax.fori_loop(1, nodes, pop, (tree, frontier))[0]


def _best_lane(frontier: _Frontier) -> jax.Array:
    """Lane of the highest score; ties by the smallest rank path, a prefix before the longer."""
    best = frontier.score == jnp.max(frontier.score)
    beyond = jnp.int32(_MAX_CANDIDATES + 1)
    for depth in range(frontier.path.shape[1]):
        rank = jnp.where(best, frontier.path[:, depth], beyond)
        best = rank == jnp.min(rank)
    return jnp.argmax(best).astype(jnp.int32)


def _take(
    log_prob: jax.Array, tree: TreeShape, frontier: _Frontier, lane: jax.Array, node: jax.Array
) -> tuple[TreeShape, _Frontier]:
    """Makes the path in `lane` the tree's `node`, if its score is finite, and opens the next."""
    depths, candidates = log_prob.shape
    score, parent = frontier.score[lane], frontier.parent[lane]
    depth, path = frontier.depth[lane], frontier.path[lane]
    last = jnp.maximum(depth - 1, 0)
    rank = path[last] - 1
    exists = score > -jnp.inf
    tree = TreeShape(
        parent=tree.parent.at[node].set(jnp.where(exists, parent, -1)),
        depth=tree.depth.at[node].set(jnp.where(exists, depth, 0)),
        rank=tree.rank.at[node].set(jnp.where(exists, rank, -1)),
        valid=tree.valid.at[node].set(exists),
        score=tree.score.at[node].set(score),
    )
    sibling = tree.score[parent] + log_prob[last, jnp.minimum(rank + 1, candidates - 1)]
    sibling = jnp.where(exists & (rank + 1 < candidates), sibling, -jnp.inf)
    child = score + log_prob[jnp.minimum(depth, depths - 1), 0]
    child = jnp.where(exists & (depth < depths), child, -jnp.inf)
    frontier = _Frontier(
        score=frontier.score.at[lane].set(sibling).at[node].set(child),
        parent=frontier.parent.at[node].set(node),
        depth=frontier.depth.at[node].set(depth + 1),
        path=frontier.path.at[lane, last]
        .add(1)
        .at[node]
        .set(path.at[jnp.minimum(depth, depths - 1)].set(1)),
    )
    return tree, frontier


def _check(log_prob: jax.Array, budget: int) -> None:
    if log_prob.ndim != 3 or log_prob.dtype != jnp.float32:
        raise ValueError(
            "`log_prob` must be float32 [B, J, M], "
            f"got {log_prob.dtype.name} of shape {log_prob.shape}; cast it to float32"
        )
    _, depths, candidates = log_prob.shape
    if not (1 <= depths <= _MAX_DEPTHS and 1 <= candidates <= _MAX_CANDIDATES):
        raise ValueError(
            f"`log_prob` must have 1 to {_MAX_DEPTHS} depths and 1 to {_MAX_CANDIDATES} "
            f"candidates, got J={depths}, M={candidates}; draft fewer or keep fewer candidates"
        )
    if budget < 0:
        raise ValueError(f"`budget` must not be negative, got {budget}")
