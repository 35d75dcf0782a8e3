"""`tree_accept`: both implementations against a walk in Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from pallas_kernels import tree_accept

IMPLEMENTATIONS = ["xla", "pallas"]
SLOTS, NODES, MAX_DEPTH = 3, 13, 4  # one shape for all examples: a compile an implementation


@functools.cache
def compiled(implementation, max_depth=MAX_DEPTH):
    call = functools.partial(tree_accept, max_depth=max_depth, implementation=implementation)
    return jax.jit(call)


def walk(token, parent, valid, wanted, max_depth):
    """The definition in words: step to the lowest valid child that the target wants."""
    path = [0]
    while len(path) <= max_depth:
        children = [
            node
            for node in range(len(token))
            if valid[node] and parent[node] == path[-1] and token[node] == wanted[path[-1]]
        ]
        if not children:
            break
        path.append(children[0])
    return path + [-1] * (max_depth + 1 - len(path)), len(path), wanted[path[-1]]


@st.composite
def trees(draw):
    """Random trees, few tokens so that walks go deep, siblings not always distinct."""
    parent = [-1] + [draw(st.integers(max(0, node - 4), node - 1)) for node in range(1, NODES)]
    tokens = st.lists(st.integers(0, 2), min_size=NODES, max_size=NODES)
    valid = [True] + [draw(st.integers(0, 9)) > 0 for _ in range(1, NODES)]
    return draw(tokens), parent, valid, draw(tokens)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(deadline=None, derandomize=True, max_examples=60)
@given(slots=st.lists(trees(), min_size=SLOTS, max_size=SLOTS))
def test_accept_is_the_walk(implementation, slots):
    token, parent, valid, wanted = (np.array(field) for field in zip(*slots, strict=True))
    got = compiled(implementation)(
        jnp.asarray(token, jnp.int32),
        jnp.asarray(parent, jnp.int32),
        jnp.asarray(valid),
        jnp.asarray(wanted, jnp.int32),
    )
    for slot, tree in enumerate(slots):
        path, count, bonus = walk(*tree, MAX_DEPTH)
        np.testing.assert_array_equal(got.path[slot], path)
        assert (got.count[slot], got.bonus[slot]) == (count, bonus)


def chain(nodes):
    """A chain 0 - 1 - 2 .. of which the target wants every token."""
    token = jnp.arange(nodes, dtype=jnp.int32)[None]
    return token, token - 1, jnp.ones((1, nodes), jnp.bool_), token + 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("nodes", "max_depth"), [(1, 0), (1, 3), (6, 0), (6, 3), (16, 15)])
def test_accept_goes_as_deep_as_it_may(implementation, nodes, max_depth):
    got = compiled(implementation, max_depth)(*chain(nodes))
    count = min(nodes, max_depth + 1)
    expected = np.where(np.arange(max_depth + 1) < count, np.arange(max_depth + 1), -1)
    np.testing.assert_array_equal(got.path[0], expected)
    assert (got.count[0], got.bonus[0]) == (count, count)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_accept_takes_the_first_of_equal_children(implementation):
    token = jnp.array([[0, 7, 7, 1]], jnp.int32)
    parent = jnp.array([[-1, 0, 0, 2]], jnp.int32)
    valid, wanted = jnp.ones((1, 4), jnp.bool_), jnp.array([[7, 1, 1, 0]], jnp.int32)
    got = compiled(implementation)(token, parent, valid, wanted)
    np.testing.assert_array_equal(got.path[0], [0, 1, -1, -1, -1])


def test_accept_refuses_bad_arguments():
    arguments = chain(4)
    with pytest.raises(ValueError, match="`max_depth` must not be negative, got -1"):
        tree_accept(*arguments, max_depth=-1)
    # The annotations that tests check say the same before the op's own check can.
    with pytest.raises((ValueError, TypeCheckError), match="implementation"):
        tree_accept(*arguments, max_depth=2, implementation="triton")
