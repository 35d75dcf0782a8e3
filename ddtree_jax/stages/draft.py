"""Draft: one pass of the drafter gives the most likely tokens of each of the next J positions."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from ddtree_jax.cache import KVCache, row_index, write_layer
from ddtree_jax.config import AttentionKind
from ddtree_jax.models.dflash import DFlash, block_visible
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.plan import RoundPlan
from ddtree_jax.state import Pending
from ddtree_jax.tree import Candidates
from pallas_kernels import topk_logsumexp, tree_attention


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
    plan: RoundPlan,
) -> tuple[Candidates, KVCache]:
    """Takes in the rows committed last, then predicts the J positions after the root.

    Source: DFlash, arXiv 2602.06036; block = root embedding, then masks; block rows are never
    cached.
    """
    config, slots, width = drafter.config, root.shape[0], pending.features.shape[1]
    start = lengths - pending.count
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    block_positions = lengths[:, None] + offset
    positions = jnp.concatenate([start[:, None] + offset, block_positions], axis=1)
    index = row_index(start, pending.count, width, cache.keys[0].shape[1])
    keys, values = list(cache.keys), list(cache.values)

    def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
        keys[layer] = write_layer(keys[layer], key[:, :width], index)
        values[layer] = write_layer(values[layer], value[:, :width], index)
        kind = config.attention[layer]
        visible = jnp.asarray(block_visible(kind, config.block_size))[None]
        return tree_attention(
            query,
            keys[layer],
            values[layer],
            key[:, width:],
            value[:, width:],
            lengths,
            jnp.broadcast_to(visible, (slots, *visible.shape[1:])),
            prefix_start=_window_start(kind, block_positions),
            scale=config.head_dim**-0.5,
            implementation=plan.implementation,
        )

    mask = target.embed(jnp.full((1, 1), config.mask_token_id, jnp.int32))[0, 0]
    block = drafter.block_embeddings(target.embed(root[:, None])[:, 0], mask)
    context = drafter.project_context(pending.features)
    hidden = drafter(block, positions, attend, context, plan.implementation)
    logits = target.logits(hidden[:, 1:])
    value, token, logsumexp = topk_logsumexp(
        logits, k=plan.candidate_count, implementation=plan.implementation
    )
    cache = KVCache(tuple(keys), tuple(values))
    return Candidates(value - logsumexp[..., None], token), cache
