"""The order in which grouped products walk through the choices of experts.

`sort_by_expert` is the public op; `definition` is what it means.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels import dispatch, sort_by_expert_pallas


class Order(NamedTuple):
    """Choice k of row r is entry r * K + k: N = R * K entries of G experts.

    entry: by expert, then ascending. starts: place of each expert's first entry in it; N is last.
    """

    entry: Int32[Array, " N"]
    starts: Int32[Array, " G1"]


def sort_by_expert(
    ids: Int32[Array, "R K"],
    *,
    experts: int,
    implementation: dispatch.Implementation | None = None,
) -> Order:
    """Order of the entries: stable, by counting.

    Args:
      ids: in [0, experts).
      implementation: None, "xla" or "pallas", see `dispatch.choose`.

    Raises:
      ValueError: `ids` is no int32 matrix.
      NotImplementedError: the named implementation cannot run here.
    """
    check_ids(ids)
    if dispatch.choose("sort_by_expert", implementation, None) == "xla":
        return definition(ids, experts=experts)
    return Order(
        *sort_by_expert_pallas.sort_by_expert(ids, experts=experts, interpret=dispatch.interpret())
    )


def definition(ids: Int32[Array, "R K"], *, experts: int) -> Order:
    """The meaning of `sort_by_expert` in plain jnp."""
    flat = ids.reshape(-1)
    number = jnp.arange(experts + 1, dtype=jnp.int32)
    starts = jnp.sum(flat[:, None] < number[None, :], axis=0, dtype=jnp.int32)
    return Order(jnp.argsort(flat, stable=True).astype(jnp.int32), starts)


def check_ids(ids: jax.Array) -> None:
    """Raises ValueError unless `ids` is int32 [R, K]."""
    if ids.ndim != 2 or ids.dtype != jnp.int32:
        raise ValueError(f"`ids` must be int32 [R, K], got {ids.dtype.name} of shape {ids.shape}")
