"""The body of Mosaic's `tree_attention` kernel for Hopper, and what it is cut into.

One warpgroup keeps keys and values coming through a ring of shared memory; the others take 64 rows
each and run the online softmax in registers, each at its own pace, so that one's exponentials
overlap another's products. `interpret` replaces what interpret mode does not simulate.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

_LEAST = -1e30  # finite, so that a row with nothing visible gives no NaN
_LOG2_E = 1.4426950408889634  # exp2 is the hardware's exponential
GROUP_ROWS = 64  # rows of a warpgroup: M of a WGMMA
WORD_BITS = 32
JAX_0_10 = jax.__version_info__ < (0, 11)
GRID = ("tile", "head", "part", "slot")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut up."""

    warpgroups: int  # that compute, of 64 rows each; one more moves data
    block_keys: int  # keys a step: 64 or 128
    stages: int  # blocks of keys, and of values, in shared memory
    parts: int  # shares of the keys that run side by side, a power of two

    def __post_init__(self) -> None:
        if not 1 <= self.warpgroups <= 3:
            raise ValueError(f"`warpgroups` must be 1, 2 or 3, got {self.warpgroups}")
        if self.block_keys not in (64, 128):
            raise ValueError(f"`block_keys` must be 64 or 128, got {self.block_keys}")
        if self.stages < 1:
            raise ValueError(f"`stages` must be at least 1, got {self.stages}")
        if self.parts < 1 or self.parts & (self.parts - 1):
            raise ValueError(f"`parts` must be a power of two, got {self.parts}")


def box_nodes(group: int) -> int:
    """Nodes of a warpgroup: as many as give it at most 64 rows; shared memory tiles are of 8."""
    return GROUP_ROWS // group // 8 * 8


def _cast(x: jax.Array, layout, interpret: bool) -> jax.Array:
    return x if interpret else plgpu.layout_cast(x, layout)


def _iota(shape: tuple[int, int], axis: int, interpret: bool) -> jax.Array:
    if interpret:
        return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def _load(ref, layout, interpret: bool) -> jax.Array:
    """A whole ref of global memory."""
    if interpret:
        return ref[...]
    index = ((),) if JAX_0_10 else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def _times_keys(query_ref, key_ref, interpret: bool) -> jax.Array:
    """Scores of a block, query @ key.T."""
    if interpret:
        scores = jnp.dot(query_ref[...], key_ref[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # unlike WGMMA, plain reads are not ordered before the next TMA
        return scores

    def product(scores_ref):
        transposed = plgpu.transpose_ref if JAX_0_10 else lambda ref, axes: ref.transpose(axes)
        plgpu.wgmma(scores_ref, query_ref, transposed(key_ref, (1, 0)))
        return scores_ref[...]

    shape = (query_ref.shape[0], key_ref.shape[0])
    return pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))


def _add_values(acc: jax.Array, weight: jax.Array, value_ref, interpret: bool) -> jax.Array:
    """acc + weight @ value, weight in registers."""
    if interpret:
        acc = acc + jnp.dot(weight, value_ref[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return acc
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weight, value_ref))(
        plgpu.ACC.init(acc)
    )


def _spread(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return jax.lax.broadcast_in_dim(vector, shape, (0,))


def attention_kernel(
    lengths_ref,  # int32 [B]
    query_ref,  # [B, T, N, H]
    key_ref,  # [B, S, K, H]
    value_ref,  # [B, S, K, H]
    tree_key_ref,  # [B, T, K, H]
    tree_value_ref,  # [B, T, K, H]
    words_ref,  # int32 [B, words, tiles * warpgroups, 64], see _visible_words
    *refs,  # outputs: [B, T, N, H], or of each part float32 [B, N, parts, T, H] sums and
    # [B, K, parts, tiles * warpgroups, 64] maxima and totals; then what scratch lists
    config: Config,
    scale: float,
    interpret: bool,
):
    """One part of the keys for one tile of nodes: a warpgroup brings them, the others attend."""
    merged = config.parts == 1
    out_refs, refs = (refs[:1], refs[1:]) if merged else (refs[:3], refs[3:])
    query_smem, key_smem, value_smem, sums_smem, *barriers = refs
    query_full, tail_full, key_full, value_full, key_free, value_free = barriers
    query_heads, head_dim = query_ref.shape[2:]
    cache_rows, kv_heads = key_ref.shape[1:3]
    group = query_heads // kv_heads
    box, block_keys = box_nodes(group), config.block_keys
    tile, head, part, slot = (jax.lax.axis_index(name) for name in GRID)
    warpgroup = jax.lax.axis_index("warpgroup")
    producer = config.warpgroups

    def boxes(unit):
        """Of one warpgroup, for each head: its rows in shared memory and its nodes."""
        first = (tile * config.warpgroups + unit) * box
        for member in range(group):
            yield pl.ds(member * box, box), pl.ds(first, box), head * group + member

    @pl.when(warpgroup == producer)
    def _start():
        if config.warpgroups > 1:
            plgpu.set_max_registers(40, action="decrease")
        for unit in range(config.warpgroups):
            for rows, near, query_head in boxes(unit):
                plgpu.copy_gmem_to_smem(
                    query_ref.at[slot, near, query_head],
                    query_smem.at[unit, rows],
                    query_full.at[unit],
                )

    # Parts divide the blocks in use, the tree's among them, so that all have work at any length.
    length = jnp.clip(lengths_ref[slot], 0, cache_rows)
    prefix_blocks = jax.lax.div(length + (block_keys - 1), jnp.int32(block_keys))
    full_blocks = jax.lax.div(length, jnp.int32(block_keys))
    blocks = prefix_blocks + words_ref.shape[1] * WORD_BITS // block_keys
    begin = jax.lax.div(part * blocks, jnp.int32(config.parts))
    end = jax.lax.div((part + 1) * blocks, jnp.int32(config.parts))

    @pl.when(warpgroup == producer)
    def _produce():
        def copy(block, refs, smem, barrier):
            """Rows past the end of an array arrive as 0."""
            prefix_ref, tree_ref = refs

            def start(ref, first):
                plgpu.copy_gmem_to_smem(ref.at[slot, pl.ds(first, block_keys), head], smem, barrier)

            pl.when(block < prefix_blocks)(lambda: start(prefix_ref, block * block_keys))
            first = (block - prefix_blocks) * block_keys
            pl.when(block >= prefix_blocks)(lambda: start(tree_ref, first))

        def step(block, _):
            stage = jax.lax.rem(block - begin, jnp.int32(config.stages))
            reused = block - begin >= config.stages
            pl.when(reused)(lambda: plgpu.barrier_wait(key_free.at[stage]))
            keys = (key_ref, tree_key_ref)
            copy(block, keys, key_smem.at[stage], key_full.at[stage])
            pl.when(reused)(lambda: plgpu.barrier_wait(value_free.at[stage]))
            values, smem = (value_ref, tree_value_ref), value_smem.at[stage]
            partial = (block >= full_blocks) & (block < prefix_blocks)

            @pl.when(~partial)
            def _():
                copy(block, values, smem, value_full.at[stage])

            @pl.when(partial)
            def _():
                # What lies behind the length may be NaN, which survives a weight of 0.
                copy(block, values, smem, tail_full)
                plgpu.barrier_wait(tail_full)
                for first in range(0, block_keys, 64):
                    for column in range(0, head_dim, 64):
                        part_smem = smem.at[pl.ds(first, 64), pl.ds(column, 64)]
                        row = first + _iota((64, 64), 0, interpret)
                        used = row < length - block * block_keys
                        part = part_smem[...]
                        part_smem[...] = jnp.where(used, part, jnp.zeros_like(part))
                plgpu.commit_smem()
                plgpu.barrier_arrive(value_full.at[stage])

        jax.lax.fori_loop(begin, end, step, None)

        def drain(block, _):
            stage = jax.lax.rem(block - begin, jnp.int32(config.stages))
            plgpu.barrier_wait(key_free.at[stage])
            plgpu.barrier_wait(value_free.at[stage])

        # No barrier is left with a phase that nobody waited for.
        jax.lax.fori_loop(jnp.maximum(begin, end - config.stages), end, drain, None)

    @pl.when(warpgroup < producer)
    def _attend():
        if config.warpgroups > 1:  # what the producer gave up
            plgpu.set_max_registers(232 if config.warpgroups == 2 else 152, action="increase")
        scores_shape = (GROUP_ROWS, block_keys)
        row_layout = plgpu.Layout.WGMMA.reduce(1)
        unit = tile * config.warpgroups + warpgroup
        column = _iota(scores_shape, 1, interpret)

        def mask_tail(scores, block):
            return jnp.where(column < length - block * block_keys, scores, -jnp.inf)

        def mask_tree(scores, block):
            count = block_keys // WORD_BITS
            first = (block - prefix_blocks) * count
            word = None
            for i in range(count):
                row_word = _load(words_ref.at[slot, first + i, unit], row_layout, interpret)
                spread = _spread(row_word, scores_shape)
                word = spread if word is None else jnp.where(column < i * WORD_BITS, word, spread)
            bit = jax.lax.shift_right_logical(word, column & (WORD_BITS - 1)) & 1
            return jnp.where(bit == 1, scores, -jnp.inf)

        def mask(scores, block):
            return jax.lax.cond(block < prefix_blocks, mask_tail, mask_tree, scores, block)

        def step(block, state):
            """One step of the online softmax, in powers of two."""
            acc, top, total = state
            stage = jax.lax.rem(block - begin, jnp.int32(config.stages))
            plgpu.barrier_wait(key_full.at[stage])
            scores = _times_keys(query_smem.at[warpgroup], key_smem.at[stage], interpret)
            plgpu.barrier_arrive(key_free.at[stage])
            scores = jax.lax.cond(
                block < full_blocks, lambda scores, block: scores, mask, scores, block
            )
            new_top = jnp.maximum(top, scores.max(axis=1) * (scale * _LOG2_E))
            weight = jnp.exp2(scores * (scale * _LOG2_E) - _spread(new_top, scores_shape))
            decay = jnp.exp2(top - new_top)
            total = total * decay + weight.sum(axis=1)
            acc = acc * _spread(decay, acc.shape)
            plgpu.barrier_wait(value_full.at[stage])
            acc = _add_values(acc, weight.astype(jnp.bfloat16), value_smem.at[stage], interpret)
            plgpu.barrier_arrive(value_free.at[stage])
            return acc, new_top, total

        acc = jnp.zeros((GROUP_ROWS, head_dim), jnp.float32)
        top = jnp.full((GROUP_ROWS,), _LEAST, jnp.float32)
        total = jnp.zeros((GROUP_ROWS,), jnp.float32)
        state = (
            _cast(acc, plgpu.Layout.WGMMA, interpret),
            _cast(top, row_layout, interpret),
            _cast(total, row_layout, interpret),
        )
        plgpu.barrier_wait(query_full.at[warpgroup])
        acc, top, total = jax.lax.fori_loop(begin, end, step, state)
        if merged:
            # A row that saw nothing has total 0 and gives 0.
            acc = acc * _spread(1.0 / jnp.where(total > 0.0, total, 1.0), acc.shape)
            out_smem = query_smem.at[warpgroup]
        else:
            out_smem = sums_smem.at[warpgroup]
            out_refs[1].at[slot, head, part, unit][...] = top
            out_refs[2].at[slot, head, part, unit][...] = total
        out_smem[...] = acc.astype(out_smem.dtype)
        plgpu.commit_smem()
        for rows, near, query_head in boxes(warpgroup):
            out = out_refs[0].at[slot]
            out = out.at[near, query_head] if merged else out.at[query_head, part, near]
            plgpu.copy_smem_to_gmem(out_smem.at[rows], out)
        plgpu.wait_smem_to_gmem(0)


def scratch(head_dim: int, group: int, config: Config) -> list:
    """Shared memory and barriers, in the order in which the kernel takes them."""

    def tiled(*shape: int, dtype: DTypeLike = jnp.bfloat16):
        """As WGMMA reads it: tiles of 8 rows of 128 bytes, swizzled."""
        tile = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
        return plgpu.SMEM(shape, dtype, transforms=(tile, plgpu.SwizzleTransform(128)))

    units, stages = config.warpgroups, config.stages
    block = (stages, config.block_keys, head_dim)
    sums = tiled(units, GROUP_ROWS, head_dim, dtype=jnp.float32) if config.parts > 1 else None
    return [
        tiled(units, GROUP_ROWS, head_dim),
        tiled(*block),
        tiled(*block),
        sums,
        plgpu.Barrier(num_arrivals=group, num_barriers=units),
        plgpu.Barrier(),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_barriers=stages),
        plgpu.Barrier(num_arrivals=units, num_barriers=stages),
        plgpu.Barrier(num_arrivals=units, num_barriers=stages),
    ]
