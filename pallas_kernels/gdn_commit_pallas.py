"""Pallas GPU kernel of `gdn_commit`: one launch a layer, the state read and written once.

A program takes one value head and one tile of value dims, gathers the path's keys and updates,
and adds their one product to its tile of the state, in place.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, gdn_wy
from pallas_kernels.dispatch import spread
from pallas_kernels.gdn_exact import exact_dot, terms_for
from pallas_kernels.gdn_paths_pallas import gather_rows


def _commit_kernel(
    state_ref,  # float32 [Dk, tile]
    key_ref,  # [T, Dk], strided
    update_ref,  # float32 [T, tile], strided
    decay_ref,  # float32 [T], strided: log-decays
    path_ref,  # int32 [R]
    count_ref,  # int32 [1]
    out_ref,  # float32 [Dk, tile], out; the same buffer as state_ref
    *,
    lanes: int,
):
    key_dim, tile = state_ref.shape
    width = path_ref.shape[0]
    lane = jax.lax.iota(jnp.int32, lanes)
    state = state_ref[...]  # first: it takes longest, and nothing else waits for it
    node = pltriton.load(path_ref.at[lane], mask=lane < width, other=0)
    real = lane < jnp.minimum(count_ref[0], width)
    node = jnp.where(real, node, 0)
    decay = pltriton.load(decay_ref.at[node], mask=real, other=0.0)
    decay = jnp.maximum(decay, gdn_wy.LEAST_LOG_DECAY)

    # Decay between a node and the end of the path: a sum of what lies below it, no difference.
    square = (lanes, lanes)
    below = spread(lane, square, 1) > spread(lane, square, 0)
    remaining = jnp.sum(jnp.where(below, spread(decay, square, 1), 0.0), axis=1)
    keys = gather_rows(key_ref, node, real)
    scale = gdn_wy.inverse_norm(keys) * jnp.exp(remaining)
    update = gather_rows(update_ref, node, real) * spread(scale, (lanes, tile), 0)
    added = exact_dot(keys, terms_for(update, keys.dtype), trans_a=True)
    out_ref[...] = jnp.exp(jnp.sum(decay)) * state + added


@dispatch.lowered_once
def gdn_commit(
    state: jax.Array,
    key: jax.Array,
    update: jax.Array,
    log_decay: jax.Array,
    path: jax.Array,
    count: jax.Array,
    *,
    interpret: bool,
) -> jax.Array:
    """[B, Hv, Dk, Dv] as `gdn_wy.commit` gives it."""
    slots, heads, key_dim, value_dim = state.shape
    nodes, group = key.shape[1], heads // key.shape[2]
    width, tile = path.shape[1], min(32, value_dim)
    state_tile = pl.BlockSpec((None, None, key_dim, tile), lambda i, h, b: (b, h, 0, i))
    return pl.pallas_call(
        functools.partial(_commit_kernel, lanes=dispatch.lanes_for(width)),
        grid=(value_dim // tile, heads, slots),
        in_specs=[
            state_tile,
            pl.BlockSpec((None, nodes, None, key_dim), lambda i, h, b: (b, 0, h // group, 0)),
            pl.BlockSpec((None, nodes, None, tile), lambda i, h, b: (b, 0, h, i)),
            pl.BlockSpec((None, nodes, None), lambda i, h, b: (b, 0, h)),
            pl.BlockSpec((None, width), lambda i, h, b: (b, 0)),
            pl.BlockSpec((1,), lambda i, h, b: (b,)),
        ],
        out_specs=state_tile,
        out_shape=jax.ShapeDtypeStruct(state.shape, jnp.float32),
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gdn_commit",
    )(state, key, update, log_decay, path, count)
