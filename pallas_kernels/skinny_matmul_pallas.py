"""Pallas GPU kernel of `skinny_matmul`: split along the inner axis, float32 sums.

A program takes all rows (up to 128), some columns and one share of the inner axis. Rows are
padded to a power of two of at least 16 in registers, never in memory.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels import dispatch

_MOST_TILE_ROWS = 128
PROGRAMS = 96  # enough to draw the whole memory rate, few enough to keep the parts small
MULTIPROCESSORS = 132  # of an H100 or H200: one program more and its time comes twice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut up; sizes divide the matrix, but for `columns`."""

    columns: int  # of the matrix, a program; the last one may have fewer
    block: int  # of the inner axis, a step of the loop
    splits: int = 1  # shares of the inner axis
    num_warps: int = 4
    num_stages: int = 4


def unsupported(dtype: jnp.dtype, *sides: int) -> str | None:
    """Why a kernel cannot take these arguments, or None. sides: those that it does not mask."""
    if unfit := dispatch.unsupported_dtype(dtype):
        return unfit
    if any(side % 16 for side in sides):
        return f"sides of the matrix must be a multiple of 16, got {' by '.join(map(str, sides))}"
    return None


def unsupported_groups(dtype: jnp.dtype, size: int) -> str | None:
    """Why the kernel cannot norm groups of this size, or None. Shares hold whole groups."""
    return dispatch.unsupported_size(dtype, "size of a group", size, 128)


def one_wave(inner: int, columns: int, dtype: jnp.dtype) -> bool:
    """Whether every program of one tile of rows has a multiprocessor of its own."""
    config = default_config(inner, columns, dtype, rows=_MOST_TILE_ROWS)
    return dispatch.ceil_div(columns, config.columns) * config.splits <= MULTIPROCESSORS


def default_config(inner: int, columns: int, dtype: jnp.dtype, rows: int) -> Config:
    """Measured on an H200 (scripts/results/kernel_log.md) for the products of Qwen3-8B, Qwen3.6-27B
    and 35B-A3B."""
    most = 128 if dtype == jnp.bfloat16 else 32
    wide = dispatch.divisor(columns, most)
    if wide < 16 or columns > 8 * most:
        # Part of one program of many idles, where narrow ones would all read in short rows.
        wide = min(most, dispatch.lanes_for(columns))
    splits = _splits(inner, dispatch.ceil_div(columns, wide))
    few = rows <= 16
    while few and wide > 32 and dispatch.ceil_div(columns, wide) * splits < PROGRAMS:
        wide //= 2
    programs, share = dispatch.ceil_div(columns, wide) * splits, inner // splits
    if dtype == jnp.bfloat16 and programs <= MULTIPROCESSORS and share % 128 == 0:
        # In one wave each program must keep many bytes on their way.
        if few:
            return Config(columns=wide, block=128, splits=splits)
        if splits > 1 and wide == 128:
            return Config(columns=wide, block=128, splits=splits, num_warps=8, num_stages=3)
    return Config(columns=wide, block=dispatch.divisor(share, 64), splits=splits)


def _splits(inner: int, tiles: int) -> int:
    """Shares of the inner axis: the least power of two that gives enough programs, or three where
    those would be a little more than one wave."""
    splits = 1
    while tiles * splits < PROGRAMS and inner % (splits * 2 * 128) == 0:
        splits *= 2
    if tiles * splits > MULTIPROCESSORS and splits == 4 and inner % (3 * 128) == 0:
        return 3
    return splits


def row_tile(rows: int) -> int:
    """Rows a program: a power of two that the tensor cores take."""
    return min(_MOST_TILE_ROWS, dispatch.lanes_for(rows))


def load_rows(x_ref, tile: jax.Array, size: int, column: jax.Array) -> jax.Array:
    """[size, len(column)] of x_ref [rows, I]; rows past the end are 0."""
    rows, shape = x_ref.shape[0], (size, column.shape[0])
    row = dispatch.spread(tile * size + jax.lax.iota(jnp.int32, size), shape, 0)
    column = dispatch.spread(column, shape, 1)
    if rows % size == 0:
        return pltriton.load(x_ref.at[row, column])
    # Masked rows must stay in range all the same: interpret mode clamps, a GPU does not.
    return pltriton.load(x_ref.at[row, column], mask=row < rows, other=0.0)


def load_sum(parts_ref, *index: jax.Array | int, mask: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Entries of a product in parts [P, ...], rounded to dtype as the product itself would be; for
    the kernels that read what `skinny_matmul` leaves."""
    total = None
    for part in range(parts_ref.shape[0]):
        entries = pltriton.load(parts_ref.at[part, *index], mask=mask, other=0.0)
        entries = entries.astype(jnp.float32)
        total = entries if total is None else total + entries
    return total.astype(dtype)


def _matmul_kernel(
    x_ref,  # [rows, I]
    kernel_ref,  # [I / splits, columns]
    *refs,  # float32 [rows, G, Q] squares if the groups are normed; [rows, O], out
    tile_rows: int,
    config: Config,
    eps: float | None,
):
    *squares, out_ref = refs
    share, columns = kernel_ref.shape
    tile, part = pl.program_id(0), pl.program_id(2)
    first_column = pl.program_id(1) * columns
    if squares:
        scale_of = _group_scales(squares[0], x_ref.shape[1], tile, part, tile_rows, share, eps)

    def weights_of(index):
        weights = kernel_ref.at[pl.ds(index * config.block, config.block), :]
        if out_ref.shape[1] % columns == 0:
            return weights[...]
        column = dispatch.spread(jax.lax.iota(jnp.int32, columns), (config.block, columns), 1)
        return pltriton.load(weights, mask=first_column + column < out_ref.shape[1], other=0.0)

    def step(index, acc):
        inner = index * config.block + jax.lax.iota(jnp.int32, config.block)
        rows = load_rows(x_ref, tile, tile_rows, part * share + inner)
        product = dispatch.dot(rows, weights_of(index))
        if squares:
            product = product * dispatch.spread(scale_of(index * config.block), product.shape, 0)
        return acc + product

    acc = jnp.zeros((tile_rows, columns), jnp.float32)
    acc = jax.lax.fori_loop(0, share // config.block, step, acc)
    store_rows(out_ref, tile, first_column, acc)


def _group_scales(
    squares_ref,  # float32 [rows, G, Q]
    inner: int,
    tile: jax.Array,
    part: jax.Array,
    tile_rows: int,
    share: int,
    eps: float,
) -> Callable[[jax.Array], jax.Array]:
    """1 / rms of each group in a share: a function, place in the share -> its group's [tile_rows].

    Squares are loaded at once and added up in the loop: else it would wait for them to begin.
    """
    rows, groups, cuts = squares_ref.shape
    size, entries = inner // groups, share * groups // inner * cuts
    shape = (tile_rows, dispatch.next_power_of_two(entries))
    row = dispatch.spread(tile * tile_rows + jax.lax.iota(jnp.int32, tile_rows), shape, 0)
    lane = dispatch.spread(jax.lax.iota(jnp.int32, shape[1]), shape, 1)
    index = (row, part * (entries // cuts) + lane // cuts, lane % cuts)
    squares = pltriton.load(squares_ref.at[index], mask=(row < rows) & (lane < entries), other=0.0)

    def scale_of(place):
        own = jnp.sum(jnp.where(lane // cuts == place // size, squares, 0.0), axis=1)
        return jax.lax.rsqrt(own / size + eps)

    return scale_of


def store_rows(out_ref, tile: jax.Array, first_column: jax.Array, value: jax.Array) -> None:
    """Writes a tile to out_ref [rows, O], without what lies past its end."""
    rows, (size, columns) = out_ref.shape[0], value.shape
    row = dispatch.spread(tile * size + jax.lax.iota(jnp.int32, size), value.shape, 0)
    column = first_column + jax.lax.iota(jnp.int32, columns)
    column = dispatch.spread(column, value.shape, 1)
    inside = row < rows
    if out_ref.shape[1] % columns:
        inside &= column < out_ref.shape[1]
    pltriton.store(out_ref.at[row, column], value.astype(out_ref.dtype), mask=inside)


@dispatch.lowered_once
def skinny_matmul(
    x: jax.Array,
    kernel: jax.Array,
    squares: jax.Array | None = None,
    *,
    dtype: jnp.dtype | None = None,
    eps: float | None = None,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """[P, B, R, O] as `skinny_matmul.definition` gives them, in P parts; with squares [B, R, G, Q]
    and eps as `normed_matmul.definition` does."""
    inner, columns = kernel.shape
    rows = x.shape[0] * x.shape[1]
    config = default_config(inner, columns, x.dtype, rows) if config is None else config
    normed = []
    if squares is not None:
        normed = [squares.reshape(rows, *squares.shape[2:])]
        config = dataclasses.replace(config, block=min(config.block, inner // squares.shape[2]))
    tile_rows, splits = row_tile(rows), config.splits
    tiles = dispatch.ceil_div(columns, config.columns)
    dtype = (dtype or x.dtype) if splits == 1 else jnp.float32
    out = pl.pallas_call(
        functools.partial(_matmul_kernel, tile_rows=tile_rows, config=config, eps=eps),
        grid=(dispatch.ceil_div(rows, tile_rows), tiles, splits),
        in_specs=[
            pl.BlockSpec((rows, inner), lambda i, j, p: (0, 0)),
            pl.BlockSpec((inner // splits, config.columns), lambda i, j, p: (p, j)),
            *(dispatch.whole(*array.shape) for array in normed),
        ],
        out_specs=pl.BlockSpec((None, rows, columns), lambda i, j, p: (p, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((splits, rows, columns), dtype),
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="normed_matmul" if normed else "skinny_matmul",
    )(x.reshape(rows, inner), kernel, *normed)
    return out.reshape(splits, *x.shape[:2], columns)
