"""Pallas GPU kernel of `gdn_tree`: the WY form (`gdn_wy`), block of nodes by block.

`gdn_pairs_pallas` first finds, once a head, what the nodes of a block are to each other. A program
then takes one head and one tile of value dims, and keeps that tile of the state on chip. Nodes
come after their ancestors, so a block needs the updates of earlier blocks, which the program reads
back from its own output.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.dispatch import spread
from pallas_kernels.gdn_pairs_pallas import (
    LEAF,
    exact_dot,
    gdn_pairs,
    load_numbers,
    load_rows,
    split_dot,
    terms_for,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernels are cut up. Sizes are powers of two."""

    block_rows: int = 64  # nodes that are solved together: 16, 32 or 64
    value_tile: int = 32  # value dims of a program
    num_warps: int = 4
    pair_warps: int = 4  # of the kernel that goes before

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"`{field.name}` must be a power of two, got {size}")
        if min(self.block_rows, self.value_tile) < 16 or self.block_rows > 2 * LEAF:
            raise ValueError(
                f"`block_rows` must be 16 to {2 * LEAF} and `value_tile` at least 16, "
                f"got {self.block_rows} and {self.value_tile}"
            )


def unsupported(dtype: jnp.dtype, key_dim: int, value_dim: int) -> str | None:
    """Why the kernels cannot take these arguments, or None."""
    return dispatch.unsupported_size(dtype, "key dim", key_dim, 256) or dispatch.unsupported_size(
        dtype, "value dim", value_dim, 256
    )


def _tree_kernel(
    query_ref,  # [T, Dk], strided
    key_ref,  # [T, Dk], strided
    value_ref,  # [T, tile], strided
    beta_ref,  # float32 [T], strided
    state_ref,  # float32 [Dk, tile]
    matrix_ref,  # float32 [T', T'], as the next three in `Pairs`
    weight_ref,  # float32 [T', T']
    known_ref,  # float32 [T']
    scale_ref,  # float32 [T']
    out_ref,  # [T, tile], out
    update_ref,  # float32 [T, tile], out
    *,
    size: int,
    interpret: bool,
):
    nodes, tile = value_ref.shape
    blocks = matrix_ref.shape[0] // size
    shape, dtype = (size, tile), key_ref.dtype
    # What only the output needs may be rounded where the output is rounded to bfloat16: to TF32,
    # or to two terms of bfloat16.
    full = out_ref.dtype == jnp.float32
    for_output = jax.lax.Precision.HIGHEST if full else None

    def row_block(block, carry):
        start = block * size
        own = pl.ds(start, size)
        # All loads come first: behind a product their latency would show.
        keys, queries, values = (
            load_rows(ref, start, size, nodes) for ref in (key_ref, query_ref, value_ref)
        )
        if blocks == 1:
            matrix, weight = matrix_ref[...], weight_ref[...]
        known_scale, query_scale = known_ref[own], scale_ref[own]
        beta = load_numbers(beta_ref, start, size)
        state = terms_for(state_ref[...], dtype)
        known = exact_dot(keys, state) * spread(known_scale, shape, 0)
        wanted = spread(beta, shape, 0) * values.astype(jnp.float32) - known
        acc = exact_dot(queries, state[: 1 if full else 2]) * spread(query_scale, shape, 0)

        def earlier(step, sums):
            wanted, acc = sums
            columns = pl.ds(step * size, size)
            lower, weight = matrix_ref[own, columns], weight_ref[own, columns]
            update = load_rows(update_ref, step * size, size, nodes)
            wanted = wanted - split_dot(terms_for(lower, dtype), terms_for(update, dtype))
            return wanted, acc + pltriton.dot(weight, update, precision=for_output)

        if blocks > 1:
            wanted, acc = jax.lax.fori_loop(jnp.int32(0), block, earlier, (wanted, acc))
            matrix, weight = matrix_ref[own, own], weight_ref[own, own]
        update = _solve(matrix, wanted, dtype)
        weight = jnp.where(_leaf_order(size) >= 0, weight, 0.0)
        acc = acc + pltriton.dot(weight, update, precision=for_output)
        row = start + jax.lax.iota(jnp.int32, size)
        index = (spread(row, shape, 0), spread(jax.lax.iota(jnp.int32, tile), shape, 1))
        pltriton.store(update_ref.at[index], update, mask=index[0] < nodes)
        pltriton.store(out_ref.at[index], acc.astype(out_ref.dtype), mask=index[0] < nodes)
        if blocks > 1 and not interpret:
            pltriton.debug_barrier()  # later blocks read these updates
        return carry

    jax.lax.fori_loop(0, blocks, row_block, jnp.int32(0))


def _leaf_order(size: int) -> jax.Array:
    """By how many leaves a node's comes after another's, for nodes of a block."""
    leaf = [jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) // LEAF for axis in (0, 1)]
    return leaf[0] - leaf[1]


def _solve(matrix: jax.Array, wanted: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Updates of a block of one or two leaves from `Pairs.matrix` and the right-hand side.

    Each leaf is solved on its own; what the first one's updates change in the second's is then
    taken off. Leaves above the diagonal may hold anything.
    """
    size = matrix.shape[0]
    if size <= LEAF:
        return split_dot(terms_for(matrix, dtype), terms_for(wanted, dtype))
    order = _leaf_order(size)
    inverse = terms_for(jnp.where(order == 0, matrix, 0.0), dtype)
    lower = terms_for(jnp.where(order > 0, matrix, 0.0), dtype)
    update = split_dot(inverse, terms_for(wanted, dtype))
    changed = split_dot(lower, terms_for(update, dtype))
    return update - split_dot(inverse, terms_for(changed, dtype))


def default_config(slots: int, nodes: int, heads: int, value_dim: int) -> Config:
    """Measured on an H200 (scripts/results/kernel_log.md): wide tiles once narrow ones queue."""
    rows = min(64, dispatch.lanes_for(nodes))
    tile = 64 if nodes > LEAF and slots * heads > 96 else 32
    return Config(block_rows=rows, value_tile=dispatch.divisor(value_dim, tile))


@dispatch.lowered_once
def gdn_tree(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    visible: jax.Array,
    *,
    interpret: bool,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Out and update, each [B, T, Hv, Dv], as `gdn_tree.definition` gives them."""
    slots, nodes, heads, value_dim = value.shape
    config = default_config(slots, nodes, heads, value_dim) if config is None else config
    padded = dispatch.ceil_div(nodes, config.block_rows) * config.block_rows
    found = gdn_pairs(
        query,
        key,
        log_decay,
        beta,
        visible,
        padded=padded,
        num_warps=config.pair_warps,
        interpret=interpret,
    )
    key_heads, key_dim = key.shape[2:]
    group, tile = heads // key_heads, config.value_tile
    key_rows = pl.BlockSpec((None, nodes, None, key_dim), lambda i, h, b: (b, 0, h // group, 0))
    value_rows = pl.BlockSpec((None, nodes, None, tile), lambda i, h, b: (b, 0, h, i))

    def of_head(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, *x.shape[2:]), lambda i, h, b: (b, h) + (0,) * (x.ndim - 2)
        )

    out, update = pl.pallas_call(
        functools.partial(_tree_kernel, size=config.block_rows, interpret=interpret),
        grid=(value_dim // tile, heads, slots),
        in_specs=[
            key_rows,
            key_rows,
            value_rows,
            pl.BlockSpec((None, nodes, None), lambda i, h, b: (b, 0, h)),
            pl.BlockSpec((None, None, key_dim, tile), lambda i, h, b: (b, h, 0, i)),
            *(of_head(x) for x in found),
        ],
        out_specs=[value_rows, value_rows],
        out_shape=[
            jax.ShapeDtypeStruct(value.shape, value.dtype),
            jax.ShapeDtypeStruct(value.shape, jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_tree",
    )(query, key, value, beta, state, *found)
    return out, update
