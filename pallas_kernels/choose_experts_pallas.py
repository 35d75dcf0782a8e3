"""Pallas GPU kernel of `choose_experts`: one launch, a program of one warp a row.

One warp, so that the maxima that the choice waits for stay inside it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.skinny_matmul_pallas import load_sum

_MOST_LANES = 2048
_LEAST = -(2**31)
_DOT_LANES = 1024


def unsupported(dtype: jnp.dtype, experts: int) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if unfit := dispatch.unsupported_dtype(dtype):
        return unfit
    if experts > _MOST_LANES:
        return f"it holds the logits of at most {_MOST_LANES} experts in registers, got {experts}"
    return None


def logits_of(parts_ref, lane: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits [lanes] of parts_ref [P, 1, E], and int32 that compare as they do, a NaN as some
    number; behind the experts the least."""
    inside = lane < parts_ref.shape[2]
    logit = load_sum(parts_ref, 0, lane, mask=inside, dtype=jnp.float32)
    bits = dispatch.ordered_bits(jax.lax.bitcast_convert_type(logit, jnp.int32))
    return logit, jnp.where(inside, jnp.maximum(bits, _LEAST + 1), _LEAST)


def likeliest(bits: jax.Array, lane: jax.Array, count: jax.Array | int, chosen: int):
    """Places of the `count` largest bits, largest first, [lanes_for(chosen)]; and the last of
    them, which is no place if `count` is 0."""
    slot = jax.lax.iota(jnp.int32, dispatch.lanes_for(chosen))

    def choose(number, state):
        bits, index, _ = state
        best = jax.lax.argmax(bits, 0, jnp.int32)
        return jnp.where(lane == best, _LEAST, bits), jnp.where(slot == number, best, index), best

    none = jnp.zeros(slot.shape, jnp.int32)
    return jax.lax.fori_loop(0, count, choose, (bits, none, jnp.int32(bits.shape[0])))[1:]


def _gate_of(x_ref, gate_ref) -> jax.Array:
    """sigmoid of x . gate, of x_ref [1, D], each rounded to x's dtype."""
    size, dtype = x_ref.shape[1], x_ref.dtype
    lanes = min(_DOT_LANES, dispatch.lanes_for(size))
    total = jnp.zeros((lanes,), jnp.float32)
    for first in range(0, size, lanes):
        lane = first + jax.lax.iota(jnp.int32, lanes)
        x, gate = (
            pltriton.load(ref, mask=lane < size, other=0.0).astype(jnp.float32)
            for ref in (x_ref.at[0, lane], gate_ref.at[lane])
        )
        total = total + x * gate
    logit = jnp.full((lanes,), jnp.sum(total)).astype(dtype).astype(jnp.float32)
    return jnp.max(jax.lax.logistic(logit).astype(dtype).astype(jnp.float32))


def choose_kernel(
    parts_ref,  # [P, 1, E]
    x_ref,  # [1, D]
    gate_ref,  # [D]
    weight_ref,  # float32 [1, K], out
    index_ref,  # int32 [1, K], out
    *,
    count: int,
    normalise: bool,
):
    """One row's choice."""
    experts, chosen, dtype = parts_ref.shape[2], weight_ref.shape[1], x_ref.dtype
    lane = jax.lax.iota(jnp.int32, dispatch.lanes_for(experts))
    logit, bits = logits_of(parts_ref, lane)
    # Early: behind the choice the latency of its loads would show.
    gate = _gate_of(x_ref, gate_ref) if chosen > count else None
    index, _ = likeliest(bits, lane, count, chosen)
    slot = jax.lax.iota(jnp.int32, index.shape[0])
    real = slot < count
    best = load_sum(parts_ref, 0, index, mask=real, dtype=jnp.float32)
    top = jnp.max(jnp.where(real, best, -jnp.inf))
    weight = jnp.where(real, jnp.exp(best - top), 0.0)
    total = weight if normalise else jnp.where(lane < experts, jnp.exp(logit - top), 0.0)
    weight = weight / jnp.sum(total)
    if gate is not None:
        weight = jnp.where(slot == count, gate, weight)
        index = jnp.where(slot == count, experts, index)
    weight = weight.astype(dtype).astype(jnp.float32)
    pltriton.store(weight_ref.at[0, slot], weight, mask=slot < chosen)
    pltriton.store(index_ref.at[0, slot], index, mask=slot < chosen)


@dispatch.lowered_once
def choose_experts(
    parts: jax.Array,
    x: jax.Array,
    shared_gate: jax.Array | None,
    *,
    count: int,
    normalise: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Weights and ids, each [B, R, K], as `choose_experts.definition` gives them."""
    part_count, slots, slot_rows, experts = parts.shape
    size, rows = x.shape[2], slots * slot_rows
    chosen = count if shared_gate is None else count + 1
    row = pl.BlockSpec((1, chosen), lambda i: (i, 0))
    weight, index = pl.pallas_call(
        functools.partial(choose_kernel, count=count, normalise=normalise),
        grid=(rows,),
        in_specs=[
            pl.BlockSpec((part_count, 1, experts), lambda i: (0, i, 0)),
            pl.BlockSpec((1, size), lambda i: (i, 0)),
            pl.BlockSpec((size,), lambda i: (0,)),
        ],
        out_specs=[row, row],
        out_shape=[jax.ShapeDtypeStruct((rows, chosen), t) for t in (jnp.float32, jnp.int32)],
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )(
        parts.reshape(part_count, rows, experts),
        x.reshape(rows, size),
        # Without a shared expert nothing reads a gate, and any array stands in for it.
        x.reshape(-1) if shared_gate is None else shared_gate,
    )
    return tuple(out.reshape(slots, slot_rows, chosen) for out in (weight, index))
