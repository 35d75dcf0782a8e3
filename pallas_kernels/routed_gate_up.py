"""The first half of a mixture of experts: which experts a row goes to, and their first product.

`routed_gate_up` is the public op; it means `choose_experts`, `sort_by_expert` and
`grouped_gate_up`, one after another, and is just that for more than one row.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import dispatch, routed_gate_up_pallas
from pallas_kernels.choose_experts import check_choice, choose_experts
from pallas_kernels.grouped_matmul import grouped_gate_up
from pallas_kernels.sort_by_expert import Order, sort_by_expert


class Routed(NamedTuple):
    """Of N = B * R rows what `grouped_down` is given: the first products of each row's K experts in
    x's dtype, their ids and weights, and the order of the ids."""

    gated: Float[Array, "N K F"]
    ids: Int32[Array, "N K"]
    weight: Float32[Array, "N K"]
    order: Order


def routed_gate_up(
    parts: Float[Array, "P B R E"],
    x: Float[Array, "B R D"],
    shared_gate: Float[Array, " D"] | None,
    kernels: Float[Array, "G D F2"],
    *,
    count: int,
    normalise: bool,
    implementation: dispatch.Implementation | None = None,
) -> Routed:
    """silu(x @ gate) * (x @ up) of each row with each of its `count` likeliest experts.

    Args:
      parts, x, shared_gate, count, normalise: as of `choose_experts`.
      kernels: of the E experts and, if there is a `shared_gate`, of the shared one behind them; as
        of `grouped_gate_up`.
      implementation: None, "xla" or "pallas", see `dispatch.choose`.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
      NotImplementedError: the named implementation cannot run here.
    """
    check_choice(parts, x, shared_gate, count)
    check_kernels(kernels, x, parts.shape[3] + (shared_gate is not None))
    rows, (experts, inner, columns) = x.shape[0] * x.shape[1], kernels.shape
    options = {"count": count, "normalise": normalise}
    unsupported = routed_gate_up_pallas.unsupported(x.dtype, parts.shape[3], inner, columns // 2)
    choice = dispatch.choose("routed_gate_up", implementation, unsupported)
    if rows == 1 and choice == "pallas":
        gated, ids, weight = routed_gate_up_pallas.routed_gate_up(
            parts, x, shared_gate, kernels, **options, interpret=dispatch.interpret()
        )
        order = sort_by_expert(ids, experts=experts, implementation=implementation)
        return Routed(gated, ids, weight, order)
    weight, ids = choose_experts(parts, x, shared_gate, **options, implementation=implementation)
    weight, ids = (array.reshape(rows, -1) for array in (weight, ids))
    order = sort_by_expert(ids, experts=experts, implementation=implementation)
    gated = grouped_gate_up(
        x.reshape(rows, inner),
        kernels,
        ids,
        order,
        shared=shared_gate is not None,
        implementation=implementation,
    )
    return Routed(gated, ids, weight, order)


def check_kernels(kernels: jax.Array, x: jax.Array, experts: int) -> None:
    """Raises ValueError unless these are matrices of `experts` for x."""
    got = kernels.shape
    if kernels.ndim != 3 or got[:2] != (experts, x.shape[2]) or got[2] % 2:
        raise ValueError(
            f"`kernels` must be [{experts}, {x.shape[2]}, 2 F] to fit `parts`, `shared_gate` and "
            f"x {x.shape}, got {got}"
        )
    if kernels.dtype != x.dtype:
        raise ValueError(f"`kernels` must be {x.dtype.name} as x is, got {kernels.dtype.name}")
