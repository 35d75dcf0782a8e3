"""Strict settings for every test: dtype promotion, rank promotion, annotations, warnings."""

import os

# Before jax is imported: the CUDA plugin of the test extra must stay a compiler only.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(["ddtree_jax", "pallas_kernels", "convert"], "beartype.beartype")

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Line numbers of a kernel would otherwise be part of its cache key.
jax.config.update("jax_traceback_in_locations_limit", 0)
jax.config.update("jax_compilation_cache_dir", os.path.join(".cache", "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
