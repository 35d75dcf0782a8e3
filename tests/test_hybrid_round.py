"""Tree decoding of the newer families: every node as its path alone, and many rounds as
autoregressive tokens, against transformers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hybrid
from flax import nnx
from hybrid import decode, greedy, oracle_of, target_of
from models import randomise

from ddtree_jax.config import AttentionKind, DraftConfig, RopeConfig
from ddtree_jax.engine import Engine
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.plan import RoundPlan, TreeSettings
from ddtree_jax.sampling import SamplingParams
from ddtree_jax.stages.accept import accept
from ddtree_jax.stages.build import build
from ddtree_jax.stages.commit import commit
from ddtree_jax.stages.verify import verify
from ddtree_jax.tree import Candidates, Tree

torch = pytest.importorskip("torch")

VOCAB, DEPTH, LENGTH = 200, 5, 128
HYBRIDS = ("qwen3_5", "qwen3_5_moe")
RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(3, VOCAB, size).tolist() for size in (21, 2, 1, 30, 5, 9)]
SAMPLED = SamplingParams(max_tokens=24, temperature=1.1, top_k=40, top_p=0.95, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@functools.cache
def drafter_of(layers: int) -> DFlash:
    """A random drafter: what it drafts is hardly ever accepted."""
    config = DraftConfig(
        hidden_size=64,
        intermediate_size=96,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope=RopeConfig.plain(1e4),
        vocab_size=VOCAB,
        block_size=DEPTH + 1,
        mask_token_id=199,
        tap_layers=(0, layers - 1),
        target_num_layers=layers,
        attention=(AttentionKind(causal=True, window=9), AttentionKind(causal=False, window=None)),
    )
    return randomise(DFlash(config, dtype=jnp.float32, rngs=nnx.Rngs(5)), 5)


@functools.cache
def engine_of(family, method="autoregressive", budget=0, slots=4, length=LENGTH):
    target = target_of(family)
    drafter = drafter_of(target.config.num_layers)
    plan = RoundPlan.of(TreeSettings(method=method, tree_budget=budget), drafter.config)
    return Engine(
        target,
        drafter,
        plan,
        max_slots=slots,
        max_length=length,
        dtype=jnp.float32,
        rounds_per_dispatch=4,
    )


def greedy_of(family, number, count=24):
    return greedy(family, tuple(PROMPTS[number]), count)


@functools.cache
def oracle_logits(family, tokens):
    """transformers' logits after each token of one sequence."""
    with torch.no_grad():
        return oracle_of(family)(torch.tensor([tokens])).logits[0].numpy()


def state_after(family, prompts, params=GREEDY):
    """A copy of the state that prefill of the prompts leaves; the engine is free again."""
    engine = engine_of(family, slots=len(prompts))
    params = dataclasses.replace(params, max_tokens=60)  # more than any test goes on for
    numbers = [engine.add_request(prompt, params, seed) for seed, prompt in enumerate(prompts)]
    engine.step()
    state = jax.tree.map(jnp.copy, engine._state)
    for number in numbers:
        engine.abort(number)
    return state


def random_tree(rng, root, nodes, padding=0):
    """A random tree of one slot; the root has several children."""
    parent, depth = [-1], [0]
    for node in range(1, nodes):
        above = int(rng.integers(0, min(node, 12))) if node < 24 else int(rng.integers(0, node))
        real = node < nodes - padding
        parent.append(above if real else -1)
        depth.append(depth[above] + 1 if real else 0)
    token = rng.permutation(VOCAB)[:nodes]
    token[0] = root
    place = np.arange(nodes)
    return Tree(
        token=jnp.array(token[None], jnp.int32),
        parent=jnp.array([parent], jnp.int32),
        depth=jnp.array([depth], jnp.int32),
        valid=jnp.array(place[None] < nodes - padding),
        log_prob=jnp.zeros((1, nodes), jnp.float32),
    )


def path_to(tree, node):
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = int(tree.parent[0, node])
    return nodes[::-1]


CASES = [("qwen3_5", 0), ("qwen3_5", 1), ("qwen3_5", 2), ("qwen3_5_moe", 1), ("qwen3_moe", 0)]


@functools.cache
def verified_tree(family, number):
    """State, tree of 40 nodes (6 of them padding) and what verify made of it."""
    state = state_after(family, [PROMPTS[number]])
    tree = random_tree(np.random.default_rng(number), int(state.root[0]), 40, padding=6)
    plan = RoundPlan(budget=39, max_depth=int(tree.depth.max()), candidate_count=1)
    run = jax.jit(
        lambda state, tree: verify(
            target_of(family), state.target, tree, state.lengths, (0,), plan, state.recurrent
        )
    )
    return state, tree, run(state, tree)


@pytest.mark.parametrize(("family", "number"), CASES)
def test_each_node_scores_as_transformers_on_its_path(family, number):
    state, tree, verified = verified_tree(family, number)
    parents = set(np.asarray(tree.parent)[0].tolist())
    leaves = [node for node in range(34) if node not in parents]
    for leaf in leaves:
        path = path_to(tree, leaf)
        tokens = [int(tree.token[0, node]) for node in path]
        wanted = oracle_logits(family, (*PROMPTS[number], *tokens))[-len(path) :]
        got = np.asarray(verified.logits)[0, path]
        np.testing.assert_allclose(got, wanted, atol=3e-4, rtol=0)


@pytest.mark.parametrize(("family", "number"), CASES)
def test_commit_leaves_what_a_fresh_run_leaves(family, number):
    state, tree, verified = verified_tree(family, number)
    leaf = int(np.argmax(np.asarray(tree.depth)[0]))
    path = path_to(tree, leaf)
    tokens = [int(tree.token[0, node]) for node in path]
    walk = accept(  # The tokens of the path as if the target wanted them.
        _logits_that_want(tree, path),
        tree,
        state.lengths,
        state.requests,
        RoundPlan(budget=39, max_depth=len(path) + 2, candidate_count=1),
        "greedy",
    )
    assert int(walk.count[0]) == len(path)
    state, _ = jax.jit(commit)(state, tree, verified.rows, walk, verified.stash)
    with torch.no_grad():
        cache = oracle_of(family)(
            torch.tensor([[*PROMPTS[number], *tokens]]), use_cache=True
        ).past_key_values
    config, size = target_of(family).config, int(state.lengths[0])
    assert size == len(PROMPTS[number]) + len(path)
    for place, layer in enumerate(config.recurrent_layers):
        theirs = cache.layers[layer]
        np.testing.assert_allclose(
            state.recurrent.matrix[place][0], theirs.recurrent_states[0][0], atol=5e-6, rtol=0
        )
        np.testing.assert_allclose(
            # The input of position p is in row p mod 4.
            state.recurrent.conv[place][0, np.arange(size - 3, size) % 4],
            theirs.conv_states[0][0].T[-3:],
            atol=2e-5,
            rtol=0,
        )
    for place, layer in enumerate(config.attention_layers):
        keys = cache.layers[layer].keys[0].transpose(0, 1)
        np.testing.assert_allclose(state.target.keys[place][0, :size], keys, atol=1e-4, rtol=0)


def _logits_that_want(tree, path):
    """Logits whose argmax after each node of the path is the next one's token."""
    logits = np.zeros((1, tree.token.shape[1], VOCAB), np.float32)
    for node, child in zip(path, path[1:], strict=False):
        logits[0, node, int(tree.token[0, child])] = 1.0
    return jnp.asarray(logits)


def candidates_around(rng, ahead, place, count=3):
    """Candidates [J, M]: the wanted token of each depth among others where `place` holds, absent
    elsewhere. The first depths of a path are always distractors too."""
    tokens, log_prob = [], []
    for depth, wanted in enumerate(ahead):
        row = rng.permutation([token for token in range(VOCAB) if token != wanted])[:count]
        if place(depth):
            row[rng.integers(0, count)] = wanted
        tokens.append(row)
        log_prob.append(np.sort(rng.uniform(-4, -0.1, count))[::-1])
    return log_prob, tokens


@functools.cache
def round_program(family, mode):
    """One round whose candidates come from outside."""
    plan = RoundPlan(budget=40, max_depth=DEPTH, candidate_count=3)
    target = target_of(family)

    @jax.jit
    def step(state, candidates):
        lengths = jnp.where(state.active, state.lengths, 0)
        tree = build(candidates, state.root, plan)
        verified = verify(target, state.target, tree, lengths, (0,), plan, state.recurrent)
        walk = accept(verified.logits, tree, lengths, state.requests, plan, mode)
        return commit(state, tree, verified.rows, walk, verified.stash)

    return step


def tree_rounds(family, mode, truths, state):
    """Rounds until the truths are used up: slots 0 and 1 draft well, the others badly.

    Returns the tokens emitted and the accepted lengths, one list a slot.
    """
    rng, step = np.random.default_rng(7), round_program(family, mode)
    emitted = [[int(root)] for root in state.root]
    accepted = [[] for _ in truths]
    while all(len(out) + DEPTH < len(truth) for out, truth in zip(emitted, truths, strict=True)):
        entries = []
        for slot, (out, truth) in enumerate(zip(emitted, truths, strict=True)):
            well = slot < 2
            entries.append(
                candidates_around(
                    rng,
                    truth[len(out) : len(out) + DEPTH],
                    lambda depth, well=well: well or depth == 0 and rng.random() < 0.5,
                )
            )
        log_prob, token = zip(*entries, strict=True)
        state, found = step(
            state, Candidates(jnp.array(log_prob, jnp.float32), jnp.array(token, jnp.int32))
        )
        for slot, count in enumerate(np.asarray(found.count)):
            emitted[slot] += np.asarray(found.token)[slot, :count].tolist()
            accepted[slot].append(int(found.accepted[slot]))
    return emitted, accepted


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("family", tiny_hybrid.FAMILIES)
def test_tree_rounds_give_transformers_greedy_tokens(family, slots):
    truths = [greedy_of(family, number, 32) for number in range(slots)]
    emitted, accepted = tree_rounds(family, "greedy", truths, state_after(family, PROMPTS[:slots]))
    for out, truth in zip(emitted, truths, strict=True):
        assert out == truth[: len(out)]
    assert max(accepted[0]) > 3
    if slots > 2:
        assert np.mean(accepted[2]) < 1.9


@pytest.mark.parametrize("family", tiny_hybrid.FAMILIES)
def test_tree_rounds_give_the_sampled_tokens_of_plain_decoding(family):
    truths = decode(engine_of(family), PROMPTS[:4], SAMPLED)
    emitted, accepted = tree_rounds(
        family, "filtered", truths, state_after(family, PROMPTS[:4], SAMPLED)
    )
    for out, truth in zip(emitted, truths, strict=True):
        assert out == truth[: len(out)]
    assert max(accepted[0]) > 3


@pytest.mark.parametrize("family", tiny_hybrid.FAMILIES)
def test_engine_gives_transformers_greedy_tokens(family):
    """Six prompts through four slots: two slots are refilled."""
    wanted = [greedy_of(family, number) for number in range(len(PROMPTS))]
    assert decode(engine_of(family), PROMPTS, GREEDY) == wanted
    assert decode(engine_of(family, "ddtree", 12), PROMPTS, GREEDY) == wanted


@pytest.mark.parametrize("family", HYBRIDS)
def test_one_slot_gives_the_same(family):
    wanted = [greedy_of(family, number) for number in range(3)]
    assert decode(engine_of(family, "dflash", slots=1), PROMPTS[:3], GREEDY) == wanted


@pytest.mark.parametrize("family", tiny_hybrid.FAMILIES)
def test_sampled_tokens_depend_on_the_seed_alone(family):
    plain = decode(engine_of(family), PROMPTS, SAMPLED)
    assert decode(engine_of(family, "ddtree", 12), PROMPTS, SAMPLED) == plain
    assert plain != [greedy_of(family, number) for number in range(len(PROMPTS))]


def test_a_long_prompt_enters_in_chunks():
    """Three chunks: the state crosses two borders, and padding leaves it exact."""
    prompt = np.random.default_rng(5).integers(3, VOCAB, 530).tolist()
    tokens = decode(
        engine_of("qwen3_5", length=544),
        [prompt[:20], prompt],
        SamplingParams(max_tokens=4, ignore_eos=True),
    )[1]
    wanted = oracle_logits("qwen3_5", (*prompt, *tokens)).argmax(axis=-1)
    assert tokens == wanted[len(prompt) - 1 : -1].tolist()


def test_plain_targets_pay_nothing():
    assert engine_of("qwen3_moe")._state.recurrent is None
