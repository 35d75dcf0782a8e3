"""What the nodes of a tree are to each other in `gdn_tree`, once a head: a Pallas GPU kernel.

Nodes come in leaves of up to 32. For each leaf the kernel gives the inverse of I + L (`gdn_wy`), so
that its updates are one product; for each two, L between them; and the weights with which outputs
read updates. None of it depends on the state, so tiles of value dims share it.

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

LEAF = 32  # most nodes whose inverse is found row by row
_TOGETHER = 4  # rows of it at a time


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


def load_rows(ref, start: jax.Array | int, count: int, bound: jax.Array | int) -> jax.Array:
    """`count` rows from `start` on, 0 from `bound` on."""
    mask = spread(start + jax.lax.iota(jnp.int32, count) < bound, (count, ref.shape[1]), 0)
    return pltriton.load(ref.at[pl.ds(start, count), :], mask=mask, other=0.0)


def load_numbers(ref, start: jax.Array | int, count: int) -> jax.Array:
    """`count` numbers from `start` on, 0 past the end."""
    mask = start + jax.lax.iota(jnp.int32, count) < ref.shape[0]
    return pltriton.load(ref.at[pl.ds(start, count)], mask=mask, other=0.0)


def _load_seen(visible_ref, row: jax.Array, start: jax.Array | int, count: int) -> jax.Array:
    """Which of `count` nodes from `start` on each row sees."""
    shape = (row.shape[0], count)
    column = spread(start + jax.lax.iota(jnp.int32, count), shape, 1)
    rows = spread(row, shape, 0)
    nodes = visible_ref.shape[0]
    inside = (rows < nodes) & (column < nodes)
    return pltriton.load(visible_ref.at[rows, column], mask=inside, other=False)


class _Inputs(NamedTuple):
    query: Any  # [T, Dk], strided
    key: Any  # [T, Dk], strided
    decay: Any  # float32 [T], strided: log-decays
    beta: Any  # float32 [T], strided
    visible: Any  # bool [T, T]


def _path_sums(refs: _Inputs, start: jax.Array | int, size: int) -> tuple[jax.Array, jax.Array]:
    """Sums of log-decays over the paths of `size` nodes from `start` on, in two parts."""
    row = start + jax.lax.iota(jnp.int32, size)

    def add(step, sums):
        split = gdn_wy.split_decay(load_numbers(refs.decay, step * size, size))
        seen = _load_seen(refs.visible, row, step * size, size)
        return tuple(
            total + jnp.sum(jnp.where(seen, spread(part, seen.shape, 1), 0.0), axis=1)
            for total, part in zip(sums, split, strict=True)
        )

    zero = jnp.zeros((size,), jnp.float32)
    if refs.key.shape[0] <= size:
        return add(0, (zero, zero))
    return jax.lax.fori_loop(jnp.int32(0), start // size + 1, add, (zero, zero))


def _decays(
    refs: _Inputs, sums: tuple[jax.Array, jax.Array], start: jax.Array | int, first: jax.Array | int
) -> jax.Array:
    """D between nodes from `start` on, of which `sums` are, and as many from `first` on."""
    size = sums[0].shape[0]
    shape = (size, size)
    seen = _load_seen(refs.visible, start + jax.lax.iota(jnp.int32, size), first, size)
    columns = sums if refs.key.shape[0] <= size else _path_sums(refs, first, size)
    coarse, fine = (
        spread(above, shape, 0) - spread(below, shape, 1)
        for above, below in zip(sums, columns, strict=True)
    )
    return jnp.where(seen, jnp.exp(jnp.where(seen, coarse + fine, 0.0)), 0.0)


def _lower(refs: _Inputs, start: jax.Array | int, first: jax.Array | int, size: int) -> jax.Array:
    """beta D o K K^T between nodes from `start` on and nodes from `first` on."""
    nodes = refs.key.shape[0]
    keys, columns = (load_rows(refs.key, at, size, nodes) for at in (start, first))
    beta = load_numbers(refs.beta, start, size)
    product = exact_dot(keys, (columns,), trans_b=True)
    product = product * spread(beta * inverse_norm(keys), product.shape, 0)
    product = product * spread(inverse_norm(columns), product.shape, 1)
    return product * _decays(refs, _path_sums(refs, start, size), start, first)


def _invert(ref, lower: jax.Array, barrier: Callable[[], None]) -> None:
    """Leaves the inverse of I + lower in ref.

    Forward substitution: row i of the inverse is e_i minus row i of L times the rows above. Some
    rows go together, for their sums over the rows before them do not wait for each other.
    `inverse` is kept transposed, so that these sums run along its lines.
    """
    size = lower.shape[0]
    shape = (size, size)
    column, entry = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    ref[...] = lower
    barrier()
    inverse = jnp.zeros(shape, jnp.float32)
    for first in range(0, size, _TOGETHER):
        found = []
        for step in range(first, first + _TOGETHER):
            # Loaded as a matrix of equal lines: spreading one line would go through shared memory.
            row = pltriton.load(ref.at[jnp.full(shape, step, jnp.int32), entry])
            # e_i joins the sum, exactly: where it is 1, the rows above have nothing but 0.
            unit = jnp.where((column == step) & (entry == 0), 1.0, 0.0)
            found.append(jnp.sum(unit - row * inverse, axis=1))
        for place in range(_TOGETHER):
            for before in range(place):
                found[place] -= ref[first + place, first + before] * found[before]
            rows = spread(found[place], shape, 0)
            inverse = jnp.where(entry == first + place, rows, inverse)
    barrier()  # all have read L before its inverse takes its place
    pltriton.store(ref.at[entry, column], inverse)


def _pairs_kernel(
    *refs,  # those of `_Inputs`, then outputs:
    # float32 [size, size] of `Pairs.matrix` and of `Pairs.weight`, float32 [size] of its scales
    blocks: int,
    interpret: bool,
):
    inputs, (matrix_ref, weight_ref, known_ref, scale_ref) = _Inputs(*refs[:5]), refs[5:]
    size, (nodes, key_dim) = matrix_ref.shape[0], inputs.key.shape
    of_queries, pair = pl.program_id(0) % 2 == 1, pl.program_id(0) // 2
    row_block, column_block = (pair // blocks, pair % blocks) if blocks > 1 else (0, 0)
    start, first = row_block * size, column_block * size

    def invert():
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
        lower = jnp.where(row > column, _lower(inputs, start, first, size), 0.0)
        _invert(matrix_ref, lower, (lambda: None) if interpret else pltriton.debug_barrier)

    def weigh(with_scales):
        queries = load_rows(inputs.query, start, size, nodes)
        keys = load_rows(inputs.key, first, size, nodes)
        product = exact_dot(queries, (keys,), trans_b=True)
        scale, norm = inverse_norm(queries) * key_dim**-0.5, inverse_norm(keys)
        sums = _path_sums(inputs, start, size)
        product = product * spread(scale, product.shape, 0) * spread(norm, product.shape, 1)
        weight_ref[...] = product * _decays(inputs, sums, start, first)

        @pl.when(with_scales)
        def _():
            from_prefix = jnp.exp(sums[0] + sums[1])
            known_ref[...] = load_numbers(inputs.beta, start, size) * norm * from_prefix
            scale_ref[...] = scale * from_prefix

    if blocks == 1:
        pl.when(of_queries)(lambda: weigh(True))
        pl.when(~of_queries)(invert)
        return
    diagonal, below = row_block == column_block, row_block > column_block
    pl.when(~of_queries & diagonal)(invert)
    pl.when(of_queries & (diagonal | below))(lambda: weigh(diagonal))

    @pl.when(~of_queries & below)
    def _():
        matrix_ref[...] = _lower(inputs, start, first, size)


class Pairs(NamedTuple):
    """Of T' nodes, padded to whole leaves. Leaves above the diagonal are never written.

    matrix: L of two leaves below the diagonal, the inverse of I + L on it. weight: D o Q K^T with
    queries and keys normalised. known_scale: what a raw key is multiplied by before it meets the
    prefix's state: beta E / norm; query_scale: E / (norm sqrt(Dk)).
    """

    matrix: jax.Array  # float32 [B, Hv, T', T']
    weight: jax.Array  # float32 [B, Hv, T', T']
    known_scale: jax.Array  # float32 [B, Hv, T']
    query_scale: jax.Array  # float32 [B, Hv, T']


def gdn_pairs(
    query: jax.Array,
    key: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    visible: jax.Array,
    *,
    padded: int,
    num_warps: int,
    interpret: bool,
) -> Pairs:
    """`Pairs` of every head. padded: T', at least T."""
    slots, nodes, key_heads, key_dim = key.shape
    heads = beta.shape[2]
    size = dispatch.divisor(padded, LEAF)
    group, blocks = heads // key_heads, padded // size
    key_rows = pl.BlockSpec((None, nodes, None, key_dim), lambda i, h, b: (b, 0, h // group, 0))
    numbers = pl.BlockSpec((None, nodes, None), lambda i, h, b: (b, 0, h))
    square = pl.BlockSpec(
        (None, None, size, size),
        lambda i, h, b: (b, h, i // (2 * blocks), i // 2 % blocks),
    )
    line = pl.BlockSpec((None, None, size), lambda i, h, b: (b, h, i // (2 * blocks)))
    shape = (slots, heads, padded)
    out = pl.pallas_call(
        functools.partial(_pairs_kernel, blocks=blocks, interpret=interpret),
        grid=(2 * blocks * blocks, heads, slots),
        in_specs=[
            key_rows,
            key_rows,
            numbers,
            numbers,
            pl.BlockSpec((None, nodes, nodes), lambda i, h, b: (b, 0, 0)),
        ],
        out_specs=[square, square, line, line],
        out_shape=[jax.ShapeDtypeStruct((*shape, padded), jnp.float32)] * 2
        + [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2,
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
        name="gdn_pairs",
    )(query, key, log_decay, beta, visible)
    return Pairs(*out)
