"""Pallas GPU kernels of `topk_logsumexp`: two launches, the second with one program a row.

The first reads the logits and leaves the maximum and the sum of exponentials of each group of
columns. The second finds a threshold that the k-th largest maximum reaches, reads the groups above
it again, finds a threshold among their entries, and ranks what is left by comparing all pairs. A
row that fits the registers of one program is taken in one launch.

Thresholds are found by bisection over int32 keys that order as the floats do. A reduction over a
whole program costs far more than its arithmetic, so a search ends as soon as few enough remain.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.dispatch import ordered_bits, spread

_MOST_K = 1024
_MOST_LANES = 16384  # what 1024 threads hold beside their temporaries
_ROW_LANES = 8192  # rows up to here are taken in one launch
_PAIRS = 16384  # pairs compared in one step of the ranking
_SMALLEST = 2.0**-126  # of the normal numbers
_MASK = 2**31 - 1
_ABSENT = -(2**31)  # below every key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernels are cut up. Sizes are powers of two."""

    group: int  # columns under one maximum; 1 takes the row in one launch
    chunk: int  # columns that a program of the first launch reads
    groups_kept: int  # most groups that are read again, at least k
    ranked: int  # most entries that are compared in pairs, at least k
    group_warps: int = 4  # of the first launch
    select_warps: int = 8  # of the second, or of the only one

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size < 1 or size & (size - 1):
                raise ValueError(f"`{field.name}` must be a power of two, got {size}")
        if self.chunk < self.group:
            raise ValueError(f"`chunk` must hold a group, got {self.chunk} and {self.group}")

    def lanes(self, columns: int) -> int:
        """Length of the longest register array of the selection."""
        if self.group == 1:
            return dispatch.lanes_for(columns)
        groups = dispatch.lanes_for(dispatch.ceil_div(columns, self.group))
        return max(groups, self.groups_kept * self.group)


def default_config(columns: int, k: int) -> Config:
    """A sound choice from shapes alone."""
    kept = dispatch.next_power_of_two(k)

    def lanes(group: int) -> int:
        """Of both register arrays: the maxima, and the groups that are read again."""
        return dispatch.lanes_for(dispatch.ceil_div(columns, group)) + kept * group

    one_launch = dispatch.lanes_for(columns) <= _ROW_LANES
    group = 1 if one_launch else min((128, 64, 32, 16), key=lanes)
    # Slack ends the search early; beyond 256 entries the pairs cost more than it saves.
    ranked = max(dispatch.next_power_of_two(k), min(256, dispatch.lanes_for(2 * k)))
    config = Config(group=group, chunk=4096, groups_kept=kept, ranked=ranked)
    longest = config.lanes(columns)
    # No spills up to k = 256; up to 52 words a thread beyond.
    warps = 4 if longest <= 2048 else 8 if longest <= 8192 else 32
    return dataclasses.replace(config, select_warps=warps)


def unsupported(columns: int, k: int) -> str | None:
    """Why the kernels cannot take this shape, or None."""
    if k > _MOST_K:
        return f"it selects at most {_MOST_K} entries, got k={k}"
    if default_config(columns, k).lanes(columns) > _MOST_LANES:
        return f"rows of V={columns} columns do not fit the registers of a program"
    return None


def _load(ref, column: jax.Array, mask: jax.Array) -> jax.Array:
    """Logits as `topk_logsumexp.usable` makes them, -inf where the mask is False."""
    logits = pltriton.load(ref.at[column], mask=mask, other=-jnp.inf)
    logits = jnp.where(jnp.abs(logits) < _SMALLEST, 0.0, logits)
    return jnp.where(mask & (logits == logits), logits, -jnp.inf)


def _finite(top: jax.Array) -> jax.Array:
    """What exponents are taken relative to: 0 for a maximum that is infinite."""
    return jnp.where(jnp.abs(top) < jnp.inf, top, 0.0)


def _key(logits: jax.Array) -> jax.Array:
    """int32 keys in the order of the logits."""
    return ordered_bits(jax.lax.bitcast_convert_type(logits, jnp.int32))


class _Cut(NamedTuple):
    """Scalars: keys from `low` on are at least k, keys from `high` on fewer."""

    low: jax.Array
    high: jax.Array
    at_low: jax.Array  # how many keys are >= low
    at_high: jax.Array


def _all(keys: jax.Array, real: jax.Array, top: jax.Array, count: int) -> _Cut:
    """The cut that `count` real keys reach; `top` is the largest logit."""
    low = jnp.min(jnp.where(real, keys, _MASK))
    return _Cut(low, _key(top) + 1, at_low=jnp.int32(count), at_high=jnp.int32(0))


def _count(keys: jax.Array, threshold: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(keys >= threshold, 1, 0).astype(jnp.int32))


def _bisect(keys: jax.Array, cut: _Cut, *, k: int, most: int) -> _Cut:
    """Narrows the cut until at most `most` keys reach `low`, or all between low and high tie."""

    def goes_on(cut):
        return (cut.at_low > most) & (cut.low + 1 < cut.high)

    def halve(cut):
        middle = (cut.low & cut.high) + ((cut.low ^ cut.high) >> 1)  # the sum might overflow
        reached = _count(keys, middle)
        enough = reached >= k
        return _Cut(
            low=jnp.where(enough, middle, cut.low),
            high=jnp.where(enough, cut.high, middle),
            at_low=jnp.where(enough, reached, cut.at_low),
            at_high=jnp.where(enough, cut.at_high, reached),
        )

    return jax.lax.while_loop(goes_on, halve, cut)


def _pack(ref, keys: jax.Array, entries: jax.Array, cut: _Cut) -> jax.Array:
    """Stores the entries whose keys reach the cut, in order, to a scratch; returns how many.

    Keys from `high` on all go; of those from `low` to `high`, the first that still find room.
    """
    most = ref.shape[0]
    above = keys >= cut.high
    level = (keys >= cut.low) & (keys < cut.high)
    # Two counts in one word: fewer than 2^10 are above, at most 2^14 level.
    own = jnp.where(above, 1 << 16, jnp.where(level, 1, 0)).astype(jnp.int32)
    before = jax.lax.cumsum(own, axis=0) - own
    room = most - cut.at_high
    level_before = before & 0xFFFF
    kept = above | (level & (level_before < room))
    place = (before >> 16) + jnp.minimum(level_before, room)
    # Interpret mode drops a masked lane only if its place is out of range. The mask is made of
    # the place because the store takes both to another layout, at a barrier each.
    place = jnp.where(kept, place, most)
    pltriton.store(ref.at[place], entries, mask=place < most)
    return jnp.minimum(cut.at_low, most)


def _store_best(key: jax.Array, column: jax.Array, outputs, *, k: int, interpret: bool) -> None:
    """Stores the k best, best first, by counting for each key those that go before it.

    Columns ascend, except those of absent keys at the end.
    """
    value_ref, token_ref, key_ref = outputs
    ranked = key.shape[0]
    width = min(ranked, _PAIRS // ranked)
    shape = (width, ranked)  # the sum runs along registers and warps, not inside a warp
    mine, my_lane = spread(key, shape, 1), jax.lax.broadcasted_iota(jnp.int32, shape, 1)

    def add(other_keys, start, rank):
        other = spread(other_keys, shape, 0)
        other_lane = start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        ahead = (other > mine) | ((other == mine) & (other_lane < my_lane))
        return rank + jnp.sum(jnp.where(ahead, 1, 0).astype(jnp.int32), axis=0)

    rank = jnp.zeros((ranked,), jnp.int32)
    if width == ranked:
        rank = add(key, 0, rank)
    else:
        key_ref[...] = key
        dispatch.barrier(interpret)
        rank = jax.lax.fori_loop(
            jnp.int32(0),
            jnp.int32(ranked // width),
            lambda step, rank: add(key_ref[pl.ds(step * width, width)], step * width, rank),
            rank,
        )
    place = jnp.minimum(rank, k)
    value = jax.lax.bitcast_convert_type(ordered_bits(key), jnp.float32)
    pltriton.store(value_ref.at[place], value, mask=place < k)
    pltriton.store(token_ref.at[place], column, mask=place < k)


def _first_of_top(
    logits: jax.Array, column: jax.Array, mask: jax.Array, top: jax.Array
) -> jax.Array:
    """The lowest column whose logit is `top`."""
    return jnp.min(jnp.where(mask & (logits == top), column, _MASK))


def _select(
    logits_ref,
    keys: jax.Array,
    column: jax.Array,
    cut: _Cut,
    refs,  # value, token, then the scratch: column, key
    *,
    k: int,
    interpret: bool,
) -> None:
    """Stores the k largest of `keys`, whose columns ascend, best first."""
    value_ref, token_ref, column_ref, key_ref = refs
    ranked = column_ref.shape[0]
    count = _pack(column_ref, keys, column, _bisect(keys, cut, k=k, most=ranked))
    dispatch.barrier(interpret)
    lane = jax.lax.iota(jnp.int32, ranked)
    mask = lane < count
    column = pltriton.load(column_ref.at[lane], mask=mask, other=0)
    key = jnp.where(mask, _key(_load(logits_ref, column, mask)), _ABSENT)
    _store_best(key, column, (value_ref, token_ref, key_ref), k=k, interpret=interpret)


def _group_kernel(
    logits_ref,  # float32 [V]
    top_ref,  # float32 [chunk / group], out: maxima
    total_ref,  # float32 [chunk / group], out: sums of exponentials relative to them
    *,
    config: Config,
):
    shape = (config.chunk // config.group, config.group)
    row, offset = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    column = pl.program_id(0) * config.chunk + row * config.group + offset
    logits = _load(logits_ref, column, column < logits_ref.shape[0])
    top = jnp.max(logits, axis=1)
    top_ref[...] = top
    total_ref[...] = jnp.sum(jnp.exp(logits - spread(_finite(top), shape, 0)), axis=1)


def _select_kernel(
    logits_ref,  # float32 [V]
    top_ref,  # float32 [groups]
    total_ref,  # float32 [groups]
    value_ref,  # float32 [k], out
    token_ref,  # int32 [k], out
    logsumexp_ref,  # float32 [1], out
    group_ref,  # int32 [groups_kept], scratch
    *scratch,  # int32 [ranked] twice: column, key
    k: int,
    config: Config,
    interpret: bool,
):
    columns, group = logits_ref.shape[0], config.group
    count = dispatch.ceil_div(columns, group)
    lane = jax.lax.iota(jnp.int32, dispatch.lanes_for(count))
    real = lane < count
    inside = lane < top_ref.shape[0]  # padding to whole chunks is -inf and 0, and aligned
    tops = pltriton.load(top_ref.at[lane], mask=inside, other=-jnp.inf)
    totals = pltriton.load(total_ref.at[lane], mask=inside, other=0.0)
    tops, totals = jnp.where(inside, tops, -jnp.inf), jnp.where(inside, totals, 0.0)
    top = jnp.max(tops)
    base = _finite(top)
    logsumexp_ref[0] = base + jnp.log(jnp.sum(totals * jnp.exp(tops - base)))

    if k == 1:
        best = _first_of_top(tops, lane, real, top)
        column = best * group + jax.lax.iota(jnp.int32, group)
        near = _load(logits_ref, column, column < columns)
        value_ref[0] = top
        token_ref[0] = _first_of_top(near, column, column < columns, top)
        return

    keys = jnp.where(real, _key(tops), _ABSENT)
    cut = _all(keys, real, top, count)
    if count > config.groups_kept:
        cut = _bisect(keys, cut, k=k, most=config.groups_kept)
    kept_count = _pack(group_ref, keys, lane, cut)
    dispatch.barrier(interpret)
    lane = jax.lax.iota(jnp.int32, config.groups_kept * group)
    slot = lane >> (group.bit_length() - 1)
    best = pltriton.load(group_ref.at[slot], mask=slot < kept_count, other=0)
    column = best * group + (lane & (group - 1))
    mask = (slot < kept_count) & (column < columns)
    keys = jnp.where(mask, _key(_load(logits_ref, column, mask)), _ABSENT)
    # k groups have a maximum of at least `low`, so as many entries are; if there are k groups.
    low = cut.low if count >= k else jnp.min(jnp.where(mask, keys, _MASK))
    cut = _Cut(low, _key(top) + 1, at_low=_count(keys, low), at_high=jnp.int32(0))
    refs = (value_ref, token_ref, *scratch)
    _select(logits_ref, keys, column, cut, refs, k=k, interpret=interpret)


def _row_kernel(
    logits_ref,  # float32 [V]
    value_ref,  # float32 [k], out
    token_ref,  # int32 [k], out
    logsumexp_ref,  # float32 [1], out
    *scratch,  # int32 [ranked] twice: column, key
    k: int,
    interpret: bool,
):
    columns = logits_ref.shape[0]
    column = jax.lax.iota(jnp.int32, dispatch.lanes_for(columns))
    real = column < columns
    logits = _load(logits_ref, column, real)
    top = jnp.max(logits)
    base = _finite(top)
    logsumexp_ref[0] = base + jnp.log(jnp.sum(jnp.exp(logits - base)))
    if k == 1:
        value_ref[0] = top
        token_ref[0] = _first_of_top(logits, column, real, top)
        return
    keys = jnp.where(real, _key(logits), _ABSENT)
    cut = _all(keys, real, top, columns)
    refs = (value_ref, token_ref, *scratch)
    _select(logits_ref, keys, column, cut, refs, k=k, interpret=interpret)


@dispatch.lowered_once
def topk_logsumexp(
    logits: jax.Array, *, k: int, interpret: bool, config: Config | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Value, token [B, R, k] and log-sum-exp [B, R] as `topk_logsumexp.definition` gives them."""
    slots, depths, columns = logits.shape
    config = default_config(columns, k) if config is None else config
    room = config.ranked if config.group == 1 else min(config.ranked, config.groups_kept)
    if k > room:
        raise ValueError(f"`config` has room for {room} entries, got k={k}")
    rows = slots * depths
    logits = logits.reshape(rows, columns)
    inputs = [(logits, columns)]
    outputs = [(k, jnp.float32), (k, jnp.int32)]
    scratch = [(config.ranked, jnp.int32)] * 2
    if config.group == 1:
        kernel = functools.partial(_row_kernel, k=k, interpret=interpret)
    else:
        kernel = functools.partial(_select_kernel, k=k, config=config, interpret=interpret)
        inputs += [(array, array.shape[1]) for array in _group(logits, config, interpret)]
        scratch = [(config.groups_kept, jnp.int32), *scratch]
    per_row = [*outputs, *scratch]
    specs = [pl.BlockSpec((None, size), lambda r: (r, 0)) for size, _ in per_row]
    shapes = [jax.ShapeDtypeStruct((rows, size), dtype) for size, dtype in per_row]
    specs.insert(2, pl.BlockSpec((1,), lambda r: (r,)))
    shapes.insert(2, jax.ShapeDtypeStruct((rows,), jnp.float32))
    value, token, logsumexp = pl.pallas_call(
        kernel,
        grid=(rows,),
        in_specs=[pl.BlockSpec((None, size), lambda r: (r, 0)) for _, size in inputs],
        out_specs=specs,
        out_shape=shapes,
        compiler_params=pltriton.CompilerParams(num_warps=config.select_warps, num_stages=1),
        interpret=interpret,
        name="topk_logsumexp",
    )(*(array for array, _ in inputs))[:3]
    shape = (slots, depths, k)
    return value.reshape(shape), token.reshape(shape), logsumexp.reshape(shape[:2])


def _group(logits: jax.Array, config: Config, interpret: bool) -> tuple[jax.Array, ...]:
    """Maxima of the groups of each row, and their sums of exponentials; padded to whole chunks."""
    rows, columns = logits.shape
    chunks = dispatch.ceil_div(columns, config.chunk)
    groups = config.chunk // config.group
    out = pl.pallas_call(
        functools.partial(_group_kernel, config=config),
        # Chunks fastest, so that neighbours read neighbouring memory.
        grid=(chunks, rows),
        in_specs=[pl.BlockSpec((None, columns), lambda c, r: (r, 0))],
        out_specs=[pl.BlockSpec((None, groups), lambda c, r: (r, c))] * 2,
        out_shape=[jax.ShapeDtypeStruct((rows, chunks * groups), jnp.float32)] * 2,
        compiler_params=pltriton.CompilerParams(num_warps=config.group_warps, num_stages=1),
        interpret=interpret,
        name="topk_logsumexp_groups",
    )(logits)
    return tuple(out)
