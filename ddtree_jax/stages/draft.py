"""Draft: one pass of the drafter gives the most likely tokens of each of the next J positions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddtree_jax.cache import KVCache, row_index, write_rows
from ddtree_jax.config import AttentionKind
from ddtree_jax.models.dflash import DFlash, block_visible
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.state import Pending
from ddtree_jax.topk import top_k
from pallas_kernels import tree_attention


class Candidates(NamedTuple):
    """The M most likely tokens of each depth with their log-probabilities, descending."""

    log_prob: Float[Array, "B J M"]
    token: Int[Array, "B J M"]


def take_in_context(
    drafter: DFlash,
    cache: KVCache,
    features: Float[Array, "B R CD"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    slot: Int[Array, " B"],
) -> KVCache:
    """Adds the first `count` rows of features, at positions start.., to the drafter's cache."""
    width, rows = features.shape[1], cache.keys[0].shape[1]
    positions = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    keys, values = drafter.context_rows(features, positions)
    return write_rows(cache, keys, values, slot, row_index(start, count, width, rows))


def _window_start(kind: AttentionKind, positions: Int[Array, "B R"]) -> Int[Array, "B R"] | None:
    """First context row that each block row sees: key visible iff distance < window."""
    return None if kind.window is None else jnp.maximum(positions - kind.window + 1, 0)


def draft(
    target: Qwen3,
    drafter: DFlash,
    cache: KVCache,
    pending: Pending,
    root: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    candidate_count: int,
    implementation: str | None,
) -> tuple[Candidates, KVCache]:
    """Takes in the rows committed last, then predicts the J positions after the root.

    Source: DFlash, arXiv 2602.06036; block = root embedding, then masks; block rows are never
    cached.
    """
    config = drafter.config
    slots = jnp.arange(root.shape[0], dtype=jnp.int32)
    start = lengths - pending.count
    cache = take_in_context(drafter, cache, pending.features, start, pending.count, slots)
    positions = lengths[:, None] + jnp.arange(config.block_size, dtype=jnp.int32)[None, :]

    def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
        kind = config.attention[layer]
        visible = jnp.asarray(block_visible(kind, config.block_size))[None]
        return tree_attention(
            query,
            cache.keys[layer],
            cache.values[layer],
            key,
            value,
            lengths,
            jnp.broadcast_to(visible, (root.shape[0], *visible.shape[1:])),
            prefix_start=_window_start(kind, positions),
            scale=config.head_dim**-0.5,
            implementation=implementation,
        )

    mask = target.embed(jnp.full((1, 1), config.mask_token_id, jnp.int32))[0, 0]
    block = drafter.block_embeddings(target.embed(root[:, None])[:, 0], mask)
    hidden = drafter(block, positions, attend)
    logits = target.logits(hidden[:, 1:])
    value, token = top_k(logits, candidate_count)
    log_prob = value - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return Candidates(log_prob, token.astype(jnp.int32)), cache
