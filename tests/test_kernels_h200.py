"""Every Pallas kernel compiles for the H200 at real shapes, through the public ops.

This is what a machine without a GPU can check: lowering to Triton, ptxas, shared memory, and the
absence of cache copies in the compiled program. Numbers come from interpret mode in the other
tests.
"""

import dataclasses
import functools
import math
import re

import aot
import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import (
    add_norm,
    gated_matmul,
    rotate_heads,
    shapes,
    skinny_matmul,
    topk_logsumexp,
    tree_accept,
    tree_attention,
    tree_build,
)

TRITON_CALL = "__gpu$xla.gpu.triton"
MOSAIC_CALL = "@mosaic_gpu_v2"
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def compile_kernel(function, *arguments, launches=1, **xla_options):
    lowered = aot.lower(function, *arguments)
    assert lowered.as_text().count(TRITON_CALL) == launches
    return aot.compile(lowered, **xla_options)


def attention_arguments(shape):
    b, t, s = shape.slots, shape.nodes, shape.cache_rows
    n, k, h = shape.query_heads, shape.kv_heads, shape.head_dim
    cache = aot.argument((b, s, k, h), jnp.bfloat16)
    tree = aot.argument((b, t, k, h), jnp.bfloat16)
    query = aot.argument((b, t, n, h), jnp.bfloat16)
    visible = aot.argument((b, t, t), jnp.bool_)
    return query, cache, cache, tree, tree, aot.argument((b,), jnp.int32), visible


attention = functools.partial(tree_attention, scale=128**-0.5)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_8b_chain",
        "qwen3_8b_tree_batch",
        "qwen3_6_27b_tree",
        "qwen3_6_27b_tree_batch",
    ],
)
def test_tree_attention_compiles(name):
    lowered = aot.lower(attention, *attention_arguments(shapes.ATTENTION[name]))
    assert lowered.as_text().count(MOSAIC_CALL) == 1
    assert lowered.as_text().count(TRITON_CALL) <= 1  # the merge of several parts
    aot.compile(lowered)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (24, 4, 256), (16, 2, 256)])
def test_attention_of_a_node_is_tritons_without_spills(heads, kv_heads, dim):
    sizes = {"query_heads": heads, "kv_heads": kv_heads, "head_dim": dim}
    shape = dataclasses.replace(shapes.ATTENTION["qwen3_8b_decode"], **sizes)
    lowered = aot.lower(attention, *attention_arguments(shape))
    assert lowered.as_text().count(TRITON_CALL) == 2
    aot.compile(lowered, **NO_SPILLS)


def test_attention_with_a_window_is_tritons():
    arguments = attention_arguments(shapes.ATTENTION["qwen3_8b_chain"])
    start = aot.argument(arguments[0].shape[:2], jnp.int32)

    def windowed(start, *arguments):
        return attention(*arguments, prefix_start=start)

    # Shares of the prefix and the tree side by side, then the merge.
    compile_kernel(windowed, start, *arguments, launches=2)


@pytest.mark.parametrize("rows", [1, 64])
def test_layer_kernels_compile_without_spills(rows):
    bf16, f32 = jnp.bfloat16, jnp.float32

    def x(*shape, dtype=bf16):
        return aot.argument(shape, dtype)

    def compiled(function, *arguments):
        compile_kernel(function, *arguments, **NO_SPILLS)

    compiled(skinny_matmul, x(1, rows, 4096), x(4096, 6144))
    compiled(skinny_matmul, x(1, rows, 12288), x(12288, 4096))
    compiled(skinny_matmul, x(1, rows, 5120), x(5120, 16480))  # the last columns masked
    compiled(gated_matmul, x(1, rows, 4096), x(4096, 24576))
    norm = functools.partial(add_norm, eps=1e-6)
    compiled(norm, x(1, rows, 4096), x(4, 1, rows, 4096, dtype=f32), x(4096))
    norm = functools.partial(add_norm, eps=1e-6, centred=True)
    wide = x(1, rows, 5120, dtype=f32)
    compiled(norm, wide, x(4, 1, rows, 5120, dtype=f32), x(5120))
    heads = functools.partial(rotate_heads, num_kv_heads=8, eps=1e-6)
    table = x(1, rows, 64)
    compiled(heads, x(2, 1, rows, 6144, dtype=f32), x(128), x(128), table, table)
    table = x(1, rows, 32)
    for keys, queries in ((4, 24), (2, 16)):  # Qwen3.6-27B and 35B-A3B
        heads = functools.partial(
            rotate_heads, num_kv_heads=keys, eps=1e-6, centred=True, gated=True
        )
        columns = 2 * (queries + keys) * 256
        compiled(heads, x(1, 1, rows, columns), x(256), x(256), table, table)
        compiled(heads, x(4, 1, rows, columns, dtype=f32), x(256), x(256), table, table)


def test_tree_attention_with_a_window_copies_no_cache():
    shape = shapes.ATTENTION["qwen3_8b_tree_long"]
    arguments = attention_arguments(shape)
    start = aot.argument((shape.slots, shape.nodes), jnp.int32)
    compiled = compile_kernel(
        lambda start, *rest: attention(*rest, prefix_start=start), start, *arguments, launches=2
    )
    cache = arguments[1]
    cache_bytes = math.prod(cache.shape) * cache.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 4
    # No instruction but the parameters themselves may have the cache's elements in any order.
    large = [
        line
        for line in compiled.as_text().splitlines()
        for found in re.findall(r"= \(?(?:bf16|f32)\[([\d,]+)\]", line)
        if math.prod(map(int, found.split(","))) >= math.prod(cache.shape)
    ]
    assert len(large) == 2 and all(" parameter(" in line for line in large), large


def test_a_shape_that_the_kernel_refuses_falls_back_only_if_nothing_was_named():
    shape = dataclasses.replace(shapes.ATTENTION["qwen3_8b_chain"], head_dim=80)
    arguments = attention_arguments(shape)
    assert TRITON_CALL not in aot.lower(attention, *arguments).as_text()
    with pytest.raises(NotImplementedError, match="H=80; use implementation='xla'"):
        aot.lower(functools.partial(attention, implementation="pallas"), *arguments)


def test_the_definition_is_the_choice_on_a_cpu():
    arguments = [
        jnp.zeros(argument.shape, argument.dtype)
        for argument in attention_arguments(
            shapes.AttentionShape(
                slots=1, nodes=2, query_heads=2, kv_heads=1, head_dim=32, cache_rows=4
            )
        )
    ]
    assert "pallas_call" not in str(jax.make_jaxpr(attention)(*arguments))
    named = functools.partial(attention, implementation="pallas")
    assert "pallas_call" in str(jax.make_jaxpr(named)(*arguments))


@pytest.mark.parametrize("spine", [False, True])
def test_tree_build_compiles(spine):
    shape = shapes.TREE["dflash_63_batch"]
    log_prob = aot.argument((shape.slots, shape.depths, shape.candidates), jnp.float32)
    compile_kernel(functools.partial(tree_build, budget=shape.budget, spine=spine), log_prob)


def test_tree_accept_compiles():
    shape = shapes.TREE["dflash_63_batch"]
    numbers = aot.argument((shape.slots, shape.nodes), jnp.int32)
    valid = aot.argument((shape.slots, shape.nodes), jnp.bool_)
    walk = functools.partial(tree_accept, max_depth=shape.depths)
    compile_kernel(walk, numbers, numbers, valid, numbers)


# A row of the embedded pair's vocabulary fits one program; larger ones take two launches.
@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("qwen3_chain", 2),
        ("qwen3_15", 2),
        ("qwen3_16", 2),
        ("qwen3_31", 2),
        ("qwen3_63", 2),
        ("qwen3_63_batch", 2),
        ("qwen3_127", 2),
        ("qwen3_255", 2),
        ("embedded_chain", 1),
        ("embedded_63", 1),
    ],
)
def test_topk_logsumexp_compiles_and_spills_no_registers(name, launches):
    shape = shapes.TOPK[name]
    logits = aot.argument((shape.slots, shape.rows, shape.columns), jnp.float32)
    compiled = compile_kernel(
        functools.partial(topk_logsumexp, k=shape.k),
        logits,
        launches=launches,
        xla_gpu_fail_ptx_compilation_on_register_spilling=True,
    )
    # The logits are read where they lie.
    assert compiled.memory_analysis().temp_size_in_bytes < math.prod(logits.shape)


def test_topk_logsumexp_compiles_at_its_largest():
    shape = shapes.TOPK["qwen3_1024"]
    logits = aot.argument((shape.slots, shape.rows, shape.columns), jnp.float32)
    compile_kernel(functools.partial(topk_logsumexp, k=shape.k), logits, launches=2)
