"""Pallas GPU kernel of `rotate_heads`: one launch, a program takes some rows of one head."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.dispatch import whole
from pallas_kernels.skinny_matmul_pallas import load_sum

_MOST_ROWS = 8
_ENTRIES = 1024  # of a program's tile, 32 a thread
_MOST_PIECES = 16  # of a head


def unsupported(dtype: jnp.dtype, head_dim: int, pairs: int) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if unfit := dispatch.unsupported_size(dtype, "head dim", head_dim, 512, letter="H"):
        return unfit
    if pairs & (pairs - 1) or pairs * _MOST_PIECES < head_dim:
        least = head_dim // _MOST_PIECES
        return f"the pairs must be a power of two, at least {least} of H={head_dim}, got {pairs}"
    return None


def _rotate_kernel(
    parts_ref,  # [P, rows, C]
    query_scale_ref,  # [H]
    key_scale_ref,  # [H]
    cos_ref,  # [rows, pairs]
    sin_ref,  # [rows, pairs]
    query_ref,  # [rows, N, H], out
    key_ref,  # [rows, K, H], out
    value_ref,  # [rows, K, H], out
    gate_ref=None,  # [rows, N, H], out
    *,
    tile_rows: int,
    eps: float,
    centred: bool,
):
    rows, queries, head_dim = query_ref.shape
    keys, pairs, dtype = key_ref.shape[1], cos_ref.shape[1], query_ref.dtype
    first_key = queries if gate_ref is None else 2 * queries
    head = pl.program_id(1)
    # A head lies in pieces of one shape: the two that rotate into each other, and the rest.
    starts, shape = range(0, head_dim, pairs), (tile_rows, pairs)
    row = pl.program_id(0) * tile_rows + jax.lax.iota(jnp.int32, tile_rows)
    row = dispatch.spread(row, shape, 0)
    lane = dispatch.spread(jax.lax.iota(jnp.int32, pairs), shape, 1)
    inside = row < rows

    def load_piece(start):
        column = head * head_dim + start + lane
        return load_sum(parts_ref, row, column, mask=inside, dtype=dtype).astype(jnp.float32)

    # All loads come first: behind the reduction their latency would show.
    pieces = [load_piece(start) for start in starts]
    cos = pltriton.load(cos_ref.at[row, lane], mask=inside, other=0.0).astype(jnp.float32)
    sin = pltriton.load(sin_ref.at[row, lane], mask=inside, other=0.0).astype(jnp.float32)

    def store(ref, index, pieces):
        for start, piece in zip(starts, pieces, strict=True):
            pltriton.store(ref.at[row, index, start + lane], piece.astype(dtype), mask=inside)

    def store_turned(ref, index, scale_ref):
        scales = [scale_ref[pl.ds(start, pairs)].astype(jnp.float32) for start in starts]
        square = functools.reduce(jnp.add, [piece * piece for piece in pieces])
        square = jnp.sum(square, axis=1)
        scaling = dispatch.spread(jax.lax.rsqrt(square / head_dim + eps), shape, 0)

        def normed(piece, scale):
            unit, scale = piece * scaling, dispatch.spread(scale, shape, 1)
            if centred:
                scale = 1.0 + scale
            else:
                unit = unit.astype(dtype).astype(jnp.float32)
            return (unit * scale).astype(dtype).astype(jnp.float32)

        one, two, *rest = map(normed, pieces, scales)
        store(ref, index, [one * cos - two * sin, two * cos + one * sin, *rest])

    @pl.when(head < queries)
    def _():
        store_turned(query_ref, head, query_scale_ref)

    if gate_ref is not None:

        @pl.when((head >= queries) & (head < first_key))
        def _():
            store(gate_ref, head - queries, map(jax.nn.sigmoid, pieces))

    @pl.when((head >= first_key) & (head < first_key + keys))
    def _():
        store_turned(key_ref, head - first_key, key_scale_ref)

    @pl.when(head >= first_key + keys)
    def _():
        store(value_ref, head - first_key - keys, pieces)


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
    centred: bool,
    gated: bool,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The fields of `Heads`, as `rotate_heads.definition` gives them; `gate` if gated only."""
    part_count, slots, slot_rows, columns = parts.shape
    head_dim, rows = query_scale.shape[0], slots * slot_rows
    heads = columns // head_dim
    tile_rows = min(_MOST_ROWS, _ENTRIES // head_dim, dispatch.next_power_of_two(rows))
    counts = (heads - 2 * num_kv_heads, num_kv_heads, num_kv_heads)
    if gated:
        queries = counts[0] // 2
        counts = (queries, num_kv_heads, num_kv_heads, queries)

    table = (rows, cos.shape[2])
    out = pl.pallas_call(
        functools.partial(_rotate_kernel, tile_rows=tile_rows, eps=eps, centred=centred),
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
