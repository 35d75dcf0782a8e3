"""Pallas GPU kernel of `routed_gate_up` for one row: every program chooses for itself.

A program needs the expert of its own place only, so the likeliest one's weights are on their way
while the others are still being chosen; a choice in a launch of its own would keep all waiting.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import choose_experts_pallas, dispatch, grouped_matmul_pallas
from pallas_kernels.choose_experts_pallas import choose_kernel, likeliest, logits_of
from pallas_kernels.dispatch import whole
from pallas_kernels.grouped_matmul_pallas import Config, gate_up_tile


def unsupported(dtype: jnp.dtype, experts: int, inner: int, outer: int) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    return choose_experts_pallas.unsupported(dtype, experts) or grouped_matmul_pallas.unsupported(
        dtype, inner, outer
    )


def _kernel(
    parts_ref,  # [P, 1, E]
    x_ref,  # [1, D]
    gate_ref,  # [D]
    kernels_ref,  # [G, D, 2 F]
    out_ref,  # [K, F], out
    index_ref,  # int32 [1, K], out
    weight_ref,  # float32 [1, K], out
    *,
    count: int,
    normalise: bool,
    config: Config,
):
    experts, chosen = parts_ref.shape[2], out_ref.shape[0]
    tile, turn = pl.program_id(0), pl.program_id(1)

    # A program of its own: only the next kernel reads the choice, and no product waits for it.
    @pl.when((turn == 0) & (tile == 0))
    def _():
        options = {"count": count, "normalise": normalise}
        choose_kernel(parts_ref, x_ref, gate_ref, weight_ref, index_ref, **options)

    @pl.when(turn > 0)
    def _():
        place = turn - 1
        lane = jax.lax.iota(jnp.int32, dispatch.lanes_for(experts))
        _, bits = logits_of(parts_ref, lane)
        shared = place == count
        _, expert = likeliest(bits, lane, jnp.where(shared, 0, place + 1), chosen)
        expert = jnp.where(shared, experts, expert)
        row = jnp.zeros((config.tile_rows,), jnp.int32)
        entry, alone = row + place, jax.lax.iota(jnp.int32, config.tile_rows) < 1
        first = tile * config.tile_columns
        gate_up_tile(x_ref, kernels_ref, out_ref, row, expert, entry, alone, first, config)


@dispatch.lowered_once
def routed_gate_up(
    parts: jax.Array,
    x: jax.Array,
    shared_gate: jax.Array | None,
    kernels: jax.Array,
    *,
    count: int,
    normalise: bool,
    interpret: bool,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[1, K, F], ids and weights [1, K], of parts [P, 1, 1, E] and x [1, 1, D]."""
    part_count, size, experts = parts.shape[0], x.shape[2], len(kernels)
    half = kernels.shape[2] // 2
    chosen = count if shared_gate is None else count + 1
    if config is None:
        config = grouped_matmul_pallas.default_config(
            chosen, experts, size, half, x.dtype.itemsize, halves=2
        )
    out, index, weight = pl.pallas_call(
        functools.partial(_kernel, count=count, normalise=normalise, config=config),
        grid=(half // config.tile_columns, 1 + chosen),
        in_specs=[
            whole(part_count, 1, parts.shape[3]),
            whole(1, size),
            whole(size),
            whole(*kernels.shape),
        ],
        out_specs=[whole(chosen, half), whole(1, chosen), whole(1, chosen)],
        out_shape=[
            jax.ShapeDtypeStruct((chosen, half), x.dtype),
            jax.ShapeDtypeStruct((1, chosen), jnp.int32),
            jax.ShapeDtypeStruct((1, chosen), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="routed_gate_up",
    )(
        parts.reshape(part_count, 1, -1),
        x.reshape(1, size),
        # Without a shared expert nothing reads a gate, and any array stands in for it.
        x.reshape(-1) if shared_gate is None else shared_gate,
        kernels,
    )
    return out.reshape(1, chosen, half), index, weight
