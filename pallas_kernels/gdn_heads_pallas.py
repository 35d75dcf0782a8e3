"""Pallas GPU kernels of `gdn_heads` and `gated_norm`: one launch each, programs of some rows and
some columns."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels import dispatch, gdn_wy
from pallas_kernels.dispatch import silu, spread, whole
from pallas_kernels.skinny_matmul_pallas import load_sum

_ROWS = 16  # a program at most
_HEADS = 16  # whose decays and betas a program finds


def unsupported(dtype: jnp.dtype, key_dim: int, values: int) -> str | None:
    """Why the kernel of `gdn_heads` cannot take these arguments, or None. values: columns."""
    if values % key_dim:
        return f"the columns of values must be a multiple of the key dim {key_dim}, got {values}"
    return dispatch.unsupported_size(dtype, "key dim", key_dim, 256)


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


def _rates(
    parts_ref,
    log_rate_ref,
    time_bias_ref,
    path_ref,
    decay_ref,
    beta_ref,
    from_prefix_ref,
    *,
    number: jax.Array,
    line: jax.Array,
    dtype: jnp.dtype,
) -> None:
    """Decays and betas of the rows `line` and the program's heads; refs as in `_heads_kernel`. No
    program waits for another, so a row finds the decay of each row on its path itself."""
    (rows, columns), heads = parts_ref.shape[1:], log_rate_ref.shape[0]
    shape = (line.shape[0], _HEADS)
    row, head = spread(line, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    head = number * _HEADS + head
    real = (row < rows) & (head < heads)
    constants = [
        pltriton.load(ref.at[head], mask=head < heads, other=0.0)
        for ref in (log_rate_ref, time_bias_ref)
    ]

    def rate(row, first, mask):
        column = columns + first + head
        return load_sum(parts_ref, row, column, mask=mask, dtype=dtype).astype(jnp.float32)

    def log_decay(row, mask):
        return log_decay_of(rate(row, -heads, mask), *constants)

    pltriton.store(beta_ref.at[row, head], jax.lax.logistic(rate(row, -2 * heads, real)), mask=real)
    pltriton.store(decay_ref.at[row, head], log_decay(row, real), mask=real)
    if path_ref is None:
        return
    total = jnp.zeros(shape, jnp.float32)
    for place in range(path_ref.shape[1]):
        at = jnp.full(line.shape, place, jnp.int32)
        ancestor = pltriton.load(path_ref.at[line, at], mask=line < rows, other=-1)
        ancestor = spread(ancestor, shape, 0)
        on_path = real & (ancestor >= 0)
        decay = log_decay(jnp.maximum(ancestor, 0), on_path)
        total = total + jnp.where(on_path, jnp.maximum(decay, gdn_wy.LEAST_LOG_DECAY), 0.0)
    pltriton.store(from_prefix_ref.at[row, head], jnp.exp(total), mask=real)


def _heads_kernel(
    parts_ref,  # [P, R, C]
    before_ref,  # [N, Ck]
    kernel_ref,  # [W, Ck]
    window_ref,  # int32 [R, W]
    log_rate_ref,  # float32 [Hv]
    time_bias_ref,  # float32 [Hv]
    path_ref,  # int32 [R, A], or None, and then no scales
    query_ref,  # [R, keys], out
    key_ref,  # [R, keys], out
    value_ref,  # [R, values], out
    decay_ref,  # float32 [R, Hv], out
    beta_ref,  # float32 [R, Hv], out
    mixed_ref,  # [R, Ck], out
    scale_refs,  # `GdnScales`, each [R, heads], out; or None
    *,
    tile_rows: int,
    tile: int,  # columns: those of a key head
    rate_programs: int,
):
    rows, kept, width = parts_ref.shape[1], before_ref.shape[0], kernel_ref.shape[0]
    dtype = before_ref.dtype
    query_scale_ref, key_scale_ref, from_prefix_ref = scale_refs or (None, None, None)
    program = pl.program_id(1)
    number = program - rate_programs
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

    @pl.when(number >= 0)
    def _():
        heads = convolve()
        begin = 0
        for ref, scale_ref, factor in (
            (query_ref, query_scale_ref, tile**-0.5),
            (key_ref, key_scale_ref, 1.0),
            (value_ref, None, 1.0),
        ):
            end = begin + ref.shape[1] // tile

            @pl.when((number >= begin) & (number < end))
            def _(ref=ref, scale_ref=scale_ref, factor=factor, begin=begin):
                pltriton.store(ref.at[row, (number - begin) * tile + lane], heads, mask=inside)
                if scale_ref is not None:
                    head = jnp.full((tile_rows,), number - begin, jnp.int32)
                    scale = gdn_wy.inverse_norm(heads) * factor
                    pltriton.store(scale_ref.at[line, head], scale, mask=line < rows)

            begin = end

    @pl.when(number < 0)
    def _():
        _rates(
            parts_ref,
            log_rate_ref,
            time_bias_ref,
            path_ref,
            decay_ref,
            beta_ref,
            from_prefix_ref,
            number=program,
            line=line,
            dtype=dtype,
        )


@dispatch.lowered_once
def gdn_heads(
    parts: jax.Array,
    before: jax.Array,
    kernel: jax.Array,
    window: jax.Array,
    log_rate: jax.Array,
    time_bias: jax.Array,
    path: jax.Array | None,
    *,
    num_key_heads: int,
    key_dim: int,
    interpret: bool,
) -> tuple[jax.Array | gdn_wy.GdnScales | None, ...]:
    """Columns of query, key, value, then log_decay, beta and mixed, each [B, R, ...]; scales, where
    paths are given."""
    part_count, slots, rows, columns = parts.shape
    (width, channels), heads = kernel.shape, log_rate.shape[0]
    keys = num_key_heads * key_dim
    tile_rows = min(_ROWS, dispatch.next_power_of_two(rows))

    def of_slot(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda i, j, b: (b,) + (0,) * len(shape))

    def out(size: int, dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((slots, rows, size), dtype)

    outs = [out(size, before.dtype) for size in (keys, keys, channels - 2 * keys)]
    outs += [out(heads)] * 2 + [out(channels, before.dtype), None]
    if path is not None:
        sizes = (num_key_heads, num_key_heads, heads)
        outs[-1] = gdn_wy.GdnScales(*map(out, sizes))
    rate_programs = dispatch.ceil_div(heads, _HEADS)
    return pl.pallas_call(
        functools.partial(
            _heads_kernel, tile_rows=tile_rows, tile=key_dim, rate_programs=rate_programs
        ),
        # Those of rates come first: they wait longest.
        grid=(dispatch.ceil_div(rows, tile_rows), rate_programs + channels // key_dim, slots),
        in_specs=[
            pl.BlockSpec((part_count, None, rows, columns), lambda i, j, b: (0, b, 0, 0)),
            of_slot(before.shape[1], channels),
            whole(width, channels),
            of_slot(rows, width),
            whole(heads),
            whole(heads),
            None if path is None else of_slot(rows, path.shape[2]),
        ],
        out_specs=jax.tree.map(lambda x: of_slot(*x.shape[1:]), outs),
        out_shape=outs,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gdn_heads",
    )(parts, before, kernel, window, log_rate, time_bias, path)


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
