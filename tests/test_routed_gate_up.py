"""`routed_gate_up` is a choice and its products: of a row alone in one kernel, else op by op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import choose_experts, routed_gate_up, sort_by_expert
from pallas_kernels.grouped_matmul import gate_up_definition
from pallas_kernels.routed_gate_up import check_kernels

COUNT, HIDDEN, INNER = 3, 64, 32


def arguments(shape=(1, 1), *, experts=20, parts=4, shared=True, dtype=jnp.float32, ties=False):
    """Parts, x, shared gate, kernels."""
    rng = np.random.default_rng(experts)
    logits = rng.normal(size=(parts, *shape, experts))
    if ties:
        logits = np.round(logits) + 0.0  # no -0, which top_k puts behind 0
    x, gate = rng.normal(size=(*shape, HIDDEN)), rng.normal(size=HIDDEN) * HIDDEN**-0.5
    kernels = rng.normal(size=(experts + shared, HIDDEN, 2 * INNER)) * HIDDEN**-0.5
    x, gate, kernels = (jnp.asarray(array, dtype) for array in (x, gate, kernels))
    return jnp.asarray(logits, jnp.float32), x, gate if shared else None, kernels


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"shared": False}, {"shape": (2, 3)}, {"ties": True, "experts": 40}], ids=str
)
def test_rows_meet_the_experts_they_choose(options, dtype, implementation):
    parts, x, gate, kernels = arguments(**options, dtype=dtype)
    choice = {"count": COUNT, "normalise": True}
    run = jax.jit(routed_gate_up, static_argnames=("count", "normalise", "implementation"))
    got = run(parts, x, gate, kernels, **choice, implementation=implementation)
    weight, ids = choose_experts(parts, x, gate, **choice, implementation="xla")
    ids = ids.reshape(-1, ids.shape[2])
    np.testing.assert_array_equal(got.ids, ids)
    np.testing.assert_allclose(
        got.weight, weight.reshape(ids.shape), rtol=1e-5 if dtype == jnp.float32 else 2**-7
    )
    wanted = gate_up_definition(x.reshape(-1, HIDDEN), kernels, ids)
    assert got.gated.dtype == dtype and got.gated.shape == (*ids.shape, INNER)
    close = 1e-5 if dtype == jnp.float32 else 2e-2
    wide = [array.astype(jnp.float32) for array in (got.gated, wanted)]
    np.testing.assert_allclose(*wide, atol=close, rtol=close)
    for ours, theirs in zip(got.order, sort_by_expert(ids, experts=len(kernels)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("fill", [np.nan, -np.inf, 0.0])
def test_a_row_alone_meets_its_choice_whatever_the_logits(fill, normalise):
    """All experts chosen: every place must find the expert that the written choice names."""
    parts, x, gate, kernels = arguments(experts=20, parts=1)
    parts = parts.at[..., ::2].set(fill)
    choice = {"count": 20, "normalise": normalise}
    got = routed_gate_up(parts, x, gate, kernels, **choice, implementation="pallas")
    np.testing.assert_array_equal(np.sort(got.ids[0]), np.arange(21))
    wanted = gate_up_definition(x[0], kernels, got.ids)
    np.testing.assert_allclose(got.gated, wanted, atol=1e-5, rtol=1e-5)


def test_wrong_kernels_are_named():
    parts, x, gate, kernels = arguments()
    with pytest.raises(ValueError, match=r"`kernels` must be \[21, 64, 2 F\] .*got \(20, 64, 64\)"):
        routed_gate_up(parts, x, gate, kernels[:-1], count=COUNT, normalise=True)
    with pytest.raises(ValueError, match=r"`kernels` must be .*got \(21, 64, 63\)"):
        check_kernels(kernels[..., :-1], x, 21)
    with pytest.raises(ValueError, match="`kernels` must be float32 as x is, got bfloat16"):
        check_kernels(kernels.astype(jnp.bfloat16), x, 21)
    with pytest.raises(NotImplementedError, match="must be multiples of 16, got 64 x 24"):
        narrow = kernels[..., :48]
        choice = {"count": COUNT, "normalise": True, "implementation": "pallas"}
        routed_gate_up(parts, x, gate, narrow, **choice)
