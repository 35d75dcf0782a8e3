"""Verify: the target scores every node of the tree in one forward pass."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.cache import KVCache
from ddtree_jax.models.qwen3 import Qwen3, TargetRows
from ddtree_jax.plan import RoundPlan
from ddtree_jax.recurrent import RecurrentState, Stash, StepRecurrence, TreeRecurrence
from ddtree_jax.tree import Tree, ancestor_mask
from pallas_kernels import tree_attention


class Verified(NamedTuple):
    """logits after each node, and the rows that the accepted nodes will add to the caches, and
    to the recurrent state (one stash a recurrent layer). moved: of a root alone, the recurrent
    state behind it, and no stash."""

    logits: Float[Array, "B T V"]
    rows: TargetRows
    stash: tuple[Stash, ...] = ()
    moved: RecurrentState | None = None


def verify(
    target: Qwen3,
    cache: KVCache,
    tree: Tree,
    lengths: Int[Array, " B"],
    tap_layers: tuple[int, ...],
    plan: RoundPlan,
    recurrent: RecurrentState | None = None,
    active: Bool[Array, " B"] | None = None,
) -> Verified:
    """Every node sees the committed prefix, its ancestors and itself, at position length + depth.

    Padding nodes run at depth 0 and nothing sees them. The cache is only read, and so is the
    recurrent state, unless the tree is a root alone: an active slot will accept it.
    """
    visible = ancestor_mask(tree, plan.max_depth)

    def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
        return tree_attention(
            query,
            cache.keys[layer],
            cache.values[layer],
            key,
            value,
            lengths,
            visible,
            scale=target.config.head_dim**-0.5,
            implementation=plan.implementation,
        )

    recur, hybrid, kernels = None, target.config.hybrid, plan.implementation
    if recurrent is not None and plan.drafts:
        recur = TreeRecurrence(
            hybrid,
            recurrent,
            tree,
            lengths,
            max_depth=plan.max_depth,
            implementation=kernels,
        )
    elif recurrent is not None:
        count = active.astype(jnp.int32)
        recur = StepRecurrence(hybrid, recurrent, lengths, count, kernels)
    token = jnp.maximum(tree.token, 0)
    positions = lengths[:, None] + tree.depth
    rows = target(token, positions, attend, tap_layers, recur, kernels)
    logits = target.logits(rows.hidden)
    if isinstance(recur, StepRecurrence):
        return Verified(logits, rows, moved=recur.take())
    return Verified(logits, rows, () if recur is None else tuple(recur.stash))
