"""How a kernel is cut up, chosen by name for a benchmark in place of its own default."""

import contextlib
import dataclasses
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import jax

from pallas_kernels import (
    gated_matmul_pallas,
    gdn_tree_pallas,
    grouped_matmul_pallas,
    skinny_matmul_pallas,
    topk_logsumexp_pallas,
    tree_attention_mosaic,
    tree_attention_pallas,
)

# Each has a `Config` and the `default_config` that its kernels ask where none is given.
MODULES: dict[str, tuple[ModuleType, ...]] = {
    "tree_attention": (tree_attention_mosaic, tree_attention_pallas),
    "gdn_tree": (gdn_tree_pallas,),
    "skinny_matmul": (skinny_matmul_pallas,),
    "gated_matmul": (gated_matmul_pallas,),
    "grouped_matmul": (grouped_matmul_pallas,),
    "topk_logsumexp": (topk_logsumexp_pallas,),
}


def field_names(module: ModuleType) -> list[str]:
    return [field.name for field in dataclasses.fields(module.Config)]


def parse_config(text: str) -> dict[str, int]:
    """'num_warps=8,parts=2' -> its fields. Raises ValueError, naming `--config`."""
    fields = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if not (name.isidentifier() and value.isdigit()):
            raise ValueError(f"`--config` must be fields such as num_warps=8,parts=2, got {text!r}")
        fields[name] = int(value)
    return fields


def modules_for(op: str, fields: dict[str, int]) -> list[ModuleType]:
    """Those of the op's kernels that have all these fields."""
    return [m for m in MODULES.get(op, ()) if set(fields) <= set(field_names(m))]


@contextlib.contextmanager
def configured(op: str, fields: dict[str, int]) -> Iterator[list[ModuleType]]:
    """The op's kernels take these fields in place of their defaults, in programs traced inside.

    What it gives fills with the kernels that did: an op may choose one without these fields.
    """
    asked: list[ModuleType] = []
    with contextlib.ExitStack() as stack:
        for module in modules_for(op, fields):
            own = module.default_config

            def chosen(*arguments, own=own, module=module, **options):
                asked.append(module)
                return dataclasses.replace(own(*arguments, **options), **fields)

            stack.enter_context(mock.patch.object(module, "default_config", chosen))
        # Kernels are traced once a shape, and their config is no argument of that.
        jax.clear_caches()
        try:
            yield asked
        finally:
            jax.clear_caches()
