"""`topk_logsumexp`: both implementations against stable sorts in numpy and `lax.top_k`."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import shapes, topk_logsumexp, topk_logsumexp_pallas

IMPLEMENTATIONS = ["xla", "pallas"]
COLUMNS, WANTED = 333, 11  # one shape for all random examples


@functools.cache
def compiled(implementation, k):
    return jax.jit(functools.partial(topk_logsumexp, k=k, implementation=implementation))


def by_sorting(logits, k):
    """Value, token and float64 log-sum-exp; NaN as -inf, -0 and subnormals as 0."""
    clean = np.where(np.isnan(logits), -np.inf, logits)
    clean = np.where(np.abs(clean) < np.finfo(np.float32).tiny, np.float32(0.0), clean)
    token = np.argsort(-clean, axis=-1, kind="stable")[..., :k].astype(np.int32)
    value = np.take_along_axis(clean, token, axis=-1)
    top = np.where(np.isfinite(value[..., :1]), value[..., :1], 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        total = np.log(np.sum(np.exp(clean.astype(np.float64) - top), axis=-1))
    return value, token, total + top[..., 0]


def assert_is_sorted(result, logits, k):
    value, token, logsumexp = by_sorting(np.asarray(logits), k)
    np.testing.assert_array_equal(np.asarray(result[0]).view(np.int32), value.view(np.int32))
    np.testing.assert_array_equal(result[1], token)
    np.testing.assert_allclose(result[2], logsumexp, rtol=1e-6, atol=1e-5)
    assert [x.dtype for x in result] == [jnp.float32, jnp.int32, jnp.float32]


def random_logits(*shape, tied):
    rng = np.random.default_rng(shape[-1])
    logits = 4.0 * rng.normal(size=shape)
    return jnp.array(np.round(logits) if tied else logits, jnp.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("columns", [300, 9001, 20011])
@pytest.mark.parametrize("k", [1, 15, 16, 63, 255])
def test_is_the_stable_sort(implementation, k, columns, tied):
    logits = random_logits(2, 2, columns, tied=tied)
    result = compiled(implementation, k)(logits)
    assert_is_sorted(result, logits, k)
    for ours, theirs in zip(result, jax.lax.top_k(logits + 0.0, k), strict=False):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("k", [1, 63])
def test_a_real_vocabulary(implementation, k):
    logits = random_logits(1, 2, shapes.TOPK["qwen3_63"].columns, tied=False)
    assert_is_sorted(compiled(implementation, k)(logits), logits, k)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("columns", "k"), [(1, 1), (40, 40), (9001, 1024), (20011, 1000)])
def test_large_k(implementation, columns, k):
    """The whole row, more entries than there are groups, and the largest k."""
    logits = random_logits(1, 1, columns, tied=True)
    assert_is_sorted(compiled(implementation, k)(logits), logits, k)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("columns", [300, 9001])
@pytest.mark.parametrize("k", [1, 15])
def test_unusual_entries(implementation, columns, k):
    logits = np.array(random_logits(1, 8, columns, tied=True))
    logits[0, 0] = -math.inf
    logits[0, 1] = math.nan
    logits[0, 2] = -0.0
    logits[0, 2, ::7] = 0.0
    logits[0, 3, 5::40] = math.nan
    logits[0, 4, 3:] = -math.inf
    logits[0, 5, [77, 250]] = math.inf
    logits[0, 6] = np.float32(3e38)
    logits[0, 7, :] = np.float32(-3e38)
    assert_is_sorted(compiled(implementation, k)(jnp.array(logits)), logits, k)


# Small groups, so that a short row takes both launches; room for exactly k, or for more.
CONFIGS = [
    topk_logsumexp_pallas.Config(group=8, chunk=32, groups_kept=16, ranked=16),
    topk_logsumexp_pallas.Config(group=4, chunk=64, groups_kept=32, ranked=64),
    topk_logsumexp_pallas.Config(group=1, chunk=1, groups_kept=1, ranked=32),
]


@functools.cache
def small_kernel(config):
    kernel = topk_logsumexp_pallas.topk_logsumexp
    return jax.jit(functools.partial(kernel, k=WANTED, interpret=True, config=config))


@st.composite
def rows(draw):
    """[1, 2, V]: from few distinct values to many, whole stretches of one, some not finite."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0, 1, 5, 1000, 10**6]))
    logits = rng.integers(-spread, spread + 1, (1, 2, COLUMNS)).astype(np.float32)
    logits *= np.float32(draw(st.sampled_from([1.0, 1e-3, 1e-38, 1e30])))
    for value in draw(st.lists(st.sampled_from([-math.inf, math.nan, -0.0, 7.0]), max_size=3)):
        start, stop = sorted(draw(st.tuples(*[st.integers(0, COLUMNS)] * 2)))
        logits[0, draw(st.integers(0, 1)), start:stop] = value
    return logits


@settings(deadline=None, derandomize=True, max_examples=100)
@given(logits=rows())
def test_random_rows(logits):
    for config in CONFIGS:
        assert_is_sorted(small_kernel(config)(jnp.array(logits)), logits, WANTED)
    assert_is_sorted(compiled("xla", WANTED)(jnp.array(logits)), logits, WANTED)


def test_refuses_bad_arguments():
    logits = jnp.zeros((1, 2, 8), jnp.float32)
    with pytest.raises(ValueError, match="`k` must be from 1 to V=8, got 9"):
        topk_logsumexp(logits, k=9)
    with pytest.raises(ValueError, match="`k` must be from 1 to V=8, got 0"):
        topk_logsumexp(logits, k=0)
    with pytest.raises(NotImplementedError, match="at most 1024 entries, got k=1025; use impl"):
        topk_logsumexp(jnp.zeros((1, 1, 2000)), k=1025, implementation="pallas")
    with pytest.raises(ValueError, match="`chunk` must hold a group, got 8 and 16"):
        topk_logsumexp_pallas.Config(group=16, chunk=8, groups_kept=1, ranked=1)
    with pytest.raises(ValueError, match="`config` has room for 8 entries, got k=9"):
        config = topk_logsumexp_pallas.Config(group=16, chunk=16, groups_kept=8, ranked=16)
        topk_logsumexp_pallas.topk_logsumexp(
            jnp.zeros((1, 1, 2000)), k=9, interpret=True, config=config
        )
