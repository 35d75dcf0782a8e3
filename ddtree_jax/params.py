"""A model as static structure and flat leaves: the cheap way to call a jitted program.

Measured a call: nnx.jit 43 ms, a module as argument 3.6 ms, flat leaves 0.96 ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
from flax import nnx

Model = TypeVar("Model", bound=nnx.Module)
Leaves = tuple[Any, ...]  # arrays, or their abstract stand-ins


@dataclass(frozen=True)
class Structure(Generic[Model]):
    """What of a model is static; `merge` gives the module back from its leaves."""

    graph: nnx.GraphDef
    tree: Any

    def merge(self, leaves: Sequence[Any]) -> Model:
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, leaves))


def flatten_model(model: Model) -> tuple[Structure[Model], Leaves]:
    """Structure and leaves of a module; leaves may be abstract (nnx.eval_shape)."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    return Structure(graph, tree), tuple(leaves)
