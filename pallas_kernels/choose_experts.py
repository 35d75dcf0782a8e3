"""Which experts a row goes to, and with what weights, from the router's product in parts.

`choose_experts` is the public op; `definition` is what it means.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import choose_experts_pallas, dispatch
from pallas_kernels.skinny_matmul import sum_parts


def choose_experts(
    parts: Float[Array, "P B R E"],
    x: Float[Array, "B R D"],
    shared_gate: Float[Array, " D"] | None = None,
    *,
    count: int,
    normalise: bool,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float32[Array, "B R K"], Int32[Array, "B R K"]]:
    """(weights, ids) of the `count` likeliest experts of each row, likeliest first.

    The softmax over all experts runs in float32; of equal logits the lower id goes first, as in
    `jax.lax.top_k`. With a shared expert K = count + 1: the last is the shared expert, id E.

    Args:
      parts: of x @ router, bfloat16 or float32, as `skinny_matmul` gives them.
      x: bfloat16 or float32; weights are rounded to its dtype.
      shared_gate: in x's dtype; the shared expert's weight is sigmoid(x . shared_gate).
      normalise: the weights of the `count` experts are divided by their sum.
      implementation: None, "xla" or "pallas", see `dispatch.choose`.

    Returns:
      Weights in float32, and ids, distinct in a row and in [0, E] whatever the logits.

    Raises:
      ValueError: shapes or dtypes do not fit each other, or there are not `count` experts.
      NotImplementedError: the named implementation cannot run here.

    Source: top-k routing, arXiv 1701.06538; the gated shared expert, transformers
    `modeling_qwen2_moe`.
    """
    check_choice(parts, x, shared_gate, count)
    unsupported = choose_experts_pallas.unsupported(x.dtype, parts.shape[-1])
    options = {"count": count, "normalise": normalise}
    if dispatch.choose("choose_experts", implementation, unsupported) == "xla":
        return definition(parts, x, shared_gate, **options)
    return choose_experts_pallas.choose_experts(
        parts, x, shared_gate, **options, interpret=dispatch.interpret()
    )


def definition(
    parts: Float[Array, "P B R E"],
    x: Float[Array, "B R D"],
    shared_gate: Float[Array, " D"] | None = None,
    *,
    count: int,
    normalise: bool,
) -> tuple[Float32[Array, "B R K"], Int32[Array, "B R K"]]:
    """The meaning of `choose_experts` in plain jnp."""
    logits = sum_parts(parts, jnp.float32)
    _, index = jax.lax.top_k(logits, count)
    weight = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), index, axis=-1)
    if normalise:
        weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    if shared_gate is not None:
        wide = (array.astype(jnp.float32) for array in (x, shared_gate))
        logit = jnp.einsum("brd,d->br", *wide, precision=jax.lax.Precision.HIGHEST)
        gate = jax.nn.sigmoid(logit.astype(x.dtype).astype(jnp.float32))
        weight = jnp.concatenate([weight, gate[..., None]], axis=-1)
        shared = jnp.full_like(index[..., :1], parts.shape[-1])
        index = jnp.concatenate([index, shared], axis=-1)
    return weight.astype(x.dtype).astype(jnp.float32), index.astype(jnp.int32)


def check_choice(parts: jax.Array, x: jax.Array, shared_gate: jax.Array | None, count: int) -> None:
    """Raises ValueError unless `choose_experts` can take these."""
    if parts.ndim != 4 or x.ndim != 3 or parts.shape[1:3] != x.shape[:2]:
        raise ValueError(
            f"`parts` must be [P, B, R, E] to fit x [B, R, D], got {parts.shape} and x {x.shape}"
        )
    for name, array in (("parts", parts), ("x", x)):
        if array.dtype not in (jnp.bfloat16, jnp.float32):
            raise ValueError(f"`{name}` must be bfloat16 or float32, got {array.dtype.name}")
    if not 1 <= count <= parts.shape[3]:
        raise ValueError(f"`count` must be in [1, {parts.shape[3]}], got {count}")
    wanted = (x.shape[2:], x.dtype)
    if shared_gate is not None and (shared_gate.shape, shared_gate.dtype) != wanted:
        raise ValueError(
            f"`shared_gate` must be {x.dtype.name} of shape {x.shape[2:]} to fit x, "
            f"got {shared_gate.dtype.name} of shape {shared_gate.shape}"
        )
