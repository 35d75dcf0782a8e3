"""The WY form of Gated DeltaNet in plain jnp: `gdn_tree`'s "xla" implementation, and prefill.

Unrolled along a path, S_t = E_t S_0 + sum over j before or at t of D_tj outer(k_j, u_j), with
E_t the product of the decays down to t and D_tj that of the decays below j. So the updates solve
    (I + L) U = diag(beta) (V - diag(E) K S_0),  L_tj = beta_t D_tj k_t.k_j for ancestors j of t,
and out = diag(E) Q S_0 + (D o Q K^T) U. Updates and states feed later rounds: all in float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

EPS = 1e-6
LEAST_LOG_DECAY = -120.0  # exp of it is 0 in float32
_UNIT = 2.0**-8  # of the coarse part of a log-decay: sums up to 2**16 of it are exact


class GdnScales(NamedTuple):
    """What `gdn_tree` needs to know of a node before it meets the state: query, sqrt(Dk) times its
    norm, inverted; key, the inverse of its norm; from_prefix, E: the decay from the prefix on."""

    query: Float32[Array, "B T Hk"]
    key: Float32[Array, "B T Hk"]
    from_prefix: Float32[Array, "B T Hv"]


def inverse_norm(x: Float[Array, "*shape D"]) -> Float32[Array, "*shape"]:
    """1 / sqrt(sum of squares + 1e-6) over the last axis; also inside kernels."""
    wide = x.astype(jnp.float32)
    return jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1) + EPS)


def normalise(x: Float[Array, "*shape D"]) -> Float32[Array, "*shape D"]:
    """x / sqrt(sum of squares + 1e-6) over the last axis, float32."""
    return x.astype(jnp.float32) * inverse_norm(x)[..., None]


def scales(
    query: Float[Array, "B T Hk Dk"],
    key: Float[Array, "B T Hk Dk"],
    log_decay: Float32[Array, "B T Hv"],
    path: Int32[Array, "B T R"],
) -> GdnScales:
    """`GdnScales` of what `gdn_tree` is given."""
    slots, nodes, depths = path.shape
    index = jnp.maximum(path, 0).reshape(slots, nodes * depths, 1)
    decays = jnp.take_along_axis(jnp.maximum(log_decay, LEAST_LOG_DECAY), index, axis=1)
    decays = decays.reshape(slots, nodes, depths, -1)
    total = jnp.sum(jnp.where(path[..., None] >= 0, decays, 0.0), axis=2)
    return GdnScales(inverse_norm(query) * key.shape[3] ** -0.5, inverse_norm(key), jnp.exp(total))


def split_decay(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A log-decay as a multiple of 2**-8 and the rest, which lies in [0, 2**-8).

    D needs differences of sums over paths, and those of plain float32 sums lose digits where
    decays are strong (2.9e-6 in the output at -80). Sums and differences of the first part are
    exact, and sums of the second are at most T / 256.
    """
    clamped = jnp.maximum(log_decay, LEAST_LOG_DECAY)
    coarse = jnp.floor(clamped / _UNIT) * _UNIT
    return coarse, clamped - coarse


def _dot(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """A product in true float32: a GPU would round the inputs to TF32."""
    return jnp.einsum(subscripts, left, right, precision=jax.lax.Precision.HIGHEST)


def tree(
    query: Float[Array, "B T Hk Dk"],
    key: Float[Array, "B T Hk Dk"],
    value: Float[Array, "B T Hv Dv"],
    log_decay: Float32[Array, "B T Hv"],
    beta: Float32[Array, "B T Hv"],
    state: Float32[Array, "B Hv Dk Dv"],
    path: Int32[Array, "B T R"],
    *,
    chain: bool = False,
) -> tuple[Float[Array, "B T Hv Dv"], Float32[Array, "B T Hv Dv"]]:
    """Out and update of `gdn_tree`. chain: the path is long, and is solved row by row.

    Letters: k key heads, g value heads of one, i and j nodes, d key dim, e value dim.
    """
    slots, nodes, key_heads, key_dim = key.shape
    group = value.shape[2] // key_heads
    query, key = normalise(query) * key_dim**-0.5, normalise(key)

    def grouped(x: jax.Array) -> jax.Array:  # [B, T, Hv, ..] -> [B, Hk, G, T, ..]
        split = x.reshape(slots, nodes, key_heads, group, *x.shape[3:])
        return jnp.moveaxis(split, 1, 3)

    state = state.reshape(slots, key_heads, group, *state.shape[2:])
    node = jnp.arange(nodes, dtype=jnp.int32)[None, None, None, :]
    visible = jnp.any(path[:, :, :, None] == node, axis=2)  # what each node has on its path
    seen = visible.astype(jnp.float32)
    coarse, fine = (
        grouped(_dot("btj,bjh->bth", seen, part)) for part in split_decay(log_decay)
    )  # sums over each node's path
    from_prefix = jnp.exp(coarse + fine)[..., None]
    between = (coarse[..., :, None] - coarse[..., None, :]) + (
        fine[..., :, None] - fine[..., None, :]
    )
    decay = jnp.exp(jnp.where(visible[:, None, None], between, -jnp.inf))
    beta = grouped(beta)[..., None]
    lower = beta * decay * _dot("bikd,bjkd->bkij", key, key)[:, :, None]
    lower = jnp.where(jnp.eye(nodes, dtype=bool)[None, None, None], 0.0, lower)
    known = _dot("bikd,bkgde->bkgie", key, state)
    wanted = beta * (grouped(value).astype(jnp.float32) - from_prefix * known)
    update = _solve(lower, wanted, None if chain else min(path.shape[2], nodes) - 1)
    weight = decay * _dot("bikd,bjkd->bkij", query, key)[:, :, None]
    out = from_prefix * _dot("bikd,bkgde->bkgie", query, state)
    out = out + _dot("bkgij,bkgje->bkgie", weight, update)

    def flat(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 3, 1).reshape(value.shape)

    return flat(out).astype(value.dtype), flat(update)


def _solve(lower: jax.Array, wanted: jax.Array, levels: int | None) -> jax.Array:
    """U of (I + lower) U = wanted, rows after their ancestors.

    Level by level: once the updates of one depth are right, so are those of the next, and further
    steps repeat them bit by bit. (Squaring would be shorter, and diverges on deep trees.)
    """
    if levels is None:
        return jax.lax.linalg.triangular_solve(
            lower, wanted, left_side=True, lower=True, unit_diagonal=True
        )
    update = wanted
    for _ in range(levels):
        update = wanted - _dot("bkgij,bkgje->bkgie", lower, update)
    return update


def commit(
    state: Float32[Array, "B Hv Dk Dv"],
    key: Float[Array, "B T Hk Dk"],
    update: Float32[Array, "B T Hv Dv"],
    log_decay: Float32[Array, "B T Hv"],
    path: Int32[Array, "B R"],
    count: Int32[Array, " B"],
) -> Float32[Array, "B Hv Dk Dv"]:
    """`gdn_commit` in jnp."""
    real = jnp.arange(path.shape[1], dtype=jnp.int32)[None, :] < count[:, None]

    def along_path(x: jax.Array) -> jax.Array:
        index = jnp.where(real, path, 0).reshape(*path.shape, *(1,) * (x.ndim - 2))
        mask = real.reshape(index.shape)
        return jnp.where(mask, jnp.take_along_axis(x, index, axis=1), jnp.zeros((), x.dtype))

    decays = along_path(jnp.maximum(log_decay, LEAST_LOG_DECAY))
    # Sums from below, so that nothing is subtracted.
    downward = jax.lax.cumsum(decays, axis=1, reverse=True)
    weight = jnp.exp(jnp.pad(downward[:, 1:], ((0, 0), (0, 1), (0, 0))))
    keys = normalise(along_path(key))
    keys = jnp.repeat(keys, state.shape[1] // keys.shape[2], axis=2) * weight[..., None]
    added = _dot("brhd,brhe->bhde", keys, along_path(update))
    return jnp.exp(downward[:, 0])[:, :, None, None] * state + added


def chunks(
    query: Float[Array, "B P Hk Dk"],
    key: Float[Array, "B P Hk Dk"],
    value: Float[Array, "B P Hv Dv"],
    log_decay: Float32[Array, "B P Hv"],
    beta: Float32[Array, "B P Hv"],
    state: Float32[Array, "B Hv Dk Dv"],
    *,
    rows: int,
    tree: Callable[..., tuple[Array, Array]],
    commit: Callable[..., Array],
) -> tuple[Float[Array, "B P Hv Dv"], Float32[Array, "B Hv Dk Dv"]]:
    """Outputs and last state of a chain, `rows` nodes a step; P is a multiple of `rows`.

    tree: a step's outputs and updates, from the positional arguments of `tree` above;
    commit: the state after it.
    """
    slots, size = key.shape[:2]
    row = jnp.arange(rows, dtype=jnp.int32)[None]
    down = jnp.where(row <= row.T, row, -1)[None]
    paths = jnp.broadcast_to(down, (slots, rows, rows))
    path = jnp.broadcast_to(row, (slots, rows))
    all_rows = jnp.full((slots,), rows, jnp.int32)

    def step(state: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, key, value, log_decay, beta = part
        out, update = tree(*part, state, paths)
        return commit(state, key, update, log_decay, path, all_rows), out

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(slots, size // rows, rows, *x.shape[2:]), 1, 0)

    parts = tuple(split(x) for x in (query, key, value, log_decay, beta))
    if size == rows:
        state, out = step(state, tuple(part[0] for part in parts))
        return out, state
    state, outs = jax.lax.scan(step, state, parts)
    return jnp.moveaxis(outs, 0, 1).reshape(value.shape), state
