"""Inputs of the convolution that a slot keeps, by position, and where a tree's nodes find them."""

import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.recurrent import _keep_inputs, tree_window
from ddtree_jax.tree import Tree

WIDTH = 4


def test_each_row_keeps_the_latest_input_of_its_positions():
    """Commits of 0 to 9 rows, in an order of their own; an input's value is its position + 1."""
    rng = np.random.default_rng(0)
    conv, lengths = jnp.zeros((2, WIDTH, 1)), np.zeros(2, np.int32)
    for _ in range(12):
        count = rng.integers(0, 10, 2).astype(np.int32)
        path = np.stack([rng.permutation(12)[:9] for _ in range(2)]).astype(np.int32)
        mixed = np.full((2, 12, 1), -1.0, np.float32)
        for slot in range(2):
            mixed[slot, path[slot], 0] = lengths[slot] + np.arange(9) + 1
        path[np.arange(9)[None, :] >= count[:, None]] = -1
        conv = _keep_inputs(conv, *map(jnp.asarray, (mixed, path, lengths, count)))
        lengths = lengths + count
        for slot, end in enumerate(lengths):
            wanted = np.zeros(WIDTH)
            for position in range(max(end - WIDTH, 0), end):
                wanted[position % WIDTH] = position + 1
            np.testing.assert_array_equal(conv[slot, :, 0], wanted)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 10])
def test_a_node_finds_its_path_in_the_window(length):
    """Of inputs 1, 2, .. before the root, and 100 + node of the tree."""
    parent = np.array([[-1, 0, 0, 1, 3, 4, 2]], np.int32)
    depth = np.array([[0, 1, 1, 2, 3, 4, 2]], np.int32)
    tree = Tree(*(jnp.asarray(x) for x in (parent, parent, depth, depth >= 0, depth * 1.0)))
    kept = np.zeros(WIDTH)
    for position in range(length):
        kept[position % WIDTH] = position + 1
    window = np.asarray(tree_window(tree, jnp.array([length]), WIDTH))[0]
    inputs = np.concatenate([kept, 100 + np.arange(7)])
    for node in range(7):
        wanted, at = [], node
        while at >= 0:
            wanted.append(100 + at)
            at = parent[0, at]
        wanted += [max(length - back, 0) for back in range(WIDTH)]
        np.testing.assert_array_equal(inputs[window[node]], wanted[:WIDTH])
