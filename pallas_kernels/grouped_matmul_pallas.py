"""Pallas GPU kernels of `grouped_gate_up` and `grouped_down`: a launch each.

Which experts have rows is data, so there are as many programs as any choice could need, and those
without rows leave at once. With few rows an expert its weights are what takes the time: each is
read once. Rows are read and written at their own entries; no other kernel moves them.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.dispatch import dot, silu, spread, whole

_FEW = 16  # choices
# Of rows and weights at most, a step of the loop: with many programs, and with few.
_STAGE_BYTES = (24576, 36864)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a kernel is cut up. Sizes are powers of two, but for the stages."""

    tile_rows: int  # of one expert, at least 16 for the tensor cores
    tile_columns: int = 64  # of the result
    block_inner: int = 64
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size < 1 or (size & (size - 1) and field.name != "num_stages"):
                raise ValueError(f"`{field.name}` must be a power of two, got {size}")


def default_config(
    entries: int, experts: int, inner: int, outer: int, itemsize: int, *, halves: int
) -> Config:
    """Measured on an H200 at Qwen3.6-35B-A3B (scripts/results/kernel_log.md). halves: matrices
    that a program reads of an expert."""
    rows = 64 if entries > 16 * experts else 16
    few = entries <= _FEW
    columns = dispatch.divisor(outer, 64)
    most = _STAGE_BYTES[few] // ((rows + halves * columns) * itemsize)
    block = 1 << (min(most, 128).bit_length() - 1)
    if few and halves == 1:
        block = min(block, 64)  # a short loop begins the sooner
    return Config(
        tile_rows=rows,
        tile_columns=columns,
        block_inner=dispatch.divisor(inner, block),
        num_stages=5 if few and halves == 2 else 4,
    )


def unsupported(dtype: jnp.dtype, inner: int, outer: int) -> str | None:
    """Why the kernels cannot take these arguments, or None."""
    if unfit := dispatch.unsupported_dtype(dtype):
        return unfit
    if inner % 16 or outer % 16:
        return f"both sides of an expert's matrix must be multiples of 16, got {inner} x {outer}"
    return None


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Which rows of which expert a program takes.

    A row alone: each entry is a program, and no order is read. Fewer entries than experts: a
    program a place, idle unless a tile begins there. Else a program an expert, for all of its
    tiles; a shared expert, whose tiles are known, is cut up and goes first, so as not to be last.
    """

    rows: int
    chosen: int
    experts: int
    tile: int
    shared: bool

    @property
    def entries(self) -> int:
        return self.rows * self.chosen

    @property
    def by_place(self) -> bool:
        return self.rows == 1 or self.entries <= self.experts

    @property
    def cuts(self) -> int:
        """Programs of the shared expert."""
        return dispatch.ceil_div(self.rows, self.tile) if self.shared else 0

    @property
    def programs(self) -> int:
        if self.by_place:
            return self.entries
        return self.experts - self.shared + self.cuts

    def run(self, ids_ref, entry_ref, starts_ref, body: Callable[..., None]) -> None:
        """Calls body(expert, entries [tile], whether each is one) for every tile of a program.

        Entries that are none are those of the tile's last row.
        """
        program, size = pl.program_id(1), self.tile
        lane = jax.lax.iota(jnp.int32, size)
        if self.rows == 1:
            place = self.entries - 1 - program  # a shared expert's is the last
            body(ids_ref[place], jnp.full((size,), place, jnp.int32), lane < 1)
            return
        if self.by_place:
            first = self.entries - 1 - program
            expert = ids_ref[entry_ref[first]]
            start, end = starts_ref[expert], starts_ref[expert + 1]
            last = jnp.where((first - start) % size == 0, jnp.minimum(first + size, end), first)
        else:
            cut = program < self.cuts
            expert = jnp.where(cut, self.experts - 1, program - self.cuts)
            start, end = starts_ref[expert], starts_ref[expert + 1]
            first = start + jnp.where(cut, program * size, 0)
            last = jnp.where(cut, jnp.minimum(first + size, end), end)

        def step(tile, carry):
            place = first + tile * size + lane
            entry = pltriton.load(entry_ref.at[jnp.minimum(place, last - 1)])
            body(expert, entry, place < last)
            return carry

        jax.lax.fori_loop(0, (last - first + size - 1) // size, step, 0)


def _products(
    rows_ref, kernels_ref, row: jax.Array, expert: jax.Array, columns: list, config: Config
) -> tuple[jax.Array, ...]:
    """Rows of rows_ref [.., I] by some columns of kernels_ref [G, I, O] from each of `columns`."""
    size, width, step = config.tile_rows, config.tile_columns, config.block_inner

    def add(block, sums):
        depth = block * step + jax.lax.iota(jnp.int32, step)
        shape = (size, step)
        left = pltriton.load(rows_ref.at[spread(row, shape, 0), spread(depth, shape, 1)])
        at = pl.ds(block * step, step)
        return tuple(
            total + dot(left, kernels_ref[expert, at, pl.ds(column, width)])
            for total, column in zip(sums, columns, strict=True)
        )

    zero = jnp.zeros((size, width), jnp.float32)
    return jax.lax.fori_loop(0, rows_ref.shape[1] // step, add, (zero,) * len(columns))


def gate_up_tile(
    x_ref,  # [R, D]
    kernels_ref,  # [G, D, 2 F]
    out_ref,  # [N, F], out
    row: jax.Array,
    expert: jax.Array,
    entry: jax.Array,
    exists: jax.Array,
    first: jax.Array,
    config: Config,
) -> None:
    """Columns from `first` on of silu(rows @ gate) * (rows @ up) of one expert, written to those of
    the entries [tile] that exist."""
    shape = (config.tile_rows, config.tile_columns)
    entries, half = out_ref.shape
    gate, up = _products(x_ref, kernels_ref, row, expert, [first, half + first], config)
    mixed = (silu(gate) * up).astype(out_ref.dtype)
    column = spread(first + jax.lax.iota(jnp.int32, shape[1]), shape, 1)
    # Interpret mode drops what lies past the end, where a masked store is not one.
    at = (spread(jnp.where(exists, entry, entries), shape, 0), column)
    pltriton.store(out_ref.at[at], mixed, mask=spread(exists, shape, 0))


def _gate_up_kernel(
    ids_ref,  # int32 [N]
    entry_ref,  # int32 [N]
    starts_ref,  # int32 [G + 1]
    x_ref,  # [R, D]
    kernels_ref,  # [G, D, 2 F]
    out_ref,  # [N, F], out
    *,
    walk: _Walk,
    config: Config,
):
    first = pl.program_id(0) * config.tile_columns

    def tile(expert, entry, exists):
        row = entry // walk.chosen
        gate_up_tile(x_ref, kernels_ref, out_ref, row, expert, entry, exists, first, config)

    walk.run(ids_ref, entry_ref, starts_ref, tile)


def _down_kernel(
    ids_ref,  # int32 [N]
    entry_ref,  # int32 [N]
    starts_ref,  # int32 [G + 1]
    gated_ref,  # [N, F]
    kernels_ref,  # [G, F, D]
    weight_ref,  # float32 [N]
    out_ref,  # [K, R, D], out
    *,
    walk: _Walk,
    config: Config,
):
    shape = (config.tile_rows, config.tile_columns)
    first = pl.program_id(0) * config.tile_columns
    column = spread(first + jax.lax.iota(jnp.int32, shape[1]), shape, 1)

    def tile(expert, entry, exists):
        weight = pltriton.load(weight_ref.at[entry])
        (product,) = _products(gated_ref, kernels_ref, entry, expert, [first], config)
        scaled = (product * spread(weight, shape, 0)).astype(out_ref.dtype)
        row = jnp.where(exists, entry // walk.chosen, walk.rows)
        at = (spread(entry % walk.chosen, shape, 0), spread(row, shape, 0), column)
        pltriton.store(out_ref.at[at], scaled, mask=spread(exists, shape, 0))

    walk.run(ids_ref, entry_ref, starts_ref, tile)


def _call(
    name: str,
    kernel: Callable[..., None],
    arrays: tuple[jax.Array, ...],
    out: jax.ShapeDtypeStruct,
    *,
    walk: _Walk,
    config: Config,
    interpret: bool,
) -> jax.Array:
    return pl.pallas_call(
        functools.partial(kernel, walk=walk, config=config),
        # Columns first: neighbours read the same rows of an expert's matrix at the same time.
        grid=(out.shape[-1] // config.tile_columns, walk.programs),
        in_specs=[whole(*array.shape) for array in arrays],
        out_specs=whole(*out.shape),
        out_shape=out,
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name=name,
    )(*arrays)


def _order_for(
    ids: jax.Array, entry: jax.Array, starts: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a kernel is given of the order. A row alone needs none: its sort becomes dead code."""
    flat = ids.reshape(-1)
    return (flat, flat, flat) if ids.shape[0] == 1 else (flat, entry, starts)


@dispatch.lowered_once
def grouped_gate_up(
    x: jax.Array,
    kernels: jax.Array,
    ids: jax.Array,
    entry: jax.Array,
    starts: jax.Array,
    *,
    shared: bool,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """[R, K, F] as `gate_up_definition` gives it."""
    (rows, chosen), (experts, inner, columns) = ids.shape, kernels.shape
    half = columns // 2
    if config is None:
        config = default_config(ids.size, experts, inner, half, x.dtype.itemsize, halves=2)
    out = _call(
        "grouped_gate_up",
        _gate_up_kernel,
        (*_order_for(ids, entry, starts), x, kernels),
        jax.ShapeDtypeStruct((ids.size, half), x.dtype),
        walk=_Walk(rows, chosen, experts, config.tile_rows, shared),
        config=config,
        interpret=interpret,
    )
    return out.reshape(rows, chosen, half)


@dispatch.lowered_once
def grouped_down(
    gated: jax.Array,
    kernels: jax.Array,
    ids: jax.Array,
    weight: jax.Array,
    entry: jax.Array,
    starts: jax.Array,
    *,
    shared: bool,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """[K, R, D] as `down_definition` gives it."""
    (rows, chosen), (experts, inner, columns) = ids.shape, kernels.shape
    if config is None:
        itemsize = gated.dtype.itemsize
        config = default_config(ids.size, experts, inner, columns, itemsize, halves=1)
    return _call(
        "grouped_down",
        _down_kernel,
        (
            *_order_for(ids, entry, starts),
            gated.reshape(ids.size, inner),
            kernels,
            weight.reshape(-1),
        ),
        jax.ShapeDtypeStruct((chosen, rows, columns), gated.dtype),
        walk=_Walk(rows, chosen, experts, config.tile_rows, shared),
        config=config,
        interpret=interpret,
    )
