"""Build: the next tokens that are worth a row of the target's pass, as a tree."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ddtree_jax.choices import Choices
from ddtree_jax.plan import RoundPlan
from ddtree_jax.tree import Candidates, Tree, depth_first
from pallas_kernels import tree_build


def build(candidates: Candidates, root: Int[Array, " B"], plan: RoundPlan) -> Tree:
    """The tree of `plan`: best first under the budget (with one candidate a depth, the chain), or
    static. Depth first for the linear rule, which reads nodes in order.

    Source: DDTree, arXiv 2604.12989, algorithm 1.
    """
    if plan.choices is not None:
        return _static(candidates, root, plan.choices)
    shape = tree_build(
        candidates.log_prob,
        budget=plan.budget,
        spine=plan.spine,
        implementation=plan.implementation,
    )
    tree = Tree(
        token=_tokens(candidates.token, root, shape.depth, shape.rank),
        parent=shape.parent,
        depth=shape.depth,
        valid=shape.valid,
        log_prob=shape.score,
    )
    return depth_first(tree, plan.max_depth) if plan.acceptance == "linear" else tree


def _tokens(
    token: Int[Array, "B J M"],
    root: Int[Array, " B"],
    depth: Int[Array, "B T"],
    rank: Int[Array, "B T"],
) -> Int[Array, "B T"]:
    slot = jnp.arange(root.shape[0], dtype=jnp.int32)[:, None]
    drafted = token[slot, jnp.maximum(depth - 1, 0), jnp.maximum(rank, 0)]
    return jnp.where(depth == 0, root[:, None], drafted)


def _static(candidates: Candidates, root: Int[Array, " B"], choices: Choices) -> Tree:
    """The same shape every round: node n + 1 is the rank path choices[n]."""
    index = {path: number for number, path in enumerate([(), *choices])}
    nodes = list(index)
    parent = np.array([-1, *(index[path[:-1]] for path in nodes[1:])], np.int32)
    depth = np.array([len(path) for path in nodes], np.int32)
    rank = np.array([-1, *(path[-1] for path in nodes[1:])], np.int32)
    slots = root.shape[0]

    def spread(x: np.ndarray) -> Array:
        return jnp.broadcast_to(jnp.asarray(x)[None], (slots, len(nodes)))

    # [J', T]: the rank that each node's path takes at each depth, -1 past its end.
    steps = np.full((max(depth), len(nodes)), -1, np.int32)
    for number, path in enumerate(nodes):
        steps[: len(path), number] = path
    along = jnp.take_along_axis(
        candidates.log_prob[:, : steps.shape[0]], jnp.asarray(steps).clip(0)[None], axis=2
    )
    return Tree(
        token=_tokens(candidates.token, root, spread(depth), spread(rank)),
        parent=spread(parent),
        depth=spread(depth),
        valid=jnp.ones((slots, len(nodes)), bool),
        log_prob=jnp.sum(jnp.where(jnp.asarray(steps)[None] >= 0, along, 0.0), axis=1),
    )
