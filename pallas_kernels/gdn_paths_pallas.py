"""What the nodes of a tree are to each other along its paths, once a head: a Pallas GPU kernel.

A node meets nobody but its ancestors, at most as many as the tree is deep. So all that `gdn_tree`
needs to know of two nodes fits a table of a line a node and an entry an ancestor, by depth. None of
it depends on the state, so tiles of value dims share it.

A program multiplies its nodes with all before them, where each key is read once, and then picks
what lies on their paths.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, gdn_wy
from pallas_kernels.dispatch import spread

_ROWS = 16  # nodes a program
_BLOCK = 64  # keys they meet at a time


class Paths(NamedTuple):
    """Of T nodes and A places of a path, by depth. Entries past a node's own depth are 0.

    lower: L of `gdn_wy`, by which a node's update depends on its ancestors';
    weight: D o Q K^T, with which its output reads the updates of its path, its own among them.
    """

    lower: jax.Array  # float32 [B, Hv, T, A]
    weight: jax.Array  # float32 [B, Hv, T, A]


def gather_rows(ref, index: jax.Array, mask: jax.Array) -> jax.Array:
    """Whole rows of ref; 0 where masked."""
    shape = (index.shape[0], ref.shape[1])
    column = spread(jax.lax.iota(jnp.int32, shape[1]), shape, 1)
    index = (spread(jnp.where(mask, index, 0), shape, 0), column)
    return pltriton.load(ref.at[index], mask=spread(mask, shape, 0), other=0.0)


def _pairs_kernel(
    query_ref,  # [T, Dk], strided, as the next
    key_ref,  # [T, Dk]
    query_scale_ref,  # float32 [T], strided, as the next: of `GdnScales`
    key_scale_ref,  # float32 [T]
    decay_ref,  # float32 [T, G], strided: log-decays
    beta_ref,  # float32 [T, G], strided
    path_ref,  # int32 [T, R]
    lower_ref,  # float32 [G, T, A], out: L
    weight_ref,  # float32 [G, T, A], out: D o Q K^T
    of_key_ref,  # float32 [rows, T], scratch: products of these rows' keys, of norm 1
    of_query_ref,  # float32 [rows, T], scratch: and of their queries
    *,
    block: int,  # keys a step
    interpret: bool,
):
    (nodes, width), (heads, _, places) = path_ref.shape, lower_ref.shape
    rows = of_key_ref.shape[0]
    first = pl.program_id(0) * rows
    row = jax.lax.iota(jnp.int32, rows)
    own_node = first + row
    shape = (rows, places)
    row, node = spread(row, shape, 0), spread(own_node, shape, 0)
    # From a node up, for sums of what lies below an ancestor: nothing is subtracted.
    place = places - 1 - jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    ancestor, below = (
        pltriton.load(path_ref.at[node, at], mask=(node < nodes) & (at < width), other=-1)
        for at in (place, place + 1)
    )
    own = []
    for ref, scale_ref, scratch_ref in (
        (key_ref, key_scale_ref, of_key_ref),
        (query_ref, query_scale_ref, of_query_ref),
    ):
        real = own_node < nodes
        scale = pltriton.load(scale_ref.at[own_node], mask=real, other=0.0)
        own.append((gather_rows(ref, own_node, real), scale, scratch_ref))

    def meet(step, _) -> None:
        other = step * block + jax.lax.iota(jnp.int32, block)
        keys = gather_rows(key_ref, other, other < nodes)
        other_scale = pltriton.load(key_scale_ref.at[other], mask=other < nodes, other=0.0)
        for own_rows, own_scale, scratch_ref in own:
            product = dispatch.dot(own_rows, keys, trans_b=True)
            product = product * spread(own_scale, product.shape, 0)
            product = product * spread(other_scale, product.shape, 1)
            scratch_ref[:, pl.ds(step * block, block)] = product

    steps = (first + rows - 1) // block + 1  # ancestors come first
    jax.lax.fori_loop(jnp.int32(0), steps.astype(jnp.int32), meet, None)
    dispatch.barrier(interpret)
    on_path = ancestor >= 0
    of_key, of_query = (
        pltriton.load(ref.at[row, jnp.maximum(ancestor, 0)], mask=on_path, other=0.0)
        for ref in (of_key_ref, of_query_ref)
    )
    of_key = jnp.where(ancestor < node, of_key, 0.0)
    for head in range(heads):
        each = jnp.full(shape, head, jnp.int32)
        decay = pltriton.load(decay_ref.at[jnp.maximum(below, 0), each], mask=below >= 0, other=0.0)
        decay = jnp.exp(jnp.cumsum(jnp.maximum(decay, gdn_wy.LEAST_LOG_DECAY), axis=1))
        beta = pltriton.load(beta_ref.at[node, each], mask=node < nodes, other=0.0)
        for ref, entries in ((lower_ref, beta * decay * of_key), (weight_ref, decay * of_query)):
            pltriton.store(ref.at[each, node, place], entries, mask=node < nodes)


def gdn_paths(
    query: jax.Array,
    key: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    path: jax.Array,
    scales: gdn_wy.GdnScales,
    *,
    interpret: bool,
) -> Paths:
    """`Paths` of every head."""
    slots, nodes, key_heads, key_dim = key.shape
    heads, width = beta.shape[2], path.shape[2]
    group, places = heads // key_heads, dispatch.lanes_for(width)
    block = min(_BLOCK, dispatch.lanes_for(nodes))
    key_rows = pl.BlockSpec((None, nodes, None, key_dim), lambda i, h, b: (b, 0, h, 0))
    scale = pl.BlockSpec((None, nodes, None), lambda i, h, b: (b, 0, h))
    numbers = pl.BlockSpec((None, nodes, group), lambda i, h, b: (b, 0, h))
    table = jax.ShapeDtypeStruct((slots, heads, nodes, places), jnp.float32)
    of_head = pl.BlockSpec((None, group, nodes, places), lambda i, h, b: (b, h, 0, 0))
    programs, steps = dispatch.ceil_div(nodes, _ROWS), dispatch.ceil_div(nodes, block)
    shape = (slots, key_heads, programs * _ROWS, steps * block)
    products = jax.ShapeDtypeStruct(shape, jnp.float32)
    of_rows = pl.BlockSpec((None, None, _ROWS, shape[3]), lambda i, h, b: (b, h, i, 0))
    lower, weight, *_ = pl.pallas_call(
        functools.partial(_pairs_kernel, block=block, interpret=interpret),
        grid=(programs, key_heads, slots),
        in_specs=[
            key_rows,
            key_rows,
            scale,
            scale,
            numbers,
            numbers,
            pl.BlockSpec((None, nodes, width), lambda i, h, b: (b, 0, 0)),
        ],
        out_specs=[of_head, of_head, of_rows, of_rows],
        out_shape=[table, table, products, products],
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="gdn_pairs",
    )(query, key, scales.query, scales.key, log_decay, beta, path)
    return Paths(lower, weight)
