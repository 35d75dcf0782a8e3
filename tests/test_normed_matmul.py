"""`normed_matmul` against a float64 norm and product in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import normed_matmul
from pallas_kernels.normed_matmul import check_squares


def arguments(slots, rows, groups, size, cuts, columns, dtype):
    """Squares of what each group was before other factors: not those of x."""
    rng = np.random.default_rng(groups)
    x = jnp.asarray(rng.normal(size=(slots, rows, groups, size)), dtype)
    squares = jnp.asarray(rng.uniform(0.1, 9.0, (slots, rows, groups, cuts)), jnp.float32)
    kernel = rng.normal(size=(groups * size, columns)) * (groups * size) ** -0.5
    return x, squares, jnp.asarray(kernel, dtype)


CASES = {
    "one_row": (1, 1, 4, 128, 4, 64),
    "groups_in_many_shares": (1, 2, 16, 128, 1, 48),
    "blocks_of_several_groups": (3, 1, 8, 16, 2, 32),
    "rows_of_two_tiles": (5, 30, 4, 32, 1, 16),
    "columns_past_the_end": (1, 1, 3, 64, 1, 1040),
}


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_groups_are_normed_by_the_given_squares(name, dtype, implementation):
    x, squares, kernel = arguments(*CASES[name], dtype)
    parts = jax.jit(normed_matmul, static_argnames=("eps", "implementation"))(
        x, squares, kernel, eps=1e-3, implementation=implementation
    )
    wide = [np.asarray(array.astype(jnp.float32), np.float64) for array in (x, squares, kernel)]
    scale = 1 / np.sqrt(wide[1].sum(axis=3) / x.shape[3] + 1e-3)
    wanted = (wide[0] * scale[..., None]).reshape(*x.shape[:2], -1) @ wide[2]
    got = np.asarray(parts.astype(jnp.float32), np.float64).sum(axis=0)
    close = 3e-2 if dtype == jnp.bfloat16 else 2e-5
    np.testing.assert_allclose(got, wanted, atol=close, rtol=close)


def test_wrong_arguments_are_named():
    x, squares, kernel = arguments(1, 2, 4, 16, 1, 32, jnp.float32)
    for one, other, message in (
        (squares[:, :1], x, r"`squares` must be \[B, R, G, Q\] .*got \(1, 1, 4, 1\)"),
        (squares, x[0], r"`squares` must be .* and x \(2, 4, 16\)"),
        (squares.astype(jnp.bfloat16), x, "`squares` must be float32, got bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            check_squares(one, other)
    with pytest.raises(ValueError, match=r"`kernel` must be \[I, O\] .*got \(63, 32\)"):
        normed_matmul(x, squares, kernel[:-1], eps=1e-6)
    with pytest.raises(NotImplementedError, match="a power of two from 16 to 128, got 24"):
        arrays = arguments(1, 1, 2, 24, 1, 32, jnp.float32)
        normed_matmul(*arrays, eps=1e-6, implementation="pallas")
