"""Matrix products of rows with the kernel of the group that each belongs to: experts of an MoE.

`grouped_matmul` is the public op; `definition` is what it means. Each MoE layer calls it twice.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import dispatch, grouped_matmul_pallas


def grouped_matmul(
    rows: Float[Array, "R I"],
    kernels: Float[Array, "E I O"],
    sizes: Int32[Array, " E"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "R O"]:
    """rows @ kernels[group of the row], where the first sizes[0] rows are group 0's, and so on.

    Only the kernels of groups that have rows are read, each once for up to 16 rows (64 where
    groups are large).

    Args:
      rows, kernels: of one dtype, bfloat16 or float32.
      sizes: rows of each group, at least 0. Rows past their sum give 0 or anything finite.
      implementation: None, "xla" (`jax.lax.ragged_dot`) or "pallas", see `dispatch.choose`.

    Returns:
      In the dtype of `rows`; sums in float32, and float32 inputs are not rounded.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
      NotImplementedError: the named implementation cannot run here.
    """
    _check(rows, kernels, sizes)
    inner, outer = kernels.shape[1:]
    chosen = dispatch.choose(
        "grouped_matmul",
        implementation,
        grouped_matmul_pallas.unsupported(rows.dtype, inner, outer),
    )
    if chosen == "xla":
        # On a GPU this writes every group's masked rows: use it on a CPU only.
        return jax.lax.ragged_dot(rows, kernels, sizes, precision=dispatch.precision_of(rows))
    return grouped_matmul_pallas.grouped_matmul(
        rows, kernels, sizes, interpret=dispatch.interpret()
    )


def definition(
    rows: Float[Array, "R I"], kernels: Float[Array, "E I O"], sizes: Int32[Array, " E"]
) -> Float[Array, "R O"]:
    """The meaning of `grouped_matmul`: each row with a kernel of its own."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)
    group = jnp.sum(ends[None, :] <= row[:, None], axis=1)
    own = kernels[jnp.minimum(group, kernels.shape[0] - 1)].astype(jnp.float32)
    out = jnp.einsum(
        "ri,rio->ro", rows.astype(jnp.float32), own, precision=jax.lax.Precision.HIGHEST
    )
    return jnp.where((row < ends[-1])[:, None], out, 0.0).astype(rows.dtype)


def _check(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> None:
    if kernels.ndim != 3 or rows.ndim != 2 or rows.shape[1] != kernels.shape[1]:
        raise ValueError(
            f"`rows` must be [R, I] and `kernels` [E, I, O], got {rows.shape} and {kernels.shape}"
        )
    if rows.dtype != kernels.dtype or rows.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            "`rows` and `kernels` must both be bfloat16 or both float32, "
            f"got {rows.dtype.name} and {kernels.dtype.name}"
        )
    if sizes.shape != kernels.shape[:1] or sizes.dtype != jnp.int32:
        raise ValueError(
            f"`sizes` must be int32 of shape {kernels.shape[:1]}, "
            f"got {sizes.dtype.name} of shape {sizes.shape}"
        )
