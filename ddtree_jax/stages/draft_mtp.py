"""Draft by multi-token prediction: the target's own MTP block continues itself, token by token."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddtree_jax.cache import KVCache, row_index, write_layer
from ddtree_jax.models.mtp import MTP
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.plan import RoundPlan
from ddtree_jax.state import Pending
from ddtree_jax.tree import Candidates
from pallas_kernels import topk_logsumexp, tree_attention


class _Block:
    """The MTP block over one slot's cache: row p of it is the pair (hidden row of position p, the
    token at p + 1)."""

    def __init__(self, target: Qwen3, block: MTP, cache: KVCache, plan: RoundPlan):
        self.keys, self.values = cache.keys[0], cache.values[0]
        self._target, self._block, self._plan = target, block, plan

    def run(
        self,
        hidden: Float[Array, "B R D"],
        token: Int[Array, "B R"],
        start: Int[Array, " B"],
        count: Int[Array, " B"],
    ) -> Float[Array, "B R D"]:
        """Takes in `count` of R rows at positions start.., each after the one before it."""
        slots, width = token.shape
        offset = jnp.arange(width, dtype=jnp.int32)
        causal = jnp.broadcast_to(offset[:, None] >= offset[None, :], (slots, width, width))

        def attend(_: int, query: Array, key: Array, value: Array) -> Array:
            return tree_attention(
                query,
                self.keys,
                self.values,
                key,
                value,
                jnp.minimum(start, self.keys.shape[1]),
                causal,
                scale=query.shape[-1] ** -0.5,
                implementation=self._plan.implementation,
            )

        embedded = self._target.embed(token)
        positions = start[:, None] + offset[None, :]
        kernels = self._plan.implementation
        rows, key, value = self._block(embedded, hidden, positions, attend, kernels)
        index = row_index(start, count, width, self.keys.shape[1])
        self.keys = write_layer(self.keys, key, index)
        self.values = write_layer(self.values, value, index)
        return rows


def draft_mtp(
    target: Qwen3,
    block: MTP,
    cache: KVCache,
    pending: Pending,
    lengths: Int[Array, " B"],
    plan: RoundPlan,
) -> tuple[Candidates, KVCache]:
    """Takes in the rows committed last, then a chain of max_depth tokens, each the likeliest.

    The first token comes from the last committed row and the root. Each further one comes from
    the block's own row and the token before it; what these rows leave in the cache lies behind
    the committed ones, and the next round writes over it. A slot that does not run
    (length 0) writes nothing, and its tokens mean nothing.

    Source: multi-token prediction of DeepSeek-V3, arXiv 2412.19437, section 2.2, as Qwen3.5 has
    it: one block for all depths, the target's embedding and head.
    """
    state = _Block(target, block, cache, plan)
    runs = (lengths > 0).astype(jnp.int32)
    rows = state.run(pending.features, pending.token, lengths - pending.count, pending.count)
    last = jnp.maximum(pending.count - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(rows, last, axis=1)
    tokens, log_probs = [], []
    for depth in range(plan.max_depth):
        if depth > 0:
            hidden = state.run(hidden, tokens[-1], lengths + (depth - 1), runs)
        value, token, logsumexp = topk_logsumexp(
            target.logits(hidden), k=1, implementation=plan.implementation
        )
        tokens.append(token[..., 0])
        log_probs.append(value[..., 0] - logsumexp)
    candidates = Candidates(
        jnp.concatenate(log_probs, axis=1)[..., None], jnp.concatenate(tokens, axis=1)[..., None]
    )
    return candidates, KVCache((state.keys,), (state.values,))


def prefill_mtp(
    target: Qwen3,
    block: MTP,
    cache: KVCache,
    before: Float[Array, "1 1 D"],
    hidden: Float[Array, "1 P D"],
    token: Int[Array, "1 P"],
    start: Int[Array, " 1"],
    count: Int[Array, " 1"],
) -> tuple[tuple[Array, ...], tuple[Array, ...], Int[Array, "1 P"]]:
    """Rows of a prompt's chunk for the block's cache: keys, values and where they go.

    A pair needs the token after its position, so the pairs of a chunk are those of positions
    start - 1 .. start + count - 2; `before` is the hidden row of start - 1. A prompt's first
    token begins no pair: its row is dropped, and no other sees it.
    """
    size = token.shape[1]
    offset = jnp.arange(size, dtype=jnp.int32)
    pairs = jnp.concatenate([before, hidden[:, :-1]], axis=1)
    exists = (start[:, None] + offset[None, :]) > 0
    causal = (offset[:, None] >= offset[None, :])[None]
    visible = causal & (exists[:, None, :] | (offset[:, None] == offset[None, :])[None])
    prefix = jnp.maximum(start - 1, 0)

    def attend(_: int, query: Array, key: Array, value: Array) -> Array:
        return tree_attention(
            query,
            cache.keys[0],
            cache.values[0],
            key,
            value,
            prefix,
            visible,
            scale=query.shape[-1] ** -0.5,
            implementation="xla",
        )

    positions = jnp.maximum(start[:, None] - 1 + offset[None, :], 0)
    _, key, value = block(target.embed(token), pairs, positions, attend)
    rows = cache.keys[0].shape[1]
    index = jnp.where(exists & (offset[None, :] < count[:, None]), positions, rows)
    return (key,), (value,), index
