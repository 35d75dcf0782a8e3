"""Pallas GPU kernel of `tree_accept`: one launch, one program a slot, the walk in registers."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch

_MAX_LANES = 65536


def unsupported(nodes: int, max_depth: int) -> str | None:
    """Why the kernel cannot take this shape, or None."""
    if max(nodes, max_depth + 1) > _MAX_LANES:
        return f"it holds at most {_MAX_LANES} nodes a slot, got T={nodes}, max_depth={max_depth}"
    return None


def _accept_kernel(
    token_ref,  # int32 [T]
    parent_ref,  # int32 [T]
    valid_ref,  # bool [T]
    wanted_ref,  # int32 [T]
    path_ref,  # int32 [max_depth + 1], out
    count_ref,  # int32 [1], out
    bonus_ref,  # int32 [1], out
    *,
    nodes: int,
    max_depth: int,
):
    node = jax.lax.iota(jnp.int32, dispatch.lanes_for(nodes))
    step = jax.lax.iota(jnp.int32, dispatch.lanes_for(max_depth + 1))
    inside = node < nodes
    token = pltriton.load(token_ref.at[node], mask=inside, other=0)
    # Lanes behind T and padding get a parent that no walk ever stands on.
    parent = pltriton.load(parent_ref.at[node], mask=inside, other=-1)
    valid = pltriton.load(valid_ref.at[node], mask=inside, other=False)
    parent = jnp.where(valid, parent, -1)

    def wanted_child(current):
        match = (parent == current) & (token == wanted_ref[current])
        return jnp.min(jnp.where(match, node, nodes))

    def may_step(state):
        _, child, count, _ = state
        return (child < nodes) & (count <= max_depth)

    def take_step(state):
        _, child, count, path = state
        return child, wanted_child(child), count + 1, jnp.where(step == count, child, path)

    root = jnp.int32(0)
    start = (root, wanted_child(root), jnp.int32(1), jnp.where(step == 0, 0, -1))
    last, _, count, path = jax.lax.while_loop(may_step, take_step, start)
    # The indices of lanes behind the path must stay out of range: clamped ones would overwrite
    # its last entry in interpret mode.
    pltriton.store(path_ref.at[step], path, mask=step <= max_depth)
    count_ref[0] = count
    bonus_ref[0] = wanted_ref[last]


@dispatch.lowered_once
def tree_accept(
    token: jax.Array,
    parent: jax.Array,
    valid: jax.Array,
    wanted: jax.Array,
    *,
    max_depth: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Path [B, max_depth + 1], count [B] and bonus [B] as `tree_accept.definition` gives them."""
    slots, nodes = token.shape
    per_slot = pl.BlockSpec((None, nodes), lambda b: (b, 0))
    scalar = pl.BlockSpec((1,), lambda b: (b,))
    return pl.pallas_call(
        functools.partial(_accept_kernel, nodes=nodes, max_depth=max_depth),
        grid=(slots,),
        in_specs=[per_slot] * 4,
        out_specs=[pl.BlockSpec((None, max_depth + 1), lambda b: (b, 0)), scalar, scalar],
        out_shape=[
            jax.ShapeDtypeStruct((slots, max_depth + 1), jnp.int32),
            jax.ShapeDtypeStruct((slots,), jnp.int32),
            jax.ShapeDtypeStruct((slots,), jnp.int32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=1 if nodes <= 256 else 4, num_stages=1),
        interpret=interpret,
        name="tree_accept",
    )(token, parent, valid, wanted)
