"""Pallas GPU kernels of `tree_attention`.

The G query heads of one kv head are folded into rows, row = node * G + head, so that each kv head
is read once a row tile. A program takes one row tile, one kv head and one share of the prefix;
the last share takes the tree's own rows as well. If there are several shares, a second kernel
merges their partial softmaxes. Keys and values are read where they lie.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch

_MASKED = -1e30
_MAX_SHARES = 16
_TARGET_PROGRAMS = 264  # two a multiprocessor of an H100 or H200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut up. Sizes are powers of two."""

    tile_rows: int  # rows (node, head) of a program, at least 16 for the tensor cores
    block_keys: int  # cache rows a step of the loop
    shares: int  # parts of the prefix that run side by side
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size < 1 or (field.name != "num_stages" and size & (size - 1)):
                raise ValueError(f"`{field.name}` must be a power of two, got {size}")
        if min(self.tile_rows, self.block_keys) < 16:
            raise ValueError(
                "`tile_rows` and `block_keys` must be at least 16, "
                f"got {self.tile_rows} and {self.block_keys}"
            )


def default_config(query: jax.Array, key: jax.Array) -> Config:
    """A sound choice from shapes alone: enough programs to fill the GPU, tiles that fit."""
    slots, nodes, query_heads, head_dim = query.shape
    cache_rows, kv_heads = key.shape[1:3]
    rows = nodes * query_heads // kv_heads
    # Wide rows take more registers and shared memory: these sizes neither spill nor overflow.
    row_bytes = query.dtype.itemsize * head_dim
    most_rows, block_keys = (64, 64) if row_bytes <= 256 else (32, 32)
    if row_bytes > 512:
        most_rows = 16
    tile_rows = min(most_rows, dispatch.lanes_for(rows))
    programs = dispatch.ceil_div(rows, tile_rows) * kv_heads * slots
    most = min(_MAX_SHARES, dispatch.ceil_div(cache_rows, block_keys))
    shares = 1
    while 2 * shares <= most and 2 * shares * programs <= _TARGET_PROGRAMS:
        shares *= 2
    return Config(tile_rows=tile_rows, block_keys=block_keys, shares=shares)


def unsupported(dtype: jnp.dtype, head_dim: int) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32, got {jnp.dtype(dtype).name}"
    if not 16 <= head_dim <= 256 or head_dim & (head_dim - 1):
        return f"the head dim must be a power of two from 16 to 256, got H={head_dim}"
    return None


def _spread(vector: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """A vector along `axis` of a matrix; interpret mode wants indices and masks in full shape."""
    return jax.lax.broadcast_in_dim(vector, shape, (axis,))


def _dot(left: jax.Array, right: jax.Array, **transposed: bool) -> jax.Array:
    """Matrix product with a float32 result; float32 inputs are not rounded to TF32."""
    exact = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return pltriton.dot(left, right, precision=exact, **transposed)


def _row_index(tile: jax.Array, shape: tuple[int, int], group: int) -> tuple[jax.Array, ...]:
    """Node, head within the group and head dim of each entry of a row tile."""
    row = tile * shape[0] + jax.lax.iota(jnp.int32, shape[0])
    node = _spread(jax.lax.div(row, jnp.int32(group)), shape, 0)
    head = _spread(jax.lax.rem(row, jnp.int32(group)), shape, 0)
    return node, head, _spread(jax.lax.iota(jnp.int32, shape[1]), shape, 1)


def _store_rows(out_ref, index: tuple[jax.Array, ...], acc: jax.Array, total: jax.Array) -> None:
    """Writes acc / total to out_ref [T, G, H]; a row that saw nothing has total 0 and gives 0."""
    rows = acc / _spread(jnp.where(total > 0.0, total, 1.0), acc.shape, 0)
    pltriton.store(out_ref.at[index], rows.astype(out_ref.dtype), mask=index[0] < out_ref.shape[0])


def _attention_kernel(
    lengths_ref,  # int32 [1]
    query_ref,  # [T, G, H]
    key_ref,  # [S, H], strided
    value_ref,  # [S, H], strided
    tree_key_ref,  # [T, H], strided
    tree_value_ref,  # [T, H], strided
    visible_ref,  # bool [T, T]
    *refs,  # int32 [T] prefix_start if windowed; then the outputs, see below
    config: Config,
    scale: float,
    windowed: bool,
):
    nodes, group, head_dim = query_ref.shape
    cache_rows = key_ref.shape[0]
    tile, share = pl.program_id(0), jax.lax.rem(pl.program_id(1), jnp.int32(config.shares))
    start_ref, out_refs = (refs[0], refs[1:]) if windowed else (None, refs)
    index = _row_index(tile, (config.tile_rows, head_dim), group)
    query = pltriton.load(query_ref.at[index], mask=index[0] < nodes, other=0.0)
    node = jax.lax.div(
        tile * config.tile_rows + jax.lax.iota(jnp.int32, config.tile_rows), jnp.int32(group)
    )
    offset = jax.lax.iota(jnp.int32, config.block_keys)
    kv_shape = (config.block_keys, head_dim)
    score_shape = (config.tile_rows, config.block_keys)

    def attend(state, keys, values, seen):
        """One step of the online softmax over a block of keys."""
        top, total, acc = state
        scores = jnp.where(seen, _dot(query, keys, trans_b=True) * scale, _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        # Without the second mask a row that has seen nothing yet would give each key weight 1.
        weight = jnp.where(seen, jnp.exp(scores - _spread(new_top, score_shape, 0)), 0.0)
        decay = jnp.exp(top - new_top)
        total = total * decay + jnp.sum(weight, axis=1)
        acc = acc * _spread(decay, acc.shape, 0)
        return new_top, total, acc + _dot(weight.astype(values.dtype), values)

    def load_block(ref, block, bound):
        """Rows of one block, 0 from `bound` on: what lies there may be NaN or out of range."""
        mask = _spread(block * config.block_keys + offset < bound, kv_shape, 0)
        rows = pl.ds(block * config.block_keys, config.block_keys)
        return pltriton.load(ref.at[rows, :], mask=mask, other=0.0)

    length = jnp.clip(lengths_ref[0], 0, cache_rows)
    first_block = jnp.int32(0)
    if windowed:
        start = pltriton.load(start_ref.at[node], mask=node < nodes, other=cache_rows)
        first_block = jax.lax.div(jnp.maximum(jnp.min(start), 0), jnp.int32(config.block_keys))

    def prefix_step(block, state):
        position = block * config.block_keys + offset
        seen = _spread(position < length, score_shape, 1)
        if windowed:
            seen = seen & (_spread(position, score_shape, 1) >= _spread(start, score_shape, 0))
        keys, values = load_block(key_ref, block, length), load_block(value_ref, block, length)
        return attend(state, keys, values, seen)

    def tree_step(block, state):
        other = block * config.block_keys + offset
        row, column = _spread(node, score_shape, 0), _spread(other, score_shape, 1)
        inside = (row < nodes) & (column < nodes)
        seen = pltriton.load(visible_ref.at[row, column], mask=inside, other=False)
        keys = load_block(tree_key_ref, block, nodes)
        return attend(state, keys, load_block(tree_value_ref, block, nodes), seen)

    state = (
        jnp.full((config.tile_rows,), _MASKED, jnp.float32),
        jnp.zeros((config.tile_rows,), jnp.float32),
        jnp.zeros((config.tile_rows, head_dim), jnp.float32),
    )
    # Shares divide the blocks in use, not the cache, so that all have work at any length.
    blocks = pl.cdiv(length, config.block_keys)
    per_share = pl.cdiv(jnp.maximum(blocks - first_block, 0), config.shares)
    begin = first_block + share * per_share
    end = jnp.minimum(begin + per_share, blocks)
    state = jax.lax.fori_loop(begin, end, prefix_step, state)
    tree_blocks = jnp.int32(dispatch.ceil_div(nodes, config.block_keys))
    tree_end = jnp.where(share == config.shares - 1, tree_blocks, jnp.int32(0))
    top, total, acc = jax.lax.fori_loop(jnp.int32(0), tree_end, tree_step, state)

    if config.shares == 1:
        (out_ref,) = out_refs  # [T, G, H]
        _store_rows(out_ref, index, acc, total)
    else:
        acc_ref, top_ref, total_ref = out_refs  # float32 [tile_rows, H], [tile_rows] twice
        acc_ref[...] = acc
        top_ref[...] = top
        total_ref[...] = total


def _merge_kernel(
    acc_ref,  # float32 [shares, tile_rows, H]
    top_ref,  # float32 [shares, tile_rows]
    total_ref,  # float32 [shares, tile_rows]
    out_ref,  # [T, G, H], out
):
    """Adds up partial softmaxes, each relative to its own maximum `top`."""
    shares, tile_rows, head_dim = acc_ref.shape
    top = top_ref[0]
    for share in range(1, shares):
        top = jnp.maximum(top, top_ref[share])
    total = jnp.zeros((tile_rows,), jnp.float32)
    acc = jnp.zeros((tile_rows, head_dim), jnp.float32)
    for share in range(shares):
        weight = jnp.exp(top_ref[share] - top)
        total = total + weight * total_ref[share]
        acc = acc + _spread(weight, acc.shape, 0) * acc_ref[share]
    _store_rows(out_ref, _row_index(pl.program_id(0), acc.shape, out_ref.shape[1]), acc, total)


def _head_rows(nodes: int, group: int, head_dim: int, shares: int) -> pl.BlockSpec:
    """[T, G, H] of one slot and kv head, of an array [B, T, K, G, H]."""
    return pl.BlockSpec(
        (None, nodes, None, group, head_dim), lambda i, j, b: (b, 0, j // shares, 0, 0)
    )


def tree_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    tree_key: jax.Array,
    tree_value: jax.Array,
    lengths: jax.Array,
    visible: jax.Array,
    prefix_start: jax.Array | None,
    *,
    scale: float,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """[B, T, N, H] as `tree_attention.definition` gives it, weights rounded to value's dtype."""
    config = default_config(query, key) if config is None else config
    slots, nodes, query_heads, head_dim = query.shape
    cache_rows, kv_heads = key.shape[1:3]
    group = query_heads // kv_heads
    shares = config.shares

    def key_rows(rows: int) -> pl.BlockSpec:
        """[rows, H] of one slot and kv head."""
        return pl.BlockSpec((None, rows, None, head_dim), lambda i, j, b: (b, 0, j // shares, 0))

    head_rows = _head_rows(nodes, group, head_dim, shares)
    inputs = [
        (lengths, pl.BlockSpec((1,), lambda i, j, b: (b,))),
        (query.reshape(slots, nodes, kv_heads, group, head_dim), head_rows),
        (key, key_rows(cache_rows)),
        (value, key_rows(cache_rows)),
        (tree_key, key_rows(nodes)),
        (tree_value, key_rows(nodes)),
        (visible, pl.BlockSpec((None, nodes, nodes), lambda i, j, b: (b, 0, 0))),
    ]
    if prefix_start is not None:
        inputs.append((prefix_start, pl.BlockSpec((None, nodes), lambda i, j, b: (b, 0))))
    out_shape = jax.ShapeDtypeStruct(inputs[1][0].shape, query.dtype)
    tiles = dispatch.ceil_div(nodes * group, config.tile_rows)
    out_specs, out_shapes = head_rows, out_shape
    if shares > 1:
        out_specs, out_shapes = _partial_outputs(slots, kv_heads, tiles, head_dim, config)
    out = pl.pallas_call(
        functools.partial(
            _attention_kernel, config=config, scale=scale, windowed=prefix_start is not None
        ),
        # Row tiles fastest, so that programs that read the same keys run side by side.
        grid=(tiles, kv_heads * shares, slots),
        in_specs=[spec for _, spec in inputs],
        out_specs=out_specs,
        out_shape=out_shapes,
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="tree_attention",
    )(*(array for array, _ in inputs))
    if shares > 1:
        out = _merge(out, out_shape, config, tiles, interpret)
    return out.reshape(query.shape)


def _partial_outputs(
    slots: int, kv_heads: int, tiles: int, head_dim: int, config: Config
) -> tuple[list[pl.BlockSpec], list[jax.ShapeDtypeStruct]]:
    """Specs and shapes of acc, top, total: [B, K * shares, rows(, H)], rows padded to tiles."""
    per_row = (slots, kv_heads * config.shares, tiles * config.tile_rows)
    scalars = pl.BlockSpec((None, None, config.tile_rows), lambda i, j, b: (b, j, i))
    acc = pl.BlockSpec((None, None, config.tile_rows, head_dim), lambda i, j, b: (b, j, i, 0))
    shapes = [(*per_row, head_dim), per_row, per_row]
    return [acc, scalars, scalars], [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]


def _merge(
    partial: list[jax.Array] | tuple[jax.Array, ...],
    out_shape: jax.ShapeDtypeStruct,
    config: Config,
    tiles: int,
    interpret: bool,
) -> jax.Array:
    """[B, T, K, G, H] from the partial softmaxes of all shares."""
    slots, nodes, kv_heads, group, head_dim = out_shape.shape
    # One block of `shares` along the second axis holds the shares of one kv head.
    block = (None, config.shares, config.tile_rows)
    per_row = pl.BlockSpec(block, lambda i, k, b: (b, k, i))
    return pl.pallas_call(
        _merge_kernel,
        grid=(tiles, kv_heads, slots),
        in_specs=[
            pl.BlockSpec((*block, head_dim), lambda i, k, b: (b, k, i, 0)),
            per_row,
            per_row,
        ],
        out_specs=_head_rows(nodes, group, head_dim, 1),
        out_shape=out_shape,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="tree_attention_merge",
    )(*partial)
