"""Which implementation of an op runs: the jnp definition ("xla") or the Pallas kernel ("pallas").

The choice is made while tracing, from the platform that is compiled for and from shapes, never
from data.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

Implementation = Literal["xla", "pallas"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_GPU_PLATFORMS = ("gpu", "cuda", "rocm")


def _device() -> object:
    """What the current trace is meant for: an abstract device, a device or a platform's name.

    An abstract device in the mesh context (`jax.sharding.use_abstract_mesh`, the way to compile
    for a GPU on a machine without one) goes before `jax.default_device`, and that before the
    default backend.
    """
    abstract_device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract_device is not None:
        return abstract_device
    device = jax.config.jax_default_device
    return jax.default_backend() if device is None else device


def platform() -> str:
    """Platform that the current trace is meant for: "cpu", "gpu", "tpu"."""
    device = _device()
    name = device if isinstance(device, str) else device.platform
    return "gpu" if name in _GPU_PLATFORMS else name


def hopper() -> bool:
    """Whether the trace is meant for a GPU with TMA and WGMMA: compute capability 9.0."""
    if platform() != "gpu":
        return False
    device = _device()
    if isinstance(device, jax.sharding.AbstractDevice):
        return any(name in device.device_kind for name in ("H100", "H200", "GH200"))
    if isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    return getattr(device, "compute_capability", None) == "9.0"


def interpret() -> bool:
    """Whether a Pallas kernel must run in interpret mode: the trace is meant for a CPU."""
    return platform() == "cpu"


def choose(
    op: str, implementation: Implementation | None, unsupported: str | None
) -> Implementation:
    """Resolves the `implementation` argument of an op.

    Args:
      op: name of the op, for messages.
      implementation: None takes the kernel on a GPU if it supports the shape, else the
        definition. A named implementation is taken or refused, never replaced.
      unsupported: why the kernel cannot take these arguments, None if it can.

    Raises:
      ValueError: `implementation` is none of the known names.
      NotImplementedError: "pallas" was named and cannot run here.
    """
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(
            f"`implementation` of {op} must be None, 'xla' or 'pallas', got {implementation!r}"
        )
    where = platform()
    if implementation is None:
        return "pallas" if where == "gpu" and unsupported is None else "xla"
    if implementation == "pallas":
        if where not in ("cpu", "gpu"):
            unsupported = f"the kernel is written for GPUs, and this program is for {where!r}"
        if unsupported is not None:
            raise NotImplementedError(
                f"the Pallas kernel of {op} cannot run: {unsupported}; use implementation='xla'"
            )
    return implementation


def unsupported_dtype(dtype: jnp.dtype) -> str | None:
    """Why a kernel for bfloat16 and float32 cannot take `dtype`, or None."""
    if dtype in (jnp.bfloat16, jnp.float32):
        return None
    return f"it takes bfloat16 and float32, got {jnp.dtype(dtype).name}"


def unsupported_size(
    dtype: jnp.dtype, name: str, size: int, most: int, *, letter: str = ""
) -> str | None:
    """Why a kernel cannot hold `size` of what is named in a register array, or None. letter: what
    public docstrings call the size."""
    if unfit := unsupported_dtype(dtype):
        return unfit
    if not 16 <= size <= most or size & (size - 1):
        got = f"{letter}={size}" if letter else size
        return f"the {name} must be a power of two from 16 to {most}, got {got}"
    return None


def next_power_of_two(size: int) -> int:
    """Smallest power of two that is at least `size`; 1 for sizes below 1."""
    return 1 << max(size - 1, 0).bit_length()


def lanes_for(size: int) -> int:
    """Length of a kernel's register array for `size` entries: Triton arrays are powers of two,
    and below half a warp there is nothing to gain."""
    return max(16, next_power_of_two(size))


def ceil_div(dividend: int, divisor: int) -> int:
    """Quotient rounded up, of static integers."""
    return -(-dividend // divisor)


def divisor(size: int, most: int) -> int:
    """Largest power of two that divides `size`, at most `most`."""
    return min(most, size & -size)


def precision_of(x: jax.Array) -> jax.lax.Precision | None:
    """float32 means float32: by default a GPU would round its inputs to TF32."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    """a @ b, or a @ b.T, inside a kernel: float32 sums, float32 inputs in full."""
    return pltriton.dot(a, b, trans_b=trans_b, precision=precision_of(a))


def barrier(interpret: bool) -> None:
    """Makes what the program stored visible to all its threads; interpret mode has one."""
    if not interpret:
        pltriton.debug_barrier()


def spread(vector: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """A vector along `axis` of a matrix; interpret mode wants indices and masks in full shape."""
    return jax.lax.broadcast_in_dim(vector, shape, (axis,))


def silu(x: jax.Array) -> jax.Array:
    """x * sigmoid(x), inside a kernel."""
    return x * jax.lax.logistic(x)


def whole(*shape: int) -> pl.BlockSpec:
    """Every program sees the whole array."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def ordered_bits(bits: jax.Array) -> jax.Array:
    """float32 bits to int32 that compare as the floats do, and back. -0 comes before +0."""
    return bits ^ ((bits >> 31) & (2**31 - 1))


def lowered_once(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """jit of a function that calls kernels, so that a program whose layers are alike traces and
    lowers each kernel once and not once a layer: most of the time before XLA's own.

    Keyword-only arguments are static.
    """
    parameters = inspect.signature(function).parameters.values()
    static = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return functools.wraps(function)(jax.jit(function, static_argnames=static))
