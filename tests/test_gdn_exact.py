"""Three bfloat16 terms are a float32, whole; two of them are it but for 16 bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gdn_exact import terms_for


@pytest.mark.parametrize("exponent", [-80, -20, 0, 20, 80])
def test_terms_add_up_to_the_number(exponent):
    rng = np.random.default_rng(exponent + 100)
    x = (rng.normal(size=4096) * 2.0**exponent).astype(np.float32)
    x[:3] = 0.0, 2.0**exponent, -(2.0**exponent)
    terms = terms_for(jnp.asarray(x), jnp.bfloat16)
    assert [term.dtype for term in terms] == [jnp.bfloat16] * 3
    wide = [np.asarray(term.astype(jnp.float32), np.float64) for term in terms]
    np.testing.assert_array_equal(sum(wide), x)
    assert np.all(np.abs(wide[0] + wide[1] - x) <= np.abs(x) * 2.0**-15)


def test_a_float32_row_needs_one_term():
    x = jnp.asarray([1.5, -2.25], jnp.float32)
    (term,) = terms_for(x, jnp.float32)
    assert term is x
