"""Ancestor masks against a walk in Python."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.tree import Tree, ancestor_mask, node_paths, root_only

NODES = 12


@st.composite
def parents(draw):
    """A random tree of NODES nodes whose last few are padding; parents come first."""
    count = draw(st.integers(1, NODES))
    picked = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, count)]
    return picked + [-1] * (NODES - count), count


@settings(deadline=None, derandomize=True, max_examples=40)
@given(parents())
def test_mask_is_the_ancestors_and_self(case):
    parent, count = case
    depth = [0] * NODES
    for node in range(1, count):
        depth[node] = depth[parent[node]] + 1
    valid = np.arange(NODES) < count
    tree = Tree(
        jnp.zeros((1, NODES), jnp.int32),
        jnp.array([parent], jnp.int32),
        jnp.array([depth], jnp.int32),
        jnp.array(valid)[None],
        jnp.zeros((1, NODES), jnp.float32),
    )
    expected = np.eye(NODES, dtype=bool)
    for node in range(NODES):
        above = parent[node]
        while above >= 0:
            expected[node, above] = True
            above = parent[above]
    mask = np.asarray(ancestor_mask(tree, NODES - 1))[0]
    np.testing.assert_array_equal(mask, expected)
    assert not mask[:count, count:].any()
    for node, path in enumerate(np.asarray(node_paths(tree, NODES - 1))[0]):
        # Ancestors have lower indices, so down the path they ascend.
        below = np.flatnonzero(expected[node])
        np.testing.assert_array_equal(
            path, np.pad(below, (0, NODES - len(below)), constant_values=-1)
        )


def test_root_only_is_one_valid_node():
    tree = root_only(jnp.array([5, 7], jnp.int32))
    assert tree.token.tolist() == [[5], [7]]
    assert tree.parent.tolist() == [[-1], [-1]]
    assert tree.depth.tolist() == [[0], [0]]
    assert tree.valid.all()
