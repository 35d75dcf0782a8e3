"""Top-k and top-p filters against sorts in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.topk import keep_top

VOCAB = 24
filtered = jax.jit(keep_top)


def kept_by_sorting(logits, k, p):
    """Top-k, then top-p of the renormalised rest; equal logits stay together."""
    order = np.sort(logits)[::-1]
    kept = logits >= order[min(k, VOCAB) - 1] if k else np.ones(VOCAB, bool)
    weight = np.where(kept, np.exp(logits.astype(np.float64) - logits.max()), 0.0)
    if p < 1:
        for value in sorted(set(logits[kept]), reverse=True):
            mass = weight[logits >= value].sum()
            if mass >= p * weight.sum() * (1 - 1e-9):
                return kept & (logits >= value), mass / weight.sum()
    return kept, 1.0


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.integers(-12, 12), min_size=VOCAB, max_size=VOCAB),
    st.integers(0, VOCAB + 3),
    st.sampled_from([0.05, 0.3, 0.51, 0.9, 0.97, 1.0]),
)
def test_keep_top_is_the_sorted_filter(steps, k, p):
    logits = np.array(steps, np.float32) / 2
    expected, mass = kept_by_sorting(logits, k, np.float32(p))
    got = filtered(
        jnp.array(logits)[None, None],
        jnp.array([k], jnp.int32),
        jnp.array([p], jnp.float32),
    )[0, 0]
    # On the very edge of p, rounding may take one more group of equal logits.
    if abs(mass - p) > 1e-6:
        np.testing.assert_array_equal(got, expected)


def test_keep_top_never_empties_a_row():
    logits = jnp.array([[[-1e30, 0.0, -jnp.inf, 3.0]]], jnp.float32)
    kept = keep_top(logits, jnp.array([1], jnp.int32), jnp.array([1e-6], jnp.float32))
    assert kept.tolist() == [[[False, False, False, True]]]
