"""Pallas GPU kernel of `tree_build`: one launch, one program a slot, the frontier in registers.

The frontier is a dense array, as in the definition. A rank path is packed into a few words that
compare as the path does, so that ties cost one reduction a word. All reductions are of integers,
which a warp does in one instruction: a float is its bits, made to compare as it does.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch

_MAX_NODES = 4096
_DEPTH_BITS = 5  # depths up to 31
_RANK_BITS = 11  # ranks up to 1023, and one past them in a lane that has run out
_PARENT_SHIFT = _DEPTH_BITS + _RANK_BITS
_INT32_MAX = 2**31 - 1
_ABSENT = -(2**31)  # below every score


def unsupported(budget: int) -> str | None:
    """Why the kernel cannot take this shape, or None."""
    if budget >= _MAX_NODES:
        return f"it holds at most {_MAX_NODES} nodes a slot, got budget={budget}"
    return None


def _packing(depths: int, candidates: int) -> tuple[int, int, int]:
    """Bits of a packed rank, ranks a word, words a path."""
    field_bits = candidates.bit_length()  # rank + 1 is at most M; 0 stands behind the path
    fields = 31 // field_bits  # the sign bit stays clear
    return field_bits, fields, dispatch.ceil_div(depths, fields)


def _num_warps(nodes: int, words: int) -> int:
    """As few as hold the frontier in registers: reductions inside one warp are the fastest."""
    values = dispatch.lanes_for(nodes) * (words + 4)  # key, base, about, one temporary
    return min(16, dispatch.next_power_of_two(dispatch.ceil_div(values, 32 * 96)))


def _ordered(score: jax.Array) -> jax.Array:
    """Bits of a float32 that compare as it does; -0 is +0, and -inf is `_ABSENT`."""
    bits = jax.lax.bitcast_convert_type(jnp.where(score == 0.0, 0.0, score), jnp.int32)
    return jnp.where(score > -jnp.inf, dispatch.ordered_bits(bits), _ABSENT)


def _score_of(ordered: jax.Array) -> jax.Array:
    score = jax.lax.bitcast_convert_type(dispatch.ordered_bits(ordered), jnp.float32)
    return jnp.where(ordered == _ABSENT, -jnp.inf, score)


def _build_kernel(
    log_prob_ref,  # float32 [J, M]
    parent_ref,  # int32 [T], out
    depth_ref,  # int32 [T], out
    rank_ref,  # int32 [T], out
    valid_ref,  # bool [T], out
    score_ref,  # float32 [T], out
    *,
    budget: int,
    spine: bool,
):
    depths, candidates = log_prob_ref.shape
    lane = jax.lax.iota(jnp.int32, dispatch.lanes_for(budget + 1))
    field_bits, fields, words = _packing(depths, candidates)

    def log_prob_at(depth, rank):
        """Scalar of 0-based depth; indices are clamped since reads are not checked on a GPU."""
        depth = jnp.clip(depth, 0, depths - 1)
        value = log_prob_ref[depth, jnp.clip(rank, 0, candidates - 1)]
        return jnp.where(value < jnp.inf, value, -jnp.inf)  # NaN fails the comparison

    def field_unit(depth, word):
        """What adds 1 to the rank at 0-based depth, if that is in this word, else 0."""
        shift = field_bits * (fields - 1 - depth % fields)
        unit = jnp.left_shift(jnp.int32(1), shift)
        return jnp.where(depth // fields == word, unit, 0)

    def priority(score, on_spine):
        """The key that lanes are popped by: the chain of rank 0 goes before all else."""
        score = jnp.where(on_spine & (score > -jnp.inf), jnp.inf, score) if spine else score
        return _ordered(score)

    def pop(node, state):
        key, base, about, path = state
        best = jnp.max(key)
        exists = best > _ABSENT
        at = key == best
        taken = []
        for word in path:
            low = jnp.min(jnp.where(at, word, _INT32_MAX))
            at = at & (word == low)
            taken.append(low)
        # Paths differ, so `at` is now one lane, or there is nothing left and it does not matter.
        packed = jnp.max(jnp.where(at, about, 0))
        parent_score = _score_of(jnp.max(jnp.where(at, base, _ABSENT)))
        parent = packed >> _PARENT_SHIFT
        rank = (packed >> _DEPTH_BITS) & (2**_RANK_BITS - 1)
        depth = packed & (2**_DEPTH_BITS - 1)
        if spine:
            score = jnp.where(exists, parent_score + log_prob_at(depth - 1, rank), -jnp.inf)
        else:
            score = _score_of(best)
        parent_ref[node] = jnp.where(exists, parent, -1)
        depth_ref[node] = jnp.where(exists, depth, 0)
        rank_ref[node] = jnp.where(exists, rank, -1)
        valid_ref[node] = exists
        score_ref[node] = score

        sibling = parent_score + log_prob_at(depth - 1, rank + 1)
        sibling = _ordered(jnp.where(exists & (rank + 1 < candidates), sibling, -jnp.inf))
        child = score + log_prob_at(depth, 0)
        child = jnp.where(exists & (depth < depths), child, -jnp.inf)
        # A node as deep as its index has the whole chain, and nothing else, before it.
        child_key = priority(child, depth == node)
        opened = lane == node

        def update(at_taken, at_opened, other):
            return jnp.where(at, at_taken, jnp.where(opened, at_opened, other))

        path = tuple(
            update(word + field_unit(depth - 1, index), low + field_unit(depth, index), word)
            for index, (word, low) in enumerate(zip(path, taken, strict=True))
        )
        about = update(about + (1 << _DEPTH_BITS), (node << _PARENT_SHIFT) | (depth + 1), about)
        return (
            update(sibling, child_key, key),
            jnp.where(opened, _ordered(score), base),
            about,
            path,
        )

    parent_ref[0] = jnp.int32(-1)
    depth_ref[0] = jnp.int32(0)
    rank_ref[0] = jnp.int32(-1)
    valid_ref[0] = jnp.bool_(True)
    score_ref[0] = jnp.float32(0)
    first = lane == 0
    start = priority(log_prob_at(0, 0), jnp.bool_(True))
    start = jnp.where(first, start, _ABSENT)
    path = tuple(jnp.where(first, field_unit(jnp.int32(0), word), 0) for word in range(words))
    # The bits of a score of 0 are 0.
    state = (start, jnp.zeros(lane.shape, jnp.int32), jnp.where(first, 1, 0), path)
    jax.lax.fori_loop(1, budget + 1, pop, state)


@dispatch.lowered_once
def tree_build(
    log_prob: jax.Array, *, budget: int, spine: bool, interpret: bool
) -> tuple[jax.Array, ...]:
    """Parent, depth, rank, valid, score, each [B, T], as `tree_build.definition` gives them."""
    slots, depths, candidates = log_prob.shape
    nodes = budget + 1
    per_slot = pl.BlockSpec((None, nodes), lambda b: (b, 0))
    dtypes = (jnp.int32, jnp.int32, jnp.int32, jnp.bool_, jnp.float32)
    return tuple(
        pl.pallas_call(
            functools.partial(_build_kernel, budget=budget, spine=spine),
            grid=(slots,),
            in_specs=[pl.BlockSpec((None, depths, candidates), lambda b: (b, 0, 0))],
            out_specs=[per_slot] * len(dtypes),
            out_shape=[jax.ShapeDtypeStruct((slots, nodes), dtype) for dtype in dtypes],
            compiler_params=pltriton.CompilerParams(
                num_warps=_num_warps(nodes, _packing(depths, candidates)[2]), num_stages=1
            ),
            interpret=interpret,
            name="tree_build",
        )(log_prob)
    )
