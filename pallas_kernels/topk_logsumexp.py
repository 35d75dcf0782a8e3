"""The k largest logits of each row, with their tokens, and the log-sum-exp of the whole row.

`topk_logsumexp` is the public op; `definition` is what it means. It ends draft: their difference
is the log-prob of the k likeliest tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels import dispatch, topk_logsumexp_pallas

_GROUP = 128


def topk_logsumexp(
    logits: Float32[Array, "B R V"],
    *,
    k: int,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float32[Array, "B R k"], Int32[Array, "B R k"], Float32[Array, "B R"]]:
    """Reads each row once, and sorts no more than a few groups of it.

    Args:
      logits: NaN counts as -inf; -0 and subnormal numbers as 0.
      k: entries wanted of each row, 1 to V.
      implementation: None, "xla" or "pallas", see `dispatch.choose`. Values and tokens are
        bit-identical; log-sum-exp is equal up to the order of summation.

    Returns:
      value: descending along k.
      token: columns of `value`; distinct, equal values by ascending column.
      logsumexp: in float32; -inf if every entry is -inf, +inf if any is +inf.

    Raises:
      ValueError: `logits` is not float32 [B, R, V], or `k` is not from 1 to V.
      NotImplementedError: the named implementation cannot run here.
    """
    _check(logits, k)
    columns = logits.shape[2]
    unsupported = topk_logsumexp_pallas.unsupported(columns, k)
    if dispatch.choose("topk_logsumexp", implementation, unsupported) == "xla":
        return definition(logits, k=k)
    return topk_logsumexp_pallas.topk_logsumexp(logits, k=k, interpret=dispatch.interpret())


def definition(
    logits: Float32[Array, "B R V"], *, k: int
) -> tuple[Float32[Array, "B R k"], Int32[Array, "B R k"], Float32[Array, "B R"]]:
    """The meaning of `topk_logsumexp` in plain jnp."""
    logits = usable(logits)
    value, token = _top_k(logits, k)
    return value, token, jax.nn.logsumexp(logits, axis=-1)


def usable(logits: Float32[Array, "B R V"]) -> Float32[Array, "B R V"]:
    """Logits that every backend orders alike: some tell -0 from 0, some flush subnormals."""
    logits = jnp.where(jnp.abs(logits) < jnp.finfo(jnp.float32).tiny, 0.0, logits)
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def _top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` of each row, ties to the lowest index.

    The k largest lie in the k groups of 128 with the largest maxima, so only those are sorted:
    `lax.top_k` over 151,936 columns sorts them all on a GPU once k exceeds 16.
    """
    *batch, columns = logits.shape
    if columns <= 2 * _GROUP * k:
        value, token = jax.lax.top_k(logits, k)
        return value, token.astype(jnp.int32)
    count = dispatch.ceil_div(columns, _GROUP)
    padding = [(0, 0)] * len(batch) + [(0, count * _GROUP - columns)]
    groups = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(*batch, count, _GROUP)
    _, best = jax.lax.top_k(jnp.max(groups, axis=-1), k)
    best = jnp.sort(best, axis=-1)  # column order, so that ties still go to the lowest index
    near = jnp.take_along_axis(groups, best[..., None], axis=-2)
    value, place = jax.lax.top_k(near.reshape(*batch, k * _GROUP), k)
    group = jnp.take_along_axis(best, place // _GROUP, axis=-1)
    return value, (group * _GROUP + place % _GROUP).astype(jnp.int32)


def _check(logits: jax.Array, k: int) -> None:
    if logits.ndim != 3 or logits.dtype != jnp.float32:
        raise ValueError(
            "`logits` must be float32 [B, R, V], "
            f"got {logits.dtype.name} of shape {logits.shape}; cast it to float32"
        )
    if not 1 <= k <= logits.shape[2]:
        raise ValueError(f"`k` must be from 1 to V={logits.shape[2]}, got {k}")
