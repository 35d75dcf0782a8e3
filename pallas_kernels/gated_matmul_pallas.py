"""Pallas GPU kernel of `gated_matmul`: a program reads the same columns of gate and of up."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.skinny_matmul_pallas import (
    MULTIPROCESSORS,
    PROGRAMS,
    Config,
    load_rows,
    row_tile,
    store_rows,
)


def default_config(inner: int, columns: int, dtype: jnp.dtype) -> Config:
    """`columns` are those of gate alone, so a program reads twice as many. Measured on an H200 at
    the MLPs of Qwen3-8B and Qwen3.6-27B (scripts/results/kernel_log.md)."""
    block = dispatch.divisor(inner, 64)
    if dtype != jnp.bfloat16:
        return Config(columns=dispatch.divisor(columns, 16), block=block)
    wide = dispatch.divisor(columns, 128)
    if wide == 128 and PROGRAMS <= columns // wide <= MULTIPROCESSORS:
        return Config(columns=wide, block=block, num_warps=8)
    while wide > 16 and columns // wide < PROGRAMS:
        wide //= 2
    # Three stages: several programs share a multiprocessor, so all are there from the start.
    return Config(columns=min(wide, 64), block=block, num_stages=3)


def _gated_kernel(
    x_ref,  # [rows, I]
    gate_ref,  # [I, columns]
    up_ref,  # [I, columns]
    out_ref,  # [rows, F], out
    *,
    tile_rows: int,
    config: Config,
):
    inner, columns = gate_ref.shape
    tile = pl.program_id(0)

    def step(index, state):
        gate, up = state
        at = pl.ds(index * config.block, config.block)
        column = index * config.block + jax.lax.iota(jnp.int32, config.block)
        rows = load_rows(x_ref, tile, tile_rows, column)
        return gate + dispatch.dot(rows, gate_ref[at, :]), up + dispatch.dot(rows, up_ref[at, :])

    zero = jnp.zeros((tile_rows, columns), jnp.float32)
    gate, up = jax.lax.fori_loop(0, inner // config.block, step, (zero, zero))
    mixed = dispatch.silu(gate) * up
    store_rows(out_ref, tile, pl.program_id(1) * columns, mixed)


@dispatch.lowered_once
def gated_matmul(
    x: jax.Array, gate_up: jax.Array, *, interpret: bool, config: Config | None = None
) -> jax.Array:
    """[B, R, F] as `gated_matmul.definition` gives it, without its roundings in between."""
    inner, columns = gate_up.shape[0], gate_up.shape[1] // 2
    rows = x.shape[0] * x.shape[1]
    config = default_config(inner, columns, x.dtype) if config is None else config
    tile_rows, tiles = row_tile(rows), columns // config.columns
    out = pl.pallas_call(
        functools.partial(_gated_kernel, tile_rows=tile_rows, config=config),
        grid=(dispatch.ceil_div(rows, tile_rows), tiles),
        in_specs=[
            pl.BlockSpec((rows, inner), lambda i, j: (0, 0)),
            pl.BlockSpec((inner, config.columns), lambda i, j: (0, j)),
            pl.BlockSpec((inner, config.columns), lambda i, j: (0, tiles + j)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="gated_matmul",
    )(x.reshape(rows, inner), gate_up, gate_up)
    return out.reshape(*x.shape[:2], columns)
