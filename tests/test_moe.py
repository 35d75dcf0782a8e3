"""Experts: counted places are a stable sort, and a row's answer depends on that row alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hybrid import target_of

from ddtree_jax.models.moe import places_by_group


@pytest.mark.parametrize("groups", [1, 5, 40])
def test_places_are_those_of_a_stable_sort(groups):
    group = np.random.default_rng(groups).integers(0, groups, 70).astype(np.int32)
    place, sizes = jax.jit(places_by_group, static_argnums=1)(jnp.asarray(group), groups)
    np.testing.assert_array_equal(place, np.argsort(np.argsort(group, kind="stable")))
    np.testing.assert_array_equal(sizes, np.bincount(group, minlength=groups))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_a_row_alone_gets_the_same_answer(family):
    experts = target_of(family).layers[0].mlp
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9, 64)), jnp.float32)
    together = experts(rows, None)[0]
    for slot, row in ((0, 0), (1, 8)):
        alone = experts(rows[slot : slot + 1, row : row + 1], None)[0]
        np.testing.assert_allclose(together[slot, row], alone[0, 0], atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe"])
def test_experts_are_a_weighted_sum_over_the_chosen(family):
    experts = target_of(family).layers[0].mlp
    row = np.random.default_rng(1).normal(size=64).astype(np.float32)
    weight, index = experts.choose(jnp.asarray(row)[None, None])
    expected = np.zeros(64)
    for share, expert in zip(np.asarray(weight)[0, 0], np.asarray(index)[0, 0], strict=True):
        gate, up = np.split(row @ np.asarray(experts.gate_up[...][expert]), 2)
        expected += share * (
            gate / (1 + np.exp(-gate)) * up @ np.asarray(experts.down[...][expert])
        )
    if family == "qwen3_5_moe":
        gate = 1 / (1 + np.exp(-row @ np.asarray(experts.shared_gate[...])))
        expected += gate * np.asarray(experts.shared(jnp.asarray(row)[None, None], None))[0, 0, 0]
    np.testing.assert_allclose(
        experts(jnp.asarray(row)[None, None], None)[0, 0, 0], expected, atol=1e-5
    )
