"""From the in-projection to the recurrence and behind it: kernels against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gdn_errors import node_paths
from jaxtyping import TypeCheckError

from pallas_kernels import gated_norm, gdn_heads, gdn_tree, gdn_wy
from pallas_kernels.gdn_heads import definition, gated_norm_definition
from pallas_kernels.gdn_tree import definition as tree_definition

EPS = 1e-6
WIDTH = 4


def arguments(parts=1, slots=2, rows=17, key_heads=2, heads=4, dim=16, dtype=jnp.float32, seed=0):
    """Of `gdn_heads`: a random tree's window and paths, rates strong and weak."""
    rng = np.random.default_rng(seed)
    keys, values = key_heads * dim, heads * dim
    channels = 2 * keys + values
    columns = channels + values + 2 * heads
    product = rng.normal(size=(parts, slots, rows, columns)) * 3
    place = np.arange(rows)
    parent = np.array([[rng.integers(-1, max(row, 1)) for row in place] for _ in range(slots)])
    parent[:, 0] = -1
    window = np.zeros((slots, rows, WIDTH), np.int32)
    for slot in range(slots):
        for row in place:
            at, behind = row, 0
            for distance in range(WIDTH):
                window[slot, row, distance] = WIDTH - 1 + at if at >= 0 else WIDTH - 2 - behind
                behind += at < 0
                at = parent[slot, at] if at >= 0 else -1
    paths = [node_paths(list(of_slot), rows) for of_slot in parent]
    path = jnp.asarray(np.stack(paths)[:, :, : max((p >= 0).sum(axis=1).max() for p in paths)])
    return (
        jnp.asarray(product, jnp.float32 if parts > 1 else dtype),
        jnp.asarray(rng.normal(size=(slots, WIDTH - 1, channels)), dtype),
        jnp.asarray(rng.normal(size=(WIDTH, channels)), dtype),
        jnp.asarray(window),
        jnp.asarray(rng.normal(size=heads), jnp.float32),
        jnp.asarray(rng.normal(size=heads) * 20, jnp.float32),
    ), {"num_key_heads": key_heads, "key_dim": dim, "path": path}


CASES = {
    "one_row": {"rows": 1},
    "ragged": {"rows": 17},
    "parts": {"rows": 40, "parts": 3},
    "one_key_head": {"key_heads": 1, "heads": 3, "slots": 1},
    "wide": {"rows": 20, "dim": 128, "slots": 1},
}
DTYPES = [jnp.float32, jnp.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_heads_are_their_definition(name, dtype):
    args, sizes = arguments(**CASES[name], dtype=dtype)
    got = jax.jit(lambda *a: gdn_heads(*a, **sizes, implementation="pallas"))(*args)
    wanted = definition(*args, **sizes)
    # Of the rows that it gave, which may differ by a rounding from the definition's.
    scales = gdn_wy.scales(got.query, got.key, got.log_decay, sizes["path"])
    for ours, theirs in zip((*got[:6], *got.scales), (*wanted[:6], *scales), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        rounding = 2e-6 if ours.dtype == jnp.float32 else 2**-7
        ours, theirs = (np.asarray(x, np.float64) for x in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=rounding, atol=rounding)
    np.testing.assert_array_equal(got.mixed, wanted.mixed)


def test_a_chain_is_convolved_as_a_sequence():
    (parts, before, kernel, _, *rates), sizes = arguments(slots=1, rows=9)
    del sizes["path"]
    place = np.arange(9)[:, None] + WIDTH - 1 - np.arange(WIDTH)[None]
    window = jnp.asarray(place[None], jnp.int32)
    got = gdn_heads(parts, before, kernel, window, *rates, **sizes, implementation="pallas")
    assert got.scales is None
    channels = kernel.shape[1]
    inputs = np.concatenate([before[0], parts[0, 0, :, :channels]])
    wanted = np.stack(
        [np.convolve(inputs[:, c], np.asarray(kernel)[::-1, c], "valid") for c in range(channels)]
    ).T
    wanted = wanted / (1 + np.exp(-wanted))
    keys = sizes["num_key_heads"] * sizes["key_dim"]
    np.testing.assert_allclose(got.query.reshape(9, -1), wanted[:, :keys], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        got.value.reshape(9, -1), wanted[:, 2 * keys :], rtol=1e-4, atol=1e-5
    )


def test_scales_are_what_the_recurrence_needs_to_know():
    args, sizes = arguments(rows=20)
    rows = gdn_heads(*args, **sizes, implementation="pallas")
    state = jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 16, 16)), jnp.float32)
    given = *rows[:5], state, sizes["path"]

    def tree(state, scales):
        return gdn_tree(*given[:5], state, given[6], scales=scales, implementation="pallas")

    wanted = tree_definition(*given)
    for got in (tree(state, rows.scales), tree(state, None)):
        for ours, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    # They are believed: with no way to the prefix its state is as good as zero.
    far = rows.scales._replace(from_prefix=jnp.zeros_like(rows.scales.from_prefix))
    for ours, theirs in zip(tree(state, far), tree(0 * state, rows.scales), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    short = rows.scales._replace(key=rows.scales.key[:, :-1])
    with pytest.raises((ValueError, TypeCheckError), match="key"):
        tree(state, short)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_gated_norm_is_its_definition(name, dtype):
    args, _ = arguments(**CASES[name], dtype=dtype)
    parts, kernel, heads = args[0], args[2], args[4].shape[0]
    size = (parts.shape[3] - kernel.shape[1] - 2 * heads) // heads
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(*parts.shape[1:3], heads, size)), dtype)
    scale = jnp.asarray(rng.normal(size=size), jnp.float32)
    settings = {"start": kernel.shape[1], "eps": EPS}
    got = jax.jit(lambda *a: gated_norm(*a, **settings, implementation="pallas"))(x, parts, scale)
    wanted = gated_norm_definition(x, parts, scale, **settings)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    rounding = 2e-6 if dtype == jnp.float32 else 2**-6
    ours, theirs = (np.asarray(x, np.float64) for x in (got, wanted))
    np.testing.assert_allclose(ours, theirs, rtol=rounding, atol=rounding)


def test_what_does_not_fit_is_refused():
    args, sizes = arguments()
    for place, name in ((0, "parts"), (1, "before"), (3, "window"), (5, "time_bias")):
        wrong = list(args)
        wrong[place] = wrong[place][..., :-1]
        # In tests the annotations refuse most of it first.
        with pytest.raises((ValueError, TypeCheckError), match=name):
            gdn_heads(*wrong, **sizes)
    with pytest.raises(ValueError, match="`kernel`"):
        gdn_heads(*args, num_key_heads=9, key_dim=16)
    with pytest.raises((ValueError, TypeCheckError), match="path"):
        gdn_heads(*args, **sizes | {"path": sizes["path"][:, :-1]})
    with pytest.raises(NotImplementedError, match="values must be a multiple of the key dim 32"):
        odd = {"num_key_heads": 1, "key_dim": 32, "implementation": "pallas"}
        gdn_heads(*arguments(key_heads=2, heads=3)[0], **odd)
    x = jnp.zeros((2, 17, 4, 16))
    with pytest.raises(ValueError, match="`parts`"):
        gated_norm(x, args[0], jnp.ones(16), start=10**6, eps=EPS)
    with pytest.raises((ValueError, TypeCheckError), match="scale"):
        gated_norm(x, args[0], jnp.ones(3), start=0, eps=EPS)
