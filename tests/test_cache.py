"""Rows go where they belong and nowhere else."""

import jax.numpy as jnp
import numpy as np

from ddtree_jax.cache import append_row, init_cache, row_index, write_rows

SLOTS, ROWS, HEADS, DIM = 3, 6, 2, 4


def test_rows_land_at_start_and_the_rest_is_dropped():
    rng = np.random.default_rng(0)
    cache = init_cache(2, SLOTS, ROWS, HEADS, DIM, jnp.float32)
    new = tuple(jnp.array(rng.normal(size=(SLOTS, 4, HEADS, DIM)), jnp.float32) for _ in range(2))
    start, count = jnp.array([0, 2, 4], jnp.int32), jnp.array([4, 0, 3], jnp.int32)
    index = row_index(start, count, 4, ROWS)
    written = write_rows(cache, new, new, index)
    for layer, rows in zip(written.keys, new, strict=True):
        expected = np.zeros((SLOTS, ROWS, HEADS, DIM), np.float32)
        expected[0, 0:4] = rows[0]
        expected[2, 4:6] = rows[2, :2]  # the third row would lie past the end
        np.testing.assert_array_equal(layer, expected)


def test_one_slot_is_written_alone():
    cache = init_cache(1, SLOTS, ROWS, HEADS, DIM, jnp.float32)
    rows = (jnp.ones((1, 2, HEADS, DIM), jnp.float32),)
    index = row_index(jnp.array([1], jnp.int32), jnp.array([2], jnp.int32), 2, ROWS)
    written = write_rows(cache, rows, rows, index, jnp.array([1], jnp.int32))
    touched = np.asarray(written.values[0]).any(axis=(2, 3))
    np.testing.assert_array_equal(touched, [[0] * 6, [0, 1, 1, 0, 0, 0], [0] * 6])


def test_a_row_is_appended_to_one_slot():
    cache = init_cache(2, 1, ROWS, HEADS, DIM, jnp.float32)
    rng = np.random.default_rng(1)
    rows = tuple(jnp.array(rng.normal(size=(1, 1, HEADS, DIM)), jnp.float32) for _ in range(2))
    for place in (0, ROWS - 1):
        start = jnp.array([place], jnp.int32)
        written = append_row(cache, rows, rows, start)
        index = row_index(start, jnp.array([1], jnp.int32), 1, ROWS)
        wanted = write_rows(cache, rows, rows, index)
        for ours, theirs in zip(
            (*written.keys, *written.values), (*wanted.keys, *wanted.values), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
