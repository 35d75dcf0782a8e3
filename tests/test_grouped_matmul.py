"""`grouped_matmul`: every implementation against each row with its own kernel in float64."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, grouped_matmul_pallas
from pallas_kernels.grouped_matmul import definition


class Case(NamedTuple):
    """Sizes of groups, I, O, dtype."""

    sizes: tuple[int, ...]
    inner: int = 32
    outer: int = 48
    dtype: type = jnp.float32


CASES = {
    "one_row": Case((0, 0, 1)),
    "empty_ends": Case((0, 3, 0, 17, 1, 0)),
    "one_group_takes_all": Case((0, 40, 0, 0)),
    "wide": Case((5, 16, 33), inner=128, outer=128),
    "many_rows": Case((70, 90), inner=64),
    "bfloat16": Case((2, 0, 30), inner=64, dtype=jnp.bfloat16),
}


def arguments(case, seed=0):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(sum(case.sizes), case.inner))
    kernels = rng.normal(size=(len(case.sizes), case.inner, case.outer)) * case.inner**-0.5
    rows, kernels = (jnp.asarray(x, case.dtype) for x in (rows, kernels))
    return rows, kernels, jnp.asarray(case.sizes, jnp.int32)


def oracle(rows, kernels, sizes):
    group = np.repeat(np.arange(len(sizes)), sizes)
    return np.einsum("ri,rio->ro", np.float64(rows), np.float64(kernels)[group])


@pytest.mark.parametrize("implementation", ["xla", "pallas", "definition"])
@pytest.mark.parametrize("name", CASES)
def test_each_row_meets_its_groups_kernel(name, implementation):
    args = arguments(CASES[name])
    call = functools.partial(grouped_matmul, implementation=implementation)
    got = jax.jit(definition if implementation == "definition" else call)(*args)
    error = 2e-6 if CASES[name].dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.float64(got), oracle(*args), atol=error, rtol=error)


def test_kernel_gives_the_same_for_any_config():
    args = arguments(CASES["empty_ends"])
    config = grouped_matmul_pallas.Config(tile_rows=32, tile_columns=16, block_inner=16)
    call = functools.partial(grouped_matmul_pallas.grouped_matmul, interpret=True, config=config)
    np.testing.assert_allclose(jax.jit(call)(*args), oracle(*args), atol=2e-6)


def test_bad_arguments_are_refused():
    rows, kernels, sizes = arguments(CASES["empty_ends"])
    with pytest.raises(ValueError, match="both float32, got float32 and bfloat16"):
        grouped_matmul(rows, kernels.astype(jnp.bfloat16), sizes)
    with pytest.raises(NotImplementedError, match="multiples of 16, got 32 x 40"):
        grouped_matmul(rows, kernels[..., :40], sizes, implementation="pallas")
