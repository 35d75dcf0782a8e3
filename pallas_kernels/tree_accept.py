"""The walk that accepts draft tokens: the longest path of the tree that the target itself chose.

`tree_accept` is the public op; `definition` is what it means. It runs after verify, before commit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels import dispatch, tree_accept_pallas


class TreePath(NamedTuple):
    """The accepted path of each slot.

    path: node indices from the root on, -1 past `count`.
    count: accepted nodes, the root included, so at least 1.
    bonus: the target's token after the last node of the path: the next root.
    """

    path: Int32[Array, "B D1"]  # D1 = max_depth + 1
    count: Int32[Array, " B"]
    bonus: Int32[Array, " B"]


def tree_accept(
    token: Int32[Array, "B T"],
    parent: Int32[Array, "B T"],
    valid: Bool[Array, "B T"],
    wanted: Int32[Array, "B T"],
    *,
    max_depth: int,
    implementation: dispatch.Implementation | None = None,
) -> TreePath:
    """Walks from the root to the child whose token the target wants, until there is none.

    Args:
      token: token of each node; node 0 is the root.
      parent: index of each node's parent, smaller than its own; -1 for the root.
      valid: whether the node exists; padding is never walked to. The root always exists.
      wanted: the target's choice after each node, greedy or sampled.
      max_depth: most nodes that are accepted below the root; a path may not be longer.
      implementation: None, "xla" or "pallas", see `dispatch.choose`.

    Returns:
      The path of each slot. Children of one parent hold distinct tokens; if they do not, the
      child of the lowest index is taken.

    Raises:
      ValueError: a shape or dtype does not fit, or `max_depth` is negative.
      NotImplementedError: the named implementation cannot run here.

    Source: DDTree, arXiv 2604.12989; with sampled `wanted` it is the naive sampling walk of
      SpecInfer, arXiv 2305.09781, which keeps the target's distribution.
    """
    _check(token, parent, valid, wanted, max_depth)
    chosen = dispatch.choose(
        "tree_accept", implementation, tree_accept_pallas.unsupported(token.shape[1], max_depth)
    )
    if chosen == "xla":
        return definition(token, parent, valid, wanted, max_depth=max_depth)
    path, count, bonus = tree_accept_pallas.tree_accept(
        token, parent, valid, wanted, max_depth=max_depth, interpret=dispatch.interpret()
    )
    return TreePath(path, count, bonus)


def definition(
    token: Int32[Array, "B T"],
    parent: Int32[Array, "B T"],
    valid: Bool[Array, "B T"],
    wanted: Int32[Array, "B T"],
    *,
    max_depth: int,
) -> TreePath:
    """The meaning of `tree_accept` in plain jnp, all slots abreast."""
    slots, nodes = token.shape
    current = jnp.zeros((slots,), jnp.int32)
    walking = jnp.ones((slots,), jnp.bool_)
    path = [current]
    # A tree of T nodes is at most T - 1 deep, so longer walks need no steps.
    for _ in range(min(max_depth, nodes - 1)):
        want = jnp.take_along_axis(wanted, current[:, None], axis=1)
        match = valid & (parent == current[:, None]) & (token == want)
        walking = walking & jnp.any(match, axis=1)
        child = jnp.argmax(match, axis=1).astype(jnp.int32)  # the first True: lowest index
        current = jnp.where(walking, child, current)
        path.append(jnp.where(walking, child, -1))
    absent = jnp.full((slots,), -1, jnp.int32)
    path += [absent] * (max_depth + 1 - len(path))
    stacked = jnp.stack(path, axis=1)
    count = jnp.sum((stacked >= 0).astype(jnp.int32), axis=1)
    bonus = jnp.take_along_axis(wanted, current[:, None], axis=1)[:, 0]
    return TreePath(stacked, count, bonus)


def _check(
    token: jax.Array, parent: jax.Array, valid: jax.Array, wanted: jax.Array, max_depth: int
) -> None:
    if token.ndim != 2 or token.shape[1] < 1:
        raise ValueError(f"`token` must be [B, T] with T >= 1, got shape {token.shape}")
    for name, array, dtype in (
        ("token", token, jnp.int32),
        ("parent", parent, jnp.int32),
        ("valid", valid, jnp.bool_),
        ("wanted", wanted, jnp.int32),
    ):
        if array.shape != token.shape or array.dtype != dtype:
            raise ValueError(
                f"`{name}` must be {jnp.dtype(dtype).name} of shape {token.shape} like `token`, "
                f"got {array.dtype.name} of shape {array.shape}"
            )
    if max_depth < 0:
        raise ValueError(f"`max_depth` must not be negative, got {max_depth}")
