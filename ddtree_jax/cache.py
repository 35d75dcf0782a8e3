"""Key and value rows of committed tokens: a static array a layer, a length a slot.

Rows of a tree live outside until they are accepted, so the cache never holds a rejected row.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

Layers = tuple[Float[Array, "B S K H"], ...]


class KVCache(NamedTuple):
    """One [B, S, K, H] array a layer. Rows at and past a slot's length hold anything."""

    keys: Layers
    values: Layers


def init_cache(
    num_layers: int, slots: int, rows: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
) -> KVCache:
    """Empty cache; each layer has an array of its own, so that donation can alias every one."""
    shape = (slots, rows, num_kv_heads, head_dim)
    return KVCache(
        tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
    )


def row_index(
    start: Int[Array, " B"], count: Int[Array, " B"], width: int, rows: int
) -> Int[Array, "B R"]:
    """start, start+1, ... for the first `count` of `width` rows; `rows` (dropped) for the rest."""
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    return jnp.where(offset < count[:, None], start[:, None] + offset, rows)


def write_rows(
    cache: KVCache, keys: Layers, values: Layers, slot: Int[Array, " B"], index: Int[Array, "B R"]
) -> KVCache:
    """Writes row r of entry b to cache[slot[b], index[b, r]]; indices past the end are dropped."""

    def write(layer: Array, rows: Array) -> Array:
        return layer.at[slot[:, None], index].set(rows, mode="drop")

    return KVCache(
        tuple(write(layer, rows) for layer, rows in zip(cache.keys, keys, strict=True)),
        tuple(write(layer, rows) for layer, rows in zip(cache.values, values, strict=True)),
    )
