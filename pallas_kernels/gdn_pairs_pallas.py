"""What the nodes of a tree are to each other in `gdn_tree`, once a head: a Pallas GPU kernel.

Nodes come in blocks of up to 64. For each block the kernel gives the inverse of I + L (`gdn_wy`),
so that its updates are one product; for each two, L between them; and the weights with which
outputs read updates. None of it depends on the state, so tiles of value dims share it.

All products are true float32 where updates depend on them. A float32 `dot` without tensor cores
is slow: where one side is a bfloat16 row (keys, queries), the other is split into three bfloat16
terms that add up to it, three exact products; where both are float32, both are split, and the
three products of small terms below 2**-24 are left out.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, gdn_wy
from pallas_kernels.dispatch import spread

_LEAF = 32  # nodes whose inverse is found row by row


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


def _load_seen(visible_ref, row: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """Which of `count` nodes from `start` on each row sees."""
    shape = (row.shape[0], count)
    column = spread(start + jax.lax.iota(jnp.int32, count), shape, 1)
    rows = spread(row, shape, 0)
    nodes = visible_ref.shape[0]
    inside = (rows < nodes) & (column < nodes)
    return pltriton.load(visible_ref.at[rows, column], mask=inside, other=False)


class Rows(NamedTuple):
    """One block of nodes: keys and queries as they are, their factors, and the log of the decay
    from the prefix in two parts."""

    keys: jax.Array  # [rows, Dk]
    queries: jax.Array  # [rows, Dk]
    inverse_norm: jax.Array  # float32 [rows], of keys
    query_scale: jax.Array  # float32 [rows]
    coarse: jax.Array  # float32 [rows]
    fine: jax.Array  # float32 [rows]


def _load_block(refs: "_Inputs", start: jax.Array, size: int, blocks: jax.Array) -> Rows:
    """`size` nodes from `start` on, whose ancestors lie in the first `blocks` blocks."""
    nodes, key_dim = refs.key.shape
    # Rows come before sums: behind a reduction their latency would show.
    keys, queries = (load_rows(ref, start, size, nodes) for ref in (refs.key, refs.query))
    row = start + jax.lax.iota(jnp.int32, size)
    coarse, fine = _path_sums(refs.decay, refs.visible, row, blocks)
    scale = inverse_norm(queries) * key_dim**-0.5
    return Rows(keys, queries, inverse_norm(keys), scale, coarse, fine)


def _pairs(
    rows: Rows, columns: Rows, beta: jax.Array, seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """beta D o K K^T and D o Q K^T of the nodes of two blocks, 0 where not seen."""
    shape = seen.shape
    between = spread(rows.coarse, shape, 0) - spread(columns.coarse, shape, 1)
    between = between + (spread(rows.fine, shape, 0) - spread(columns.fine, shape, 1))
    decay = jnp.where(seen, jnp.exp(jnp.where(seen, between, 0.0)), 0.0)
    decay = decay * spread(columns.inverse_norm, shape, 1)
    lower = exact_dot(rows.keys, (columns.keys,), trans_b=True)
    weight = exact_dot(rows.queries, (columns.keys,), trans_b=True)
    lower = lower * spread(beta * rows.inverse_norm, shape, 0)
    return lower * decay, weight * spread(rows.query_scale, shape, 0) * decay


def _path_sums(decay_ref, visible_ref, row: jax.Array, blocks: jax.Array):
    """Sums of log-decays over each row's path, in two parts; all nodes of it lie in the first
    `blocks` blocks."""
    size = row.shape[0]

    def add(step, sums):
        split = gdn_wy.split_decay(load_numbers(decay_ref, step * size, size))
        seen = _load_seen(visible_ref, row, step * size, size)
        return tuple(
            total + jnp.sum(jnp.where(seen, spread(part, seen.shape, 1), 0.0), axis=1)
            for total, part in zip(sums, split, strict=True)
        )

    zero = jnp.zeros((size,), jnp.float32)
    return jax.lax.fori_loop(jnp.int32(0), blocks, add, (zero, zero))


def _leaf_inverses(lower_ref, size: int, leaf: int) -> jax.Array:
    """[size, leaf] with [leaf b + c, j] = entry (j, c) of the inverse of diagonal block b of I + L.

    Forward substitution: row i of an inverse is e_i minus row i of L times the rows above.
    """
    shape = (size, leaf)
    line = spread(jax.lax.iota(jnp.int32, size), shape, 0)
    entry = spread(jax.lax.iota(jnp.int32, leaf), shape, 1)
    begin, column = line // leaf * leaf, line % leaf
    inverse = jnp.where((entry == 0) & (column == 0), 1.0, 0.0)
    for step in range(1, leaf):
        lower = pltriton.load(lower_ref.at[begin + step, begin + entry])
        below = jnp.sum(lower * inverse, axis=1)
        unit = jnp.where(column == step, 1.0, 0.0)
        inverse = jnp.where(entry == step, unit - spread(below, shape, 0), inverse)
    return inverse


def _invert(ref, lower: jax.Array, dtype: jnp.dtype, barrier: Callable[[], None]) -> None:
    """Leaves the inverse of I + lower in ref. dtype: of the products' terms.

    Two leaves are joined: with A and B the inverses of the halves and M what lies between them,
    the corner is -B M A.
    """
    size = lower.shape[0]
    leaf = min(size, _LEAF)
    ref[...] = lower
    barrier()
    leaves = _leaf_inverses(ref, size, leaf)
    barrier()
    line = spread(jax.lax.iota(jnp.int32, size), leaves.shape, 0)
    entry = spread(jax.lax.iota(jnp.int32, leaf), leaves.shape, 1)
    pltriton.store(ref.at[line // leaf * leaf + entry, line], leaves)
    if size == leaf:
        return
    barrier()
    first, second = pl.ds(0, leaf), pl.ds(leaf, leaf)
    parts = ref[second, second], ref[second, first], ref[first, first]
    after, between, before = (terms_for(part, dtype) for part in parts)
    across = split_dot(after, between)
    corner = split_dot(terms_for(across, dtype), before)
    barrier()  # all have read what lies between
    ref[second, first] = -corner


class _Inputs(NamedTuple):
    query: Any  # [T, Dk], strided
    key: Any  # [T, Dk], strided
    decay: Any  # float32 [T], strided: log-decays
    beta: Any  # float32 [T], strided
    visible: Any  # bool [T, T]


def _pairs_kernel(
    *refs,
    blocks: int,
    interpret: bool,
):
    inputs = _Inputs(*refs[:5])
    matrix_ref, weight_ref, known_ref, query_ref = refs[5:]
    size, dtype = matrix_ref.shape[0], inputs.key.dtype
    row_block, column_block = pl.program_id(0) // blocks, pl.program_id(0) % blocks
    start = row_block * size
    row = start + jax.lax.iota(jnp.int32, size)
    beta = load_numbers(inputs.beta, start, size)
    seen = _load_seen(inputs.visible, row, column_block * size, size)

    def load(block):
        return _load_block(inputs, block * size, size, block + 1)

    def on_diagonal():
        rows = load(row_block)
        lower, weight = _pairs(rows, rows, beta, seen)
        weight_ref[...] = weight
        from_prefix = jnp.exp(rows.coarse + rows.fine)
        known_ref[...] = beta * rows.inverse_norm * from_prefix
        query_ref[...] = rows.query_scale * from_prefix
        before = spread(row, seen.shape, 0) > spread(row, seen.shape, 1)
        barrier = (lambda: None) if interpret else pltriton.debug_barrier
        _invert(matrix_ref, jnp.where(before, lower, 0.0), dtype, barrier)

    def below_diagonal():
        pairs = _pairs(load(row_block), load(column_block), beta, seen)
        matrix_ref[...], weight_ref[...] = pairs

    if blocks == 1:
        on_diagonal()
    else:
        pl.when(row_block == column_block)(on_diagonal)
        pl.when(row_block > column_block)(below_diagonal)


class Pairs(NamedTuple):
    """Of blocks of `size` nodes. Blocks above the diagonal are never written.

    matrix: L of two blocks below the diagonal, the inverse of I + L on it. weight: D o Q K^T with
    queries and keys normalised. known_scale: what a raw key is multiplied by before it meets the
    prefix's state: beta E / norm; query_scale: E / (norm sqrt(Dk)).
    """

    matrix: jax.Array  # float32 [B, Hv, blocks, blocks, size, size]
    weight: jax.Array  # float32 [B, Hv, blocks, blocks, size, size]
    known_scale: jax.Array  # float32 [B, Hv, blocks, size]
    query_scale: jax.Array  # float32 [B, Hv, blocks, size]


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
    """`Pairs` of every head. size: nodes a block, 16, 32 or 64."""
    slots, nodes, key_heads, key_dim = key.shape
    heads = beta.shape[2]
    group, blocks = heads // key_heads, dispatch.ceil_div(nodes, size)
    key_rows = pl.BlockSpec((None, nodes, None, key_dim), lambda i, h, b: (b, 0, h // group, 0))
    numbers = pl.BlockSpec((None, nodes, None), lambda i, h, b: (b, 0, h))
    square = pl.BlockSpec(
        (None, None, None, None, size, size),
        lambda i, h, b: (b, h, i // blocks, i % blocks, 0, 0),
    )
    line = pl.BlockSpec((None, None, None, size), lambda i, h, b: (b, h, i // blocks, 0))
    shape = (slots, heads, blocks)
    out = pl.pallas_call(
        functools.partial(_pairs_kernel, blocks=blocks, interpret=interpret),
        grid=(blocks * blocks, heads, slots),
        in_specs=[
            key_rows,
            key_rows,
            numbers,
            numbers,
            pl.BlockSpec((None, nodes, nodes), lambda i, h, b: (b, 0, 0)),
        ],
        out_specs=[square, square, line, line],
        out_shape=[jax.ShapeDtypeStruct((*shape, blocks, size, size), jnp.float32)] * 2
        + [jax.ShapeDtypeStruct((*shape, size), jnp.float32)] * 2,
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_pairs",
    )(query, key, log_decay, beta, visible)
    return Pairs(*out)
