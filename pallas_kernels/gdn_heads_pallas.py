"""Pallas GPU kernels of `gdn_heads` and `gated_norm`: one launch each, programs of some rows and
some columns."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.dispatch import silu, spread, whole
from pallas_kernels.skinny_matmul_pallas import load_sum

_ROWS = 16  # a program at most
_COLUMNS = 128


def unsupported(dtype: jnp.dtype, keys: int, channels: int) -> str | None:
    """Why the kernel of `gdn_heads` cannot take these arguments, or None."""
    if unfit := dispatch.unsupported_dtype(dtype):
        return unfit
    if dispatch.divisor(keys, 16) < 16 or dispatch.divisor(channels, 16) < 16:
        return f"keys and channels must be multiples of 16, got {keys} and {channels}"
    return None


def unsupported_norm(dtype: jnp.dtype, size: int) -> str | None:
    """Why the kernel of `gated_norm` cannot take these arguments, or None."""
    return dispatch.unsupported_size(dtype, "value dim", size, 1024)


def log_decay_of(decay: jax.Array, log_rate: jax.Array, time_bias: jax.Array) -> jax.Array:
    """-exp(log_rate) * softplus(decay + time_bias), inside a kernel."""
    raw = decay + time_bias
    softplus = jnp.maximum(raw, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(raw)))  # without overflow
    return -jnp.exp(log_rate) * softplus


def convolved(entries: Iterable[tuple[jax.Array, jax.Array]], dtype: jnp.dtype) -> jax.Array:
    """silu of the sum of inputs times taps, the newest first, inside a kernel."""
    total = None
    for row, tap in entries:
        part = row.astype(jnp.float32) * tap.astype(jnp.float32)
        total = part if total is None else total + part
    return silu(total.astype(dtype).astype(jnp.float32)).astype(dtype)


def _normed_and_gated(x: jax.Array, gate: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Rows [.., Dv] of `gated_norm` in their dtype, inside a kernel."""
    dtype, wide = x.dtype, x.astype(jnp.float32)
    scaling = jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1) / x.shape[-1] + eps)
    scaling = jax.lax.broadcast_in_dim(scaling, x.shape, tuple(range(x.ndim - 1)))
    normed = (wide * scaling).astype(dtype).astype(jnp.float32)
    return (normed * scale * silu(gate.astype(jnp.float32))).astype(dtype)


def _heads_kernel(
    parts_ref,  # [P, R, C]
    before_ref,  # [N, Ck]
    kernel_ref,  # [W, Ck]
    window_ref,  # int32 [R, W]
    log_rate_ref,  # float32 [Hv]
    time_bias_ref,  # float32 [Hv]
    query_ref,  # [R, keys], out
    key_ref,  # [R, keys], out
    value_ref,  # [R, values], out
    decay_ref,  # float32 [R, Hv], out
    beta_ref,  # float32 [R, Hv], out
    mixed_ref,  # [R, Ck], out
    *,
    tile_rows: int,
    tile: int,
):
    rows, columns = parts_ref.shape[1:]
    kept, (width, channels) = before_ref.shape[0], kernel_ref.shape
    heads, dtype = log_rate_ref.shape[0], before_ref.dtype
    number = pl.program_id(1)
    first_row = pl.program_id(0) * tile_rows
    shape = (tile_rows, tile)
    row = first_row + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    inside = row < rows
    line = first_row + jax.lax.iota(jnp.int32, tile_rows)

    def tap(distance, column):
        at = jnp.full((tile_rows,), distance, jnp.int32)
        index = pltriton.load(window_ref.at[line, at], mask=line < rows, other=0)
        index = spread(index, shape, 0)
        old, new = inside & (index < kept), inside & (index >= kept)
        # Masked entries must stay in range: interpret mode clamps, a GPU does not.
        safe = jnp.minimum(index, kept - 1)
        entries = pltriton.load(before_ref.at[safe, column], mask=old, other=0.0)
        safe = jnp.maximum(index - kept, 0)
        return entries + load_sum(parts_ref, safe, column, mask=new, dtype=dtype)

    def convolve():
        column = number * tile + lane

        def pairs():
            for distance in range(width):
                entries = tap(distance, column)
                if distance == 0:
                    pltriton.store(mixed_ref.at[row, column], entries, mask=inside)
                own = jnp.full(shape, width - 1 - distance, jnp.int32)
                yield entries, kernel_ref[own, column]

        return convolved(pairs(), dtype)

    @pl.when(number < channels // tile)
    def _():
        heads = convolve()
        begin = 0
        for ref in (query_ref, key_ref, value_ref):
            end = begin + ref.shape[1] // tile

            @pl.when((number >= begin) & (number < end))
            def _(ref=ref, begin=begin):
                pltriton.store(ref.at[row, (number - begin) * tile + lane], heads, mask=inside)

            begin = end

    @pl.when(number >= channels // tile)
    def _():
        head = (number - channels // tile) * tile + lane
        real = inside & (head < heads)

        def rate(first):
            column = columns + first + head
            return load_sum(parts_ref, row, column, mask=real, dtype=dtype).astype(jnp.float32)

        def constant(ref):
            return pltriton.load(ref.at[head], mask=real, other=0.0)

        beta = jax.lax.logistic(rate(-2 * heads))
        decay = log_decay_of(rate(-heads), constant(log_rate_ref), constant(time_bias_ref))
        pltriton.store(beta_ref.at[row, head], beta, mask=real)
        pltriton.store(decay_ref.at[row, head], decay, mask=real)


@dispatch.lowered_once
def gdn_heads(
    parts: jax.Array,
    before: jax.Array,
    kernel: jax.Array,
    window: jax.Array,
    log_rate: jax.Array,
    time_bias: jax.Array,
    *,
    keys: int,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """Columns of query, key, value, then log_decay, beta and mixed, each [B, R, ...]."""
    part_count, slots, rows, columns = parts.shape
    (width, channels), heads = kernel.shape, log_rate.shape[0]
    values = channels - 2 * keys
    tile = min(dispatch.divisor(keys, _COLUMNS), dispatch.divisor(values, _COLUMNS))
    tile_rows = min(_ROWS, dispatch.next_power_of_two(rows))

    def of_slot(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda i, j, b: (b,) + (0,) * len(shape))

    outs = [(size, before.dtype) for size in (keys, keys, values)]
    outs += [(heads, jnp.float32)] * 2 + [(channels, before.dtype)]
    programs = channels // tile + dispatch.ceil_div(heads, tile)
    return pl.pallas_call(
        functools.partial(_heads_kernel, tile_rows=tile_rows, tile=tile),
        grid=(dispatch.ceil_div(rows, tile_rows), programs, slots),
        in_specs=[
            pl.BlockSpec((part_count, None, rows, columns), lambda i, j, b: (0, b, 0, 0)),
            of_slot(before.shape[1], channels),
            whole(width, channels),
            of_slot(rows, width),
            whole(heads),
            whole(heads),
        ],
        out_specs=[of_slot(rows, size) for size, _ in outs],
        out_shape=[jax.ShapeDtypeStruct((slots, rows, size), dtype) for size, dtype in outs],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gdn_heads",
    )(parts, before, kernel, window, log_rate, time_bias)


def _norm_kernel(
    x_ref,  # [R, Hv, Dv]
    parts_ref,  # [P, R, C]
    scale_ref,  # float32 [Dv]
    out_ref,  # [R, Hv, Dv], out
    *,
    tile_rows: int,
    start: int,
    eps: float,
):
    rows, _, size = x_ref.shape
    shape, dtype = (tile_rows, size), x_ref.dtype
    head = jnp.full(shape, pl.program_id(1), jnp.int32)
    row = pl.program_id(0) * tile_rows + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    inside = row < rows
    # All loads come first: behind the reduction their latency would show.
    gate = load_sum(parts_ref, row, start + head * size + lane, mask=inside, dtype=dtype)
    scale = scale_ref[lane]
    x = pltriton.load(x_ref.at[row, head, lane], mask=inside, other=0.0)
    pltriton.store(out_ref.at[row, head, lane], _normed_and_gated(x, gate, scale, eps), mask=inside)


@dispatch.lowered_once
def gated_norm(
    x: jax.Array,
    parts: jax.Array,
    scale: jax.Array,
    *,
    start: int,
    eps: float,
    interpret: bool,
) -> jax.Array:
    """[B, R, Hv, Dv] as `gated_norm_definition` gives them."""
    part_count, columns = parts.shape[0], parts.shape[3]
    heads, size = x.shape[2:]
    rows = x.shape[0] * x.shape[1]
    tile_rows = min(_ROWS, dispatch.next_power_of_two(rows))

    out = pl.pallas_call(
        functools.partial(_norm_kernel, tile_rows=tile_rows, start=start, eps=eps),
        grid=(dispatch.ceil_div(rows, tile_rows), heads),
        in_specs=[whole(rows, heads, size), whole(part_count, rows, columns), whole(size)],
        out_specs=whole(rows, heads, size),
        out_shape=jax.ShapeDtypeStruct((rows, heads, size), x.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gated_norm",
    )(x.reshape(rows, heads, size), parts.reshape(part_count, rows, columns), scale)
    return out.reshape(x.shape)
