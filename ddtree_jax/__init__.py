"""Lossless decoding with Diffusion Draft Trees for Qwen targets, in JAX."""

from importlib import import_module

__version__ = "0.1.0"

# Loaded on first use: `convert` imports ddtree_jax.config, and LLM imports `convert`.
_HOMES = {
    "LLM": "ddtree_jax.llm",
    "SamplingParams": "ddtree_jax.sampling",
    "RequestOutput": "ddtree_jax.outputs",
    "Stats": "ddtree_jax.outputs",
    "StreamEvent": "ddtree_jax.outputs",
}

__all__ = ["LLM", "RequestOutput", "SamplingParams", "Stats", "StreamEvent", "__version__"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'ddtree_jax' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
