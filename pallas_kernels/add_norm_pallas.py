"""Pallas GPU kernel of `add_norm`: one launch, one program a row."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import dispatch
from pallas_kernels.skinny_matmul_pallas import load_sum

_MOST_LANES = 16384


def unsupported(dtype: jnp.dtype, size: int) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    if unfit := dispatch.unsupported_dtype(dtype):
        return unfit
    if size > _MOST_LANES:
        return f"it holds a row of at most {_MOST_LANES} in registers, got D={size}"
    return None


def _warps(size: int) -> int:
    """Measured on an H200 (scripts/results/kernel_log.md): four entries a thread, as one load
    takes, but where those of a long row would be too many threads."""
    lanes = dispatch.next_power_of_two(size)
    return 8 if lanes > 4096 else max(1, lanes // 128)


def _add_norm_kernel(
    x_ref,  # [1, D]
    update_ref,  # [P, 1, D]
    scale_ref,  # [D]
    sum_ref,  # [1, D], out
    normed_ref,  # [1, D], out
    *,
    eps: float,
    centred: bool,
):
    size, dtype = x_ref.shape[1], x_ref.dtype
    lane = jax.lax.iota(jnp.int32, dispatch.next_power_of_two(size))
    inside = lane < size

    def load(ref, *index):
        return pltriton.load(ref.at[*index, lane], mask=inside, other=0.0).astype(jnp.float32)

    scale = load(scale_ref)  # early: behind the reduction its latency would show
    update = load_sum(update_ref, 0, lane, mask=inside, dtype=dtype)
    total = load(x_ref, 0) + update.astype(jnp.float32)
    total = total.astype(dtype)
    wide = total.astype(jnp.float32)
    scaling = jax.lax.rsqrt(jnp.sum(wide * wide) / size + eps)
    normed = wide * scaling
    if not centred:
        normed = normed.astype(normed_ref.dtype).astype(jnp.float32)
    normed = normed * (1.0 + scale if centred else scale)
    pltriton.store(sum_ref.at[0, lane], total, mask=inside)
    pltriton.store(normed_ref.at[0, lane], normed.astype(normed_ref.dtype), mask=inside)


@dispatch.lowered_once
def add_norm(
    x: jax.Array,
    update: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    centred: bool,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Sum and normed rows, each [B, R, D], as `add_norm.definition` gives them."""
    parts, size = update.shape[0], x.shape[-1]
    rows = x.size // size
    row = pl.BlockSpec((1, size), lambda i: (i, 0))
    total, normed = pl.pallas_call(
        functools.partial(_add_norm_kernel, eps=eps, centred=centred),
        grid=(rows,),
        in_specs=[
            row,
            pl.BlockSpec((parts, 1, size), lambda i: (0, i, 0)),
            pl.BlockSpec((size,), lambda i: (0,)),
        ],
        out_specs=[row, row],
        out_shape=[jax.ShapeDtypeStruct((rows, size), dtype) for dtype in (x.dtype, scale.dtype)],
        compiler_params=pltriton.CompilerParams(num_warps=_warps(size), num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(x.reshape(rows, size), update.reshape(parts, rows, size), scale)
    return total.reshape(x.shape), normed.reshape(x.shape)
