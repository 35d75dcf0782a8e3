"""Experts compile for the H200 at the shapes of Qwen3.6-35B-A3B, a layer to its few launches."""

import functools
import re

import aot
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from test_hybrid_h200 import TARGETS

from ddtree_jax.models.moe import MoE
from pallas_kernels import (
    choose_experts,
    grouped_down,
    grouped_gate_up,
    routed_gate_up,
    sort_by_expert,
)
from pallas_kernels.sort_by_expert import Order

TRITON_CALL = "__gpu$xla.gpu.triton"
EXPERTS, CHOSEN, HIDDEN, INNER = 257, 9, 2048, 512  # with the shared one
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def compiled(function, *arguments):
    lowered = aot.lower(function, *arguments)
    assert lowered.as_text().count(TRITON_CALL) == 1
    return aot.compile(lowered, **NO_SPILLS)


def abstract(*shape, dtype=jnp.bfloat16):
    return aot.argument(shape, dtype)


def abstract_order(rows):
    entry = abstract(rows * CHOSEN, dtype=jnp.int32)
    return Order(entry, abstract(EXPERTS + 1, dtype=jnp.int32))


@pytest.mark.parametrize("rows", [1, 64, 512])
def test_choice_and_order_compile_without_spills(rows):
    parts = abstract(16, 1, rows, EXPERTS - 1, dtype=jnp.float32)
    choose = functools.partial(choose_experts, count=CHOSEN - 1, normalise=True)
    compiled(choose, parts, abstract(1, rows, HIDDEN), abstract(HIDDEN))
    order = functools.partial(sort_by_expert, experts=EXPERTS)
    compiled(order, abstract(rows, CHOSEN, dtype=jnp.int32))


@pytest.mark.parametrize("rows", [1, 16, 64, 512])
def test_products_compile_without_spills_and_copy_no_expert(rows):
    ids, order = abstract(rows, CHOSEN, dtype=jnp.int32), abstract_order(rows)
    gate_up, down = abstract(EXPERTS, HIDDEN, 2 * INNER), abstract(EXPERTS, INNER, HIDDEN)
    one = functools.partial(grouped_gate_up, shared=True)
    other = functools.partial(grouped_down, shared=True)
    weight = abstract(rows, CHOSEN, dtype=jnp.float32)
    for program in (
        compiled(one, abstract(rows, HIDDEN), gate_up, ids, order),
        compiled(other, abstract(rows, CHOSEN, INNER), down, ids, weight, order),
    ):
        assert program.memory_analysis().temp_size_in_bytes < 1e6


def test_a_row_s_choice_and_product_compile_without_spills():
    one = functools.partial(routed_gate_up, count=CHOSEN - 1, normalise=True)
    parts = abstract(16, 1, 1, EXPERTS - 1, dtype=jnp.float32)
    kernels = abstract(EXPERTS, HIDDEN, 2 * INNER)
    arrays = (parts, abstract(1, 1, HIDDEN), abstract(HIDDEN), kernels)
    program = compiled(lambda *arrays: one(*arrays)[:3], *arrays)
    assert program.memory_analysis().temp_size_in_bytes < 1e6


@pytest.mark.parametrize("rows", [1, 64])
def test_a_layer_is_five_launches_and_of_a_row_three(rows):
    """A row alone needs no order: its sort is dead code."""
    structure, state = nnx.split(
        nnx.eval_shape(lambda: MoE(TARGETS["35b_a3b"], dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    )
    leaves = jax.tree.map(lambda leaf: abstract(*leaf.shape, dtype=leaf.dtype), state)
    lowered = aot.lower(
        lambda state, x: nnx.merge(structure, state)(x, None), leaves, abstract(1, rows, HIDDEN)
    )
    text = aot.compile(lowered).as_text()
    entry = text[text.index("\nENTRY") :]
    several = ["choose_experts", "sort_by_expert", "grouped_gate_up"]
    opening = several if rows > 1 else ["routed_gate_up"]
    assert re.findall(r'custom-call\(.*op_name="[^"]*/(\w+)/pallas_call"', entry) == [
        "skinny_matmul", *opening, "grouped_down",
    ]  # fmt: skip
    assert not re.search(r" (fusion|copy|transpose|slice|reduce|sort)\(", entry)
