"""Batched sampling from a small target: one jitted call for a whole batch of continuations."""

import jax
import jax.numpy as jnp
from training import MASKED, masked_attention

from ddtree_jax.models.qwen3 import Qwen3


def positions_of(start: jax.Array, width: int) -> jax.Array:
    """Positions of left-padded rows; padding gets 0."""
    return jnp.maximum(jnp.arange(width)[None, :] - start[:, None], 0)


def causal_visible(start: jax.Array, width: int) -> jax.Array:
    """[B, width, width] for rows whose first `start` columns are padding."""
    index = jnp.arange(width)
    causal = index[:, None] >= index[None, :]
    return causal[None] & (index[None, None, :] >= start[:, None, None])


def _pick(logits: jax.Array, temperature: jax.Array, key: jax.Array) -> jax.Array:
    """Samples rows of [B, V] at their own temperature; 0 takes the largest."""
    noise = jax.random.gumbel(key, logits.shape, jnp.float32)
    noise = jnp.where(temperature[:, None] > 0, noise, 0.0)
    safe = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    return jnp.argmax(logits / safe + noise, axis=-1).astype(jnp.int32)


def generate(
    target: Qwen3,
    prompts: jax.Array,
    start: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    count: int,
) -> jax.Array:
    """[B, P + count] tokens: `prompts` [B, P], padded on the left by `start`, and continuations."""
    width = prompts.shape[1]
    visible = causal_visible(start, width)
    rows = target(
        prompts,
        positions_of(start, width),
        lambda _, query, key, value: masked_attention(query, key, value, visible),
    )
    spare = ((0, 0), (0, 0), (0, count), (0, 0))
    keys = tuple(jnp.pad(key.swapaxes(1, 2), spare) for key in rows.keys)
    values = tuple(jnp.pad(value.swapaxes(1, 2), spare) for value in rows.values)
    seeds = jax.random.split(key, count)
    first = _pick(target.logits(rows.hidden[:, -1:])[:, 0], temperature, seeds[0])
    column = jnp.arange(width + count)

    def step(carry, inputs):
        token, keys, values = carry
        at, seed = inputs
        new_keys, new_values = list(keys), list(values)
        seen = (column[None, :] >= start[:, None]) & (column <= at)[None, :]

        def attend(index, query, key, value):
            place = (0, 0, at, 0)
            new_keys[index] = jax.lax.dynamic_update_slice(keys[index], key.swapaxes(1, 2), place)
            new_values[index] = jax.lax.dynamic_update_slice(
                values[index], value.swapaxes(1, 2), place
            )
            return _one_row(query, new_keys[index], new_values[index], seen)

        rows = target(token[:, None], (at - start)[:, None], attend)
        token = _pick(target.logits(rows.hidden)[:, 0], temperature, seed)
        return (token, tuple(new_keys), tuple(new_values)), token

    steps = (jnp.arange(width, width + count - 1), seeds[1:])
    _, rest = jax.lax.scan(step, (first, keys, values), steps)
    return jnp.concatenate([prompts, first[:, None], rest.T], axis=1)


def _one_row(query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array) -> jax.Array:
    """Attention of one query row a sequence over caches [B, K, S, H]."""
    batch, _, heads, size = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, size)
    scores = jnp.einsum("bkgh,bksh->bkgs", grouped, key, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None, :], scores * size**-0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgs,bksh->bkgh", weights, value).reshape(batch, 1, heads, size)


def left_padded(prompts: list[list[int]], width: int) -> tuple[jax.Array, jax.Array]:
    """(tokens [B, width], start [B]); longer prompts lose their beginning."""
    rows = [row[-width:] for row in prompts]
    tokens = jnp.asarray([[0] * (width - len(row)) + row for row in rows], jnp.int32)
    return tokens, jnp.asarray([width - len(row) for row in rows], jnp.int32)
