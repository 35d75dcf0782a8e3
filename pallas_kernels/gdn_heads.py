"""From the fused in-projection of a Gated DeltaNet layer to what its recurrence reads.

`gdn_heads` is the public op; `definition` is what it means. It sums the parts of `skinny_matmul`,
convolves each row with its ancestors and turns the last columns into decays and betas.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels import dispatch, gdn_heads_pallas, gdn_wy
from pallas_kernels.add_norm import unit_rms
from pallas_kernels.skinny_matmul import sum_parts


class GdnHeads(NamedTuple):
    """Rows as `gdn_tree` reads them, what they were before the convolution, and what `gdn_tree`
    may be told of them where their paths are known."""

    query: Float[Array, "B R Hk Dk"]
    key: Float[Array, "B R Hk Dk"]
    value: Float[Array, "B R Hv Dv"]
    log_decay: Float32[Array, "B R Hv"]
    beta: Float32[Array, "B R Hv"]
    mixed: Float[Array, "B R Ck"]
    scales: gdn_wy.GdnScales | None


def gdn_heads(
    parts: Float[Array, "P B R C"],
    before: Float[Array, "B N Ck"],
    kernel: Float[Array, "W Ck"],
    window: Int[Array, "B R W"],
    log_rate: Float32[Array, " Hv"],
    time_bias: Float32[Array, " Hv"],
    *,
    num_key_heads: int,
    key_dim: int,
    path: Int32[Array, "B R A"] | None = None,
    implementation: dispatch.Implementation | None = None,
) -> GdnHeads:
    """silu of the depthwise convolution, cut into heads, and each head's decay and beta.

    Row r's input at distance d of its W taps is row window[r, d] of `before` followed by the rows;
    the kernel's last tap is the row's own. log_decay = -exp(log_rate) *
    softplus(decay + time_bias), beta = sigmoid of its column.

    Args:
      parts: the product in parts, before's dtype or float32. Columns: query, key, value (the Ck
        that are convolved), output gate (as many as value's, left alone), beta, decay (Hv each).
      before: N inputs committed, zero before the start; bfloat16 or float32. Its dtype is the
        heads'.
      num_key_heads, key_dim: Hk and Dk; the rest of Ck is Hv value heads.
      path: of each row as in `gdn_tree`, for `scales`; None leaves them out.
      implementation: None, "xla" or "pallas", see `dispatch.choose`.

    Raises:
      ValueError: shapes do not fit each other.
      NotImplementedError: the named implementation cannot run here.

    Source: Gated DeltaNet, arXiv 2412.06464, as transformers' `modeling_qwen3_5` has it.
    """
    arguments = (parts, before, kernel, window, log_rate, time_bias)
    keys, sizes = num_key_heads * key_dim, {"num_key_heads": num_key_heads, "key_dim": key_dim}
    check_heads(*arguments, keys=keys)
    if path is not None and path.shape[:2] != window.shape[:2]:
        raise ValueError(f"`path` must be [B, R, A] to fit window {window.shape}, got {path.shape}")
    unsupported = gdn_heads_pallas.unsupported(before.dtype, key_dim, kernel.shape[1] - 2 * keys)
    if dispatch.choose("gdn_heads", implementation, unsupported) == "xla":
        return definition(*arguments, **sizes, path=path)
    out = gdn_heads_pallas.gdn_heads(*arguments, path, **sizes, interpret=dispatch.interpret())
    return _heads(*out, num_key_heads=num_key_heads)


def definition(
    parts: Float[Array, "P B R C"],
    before: Float[Array, "B N Ck"],
    kernel: Float[Array, "W Ck"],
    window: Int[Array, "B R W"],
    log_rate: Float32[Array, " Hv"],
    time_bias: Float32[Array, " Hv"],
    *,
    num_key_heads: int,
    key_dim: int,
    path: Int32[Array, "B R A"] | None = None,
) -> GdnHeads:
    """The meaning of `gdn_heads` in plain jnp."""
    rows, (width, channels) = sum_parts(parts, before.dtype), kernel.shape
    mixed, rates = rows[..., :channels], rows[..., -2 * log_rate.shape[0] :]
    inputs = jnp.concatenate([before, mixed], axis=1)
    total = None
    for distance in range(width):
        tap = jnp.take_along_axis(inputs, window[:, :, distance, None], axis=1)
        own = kernel[width - 1 - distance].astype(jnp.float32)[None, None, :]
        part = tap.astype(jnp.float32) * own
        total = part if total is None else total + part
    convolved = jax.nn.silu(total.astype(before.dtype))
    beta, decay = jnp.split(rates.astype(jnp.float32), 2, axis=-1)
    step = jax.nn.softplus(decay + time_bias[None, None, :])
    log_decay = -jnp.exp(log_rate)[None, None, :] * step
    keys = num_key_heads * key_dim
    cut = jnp.split(convolved, [keys, 2 * keys], axis=-1)
    beta = jax.nn.sigmoid(beta)
    heads = _heads(*cut, log_decay, beta, mixed, None, num_key_heads=num_key_heads)
    if path is None:
        return heads
    return heads._replace(scales=gdn_wy.scales(heads.query, heads.key, log_decay, path))


def gated_norm(
    x: Float[Array, "B R Hv Dv"],
    parts: Float[Array, "P B R C"],
    scale: Float32[Array, " Dv"],
    *,
    start: int,
    eps: float,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B R Hv Dv"]:
    """RMS norm of each head with an ordinary scale, times silu(gate), in x's dtype.

    Args:
      x: what the recurrence answers, bfloat16 or float32.
      parts: the product that `gdn_heads` was given; the gate is its Hv * Dv columns from `start`.
      implementation: None, "xla" or "pallas", see `dispatch.choose`.

    Raises:
      ValueError: shapes do not fit each other.
      NotImplementedError: the named implementation cannot run here.
    """
    heads, size = x.shape[2:]
    if parts.shape[1:3] != x.shape[:2] or not 0 <= start <= parts.shape[3] - heads * size:
        raise ValueError(
            f"`parts` must be [P, B, R, C] with {heads * size} columns from start={start} on to "
            f"fit x {x.shape}, got {parts.shape}"
        )
    if scale.shape != (size,):
        raise ValueError(f"`scale` must have shape {(size,)}, got {scale.shape}")
    chosen = dispatch.choose(
        "gated_norm", implementation, gdn_heads_pallas.unsupported_norm(x.dtype, size)
    )
    if chosen == "xla":
        return gated_norm_definition(x, parts, scale, start=start, eps=eps)
    return gdn_heads_pallas.gated_norm(
        x, parts, scale, start=start, eps=eps, interpret=dispatch.interpret()
    )


def gated_norm_definition(
    x: Float[Array, "B R Hv Dv"],
    parts: Float[Array, "P B R C"],
    scale: Float32[Array, " Dv"],
    *,
    start: int,
    eps: float,
) -> Float[Array, "B R Hv Dv"]:
    """The meaning of `gated_norm` in plain jnp; float32 but for the normed head."""
    end = start + x.shape[2] * x.shape[3]
    gate = sum_parts(parts[..., start:end], x.dtype).reshape(x.shape)
    normed = unit_rms(x, eps).astype(x.dtype)
    scaled = normed.astype(jnp.float32) * scale[None, None, None, :]
    return (scaled * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


def _heads(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    mixed: jax.Array,
    scales: gdn_wy.GdnScales | None,
    *,
    num_key_heads: int,
) -> GdnHeads:
    """Columns cut into heads."""

    def cut(x: jax.Array, heads: int) -> jax.Array:
        return x.reshape(*x.shape[:2], heads, -1)

    heads = log_decay.shape[2]
    of_keys = cut(query, num_key_heads), cut(key, num_key_heads)
    return GdnHeads(*of_keys, cut(value, heads), log_decay, beta, mixed, scales)


def check_heads(
    parts: jax.Array,
    before: jax.Array,
    kernel: jax.Array,
    window: jax.Array,
    log_rate: jax.Array,
    time_bias: jax.Array,
    *,
    keys: int,
) -> None:
    """Raises ValueError unless `gdn_heads` can take these; keys: columns of all keys."""
    slots, rows = parts.shape[1:3]
    (width, channels), heads = kernel.shape, log_rate.shape[0]
    values = channels - 2 * keys
    if values < 1 or values % heads:
        raise ValueError(
            f"`kernel` must be [W, Ck] with 2 * {keys} columns of queries and keys and a multiple "
            f"of {heads} of values, got {kernel.shape}"
        )
    if parts.shape[3] != channels + values + 2 * heads:
        raise ValueError(
            f"`parts` must have {channels} + {values} + 2 * {heads} columns to fit `kernel` and "
            f"`log_rate`, got {parts.shape}"
        )
    for name, array, shape in (
        ("before", before, (slots, before.shape[1], channels)),
        ("window", window, (slots, rows, width)),
        ("time_bias", time_bias, (heads,)),
    ):
        if array.shape != shape:
            raise ValueError(f"`{name}` must have shape {shape}, got {array.shape}")
