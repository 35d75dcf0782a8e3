"""One token of a Gated DeltaNet layer: the kernel against the ops of a tree of one node."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gdn_step
from pallas_kernels.gdn_step import definition

WIDTH = 4


def arguments(parts=1, slots=2, key_heads=2, heads=4, dim=16, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    channels = (2 * key_heads + heads) * dim
    columns = channels + heads * dim + 2 * heads

    def normal(*shape, dtype=jnp.float32, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    arrays = {
        "parts": normal(parts, slots, 1, columns, dtype=jnp.float32 if parts > 1 else dtype),
        "conv": normal(slots, WIDTH, channels, dtype=dtype),
        "kernel": normal(WIDTH, channels, dtype=dtype),
        "log_rate": normal(heads),
        "time_bias": normal(heads, scale=5.0),
        "scale": normal(dim),
        "state": normal(slots, heads, dim, dim),
        "lengths": jnp.asarray(rng.integers(0, 9, slots), jnp.int32),
        "count": jnp.ones((slots,), jnp.int32),
    }
    return arrays, {"num_key_heads": key_heads}


CASES = {
    "groups": {},
    "parts": {"parts": 3},
    "a_key_head_a_value_head": {"key_heads": 4},
    "one_slot": {"slots": 1, "key_heads": 1, "heads": 3},
    "wide": {"slots": 1, "dim": 128},
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_kernel_is_its_definition(name, dtype):
    arrays, options = arguments(**CASES[name], dtype=dtype)
    got = jax.jit(lambda a: gdn_step(**a, **options, implementation="pallas"))(arrays)
    wanted = jax.jit(lambda a: definition(**a, **options))(arrays)
    # The convolved rows are rounded to bfloat16 once in the kernel, several times in jnp.
    loose = 3e-2 if dtype == jnp.bfloat16 else 2e-5
    squares = (of.squares.sum(axis=3, keepdims=True) for of in (got, wanted))
    got, wanted = (
        of._replace(squares=sums) for of, sums in zip((got, wanted), squares, strict=True)
    )
    for ours, theirs, close in zip(got, wanted, (loose, loose, loose, 0.0), strict=True):
        assert ours.dtype == theirs.dtype
        ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
        np.testing.assert_allclose(ours, theirs, atol=close, rtol=close)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_steps_are_the_recurrence_and_an_idle_slot_keeps_its_state(implementation):
    """Against the equations in float64, from a start of zeros; slot 1 runs at odd steps only."""
    keys, heads, dim = 2, 4, 16
    arrays, options = arguments(seed=1)
    arrays |= {name: jnp.zeros_like(arrays[name]) for name in ("conv", "state", "lengths")}
    step = jax.jit(lambda a: gdn_step(**a, **options, implementation=implementation))
    kernel, rate, bias, scale = (
        np.asarray(arrays[name], np.float64)
        for name in ("kernel", "log_rate", "time_bias", "scale")
    )
    channels, values = kernel.shape[1], heads * dim
    past, states = [[], []], np.zeros((2, heads, dim, dim))
    for number in range(7):
        fresh, _ = arguments(seed=10 + number)
        runs = np.array([1, number % 2], np.int32)
        given = arrays | {"parts": fresh["parts"], "count": jnp.asarray(runs)}
        out = step(given)
        for slot in np.flatnonzero(runs):
            row = np.asarray(fresh["parts"][0, slot, 0], np.float64)
            past[slot].append(row[:channels])
            taps = zip(reversed(past[slot]), reversed(kernel), strict=False)
            mixed = sum(taken * tap for taken, tap in taps)
            mixed = mixed / (1 + np.exp(-mixed))
            beta, decay = np.split(row[channels + values :], 2)
            decay = np.exp(-np.exp(rate) * np.log1p(np.exp(decay + bias)))
            for head in range(heads):
                at = head // (heads // keys) * dim
                query, key = mixed[at : at + dim], mixed[keys * dim + at :][:dim]
                query, key = (x / np.sqrt(np.sum(x * x) + 1e-6) for x in (query, key))
                value = mixed[2 * keys * dim + head * dim :][:dim]
                state = states[slot, head] * decay[head]
                update = (value - key @ state) / (1 + np.exp(-beta[head]))
                states[slot, head] = state = state + np.outer(key, update)
                answer = query @ state * dim**-0.5
                squares = np.sum(out.squares[slot, 0, head])
                np.testing.assert_allclose(squares, np.sum(answer**2), rtol=2e-4)
                gate = row[channels + head * dim :][:dim]
                wanted = answer * scale * gate / (1 + np.exp(-gate))
                np.testing.assert_allclose(out.out[slot, 0, head], wanted, atol=2e-4, rtol=2e-4)
        np.testing.assert_allclose(out.state, states, atol=2e-6, rtol=2e-5)
        for slot in np.flatnonzero(runs == 0):
            np.testing.assert_array_equal(out.conv[slot], arrays["conv"][slot])
            np.testing.assert_array_equal(out.state[slot], arrays["state"][slot])
        arrays |= {"state": out.state, "conv": out.conv, "lengths": arrays["lengths"] + runs}


def test_wrong_arguments_are_named():
    arrays, options = arguments()
    for name, wrong in (
        ("parts", jnp.zeros((1, 2, 2, 8))),
        ("conv", arrays["conv"][:, 1:]),
        ("kernel", arrays["kernel"][:, 1:]),
        ("state", arrays["state"].astype(jnp.bfloat16)),
        ("scale", jnp.ones(3)),
        ("lengths", jnp.zeros(3, jnp.int32)),
        ("log_rate", jnp.zeros(3)),
        ("time_bias", jnp.zeros(3)),
    ):
        with pytest.raises((ValueError, TypeError), match=f"`{name}`|{name}"):
            gdn_step(**(arrays | {name: wrong}), **options)
    with pytest.raises(ValueError, match="`num_key_heads` must divide"):
        gdn_step(**arrays, num_key_heads=3)
