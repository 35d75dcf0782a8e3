"""What benchmarks share: the clock, the two rates of a device, and having a GPU alone."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

# TB/s of an H200, from good runs: a slow measurement must not flatter a share of the ceiling.
LEAST_COPY_RATE = 4.3


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """The GPU for this process only, among those that name one file in DDTREE_BENCH_LOCK: several
    can trace side by side, which takes most of a cell's time, and none disturbs a measurement."""
    name = os.environ.get("DDTREE_BENCH_LOCK")
    if name is None:
        yield
        return
    with open(name, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def timed(run: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each call, synchronised."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(1e3 * (time.perf_counter() - begin))
    return times


def ceilings_ms(gigabytes: float, teraflops: float, rates: tuple[float, float]) -> dict[str, float]:
    """Least milliseconds for moving and for multiplying, at the rates of `measure_rates`."""
    copy_rate, matmul_rate = rates
    return {
        "bytes_ms": gigabytes / max(copy_rate, LEAST_COPY_RATE),
        "flops_ms": teraflops / matmul_rate,
    }


def measure_rates() -> tuple[float, float]:
    """(copy rate in GB/ms, bytes read and written; bf16 matrix rate in TFLOP/ms), best of many."""
    on_gpu = jax.default_backend() == "gpu"
    size, side = (2**30, 8192) if on_gpu else (2**20, 512)
    big = jax.random.normal(jax.random.key(0), (size,), jnp.bfloat16)
    copy = jax.jit(jnp.copy)  # one copy of a parameter: the device's own
    jax.block_until_ready(copy(big))
    copy_ms = min(timed(lambda: [copy(big) for _ in range(8)][-1], 5)) / 8
    square = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)
    multiply = jax.jit(
        lambda x: jax.lax.fori_loop(0, 10, lambda _, y: (y @ x * side**-0.5).astype(x.dtype), x)
    )
    jax.block_until_ready(multiply(square))
    matmul_ms = min(timed(lambda: multiply(square), 5)) / 10
    return 4 * size / 1e9 / copy_ms, 2 * side**3 / 1e12 / matmul_ms
