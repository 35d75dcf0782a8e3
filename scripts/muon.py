"""Muon (Jordan et al., 2024) for hidden matrices, Adam for the embedding and the norms.

Our own, because optax.contrib.muon neither stacks equal shapes (40 matrices, 40 small loops)
nor takes fused matrices apart.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]
MOMENTUM, BETA1, BETA2, EPSILON = 0.95, 0.9, 0.95, 1e-10


class OptState(NamedTuple):
    """`first`: momentum of every parameter. `second`: squares, for Adam's parameters only."""

    step: jax.Array
    first: Params
    second: Params


def is_matrix(name: str, value: jax.Array) -> bool:
    return value.ndim == 2 and name != "embedding"


def init(params: Params) -> OptState:
    zeros = {name: jnp.zeros_like(value) for name, value in params.items()}
    adam = {name: zeros[name] for name, value in params.items() if not is_matrix(name, value)}
    return OptState(jnp.zeros((), jnp.int32), zeros, {k: v + 0.0 for k, v in adam.items()})


def orthogonalise(stack: jax.Array) -> jax.Array:
    """Nearest semi-orthogonal matrices, roughly, of [count, rows, columns] with rows <= columns.

    Newton-Schulz quintic with Jordan's coefficients, in bfloat16.
    """
    norm = jnp.sqrt(jnp.sum(jnp.square(stack), axis=(1, 2), keepdims=True))
    x = (stack / (norm + 1e-7)).astype(jnp.bfloat16)
    for _ in range(5):
        gram = jnp.einsum("nrc,nsc->nrs", x, x)
        poly = -4.7750 * gram + 2.0315 * jnp.einsum("nrs,nst->nrt", gram, gram)
        x = 3.4445 * x + jnp.einsum("nrs,nsc->nrc", poly.astype(x.dtype), x)
    return x.astype(jnp.float32)


def pieces(name: str, shape: tuple[int, ...], query_columns: int) -> list[int]:
    """Columns at which a fused matrix comes apart."""
    if name.endswith("qkv"):
        return [query_columns, query_columns + (shape[1] - query_columns) // 2]
    return [shape[1] // 2] if name.endswith("gate_up") else []


def _directions(updates: Params, query_columns: int) -> Params:
    """Orthogonal directions of all matrices; equal shapes go through one batched iteration."""
    groups: dict[tuple[int, ...], list[tuple[str, int, bool, jax.Array]]] = {}
    for name, value in updates.items():
        parts = jnp.split(value, pieces(name, value.shape, query_columns), axis=1)
        for index, part in enumerate(parts):
            flipped = part.shape[0] > part.shape[1]
            part = part.T if flipped else part
            groups.setdefault(part.shape, []).append((name, index, flipped, part))
    found: dict[str, dict[int, jax.Array]] = {name: {} for name in updates}
    for members in groups.values():
        stack = orthogonalise(jnp.stack([part for *_, part in members]))
        for row, (name, index, flipped, _) in enumerate(members):
            direction = stack[row].T if flipped else stack[row]
            gain = max(1.0, direction.shape[1] / direction.shape[0]) ** 0.5  # [in, out]
            found[name][index] = gain * direction
    return {
        name: jnp.concatenate([parts[index] for index in sorted(parts)], axis=1)
        for name, parts in found.items()
    }


def update(
    params: Params,
    grads: Params,
    state: OptState,
    *,
    muon_rate: jax.Array,
    adam_rate: jax.Array,
    decay: float,
    query_columns: int,
) -> tuple[Params, OptState]:
    """One step. `decay` is of matrices only, times their rate."""
    step = state.step + 1
    new, first, second, nesterov = {}, {}, {}, {}
    for name, value in params.items():
        grad = grads[name].astype(jnp.float32)
        if is_matrix(name, value):
            first[name] = MOMENTUM * state.first[name] + (1 - MOMENTUM) * grad
            nesterov[name] = MOMENTUM * first[name] + (1 - MOMENTUM) * grad
            continue
        first[name] = BETA1 * state.first[name] + (1 - BETA1) * grad
        second[name] = BETA2 * state.second[name] + (1 - BETA2) * grad * grad
        mean = first[name] / (1 - BETA1**step)
        scale = jnp.sqrt(second[name] / (1 - BETA2**step)) + EPSILON
        new[name] = value - adam_rate * mean / scale
    for name, direction in _directions(nesterov, query_columns).items():
        new[name] = params[name] * (1 - muon_rate * decay) - muon_rate * direction
    return new, OptState(step, first, second)
