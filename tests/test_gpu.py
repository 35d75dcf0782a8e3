"""On a GPU: the kernels against their definitions in bf16, and the embedded pair by all methods.

JAX_PLATFORMS=cuda,cpu pytest -m gpu tests/test_gpu.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from real_shapes import normal_tile, spread_tile

from ddtree_jax import LLM, SamplingParams
from ddtree_jax.recurrent import tree_window
from ddtree_jax.tree import Tree, node_paths
from pallas_kernels import (
    add_norm,
    choose_experts,
    gated_matmul,
    gated_norm,
    gdn_chunk,
    gdn_commit,
    gdn_heads,
    gdn_step,
    gdn_tree,
    grouped_down,
    normed_matmul,
    rotate_heads,
    routed_gate_up,
    skinny_matmul,
    sort_by_expert,
    topk_logsumexp,
    tree_accept,
    tree_attention,
    tree_build,
)
from pallas_kernels.grouped_matmul import down_definition, gate_up_definition

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_gpu():
    if jax.default_backend() != "gpu":
        pytest.fail("these tests need a GPU: set JAX_PLATFORMS=cuda,cpu")


def normal(rng, *shape, dtype=jnp.bfloat16):
    return jnp.array(rng.normal(size=shape), dtype)


def random_tree(rng, slots, nodes):
    """Parents before children, about log-deep; returns parent, depth and the ancestor mask."""
    parent = np.full((slots, nodes), -1, np.int32)
    depth = np.zeros((slots, nodes), np.int32)
    visible = np.zeros((slots, nodes, nodes), bool)
    for slot in range(slots):
        visible[slot, 0, 0] = True
        for node in range(1, nodes):
            above = rng.integers(max(node - 6, 0), node)
            parent[slot, node], depth[slot, node] = above, depth[slot, above] + 1
            visible[slot, node] = visible[slot, above]
            visible[slot, node, node] = True
    return parent, depth, visible


@pytest.mark.parametrize("nodes", [1, 16, 64, 65, 129])
@pytest.mark.parametrize(("slots", "rows"), [(1, 2048), (8, 1000)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("heads", [(32, 8, 128), (24, 4, 256)])
def test_attention_is_its_definition(nodes, slots, rows, dtype, heads):
    rng, (queries, *keys) = np.random.default_rng(nodes), heads
    query = normal(rng, slots, nodes, queries, keys[1], dtype=dtype)
    cache = [normal(rng, slots, rows, *keys, dtype=dtype) for _ in range(2)]
    tree = [normal(rng, slots, nodes, *keys, dtype=dtype) for _ in range(2)]
    lengths = jnp.array(rng.integers(0, rows + 1, slots), jnp.int32).at[0].set(rows - 7)
    visible = jnp.array(random_tree(rng, slots, nodes)[2])
    start = jnp.maximum(lengths[:, None] - jnp.arange(nodes, dtype=jnp.int32)[None] - 300, 0)
    # What lies behind a slot's length must not matter.
    behind = jnp.arange(rows)[None, :, None, None] >= lengths[:, None, None, None]
    cache = [jnp.where(behind, jnp.nan, layer).astype(dtype) for layer in cache]
    for prefix_start in (None, start):
        results = [
            jax.jit(tree_attention, static_argnames=("scale", "implementation"))(
                query,
                *cache,
                *tree,
                lengths,
                visible,
                prefix_start=prefix_start,
                scale=keys[1] ** -0.5,
                implementation=implementation,
            ).astype(jnp.float32)
            for implementation in ("pallas", "xla")
        ]
        error = jnp.linalg.norm(results[0] - results[1]) / jnp.linalg.norm(results[1])
        assert float(error) < (5e-3 if dtype == jnp.bfloat16 else 1e-5)


@pytest.mark.parametrize("spine", [False, True])
@pytest.mark.parametrize("budget", [16, 63, 255])
def test_build_is_its_definition(budget, spine):
    rng = np.random.default_rng(budget)
    # Quarters: scores tie often.
    log_prob = -np.sort(rng.integers(0, 24, (4, 15, min(budget, 64))), axis=-1) / 4.0
    log_prob = jnp.array(log_prob, jnp.float32)
    kernel, definition = (
        tree_build(log_prob, budget=budget, spine=spine, implementation=implementation)
        for implementation in ("pallas", "xla")
    )
    for ours, theirs in zip(kernel, definition, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("nodes", [16, 64, 257])
def test_accept_is_its_definition(nodes):
    rng = np.random.default_rng(nodes)
    parent, _, _ = random_tree(rng, 16, nodes)
    # Tokens distinct among siblings: the node's own index, folded.
    token = np.broadcast_to(np.arange(nodes, dtype=np.int32), parent.shape)
    wanted = np.array(
        [
            [rng.choice(np.flatnonzero(row == node)) if (row == node).any() else -5
             for node in range(nodes)]
            for row in parent
        ],
        np.int32,
    )  # fmt: skip
    arguments = [jnp.array(x) for x in (token, parent, np.ones(parent.shape, bool), wanted)]
    kernel, definition = (
        tree_accept(*arguments, max_depth=15, implementation=implementation)
        for implementation in ("pallas", "xla")
    )
    assert int(definition.count.max()) > 3
    for ours, theirs in zip(kernel, definition, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("k", [1, 15, 63, 255])
@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("columns", [4096, 151936])
@pytest.mark.parametrize("tied", [False, True])
def test_topk_logsumexp_is_its_definition(k, slots, columns, tied):
    rng = np.random.default_rng(k)
    logits = 4.0 * rng.normal(size=(slots, 15, columns)).astype(np.float32)
    if tied:
        logits = np.round(logits)
        logits[0, :, 100:] = -np.inf  # with k > 100, equal -inf are selected too
        logits[0, 0] = -np.inf
        logits[0, 1, ::3] = np.nan
    kernel, definition = (
        jax.jit(topk_logsumexp, static_argnames=("k", "implementation"))(
            jnp.array(logits), k=k, implementation=implementation
        )
        for implementation in ("pallas", "xla")
    )
    np.testing.assert_array_equal(kernel[0], definition[0])
    np.testing.assert_array_equal(kernel[1], definition[1])
    np.testing.assert_allclose(kernel[2], definition[2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 16, 64, 100])
def test_layer_kernels_are_their_definitions(rows):
    rng = np.random.default_rng(rows)
    x, kernel = normal(rng, 1, rows, 4096), normal(rng, 4096, 6144)
    scale, table = normal(rng, 128), normal(rng, 1, rows, 64)
    parts = normal(rng, 4, 1, rows, 4096, dtype=jnp.float32)
    cases = {
        "skinny": lambda i: jnp.sum(
            skinny_matmul(x, kernel, implementation=i).astype(jnp.float32), axis=0
        ),
        "gated": lambda i: gated_matmul(x * 0.02, kernel, implementation=i),
        "norm": lambda i: jnp.stack(
            add_norm(x, parts, kernel[:, 0], eps=1e-6, implementation=i)
        ),
        "heads": lambda i: jnp.concatenate(
            rotate_heads(
                skinny_matmul(x, kernel, implementation=i),
                scale, scale, table, table, num_kv_heads=8, eps=1e-6, implementation=i,
            )[:3],
            axis=2,
        ),
        "gated heads": lambda i: jnp.concatenate(
            rotate_heads(
                parts, *kernel[:2, :256], *kernel[: 2 * rows, :32].reshape(2, 1, rows, 32),
                num_kv_heads=2, eps=1e-6, centred=True, gated=True, implementation=i,
            ),
            axis=2,
        ),
    }  # fmt: skip
    for name, run in cases.items():
        ours, theirs = (
            jax.jit(run, static_argnums=0)(i).astype(jnp.float32) for i in ("pallas", "xla")
        )
        error = jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)
        assert float(error) < 1e-2, name


# One row, places, experts of 16 rows and of 64, at the sizes of Qwen3.6-35B-A3B but for a quarter
# of its experts: the definition multiplies by all.
@pytest.mark.parametrize(
    ("rows", "shared"),
    [(1, True), (2, True), (4, True), (25, True), (128, True), (1, False), (16, False)],
)
def test_experts_are_their_definitions(rows, shared):
    rng = np.random.default_rng(rows)
    count = 64 + shared
    x, parts = normal(rng, 1, rows, 2048), normal(rng, 4, 1, rows, 64, dtype=jnp.float32)
    parts = parts.at[:, :, ::2, 25:].set(parts[:, :, ::2, 24:25])  # ties
    gate = normal(rng, 2048) / 45 if shared else None
    # So many numbers take a minute to draw.
    tile = normal_tile(jax.random.key(rows))
    gate_up, down = (
        spread_tile((tile * scale).astype(jnp.bfloat16), jnp.int32(7919 * rows), shape)
        for scale, shape in ((1 / 45, (count, 2048, 1024)), (1 / 23, (count, 512, 2048)))
    )

    def run(kernels):
        choice = {"count": 8, "normalise": True, "implementation": kernels}
        if kernels == "xla":
            weight, ids = (array[0] for array in choose_experts(parts, x, gate, **choice))
            order = sort_by_expert(ids, experts=count, implementation=kernels)
            gated = gate_up_definition(x[0], gate_up, ids)
            return (ids, *order), (weight, gated, down_definition(gated, down, ids, weight))
        gated, ids, weight, order = routed_gate_up(parts, x, gate, gate_up, **choice)
        options = {"shared": shared, "implementation": kernels}
        answer = grouped_down(gated, down, ids, weight, order, **options)
        return (ids, *order), (weight, gated, answer)

    run = jax.jit(run, static_argnums=0)
    (numbers, ours), (expected, theirs) = (run(kernels) for kernels in ("pallas", "xla"))
    for number, wanted in zip(numbers, expected, strict=True):
        np.testing.assert_array_equal(number, wanted)
    for our, their in zip(ours, theirs, strict=True):
        our, their = our.astype(jnp.float32), their.astype(jnp.float32)
        assert float(jnp.linalg.norm(our - their) / jnp.linalg.norm(their)) < 1e-2


@pytest.mark.parametrize("nodes", [1, 16, 40, 64, 100, 129])
@pytest.mark.parametrize("slots", [1, 4])
def test_recurrent_layer_is_its_definition(nodes, slots):
    """At the sizes of Qwen3.6-27B: in-projection's parts to gated output, and the commit."""
    rng = np.random.default_rng(nodes)
    heads, keys, dim = 48, 16, 128
    channels, values = (2 * keys + heads) * dim, heads * dim
    parts = normal(rng, 1, slots, nodes, channels + values + 2 * heads)
    before, kernel = normal(rng, slots, 4, channels), normal(rng, 4, channels)
    lengths = jnp.arange(slots, dtype=jnp.int32) + 5
    parent, depth, _ = random_tree(rng, slots, nodes)
    tree = Tree(*(jnp.asarray(x) for x in (parent, parent, depth, depth >= 0, depth * 1.0)))
    rates = normal(rng, heads, dtype=jnp.float32) - 2, normal(rng, heads, dtype=jnp.float32)
    state = normal(rng, slots, heads, dim, dim, dtype=jnp.float32) * 0.3
    paths = node_paths(tree, int(depth.max()))
    path = np.asarray(paths)[np.arange(slots), np.argmax(depth, axis=1)]
    count = jnp.asarray((path >= 0).sum(axis=1), jnp.int32)

    def run(kernels):
        window = tree_window(tree, lengths, 4)
        given = gdn_heads(
            parts, before, kernel, window, *rates,
            num_key_heads=keys, key_dim=dim, path=paths, implementation=kernels,
        )  # fmt: skip
        told = {"scales": given.scales, "implementation": kernels}
        out, update = gdn_tree(*given[:5], state, paths, **told)
        normed = gated_norm(
            out, parts, jnp.ones(dim), start=channels, eps=1e-6, implementation=kernels
        )
        arguments = (given.key, update, given.log_decay, jnp.asarray(path), count)
        return update, gdn_commit(state, *arguments, implementation=kernels), out, normed

    run = jax.jit(run, static_argnums=0)
    # The rows between differ by roundings to bfloat16, so the first two are that close only.
    for ours, theirs in zip(run("pallas"), run("xla"), strict=True):
        ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
        assert float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)) < 1e-2


@pytest.mark.parametrize("value_dim", [16, 32, 64])
@pytest.mark.parametrize("nodes", [30, 60])
def test_a_tree_s_recurrence_is_its_definition_with_other_value_dims(nodes, value_dim):
    """Paths of less and of more than a warp's length, with fewer value dims than 128."""
    rng = np.random.default_rng(nodes)
    depth = nodes - 8
    path = np.full((1, nodes, depth), -1, np.int32)
    for node in range(nodes):  # a chain, and leaves under its nodes
        above = range(node) if node < depth else range(int(rng.integers(depth)))
        path[0, node, : len(above) + 1] = [*above, node]
    key_rows, decay = (1, nodes, 2, 32), -jnp.abs(normal(rng, 1, nodes, 4, dtype=jnp.float32))
    arguments = (
        normal(rng, *key_rows, dtype=jnp.float32),
        normal(rng, *key_rows, dtype=jnp.float32),
        normal(rng, 1, nodes, 4, value_dim, dtype=jnp.float32),
        decay,
        jax.nn.sigmoid(normal(rng, 1, nodes, 4, dtype=jnp.float32)),
        normal(rng, 1, 4, 32, value_dim, dtype=jnp.float32),
        jnp.asarray(path),
    )
    found, wanted = (
        jax.jit(gdn_tree, static_argnames="implementation")(*arguments, implementation=kernels)
        for kernels in ("pallas", "xla")
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs)) < 1e-5


@pytest.mark.parametrize("heads", [32, 48])
@pytest.mark.parametrize("slots", [1, 4])
def test_a_token_of_a_recurrent_layer_is_its_definition(slots, heads):
    """At the sizes of Qwen3.6-35B-A3B and 27B; the last of several slots does not run."""
    rng = np.random.default_rng(heads)
    keys, dim = 16, 128
    channels, values = (2 * keys + heads) * dim, heads * dim
    arrays = (
        normal(rng, 1, slots, 1, channels + values + 2 * heads),
        normal(rng, slots, 4, channels),
        normal(rng, 4, channels),
        normal(rng, heads, dtype=jnp.float32) - 2,
        normal(rng, heads, dtype=jnp.float32),
        normal(rng, dim, dtype=jnp.float32),
        normal(rng, slots, heads, dim, dim, dtype=jnp.float32) * 0.3,
        jnp.arange(slots, dtype=jnp.int32) + 6,
        (jnp.arange(slots) < max(slots - 1, 1)).astype(jnp.int32),
    )
    matrix = normal(rng, values, 2048) * values**-0.5

    def run(kernels):
        step = gdn_step(*arrays, num_key_heads=keys, implementation=kernels)
        parts = normed_matmul(step.out, step.squares, matrix, eps=1e-6, implementation=kernels)
        return step, jnp.sum(parts.astype(jnp.float32), axis=0)

    run = jax.jit(run, static_argnums=0)
    (ours, product), (theirs, wanted) = (run(kernels) for kernels in ("pallas", "xla"))
    np.testing.assert_array_equal(ours.conv, theirs.conv)
    if slots > 1:
        np.testing.assert_array_equal(ours.state[-1], arrays[6][-1])
    pairs = (ours.state, theirs.state), (ours.out[:3], theirs.out[:3]), (product[:3], wanted[:3])
    for our, their in pairs:
        our, their = our.astype(jnp.float32), their.astype(jnp.float32)
        assert float(jnp.linalg.norm(our - their) / jnp.linalg.norm(their)) < 1e-2


@pytest.mark.parametrize(("rows", "count"), [(32, 9), (128, 128), (512, 300)])
def test_a_prompt_s_recurrence_is_its_definition(rows, count):
    """At the sizes of Qwen3.6-27B; rows of padding leave the state as it is, bit by bit."""
    rng = np.random.default_rng(rows)
    query, key = normal(rng, 1, rows, 16, 128), normal(rng, 1, rows, 16, 128)
    decay = -jnp.abs(normal(rng, 1, rows, 48, dtype=jnp.float32))
    beta = jax.nn.sigmoid(normal(rng, 1, rows, 48, dtype=jnp.float32))
    state = normal(rng, 1, 48, 128, 128, dtype=jnp.float32) * 0.3

    def run(kernels, padding):
        value = normal(np.random.default_rng(7), 1, rows, 48, 128).at[:, count:].set(padding)
        arguments = (query, key, value, decay, beta, state, jnp.array([count], jnp.int32))
        return jax.jit(gdn_chunk, static_argnames="implementation")(
            *arguments, implementation=kernels
        )

    (out, last), (other, again), (wanted, theirs) = (
        run("pallas", 1.0), run("pallas", -2.0), run("xla", 1.0),
    )  # fmt: skip
    np.testing.assert_array_equal(last, again)
    for ours, their in ((out[:, :count], wanted[:, :count]), (last, theirs)):
        ours, their = ours.astype(jnp.float32), their.astype(jnp.float32)
        assert float(jnp.linalg.norm(ours - their) / jnp.linalg.norm(their)) < 1e-2
    np.testing.assert_array_equal(out[:, :count], other[:, :count])


PROMPTS = ["def fibonacci(n):\n", "import os\n\n\ndef walk(folder):\n", "class Stack:\n"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_methods_give_one_text_in_float32(temperature):
    params = SamplingParams(max_tokens=64, temperature=temperature, seed=3, top_p=0.95)
    texts = [
        [o.token_ids for o in LLM(method=method, dtype="float32").generate(PROMPTS, params)]
        for method in ("autoregressive", "dflash", "ddtree")
    ]
    assert texts[0] == texts[1] == texts[2]
