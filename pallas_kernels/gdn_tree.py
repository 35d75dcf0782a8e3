"""Gated DeltaNet over the nodes of a tree: a linear-attention state that every branch continues.

`gdn_tree` is the public op, `gdn_commit` moves the state along the accepted path, `gdn_chunk` is
the chain of a prompt; `definition` is what the tree op means. The op runs in every recurrent
target layer of verify; no state of a node is ever stored, only its key and its update.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import dispatch, gdn_commit_pallas, gdn_tree_pallas, gdn_wy


class GdnNodes(NamedTuple):
    """What each node adds: out in value's dtype; update (u of the recurrence) in float32, which
    with the node's key and log-decay is all that `gdn_commit` needs."""

    out: Float[Array, "B T Hv Dv"]
    update: Float32[Array, "B T Hv Dv"]


def gdn_tree(
    query: Float[Array, "B T Hk Dk"],
    key: Float[Array, "B T Hk Dk"],
    value: Float[Array, "B T Hv Dv"],
    log_decay: Float32[Array, "B T Hv"],
    beta: Float32[Array, "B T Hv"],
    state: Float32[Array, "B Hv Dk Dv"],
    path: Int32[Array, "B T R"],
    *,
    scales: gdn_wy.GdnScales | None = None,
    implementation: dispatch.Implementation | None = None,
) -> GdnNodes:
    """The gated delta rule from `state` along every path of the tree at once.

    With S the state of node t's parent (`state` for a node without one), a = exp(log_decay[t]),
    k and q the key and the query divided by their norms, and q also by sqrt(Dk):
        u = beta[t] * (v - a * k S),  S_t = a * S + outer(k, u),  out[t] = q S_t.
    Value head h reads key head h // (Hv // Hk).

    Args:
      query, key, value: of one dtype, bfloat16 or float32, all finite. query and key are not
        normalised: the op does it, so that products of bfloat16 rows stay exact.
      log_decay: at most 0; below -120 it counts as -120 (the state is gone at -104 already).
      state: of the committed prefix; only read.
      path: node indices from a node's first ancestor on down to itself, then -1. Nodes come after
        their ancestors, and a path's beginning is the path of what it ends at. A padding node that
        has itself alone is inert.
      scales: of these rows, as `gdn_heads` gives them; None: the op finds them. Only the kernel
        reads them.
      implementation: None, "xla" (the WY form in jnp) or "pallas", see `dispatch.choose`.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
      NotImplementedError: the named implementation cannot run here.

    Source: Gated DeltaNet, arXiv 2412.06464, in the WY form of arXiv 2406.06484 with the causal
      mask replaced by the ancestors.
    """
    _check(query, key, value, log_decay, beta, state, path, scales)
    chosen = _choose("gdn_tree", implementation, key, value.shape[3], path.shape[2])
    arguments = (query, key, value, log_decay, beta, state, path)
    if chosen == "xla":
        return GdnNodes(*gdn_wy.tree(*arguments))
    return GdnNodes(*gdn_tree_pallas.gdn_tree(*arguments, scales, interpret=dispatch.interpret()))


def definition(
    query: Float[Array, "B T Hk Dk"],
    key: Float[Array, "B T Hk Dk"],
    value: Float[Array, "B T Hv Dv"],
    log_decay: Float32[Array, "B T Hv"],
    beta: Float32[Array, "B T Hv"],
    state: Float32[Array, "B Hv Dk Dv"],
    path: Int32[Array, "B T R"],
) -> GdnNodes:
    """The meaning of `gdn_tree`: node after node, each from its parent's state, in float32."""
    nodes, group = key.shape[1], value.shape[2] // key.shape[2]
    query, key = (
        jnp.repeat(gdn_wy.normalise(x), group, axis=2) for x in (query, key)
    )  # [B, T, Hv, Dk]
    query = query * key.shape[3] ** -0.5
    # The nearest ancestor has the highest index; 0 stands for the prefix.
    itself = jnp.arange(nodes, dtype=jnp.int32)[None, :, None]
    parent = jnp.max(jnp.where(path < itself, path + 1, 0), axis=2)
    states = jnp.broadcast_to(state[:, None], (state.shape[0], nodes + 1, *state.shape[1:]))

    def step(states: jax.Array, node: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        index = parent[:, node][:, None, None, None, None]
        old = jnp.take_along_axis(states, index, axis=1)[:, 0]
        old = old * jnp.exp(log_decay[:, node])[:, :, None, None]
        seen = jnp.sum(old * key[:, node, :, :, None], axis=2)
        update = beta[:, node, :, None] * (value[:, node].astype(jnp.float32) - seen)
        new = old + key[:, node, :, :, None] * update[:, :, None, :]
        out = jnp.sum(new * query[:, node, :, :, None], axis=2)
        return states.at[:, node + 1].set(new), (out.astype(value.dtype), update)

    _, rows = jax.lax.scan(step, states, jnp.arange(nodes, dtype=jnp.int32))
    return GdnNodes(*(jnp.moveaxis(x, 0, 1) for x in rows))


def gdn_commit(
    state: Float32[Array, "B Hv Dk Dv"],
    key: Float[Array, "B T Hk Dk"],
    update: Float32[Array, "B T Hv Dv"],
    log_decay: Float32[Array, "B T Hv"],
    path: Int32[Array, "B R"],
    count: Int32[Array, " B"],
    *,
    implementation: dispatch.Implementation | None = None,
) -> Float32[Array, "B Hv Dk Dv"]:
    """The state after the first `count` nodes of `path`, from what `gdn_tree` was given and gave.

    path: node indices from the root on; entries at and past `count` are not read. count 0 leaves
    a slot's state as it is, bit by bit. The update already holds beta and what the state knew, so
    nothing is replayed: one product [Dk, R] x [R, Dv] a head. With the kernel the state is
    updated in place where its buffer may be donated.

    Raises:
      ValueError: shapes do not fit each other.
      NotImplementedError: the named implementation cannot run here.
    """
    slots, heads, key_dim, value_dim = state.shape
    shape = (slots, key.shape[1], heads, value_dim)
    if update.shape != shape or log_decay.shape != shape[:3]:
        raise ValueError(
            f"`update` and `log_decay` must be {shape} and {shape[:3]} to fit `state` and `key`, "
            f"got {update.shape} and {log_decay.shape}"
        )
    chosen = _choose("gdn_commit", implementation, key, value_dim)
    arguments = (state, key, update, log_decay, path, count)
    if chosen == "xla":
        return gdn_wy.commit(*arguments)
    return gdn_commit_pallas.gdn_commit(*arguments, interpret=dispatch.interpret())


def gdn_chunk(
    query: Float[Array, "B P Hk Dk"],
    key: Float[Array, "B P Hk Dk"],
    value: Float[Array, "B P Hv Dv"],
    log_decay: Float32[Array, "B P Hv"],
    beta: Float32[Array, "B P Hv"],
    state: Float32[Array, "B Hv Dk Dv"],
    count: Int32[Array, " B"],
    *,
    rows: int = 64,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Float[Array, "B P Hv Dv"], Float32[Array, "B Hv Dk Dv"]]:
    """A chain of P nodes of which the first `count` are real: outputs, and the state after them.

    Rows of padding give outputs that mean nothing and leave the state exactly as it is. `rows` at
    a time are solved together; P must be a multiple of it, or at most it. "pallas" runs the kernels
    of `gdn_tree` and `gdn_commit` for each step.

    Raises:
      ValueError: P is no multiple of `rows`.
      NotImplementedError: the named implementation cannot run here.

    Source: chunked form of arXiv 2412.06464, section 3.3.
    """
    size = key.shape[1]
    rows = min(rows, size)
    if size % rows != 0:
        raise ValueError(f"`key` must have a multiple of {rows} rows, got {size}; pad it")
    real = jnp.arange(size, dtype=jnp.int32)[None, :, None] < count[:, None, None]
    log_decay, beta = (jnp.where(real, x, 0.0) for x in (log_decay, beta))
    chosen = _choose("gdn_chunk", implementation, key, value.shape[3], rows)
    tree, commit = functools.partial(gdn_wy.tree, chain=True), gdn_wy.commit
    if chosen == "pallas":
        options = {"interpret": dispatch.interpret()}
        tree = functools.partial(gdn_tree_pallas.gdn_tree, **options)
        commit = functools.partial(gdn_commit_pallas.gdn_commit, **options)
    arguments = (query, key, value, log_decay, beta, state)
    return gdn_wy.chunks(*arguments, rows=rows, tree=tree, commit=commit)


def _choose(
    op: str,
    implementation: dispatch.Implementation | None,
    key: jax.Array,
    value_dim: int,
    depths: int = 1,
) -> dispatch.Implementation:
    unsupported = gdn_tree_pallas.unsupported(key.dtype, key.shape[3], value_dim, depths)
    return dispatch.choose(op, implementation, unsupported)


def _check(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    path: jax.Array,
    scales: gdn_wy.GdnScales | None,
) -> None:
    if key.ndim != 4 or value.ndim != 4 or key.shape[1] < 1:
        raise ValueError(
            "`key` must be [B, T, Hk, Dk] and `value` [B, T, Hv, Dv] with T >= 1, "
            f"got {key.shape} and {value.shape}"
        )
    slots, nodes, key_heads, key_dim = key.shape
    heads, value_dim = value.shape[2:]
    if heads % key_heads != 0:
        raise ValueError(f"`value` must have a multiple of key's {key_heads} heads, got {heads}")
    if key.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"`key` must be bfloat16 or float32, got {key.dtype.name}")
    expected = {
        "query": (query, key.shape, key.dtype),
        "value": (value, (slots, nodes, heads, value_dim), key.dtype),
        "log_decay": (log_decay, (slots, nodes, heads), jnp.float32),
        "beta": (beta, (slots, nodes, heads), jnp.float32),
        "state": (state, (slots, heads, key_dim, value_dim), jnp.float32),
        "path": (path, (slots, nodes, *path.shape[2:3]), jnp.int32),
    }
    if scales is not None:
        shapes = ((slots, nodes, size) for size in (key_heads, key_heads, heads))
        for name, array, shape in zip(scales._fields, scales, shapes, strict=True):
            expected[f"scales.{name}"] = (array, shape, jnp.float32)
    for name, (array, shape, dtype) in expected.items():
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"`{name}` must be {jnp.dtype(dtype).name} of shape {shape} to fit `key`, "
                f"got {array.dtype.name} of shape {array.shape}"
            )
    if path.ndim != 3 or path.shape[2] < 1:
        raise ValueError(f"`path` must have room for a node: [B, T, R >= 1], got {path.shape}")
