"""The draft tree: nodes in an order where parents come first, node 0 the root."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Tree(NamedTuple):
    """T nodes a slot. The root is the last committed token, whose row is not in the cache yet.

    token, parent, depth: int32 [B, T]; parent of the root and of padding is -1, depth of the
    root 0. valid: False for padding, which nothing sees.
    """

    token: Int[Array, "B T"]
    parent: Int[Array, "B T"]
    depth: Int[Array, "B T"]
    valid: Bool[Array, "B T"]


def root_only(root: Int[Array, " B"]) -> Tree:
    """The tree of autoregressive decoding: one node."""
    token = root[:, None]
    zero = jnp.zeros_like(token)
    return Tree(token, zero - 1, zero, zero == 0)


def ancestor_mask(tree: Tree, max_depth: int) -> Bool[Array, "B T T"]:
    """True where column j is row i itself or an ancestor of it. A padding row sees itself only."""
    node = jnp.arange(tree.token.shape[1], dtype=jnp.int32)
    ancestor = jnp.broadcast_to(node[None, :], tree.token.shape)
    visible = ancestor[:, :, None] == node[None, None, :]
    # Unrolled: a loop here would split the round's command buffer.
    for _ in range(max_depth):
        up = jnp.take_along_axis(tree.parent, jnp.maximum(ancestor, 0), axis=1)
        ancestor = jnp.where(ancestor < 0, -1, up)
        visible |= ancestor[:, :, None] == node[None, None, :]
    return visible
