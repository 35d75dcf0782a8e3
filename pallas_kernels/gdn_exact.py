"""Products in true float32 from tensor cores, inside kernels of Gated DeltaNet.

A float32 `dot` without tensor cores is slow. Where one side is a bfloat16 row (keys, queries), the
other is split into three bfloat16 terms that add up to it: three exact products.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike

from pallas_kernels import dispatch


def terms_for(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, ...]:
    """float32 as a sum of arrays of `dtype`: itself, or three bfloat16 of 24 bits together."""
    if dtype == jnp.float32:
        return (x,)
    terms = []
    for _ in range(3):
        # The upper half of the bits, as they are: rounding would take the GPU's slow converter.
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        upper = (bits >> 16).astype(jnp.uint16)
        terms.append(jax.lax.bitcast_convert_type(upper, jnp.bfloat16))
        x = x - jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return tuple(terms)


def exact_dot(
    left: jax.Array,
    terms: tuple[jax.Array, ...],
    total: jax.Array | None = None,
    **transposed: bool,
) -> jax.Array:
    """left x (sum of terms) in float32, the small terms first, on top of total."""
    exact = dispatch.precision_of(left)
    for term in reversed(terms):
        part = pltriton.dot(left, term, precision=exact, **transposed)
        total = part if total is None else total + part
    return total
