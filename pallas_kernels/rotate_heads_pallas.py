"""Pallas GPU kernel of `rotate_heads`: one launch, a program takes some rows of one head."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch

_ROWS = 8


def unsupported(dtype: jnp.dtype, head_dim: int) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, got {jnp.dtype(dtype).name}"
    if not 16 <= head_dim <= 512 or head_dim & (head_dim - 1):
        return f"the head dim must be a power of two from 16 to 512, got H={head_dim}"
    return None


def _rotate_kernel(
    parts_ref,  # [P, rows, C]
    query_scale_ref,  # [H]
    key_scale_ref,  # [H]
    cos_ref,  # [rows, H / 2]
    sin_ref,  # [rows, H / 2]
    query_ref,  # [rows, N, H], out
    key_ref,  # [rows, K, H], out
    value_ref,  # [rows, K, H], out
    *,
    tile_rows: int,
    eps: float,
):
    rows, queries, head_dim = query_ref.shape
    keys, half, dtype = key_ref.shape[1], head_dim // 2, query_ref.dtype
    head = pl.program_id(1)
    shape = (tile_rows, half)
    row = pl.program_id(0) * tile_rows + jax.lax.iota(jnp.int32, tile_rows)
    row = dispatch.spread(row, shape, 0)
    lane = dispatch.spread(jax.lax.iota(jnp.int32, half), shape, 1)
    inside = row < rows

    def load_half(offset):
        column = head * head_dim + offset + lane
        total = jnp.zeros(shape, jnp.float32)
        for part in range(parts_ref.shape[0]):
            value = pltriton.load(parts_ref.at[part, row, column], mask=inside, other=0.0)
            total = total + value.astype(jnp.float32)
        return total.astype(dtype).astype(jnp.float32)

    # All loads come first: behind the reduction their latency would show.
    first, second = load_half(0), load_half(half)
    cos = pltriton.load(cos_ref.at[row, lane], mask=inside, other=0.0).astype(jnp.float32)
    sin = pltriton.load(sin_ref.at[row, lane], mask=inside, other=0.0).astype(jnp.float32)

    def store(ref, index, one, two):
        pltriton.store(ref.at[row, index, lane], one.astype(dtype), mask=inside)
        pltriton.store(ref.at[row, index, half + lane], two.astype(dtype), mask=inside)

    def store_turned(ref, index, scale_ref):
        square = jnp.sum(first * first, axis=1) + jnp.sum(second * second, axis=1)
        scaling = dispatch.spread(jax.lax.rsqrt(square / head_dim + eps), shape, 0)

        def normed(x, offset):
            scale = scale_ref[pl.ds(offset, half)].astype(jnp.float32)
            x = (x * scaling).astype(dtype).astype(jnp.float32)
            return (x * dispatch.spread(scale, shape, 1)).astype(dtype).astype(jnp.float32)

        one, two = normed(first, 0), normed(second, half)
        store(ref, index, one * cos - two * sin, two * cos + one * sin)

    @pl.when(head < queries)
    def _():
        store_turned(query_ref, head, query_scale_ref)

    @pl.when((head >= queries) & (head < queries + keys))
    def _():
        store_turned(key_ref, head - queries, key_scale_ref)

    @pl.when(head >= queries + keys)
    def _():
        store(value_ref, head - queries - keys, first, second)


@dispatch.lowered_once
def rotate_heads(
    parts: jax.Array,
    query_scale: jax.Array,
    key_scale: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_kv_heads: int,
    eps: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query [B, R, N, H], key and value [B, R, K, H] as `rotate_heads.definition` gives them."""
    part_count, slots, slot_rows, columns = parts.shape
    head_dim, rows = query_scale.shape[0], slots * slot_rows
    heads = columns // head_dim
    tile_rows = min(_ROWS, dispatch.next_power_of_two(rows))
    counts = (heads - 2 * num_kv_heads, num_kv_heads, num_kv_heads)

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i, j: (0,) * len(shape))

    table = (rows, head_dim // 2)
    out = pl.pallas_call(
        functools.partial(_rotate_kernel, tile_rows=tile_rows, eps=eps),
        grid=(dispatch.ceil_div(rows, tile_rows), heads),
        in_specs=[
            whole(part_count, rows, columns),
            whole(head_dim),
            whole(head_dim),
            whole(*table),
            whole(*table),
        ],
        out_specs=[whole(rows, count, head_dim) for count in counts],
        out_shape=[
            jax.ShapeDtypeStruct((rows, count, head_dim), query_scale.dtype) for count in counts
        ],
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="rotate_heads",
    )(
        parts.reshape(part_count, rows, columns),
        query_scale,
        key_scale,
        cos.reshape(table),
        sin.reshape(table),
    )
    return tuple(array.reshape(slots, slot_rows, *array.shape[1:]) for array in out)
