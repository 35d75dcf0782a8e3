"""Gated DeltaNet over trees: every implementation against the node recurrence in float64."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gdn_errors import Arguments, node_paths, oracle
from jaxtyping import TypeCheckError

from pallas_kernels import gdn_chunk, gdn_commit, gdn_tree, gdn_tree_pallas
from pallas_kernels.gdn_tree import definition

# Measured maxima over these cases are at most a third of the bounds (docs/gdn.md has the table).
OUT_ERROR = {jnp.float32: 1e-6, jnp.bfloat16: 4e-3}
UPDATE_ERROR = 5e-6


class Case(NamedTuple):
    """B, T, Hk, Hv, Dk, Dv and what else the case is about."""

    slots: int = 1
    nodes: int = 17
    key_heads: int = 1
    heads: int = 3
    key_dim: int = 16
    value_dim: int = 32
    levels: int = 16  # of the tree, the root's included
    padding: int = 0  # nodes at the end that nothing sees
    decay: str = "mild"
    correlated: bool = False
    dtype: type = jnp.float32


CASES = {
    "one_node": Case(slots=3, nodes=1),
    "chain_of_16": Case(nodes=16, levels=99, key_heads=2, heads=4),
    "ragged": Case(slots=3, nodes=17, padding=5),
    "real_width": Case(nodes=64, key_dim=128, value_dim=128, heads=2),
    "strong_decay": Case(nodes=65, decay="strong", value_dim=64),
    "correlated_keys": Case(nodes=64, key_dim=64, correlated=True),
    "correlated_chain": Case(nodes=40, levels=99, correlated=True),
    "bfloat16": Case(slots=2, nodes=33, key_dim=64, heads=2, dtype=jnp.bfloat16),
    "bfloat16_correlated": Case(nodes=70, key_dim=64, correlated=True, dtype=jnp.bfloat16),
    "large_padded": Case(nodes=257, padding=37, heads=1),
}


def random_parents(rng, nodes, levels, padding):
    """Parents first; a chain if the levels allow, else a random tree of at most `levels`."""
    parent, depth = [-1], [0]
    for node in range(1, nodes):
        if node >= nodes - padding:
            parent.append(-1)
            depth.append(0)
            continue
        above = node - 1
        if levels < 99:
            known = nodes - padding if node > nodes - padding else node
            above = int(rng.choice([n for n in range(known) if depth[n] < levels - 1]))
        parent.append(above)
        depth.append(depth[above] + 1)
    return parent


def arguments(case, seed=0):
    """Random arguments, and the parents of each slot."""
    rng = np.random.default_rng(seed)
    b, t, hk, hv, dk, dv = case[:6]
    parents = [random_parents(rng, t, case.levels, case.padding) for _ in range(b)]
    query, key = rng.normal(size=(2, b, t, hk, dk))
    if case.correlated:
        key = rng.normal(size=(b, 1, hk, dk)) + 0.3 * key
    value = rng.normal(size=(b, t, hv, dv))
    log_decay = -np.exp(rng.normal(size=(b, t, hv)) - 3)
    if case.decay == "strong":
        log_decay = np.where(rng.random((b, t, hv)) < 0.5, -80.0, -1e-3)
    beta = 1 / (1 + np.exp(-rng.normal(size=(b, t, hv)) - 1))
    beta[:, t - case.padding :] = 0.0
    state = rng.normal(size=(b, hv, dk, dv)) * 0.5
    rows = (np.array(jnp.asarray(x, case.dtype)) for x in (query, key, value))
    numbers = (x.astype(np.float32) for x in (log_decay, beta, state))
    width = max(node_paths(parent).shape[1] for parent in parents)
    paths = np.stack([node_paths(parent, width) for parent in parents])
    return Arguments(*rows, *numbers, paths), parents


@functools.cache
def compiled(implementation):
    if implementation == "definition":
        return jax.jit(definition)
    return jax.jit(functools.partial(gdn_tree, implementation=implementation))


def run(implementation, args):
    return compiled(implementation)(*jax.tree.map(jnp.asarray, args))


IMPLEMENTATIONS = ["xla", "pallas"]


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, implementation) for name in CASES for implementation in IMPLEMENTATIONS]
    + [("ragged", "definition"), ("strong_decay", "definition"), ("bfloat16", "definition")],
)
def test_every_node_continues_its_parents_state(name, implementation):
    case = CASES[name]
    args, parents = arguments(case)
    out, update, _ = oracle(args, parents)
    got = run(implementation, args)
    assert got.out.dtype == case.dtype and got.update.dtype == jnp.float32
    real = case.nodes - case.padding
    np.testing.assert_allclose(
        np.asarray(got.out, np.float64)[:, :real],
        out[:, :real],
        atol=OUT_ERROR[case.dtype],
        rtol=0 if case.dtype == jnp.float32 else 1e-2,
    )
    np.testing.assert_allclose(got.update[:, :real], update[:, :real], atol=UPDATE_ERROR, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["ragged", "strong_decay", "correlated_chain", "bfloat16"])
def test_commit_gives_the_state_of_the_paths_last_node(name, implementation):
    args, parents = arguments(CASES[name], seed=3)
    _, _, states = oracle(args, parents)
    update = run(implementation, args).update
    width = args.path.shape[2]
    path, count, expected = [], [], np.float64(args.state)
    for slot, paths in enumerate(args.path):
        nodes = paths[np.argmax((paths >= 0).sum(axis=1))]
        nodes = nodes[nodes >= 0]
        if slot == 1:  # A slot that accepts a part, and one that does not run.
            nodes = nodes[:2]
        if slot == 2:
            nodes = nodes[:0]
        path.append(np.pad(nodes, (0, width - len(nodes)), constant_values=-1))
        count.append(len(nodes))
        if len(nodes):
            expected[slot] = states[slot, nodes[-1]]
    new = jax.jit(functools.partial(gdn_commit, implementation=implementation))(
        args.state,
        args.key,
        update,
        args.log_decay,
        np.array(path, np.int32),
        np.array(count, np.int32),
    )
    np.testing.assert_allclose(new, expected, atol=5e-6, rtol=0)
    if len(parents) > 2:
        np.testing.assert_array_equal(new[2], args.state[2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_padding_holds_changes_nothing(implementation):
    case = CASES["ragged"]
    args, parents = arguments(case)
    real = case.nodes - case.padding
    other = jax.tree.map(np.copy, args)
    for array in other[:5]:
        array[:, real:] = 9.0
    other.log_decay[:, real:] = -5.0
    first, second = (run(implementation, x) for x in (args, other))
    np.testing.assert_array_equal(first.out[:, :real], second.out[:, :real])
    np.testing.assert_array_equal(first.update[:, :real], second.update[:, :real])


@pytest.mark.parametrize(("rows", "tile"), [(16, 16), (32, 64)])
def test_kernel_gives_the_same_for_any_config(rows, tile):
    args, parents = arguments(CASES["strong_decay"], seed=2)
    config = gdn_tree_pallas.Config(block_rows=rows, value_tile=tile, key_block=rows)
    call = functools.partial(gdn_tree_pallas.gdn_tree, interpret=True, config=config)
    got, update = jax.jit(call)(*jax.tree.map(jnp.asarray, args))
    out, wanted, _ = oracle(args, parents)
    np.testing.assert_allclose(got, out, atol=1e-6, rtol=0)
    np.testing.assert_allclose(update, wanted, atol=UPDATE_ERROR, rtol=0)


def test_where_programs_are_many_each_takes_more_values():
    few, many = (gdn_tree_pallas.default_config(slots, 64, 48, 128) for slots in (1, 4))
    assert (few.value_tile, many.value_tile) == (32, 64)
    assert gdn_tree_pallas.default_config(16, 64, 48, 32).value_tile == 32


CHAIN = Case(slots=3, nodes=192, levels=99, key_heads=2, heads=4, decay="mild")


@pytest.mark.parametrize(("rows", "implementation"), [(64, "xla"), (32, "xla"), (64, "pallas")])
def test_chunks_are_the_chain_and_padding_leaves_the_state_exact(rows, implementation):
    args, parents = arguments(CHAIN, seed=1)
    out, _, states = oracle(args, parents)
    count = np.array([192, 70, 1], np.int32)
    chunk = jax.jit(functools.partial(gdn_chunk, rows=rows, implementation=implementation))
    got, state = chunk(*args[:6], count)
    for slot, size in enumerate(count):
        np.testing.assert_allclose(got[slot, :size], out[slot, :size], atol=1e-6, rtol=0)
        np.testing.assert_allclose(state[slot], states[slot, size - 1], atol=5e-6, rtol=0)
    # Whatever the padding holds, the state is the same bit by bit.
    other = jax.tree.map(np.copy, args[:6])
    for array in other[:5]:
        array[1, 70:], array[2, 1:] = 3.0, -3.0
    np.testing.assert_array_equal(chunk(*other, count)[1], state)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_chunk_of_no_rows_keeps_the_state(implementation):
    args, _ = arguments(CHAIN, seed=1)
    chunk = jax.jit(functools.partial(gdn_chunk, implementation=implementation))
    _, state = chunk(*args[:6], jnp.zeros((3,), jnp.int32))
    np.testing.assert_array_equal(state, args.state)


def test_gdn_refuses_bad_arguments():
    args, _ = arguments(CASES["one_node"])
    args = Arguments(*jax.tree.map(jnp.asarray, args))
    # The annotations that tests check find a wrong shape before the op's own check can.
    with pytest.raises((ValueError, TypeCheckError)):
        gdn_tree(*args._replace(state=args.state[..., :16]))
    with pytest.raises(ValueError, match="`query` must be float32"):
        gdn_tree(*args._replace(query=args.query.astype(jnp.bfloat16)))
    two = args._replace(
        **{name: jnp.repeat(getattr(args, name), 2, 2) for name in ("query", "key")}
    )
    with pytest.raises(ValueError, match="multiple of key's 2 heads, got 3"):
        gdn_tree(*two)
    with pytest.raises(ValueError, match="`path` must have room for a node"):
        gdn_tree(*args._replace(path=args.path[:, :, :0]))
    deep = args._replace(path=jnp.pad(args.path, ((0, 0), (0, 0), (0, 64)), constant_values=-1))
    with pytest.raises(NotImplementedError, match="at most 64 nodes, got room for 65"):
        gdn_tree(*deep, implementation="pallas")
    narrow = args._replace(key=args.key[..., :12], query=args.query[..., :12])
    narrow = narrow._replace(state=args.state[:, :, :12])
    with pytest.raises(NotImplementedError, match="key dim must be a power of two.*use impl"):
        gdn_tree(*narrow, implementation="pallas")
    with pytest.raises(ValueError, match="multiple of 64 rows, got 65; pad it"):
        chain, _ = arguments(Case(nodes=65))
        gdn_chunk(*jax.tree.map(jnp.asarray, chain[:6]), jnp.array([65], jnp.int32))
