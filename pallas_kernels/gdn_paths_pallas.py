"""What the nodes of a tree are to each other along its paths, once a head: two Pallas GPU kernels.

A node meets nobody but its ancestors, at most as many as the tree is deep. So all that `gdn_tree`
needs to know of two nodes fits a table of a line a node and an entry an ancestor, by depth. A line
of the inverse of I + L (`gdn_wy`) lies on the node's path as L does, and is found by going up it.
None of it depends on the state, so tiles of value dims share it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, gdn_wy
from pallas_kernels.dispatch import spread

_STEPS = 4  # of a way up a path whose loads go together


class Paths(NamedTuple):
    """Of T nodes and A places of a path, by depth. Entries past a node's own depth are 0.

    update_weight: of the right-hand sides of I + L, of which a node's update is the sum;
    out_weight: the same of what its output adds to the prefix's part.
    """

    update_weight: jax.Array  # float32 [B, Hv, T, A]
    out_weight: jax.Array  # float32 [B, Hv, T, A]


def inverse_norm(rows: jax.Array) -> jax.Array:
    """1 / norm of each row, as `gdn_wy.normalise` has it."""
    wide = rows.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) + gdn_wy.EPS)


def _inverse_norm_of(row: jax.Array) -> jax.Array:
    return jax.lax.rsqrt(jnp.sum(row * row) + gdn_wy.EPS)


def gather_rows(ref, index: jax.Array, mask: jax.Array) -> jax.Array:
    """Whole rows of ref, float32; 0 where masked."""
    shape = (index.shape[0], ref.shape[1])
    column = spread(jax.lax.iota(jnp.int32, shape[1]), shape, 1)
    index = (spread(jnp.where(mask, index, 0), shape, 0), column)
    rows = pltriton.load(ref.at[index], mask=spread(mask, shape, 0), other=0.0)
    return rows.astype(jnp.float32)


def _pairs_kernel(
    query_ref,  # [Dk], as the next of one node
    own_ref,  # [Dk]
    key_ref,  # [T, Dk], strided
    decay_ref,  # float32 [T, G], strided: log-decays
    beta_ref,  # float32 [T, G], strided
    path_ref,  # int32 [R]
    lower_ref,  # float32 [G, A], out: L
    weight_ref,  # float32 [G, A], out: D o Q K^T
):
    (heads, places), key_dim = lower_ref.shape, key_ref.shape[1]
    node, place = pl.program_id(0), jax.lax.iota(jnp.int32, places)
    ancestor = pltriton.load(path_ref.at[place], mask=place < path_ref.shape[0], other=-1)
    on_path = ancestor >= 0
    keys = gather_rows(key_ref, ancestor, on_path)
    own_key, query = own_ref[...].astype(jnp.float32), query_ref[...].astype(jnp.float32)
    decays = []
    for head in range(heads):
        index = jnp.where(on_path, ancestor, 0), jnp.full((places,), head, jnp.int32)
        decay = pltriton.load(decay_ref.at[index], mask=on_path, other=0.0)
        decays.append(jnp.maximum(decay, gdn_wy.LEAST_LOG_DECAY))
    norm, own_norm = inverse_norm(keys), _inverse_norm_of(own_key)
    query_scale = _inverse_norm_of(query) * key_dim**-0.5

    def meet(row, scale):
        return jnp.sum(keys * spread(row, keys.shape, 1), axis=1) * norm * scale

    of_key, of_query = meet(own_key, own_norm), meet(query, query_scale)
    square = (places, places)
    below = spread(place, square, 1) > spread(place, square, 0)
    for head, decay in enumerate(decays):
        # Sums of what lies below an ancestor, so that nothing is subtracted.
        between = jnp.sum(jnp.where(below, spread(decay, square, 1), 0.0), axis=1)
        between, before = jnp.exp(between), on_path & (ancestor != node)
        lower_ref[head, :] = jnp.where(before, beta_ref[node, head] * between * of_key, 0.0)
        weight_ref[head, :] = jnp.where(on_path, between * of_query, 0.0)


def _solve_kernel(
    lower_ref,  # float32 [T, A]
    weight_ref,  # float32 [T, A]
    path_ref,  # int32 [T, R]
    update_ref,  # float32 [T, A], out
    out_ref,  # float32 [T, A], out
    *,
    rows: int,
):
    """x (I + L) = e and y (I + L) = w along each node's path, from the node up to the root."""
    (nodes, places), width = lower_ref.shape, path_ref.shape[1]
    node, shape = pl.program_id(0) * rows + jax.lax.iota(jnp.int32, rows), (rows, places)
    row, column = spread(node, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    real = row < nodes
    path = pltriton.load(path_ref.at[row, column], mask=real & (column < width), other=-1)
    update = jnp.where(real & (path == row), 1.0, 0.0)
    out = pltriton.load(weight_ref.at[row, column], mask=real, other=0.0)
    deepest = jnp.max(jnp.max(jnp.where(path >= 0, column, 0), axis=1))

    def up(step, weights):
        first = (deepest // _STEPS - step) * _STEPS
        lower = []
        for place in range(_STEPS):
            at = jnp.full((rows,), first + place, jnp.int32)
            ancestor = pltriton.load(
                path_ref.at[node, at], mask=(node < nodes) & (at < width), other=-1
            )
            lower.append(gather_rows(lower_ref, ancestor, ancestor >= 0))
        for place in reversed(range(_STEPS)):
            # Of this place, the last to be known; L of an ancestor has entries above it alone.
            own = column == first + place
            taken = (jnp.sum(jnp.where(own, x, 0.0), axis=1) for x in weights)
            weights = tuple(
                x - spread(known, shape, 0) * lower[place]
                for x, known in zip(weights, taken, strict=True)
            )
        return weights

    steps = deepest // _STEPS + 1
    update, out = jax.lax.fori_loop(jnp.int32(0), steps, up, (update, out))
    pltriton.store(update_ref.at[row, column], update, mask=real)
    pltriton.store(out_ref.at[row, column], out, mask=real)


def gdn_paths(
    query: jax.Array,
    key: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    path: jax.Array,
    *,
    solve_rows: int,
    interpret: bool,
) -> Paths:
    """`Paths` of every head. solve_rows: nodes a program solves."""
    slots, nodes, key_heads, key_dim = key.shape
    heads, width = beta.shape[2], path.shape[2]
    group, places = heads // key_heads, dispatch.lanes_for(width)
    own = pl.BlockSpec((None, None, None, key_dim), lambda i, h, b: (b, i, h, 0))
    key_rows = pl.BlockSpec((None, nodes, None, key_dim), lambda i, h, b: (b, 0, h, 0))
    numbers = pl.BlockSpec((None, nodes, group), lambda i, h, b: (b, 0, h))
    table = jax.ShapeDtypeStruct((slots, heads, nodes, places), jnp.float32)
    of_node = pl.BlockSpec((None, group, None, places), lambda i, h, b: (b, h, i, 0))
    lower, weight = pl.pallas_call(
        _pairs_kernel,
        grid=(nodes, key_heads, slots),
        in_specs=[
            own,
            own,
            key_rows,
            numbers,
            numbers,
            pl.BlockSpec((None, None, width), lambda i, h, b: (b, i, 0)),
        ],
        out_specs=[of_node, of_node],
        out_shape=[table, table],
        compiler_params=pltriton.CompilerParams(num_warps=places // 16, num_stages=1),
        interpret=interpret,
        name="gdn_pairs",
    )(query, key, key, log_decay, beta, path)
    of_head = pl.BlockSpec((None, None, nodes, places), lambda i, h, b: (b, h, 0, 0))
    rows = min(solve_rows, dispatch.lanes_for(nodes))
    update_weight, out_weight = pl.pallas_call(
        functools.partial(_solve_kernel, rows=rows),
        grid=(dispatch.ceil_div(nodes, rows), heads, slots),
        in_specs=[
            of_head,
            of_head,
            pl.BlockSpec((None, nodes, width), lambda i, h, b: (b, 0, 0)),
        ],
        out_specs=[of_head, of_head],
        out_shape=[table, table],
        input_output_aliases={1: 1},
        compiler_params=pltriton.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="gdn_solve",
    )(lower, weight, path)
    return Paths(update_weight, out_weight)
