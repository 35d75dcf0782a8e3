"""Pallas GPU kernels of `gdn_tree`: the WY form (`gdn_wy`), every node by its own path.

`gdn_paths_pallas` finds, once a head, what a node's path is to it; beside it, for neither needs the
other, `gdn_meet` finds the right-hand sides, which need the state. Then each node goes up its path:
it solves for the weight of each ancestor's side and adds the side. No node waits for another.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch, gdn_wy
from pallas_kernels.dispatch import spread
from pallas_kernels.gdn_exact import exact_dot, terms_for
from pallas_kernels.gdn_paths_pallas import Paths, gdn_paths

_WARP = 32
_STEPS = 4  # places of a path whose loads go together
_MOST_DEPTHS = 64  # a program holds a path against itself
_ONE_WAVE = 528  # programs of `gdn_meet` that run side by side, four a multiprocessor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernels are cut up. Sizes are powers of two, stages any number."""

    block_rows: int = 64  # nodes that meet the state in a program
    value_tile: int = 32  # value dims of it
    key_block: int = 32  # key dims a step
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size < 1:
                raise ValueError(f"`{field.name}` must be at least 1, got {size}")
            if size & (size - 1) and field.name != "num_stages":
                raise ValueError(f"`{field.name}` must be a power of two, got {size}")
        sizes = self.block_rows, self.value_tile, self.key_block
        if min(sizes) < 16:
            raise ValueError(
                f"`block_rows`, `value_tile` and `key_block` must be at least 16, got {sizes}"
            )


def unsupported(dtype: jnp.dtype, key_dim: int, value_dim: int, depths: int = 1) -> str | None:
    """Why the kernels cannot take these arguments, or None. depths: nodes of the longest path."""
    if depths > _MOST_DEPTHS:
        return f"a path must have at most {_MOST_DEPTHS} nodes, got room for {depths}"
    # `_up_kernel` gives each lane of a warp at most four value dims, which Triton loads as one.
    return dispatch.unsupported_size(dtype, "key dim", key_dim, 256) or dispatch.unsupported_size(
        dtype, "value dim", value_dim, 4 * _WARP
    )


def _meet_kernel(
    query_ref,  # [T, Dk], strided
    key_ref,  # [T, Dk], strided
    value_ref,  # [T, tile], strided
    beta_ref,  # float32 [T], strided, as the next three: of `GdnScales`
    query_scale_ref,  # float32 [T]
    key_scale_ref,  # float32 [T]
    from_prefix_ref,  # float32 [T]: E
    state_ref,  # float32 [Dk, tile]
    wanted_ref,  # float32 [T, tile], out: right-hand sides
    prefix_ref,  # float32 [T, tile], out: what outputs have of the prefix
    *,
    size: int,
    step: int,
    rounded: bool,
):
    """A block of nodes meets the state, of which nothing depends on other nodes."""
    (nodes, tile), blocks = value_ref.shape, dispatch.ceil_div(value_ref.shape[0], size)
    key_dim, shape = key_ref.shape[1], (size, tile)
    node = pl.program_id(2) % blocks * size + jax.lax.iota(jnp.int32, size)
    index = spread(node, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    # Before the loop, which does not wait for them.
    values = pltriton.load(value_ref.at[index], mask=index[0] < nodes, other=0.0)
    beta, query_scale, key_scale, from_prefix = (
        pltriton.load(ref.at[node], mask=node < nodes, other=0.0)
        for ref in (beta_ref, query_scale_ref, key_scale_ref, from_prefix_ref)
    )
    part = (size, step)
    row, column = spread(node, part, 0), jax.lax.broadcasted_iota(jnp.int32, part, 1)

    def add(number, sums):
        known, prefix = sums
        first = number * step
        state = state_ref[pl.ds(first, step), :]
        keys, queries = (
            pltriton.load(ref.at[row, first + column], mask=row < nodes, other=0.0)
            for ref in (key_ref, query_ref)
        )
        terms = terms_for(state, keys.dtype)
        known = exact_dot(keys, terms, known)
        # What only the output needs may be rounded where the output is rounded to bfloat16.
        return known, exact_dot(queries, terms[:2] if rounded else terms, prefix)

    product = jnp.zeros(shape, jnp.float32)
    steps = jnp.int32(key_dim // step)
    known, prefix = jax.lax.fori_loop(jnp.int32(0), steps, add, (product, product))
    wanted = values.astype(jnp.float32) - spread(key_scale * from_prefix, shape, 0) * known
    wanted, prefix = (
        x * spread(scale, shape, 0)
        for x, scale in ((wanted, beta), (prefix, query_scale * from_prefix))
    )
    pltriton.store(wanted_ref.at[index], wanted, mask=index[0] < nodes)
    pltriton.store(prefix_ref.at[index], prefix, mask=index[0] < nodes)


def _entry(parts: list[jax.Array], place: jax.Array, interpret: bool) -> jax.Array:
    """Entry `place` of a vector in parts of a warp's length; in every lane.

    Triton has no such op. Of a program of one warp it gives each lane one entry of such a part,
    which tests/test_gpu.py would tell if it changed: then what a lane reads is another entry.
    """
    if interpret:
        return jnp.full((_WARP,), jnp.concatenate(parts)[place])
    found = None
    for number, part in enumerate(parts):
        kind = "f" if part.dtype == jnp.float32 else "r"
        (entry,) = pltriton.elementwise_inline_asm(
            "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;",  # reads place modulo 32
            args=[part, jnp.full((_WARP,), place)],
            constraints=f"={kind},{kind},r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(part.shape, part.dtype)],
        )
        found = entry if found is None else jnp.where(place < number * _WARP, found, entry)
    return found


def _up_kernel(
    wanted_ref,  # float32 [T, Dv], strided
    prefix_ref,  # float32 [Dv]
    path_ref,  # int32 [T, R]
    lower_ref,  # float32 [T, A], as the next in `Paths`
    weight_ref,  # float32 [A]
    out_ref,  # [Dv], out
    update_ref,  # float32 [Dv], out
    *,
    interpret: bool,
):
    """x (I + L) = e and y (I + L) = w along a node's path, from the node up to the root; an entry
    of x or y, once known, weighs its ancestor's right-hand side."""
    (places,), value_dim = weight_ref.shape, wanted_ref.shape[1]
    node, lane = pl.program_id(0), jax.lax.iota(jnp.int32, _WARP)
    columns = [first + lane for first in range(0, places, _WARP)]
    shape = (_WARP, dispatch.ceil_div(value_dim, _WARP))
    element = [jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1)]
    element = element[0] * shape[1] + element[1]
    inside = element < value_dim if value_dim < _WARP else None

    def load_line(ref, *index, other=0.0):
        """A line of ref, in parts of a warp's length."""
        size = ref.shape[-1]
        return [
            pltriton.load(ref.at[*index, column], mask=column < size, other=other)
            for column in columns
        ]

    path = load_line(path_ref, jnp.full((_WARP,), node, jnp.int32), other=-1)
    known = [jnp.where(part >= 0, c, 0) for part, c in zip(path, columns, strict=True)]
    deepest = jnp.max(functools.reduce(jnp.maximum, known))
    of_update = [jnp.where(part == node, 1.0, 0.0) for part in path]
    of_out = load_line(weight_ref)
    update, out = jnp.zeros(shape, jnp.float32), pltriton.load(prefix_ref.at[element], mask=inside)

    def up(step, carry):
        of_update, of_out, update, out = carry
        first = (deepest // _STEPS - step) * _STEPS
        loaded = []
        for number in range(_STEPS):
            # Below the node all weights are 0, so that any row will do.
            ancestor = jnp.maximum(_entry(path, first + number, interpret), 0)
            row = wanted_ref.at[spread(ancestor, shape, 0), element]
            loaded.append((load_line(lower_ref, ancestor), pltriton.load(row, mask=inside)))
        for number in reversed(range(_STEPS)):
            # Of this place, the last to be known; L of an ancestor has entries above it alone.
            lower, wanted = loaded[number]
            x, y = (_entry(weights, first + number, interpret) for weights in (of_update, of_out))
            of_update = [old - x * part for old, part in zip(of_update, lower, strict=True)]
            of_out = [old - y * part for old, part in zip(of_out, lower, strict=True)]
            update = update + spread(x, shape, 0) * wanted
            out = out + spread(y, shape, 0) * wanted
        return of_update, of_out, update, out

    steps = deepest // _STEPS + 1
    found = jax.lax.fori_loop(jnp.int32(0), steps, up, (of_update, of_out, update, out))
    pltriton.store(update_ref.at[element], found[2], mask=inside)
    pltriton.store(out_ref.at[element], found[3].astype(out_ref.dtype), mask=inside)


def default_config(slots: int, nodes: int, heads: int, value_dim: int) -> Config:
    """Measured on an H200 (scripts/results/kernel_log.md)."""
    rows, tile = min(64, dispatch.lanes_for(nodes)), dispatch.divisor(value_dim, 32)
    programs = slots * heads * dispatch.ceil_div(nodes, rows) * (value_dim // tile)
    if programs <= _ONE_WAVE or value_dim % 64 != 0:
        return Config(block_rows=rows, value_tile=tile)
    # Fewer of twice the work, each with more under way.
    return Config(block_rows=rows, value_tile=64, num_stages=3)


@dispatch.lowered_once
def gdn_tree(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    path: jax.Array,
    scales: gdn_wy.GdnScales | None = None,
    *,
    interpret: bool,
    config: Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Out and update, each [B, T, Hv, Dv], as `gdn_tree.definition` gives them."""
    if config is None:
        config = default_config(*value.shape)
    if scales is None:
        scales = gdn_wy.scales(query, key, log_decay, path)
    paths = gdn_paths(query, key, log_decay, beta, path, scales, interpret=interpret)
    given = query, key, value, beta, scales, state
    wanted, prefix = _meet(*given, config=config, interpret=interpret)
    return _up(wanted, prefix, path, paths, dtype=value.dtype, interpret=interpret)


def _meet(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    scales: gdn_wy.GdnScales,
    state: jax.Array,
    *,
    config: Config,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Right-hand sides and what outputs have of the prefix, each float32 [B, T, Hv, Dv]."""
    slots, nodes, heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    group, tile = heads // key_heads, config.value_tile
    blocks = dispatch.ceil_div(nodes, config.block_rows)
    key_rows = pl.BlockSpec(
        (None, nodes, None, key_dim), lambda i, h, b: (b // blocks, 0, h // group, 0)
    )
    value_rows = pl.BlockSpec((None, nodes, None, tile), lambda i, h, b: (b // blocks, 0, h, i))
    key_numbers = pl.BlockSpec((None, nodes, None), lambda i, h, b: (b // blocks, 0, h // group))
    numbers = pl.BlockSpec((None, nodes, None), lambda i, h, b: (b // blocks, 0, h))
    wanted, prefix = pl.pallas_call(
        functools.partial(
            _meet_kernel,
            size=config.block_rows,
            step=min(config.key_block, key_dim),
            rounded=value.dtype == jnp.bfloat16,
        ),
        grid=(value_dim // tile, heads, slots * blocks),
        in_specs=[
            key_rows,
            key_rows,
            value_rows,
            numbers,
            key_numbers,
            key_numbers,
            numbers,
            pl.BlockSpec((None, None, key_dim, tile), lambda i, h, b: (b // blocks, h, 0, i)),
        ],
        out_specs=[value_rows] * 2,
        out_shape=[jax.ShapeDtypeStruct(value.shape, jnp.float32)] * 2,
        compiler_params=pltriton.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="gdn_meet",
    )(query, key, value, beta, *scales, state)
    return wanted, prefix


def _up(
    wanted: jax.Array,
    prefix: jax.Array,
    path: jax.Array,
    paths: Paths,
    *,
    dtype: jnp.dtype,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Out, in dtype, and update, float32, each [B, T, Hv, Dv]."""
    slots, nodes, heads, value_dim = wanted.shape
    places = paths.weight.shape[3]
    row = pl.BlockSpec((None, None, None, value_dim), lambda i, h, b: (b, i, h, 0))
    out, update = pl.pallas_call(
        functools.partial(_up_kernel, interpret=interpret),
        grid=(nodes, heads, slots),
        in_specs=[
            pl.BlockSpec((None, nodes, None, value_dim), lambda i, h, b: (b, 0, h, 0)),
            row,
            pl.BlockSpec((None, nodes, path.shape[2]), lambda i, h, b: (b, 0, 0)),
            pl.BlockSpec((None, None, nodes, places), lambda i, h, b: (b, h, 0, 0)),
            pl.BlockSpec((None, None, None, places), lambda i, h, b: (b, h, i, 0)),
        ],
        out_specs=[row] * 2,
        out_shape=[
            jax.ShapeDtypeStruct(wanted.shape, dtype),
            jax.ShapeDtypeStruct(wanted.shape, jnp.float32),
        ],
        # One warp: a sum over a path's entries, of which each step waits for, stays in it.
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="gdn_tree",
    )(wanted, prefix, path, paths.lower, paths.weight)
    return out, update
