"""Pallas GPU kernel of `gdn_step`: one launch a layer, a program a value head.

A program convolves its head's channels (value heads of one key head repeat that of key and query),
holds the head's state on chip, and writes it back in place. Of the convolution's rows it writes
one that no program reads: that of the oldest position.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, gdn_wy
from pallas_kernels.dispatch import spread, whole
from pallas_kernels.gdn_heads_pallas import convolved, log_decay_of, normed_and_gated
from pallas_kernels.gdn_tree_pallas import unsupported as unsupported
from pallas_kernels.skinny_matmul_pallas import load_sum


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
    scale_ref,  # float32 [Dv]
    state_ref,  # float32 [Dk, Dv]
    out_ref,  # [Dv], out
    new_state_ref,  # float32 [Dk, Dv], out; the same buffer as state_ref
    new_conv_ref,  # [W, Ck], out; the same buffer as conv_ref
    *,
    heads: int,
    group: int,
    eps: float,
):
    (key_dim, value_dim), dtype = state_ref.shape, conv_ref.dtype
    shape, (width, channels) = state_ref.shape, kernel_ref.shape
    head, values = pl.program_id(0), heads * value_dim
    keys, key_head = (channels - values) // 2, head // group
    length, runs = length_ref[0], count_ref[0] > 0
    # All loads come before any arithmetic and any store, the largest first: behind those their
    # latency would show.
    state = state_ref[...]

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
        load(2 * keys + head * value_dim, value_dim),
    ]
    first = channels + head * value_dim
    gate = _columns(parts_ref, first + jax.lax.iota(jnp.int32, value_dim), dtype)
    rates = (jnp.full((1,), channels + values + place, jnp.int32) for place in (head, heads + head))
    beta, decay = (_columns(parts_ref, place, dtype).astype(jnp.float32) for place in rates)
    scale, log_rate, time_bias = scale_ref[...], log_rate_ref[0], time_bias_ref[0]

    query, key, value = (
        convolved(zip(inputs, taps, strict=True), dtype).astype(jnp.float32)
        for _, inputs, taps in columns
    )
    beta = jax.lax.logistic(jnp.sum(beta))
    decay = log_decay_of(jnp.sum(decay), log_rate, time_bias)
    key = key * jax.lax.rsqrt(jnp.sum(key * key) + gdn_wy.EPS)
    query = query * (jax.lax.rsqrt(jnp.sum(query * query) + gdn_wy.EPS) * key_dim**-0.5)
    state = state * jnp.exp(jnp.maximum(decay, gdn_wy.LEAST_LOG_DECAY))
    column = spread(key, shape, 0)
    seen = jnp.sum(state * column, axis=0)
    asked = jnp.sum(state * spread(query, shape, 0), axis=0)
    update = beta * (value - seen)
    new = state + column * spread(update, shape, 1)
    place = tuple(jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    pltriton.store(new_state_ref.at[place], new, mask=jnp.full(shape, runs))

    # As `gated_norm` reads it: in the dtype that the recurrence answers in.
    answer = (asked + jnp.sum(key * query) * update).astype(dtype)
    out_ref[...] = normed_and_gated(answer, gate, scale, eps)

    for number, (column, inputs, _) in enumerate(columns):
        writes = runs & ((head % group == 0) | (number == 2))  # a key head's rows are written once
        row = jnp.full(column.shape, length % width, jnp.int32)
        mask = jnp.full(column.shape, writes)
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
    eps: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Out [B, 1, Hv, Dv], state and conv, as `gdn_step.definition` gives them."""
    part_count, columns = parts.shape[0], parts.shape[3]
    slots, heads, key_dim, value_dim = state.shape
    width, channels = kernel.shape
    number = pl.BlockSpec((1,), lambda h, b: (b,))
    of_head = pl.BlockSpec((1,), lambda h, b: (h,))
    rows = pl.BlockSpec((None, width, channels), lambda h, b: (b, 0, 0))
    tile = pl.BlockSpec((None, None, key_dim, value_dim), lambda h, b: (b, h, 0, 0))
    out_row = pl.BlockSpec((None, None, None, value_dim), lambda h, b: (b, 0, h, 0))
    out = jax.ShapeDtypeStruct((slots, 1, heads, value_dim), conv.dtype)
    moved = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (state, conv)]
    # 128 numbers of the state a thread: fewer spend more on sums between warps, more would spill.
    num_warps = max(1, min(16, key_dim * value_dim // (128 * 32)))
    return pl.pallas_call(
        functools.partial(_step_kernel, heads=heads, group=heads // num_key_heads, eps=eps),
        grid=(heads, slots),
        in_specs=[
            number,
            number,
            pl.BlockSpec((part_count, None, None, columns), lambda h, b: (0, b, 0, 0)),
            rows,
            whole(width, channels),
            of_head,
            of_head,
            whole(value_dim),
            tile,
        ],
        out_specs=[out_row, tile, rows],
        out_shape=[out, *moved],
        input_output_aliases={8: 1, 3: 2},
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_step",
    )(lengths, count, parts, conv, kernel, log_rate, time_bias, scale, state)
