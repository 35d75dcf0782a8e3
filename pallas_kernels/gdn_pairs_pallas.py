"""What the nodes of a tree are to each other in `gdn_tree`, once a head: a Pallas GPU kernel.

Nodes come in blocks of up to 64. For each block the kernel gives the inverse of I + L (`gdn_wy`),
so that updates are one product, and the weights with which outputs read updates. Neither depends
on the state, so tiles of value dims share them.

All products are true float32 where updates depend on them. A float32 `dot` without tensor cores
is slow: where one side is a bfloat16 row (keys, queries), the other is split into three bfloat16
terms that add up to it, three exact products; where both are float32, both are split, and the
three products of small terms below 2**-24 are left out.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, gdn_wy
from pallas_kernels.dispatch import spread

_LEAF = 16  # nodes whose inverse is found row by row


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


def split_dot(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> jax.Array:
    """(sum of terms) x (sum of terms) in float32, the small products first."""
    if len(left) == 1:
        return exact_dot(left[0], right)
    total = None
    for order in (2, 1, 0):
        for first in range(order + 1):
            part = pltriton.dot(left[first], right[order - first])
            total = part if total is None else total + part
    return total


def inverse_norm(rows: jax.Array) -> jax.Array:
    """1 / norm of each row, as `gdn_wy.normalise` has it."""
    wide = rows.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) + gdn_wy.EPS)


def load_rows(ref, start: jax.Array, count: int, bound: jax.Array | int) -> jax.Array:
    """`count` rows from `start` on, 0 from `bound` on."""
    mask = spread(start + jax.lax.iota(jnp.int32, count) < bound, (count, ref.shape[1]), 0)
    return pltriton.load(ref.at[pl.ds(start, count), :], mask=mask, other=0.0)


def load_numbers(ref, start: jax.Array, count: int) -> jax.Array:
    """`count` numbers from `start` on, 0 past the end."""
    mask = start + jax.lax.iota(jnp.int32, count) < ref.shape[0]
    return pltriton.load(ref.at[pl.ds(start, count)], mask=mask, other=0.0)


def load_seen(visible_ref, row: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """Which of `count` nodes from `start` on each row sees."""
    shape = (row.shape[0], count)
    column = spread(start + jax.lax.iota(jnp.int32, count), shape, 1)
    rows = spread(row, shape, 0)
    nodes = visible_ref.shape[0]
    inside = (rows < nodes) & (column < nodes)
    return pltriton.load(visible_ref.at[rows, column], mask=inside, other=False)


class Rows(NamedTuple):
    """One block of nodes: keys and queries as they are, what they are scaled by, and the log of
    the decay from the prefix in two parts."""

    keys: jax.Array  # [rows, Dk]
    queries: jax.Array  # [rows, Dk]
    key_scale: jax.Array  # float32 [rows], beta included
    query_scale: jax.Array  # float32 [rows]
    coarse: jax.Array  # float32 [rows]
    fine: jax.Array  # float32 [rows]


def load_block(key_ref, query_ref, beta: jax.Array, start: jax.Array, coarse, fine) -> Rows:
    """The nodes from `start` on, as many as `beta` has."""
    nodes, key_dim = key_ref.shape
    keys, queries = (load_rows(ref, start, beta.shape[0], nodes) for ref in (key_ref, query_ref))
    query_scale = inverse_norm(queries) * key_dim**-0.5
    return Rows(keys, queries, beta * inverse_norm(keys), query_scale, coarse, fine)


def pairs(
    rows: Rows, columns: jax.Array, coarse: jax.Array, fine: jax.Array, seen: jax.Array
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


def _path_sums(decay_ref, visible_ref, row: jax.Array, blocks: jax.Array):
    """Sums of log-decays over each row's path, in two parts; all nodes of it lie in the first
    `blocks` blocks."""
    size = row.shape[0]

    def add(step, sums):
        split = gdn_wy.split_decay(load_numbers(decay_ref, step * size, size))
        seen = load_seen(visible_ref, row, step * size, size)
        return tuple(
            total + jnp.sum(jnp.where(seen, spread(part, seen.shape, 1), 0.0), axis=1)
            for total, part in zip(sums, split, strict=True)
        )

    zero = jnp.zeros((size,), jnp.float32)
    return jax.lax.fori_loop(jnp.int32(0), blocks, add, (zero, zero))


def _leaf_inverses(lower_ref, size: int) -> jax.Array:
    """[size, 16] with [16 b + c, j] = entry (j, c) of the inverse of diagonal block b of I + L.

    Forward substitution: row i of an inverse is e_i minus row i of L times the rows above.
    """
    shape = (size, _LEAF)
    line = spread(jax.lax.iota(jnp.int32, size), shape, 0)
    entry = spread(jax.lax.iota(jnp.int32, _LEAF), shape, 1)
    begin, column = line // _LEAF * _LEAF, line % _LEAF
    inverse = jnp.where((entry == 0) & (column == 0), 1.0, 0.0)
    for step in range(1, _LEAF):
        lower = pltriton.load(lower_ref.at[begin + step, begin + entry])
        below = jnp.sum(lower * inverse, axis=1)
        unit = jnp.where(column == step, 1.0, 0.0)
        inverse = jnp.where(entry == step, unit - spread(below, shape, 0), inverse)
    return inverse


def _block_inverse(inverse_ref, lower: jax.Array, dtype: jnp.dtype, barrier) -> jax.Array:
    """Inverse of I + lower; inverse_ref serves as scratch. dtype: of the products' terms.

    Inverses of 16 rows are joined two by two: with X the inverses of the halves of a block and M
    what lies between them, the whole has X - X M X.
    """
    size = lower.shape[0]
    shape = (size, size)
    row = spread(jax.lax.iota(jnp.int32, size), shape, 0)
    column = spread(jax.lax.iota(jnp.int32, size), shape, 1)
    inverse_ref[...] = lower
    barrier()
    leaves = _leaf_inverses(inverse_ref, size)
    barrier()
    line = spread(jax.lax.iota(jnp.int32, size), leaves.shape, 0)
    entry = spread(jax.lax.iota(jnp.int32, _LEAF), leaves.shape, 1)
    pltriton.store(inverse_ref.at[line // _LEAF * _LEAF + entry, line], leaves)
    barrier()
    inverse = pltriton.load(inverse_ref.at[...], mask=row // _LEAF == column // _LEAF, other=0.0)
    half = _LEAF
    while half < size:
        between = (row // (2 * half) == column // (2 * half)) & (row // half != column // half)
        terms = terms_for(inverse, dtype)
        across = split_dot(terms_for(jnp.where(between, lower, 0.0), dtype), terms)
        inverse = inverse - split_dot(terms, terms_for(across, dtype))
        half *= 2
    barrier()  # all of the scratch is read before the result takes its place
    return inverse


def _pairs_kernel(
    query_ref,  # [T, Dk], strided
    key_ref,  # [T, Dk], strided
    decay_ref,  # float32 [T], strided: log-decays
    beta_ref,  # float32 [T], strided
    visible_ref,  # bool [T, T]
    inverse_ref,  # float32 [size, size], out
    weight_ref,  # float32 [size, size], out
    coarse_ref,  # float32 [size], out
    fine_ref,  # float32 [size], out
    *,
    interpret: bool,
):
    size, dtype = inverse_ref.shape[0], key_ref.dtype
    block = pl.program_id(0)
    start = block * size
    row = start + jax.lax.iota(jnp.int32, size)
    beta = load_numbers(beta_ref, start, size)
    coarse, fine = _path_sums(decay_ref, visible_ref, row, block + 1)
    rows = load_block(key_ref, query_ref, beta, start, coarse, fine)
    seen = load_seen(visible_ref, row, start, size)
    lower, weight = pairs(rows, rows.keys, coarse, fine, seen)
    weight_ref[...] = weight
    coarse_ref[...] = coarse
    fine_ref[...] = fine
    before = spread(row, seen.shape, 0) > spread(row, seen.shape, 1)
    lower = jnp.where(before, lower, 0.0)
    barrier = (lambda: None) if interpret else pltriton.debug_barrier
    inverse_ref[...] = _block_inverse(inverse_ref, lower, dtype, barrier)


class Pairs(NamedTuple):
    """Of blocks of `size` nodes: see `_pairs_kernel`."""

    inverse: jax.Array  # float32 [B, Hv, blocks, size, size]
    weight: jax.Array  # float32 [B, Hv, blocks, size, size]
    coarse: jax.Array  # float32 [B, Hv, blocks, size]
    fine: jax.Array  # float32 [B, Hv, blocks, size]


def gdn_pairs(
    query: jax.Array,
    key: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    visible: jax.Array,
    *,
    size: int,
    num_warps: int,
    interpret: bool,
) -> Pairs:
    """Inverses, weights and path sums of every head. size: nodes a block, a power of two >= 16."""
    slots, nodes, key_heads, key_dim = key.shape
    heads = beta.shape[2]
    group, blocks = heads // key_heads, dispatch.ceil_div(nodes, size)
    key_rows = pl.BlockSpec((None, nodes, None, key_dim), lambda i, h, b: (b, 0, h // group, 0))
    numbers = pl.BlockSpec((None, nodes, None), lambda i, h, b: (b, 0, h))
    square = pl.BlockSpec((None, None, None, size, size), lambda i, h, b: (b, h, i, 0, 0))
    line = pl.BlockSpec((None, None, None, size), lambda i, h, b: (b, h, i, 0))
    shape = (slots, heads, blocks, size)
    out = pl.pallas_call(
        functools.partial(_pairs_kernel, interpret=interpret),
        grid=(blocks, heads, slots),
        in_specs=[
            key_rows,
            key_rows,
            numbers,
            numbers,
            pl.BlockSpec((None, nodes, nodes), lambda i, h, b: (b, 0, 0)),
        ],
        out_specs=[square, square, line, line],
        out_shape=[jax.ShapeDtypeStruct((*shape, size), jnp.float32)] * 2
        + [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2,
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_pairs",
    )(query, key, log_decay, beta, visible)
    return Pairs(*out)
