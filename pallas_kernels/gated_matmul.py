"""The first half of a gated MLP: silu(x @ gate) * (x @ up) in one pass over both matrices.

`gated_matmul` is the public op; `definition` is what it means.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch, gated_matmul_pallas, skinny_matmul_pallas
from pallas_kernels.skinny_matmul import check_product, choose

# On an H200 the compiler's own product wins at 128 rows (scripts/results/kernel_log.md).
MOST_ROWS = 64


def gated_matmul(
    x: Float[Array, "B R I"],
    gate_up: Float[Array, "I F2"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B R F"]:
    """silu(x @ gate) * (x @ up), in x's dtype.

    Args:
      x, gate_up: of one dtype, bfloat16 or float32; gate is the first half of gate_up's columns.
      implementation: None, "xla" or "pallas", see `dispatch.choose`. None takes the kernel for
        at most `MOST_ROWS` rows of bfloat16.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
      NotImplementedError: the named implementation cannot run here.

    Source: SwiGLU, arXiv 2002.05202.
    """
    check_product("gate_up", x, gate_up)
    inner, columns = gate_up.shape
    if columns % 2:
        raise ValueError(f"`gate_up` must have an even number of columns, got {columns}")
    unsupported = skinny_matmul_pallas.unsupported(x.dtype, inner, columns // 2)
    if choose("gated_matmul", x, implementation, unsupported, most_rows=MOST_ROWS) == "xla":
        return definition(x, gate_up)
    return gated_matmul_pallas.gated_matmul(x, gate_up, interpret=dispatch.interpret())


def definition(x: Float[Array, "B R I"], gate_up: Float[Array, "I F2"]) -> Float[Array, "B R F"]:
    """The meaning of `gated_matmul` in plain jnp."""
    product = jnp.einsum("bri,io->bro", x, gate_up, precision=dispatch.precision_of(x))
    gate, up = jnp.split(product, 2, axis=-1)
    return jax.nn.silu(gate) * up
