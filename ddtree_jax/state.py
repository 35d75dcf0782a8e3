"""Everything a decode program reads and writes: one donated NamedTuple, one entry a slot."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.cache import KVCache, init_cache
from ddtree_jax.config import DraftConfig, TargetConfig
from ddtree_jax.recurrent import RecurrentState, init_recurrent
from ddtree_jax.sampling import MAX_STOP_TOKENS, Requests


class Pending(NamedTuple):
    """Target features of the rows committed last, which the drafter has not seen yet.

    Rows 0..count of a slot sit at positions lengths - count .. lengths - 1. For an MTP block the
    features are hidden rows after the final norm, and `token` is what came after each; a DFlash
    drafter does not read it.
    """

    features: Float[Array, "B R CD"]
    token: Int[Array, "B R"]
    count: Int[Array, " B"]


class DecodeState(NamedTuple):
    """State of all slots between rounds.

    lengths: rows in the caches, which is the root's position. root: last committed token, whose
    row is not in the cache. active: the slot decodes. remaining: tokens it may still emit.
    stop_tokens: ids that end it, -1 for none. `draft` and `pending` are None without a drafter,
    `recurrent` is None for a target whose layers all attend.
    """

    target: KVCache
    recurrent: RecurrentState | None
    draft: KVCache | None
    pending: Pending | None
    lengths: Int[Array, " B"]
    root: Int[Array, " B"]
    active: Bool[Array, " B"]
    remaining: Int[Array, " B"]
    stop_tokens: Int[Array, "B E"]
    requests: Requests


def init_state(
    target: TargetConfig,
    draft: DraftConfig | None,
    *,
    slots: int,
    rows: int,
    dtype: DTypeLike,
    mtp_depth: int = 0,
) -> DecodeState:
    """A state of empty slots with `rows` cache rows each.

    mtp_depth: tokens that the target's own MTP block drafts, then `draft` is None; 0 without.
    """

    # One array a field: donation refuses the same buffer twice.
    def zeros() -> Array:
        return jnp.zeros((slots,), jnp.int32)

    draft_cache = pending = None
    if draft is not None:
        draft_cache = init_cache(
            draft.num_layers, slots, rows, draft.num_kv_heads, draft.head_dim, dtype
        )
        width = len(draft.tap_layers) * draft.hidden_size
        pending = _pending(slots, draft.block_size, width, dtype)
    elif mtp_depth > 0:
        draft_cache = init_cache(1, slots, rows, target.num_kv_heads, target.head_dim, dtype)
        pending = _pending(slots, mtp_depth + 1, target.hidden_size, dtype)
    return DecodeState(
        target=init_cache(
            len(target.attention_layers), slots, rows, target.num_kv_heads, target.head_dim, dtype
        ),
        recurrent=init_recurrent(target, slots, dtype),
        draft=draft_cache,
        pending=pending,
        lengths=zeros(),
        root=zeros(),
        active=jnp.zeros((slots,), bool),
        remaining=zeros(),
        stop_tokens=jnp.full((slots, MAX_STOP_TOKENS), -1, jnp.int32),
        requests=Requests(
            seed=jnp.zeros((slots,), jnp.uint32),
            temperature=jnp.zeros((slots,), jnp.float32),
            top_k=zeros(),
            top_p=jnp.ones((slots,), jnp.float32),
        ),
    )


def _pending(slots: int, rows: int, width: int, dtype: DTypeLike) -> Pending:
    return Pending(
        jnp.zeros((slots, rows, width), dtype),
        jnp.zeros((slots, rows), jnp.int32),
        jnp.zeros((slots,), jnp.int32),
    )
