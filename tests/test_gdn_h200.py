"""Gated DeltaNet compiles for the H200 at the shapes of Qwen3.6-27B."""

import dataclasses
import functools
import math

import aot
import jax.numpy as jnp
import pytest

from pallas_kernels import gdn_chunk, gdn_commit, gdn_step, gdn_tree, shapes

TRITON_CALL = "__gpu$xla.gpu.triton"


def arguments(shape):
    """Arguments of `gdn_tree`."""
    rows = (shape.slots, shape.nodes)
    keys = aot.argument((*rows, shape.key_heads, shape.key_dim), jnp.bfloat16)
    values = aot.argument((*rows, shape.heads, shape.value_dim), jnp.bfloat16)
    numbers = aot.argument((*rows, shape.heads), jnp.float32)
    state = aot.argument((shape.slots, shape.heads, shape.key_dim, shape.value_dim), jnp.float32)
    path = aot.argument((*rows, shape.depths + 1), jnp.int32)
    return keys, keys, values, numbers, numbers, state, path


def test_gdn_tree_compiles_and_keeps_no_state_of_a_node():
    shape = shapes.GDN["qwen3_6_27b_tree_batch"]
    lowered = aot.lower(gdn_tree, *arguments(shape))
    assert lowered.as_text().count(TRITON_CALL) == 3
    memory = aot.compile(lowered).memory_analysis()
    # A head's right-hand sides and outputs of the prefix, and two tables of nodes by depths (nodes
    # by nodes are less, once a key head); a state of every node would be 128 times the first.
    row = 2 * shape.value_dim + 2 * (shape.depths + 1)
    assert memory.temp_size_in_bytes < 1.1 * 4 * shape.slots * shape.heads * shape.nodes * row


def test_gdn_commit_updates_the_state_in_place():
    shape = shapes.GDN["qwen3_6_27b_tree_batch"]
    _, key, value, numbers, _, state, _ = arguments(shape)
    update = aot.argument(value.shape, jnp.float32)
    path = aot.argument((shape.slots, shape.depths + 1), jnp.int32)
    count = aot.argument((shape.slots,), jnp.int32)
    lowered = aot.lower(gdn_commit, state, key, update, numbers, path, count, donate_argnums=(0,))
    assert lowered.as_text().count(TRITON_CALL) == 1
    memory = aot.compile(lowered).memory_analysis()
    assert memory.alias_size_in_bytes == 4 * math.prod(state.shape)
    assert memory.temp_size_in_bytes == 0


@pytest.mark.parametrize("slots", [1, 4])
def test_a_token_is_one_kernel_in_place(slots):
    shape = shapes.GDN["qwen3_6_27b_decode"]
    keys, values = shape.key_heads * shape.key_dim, shape.heads * shape.value_dim
    channels = 2 * keys + values
    numbers = aot.argument((shape.heads,), jnp.float32)
    state = (slots, shape.heads, shape.key_dim, shape.value_dim)
    arrays = [
        aot.argument((1, slots, 1, channels + values + 2 * shape.heads), jnp.bfloat16),
        aot.argument((slots, 4, channels), jnp.bfloat16),
        aot.argument((4, channels), jnp.bfloat16),
        numbers,
        numbers,
        aot.argument((shape.value_dim,), jnp.float32),
        aot.argument(state, jnp.float32),
        *(aot.argument((slots,), jnp.int32) for _ in range(2)),
    ]
    step = functools.partial(gdn_step, num_key_heads=shape.key_heads)
    lowered = aot.lower(step, *arrays, donate_argnums=(1, 6))
    assert lowered.as_text().count(TRITON_CALL) == 1
    memory = aot.compile(lowered).memory_analysis()
    assert memory.alias_size_in_bytes == 4 * math.prod(state) + 2 * slots * 4 * channels
    assert memory.temp_size_in_bytes == 0


def test_a_step_of_a_prompt_is_four_kernels():
    shape = dataclasses.replace(shapes.GDN["qwen3_6_27b_decode"], nodes=128)
    rows = arguments(shape)[:-1]
    lowered = aot.lower(gdn_chunk, *rows, aot.argument((1,), jnp.int32))
    assert lowered.as_text().count(TRITON_CALL) == 4  # in the body of a loop
    assert "triangular" not in aot.compile(lowered).as_text()
