"""Product of few rows with a large matrix, left as partial sums for the next kernel to add up.

`skinny_matmul` is the public op; `definition` is what it means. Few rows leave a product bound by
reading the matrix: the kernel splits it along the inner axis so that every multiprocessor reads,
and whoever consumes the product (`add_norm`, `rotate_heads`) sums the parts on the way.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import dispatch, skinny_matmul_pallas

# On an H200 the kernel wins up to here if its programs run in one wave, up to half of it if not
# (scripts/results/kernel_log.md); above is unmeasured.
MOST_ROWS = 128


def skinny_matmul(
    x: Float[Array, "B R I"],
    kernel: Float[Array, "I O"],
    *,
    dtype: DTypeLike | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "P B R O"]:
    """Parts whose sum over the first axis is x @ kernel.

    Args:
      x, kernel: of one dtype, bfloat16 or float32.
      dtype: of a sole part, x's if None; float32 leaves nothing rounded.
      implementation: None, "xla" or "pallas", see `dispatch.choose`. None takes the kernel for
        at most `MOST_ROWS` rows of bfloat16, and fewer where it has more programs than the GPU
        multiprocessors.

    Returns:
      One part in `dtype`, or several in float32; sums run in float32.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
      NotImplementedError: the named implementation cannot run here.
    """
    check_product("kernel", x, kernel)
    unsupported = skinny_matmul_pallas.unsupported(x.dtype, kernel.shape[0])
    one_wave = skinny_matmul_pallas.one_wave(*kernel.shape, x.dtype)
    most_rows = MOST_ROWS if one_wave else MOST_ROWS // 2
    if choose("skinny_matmul", x, implementation, unsupported, most_rows=most_rows) == "xla":
        return definition(x, kernel, dtype=dtype)
    dtype = None if dtype is None else jnp.dtype(dtype)
    return skinny_matmul_pallas.skinny_matmul(
        x, kernel, dtype=dtype, interpret=dispatch.interpret()
    )


def definition(
    x: Float[Array, "B R I"], kernel: Float[Array, "I O"], *, dtype: DTypeLike | None = None
) -> Float[Array, "1 B R O"]:
    """The meaning of `skinny_matmul` in plain jnp."""
    precision = dispatch.precision_of(x)
    whole = jnp.einsum("bri,io->bro", x, kernel, precision=precision, preferred_element_type=dtype)
    return whole[None]


def sum_parts(parts: Float[Array, "P B R O"], dtype: DTypeLike) -> Float[Array, "B R O"]:
    """The product, rounded once; several parts are added in float32."""
    total = parts[0] if parts.shape[0] == 1 else jnp.sum(parts.astype(jnp.float32), axis=0)
    return total.astype(dtype)


def check_product(name: str, x: jax.Array, kernel: jax.Array) -> None:
    """Raises ValueError unless x [B, R, I] and kernel [I, O] can be multiplied."""
    if x.ndim != 3 or kernel.ndim != 2 or x.shape[2] != kernel.shape[0]:
        raise ValueError(
            f"`{name}` must be [I, O] to fit x [B, R, I], got {kernel.shape} and x {x.shape}"
        )
    if x.dtype != kernel.dtype:
        raise ValueError(f"`{name}` must be {x.dtype.name} as x is, got {kernel.dtype.name}")


def choose(
    op: str,
    x: Float[Array, "B R I"],
    implementation: dispatch.Implementation | None,
    unsupported: str | None,
    *,
    most_rows: int,
) -> dispatch.Implementation:
    """`dispatch.choose` for a kernel that pays for few rows of bfloat16 only."""
    rows = x.shape[0] * x.shape[1]
    if implementation is None and (rows > most_rows or x.dtype == jnp.float32):
        unsupported = f"it does not pay for {rows} rows of {x.dtype.name}"
    return dispatch.choose(op, implementation, unsupported)
