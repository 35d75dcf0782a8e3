"""Compiles for an H200 without having one: the CUDA plugin brings XLA, Triton and ptxas.

Needs the test extra's `jax-cuda13-plugin` and JAX_PLATFORMS=cpu set before jax is imported
(conftest does): the plugin is then registered and its compiler usable, while arrays live on the
CPU. Nothing runs and nothing is autotuned; what it shows is that a program lowers and fits, and
what the compiled program looks like.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_address_bits: 64 name: "NVIDIA H200" driver_version: "13.0.0"
  runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


# The tests' own programs compile in a hurry (conftest); what is looked at here must not.
_AS_IN_USE = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


@functools.cache
def _sharding() -> SingleDeviceSharding:
    try:
        topology = topologies.get_topology_desc(
            "h200", "cuda", target_config=_TARGET, topology="1x1x1"
        )
    except Exception as error:
        raise RuntimeError(
            "No CUDA compiler: install the test extra (pip install -e '.[test]', which brings "
            "jax-cuda13-plugin in jax's own version) and set JAX_PLATFORMS=cpu before jax is "
            "imported."
        ) from error
    return SingleDeviceSharding(topology.devices[0])


def h200() -> contextlib.AbstractContextManager[Any]:
    """Context in which traces are meant for an H200: dispatch and Pallas read the device here."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def argument(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Stands for an array on the H200."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding())


def lower(function: Callable[..., Any], *arguments: Any, **jit_options: Any) -> jax.stages.Lowered:
    """Lowers jit(function) for the H200. `arguments` are made by `argument`."""
    with h200():
        return jax.jit(function, **jit_options).lower(*arguments)


def compile(lowered: jax.stages.Lowered, **xla_options: str) -> jax.stages.Compiled:
    """Compiles past the persistent cache: what it stores cannot be loaded without a GPU."""
    with _no_cache():
        return lowered.compile(compiler_options={**_AS_IN_USE, **xla_options})


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax looks at the setting once, and again after a reset
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
