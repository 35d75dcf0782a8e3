"""`sort_by_expert` is numpy's stable sort."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import sort_by_expert, sort_by_expert_pallas
from pallas_kernels.sort_by_expert import check_ids

IMPLEMENTATIONS = ("xla", "pallas")


def random_ids(rng, rows, chosen, experts, shared):
    routed = experts - shared
    ids = np.stack([rng.permutation(routed)[: chosen - shared] for _ in range(rows)])
    if shared:
        ids = np.concatenate([ids, np.full((rows, 1), routed)], axis=1)
    return ids.astype(np.int32)


def assert_sorted(ids, experts, implementation):
    order = sort_by_expert(jnp.asarray(ids), experts=experts, implementation=implementation)
    np.testing.assert_array_equal(order.entry, np.argsort(ids.ravel(), kind="stable"))
    starts = np.searchsorted(np.sort(ids.ravel()), np.arange(experts + 1))
    np.testing.assert_array_equal(order.starts, starts)
    assert order.entry.dtype == order.starts.dtype == jnp.int32


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize(
    ("rows", "chosen", "experts"), [(1, 4, 9), (13, 3, 70), (64, 4, 31), (150, 2, 32), (70, 5, 6)]
)
def test_entries_go_by_expert_then_by_row(rows, chosen, experts, shared, implementation):
    ids = random_ids(np.random.default_rng(rows), rows, chosen, experts, shared)
    assert_sorted(ids, experts, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_all_rows_may_choose_one_expert(implementation):
    ids = np.full((40, 1), 3, np.int32)
    assert_sorted(ids, 8, implementation)


def test_more_entries_than_a_step_of_the_kernel(monkeypatch):
    monkeypatch.setattr(sort_by_expert_pallas, "_MOST_LANES", 32)
    assert_sorted(random_ids(np.random.default_rng(0), 45, 3, 11, 1), 11, "pallas")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(2, 4), st.booleans())
def test_kernel_sorts_as_numpy(seed, rows, chosen, shared):
    rng = np.random.default_rng(seed)
    assert_sorted(random_ids(rng, rows, chosen, 36, int(shared)), 36, "pallas")


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"`ids` must be int32 \[R, K\], got float32"):
        check_ids(jnp.zeros((2, 3)))
