"""Product of few rows whose groups are normed on the way.

`normed_matmul` is the public op; `definition` is what it means. A norm by groups only scales each
group's share of the product, so it needs no pass of its own where the sums of squares are at hand.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels import dispatch, skinny_matmul_pallas
from pallas_kernels.skinny_matmul import MOST_ROWS, check_product, choose
from pallas_kernels.skinny_matmul import definition as product


def normed_matmul(
    x: Float[Array, "B R G H"],
    squares: Float32[Array, "B R G Q"],
    kernel: Float[Array, "I O"],
    *,
    eps: float,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "P B R O"]:
    """Parts whose sum over the first axis is (x * scale) @ kernel, of each group the scale
    1 / sqrt(sum of its squares / H + eps).

    Args:
      x, kernel: of one dtype, bfloat16 or float32; I = G * H.
      squares: sums of the squares whose mean is meant, in Q parts.
      implementation: None, "xla" or "pallas", see `skinny_matmul`.

    Returns:
      One part in x's dtype, or several in float32; sums run in float32.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
      NotImplementedError: the named implementation cannot run here.
    """
    check_squares(squares, x)
    rows = x.reshape(*x.shape[:2], -1)
    check_product("kernel", rows, kernel)
    unsupported = skinny_matmul_pallas.unsupported_groups(x.dtype, x.shape[3])
    if choose("normed_matmul", rows, implementation, unsupported, most_rows=MOST_ROWS) == "xla":
        return definition(x, squares, kernel, eps=eps)
    return skinny_matmul_pallas.skinny_matmul(
        rows, kernel, squares, eps=eps, interpret=dispatch.interpret()
    )


def definition(
    x: Float[Array, "B R G H"],
    squares: Float32[Array, "B R G Q"],
    kernel: Float[Array, "I O"],
    *,
    eps: float,
) -> Float[Array, "1 B R O"]:
    """The meaning of `normed_matmul` in plain jnp."""
    scale = jax.lax.rsqrt(jnp.sum(squares, axis=3) / x.shape[3] + eps)
    scaled = (x.astype(jnp.float32) * scale[..., None]).astype(x.dtype)
    return product(scaled.reshape(*x.shape[:2], -1), kernel)


def check_squares(squares: jax.Array, x: jax.Array) -> None:
    """Raises ValueError unless these are squares of x's groups."""
    if x.ndim != 4 or squares.ndim != 4 or squares.shape[:3] != x.shape[:3]:
        raise ValueError(
            f"`squares` must be [B, R, G, Q] to fit x [B, R, G, H], got {squares.shape} and "
            f"x {x.shape}"
        )
    if squares.dtype != jnp.float32:
        raise ValueError(f"`squares` must be float32, got {squares.dtype.name}")
