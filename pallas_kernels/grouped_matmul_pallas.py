"""Pallas GPU kernel of `grouped_matmul`: one launch, a program a tile of one group's rows.

How many tiles a group needs is data, so there are as many programs as any sizes could need; those
past the last tile leave at once. With few rows a group the weights are what takes the time: each
is read once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.dispatch import dot, spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut up. Sizes are powers of two."""

    tile_rows: int  # rows of one group, at least 16 for the tensor cores
    tile_columns: int = 64
    block_inner: int = 64
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"`{field.name}` must be a power of two, got {size}")


def default_config(rows: int, groups: int, inner: int, outer: int, itemsize: int) -> Config:
    """A sound choice from shapes alone."""
    tile = 64 if rows > 16 * groups else 16
    block = dispatch.divisor(inner, 256 // itemsize)
    return Config(tile_rows=tile, tile_columns=dispatch.divisor(outer, 64), block_inner=block)


def unsupported(dtype: jnp.dtype, inner: int, outer: int) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, got {jnp.dtype(dtype).name}"
    if inner % 16 or outer % 16:
        return f"both sides of a group's kernel must be multiples of 16, got {inner} x {outer}"
    return None


def _group_kernel(
    group_ref,  # int32 [1]: group of this tile
    first_ref,  # int32 [1]: its first row
    last_ref,  # int32 [1]: row behind its last; `first` for a tile of no rows
    rows_ref,  # [R, I]
    kernels_ref,  # [E, I, O]
    out_ref,  # [R, O], out
    *,
    config: Config,
):
    size, width, step = config.tile_rows, config.tile_columns, config.block_inner
    inner = rows_ref.shape[1]
    group, first, last = group_ref[0], first_ref[0], last_ref[0]
    row = first + jax.lax.iota(jnp.int32, size)
    # Rows past the tile's end are read from its last row and never written.
    safe_row = jnp.minimum(row, jnp.maximum(last - 1, 0))
    column = pl.program_id(1) * width + jax.lax.iota(jnp.int32, width)

    def add(block, acc):
        depth = block * step + jax.lax.iota(jnp.int32, step)
        left = pltriton.load(
            rows_ref.at[spread(safe_row, (size, step), 0), spread(depth, (size, step), 1)]
        )
        own = jax.lax.broadcast_in_dim(group, (step, width), ())
        right = pltriton.load(
            kernels_ref.at[own, spread(depth, (step, width), 0), spread(column, (step, width), 1)]
        )
        return acc + dot(left, right)

    steps = jnp.where(last > first, jnp.int32(inner // step), jnp.int32(0))
    acc = jax.lax.fori_loop(0, steps, add, jnp.zeros((size, width), jnp.float32))
    rows = spread(row, (size, width), 0)
    index = (rows, spread(column, (size, width), 1))
    pltriton.store(out_ref.at[index], acc.astype(out_ref.dtype), mask=rows < last)


def _tiles(sizes: jax.Array, rows: int, tile: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group, first row and end of every tile that any sizes could need."""
    groups = sizes.shape[0]
    needed = (sizes + tile - 1) // tile
    ends, tile_ends = jnp.cumsum(sizes), jnp.cumsum(needed)
    most = rows // tile + min(rows, groups)
    number = jnp.arange(most, dtype=jnp.int32)
    group = jnp.sum((tile_ends[None, :] <= number[:, None]).astype(jnp.int32), axis=1)
    exists = group < groups
    group = jnp.minimum(group, groups - 1)
    first = (ends - sizes)[group] + (number - (tile_ends - needed)[group]) * tile
    last = jnp.minimum(first + tile, ends[group])
    first = jnp.where(exists, first, 0)
    return group, first, jnp.where(exists, last, first)


@dispatch.lowered_once
def grouped_matmul(
    rows: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    *,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """[R, O] as `grouped_matmul.definition` gives it, for the rows of groups."""
    count, inner = rows.shape
    groups, _, outer = kernels.shape
    if config is None:
        config = default_config(count, groups, inner, outer, rows.dtype.itemsize)
    group, first, last = _tiles(sizes, count, config.tile_rows)
    number = pl.BlockSpec((1,), lambda t, o: (t,))
    return pl.pallas_call(
        functools.partial(_group_kernel, config=config),
        grid=(group.shape[0], outer // config.tile_columns),
        in_specs=[
            number,
            number,
            number,
            pl.BlockSpec((count, inner), lambda t, o: (0, 0)),
            pl.BlockSpec((groups, inner, outer), lambda t, o: (0, 0, 0)),
        ],
        out_specs=pl.BlockSpec((count, outer), lambda t, o: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((count, outer), rows.dtype),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(group, first, last, rows, kernels)
