"""The two products of a mixture of experts: each choice of a row meets its own expert's matrix.

`grouped_gate_up` and `grouped_down` are the public ops; `gate_up_definition` and
`down_definition` are what they mean. The order by expert is no part of the meaning: it lets a
kernel read each chosen expert once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import dispatch, grouped_matmul_pallas
from pallas_kernels.sort_by_expert import Order, check_ids


def grouped_gate_up(
    x: Float[Array, "R D"],
    kernels: Float[Array, "G D F2"],
    ids: Int32[Array, "R K"],
    order: Order,
    *,
    shared: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "R K F"]:
    """silu(x @ gate) * (x @ up) of each row with each of its experts, in x's dtype.

    Args:
      x, kernels: of one dtype, bfloat16 or float32; gate is the first half of a kernel's columns.
      ids: expert of each choice, distinct in a row. order: of these ids, by `sort_by_expert`.
      shared: the last expert is every row's, which only helps to cut the work up.
      implementation: None, "xla" (`jax.lax.ragged_dot`) or "pallas", see `dispatch.choose`.

    Returns:
      Sums in float32; float32 inputs are not rounded.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
      NotImplementedError: the named implementation cannot run here.

    Source: SwiGLU, arXiv 2002.05202.
    """
    check_gate_up(x, kernels, ids, order)
    inner, columns = kernels.shape[1:]
    unsupported = grouped_matmul_pallas.unsupported(x.dtype, inner, columns // 2)
    if dispatch.choose("grouped_gate_up", implementation, unsupported) == "xla":
        # On a GPU this writes every group's masked rows: use it on a CPU only.
        product = _ragged_dot(x[order.entry // ids.shape[1]], kernels, order)
        gate, up = jnp.split(product, 2, axis=-1)
        gated = _at_entries(jax.nn.silu(gate) * up, order)
        return gated.reshape(*ids.shape, columns // 2)
    return grouped_matmul_pallas.grouped_gate_up(
        x, kernels, ids, *order, shared=shared, interpret=dispatch.interpret()
    )


def grouped_down(
    gated: Float[Array, "R K F"],
    kernels: Float[Array, "G F D"],
    ids: Int32[Array, "R K"],
    weight: Float32[Array, "R K"],
    order: Order,
    *,
    shared: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> Float[Array, "K R D"]:
    """Parts whose sum over the first axis is what the experts answer: part k of a row is
    weight * (gated @ kernel) of its choice k, scaled in float32 and rounded once.

    Parts are in gated's dtype: a part was rounded to it when the sum was taken here too, and in
    float32 they would be twice the bytes.

    Args:
      gated, kernels: of one dtype, bfloat16 or float32.
      ids, order, shared, implementation: as of `grouped_gate_up`.

    Raises:
      ValueError: shapes or dtypes do not fit each other.
      NotImplementedError: the named implementation cannot run here.
    """
    check_down(gated, kernels, ids, weight, order)
    inner, columns = kernels.shape[1:]
    unsupported = grouped_matmul_pallas.unsupported(gated.dtype, inner, columns)
    if dispatch.choose("grouped_down", implementation, unsupported) == "xla":
        product = _ragged_dot(gated.reshape(-1, inner)[order.entry], kernels, order)
        product = _at_entries(product, order).reshape(*ids.shape, columns)
        return _scaled(product, weight)
    return grouped_matmul_pallas.grouped_down(
        gated, kernels, ids, weight, *order, shared=shared, interpret=dispatch.interpret()
    )


def gate_up_definition(
    x: Float[Array, "R D"], kernels: Float[Array, "G D F2"], ids: Int32[Array, "R K"]
) -> Float[Array, "R K F"]:
    """The meaning of `grouped_gate_up`: each choice with a matrix of its own."""

    def answer(row: jax.Array, kernel: jax.Array) -> jax.Array:
        gate, up = jnp.split(_product(row, kernel), 2)
        return jax.nn.silu(gate) * up

    rows = jnp.repeat(x, ids.shape[1], axis=0)
    return _each(answer, rows, kernels, ids).astype(x.dtype)


def down_definition(
    gated: Float[Array, "R K F"],
    kernels: Float[Array, "G F D"],
    ids: Int32[Array, "R K"],
    weight: Float32[Array, "R K"],
) -> Float[Array, "K R D"]:
    """The meaning of `grouped_down`."""
    product = _each(_product, gated.reshape(-1, gated.shape[2]), kernels, ids)
    return _scaled(product, weight).astype(gated.dtype)


def _product(row: jax.Array, kernel: jax.Array) -> jax.Array:
    wide = (array.astype(jnp.float32) for array in (row, kernel))
    return jnp.einsum("i,io->o", *wide, precision=jax.lax.Precision.HIGHEST)


def _each(
    answer: Callable[..., jax.Array], rows: jax.Array, kernels: jax.Array, ids: jax.Array
) -> jax.Array:
    """[R, K, O] float32: an answer for each choice, one after another, as a matrix for each
    would not fit into memory."""
    pairs = (rows, ids.reshape(-1))
    product = jax.lax.map(lambda pair: answer(pair[0], kernels[pair[1]]), pairs)
    return product.reshape(*ids.shape, -1)


def _scaled(product: jax.Array, weight: jax.Array) -> jax.Array:
    scaled = product.astype(jnp.float32) * weight[..., None]
    return jnp.moveaxis(scaled.astype(product.dtype), 1, 0)


def _ragged_dot(rows: jax.Array, kernels: jax.Array, order: Order) -> jax.Array:
    precision = dispatch.precision_of(rows)
    return jax.lax.ragged_dot(rows, kernels, jnp.diff(order.starts), precision=precision)


def _at_entries(values: jax.Array, order: Order) -> jax.Array:
    return jnp.zeros_like(values).at[order.entry].set(values, unique_indices=True)


def check_gate_up(x: jax.Array, kernels: jax.Array, ids: jax.Array, order: Order) -> None:
    """Raises ValueError unless `grouped_gate_up` can take these."""
    _check("x", x, kernels, ids, order)
    if x.shape[:-1] != ids.shape[:1] or kernels.shape[2] % 2:
        raise ValueError(
            f"`ids` must have a row for each of x {x.shape}, and `kernels` an even number of "
            f"columns, got {ids.shape} and {kernels.shape}"
        )


def check_down(
    gated: jax.Array, kernels: jax.Array, ids: jax.Array, weight: jax.Array, order: Order
) -> None:
    """Raises ValueError unless `grouped_down` can take these."""
    _check("gated", gated, kernels, ids, order)
    if gated.shape[:-1] != ids.shape or (weight.shape, weight.dtype) != (ids.shape, jnp.float32):
        raise ValueError(
            f"`ids` and `weight` must be [R, K] to fit gated {gated.shape}, `weight` float32, "
            f"got {ids.shape} and {weight.dtype.name} of shape {weight.shape}"
        )


def _check(name: str, rows: jax.Array, kernels: jax.Array, ids: jax.Array, order: Order) -> None:
    check_ids(ids)
    if kernels.ndim != 3 or rows.shape[-1] != kernels.shape[1]:
        raise ValueError(
            f"`kernels` must be [G, I, O] to fit `{name}` [.., I], "
            f"got {kernels.shape} and {rows.shape}"
        )
    if rows.dtype != kernels.dtype or rows.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"`{name}` and `kernels` must both be bfloat16 or both float32, "
            f"got {rows.dtype.name} and {kernels.dtype.name}"
        )
    got, wanted = (order.entry.shape, order.starts.shape), ((ids.size,), (len(kernels) + 1,))
    if got != wanted:
        raise ValueError(
            f"`order` must have entry and starts of shapes {wanted} to fit `ids` and `kernels`, "
            f"got {got}"
        )
