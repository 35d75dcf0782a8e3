"""One token of a Gated DeltaNet layer: from the in-projection to the gated answer, the state moved.

`gdn_step` is the public op; `definition` is what it means: the ops of a tree, for a tree of one
node that is accepted. A round without a draft need not wait for a walk, so nothing is kept for a
commit.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import dispatch, gdn_step_pallas, gdn_wy
from pallas_kernels.gdn_heads import check_heads
from pallas_kernels.gdn_heads import definition as heads_definition
from pallas_kernels.skinny_matmul import sum_parts


class GdnStep(NamedTuple):
    """out: what the recurrence answers, times the norm's scale and silu(gate). squares: sums of
    squares of the answer, in Q parts, by which `normed_matmul` norms it. state and conv: after the
    token."""

    out: Float[Array, "B 1 Hv Dv"]
    squares: Float32[Array, "B 1 Hv Q"]
    state: Float32[Array, "B Hv Dk Dv"]
    conv: Float[Array, "B W Ck"]


def gdn_step(
    parts: Float[Array, "P B 1 C"],
    conv: Float[Array, "B W Ck"],
    kernel: Float[Array, "W Ck"],
    log_rate: Float32[Array, " Hv"],
    time_bias: Float32[Array, " Hv"],
    scale: Float32[Array, " Dv"],
    state: Float32[Array, "B Hv Dk Dv"],
    lengths: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    num_key_heads: int,
    implementation: dispatch.Implementation | None = None,
) -> GdnStep:
    """`gdn_heads`, `gdn_tree` and `gdn_commit` of one node, and its gate.

    Args:
      parts, kernel, log_rate, time_bias: as of `gdn_heads`.
      conv: the last W inputs of the convolution, that of position p in row p mod W; zero before
        the start. bfloat16 or float32, which is the dtype of `out`.
      scale: of the norm over each value head.
      state: of the committed prefix, Dk its third size.
      lengths: position of the token. count: 1 takes it into `state` and `conv`; a slot with 0
        leaves both as they are, bit by bit, and its `out` means nothing.
      num_key_heads: Hk.
      implementation: None, "xla" or "pallas", see `dispatch.choose`. The kernel updates `state`
        and `conv` in place where their buffers may be donated.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
      NotImplementedError: the named implementation cannot run here.

    Source: Gated DeltaNet, arXiv 2412.06464, eq. 10.
    """
    arrays = (parts, conv, kernel, log_rate, time_bias, scale, state, lengths, count)
    _check(*arrays, num_key_heads=num_key_heads)
    unsupported = gdn_step_pallas.unsupported(conv.dtype, *state.shape[2:])
    if dispatch.choose("gdn_step", implementation, unsupported) == "xla":
        return definition(*arrays, num_key_heads=num_key_heads)
    return GdnStep(
        *gdn_step_pallas.gdn_step(
            *arrays, num_key_heads=num_key_heads, interpret=dispatch.interpret()
        )
    )


def definition(
    parts: Float[Array, "P B 1 C"],
    conv: Float[Array, "B W Ck"],
    kernel: Float[Array, "W Ck"],
    log_rate: Float32[Array, " Hv"],
    time_bias: Float32[Array, " Hv"],
    scale: Float32[Array, " Dv"],
    state: Float32[Array, "B Hv Dk Dv"],
    lengths: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    num_key_heads: int,
) -> GdnStep:
    """The meaning of `gdn_step` in plain jnp."""
    slots, width = conv.shape[:2]
    behind = jnp.arange(width, dtype=jnp.int32)[None, None, :]
    window = jnp.where(behind == 0, width, (lengths[:, None, None] - behind) % width)
    heads = heads_definition(
        parts,
        conv,
        kernel,
        window,
        log_rate,
        time_bias,
        num_key_heads=num_key_heads,
        key_dim=state.shape[2],
    )
    root = jnp.zeros((slots, 1), jnp.int32)
    out, update = gdn_wy.tree(*heads[:5], state, root[:, :, None])
    row = jnp.arange(width, dtype=jnp.int32)[None, :]
    new = (row == (lengths % width)[:, None]) & (count > 0)[:, None]
    answer = out.astype(jnp.float32)
    gate = sum_parts(parts[..., kernel.shape[1] : -2 * log_rate.shape[0]], out.dtype)
    gate = gate.reshape(out.shape).astype(jnp.float32)
    return GdnStep(
        (answer * scale[None, None, None, :] * jax.nn.silu(gate)).astype(out.dtype),
        jnp.sum(answer * answer, axis=3, keepdims=True),
        gdn_wy.commit(state, heads.key, update, heads.log_decay, root, count),
        jnp.where(new[:, :, None], heads.mixed, conv),
    )


def _check(
    parts: jax.Array,
    conv: jax.Array,
    kernel: jax.Array,
    log_rate: jax.Array,
    time_bias: jax.Array,
    scale: jax.Array,
    state: jax.Array,
    lengths: jax.Array,
    count: jax.Array,
    *,
    num_key_heads: int,
) -> None:
    if parts.ndim != 4 or parts.shape[2] != 1:
        raise ValueError(f"`parts` must be [P, B, 1, C], got {parts.shape}")
    if state.ndim != 4 or state.dtype != jnp.float32:
        raise ValueError(
            f"`state` must be float32 [B, Hv, Dk, Dv], got {state.dtype.name} {state.shape}"
        )
    slots, heads, key_dim, value_dim = state.shape
    if heads % num_key_heads:
        raise ValueError(f"`num_key_heads` must divide state's {heads} heads, got {num_key_heads}")
    keys, width = num_key_heads * key_dim, kernel.shape[0]
    channels = 2 * keys + heads * value_dim
    for name, array, shape in (
        ("kernel", kernel, (width, channels)),
        ("conv", conv, (slots, width, channels)),
        ("log_rate", log_rate, (heads,)),
        ("scale", scale, (value_dim,)),
        ("lengths", lengths, (slots,)),
        ("count", count, (slots,)),
    ):
        if array.shape != shape:
            raise ValueError(f"`{name}` must have shape {shape}, got {array.shape}")
    window = jnp.zeros((slots, 1, width), jnp.int32)
    check_heads(parts, conv, kernel, window, log_rate, time_bias, keys=keys)
