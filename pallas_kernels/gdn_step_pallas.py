"""Pallas GPU kernel of `gdn_step`: one launch a layer, a program some columns of a head's state.

A program convolves its own values, and query and key of their head, as the other programs of that
head do too: what it holds of the state stays few numbers a thread, written back in place. Of the
convolution's rows it writes one that no program reads: that of the oldest position.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, gdn_wy
from pallas_kernels.dispatch import silu, spread, whole
from pallas_kernels.gdn_heads_pallas import convolved, log_decay_of
from pallas_kernels.gdn_tree_pallas import unsupported as unsupported
from pallas_kernels.skinny_matmul_pallas import load_sum

_VALUES = 32  # columns of a head's state, a program


def _columns(parts_ref, column: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return load_sum(parts_ref, column, mask=jnp.full(column.shape, True), dtype=dtype)


def _step_kernel(
    length_ref,  # int32 [1]
    count_ref,  # int32 [1]
    parts_ref,  # [P, C]
    conv_ref,  # [W, Ck]
    kernel_ref,  # [W, Ck]
    log_rate_ref,  # float32 [1]
    time_bias_ref,  # float32 [1]
    scale_ref,  # float32 [V]
    state_ref,  # float32 [Dk, V]
    out_ref,  # [V], out
    squares_ref,  # float32 [1], out
    new_state_ref,  # float32 [Dk, V], out; the same buffer as state_ref
    new_conv_ref,  # [W, Ck], out; the same buffer as conv_ref
    *,
    keys: int,
    group: int,
):
    (key_dim, size), dtype = state_ref.shape, conv_ref.dtype
    shape, (width, channels) = state_ref.shape, kernel_ref.shape
    head, cut, cuts = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    heads, key_head = pl.num_programs(0), head // group
    length, runs = length_ref[0], count_ref[0] > 0
    # All loads come before any arithmetic and any store: behind those their latency would show.

    def load(first, size):
        """Columns of the product, then of the inputs before it, then the taps of all."""
        column = first + jax.lax.iota(jnp.int32, size)
        own = _columns(parts_ref, column, dtype)
        lines = [jnp.full((size,), number, jnp.int32) for number in range(width)]
        rows = [(length - line + width) % width for line in lines[1:]]
        before = [pltriton.load(conv_ref.at[row, column]) for row in rows]
        return column, [own, *before], [kernel_ref[line, column] for line in reversed(lines)]

    columns = [
        load(key_head * key_dim, key_dim),
        load(keys + key_head * key_dim, key_dim),
        load(2 * keys + (head * cuts + cut) * size, size),
    ]
    gate = channels + (head * cuts + cut) * size + jax.lax.iota(jnp.int32, size)
    gate = _columns(parts_ref, gate, dtype).astype(jnp.float32)
    first = 2 * (channels - keys)  # behind the convolved channels and the gate
    rates = (jnp.full((1,), first + place, jnp.int32) for place in (head, heads + head))
    beta, decay = (_columns(parts_ref, place, dtype).astype(jnp.float32) for place in rates)
    log_rate, time_bias = log_rate_ref[0], time_bias_ref[0]
    scale, state = scale_ref[...], state_ref[...]

    query, key, value = (
        convolved(zip(inputs, taps, strict=True), dtype).astype(jnp.float32)
        for _, inputs, taps in columns
    )
    beta = jax.lax.logistic(jnp.sum(beta))
    decay = log_decay_of(jnp.sum(decay), log_rate, time_bias)
    decay = jnp.exp(jnp.maximum(decay, gdn_wy.LEAST_LOG_DECAY))
    key = key * gdn_wy.inverse_norm(key)
    query = query * (gdn_wy.inverse_norm(query) * key_dim**-0.5)
    column = spread(key, shape, 0)
    seen = jnp.sum(state * column, axis=0) * decay
    asked = jnp.sum(state * spread(query, shape, 0), axis=0) * decay
    update = beta * (value - seen)
    new = state * decay + column * spread(update, shape, 1)
    place = tuple(jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    pltriton.store(new_state_ref.at[place], new, mask=jnp.full(shape, runs))
    # Rounded as the recurrence of a tree leaves it.
    answer = (asked + jnp.sum(key * query) * update).astype(dtype).astype(jnp.float32)
    out_ref[...] = (answer * scale * silu(gate)).astype(dtype)
    squares_ref[0] = jnp.sum(answer * answer)

    # A key head's row is written once, each value's by its own program.
    first = (head % group == 0) & (cut == 0)
    for (column, inputs, _), writes in zip(columns, (first, first, True), strict=True):
        row = jnp.full(column.shape, length % width, jnp.int32)
        mask = jnp.full(column.shape, runs & writes)
        pltriton.store(new_conv_ref.at[row, column], inputs[0], mask=mask)


@dispatch.lowered_once
def gdn_step(
    parts: jax.Array,
    conv: jax.Array,
    kernel: jax.Array,
    log_rate: jax.Array,
    time_bias: jax.Array,
    scale: jax.Array,
    state: jax.Array,
    lengths: jax.Array,
    count: jax.Array,
    *,
    num_key_heads: int,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The fields of `GdnStep`, as `gdn_step.definition` gives them; squares in parts."""
    part_count, columns = parts.shape[0], parts.shape[3]
    slots, heads, key_dim, value_dim = state.shape
    width, channels = kernel.shape
    size = dispatch.divisor(value_dim, _VALUES)
    number = pl.BlockSpec((1,), lambda h, i, b: (b,))
    of_head = pl.BlockSpec((1,), lambda h, i, b: (h,))
    rows = pl.BlockSpec((None, width, channels), lambda h, i, b: (b, 0, 0))
    tile = pl.BlockSpec((None, None, key_dim, size), lambda h, i, b: (b, h, 0, i))
    out_row = pl.BlockSpec((None, None, None, size), lambda h, i, b: (b, 0, h, i))
    cuts = value_dim // size
    squares = pl.BlockSpec((None, None, None, 1), lambda h, i, b: (b, 0, h, i))
    outs = [
        jax.ShapeDtypeStruct((slots, 1, heads, value_dim), conv.dtype),
        jax.ShapeDtypeStruct((slots, 1, heads, cuts), jnp.float32),
    ]
    moved = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (state, conv)]
    # 32 numbers of the state a thread: with more warps the compiler convolves once a layout.
    num_warps = max(1, min(16, key_dim * size // (32 * 32)))
    return pl.pallas_call(
        functools.partial(_step_kernel, keys=num_key_heads * key_dim, group=heads // num_key_heads),
        grid=(heads, cuts, slots),
        in_specs=[
            number,
            number,
            pl.BlockSpec((part_count, None, None, columns), lambda h, i, b: (0, b, 0, 0)),
            rows,
            whole(width, channels),
            of_head,
            of_head,
            pl.BlockSpec((size,), lambda h, i, b: (i,)),
            tile,
        ],
        out_specs=[out_row, squares, tile, rows],
        out_shape=[*outs, *moved],
        input_output_aliases={8: 2, 3: 3},
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_step",
    )(lengths, count, parts, conv, kernel, log_rate, time_bias, scale, state)
