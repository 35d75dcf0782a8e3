"""`tree_attention`: both implementations against a float64 softmax in numpy."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from pallas_kernels import tree_attention, tree_attention_mosaic, tree_attention_pallas

IMPLEMENTATIONS = ["xla", "pallas"]
ERROR = {jnp.float32: 2e-5, jnp.bfloat16: 2e-2}


class Case(NamedTuple):
    """B, T, N, K, H, S and what else the case is about."""

    slots: int
    nodes: int
    query_heads: int
    kv_heads: int
    head_dim: int
    cache_rows: int
    windowed: bool = False
    dtype: type = jnp.float32


CASES = {
    "one_node": Case(2, 1, 4, 1, 32, 40),
    "odd": Case(3, 5, 6, 6, 32, 70),
    "group_of_six": Case(2, 17, 6, 1, 32, 130),
    "window": Case(3, 16, 8, 2, 64, 200, windowed=True),
    "large_tree": Case(1, 129, 4, 2, 32, 90, windowed=True),
    "wide_head": Case(1, 5, 2, 1, 256, 50),
    "bfloat16": Case(2, 16, 8, 2, 128, 150, dtype=jnp.bfloat16),
}


def ragged_lengths(slots, rows):
    """A full slot, an empty one, and some in between."""
    return np.array([rows, 0, rows // 3, 1][:slots] if slots > 1 else [rows - 7], np.int32)


def ancestors(parent):
    """[T, T]: whether node t sees node j, itself included."""
    seen = np.eye(len(parent), dtype=bool)
    for node in range(1, len(parent)):
        seen[node] |= seen[parent[node]]
    return seen


def arguments(case, seed=0):
    """Random arguments; cache rows behind `lengths` are NaN, one node of slot 0 sees nothing."""
    b, t, n, k, h, s = case[:6]
    rng = np.random.default_rng(seed)
    lengths = ragged_lengths(b, s)
    parents = [[-1] + [rng.integers(0, node) for node in range(1, t)] for _ in range(b)]
    visible = np.stack([ancestors(parent) for parent in parents])
    start = None
    if case.windowed:
        # Windows that begin in the prefix, before it, and behind it.
        start = rng.integers(-5, s + 5, (b, t)).astype(np.int32)
        start[0, -1] = s
        visible[0, -1] = False
    q, key, value, tree_key, tree_value = (
        np.array(jnp.asarray(rng.normal(size=size), case.dtype))
        for size in [(b, t, n, h), (b, s, k, h), (b, s, k, h), (b, t, k, h), (b, t, k, h)]
    )
    for slot in range(b):
        key[slot, lengths[slot] :] = np.nan
        value[slot, lengths[slot] :] = np.nan
    return [q, key, value, tree_key, tree_value, lengths, visible, start]


def expected(q, key, value, tree_key, tree_value, lengths, visible, start, scale):
    """Row by row in float64."""
    out = np.zeros(q.shape, np.float64)
    b, t, n, _ = q.shape
    group = n // key.shape[2]
    for slot in range(b):
        for node in range(t):
            first = 0 if start is None else max(int(start[slot, node]), 0)
            rows = slice(first, max(first, int(lengths[slot])))
            seen = visible[slot, node]
            for head in range(n):
                keys = [key[slot, rows, head // group], tree_key[slot, seen, head // group]]
                values = [value[slot, rows, head // group], tree_value[slot, seen, head // group]]
                keys, values = np.concatenate(keys), np.concatenate(values)
                if len(keys):
                    score = keys.astype(np.float64) @ q[slot, node, head].astype(np.float64)
                    weight = np.exp(scale * (score - score.max()))
                    out[slot, node, head] = weight @ values.astype(np.float64) / weight.sum()
    return out


@functools.cache
def compiled(implementation, scale):
    return jax.jit(
        lambda *rest, prefix_start: tree_attention(
            *rest, prefix_start=prefix_start, scale=scale, implementation=implementation
        )
    )


def run(implementation, arrays, scale):
    *rest, start = jax.tree.map(jnp.asarray, arrays)
    return compiled(implementation, scale)(*rest, prefix_start=start)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_softmax_over_both_parts(implementation, name):
    case = CASES[name]
    arrays, scale = arguments(case), case.head_dim**-0.5
    out = run(implementation, arrays, scale)
    assert out.dtype == case.dtype
    np.testing.assert_allclose(
        np.asarray(out, np.float64), expected(*arrays, scale), atol=ERROR[case.dtype], rtol=0
    )
    if case.windowed:
        assert (out[0, -1] == 0).all()  # this node sees nothing


@pytest.mark.parametrize(
    ("case", "warpgroups", "parts"),
    [
        (Case(2, 5, 8, 2, 128, 136, dtype=jnp.bfloat16), 2, 2),
        (Case(1, 9, 6, 1, 256, 136, dtype=jnp.bfloat16), 1, 2),
    ],
)
def test_mosaic_is_the_softmax_over_both_parts(case, warpgroups, parts):
    """In interpret mode, which reports races: a full slot and an empty one, two parts; wide heads,
    six to a key, in tiles of 8 nodes."""
    arrays, scale = arguments(case), case.head_dim**-0.5
    config = tree_attention_mosaic.Config(
        warpgroups=warpgroups, block_keys=64, stages=2, parts=parts
    )
    *rest, start = (None if x is None else jnp.asarray(x) for x in arrays)
    out = tree_attention_mosaic.tree_attention(
        *rest, start, scale=scale, interpret=True, config=config
    )
    np.testing.assert_allclose(
        np.asarray(out, np.float64), expected(*arrays, scale), atol=ERROR[case.dtype], rtol=0
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chain_mask_is_causal_attention(implementation):
    b, t, n, k, h, s = CASES["odd"][:6]
    arrays = arguments(CASES["odd"], seed=1)
    arrays[6] = np.broadcast_to(np.tril(np.ones((t, t), bool)), (b, t, t))
    q, key, value, tree_key, tree_value, lengths, _, _ = arrays
    scale = h**-0.5
    out = run(implementation, arrays, scale)
    for slot in range(b):
        # The same rows in one sequence, node t at position lengths + t.
        length = lengths[slot]
        keys = np.concatenate([key[slot, :length], tree_key[slot]])
        values = np.concatenate([value[slot, :length], tree_value[slot]])
        for node in range(t):
            end = length + node + 1
            score = scale * np.einsum("nh,snh->ns", q[slot, node], keys[:end])
            weight = np.exp(score - score.max(axis=1, keepdims=True))
            weight /= weight.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(
                out[slot, node], np.einsum("ns,snh->nh", weight, values[:end]), atol=2e-5, rtol=0
            )


@pytest.mark.parametrize(("shares", "tile_rows", "block_keys"), [(1, 16, 32), (7, 32, 16)])
def test_kernel_gives_the_same_for_any_config(shares, tile_rows, block_keys):
    case = CASES["window"]
    arrays, scale = arguments(case, seed=2), 0.2
    config = tree_attention_pallas.Config(tile_rows=tile_rows, block_keys=block_keys, shares=shares)
    call = functools.partial(
        tree_attention_pallas.tree_attention, scale=scale, interpret=True, config=config
    )
    out = jax.jit(call)(*jax.tree.map(jnp.asarray, arrays))
    np.testing.assert_allclose(out, expected(*arrays, scale), atol=2e-5, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equal_huge_scores_do_not_overflow(implementation):
    arrays = arguments(CASES["one_node"])
    arrays[0] = np.full_like(arrays[0], 1e4)
    arrays[1][0], arrays[3][0] = 1e4, 1e4
    scale = CASES["one_node"].head_dim ** -0.5
    out = run(implementation, arrays, scale)
    np.testing.assert_allclose(out, expected(*arrays, scale), atol=2e-5, rtol=0)


def test_attention_refuses_bad_arguments():
    arrays = jax.tree.map(jnp.asarray, arguments(CASES["odd"]))[:7]
    call = functools.partial(tree_attention, scale=1.0)
    with pytest.raises(ValueError, match="`key` must be float32"):
        call(arrays[0], arrays[1].astype(jnp.bfloat16), *arrays[2:])
    with pytest.raises(ValueError, match="multiple of key's 6 heads, got 5"):
        call(arrays[0][:, :, :5], *arrays[1:])
    # The annotations that tests check find a wrong shape before the op's own check can.
    with pytest.raises((ValueError, TypeCheckError)):
        call(*arrays[:5], arrays[5][:2], arrays[6])
    narrow = [array[..., :20] for array in arrays[:5]]
    with pytest.raises(NotImplementedError, match="use implementation='xla'"):
        call(*narrow, *arrays[5:], implementation="pallas")
