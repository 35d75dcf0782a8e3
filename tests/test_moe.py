"""Experts: a weighted sum over the chosen, and a row's answer depends on that row alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hybrid import target_of

FAMILIES = ("qwen3_moe", "qwen3_5_moe")
IMPLEMENTATIONS = ("xla", "pallas")


def answer(experts, rows, kernels):
    """[B, R, D]."""
    return jnp.sum(experts(rows, kernels), axis=0)


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_alone_gets_the_same_answer(family, kernels):
    experts = target_of(family).layers[0].mlp
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 64)), jnp.float32)
    run = jax.jit(lambda rows: answer(experts, rows, kernels))
    together = run(rows)
    for slot, row in ((0, 0), (1, 8)):
        alone = run(rows[slot : slot + 1, row : row + 1])
        np.testing.assert_allclose(together[slot, row], alone[0, 0], atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_whatever_the_others_are(family, dtype):
    experts = target_of(family).layers[0].mlp
    rng = np.random.default_rng(2)
    rows = jnp.asarray(rng.normal(size=(1, 11, 64)), dtype)
    others = jnp.asarray(rng.normal(size=(1, 11, 64)), dtype).at[0, 5].set(rows[0, 5])
    graph, params = nnx.split(experts)
    experts = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    run = jax.jit(lambda rows: experts(rows, "pallas"))
    np.testing.assert_array_equal(run(rows)[:, 0, 5], run(others)[:, 0, 5])


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_a_weighted_sum_over_the_chosen(family, kernels):
    experts = target_of(family).layers[0].mlp
    row = np.random.default_rng(1).normal(size=64).astype(np.float32)
    logits = row @ np.asarray(experts.router[...])
    share = np.exp(logits - logits.max())
    chosen = np.argsort(-share)[:3]
    weight = share[chosen] / share[chosen].sum()
    if family == "qwen3_5_moe":
        chosen = np.append(chosen, len(share))
        gate = 1 / (1 + np.exp(-row @ np.asarray(experts.shared_gate[...])))
        weight = np.append(weight, gate)
    expected = np.zeros(64)
    for share, expert in zip(weight, chosen, strict=True):
        gate, up = np.split(row @ np.asarray(experts.gate_up[...][expert]), 2)
        gated = gate / (1 + np.exp(-gate)) * up
        expected += share * (gated @ np.asarray(experts.down[...][expert]))
    got = answer(experts, jnp.asarray(row)[None, None], kernels)[0, 0]
    np.testing.assert_allclose(got, expected, atol=1e-5)
