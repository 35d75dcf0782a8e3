"""Strict settings for every test: dtype promotion, rank promotion, annotations, warnings."""

import os

# Before jax is imported: the CUDA plugin of the test extra must stay a compiler only.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pkgutil  # noqa: E402

from jaxtyping import install_import_hook  # noqa: E402

import ddtree_jax  # noqa: E402

# Modules that take a user's arguments check them themselves, and their messages are tested.
_USERS = {"llm", "plan", "choices"}
_CHECKED = {module.name for module in pkgutil.iter_modules(ddtree_jax.__path__)} - _USERS
install_import_hook(
    [*(f"ddtree_jax.{name}" for name in sorted(_CHECKED)), "pallas_kernels", "convert"],
    "beartype.beartype",
)

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Line numbers of a kernel would otherwise be part of its cache key.
jax.config.update("jax_traceback_in_locations_limit", 0)
jax.config.update("jax_compilation_cache_dir", os.path.join(".cache", "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# Most tests compile for longer than they run. What runs on a GPU is compiled as in use.
_HURRY = "jax_disable_most_optimizations", os.environ["JAX_PLATFORMS"] == "cpu"
jax.config.update(*_HURRY)


@pytest.fixture(scope="module")
def compiled_as_in_use():
    """For a file whose tests run for longer than they compile."""
    jax.config.update(_HURRY[0], False)
    yield
    jax.config.update(*_HURRY)


# A worker takes a whole file: those that take minutes come first.
_LONGEST = ("test_lossless.py", "test_mtp.py", "test_hybrid_round.py")


def pytest_collection_modifyitems(items: list) -> None:
    items.sort(key=lambda item: item.path.name not in _LONGEST)
