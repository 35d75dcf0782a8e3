"""Attention of the tree's nodes over the cache and over their ancestors in the tree.

`tree_attention` is the public op; `definition` is what it means. It runs in every target layer
of verify (and, with one node and no cache rows hidden, in plain decoding).
"""

from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import dispatch, tree_attention_pallas

_MASKED = -1e30  # finite, so that a row with nothing visible gives no NaN on the way


def tree_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    tree_key: Float[Array, "B T K H"],
    tree_value: Float[Array, "B T K H"],
    lengths: Int32[Array, " B"],
    visible: Bool[Array, "B T T"],
    *,
    prefix_start: Int32[Array, "B T"] | None = None,
    scale: float,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention over two parts at once: the cached prefix and the tree.

    Node t of slot b sees the cache rows s with prefix_start[b, t] <= s < lengths[b] and the tree
    rows j with visible[b, t, j]. Query head n reads kv head n // (N // K).

    Args:
      query, key, value, tree_key, tree_value: all of one dtype, bfloat16 or float32. The tree's
        rows are not in the cache. Cache rows at and behind `lengths` may hold anything, NaN
        included; all other rows must be finite.
      lengths: cache rows in use, 0 to S; 0 for an inactive slot.
      visible: whether node t (second axis) sees node j (third), itself included if it should.
      prefix_start: first cache row that each node sees, for sliding windows; None is 0.
      scale: factor on the scores.
      implementation: None, "xla" or "pallas", see `dispatch.choose`.

    Returns:
      In query's dtype; softmax and sums in float32. A row that sees nothing is 0.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
      NotImplementedError: the named implementation cannot run here.

    Source: tree attention of SpecInfer, arXiv 2305.09781; online softmax and its merge as in
      FlashAttention-2, arXiv 2307.08691, and Flash-Decoding.
    """
    _check(query, key, value, tree_key, tree_value, lengths, visible, prefix_start)
    arguments = (query, key, value, tree_key, tree_value, lengths, visible, prefix_start)
    chosen = dispatch.choose(
        "tree_attention",
        implementation,
        tree_attention_pallas.unsupported(query.dtype, query.shape[3]),
    )
    if chosen == "xla":
        return definition(*arguments, scale=scale)
    return _kernel(query, key, prefix_start).tree_attention(
        *arguments, scale=scale, interpret=dispatch.interpret()
    )


def _kernel(query: jax.Array, key: jax.Array, prefix_start: jax.Array | None) -> ModuleType:
    """The faster of two: Mosaic where the GPU and the arguments allow it, else Triton. A node alone
    fills too little of Mosaic's 64 rows."""
    if query.shape[1] == 1 or not dispatch.hopper():
        return tree_attention_pallas
    # Here, since it takes a third of a second to import and a CPU never needs it.
    from pallas_kernels import tree_attention_mosaic

    refused = tree_attention_mosaic.unsupported(
        query.dtype,
        query.shape[3],
        query.shape[2] // key.shape[2],
        prefix_start is not None,
        key.shape[1],
    )
    return tree_attention_mosaic if refused is None else tree_attention_pallas


def definition(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    tree_key: Float[Array, "B T K H"],
    tree_value: Float[Array, "B T K H"],
    lengths: Int32[Array, " B"],
    visible: Bool[Array, "B T T"],
    prefix_start: Int32[Array, "B T"] | None,
    *,
    scale: float,
) -> Float[Array, "B T N H"]:
    """The meaning of `tree_attention` in plain jnp, everything in float32."""
    slots, nodes, query_heads, head_dim = query.shape
    cache_rows, kv_heads = key.shape[1:3]
    query_f32 = query.astype(jnp.float32).reshape(
        slots, nodes, kv_heads, query_heads // kv_heads, head_dim
    )
    row = jnp.arange(cache_rows, dtype=jnp.int32)
    in_use = row[None, :] < lengths[:, None]
    cached = jnp.broadcast_to(in_use[:, None, :], (slots, nodes, cache_rows))
    if prefix_start is not None:
        cached = cached & (row[None, None, :] >= prefix_start[:, :, None])
    # A NaN behind `lengths` survives a weight of 0, so the values themselves are masked.
    value = jnp.where(in_use[:, :, None, None], value, jnp.zeros((), value.dtype))

    seen = jnp.concatenate([cached, visible], axis=2)[:, None, None]  # [B, 1, 1, T, S + T]
    scores = jnp.concatenate([_scores(query_f32, key), _scores(query_f32, tree_key)], axis=4)
    scores = jnp.where(seen, scores * scale, _MASKED)
    weight = jnp.exp(scores - jnp.max(scores, axis=4, keepdims=True))
    weight = jnp.where(seen, weight, 0.0)
    total = jnp.sum(weight, axis=4, keepdims=True)
    weight = weight / jnp.where(total > 0.0, total, 1.0)
    out = _mix(weight[..., :cache_rows], value) + _mix(weight[..., cache_rows:], tree_value)
    return out.reshape(query.shape).astype(query.dtype)


def _scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """[B, T, K, G, H] x [B, S, K, H] -> float32 [B, K, G, T, S]."""
    return jnp.einsum(
        "btkgh,bskh->bkgts",
        query,
        key.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def _mix(weight: jax.Array, value: jax.Array) -> jax.Array:
    """[B, K, G, T, S] x [B, S, K, H] -> float32 [B, T, K, G, H]."""
    return jnp.einsum(
        "bkgts,bskh->btkgh",
        weight,
        value.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def _check(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    tree_key: jax.Array,
    tree_value: jax.Array,
    lengths: jax.Array,
    visible: jax.Array,
    prefix_start: jax.Array | None,
) -> None:
    if query.ndim != 4 or key.ndim != 4 or query.shape[1] < 1 or key.shape[1] < 1:
        raise ValueError(
            "`query` must be [B, T, N, H] and `key` [B, S, K, H] with T, S >= 1, "
            f"got {query.shape} and {key.shape}"
        )
    slots, nodes, query_heads, head_dim = query.shape
    cache_rows, kv_heads = key.shape[1:3]
    if query_heads % kv_heads != 0:
        raise ValueError(
            f"`query` must have a multiple of key's {kv_heads} heads, got {query_heads}"
        )
    expected = {
        "key": (key, (slots, cache_rows, kv_heads, head_dim), query.dtype),
        "value": (value, (slots, cache_rows, kv_heads, head_dim), query.dtype),
        "tree_key": (tree_key, (slots, nodes, kv_heads, head_dim), query.dtype),
        "tree_value": (tree_value, (slots, nodes, kv_heads, head_dim), query.dtype),
        "lengths": (lengths, (slots,), jnp.int32),
        "visible": (visible, (slots, nodes, nodes), jnp.bool_),
    }
    if prefix_start is not None:
        expected["prefix_start"] = (prefix_start, (slots, nodes), jnp.int32)
    for name, (array, shape, dtype) in expected.items():
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"`{name}` must be {jnp.dtype(dtype).name} of shape {shape} to fit `query`, "
                f"got {array.dtype.name} of shape {array.shape}"
            )
