"""The residual stream between two products: add an update, then RMSNorm for the next product.

`add_norm` is the public op; `definition` is what it means. It sums the parts of `skinny_matmul`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels import add_norm_pallas, dispatch
from pallas_kernels.skinny_matmul import sum_parts


def add_norm(
    x: Float[Array, "B R D"],
    update: Float[Array, "P B R D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, "B R D"], Float[Array, "B R D"]]:
    """(y, normed): y = x + sum of the update's parts, normed = y / rms(y) * scale.

    Args:
      x: bfloat16 or float32, and so is y. The sum of parts is rounded to x's dtype before the
        addition, as the product itself would be.
      scale: bfloat16 or float32, and so is `normed`; the mean of squares runs in float32.
      update: parts in bfloat16 or float32.
      eps: added to the mean of squares.
      implementation: None, "xla" or "pallas", see `dispatch.choose`.

    Raises:
      ValueError: shapes do not fit each other.
      NotImplementedError: the named implementation cannot run here.

    Source: RMSNorm, arXiv 1910.07467.
    """
    if update.shape[1:] != x.shape or scale.shape != x.shape[-1:]:
        raise ValueError(
            f"`update` must be [P, B, R, D] and `scale` [D] to fit x {x.shape}, "
            f"got {update.shape} and {scale.shape}"
        )
    chosen = dispatch.choose(
        "add_norm", implementation, add_norm_pallas.unsupported(x.dtype, x.shape[-1])
    )
    if chosen == "xla":
        return definition(x, update, scale, eps=eps)
    return add_norm_pallas.add_norm(x, update, scale, eps=eps, interpret=dispatch.interpret())


def definition(
    x: Float[Array, "B R D"],
    update: Float[Array, "P B R D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
) -> tuple[Float[Array, "B R D"], Float[Array, "B R D"]]:
    """The meaning of `add_norm` in plain jnp."""
    y = x + sum_parts(update, x.dtype)
    return y, rms_norm(y, scale, eps=eps)


def rms_norm(x: Float[Array, "*batch D"], scale: Array, *, eps: float) -> Float[Array, "*batch D"]:
    """x / rms(x) * scale over the last axis, in scale's dtype; the mean of squares in float32."""
    return unit_rms(x, eps).astype(scale.dtype) * scale.reshape((1,) * (x.ndim - 1) + (-1,))


def unit_rms(x: Float[Array, "*batch D"], eps: float) -> Float32[Array, "*batch D"]:
    """x / rms(x) over the last axis, in float32: how to round and scale is the caller's."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return wide * jax.lax.rsqrt(mean_square + eps)
