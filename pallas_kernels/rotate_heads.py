"""From the fused qkv product to rotated queries, rotated keys, values and gates.

`rotate_heads` is the public op; `definition` is what it means. It sums the parts of
`skinny_matmul`, norms every query and key head and turns it to its position.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import dispatch, rotate_heads_pallas
from pallas_kernels.add_norm import rms_norm
from pallas_kernels.skinny_matmul import sum_parts


class Heads(NamedTuple):
    """What attention reads of R rows, and the factors of what it gives if it is gated."""

    query: Float[Array, "B R N H"]
    key: Float[Array, "B R K H"]
    value: Float[Array, "B R K H"]
    gate: Float[Array, "B R N H"] | None = None


def rotate_heads(
    parts: Float[Array, "P B R C"],
    query_scale: Float[Array, " H"],
    key_scale: Float[Array, " H"],
    cos: Float[Array, "B R pairs"],
    sin: Float[Array, "B R pairs"],
    *,
    num_kv_heads: int,
    eps: float,
    centred: bool = False,
    gated: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> Heads:
    """Splits columns into N query, K key and K value heads of H; norms and rotates the first two.

    Args:
      parts: the product in parts, x's dtype or float32; C = (N + 2 K) H columns.
      query_scale, key_scale: of the RMSNorm over each head; their dtype is the result's.
      cos, sin: of each row's angles, for the pairs (i, i + pairs). Dims from 2 pairs on do not
        rotate.
      num_kv_heads: K; the rest of the columns are queries.
      centred: see `rms_norm`.
      gated: N gate heads follow the queries, C = 2 (N + K) H; their sigmoid is `gate`.
      implementation: None, "xla" or "pallas", see `dispatch.choose`.

    Raises:
      ValueError: shapes do not fit each other.
      NotImplementedError: the named implementation cannot run here.

    Source: rotary embedding, arXiv 2104.09864, in the half-split layout of Hugging Face.
    """
    _check(parts, query_scale, key_scale, cos, sin, num_kv_heads, gated)
    chosen = dispatch.choose(
        "rotate_heads",
        implementation,
        rotate_heads_pallas.unsupported(query_scale.dtype, query_scale.shape[0], cos.shape[2]),
    )
    arguments = (parts, query_scale, key_scale, cos, sin)
    settings = {"num_kv_heads": num_kv_heads, "eps": eps, "centred": centred, "gated": gated}
    if chosen == "xla":
        return definition(*arguments, **settings)
    return Heads(
        *rotate_heads_pallas.rotate_heads(*arguments, **settings, interpret=dispatch.interpret())
    )


def definition(
    parts: Float[Array, "P B R C"],
    query_scale: Float[Array, " H"],
    key_scale: Float[Array, " H"],
    cos: Float[Array, "B R pairs"],
    sin: Float[Array, "B R pairs"],
    *,
    num_kv_heads: int,
    eps: float,
    centred: bool = False,
    gated: bool = False,
) -> Heads:
    """The meaning of `rotate_heads` in plain jnp."""
    total = sum_parts(parts, query_scale.dtype)
    heads = total.reshape(*total.shape[:2], -1, query_scale.shape[0])
    first_key = heads.shape[2] - 2 * num_kv_heads
    queries = first_key // 2 if gated else first_key
    ends = [queries, first_key, first_key + num_kv_heads]
    query, gate, key, value = jnp.split(heads, ends, axis=2)
    query = rotate(rms_norm(query, query_scale, eps=eps, centred=centred), cos, sin)
    key = rotate(rms_norm(key, key_scale, eps=eps, centred=centred), cos, sin)
    return Heads(query, key, value, jax.nn.sigmoid(gate) if gated else None)


def rotate(
    x: Float[Array, "B R heads H"], cos: Float[Array, "B R pairs"], sin: Float[Array, "B R pairs"]
) -> Float[Array, "B R heads H"]:
    """Rotates pairs (i, i + pairs) of each head; dims from 2 pairs on stay."""
    pairs = cos.shape[2]
    first, second, rest = jnp.split(x, [pairs, 2 * pairs], axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _check(
    parts: jax.Array,
    query_scale: jax.Array,
    key_scale: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    num_kv_heads: int,
    gated: bool,
) -> None:
    head_dim = query_scale.shape[0]
    if parts.ndim != 4 or parts.shape[3] % head_dim or head_dim % 2:
        raise ValueError(
            f"`parts` must be [P, B, R, C] with C a multiple of the even head dim {head_dim}, "
            f"got shape {parts.shape}"
        )
    heads = parts.shape[3] // head_dim
    if not 1 <= num_kv_heads < heads / 2:
        raise ValueError(
            f"`num_kv_heads` must leave queries among {heads} heads, got {num_kv_heads}"
        )
    if gated and heads % 2:
        raise ValueError(
            f"`parts` must have as many gate as query heads, got {heads} heads, "
            f"{num_kv_heads} of them keys and as many values"
        )
    pairs = head_dim // 2
    if cos.ndim != 3 or cos.shape[:2] != parts.shape[1:3] or not 1 <= cos.shape[2] <= pairs:
        raise ValueError(
            f"`cos` must be [B, R, pairs] with 1 to {pairs} pairs to fit parts {parts.shape}, "
            f"got {cos.shape}"
        )
    for name, array, shape in (("key_scale", key_scale, (head_dim,)), ("sin", sin, cos.shape)):
        if array.shape != shape:
            raise ValueError(f"`{name}` must have shape {shape}, got {array.shape}")
