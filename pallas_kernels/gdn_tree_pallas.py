"""Pallas GPU kernel of `gdn_tree`: the WY form (`gdn_wy`), block row by block row.

A program takes one value head and one tile of value dims, and keeps that tile of the state on
chip. Nodes come after their ancestors, so a block of rows needs the updates of earlier blocks,
which it reads back from its own output, and a small triangular system of its own.

All products are true float32 where updates depend on them. A float32 `dot` without tensor cores
is slow, so where one side is a bfloat16 row (keys, queries), the other is split into three
bfloat16 terms that add up to it: three tensor core products, each exact.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, gdn_wy
from pallas_kernels.dispatch import spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut up. Sizes are powers of two."""

    block_rows: int = 16  # nodes that are solved together, at least 16 for the tensor cores
    block_columns: int = 32  # earlier nodes a step
    value_tile: int = 32  # value dims of a program
    num_warps: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"`{field.name}` must be a power of two, got {size}")
        if min(self.block_rows, self.block_columns, self.value_tile) < 16:
            raise ValueError("`block_rows`, `block_columns`, `value_tile` must be at least 16")


def unsupported(dtype: jnp.dtype, key_dim: int, value_dim: int) -> str | None:
    """Why the kernels cannot take these arguments, or None."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, got {jnp.dtype(dtype).name}"
    for name, size in (("key", key_dim), ("value", value_dim)):
        if not 16 <= size <= 256 or size & (size - 1):
            return f"the {name} dim must be a power of two from 16 to 256, got {size}"
    return None


def terms_for(x: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    """float32 as a sum of arrays of `dtype`: itself, or three bfloat16 of 24 bits together."""
    if dtype == jnp.float32:
        return (x,)
    terms = []
    for _ in range(3):
        terms.append(x.astype(jnp.bfloat16))
        x = x - terms[-1].astype(jnp.float32)
    return tuple(terms)


def exact_dot(left: jax.Array, terms: tuple[jax.Array, ...], **transposed: bool) -> jax.Array:
    """left x (sum of terms) in float32, the small terms first."""
    exact = dispatch.precision_of(left)
    total = None
    for term in reversed(terms):
        part = pltriton.dot(left, term, precision=exact, **transposed)
        total = part if total is None else total + part
    return total


def inverse_norm(rows: jax.Array) -> jax.Array:
    """1 / norm of each row, as `gdn_wy.normalise` has it."""
    wide = rows.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) + gdn_wy.EPS)


def _block_mask(start: jax.Array, shape: tuple[int, int], bound: jax.Array | int) -> jax.Array:
    """Whether each row of a block that begins at `start` lies before `bound`."""
    return spread(start + jax.lax.iota(jnp.int32, shape[0]) < bound, shape, 0)


def _load_rows(ref, start: jax.Array, count: int, bound: jax.Array | int) -> jax.Array:
    """`count` rows from `start` on, 0 from `bound` on."""
    mask = _block_mask(start, (count, ref.shape[1]), bound)
    return pltriton.load(ref.at[pl.ds(start, count), :], mask=mask, other=0.0)


def _load_numbers(ref, start: jax.Array, count: int) -> jax.Array:
    """`count` numbers from `start` on, 0 past the end."""
    mask = start + jax.lax.iota(jnp.int32, count) < ref.shape[0]
    return pltriton.load(ref.at[pl.ds(start, count)], mask=mask, other=0.0)


def _load_seen(visible_ref, row: jax.Array, start: jax.Array, count: int, bound) -> jax.Array:
    """Which of `count` nodes from `start` on, and before `bound`, each row sees."""
    shape = (row.shape[0], count)
    column = spread(start + jax.lax.iota(jnp.int32, count), shape, 1)
    rows = spread(row, shape, 0)
    inside = (rows < visible_ref.shape[0]) & (column < bound)
    return pltriton.load(visible_ref.at[rows, column], mask=inside, other=False)


class _Rows(NamedTuple):
    """One block of nodes: keys and queries as they are, what they are scaled by, and the log of
    the decay from the prefix in two parts."""

    index: jax.Array  # int32 [rows]
    keys: jax.Array  # [rows, Dk]
    queries: jax.Array  # [rows, Dk]
    key_scale: jax.Array  # float32 [rows], beta included
    query_scale: jax.Array  # float32 [rows]
    coarse: jax.Array  # float32 [rows]
    fine: jax.Array  # float32 [rows]


def _pairs(
    rows: _Rows, columns: jax.Array, coarse: jax.Array, fine: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """beta D o K K^T and D o Q K^T of a block's rows and some columns, 0 where not seen."""
    shape = seen.shape
    between = spread(rows.coarse, shape, 0) - spread(coarse, shape, 1)
    between = between + (spread(rows.fine, shape, 0) - spread(fine, shape, 1))
    decay = jnp.where(seen, jnp.exp(jnp.where(seen, between, 0.0)), 0.0)
    decay = decay * spread(inverse_norm(columns), shape, 1)
    lower = exact_dot(rows.keys, (columns,), trans_b=True) * spread(rows.key_scale, shape, 0)
    weight = exact_dot(rows.queries, (columns,), trans_b=True) * spread(rows.query_scale, shape, 0)
    return lower * decay, weight * decay


def _tree_kernel(
    query_ref,  # [T, Dk], strided
    key_ref,  # [T, Dk], strided
    value_ref,  # [T, tile], strided
    decay_ref,  # float32 [T], strided: log-decays
    beta_ref,  # float32 [T], strided
    state_ref,  # float32 [Dk, tile]
    visible_ref,  # bool [T, T]
    out_ref,  # [T, tile], out
    update_ref,  # float32 [T, tile], out
    coarse_ref,  # float32 [T], out; scratch: sums of log-decays over paths
    fine_ref,  # float32 [T], out; scratch
    *,
    config: Config,
    interpret: bool,
):
    nodes, key_dim = key_ref.shape
    size, width, tile = config.block_rows, config.block_columns, config.value_tile
    tile_shape = (size, tile)
    state = terms_for(state_ref[...], key_ref.dtype)
    # What only the output needs may be rounded to TF32 where the output is rounded to bfloat16.
    for_output = jax.lax.Precision.HIGHEST if out_ref.dtype == jnp.float32 else None

    def path_sums(row, end):
        def add(step, sums):
            parts = gdn_wy.split_decay(_load_numbers(decay_ref, step * width, width))
            seen = _load_seen(visible_ref, row, step * width, width, nodes)
            return tuple(
                total + jnp.sum(jnp.where(seen, spread(part, seen.shape, 1), 0.0), axis=1)
                for total, part in zip(sums, parts, strict=True)
            )

        zero = jnp.zeros((size,), jnp.float32)
        return jax.lax.fori_loop(0, pl.cdiv(end, width), add, (zero, zero))

    def row_block(block, carry):
        start = block * size
        row = start + jax.lax.iota(jnp.int32, size)
        keys, queries = (_load_rows(ref, start, size, nodes) for ref in (key_ref, query_ref))
        beta = _load_numbers(beta_ref, start, size)
        coarse, fine = path_sums(row, start + size)
        rows = _Rows(
            row,
            keys,
            queries,
            beta * inverse_norm(keys),
            inverse_norm(queries) * key_dim**-0.5,
            coarse,
            fine,
        )
        from_prefix = spread(jnp.exp(coarse + fine), tile_shape, 0)
        known = exact_dot(keys, state) * spread(rows.key_scale, tile_shape, 0)
        values = _load_rows(value_ref, start, size, nodes).astype(jnp.float32)
        wanted = spread(beta, tile_shape, 0) * values - from_prefix * known
        acc = exact_dot(queries, state) * spread(rows.query_scale, tile_shape, 0) * from_prefix

        def earlier(step, state):
            wanted, acc = state
            first = step * width
            lower, weight = _pairs(
                rows,
                _load_rows(key_ref, first, width, nodes),
                _load_numbers(coarse_ref, first, width),
                _load_numbers(fine_ref, first, width),
                _load_seen(visible_ref, row, first, width, start),
            )
            update = _load_rows(update_ref, first, width, start)
            wanted = wanted - exact_dot(lower, (update,))
            return wanted, acc + pltriton.dot(weight, update, precision=for_output)

        wanted, acc = jax.lax.fori_loop(0, pl.cdiv(start, width), earlier, (wanted, acc))
        seen = _load_seen(visible_ref, row, start, size, nodes)
        lower, weight = _pairs(rows, keys, coarse, fine, seen)
        before = seen & (spread(row, seen.shape, 0) > spread(row, seen.shape, 1))
        lower = jnp.where(before, lower, 0.0)
        # As many levels as the block's longest path has edges inside it.
        levels = jnp.max(jnp.sum(before.astype(jnp.int32), axis=1))
        update = jax.lax.fori_loop(
            jnp.int32(0), levels, lambda _, update: wanted - exact_dot(lower, (update,)), wanted
        )
        acc = acc + pltriton.dot(weight, update, precision=for_output)
        index = (spread(row, tile_shape, 0), spread(jax.lax.iota(jnp.int32, tile), tile_shape, 1))
        pltriton.store(update_ref.at[index], update, mask=index[0] < nodes)
        pltriton.store(out_ref.at[index], acc.astype(out_ref.dtype), mask=index[0] < nodes)
        pltriton.store(coarse_ref.at[row], coarse, mask=row < nodes)
        pltriton.store(fine_ref.at[row], fine, mask=row < nodes)
        if not interpret:
            pltriton.debug_barrier()  # later blocks read these updates and sums
        return carry

    jax.lax.fori_loop(0, dispatch.ceil_div(nodes, size), row_block, jnp.int32(0))


def default_config(value_dim: int) -> Config:
    """A sound choice from shapes alone."""
    return Config(value_tile=min(32, value_dim))


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
    slots, nodes, key_heads, key_dim = key.shape
    heads, value_dim = value.shape[2:]
    group = heads // key_heads
    config = default_config(value_dim) if config is None else config
    tile = config.value_tile
    tiles = value_dim // tile
    key_rows = pl.BlockSpec((None, nodes, None, key_dim), lambda i, h, b: (b, 0, h // group, 0))
    value_rows = pl.BlockSpec((None, nodes, None, tile), lambda i, h, b: (b, 0, h, i))
    numbers = pl.BlockSpec((None, nodes, None), lambda i, h, b: (b, 0, h))
    scratch = pl.BlockSpec((None, None, None, nodes), lambda i, h, b: (b, h, i, 0))
    sums = jax.ShapeDtypeStruct((slots, heads, tiles, nodes), jnp.float32)
    out, update, _, _ = pl.pallas_call(
        functools.partial(_tree_kernel, config=config, interpret=interpret),
        grid=(tiles, heads, slots),
        in_specs=[
            key_rows,
            key_rows,
            value_rows,
            numbers,
            numbers,
            pl.BlockSpec((None, None, key_dim, tile), lambda i, h, b: (b, h, 0, i)),
            pl.BlockSpec((None, nodes, nodes), lambda i, h, b: (b, 0, 0)),
        ],
        out_specs=[value_rows, value_rows, scratch, scratch],
        out_shape=[
            jax.ShapeDtypeStruct(value.shape, value.dtype),
            jax.ShapeDtypeStruct(value.shape, jnp.float32),
            sums,
            sums,
        ],
        compiler_params=pltriton.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_tree",
    )(query, key, value, log_decay, beta, state, visible)
    return out, update
