"""Tree shapes and acceptance rules: static trees, depth-first order, the linear rule."""

import itertools

import jax.numpy as jnp
import linear_trap
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import DRAFT

from ddtree_jax.choices import parse_choices
from ddtree_jax.plan import RoundPlan, TreeSettings
from ddtree_jax.stages.accept import linear_accept
from ddtree_jax.stages.build import build
from ddtree_jax.tree import Candidates, Tree, depth_first
from pallas_kernels import tree_accept

FIVE = ((0,), (0, 0), (0, 1), (1,), (1, 0))
DEPTH = DRAFT.depth_count


def plan_of(**arguments):
    return RoundPlan.of(TreeSettings(**arguments), DRAFT)


def test_choices_are_read_from_a_list_or_a_literal():
    assert parse_choices([(1, 0), (0,), [0, 1], (1,), (0, 0)]) == FIVE
    assert parse_choices("[(0,), (1,), (0, 0), (0, 1), (1, 0)]") == FIVE


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ([], "non-empty"),
        ("[(0,), (0, 0)", "literal"),
        ("__import__('os')", "literal"),
        ("3", "non-empty list"),
        ([(0,), 3], "holds 3"),
        ([(0,), ()], r"holds \(\)"),
        ([(0,), (0, 1.5)], r"\(0, 1.5\)"),
        ([(0,), (0, True)], r"\(0, True\)"),
        ([(0,), (0, -1)], r"\(0, -1\) with a negative"),
        ([(0,), (1,), (0,)], r"\(0,\) twice"),
        ([(0,), (1, 0)], r"\(1, 0\) without its parent \(1,\)"),
    ],
)
def test_malformed_choices_are_refused_by_name(choices, said):
    with pytest.raises(ValueError, match=said):
        TreeSettings(tree_choices=choices)


def test_choices_out_of_reach_are_refused_by_name():
    deep = [(0,) * length for length in range(1, DEPTH + 2)]
    with pytest.raises(ValueError, match=rf"deeper than the {DEPTH} tokens"):
        plan_of(tree_choices=deep)
    with pytest.raises(ValueError, match=r"\(61,\), a rank beyond the 61"):
        plan_of(tree_choices=[(61,)])
    with pytest.raises(ValueError, match=r"\(3,\), a rank beyond the 3"):
        plan_of(tree_choices=[(3,)], tree_candidates=3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tree_shape": "static"}, "needs `tree_choices`"),
        ({"tree_shape": "chain", "tree_choices": FIVE}, "`tree_choices` is for"),
        ({"method": "dflash", "tree_choices": FIVE}, "`tree_choices` is for"),
        ({"tree_shape": "wide"}, "`tree_shape`"),
        ({"acceptance": "typical"}, "`acceptance`"),
    ],
)
def test_settings_that_contradict_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        TreeSettings(**arguments)


def candidates(rng, slots=1, count=4):
    """Random candidates whose tokens are distinct within a depth."""
    token = np.stack([[rng.permutation(60)[:count] for _ in range(DEPTH)] for _ in range(slots)])
    log_prob = -np.sort(rng.exponential(2.0, (slots, DEPTH, count)), axis=-1)
    return Candidates(jnp.array(log_prob, jnp.float32), jnp.array(token, jnp.int32))


def test_static_tree_takes_its_paths_from_the_candidates():
    drafted = candidates(np.random.default_rng(0), slots=2)
    tree = build(drafted, jnp.array([7, 8], jnp.int32), plan_of(tree_choices=FIVE))
    assert tree.parent.tolist() == [[-1, 0, 1, 1, 0, 4]] * 2
    assert tree.depth.tolist() == [[0, 1, 2, 2, 1, 2]] * 2
    assert tree.valid.all()
    for slot in range(2):
        token, log_prob = drafted.token[slot], drafted.log_prob[slot]
        assert tree.token[slot].tolist() == [
            7 + slot,
            *(int(token[len(path) - 1, path[-1]]) for path in FIVE),
        ]
        np.testing.assert_allclose(
            tree.log_prob[slot],
            [0.0, *(sum(log_prob[d, rank] for d, rank in enumerate(path)) for path in FIVE)],
            rtol=1e-6,
        )


def walk_in_python(tokens, parents, wanted):
    path = [0]
    while True:
        children = [n for n in range(len(tokens)) if parents[n] == path[-1]]
        found = [n for n in children if tokens[n] == wanted[path[-1]]]
        if not found:
            return path, wanted[path[-1]]
        path.append(found[0])


def scan_in_python(tokens, parents, wanted):
    """Stops at the first node that is not the child which the target wanted after node i."""
    path = [0]
    for node in range(1, len(tokens)):
        if parents[node] != node - 1 or tokens[node] != wanted[node - 1]:
            break
        path.append(node)
    return path, wanted[path[-1]]


def test_both_rules_over_all_target_choices_of_the_five_node_tree():
    """Each bit says whether the target wants that node after its parent, first come first."""
    tree = build(
        candidates(np.random.default_rng(1)), jnp.array([7], jnp.int32), plan_of(tree_choices=FIVE)
    )
    tokens, parents = np.asarray(tree.token)[0], np.asarray(tree.parent)[0]
    cases = []
    for bits in itertools.product([False, True], repeat=5):
        wanted = np.full(6, 60, np.int32)  # 60 is no candidate: the target wants nothing drafted
        for node in range(5, 0, -1):
            if bits[node - 1]:
                wanted[parents[node]] = tokens[node]
        cases.append(wanted)
    count = len(cases)
    many = Tree(*(jnp.broadcast_to(x, (count, *x.shape[1:])) for x in tree))
    wanted = jnp.array(np.stack(cases))
    walked = tree_accept(many.token, many.parent, many.valid, wanted, max_depth=DEPTH)
    scanned = linear_accept(many, wanted, DEPTH)
    longer = 0
    for case in range(count):
        for result, oracle in ((walked, walk_in_python), (scanned, scan_in_python)):
            path, bonus = oracle(tokens, parents, cases[case])
            assert int(result.count[case]) == len(path)
            assert result.path[case].tolist() == path + [-1] * (DEPTH + 1 - len(path))
            assert int(result.bonus[case]) == bonus
        longer += int(walked.count[case]) > int(scanned.count[case])
        assert int(walked.count[case]) >= int(scanned.count[case])
    assert longer > 0


@pytest.mark.parametrize("wanted", [(1,), (0, 1), (0, 0), (1, 0), (0,), ()])
def test_the_trap_s_steps_are_what_the_rules_do(wanted):
    """scripts/linear_trap.py tells the rules in words; the counts must be the kernels'."""
    tokens = {path: 10 + number for number, path in enumerate([(), *FIVE])}
    parents = [-1, *(([(), *FIVE]).index(path[:-1]) for path in FIVE)]
    choices = [
        tokens[wanted[: len(path) + 1]]
        if wanted[: len(path)] == path and len(wanted) > len(path)
        else 99
        for path in tokens
    ]
    ids = list(tokens.values())
    assert linear_trap.walk_steps(wanted)[1] == len(walk_in_python(ids, parents, choices)[0]) - 1
    assert linear_trap.scan_steps(wanted)[1] == len(scan_in_python(ids, parents, choices)[0]) - 1


def test_the_static_default_is_a_tree_of_sixty():
    chosen = linear_trap.static_tree(60, 6)
    assert len(parse_choices(chosen)) == 60
    assert max(len(path) for path in chosen) <= 6


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(st.integers(0, 99), min_size=11, max_size=11), st.integers(1, 12))
def test_depth_first_is_preorder(picks, count):
    parent = [-1] + [picks[node - 1] % node for node in range(1, count)] + [-1] * (12 - count)
    depth = [0] * 12
    for node in range(1, count):
        depth[node] = depth[parent[node]] + 1

    def preorder(node):
        below = [child for child in range(1, count) if parent[child] == node]
        return [node, *(entry for child in below for entry in preorder(child))]

    order = preorder(0) + list(range(count, 12))
    tree = Tree(
        jnp.array([range(100, 112)], jnp.int32),
        jnp.array([parent], jnp.int32),
        jnp.array([depth], jnp.int32),
        jnp.arange(12)[None] < count,
        jnp.zeros((1, 12), jnp.float32),
    )
    turned = depth_first(tree, 11)
    assert turned.token[0].tolist() == [100 + node for node in order]
    place = {node: index for index, node in enumerate(order)}
    assert turned.parent[0].tolist() == [place.get(parent[node], -1) for node in order]
    assert turned.valid[0].tolist() == [True] * count + [False] * (12 - count)


def test_best_first_of_a_peaked_drafter_is_the_chain():
    rng = np.random.default_rng(3)
    drafted = candidates(rng)
    sure = jnp.concatenate(
        [jnp.full((1, DEPTH, 1), -1e-3), jnp.full((1, DEPTH, 3), -9.0)], axis=2
    ).astype(jnp.float32)
    drafted = drafted._replace(log_prob=sure)
    root = jnp.array([7], jnp.int32)
    best = build(drafted, root, plan_of(tree_budget=DEPTH))
    chain = build(
        Candidates(drafted.log_prob[..., :1], drafted.token[..., :1]),
        root,
        plan_of(tree_shape="chain"),
    )
    for ours, theirs in zip(best, chain, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_best_single_path_is_the_chain():
    """With independent marginals a path's score is a sum over its depths, so the best path of
    full depth takes the best token of each: trying all paths finds nothing better."""
    drafted = candidates(np.random.default_rng(4), count=3)
    log_prob = np.asarray(drafted.log_prob)[0]
    best = max(
        itertools.product(range(3), repeat=DEPTH),
        key=lambda ranks: sum(log_prob[d, rank] for d, rank in enumerate(ranks)),
    )
    assert best == (0,) * DEPTH
