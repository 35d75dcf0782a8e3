"""Mosaic GPU kernel of `tree_attention` for Hopper: TMA, WGMMA, warpgroups that share keys.

A block takes one tile of rows (node, head) of one kv head and one share of the keys: the cached
prefix and, behind it, the tree's own rows (`tree_attention_mosaic_body`). Shares are merged by the
merge kernel of `tree_attention_pallas`.

Rows of a warpgroup are head * box + node, box nodes a head: then queries are read and results
written where they lie, as boxes of consecutive nodes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, tree_attention_pallas
from pallas_kernels.tree_attention_mosaic_body import (
    GRID,
    GROUP_ROWS,
    JAX_0_10,
    WORD_BITS,
    Config,
    attention_kernel,
    box_nodes,
    scratch,
)

_MOST_PARTS = 16
_BLOCKS = 132  # one a multiprocessor of an H100 or H200
_SHARED_BYTES = 225 * 1024  # of 227, without barriers
_HEAD_DIMS = (128, 256)


def default_config(query: jax.Array, key: jax.Array) -> Config:
    """From shapes alone: one block a multiprocessor if the keys give that many shares.

    Measured on an H200 (scripts/results/kernel_log.md).
    """
    slots, nodes, query_heads, head_dim = query.shape
    cache_rows, kv_heads = key.shape[1:3]
    group_nodes, wide = box_nodes(query_heads // kv_heads), head_dim > 128

    def blocks_for(warpgroups: int) -> int:
        return dispatch.ceil_div(nodes, group_nodes * warpgroups) * kv_heads * slots

    warpgroups = min(2, dispatch.ceil_div(nodes, group_nodes))
    if wide and 2 * blocks_for(2) <= _BLOCKS:
        # Shared memory holds wide heads of two and their keys, but not their partial sums too.
        warpgroups = 1
    blocks = blocks_for(warpgroups)
    most = min(_MOST_PARTS, dispatch.ceil_div(cache_rows + nodes, 64))
    parts = 1
    while 2 * parts <= most and 2 * parts * blocks <= _BLOCKS:
        parts *= 2
    # Few parts are long loops, and those gain by fewer, larger steps.
    block_keys = 128 if warpgroups == 2 and parts <= 4 and not wide else 64
    tile_bytes = warpgroups * GROUP_ROWS * head_dim * (2 if parts == 1 else 6)
    stages = (_SHARED_BYTES - tile_bytes) // (block_keys * head_dim * 2 * 2)
    return Config(warpgroups=warpgroups, block_keys=block_keys, stages=min(stages, 4), parts=parts)


def unsupported(
    dtype: jnp.dtype, head_dim: int, group: int, windowed: bool, cache_rows: int
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if dtype != jnp.bfloat16:
        return f"it takes bfloat16, got {jnp.dtype(dtype).name}"
    if head_dim not in _HEAD_DIMS:
        return f"the head dim must be one of {_HEAD_DIMS}, got H={head_dim}"
    if group > 8:
        return f"at most 8 query heads may share a kv head, got {group}"
    if windowed:
        return "it has no `prefix_start`"
    if cache_rows % 8:
        return f"cache rows must be a multiple of 8, got S={cache_rows}"
    return None


def _visible_words(visible: jax.Array, units: int, group: int, block_keys: int) -> jax.Array:
    """[B, T, T] as bits: int32 [B, words, units, 64], bit i of word w for node 32 w + i, in the
    warpgroups' order of rows. The same in every layer: XLA computes it once."""
    slots, nodes, _ = visible.shape
    box = box_nodes(group)
    columns = dispatch.ceil_div(nodes, block_keys) * block_keys
    visible = jnp.pad(visible, ((0, 0), (0, units * box - nodes), (0, columns - nodes)))
    bits = visible.reshape(slots, units, box, columns // WORD_BITS, WORD_BITS)
    value = jnp.uint32(1) << jnp.arange(WORD_BITS, dtype=jnp.uint32)
    words = jnp.sum(jnp.where(bits, value, jnp.uint32(0)), axis=4, dtype=jnp.uint32)
    words = jax.lax.bitcast_convert_type(words, jnp.int32).transpose(0, 3, 1, 2)
    words = jnp.broadcast_to(words[:, :, :, None], (*words.shape[:3], group, box))
    words = words.reshape(*words.shape[:3], group * box)
    return jnp.pad(words, ((0, 0), (0, 0), (0, 0), (0, GROUP_ROWS - group * box)))


@dispatch.lowered_once
def tree_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    tree_key: jax.Array,
    tree_value: jax.Array,
    lengths: jax.Array,
    visible: jax.Array,
    prefix_start: None = None,
    *,
    scale: float,
    interpret: bool,
    config: Config | None = None,
) -> jax.Array:
    """[B, T, N, H] as `tree_attention.definition` gives it, weights rounded to bfloat16."""
    config = default_config(query, key) if config is None else config
    group = query.shape[2] // key.shape[2]
    arrays = (query, key, value, tree_key, tree_value)
    outputs = _attend(*arrays, lengths, visible, config, scale, interpret)
    out = jax.ShapeDtypeStruct(query.shape, query.dtype)
    if config.parts == 1:
        return outputs[0][:, : query.shape[1]]
    return _merge(outputs, out, group, interpret)


def _pad_rows(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple), (0, 0), (0, 0)))


def _attend(query, key, value, tree_key, tree_value, lengths, visible, config, scale, interpret):
    """The outputs of attention_kernel: results if there is one part, else partial softmaxes."""
    slots, nodes, query_heads, head_dim = query.shape
    kv_heads = key.shape[2]
    group = query_heads // kv_heads
    unit_nodes = box_nodes(group)
    tiles = dispatch.ceil_div(nodes, unit_nodes * config.warpgroups)
    units = tiles * config.warpgroups
    words = _visible_words(visible, units, group, config.block_keys)
    if interpret and JAX_0_10:  # which does not simulate what TMA does past an array's end
        key, value = (_pad_rows(x, config.block_keys) for x in (key, value))
        tree_key, tree_value = (_pad_rows(x, config.block_keys) for x in (tree_key, tree_value))
        query = _pad_rows(query, units * unit_nodes)
    elif nodes > 8:  # tiles of 8 rows
        query, tree_key, tree_value = (_pad_rows(x, 8) for x in (query, tree_key, tree_value))
    if config.parts == 1:
        out_types = [jax.ShapeDtypeStruct(query.shape, query.dtype)]
    else:
        rows = dispatch.ceil_div(query.shape[1], 8) * 8
        sums = (slots, query_heads, config.parts, rows, head_dim)
        per_row = (slots, kv_heads, config.parts, units, GROUP_ROWS)
        out_types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (sums, per_row, per_row)]
    return plgpu.kernel(
        functools.partial(attention_kernel, config=config, scale=scale, interpret=interpret),
        out_type=out_types,
        scratch_types=scratch(head_dim, group, config),
        grid=(tiles, kv_heads, config.parts, slots),
        grid_names=GRID,
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="tree_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=_interpret_params() if interpret else None,
    )(lengths, query, key, value, tree_key, tree_value, words)


def _interpret_params():
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=True)


def _merge(partial, out_shape, group: int, interpret: bool) -> jax.Array:
    """Adds up the partial softmaxes: 8 nodes of one head a program."""
    sums, top, total = partial
    slots, nodes, query_heads, head_dim = out_shape.shape
    parts, rows, box = sums.shape[2], 8, box_nodes(group)
    per_row = pl.BlockSpec(
        (None, None, parts, None, rows),
        lambda i, h, b: (
            b,
            h // group,
            0,
            i * rows // box,
            (h % group * box + i * rows % box) // rows,
        ),
    )
    out = jax.ShapeDtypeStruct((slots, nodes, query_heads, 1, head_dim), out_shape.dtype)
    merged = pl.pallas_call(
        tree_attention_pallas.merge_kernel,
        grid=(dispatch.ceil_div(nodes, rows), query_heads, slots),
        in_specs=[
            pl.BlockSpec((None, None, parts, rows, head_dim), lambda i, h, b: (b, h, 0, i, 0)),
            per_row,
            per_row,
        ],
        out_specs=pl.BlockSpec((None, nodes, None, 1, head_dim), lambda i, h, b: (b, 0, h, 0, 0)),
        out_shape=out,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="tree_attention_merge",
    )(sums, top, total)
    return merged.reshape(out_shape.shape)
