"""Pallas GPU kernel of `sort_by_expert`: one launch, a program of one warp an expert.

The place of an entry is the number of entries with a smaller id, plus that of earlier ones with
its own: a program counts both for its expert and writes the places of that expert alone.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch

_MOST_LANES = 1024


def _sort_kernel(
    ids_ref,  # int32 [N]
    entry_ref,  # int32 [N], out
    starts_ref,  # int32 [G + 1], out
    *,
    size: int,
):
    entries, expert = ids_ref.shape[0], pl.program_id(0)
    steps, lane = dispatch.ceil_div(entries, size), jax.lax.iota(jnp.int32, size)
    behind = jnp.int32(starts_ref.shape[0])  # an id behind every expert

    def load(step):
        entry = step * size + lane
        return entry, pltriton.load(ids_ref.at[entry], mask=entry < entries, other=behind)

    def count_below(step, below):
        return below + (load(step)[1] < expert).astype(jnp.int32)

    below = jax.lax.fori_loop(0, steps, count_below, jnp.zeros((size,), jnp.int32))
    start = jnp.sum(below)
    starts_ref[expert] = start

    def place(step, first):
        entry, ids = load(step)
        own = (ids == expert).astype(jnp.int32)
        # Interpret mode drops what lies past the end, where a masked store is not one.
        at = jnp.where(own == 1, first + jax.lax.cumsum(own) - 1, entries)
        pltriton.store(entry_ref.at[at], entry, mask=own == 1)
        return first + jnp.sum(own)

    jax.lax.fori_loop(0, steps, place, start)


@dispatch.lowered_once
def sort_by_expert(ids: jax.Array, *, experts: int, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """(entry [N], starts [G + 1]) as `sort_by_expert.definition` gives them."""
    size = min(_MOST_LANES, dispatch.lanes_for(ids.size))
    lengths = (ids.size, experts + 1)
    return pl.pallas_call(
        functools.partial(_sort_kernel, size=size),
        grid=(experts + 1,),  # the last only counts
        in_specs=[pl.BlockSpec((ids.size,), lambda i: (0,))],
        out_specs=[pl.BlockSpec((length,), lambda i: (0,)) for length in lengths],
        out_shape=[jax.ShapeDtypeStruct((length,), jnp.int32) for length in lengths],
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="sort_by_expert",
    )(ids.reshape(-1))
