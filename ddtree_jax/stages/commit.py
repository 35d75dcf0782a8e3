"""Commit: write the accepted rows, emit their tokens, move the root."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ddtree_jax.cache import append_row, row_index, write_rows
from ddtree_jax.models.qwen3 import TargetRows
from ddtree_jax.recurrent import Stash, commit_recurrent
from ddtree_jax.state import DecodeState, Pending
from ddtree_jax.tree import Tree, Walk


class Emitted(NamedTuple):
    """Tokens of one round: `token[:, :count]`. accepted: root and accepted nodes, before any cut
    by a stop or by max_tokens; 0 for a slot that did not run."""

    token: Int[Array, "B R"]
    count: Int[Array, " B"]
    accepted: Int[Array, " B"]


def cut_at_stop(
    token: Int[Array, "B R"],
    count: Int[Array, " B"],
    stop_tokens: Int[Array, "B E"],
    remaining: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """How many of the first `count` tokens may be emitted, and whether the sequence ends there.

    The first stop token is emitted and nothing after it; `remaining` is never overrun.
    """
    place = jnp.arange(token.shape[1], dtype=jnp.int32)[None, :]
    is_stop = jnp.any(token[:, :, None] == stop_tokens[:, None, :], axis=-1)
    is_stop &= place < jnp.minimum(count, remaining)[:, None]
    first_stop = jnp.min(jnp.where(is_stop, place, token.shape[1]), axis=1)
    kept = jnp.minimum(jnp.minimum(count, remaining), first_stop + 1)
    return kept, jnp.any(is_stop, axis=1) | (kept == remaining)


def commit(
    state: DecodeState,
    tree: Tree,
    rows: TargetRows,
    walk: Walk,
    stash: tuple[Stash, ...] = (),
    implementation: str | None = None,
) -> tuple[DecodeState, Emitted]:
    """Compacts the accepted path behind each slot's prefix; inactive slots stay as they are.

    stash: of the recurrent layers; without one the recurrent state stays as it is.
    """
    active = state.active
    width = walk.path.shape[1]
    node = jnp.maximum(walk.path, 0)
    accepted = jnp.where(active, walk.count, 0)

    def along_path(x: Array) -> Array:
        index = node.reshape(*node.shape, *(1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1)

    keys, values = (tuple(along_path(x) for x in layers) for layers in (rows.keys, rows.values))
    if keys[0].shape[:2] == (1, 1):
        # Without an active slot no round runs, and none is ever full: its last token has no row.
        cache = append_row(state.target, keys, values, state.lengths)
    else:
        index = row_index(state.lengths, accepted, width, state.target.keys[0].shape[1])
        cache = write_rows(state.target, keys, values, index)
    recurrent = state.recurrent
    if stash:
        recurrent = commit_recurrent(
            recurrent, stash, walk.path, state.lengths, accepted, implementation
        )
    # Emitted are the path without its root, which went out a round earlier, then the bonus.
    place = jnp.arange(width, dtype=jnp.int32)[None, :]
    after_root = jnp.pad(along_path(tree.token)[:, 1:], ((0, 0), (0, 1)))
    token = jnp.where(place == accepted[:, None] - 1, walk.bonus[:, None], after_root)
    emitted, ends = cut_at_stop(token, accepted, state.stop_tokens, state.remaining)
    pending = state.pending
    if pending is not None:
        features = along_path(rows.features)
        pending = Pending(
            jnp.where(active[:, None, None], features, pending.features),
            jnp.where(active[:, None], token, pending.token),
            jnp.where(active, accepted, pending.count),
        )
    state = state._replace(
        target=cache,
        recurrent=recurrent,
        pending=pending,
        lengths=state.lengths + accepted,
        root=jnp.where(active, walk.bonus, state.root),
        active=active & ~ends,
        remaining=state.remaining - emitted,
    )
    return state, Emitted(token, emitted, accepted)
