"""The draft tree: nodes in an order where parents come first, node 0 the root."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Candidates(NamedTuple):
    """The M likeliest tokens of each of the next J positions with their log-probs, descending."""

    log_prob: Float[Array, "B J M"]
    token: Int[Array, "B J M"]


class Tree(NamedTuple):
    """T nodes a slot. The root is the last committed token, whose row is not in the cache yet.

    token, parent, depth: int32 [B, T]; parent of the root and of padding is -1, depth of the
    root 0. valid: False for padding, which nothing sees. log_prob: of the path to the node under
    the drafter's marginals, float32.
    """

    token: Int[Array, "B T"]
    parent: Int[Array, "B T"]
    depth: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    log_prob: Float[Array, "B T"]


class Walk(NamedTuple):
    """What acceptance found in a tree.

    wanted: the target's own token after each node. path: node indices from the root on, -1 past
    `count`, which counts the root. bonus: wanted at the path's end, the next root. All int32.
    """

    wanted: Int[Array, "B T"]
    path: Int[Array, "B R"]
    count: Int[Array, " B"]
    bonus: Int[Array, " B"]


def root_only(root: Int[Array, " B"]) -> Tree:
    """The tree of autoregressive decoding: one node."""
    token = root[:, None]
    zero = jnp.zeros_like(token)
    return Tree(token, zero - 1, zero, zero == 0, zero.astype(jnp.float32))


def ancestors(tree: Tree, count: int) -> list[Int[Array, "B T"]]:
    """Of each node: itself, its parent, and so on, `count` of them; -1 past the root."""
    node = jnp.arange(tree.token.shape[1], dtype=jnp.int32)
    found = [jnp.broadcast_to(node[None, :], tree.token.shape)]
    # Unrolled: a loop here would split the round's command buffer.
    for _ in range(count - 1):
        up = jnp.take_along_axis(tree.parent, jnp.maximum(found[-1], 0), axis=1)
        found.append(jnp.where(found[-1] < 0, -1, up))
    return found


def node_paths(tree: Tree, max_depth: int) -> Int[Array, "B T R"]:
    """From the root down to each node, by depth, then -1; R = max_depth + 1. A padding node has
    itself alone."""
    upward = jnp.stack(ancestors(tree, max_depth + 1), axis=2)
    length = jnp.sum(upward >= 0, axis=2, dtype=jnp.int32, keepdims=True)
    back = length - 1 - jnp.arange(max_depth + 1, dtype=jnp.int32)[None, None, :]
    path = jnp.take_along_axis(upward, jnp.maximum(back, 0), axis=2)
    return jnp.where(back >= 0, path, -1)


def ancestor_mask(tree: Tree, max_depth: int) -> Bool[Array, "B T T"]:
    """True where column j is row i itself or an ancestor of it. A padding row sees itself only."""
    node = jnp.arange(tree.token.shape[1], dtype=jnp.int32)
    visible = jnp.zeros((1, 1, 1), bool)
    for ancestor in ancestors(tree, max_depth + 1):
        visible |= ancestor[:, :, None] == node[None, None, :]
    return visible


def depth_first(tree: Tree, max_depth: int) -> Tree:
    """The same tree in preorder, siblings as they were, padding at the end as it was.

    A node comes after its ancestors and after the whole subtrees of earlier siblings of each node
    on its path, so its place is a sum over that path.
    """
    node = jnp.arange(tree.token.shape[1], dtype=jnp.int32)
    visible = ancestor_mask(tree, max_depth)
    size = jnp.sum(visible & tree.valid[:, :, None], axis=1, dtype=jnp.int32)
    earlier = (tree.parent[:, :, None] == tree.parent[:, None, :]) & tree.valid[:, None, :]
    earlier &= node[None, None, :] < node[None, :, None]
    skipped = 1 + jnp.sum(jnp.where(earlier, size[:, None, :], 0), axis=2)
    skipped = jnp.where(tree.depth > 0, skipped, 0)
    place = jnp.sum(jnp.where(visible, skipped[:, None, :], 0), axis=2)
    place = jnp.where(tree.valid, place, node[None, :])
    order = jnp.argsort(place, axis=1)

    def reorder(x: Array) -> Array:
        return jnp.take_along_axis(x, order, axis=1)

    parent = jnp.take_along_axis(place, jnp.maximum(tree.parent, 0), axis=1)
    parent = jnp.where(tree.parent < 0, -1, parent)
    return Tree(*(reorder(x) for x in tree._replace(parent=parent)))
