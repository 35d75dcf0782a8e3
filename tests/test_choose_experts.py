"""`choose_experts` against `jax.lax.top_k` and numpy: ties, NaN, the shared expert's gate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choose_experts
from pallas_kernels.choose_experts import check_choice

IMPLEMENTATIONS = ("xla", "pallas")


def arguments(experts, parts, dtype, shape=(2, 3), hidden=80, ties=False):
    rng = np.random.default_rng(experts)
    logits = rng.normal(size=(parts, *shape, experts))
    if ties:
        logits = np.round(logits) + 0.0  # no -0, which top_k puts behind 0
    x, gate = rng.normal(size=(*shape, hidden)), rng.normal(size=hidden) * hidden**-0.5
    return jnp.asarray(logits, jnp.float32), jnp.asarray(x, dtype), jnp.asarray(gate, dtype)


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(
    ("experts", "count", "parts", "dtype"),
    [
        (8, 8, 1, jnp.float32),
        (40, 3, 4, jnp.float32),
        (256, 8, 16, jnp.bfloat16),
        (5, 1, 2, jnp.bfloat16),
    ],
)
def test_chosen_are_the_likeliest(experts, count, parts, dtype, normalise, implementation):
    product, x, _ = arguments(experts, parts, dtype)
    weight, index = choose_experts(
        product, x, count=count, normalise=normalise, implementation=implementation
    )
    logits = wide(product).sum(axis=0)
    share = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = np.argsort(-share, axis=-1, kind="stable")[..., :count]
    np.testing.assert_array_equal(index, expected)
    share = np.take_along_axis(share, expected, axis=-1)
    if normalise:
        share /= share.sum(axis=-1, keepdims=True)
    error = 1e-6 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(weight, share, rtol=error)
    assert weight.dtype == jnp.float32
    np.testing.assert_array_equal(weight, weight.astype(dtype).astype(jnp.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("experts", [24, 64])
def test_equal_shares_go_to_the_lower_id(experts, implementation):
    product, x, _ = arguments(experts, 1, jnp.float32, shape=(1, 50), ties=True)
    options = {"count": 6, "normalise": True, "implementation": implementation}
    _, index = choose_experts(product, x, **options)
    np.testing.assert_array_equal(index, jax.lax.top_k(product[0], 6)[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ids_are_distinct_whatever_the_logits(implementation):
    product = jnp.full((1, 1, 3, 20), jnp.nan).at[0, 0, 1].set(-jnp.inf).at[0, 0, 2].set(1.0)
    product = product.at[0, 0, 2, 7].set(-jnp.nan)
    x = jnp.ones((1, 3, 16))
    _, index = choose_experts(product, x, count=20, normalise=True, implementation=implementation)
    np.testing.assert_array_equal(jnp.sort(index, axis=-1)[0], [np.arange(20)] * 3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("hidden", [48, 1100])  # more than a step of the kernel's dot
def test_the_shared_expert_is_the_last_choice(hidden, dtype, implementation):
    product, x, gate = arguments(24, 2, dtype, hidden=hidden)
    options = {"count": 4, "normalise": True, "implementation": implementation}
    alone = choose_experts(product, x, **options)
    weight, index = choose_experts(product, x, gate, **options)
    np.testing.assert_array_equal(weight[..., :4], alone[0])
    np.testing.assert_array_equal(index[..., :4], alone[1])
    np.testing.assert_array_equal(index[..., 4], np.full((2, 3), 24))
    logit = wide(x) @ wide(gate)
    error = 1e-5 if dtype == jnp.float32 else 2**-6
    np.testing.assert_allclose(weight[..., 4], 1 / (1 + np.exp(-logit)), rtol=error)


def test_bad_arguments_are_refused():
    product, x, gate = arguments(24, 2, jnp.float32)
    options = {"count": 4, "normalise": True}
    with pytest.raises(ValueError, match=r"`parts` must be .*got \(2, 2, 3, 24\) and x \(2, 2"):
        check_choice(product, x[:, :2], None, 4)
    with pytest.raises(ValueError, match=r"`count` must be in \[1, 24\], got 25"):
        choose_experts(product, x, count=25, normalise=True)
    with pytest.raises(ValueError, match=r"`shared_gate` must be float32 of shape \(80,\)"):
        check_choice(product, x, gate[:16], 4)
    with pytest.raises(ValueError, match="`x` must be bfloat16 or float32, got float16"):
        choose_experts(product, x.astype(jnp.float16), **options)
    with pytest.raises(NotImplementedError, match="at most 2048 experts in registers, got 4096"):
        wide_product = jnp.zeros((1, 2, 3, 4096))
        choose_experts(wide_product, x, **options, implementation="pallas")
