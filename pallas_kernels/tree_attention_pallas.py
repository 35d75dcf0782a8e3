"""Pallas GPU kernels of `tree_attention`.

The G query heads of one kv head are folded into rows, row = node * G + head, so that each kv head
is read once a row tile. A program takes one row tile, one kv head and either one share of the
prefix or the tree's own rows, all side by side; a second kernel merges their partial softmaxes.
Keys and values are read where they lie. Only blocks that a slot has rows in are read, and only the
last of them is masked.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.dispatch import dot, spread

_MASKED = -1e30
_LOG2_E = 1.4426950408889634  # exp2 is the hardware's exponential
_MOST_PARTS = 16
_PROGRAMS = 264  # two a multiprocessor of an H100 or H200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut up. Sizes are powers of two; so are the parts, shares + 1."""

    tile_rows: int  # rows (node, head) of a program, at least 16 for the tensor cores
    block_keys: int  # cache rows a step of the loop
    shares: int  # parts of the prefix that run side by side, beside the tree's own
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            parts = size + (field.name == "shares")
            if size < 1 or (field.name != "num_stages" and parts & (parts - 1)):
                expected = (
                    "one below a power of two" if field.name == "shares" else "a power of two"
                )
                raise ValueError(f"`{field.name}` must be {expected}, got {size}")
        if min(self.tile_rows, self.block_keys) < 16:
            raise ValueError(
                "`tile_rows` and `block_keys` must be at least 16, "
                f"got {self.tile_rows} and {self.block_keys}"
            )


def default_config(query: jax.Array, key: jax.Array) -> Config:
    """From shapes alone: about two programs a multiprocessor, tiles that fit.

    Measured on an H200 (scripts/results/kernel_log.md).
    """
    slots, nodes, query_heads, head_dim = query.shape
    cache_rows, kv_heads = key.shape[1:3]
    rows = nodes * query_heads // kv_heads
    # Wide rows take more registers and shared memory: these sizes neither spill nor overflow.
    row_bytes = query.dtype.itemsize * head_dim
    most_rows, block_keys = (64, 64) if row_bytes <= 256 else (32, 32)
    if row_bytes > 512:
        most_rows = 16
    tile_rows = min(most_rows, dispatch.lanes_for(rows))
    most_parts, num_warps, num_stages = _MOST_PARTS, 4, 2
    if nodes == 1:  # keys take all the time: short loops, and more of them on their way
        block_keys, most_parts = 32, 2 * _MOST_PARTS
        num_warps, num_stages = (2 if row_bytes <= 256 else 4), (3 if row_bytes <= 512 else 2)
    programs = dispatch.ceil_div(rows, tile_rows) * kv_heads * slots
    most = min(most_parts, 2 * dispatch.ceil_div(cache_rows, block_keys))
    parts = 2
    while 2 * parts <= most and 2 * parts * programs <= _PROGRAMS:
        parts *= 2
    return Config(
        tile_rows=tile_rows,
        block_keys=block_keys,
        shares=parts - 1,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def unsupported(dtype: jnp.dtype, head_dim: int) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    return dispatch.unsupported_size(dtype, "head dim", head_dim, 256, letter="H")


def _row_index(tile: jax.Array, shape: tuple[int, int], group: int) -> tuple[jax.Array, ...]:
    """Node, head within the group and head dim of each entry of a row tile."""
    row = tile * shape[0] + jax.lax.iota(jnp.int32, shape[0])
    node = spread(jax.lax.div(row, jnp.int32(group)), shape, 0)
    head = spread(jax.lax.rem(row, jnp.int32(group)), shape, 0)
    return node, head, spread(jax.lax.iota(jnp.int32, shape[1]), shape, 1)


def _attention_kernel(
    lengths_ref,  # int32 [1]
    query_ref,  # [T, G, H]
    key_ref,  # [S, H], strided
    value_ref,  # [S, H], strided
    tree_key_ref,  # [T, H], strided
    tree_value_ref,  # [T, H], strided
    visible_ref,  # bool [T, T]
    *refs,  # int32 [T] prefix_start if windowed, then the outputs:
    # float32 [tile_rows, H] sums, [tile_rows] maxima, [tile_rows] totals
    config: Config,
    scale: float,
    windowed: bool,
):
    nodes, group, head_dim = query_ref.shape
    cache_rows = key_ref.shape[0]
    tile = pl.program_id(0)
    share = jax.lax.rem(pl.program_id(1), jnp.int32(config.shares + 1))
    start_ref, out_refs = (refs[0], refs[1:]) if windowed else (None, refs)
    index = _row_index(tile, (config.tile_rows, head_dim), group)
    query = pltriton.load(query_ref.at[index], mask=index[0] < nodes, other=0.0)
    node = jax.lax.div(
        tile * config.tile_rows + jax.lax.iota(jnp.int32, config.tile_rows), jnp.int32(group)
    )
    offset = jax.lax.iota(jnp.int32, config.block_keys)
    kv_shape = (config.block_keys, head_dim)
    score_shape = (config.tile_rows, config.block_keys)
    factor = scale * _LOG2_E

    def attend(state, keys, values, seen):
        """One step of the online softmax, in powers of two; seen None is all."""
        top, total, acc = state
        scores = dot(query, keys, trans_b=True)
        if seen is not None:
            scores = jnp.where(seen, scores, _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        # Scaled behind the difference: a multiply-add would round the greatest score otherwise than
        # its maximum was, in some steps and not in others.
        weight = jnp.exp2((scores - spread(new_top, score_shape, 0)) * factor)
        if seen is not None:
            # Without it a row that has seen nothing yet would give each key weight 1.
            weight = jnp.where(seen, weight, 0.0)
        decay = jnp.exp2((top - new_top) * factor)
        total = total * decay + jnp.sum(weight, axis=1)
        acc = acc * spread(decay, acc.shape, 0)
        return new_top, total, acc + dot(weight.astype(values.dtype), values)

    def load_block(ref, block, bound):
        """Rows of one block, 0 from `bound` on: what lies there may be NaN or out of range."""
        rows = pl.ds(block * config.block_keys, config.block_keys)
        if bound is None:
            return ref[rows, :]
        mask = spread(block * config.block_keys + offset < bound, kv_shape, 0)
        return pltriton.load(ref.at[rows, :], mask=mask, other=0.0)

    length = jnp.clip(lengths_ref[0], 0, cache_rows)
    first_block = jnp.int32(0)
    if windowed:
        start = pltriton.load(start_ref.at[node], mask=node < nodes, other=cache_rows)
        first_block = jax.lax.div(jnp.maximum(jnp.min(start), 0), jnp.int32(config.block_keys))

    def prefix_step(block, state, masked):
        position = block * config.block_keys + offset
        seen = spread(position < length, score_shape, 1) if masked else None
        if windowed:
            near = spread(position, score_shape, 1) >= spread(start, score_shape, 0)
            seen = near if seen is None else seen & near
        bound = length if masked else None
        keys, values = load_block(key_ref, block, bound), load_block(value_ref, block, bound)
        return attend(state, keys, values, seen)

    def tree_step(block, state):
        other = block * config.block_keys + offset
        row, column = spread(node, score_shape, 0), spread(other, score_shape, 1)
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
    blocks, full = pl.cdiv(length, config.block_keys), length // config.block_keys
    per_share = pl.cdiv(jnp.maximum(blocks - first_block, 0), config.shares)
    begin = first_block + share * per_share
    end = jnp.minimum(begin + per_share, blocks)
    own = share == config.shares
    full_end = jnp.where(own, begin, jnp.minimum(end, full))
    if cache_rows >= config.block_keys:  # else there is no full block to trace
        state = jax.lax.fori_loop(
            begin, full_end, lambda block, state: prefix_step(block, state, False), state
        )
    # The one block that the length ends in belongs to the share that reaches it.
    tail_end = jnp.where(~own & (begin < end) & (end > full), full + 1, full)
    state = jax.lax.fori_loop(
        full, tail_end, lambda block, state: prefix_step(block, state, True), state
    )
    tree_blocks = jnp.int32(dispatch.ceil_div(nodes, config.block_keys))
    tree_end = jnp.where(own, tree_blocks, jnp.int32(0))
    top, total, acc = jax.lax.fori_loop(jnp.int32(0), tree_end, tree_step, state)
    acc_ref, top_ref, total_ref = out_refs
    acc_ref[...] = acc
    top_ref[...] = top * factor
    total_ref[...] = total


def merge_kernel(
    acc_ref,  # float32 [parts, merge_rows, H]
    top_ref,  # float32 [parts, merge_rows]
    total_ref,  # float32 [parts, merge_rows]
    out_ref,  # [T, G, H], out
):
    """Adds up partial softmaxes, each relative to its own maximum `top`."""
    # Whole arrays: all loads are in flight at once.
    acc, top = acc_ref[...], top_ref[...]
    shape, per_part = acc.shape[1:], acc.shape[:2]
    weight = jnp.exp2(top - jax.lax.broadcast_in_dim(jnp.max(top, axis=0), per_part, (1,)))
    total = jnp.sum(weight * total_ref[...], axis=0)
    acc = jnp.sum(acc * jax.lax.broadcast_in_dim(weight, acc.shape, (0, 1)), axis=0)
    # A row that saw nothing has total 0 and gives 0.
    rows = acc / spread(jnp.where(total > 0.0, total, 1.0), shape, 0)
    index = _row_index(pl.program_id(0), shape, out_ref.shape[1])
    pltriton.store(out_ref.at[index], rows.astype(out_ref.dtype), mask=index[0] < out_ref.shape[0])


def _head_rows(nodes: int, group: int, head_dim: int, parts: int) -> pl.BlockSpec:
    """[T, G, H] of one slot and kv head, of an array [B, T, K, G, H]."""
    return pl.BlockSpec(
        (None, nodes, None, group, head_dim), lambda i, j, b: (b, 0, j // parts, 0, 0)
    )


@dispatch.lowered_once
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
    parts = config.shares + 1

    def key_rows(rows: int) -> pl.BlockSpec:
        """[rows, H] of one slot and kv head."""
        return pl.BlockSpec((None, rows, None, head_dim), lambda i, j, b: (b, 0, j // parts, 0))

    inputs = [
        (lengths, pl.BlockSpec((1,), lambda i, j, b: (b,))),
        (
            query.reshape(slots, nodes, kv_heads, group, head_dim),
            _head_rows(nodes, group, head_dim, parts),
        ),
        (key, key_rows(cache_rows)),
        (value, key_rows(cache_rows)),
        (tree_key, key_rows(nodes)),
        (tree_value, key_rows(nodes)),
        (visible, pl.BlockSpec((None, nodes, nodes), lambda i, j, b: (b, 0, 0))),
    ]
    if prefix_start is not None:
        inputs.append((prefix_start, pl.BlockSpec((None, nodes), lambda i, j, b: (b, 0))))
    tiles = dispatch.ceil_div(nodes * group, config.tile_rows)
    out_specs, out_shapes = _partial_outputs(slots, kv_heads, tiles, head_dim, config)
    partial = pl.pallas_call(
        functools.partial(
            _attention_kernel, config=config, scale=scale, windowed=prefix_start is not None
        ),
        # Row tiles fastest, so that programs that read the same keys run side by side.
        grid=(tiles, kv_heads * parts, slots),
        in_specs=[spec for _, spec in inputs],
        out_specs=out_specs,
        out_shape=out_shapes,
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="tree_attention",
    )(*(array for array, _ in inputs))
    out_shape = jax.ShapeDtypeStruct(inputs[1][0].shape, query.dtype)
    return _merge(partial, out_shape, parts, interpret).reshape(query.shape)


def _partial_outputs(
    slots: int, kv_heads: int, tiles: int, head_dim: int, config: Config
) -> tuple[list[pl.BlockSpec], list[jax.ShapeDtypeStruct]]:
    """Specs and shapes of acc, top, total: [B, K * parts, rows(, H)], rows padded to tiles."""
    per_row = (slots, kv_heads * (config.shares + 1), tiles * config.tile_rows)
    scalars = pl.BlockSpec((None, None, config.tile_rows), lambda i, j, b: (b, j, i))
    acc = pl.BlockSpec((None, None, config.tile_rows, head_dim), lambda i, j, b: (b, j, i, 0))
    shapes = [(*per_row, head_dim), per_row, per_row]
    return [acc, scalars, scalars], [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]


def _merge(
    partial: list[jax.Array] | tuple[jax.Array, ...],
    out_shape: jax.ShapeDtypeStruct,
    parts: int,
    interpret: bool,
) -> jax.Array:
    """[B, T, K, G, H] from the partial softmaxes of all parts. Many small programs: it only
    moves bytes."""
    slots, nodes, kv_heads, group, head_dim = out_shape.shape
    rows = 8 if nodes > 1 else 1
    # One block of `parts` along the second axis holds the parts of one kv head.
    block = (None, parts, rows)
    per_row = pl.BlockSpec(block, lambda i, k, b: (b, k, i))
    return pl.pallas_call(
        merge_kernel,
        grid=(dispatch.ceil_div(nodes * group, rows), kv_heads, slots),
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
