"""Key and value rows of committed tokens: a static array a layer, a length a slot.

Rows of a tree live outside until they are accepted, so the cache never holds a rejected row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

Layers = tuple[Float[Array, "B S K H"], ...]
Rows = tuple[Float[Array, "A R K H"], ...]


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


def write_layer(
    layer: Float[Array, "B S K H"],
    rows: Float[Array, "A R K H"],
    index: Int[Array, "A R"],
    slot: Int[Array, " A"] | None = None,
) -> Float[Array, "B S K H"]:
    """Writes rows[a, r] to layer[slot[a], index[a, r]]; indices past the end are dropped.

    slot None: entry a is slot a.
    """
    if slot is None:
        slot = jnp.arange(rows.shape[0], dtype=jnp.int32)
    return layer.at[slot[:, None], index].set(rows, mode="drop")


def append_row(cache: KVCache, keys: Rows, values: Rows, place: Int[Array, " 1"]) -> KVCache:
    """Writes one row to a cache of one slot. `place` lies inside it, so nothing may have to be
    dropped, and what is there need not be read."""

    def append(layers: Layers, rows: Rows) -> Layers:
        start = (0, place[0], 0, 0)
        pairs = zip(layers, rows, strict=True)
        return tuple(jax.lax.dynamic_update_slice(layer, row, start) for layer, row in pairs)

    return KVCache(append(cache.keys, keys), append(cache.values, values))


def write_rows(
    cache: KVCache,
    keys: Rows,
    values: Rows,
    index: Int[Array, "A R"],
    slot: Int[Array, " A"] | None = None,
) -> KVCache:
    """`write_layer` for every layer."""

    def write(layers: Layers, rows: Rows) -> Layers:
        pairs = zip(layers, rows, strict=True)
        return tuple(write_layer(layer, new, index, slot) for layer, new in pairs)

    return KVCache(write(cache.keys, keys), write(cache.values, values))
