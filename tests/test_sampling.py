"""Sampling parameters are checked; drawn tokens have the exact distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.sampling import Requests, SamplingParams, choose_tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", -1),
        ("stop", [""]),
        ("stop_token_ids", [-3]),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"`{field}`"):
        SamplingParams(**{field: value})


def test_unknown_argument_is_refused_with_a_hint():
    with pytest.raises(ValueError, match="did you mean `temperature`"):
        SamplingParams(temprature=1.0)


def test_the_least_mode_is_asked_for():
    assert SamplingParams().needs == "greedy"
    assert SamplingParams(top_k=4).needs == "greedy"
    assert SamplingParams(temperature=1.0).needs == "sample"
    assert SamplingParams(temperature=1.0, top_p=0.9).needs == "filtered"


VOCAB = 12
LOGITS = jnp.array(np.random.default_rng(3).normal(size=VOCAB) * 1.5, jnp.float32)


def draw(count, temperature, top_k, top_p):
    """First tokens of `count` requests with seeds 0, 1, ... after the same context."""
    requests = Requests(
        seed=jnp.arange(count, dtype=jnp.uint32),
        temperature=jnp.full((count,), temperature, jnp.float32),
        top_k=jnp.full((count,), top_k, jnp.int32),
        top_p=jnp.full((count,), top_p, jnp.float32),
    )
    chosen = jax.jit(choose_tokens, static_argnames=("max_depth", "mode"))(
        jnp.broadcast_to(LOGITS, (count, 1, VOCAB)),
        jnp.zeros((count, 1), jnp.int32),
        jnp.full((count,), 17, jnp.int32),
        requests,
        max_depth=0,
        mode="filtered",
    )
    return np.asarray(chosen)[:, 0]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 6, 0.85)])
def test_draws_follow_the_exact_distribution(temperature, top_k, top_p):
    count = 20_000
    scaled = np.asarray(LOGITS, np.float64) / temperature
    if top_k:
        scaled[scaled < np.sort(scaled)[-top_k]] = -np.inf
    exact = np.exp(scaled - scaled.max())
    exact /= exact.sum()
    if top_p < 1:
        order = np.argsort(-exact)
        inside = np.cumsum(exact[order]) - exact[order] < top_p
        exact[order[~inside]] = 0.0
        exact /= exact.sum()
    seen = np.bincount(draw(count, temperature, top_k, top_p), minlength=VOCAB)
    assert not seen[exact == 0].any()
    live = exact > 0
    chi_square = np.sum((seen[live] - count * exact[live]) ** 2 / (count * exact[live]))
    # 11 degrees of freedom at most: 99.9% lie under 31.3. The seeds are fixed.
    assert chi_square < 31.3


def test_noise_belongs_to_seed_and_position_alone():
    requests = Requests(
        seed=jnp.array([5, 5], jnp.uint32),
        temperature=jnp.ones((2,), jnp.float32),
        top_k=jnp.zeros((2,), jnp.int32),
        top_p=jnp.ones((2,), jnp.float32),
    )
    flat = jnp.zeros((2, 3, 1000), jnp.float32)
    # Slot 0 stands two positions ahead of slot 1; its nodes have other depths.
    depth = jnp.array([[0, 1, 1], [2, 3, 3]], jnp.int32)
    chosen = choose_tokens(
        flat, depth, jnp.array([12, 10], jnp.int32), requests, max_depth=3, mode="sample"
    )
    np.testing.assert_array_equal(chosen[0], chosen[1])
    assert chosen[0, 0] != chosen[0, 1]


def test_argmax_ties_go_to_the_lowest_id():
    logits = jnp.array([[[1.0, 3.0, 3.0, 0.0]]])
    requests = Requests(
        jnp.zeros((1,), jnp.uint32),
        jnp.zeros((1,), jnp.float32),
        jnp.zeros((1,), jnp.int32),
        jnp.ones((1,), jnp.float32),
    )
    zero = jnp.zeros((1,), jnp.int32)
    for mode in ("greedy", "sample", "filtered"):
        chosen = choose_tokens(logits, zero[:, None], zero, requests, max_depth=0, mode=mode)
        assert chosen.tolist() == [[1]]
