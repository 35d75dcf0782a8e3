"""`tree_build`: both implementations against a heap in Python, and properties of trees.

Log-probs are multiples of 1/4, so that float32 sums are exact and ties really happen.
"""

import functools
import heapq
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import tree_build

IMPLEMENTATIONS = ["xla", "pallas"]
SLOTS, DEPTHS, CANDIDATES, BUDGET = 2, 7, 5, 18  # one shape for all random examples


@functools.cache
def compiled(implementation, budget=BUDGET, spine=False):
    call = functools.partial(tree_build, budget=budget, spine=spine, implementation=implementation)
    return jax.jit(call)


def heap_tree(log_prob, budget, spine):
    """Nodes (parent, depth, rank, score) as the published heap pops them, the root first."""
    log_prob = np.where(log_prob < np.inf, log_prob, -np.inf).astype(np.float32)
    depths, candidates = log_prob.shape
    nodes, node_of, heap = [(-1, 0, -1, np.float32(0))], {(): 0}, []

    def push(ranks):
        if len(ranks) <= depths and ranks[-1] < candidates:
            score = nodes[node_of[ranks[:-1]]][3] + log_prob[len(ranks) - 1, ranks[-1]]
            if score > -np.inf:
                heapq.heappush(heap, (-score, ranks))

    def take(ranks, score):
        node_of[ranks] = len(nodes)
        nodes.append((node_of[ranks[:-1]], len(ranks), ranks[-1], score))
        push((*ranks[:-1], ranks[-1] + 1))

    push((0,))
    if spine:
        while heap and len(nodes) <= budget:
            # Only the chain's own first child counts here; siblings wait in the heap.
            first = [entry for entry in heap if entry[1] == (0,) * len(nodes)]
            if not first:
                break
            heap.remove(first[0])
            heapq.heapify(heap)
            take(first[0][1], -first[0][0])
            push((*first[0][1], 0))
    while heap and len(nodes) <= budget:
        score, ranks = heapq.heappop(heap)
        take(ranks, -score)
        push((*ranks, 0))
    return nodes


def assert_is_heap_tree(tree, log_prob, budget, spine):
    for slot in range(log_prob.shape[0]):
        nodes = heap_tree(np.asarray(log_prob[slot]), budget, spine)
        padding = budget + 1 - len(nodes)
        fields = [np.array(field) for field in zip(*nodes, strict=True)]
        for got, expected, absent in zip(
            (tree.parent, tree.depth, tree.rank, tree.score),
            fields,
            (-1, 0, -1, -np.inf),
            strict=True,
        ):
            np.testing.assert_array_equal(
                got[slot], np.pad(expected, (0, padding), constant_values=absent)
            )
        np.testing.assert_array_equal(tree.valid[slot], np.arange(budget + 1) < len(nodes))


@st.composite
def tables(draw):
    """[B, J, M] log-probs, descending, coarse; some rows end in -inf or are all NaN."""
    table = np.empty((SLOTS, DEPTHS, CANDIDATES), np.float32)
    for slot in range(SLOTS):
        for depth in range(DEPTHS):
            steps = draw(st.lists(st.integers(0, 3), min_size=CANDIDATES, max_size=CANDIDATES))
            table[slot, depth] = -0.25 * np.cumsum(steps)
            keep = draw(st.integers(0, 4 * CANDIDATES))  # mostly the whole row
            table[slot, depth, keep:] = draw(st.sampled_from([-math.inf, math.nan]))
    return table


@pytest.mark.parametrize("spine", [False, True])
@settings(deadline=None, derandomize=True, max_examples=80)
@given(table=tables())
def test_build_is_the_heap(spine, table):
    trees = [compiled(name, spine=spine)(jnp.asarray(table)) for name in IMPLEMENTATIONS]
    for tree in trees:
        assert_is_heap_tree(tree, table, BUDGET, spine)


def real_table(seed=0, slots=2, depths=15, candidates=40):
    """Top log-probs of random logits: no ties, sums that do round."""
    logits = 3.0 * jax.random.normal(jax.random.key(seed), (slots, depths, 500), jnp.float32)
    return jax.lax.top_k(jax.nn.log_softmax(logits), candidates)[0]


@pytest.mark.parametrize("spine", [False, True])
def test_implementations_agree_bit_for_bit(spine):
    table = real_table()
    trees = [compiled(name, 40, spine)(table) for name in IMPLEMENTATIONS]
    for first, second in zip(*trees, strict=True):
        np.testing.assert_array_equal(first, second)
    assert_is_heap_tree(trees[0], table, 40, spine)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spine", [False, True])
def test_tree_is_sound(implementation, spine):
    tree = jax.tree.map(np.asarray, compiled(implementation, 40, spine)(real_table(1)))
    chain = 15 if spine else 0
    for parent, depth, rank, valid, score in zip(*tree, strict=True):
        assert valid.all()
        assert (parent[1:] < np.arange(1, 41)).all()
        np.testing.assert_array_equal(depth[1:], depth[parent[1:]] + 1)
        # Siblings are different candidates of one depth, hence different tokens.
        assert len(set(zip(parent, rank, strict=True))) == 41
        assert (np.diff(score[chain + 1 :]) <= 0).all()
        if spine:
            np.testing.assert_array_equal(parent[:16], np.arange(-1, 15))
            assert (rank[1:16] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("budget", [0, 9])
def test_one_candidate_gives_the_chain(implementation, budget):
    table = jnp.full((1, 5, 1), -0.25, jnp.float32)
    tree = compiled(implementation, budget)(table)
    length = min(5, budget) + 1
    expected = np.where(np.arange(budget + 1) < length, np.arange(-1, budget), -1)
    np.testing.assert_array_equal(tree.parent[0], expected)
    assert_is_heap_tree(tree, table, budget, False)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_unusable_logits_leave_the_root_alone(implementation, bad):
    tree = compiled(implementation)(jnp.full((SLOTS, DEPTHS, CANDIDATES), bad, jnp.float32))
    assert (tree.valid == (jnp.arange(BUDGET + 1) == 0)[None]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_build_takes_the_largest_tables(implementation):
    # All ranks tie at every depth: the order is that of rank paths alone, in many words.
    table = jnp.zeros((1, 31, 1024), jnp.float32)
    tree = compiled(implementation, 36)(table)
    assert_is_heap_tree(tree, table, 36, False)


def test_build_refuses_bad_arguments():
    with pytest.raises(ValueError, match="`budget` must not be negative, got -1"):
        tree_build(jnp.zeros((1, 2, 2), jnp.float32), budget=-1)
    with pytest.raises(ValueError, match="1 to 31 depths"):
        tree_build(jnp.zeros((1, 32, 2), jnp.float32), budget=3)
    with pytest.raises(NotImplementedError, match="use implementation='xla'"):
        tree_build(jnp.zeros((1, 2, 2), jnp.float32), budget=5000, implementation="pallas")
