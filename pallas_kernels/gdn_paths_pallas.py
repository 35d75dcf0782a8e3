"""What the nodes of a tree are to each other along its paths, once a head: a Pallas GPU kernel.

A node meets nobody but its ancestors, at most as many as the tree is deep. So all that `gdn_tree`
needs to know of two nodes fits a table of a line a node and an entry an ancestor, by depth. None of
it depends on the state, so tiles of value dims share it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, gdn_wy
from pallas_kernels.dispatch import spread


class Paths(NamedTuple):
    """Of T nodes and A places of a path, by depth. Entries past a node's own depth are 0.

    lower: L of `gdn_wy`, by which a node's update depends on its ancestors';
    weight: D o Q K^T, with which its output reads the updates of its path, its own among them.
    """

    lower: jax.Array  # float32 [B, Hv, T, A]
    weight: jax.Array  # float32 [B, Hv, T, A]


def inverse_norm(rows: jax.Array) -> jax.Array:
    """1 / norm of each row, as `gdn_wy.normalise` has it."""
    wide = rows.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) + gdn_wy.EPS)


def gather_rows(ref, index: jax.Array, mask: jax.Array) -> jax.Array:
    """Whole rows of ref; 0 where masked."""
    shape = (index.shape[0], ref.shape[1])
    column = spread(jax.lax.iota(jnp.int32, shape[1]), shape, 1)
    index = (spread(jnp.where(mask, index, 0), shape, 0), column)
    return pltriton.load(ref.at[index], mask=spread(mask, shape, 0), other=0.0)


def _pairs_kernel(
    query_ref,  # [T, Dk], strided, as the next
    key_ref,  # [T, Dk]
    decay_ref,  # float32 [T, G], strided: log-decays
    beta_ref,  # float32 [T, G], strided
    path_ref,  # int32 [T, R]
    lower_ref,  # float32 [G, A], out: L
    weight_ref,  # float32 [G, A], out: D o Q K^T
):
    (heads, places), key_dim = lower_ref.shape, key_ref.shape[1]
    width, node = path_ref.shape[1], pl.program_id(0)
    place = jax.lax.iota(jnp.int32, places)
    ancestor = pltriton.load(path_ref.at[node, place], mask=place < width, other=-1)
    on_path = ancestor >= 0
    # Its own rows once an ancestor: a row of its own would change its layout on the way.
    own, everywhere = jnp.full((places,), node), jnp.full((places,), True)
    given = (key_ref, ancestor, on_path), (key_ref, own, everywhere), (query_ref, own, everywhere)
    keys, own_key, query = (gather_rows(*rows).astype(jnp.float32) for rows in given)
    square = (places, places)
    above = jax.lax.broadcasted_iota(jnp.int32, square, 0)
    below = jax.lax.broadcasted_iota(jnp.int32, square, 1)
    inside = (below > above) & (below < width)
    between = pltriton.load(path_ref.at[jnp.full(square, node), below], mask=inside, other=-1)
    decays = []
    for head in range(heads):
        index = jnp.maximum(between, 0), jnp.full(square, head, jnp.int32)
        decay = pltriton.load(decay_ref.at[index], mask=between >= 0, other=0.0)
        # Sums of what lies below an ancestor, so that nothing is subtracted.
        decay = jnp.sum(jnp.maximum(decay, gdn_wy.LEAST_LOG_DECAY), axis=1)
        decays.append(jnp.exp(decay))
    norm = inverse_norm(keys)
    of_key = jnp.sum(keys * own_key, axis=1) * norm * inverse_norm(own_key)
    of_query = jnp.sum(keys * query, axis=1) * norm * inverse_norm(query) * key_dim**-0.5
    for head, decay in enumerate(decays):
        before = on_path & (ancestor != node)
        lower_ref[head, :] = jnp.where(before, beta_ref[node, head] * decay * of_key, 0.0)
        weight_ref[head, :] = jnp.where(on_path, decay * of_query, 0.0)


def gdn_paths(
    query: jax.Array,
    key: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    path: jax.Array,
    *,
    interpret: bool,
) -> Paths:
    """`Paths` of every head."""
    slots, nodes, key_heads, key_dim = key.shape
    heads, width = beta.shape[2], path.shape[2]
    group, places = heads // key_heads, dispatch.lanes_for(width)
    key_rows = pl.BlockSpec((None, nodes, None, key_dim), lambda i, h, b: (b, 0, h, 0))
    numbers = pl.BlockSpec((None, nodes, group), lambda i, h, b: (b, 0, h))
    table = jax.ShapeDtypeStruct((slots, heads, nodes, places), jnp.float32)
    of_node = pl.BlockSpec((None, group, None, places), lambda i, h, b: (b, h, i, 0))
    lower, weight = pl.pallas_call(
        _pairs_kernel,
        grid=(nodes, key_heads, slots),
        in_specs=[
            key_rows,
            key_rows,
            numbers,
            numbers,
            pl.BlockSpec((None, nodes, width), lambda i, h, b: (b, 0, 0)),
        ],
        out_specs=[of_node, of_node],
        out_shape=[table, table],
        compiler_params=pltriton.CompilerParams(num_warps=places // 16, num_stages=1),
        interpret=interpret,
        name="gdn_pairs",
    )(query, key, log_decay, beta, path)
    return Paths(lower, weight)
