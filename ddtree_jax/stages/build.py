"""Build: the most likely continuations of the root, as a tree under a node budget."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddtree_jax.tree import Tree
from pallas_kernels import tree_build


def build(
    log_prob: Float[Array, "B J M"],
    token: Int[Array, "B J M"],
    root: Int[Array, " B"],
    *,
    budget: int,
    spine: bool,
    implementation: str | None,
) -> Tree:
    """Best-first tree of `budget` nodes below the root; with one candidate a depth, the chain.

    Source: DDTree, arXiv 2604.12989, algorithm 1.
    """
    shape = tree_build(log_prob, budget=budget, spine=spine, implementation=implementation)
    depth_index = jnp.maximum(shape.depth - 1, 0)
    rank_index = jnp.maximum(shape.rank, 0)
    slot = jnp.arange(root.shape[0], dtype=jnp.int32)[:, None]
    node_token = token[slot, depth_index, rank_index]
    is_root = shape.depth == 0
    return Tree(
        token=jnp.where(is_root, root[:, None], node_token),
        parent=shape.parent,
        depth=shape.depth,
        valid=shape.valid,
    )
