"""The round on tiny random models: what a node sees, what a walk keeps, what commit leaves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import (
    DRAFT,
    TARGET,
    VOCAB,
    causal_attend,
    greedy_continuation,
    logits_of,
    tiny_drafter,
    tiny_target,
)

from ddtree_jax.engine import Engine
from ddtree_jax.models.dflash import block_visible
from ddtree_jax.plan import RoundPlan, TreeSettings
from ddtree_jax.sampling import SamplingParams
from ddtree_jax.stages.accept import accept
from ddtree_jax.stages.build import build
from ddtree_jax.stages.commit import commit, cut_at_stop
from ddtree_jax.stages.draft import draft
from ddtree_jax.stages.verify import verify
from ddtree_jax.tree import Candidates

PROMPTS = [[3, 4, 5], list(range(3, 40)), [9] * 10]
LENGTH = 128


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter():
    return tiny_drafter()


@pytest.fixture(scope="module")
def expected(target):
    return [greedy_continuation(target, prompt, 40) for prompt in PROMPTS]


_ENGINES = {}


def plan_of(method, **settings):
    return RoundPlan.of(TreeSettings(method=method, **settings), DRAFT)


def engine_of(target, drafter, method, *, budget=0, spine=False, slots=2, **settings):
    """One engine a plan: it serves many requests, and its programs are compiled once."""
    plan = plan_of(method, tree_budget=budget, spine=spine, **settings)
    if (plan, slots) not in _ENGINES:
        _ENGINES[plan, slots] = Engine(
            target,
            drafter,
            plan,
            max_slots=slots,
            max_length=LENGTH,
            dtype=jnp.float32,
            rounds_per_dispatch=4,
        )
    engine = _ENGINES[plan, slots]
    assert not engine.has_unfinished
    return engine


def decode(engine, prompts, params, seeds=None):
    """Tokens of each prompt in order, and all accepted lengths."""
    numbers = [
        engine.add_request(prompt, params, seed)
        for prompt, seed in zip(prompts, seeds or range(len(prompts)), strict=True)
    ]
    tokens, accepted = {number: [] for number in numbers}, []
    while engine.has_unfinished:
        for progress in engine.step():
            for entry in progress.rounds:
                tokens[progress.request] += entry.tokens
                accepted += [entry.accepted] if entry.accepted else []
    return [tokens[number] for number in numbers], accepted


def candidates_around(truth, rng, candidate_count):
    """Candidates where the wanted token of each depth sits at a random rank among others."""
    tokens, log_prob = [], []
    for wanted in truth:
        others = rng.permutation([token for token in range(VOCAB) if token != wanted])
        row = list(others[:candidate_count])
        row[rng.integers(0, candidate_count)] = wanted
        tokens.append(row)
        log_prob.append(np.sort(rng.uniform(-4, -0.1, candidate_count))[::-1])
    return Candidates(jnp.array([log_prob], jnp.float32), jnp.array([tokens], jnp.int32))


@pytest.fixture(scope="module")
def prefilled(target, drafter):
    """State after the second prompt, for one slot; drafting depth of DRAFT."""
    engine = engine_of(target, drafter, "ddtree", budget=20, slots=1)
    return state_after(engine, PROMPTS[1])


def state_after(engine, prompt):
    """A copy of the state that prefill of one prompt leaves; the engine is free again."""
    number = engine.add_request(prompt, SamplingParams(max_tokens=50, ignore_eos=True), 0)
    engine.step()
    state = jax.tree.map(jnp.copy, engine._state)
    engine.abort(number)
    return state


DEPTH = DRAFT.depth_count


@pytest.mark.parametrize("seed", range(3))
def test_each_node_scores_as_its_path_alone(target, prefilled, seed):
    rng = np.random.default_rng(seed)
    candidates = candidates_around(rng.integers(0, VOCAB, DEPTH), rng, 3)
    plan = plan_of("ddtree", tree_budget=20)

    @jax.jit
    def score(candidates):
        tree = build(candidates, prefilled.root, plan)
        taps = DRAFT.tap_layers
        return tree, verify(target, prefilled.target, tree, prefilled.lengths, taps, plan)

    tree, verified = score(candidates)
    tokens, parents = np.asarray(tree.token)[0], np.asarray(tree.parent)[0]
    assert tree.valid.all()
    for node in range(tokens.size):
        path, at = [], node
        while at >= 0:
            path.append(int(tokens[at]))
            at = parents[at]
        alone = logits_of(target, PROMPTS[1] + path[::-1])[-1]
        np.testing.assert_allclose(np.asarray(verified.logits)[0, node], alone, atol=1e-4)


def test_branches_are_followed_and_their_rows_committed(target, drafter, prefilled):
    """The wanted tokens hide at random ranks; a large tree holds them, a walk must find them."""
    rng = np.random.default_rng(7)
    truth = greedy_continuation(target, PROMPTS[1], 31)
    state, emitted = prefilled, [int(prefilled.root[0])]
    plan = plan_of("ddtree", tree_budget=120)
    assert emitted == truth[:1]
    lengths = []

    @jax.jit
    def play(state, candidates):
        tree = build(candidates, state.root, plan)
        verified = verify(target, state.target, tree, state.lengths, DRAFT.tap_layers, plan)
        walk = accept(verified.logits, tree, state.lengths, state.requests, plan, "greedy")
        return commit(state, tree, verified.rows, walk)

    while len(emitted) + DEPTH < len(truth):
        ahead = truth[len(emitted) : len(emitted) + DEPTH]
        state, round_tokens = play(state, candidates_around(ahead, rng, 3))
        count = int(round_tokens.count[0])
        emitted += np.asarray(round_tokens.token)[0, :count].tolist()
        lengths.append(int(round_tokens.accepted[0]))
    assert emitted == truth[: len(emitted)]
    assert max(lengths) == DEPTH + 1 and np.mean(lengths) > 3
    # What commit left is what a fresh prefill of the same tokens leaves.
    engine = engine_of(target, drafter, "ddtree", budget=20, slots=1)
    fresh = state_after(engine, PROMPTS[1] + emitted[:-1])
    size = int(state.lengths[0])
    assert size == int(fresh.lengths[0])
    for kept, new in zip(jax.tree.leaves(state.target), jax.tree.leaves(fresh.target), strict=True):
        np.testing.assert_allclose(kept[:, :size], new[:, :size], atol=1e-4)


FIVE = ((0,), (0, 0), (0, 1), (1,), (1, 0))
PLANS = [
    {"method": "autoregressive"},
    {"method": "dflash"},
    {"method": "ddtree", "budget": 4},
    {"method": "ddtree", "budget": 16},
    {"method": "ddtree", "budget": 16, "spine": True},
    {"method": "ddtree", "budget": 16, "acceptance": "linear"},
    {"method": "ddtree", "tree_choices": FIVE},
]


@pytest.mark.parametrize("plan", PLANS)
def test_every_method_gives_the_greedy_text(target, drafter, expected, plan):
    engine = engine_of(target, drafter, **plan)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    tokens, accepted = decode(engine, PROMPTS, params)
    assert tokens == expected
    if plan["method"] == "autoregressive":
        assert set(accepted) == {1}


def test_sampled_text_depends_on_the_seed_alone(target, drafter):
    params = SamplingParams(max_tokens=40, temperature=1.2, top_k=30, top_p=0.95, ignore_eos=True)
    texts = [
        decode(engine_of(target, drafter, **plan), PROMPTS, params)[0]
        for plan in (PLANS[0], PLANS[3])
    ]
    assert texts[0] == texts[1]
    # Another order, other batch mates, other slots.
    engine = engine_of(target, drafter, "ddtree", budget=16)
    turned, _ = decode(engine, PROMPTS[::-1], params, seeds=[2, 1, 0])
    assert turned[::-1] == texts[0]
    other, _ = decode(engine, PROMPTS, params, seeds=[7, 8, 9])
    assert other != texts[0]


def test_output_distribution_of_a_tree_is_the_exact_one(target, drafter):
    """Three tokens, four choices each: the second and third come out of sampled tree walks."""
    count, choices, temperature = 1500, 4, 1.5
    exact = {(): 1.0}
    for _ in range(3):
        longer = {}
        for path, chance in exact.items():
            logits = logits_of(target, [*PROMPTS[0], *path])[-1].astype(np.float64)
            best = np.argsort(-logits, kind="stable")[:choices]
            weight = np.exp((logits[best] - logits[best[0]]) / temperature)
            for token, share in zip(best, weight / weight.sum(), strict=True):
                longer[*path, int(token)] = chance * share
        exact = longer
    params = SamplingParams(max_tokens=3, temperature=temperature, top_k=choices, ignore_eos=True)
    engine = engine_of(target, drafter, "ddtree", budget=16)
    drawn, accepted = decode(engine, PROMPTS[:1] * count, params, range(count))
    assert max(accepted) > 1
    seen = {path: 0 for path in exact}
    for path in drawn:
        seen[tuple(path)] += 1  # a KeyError here is a token outside of top-k
    expected = np.array([count * exact[path] for path in exact])
    observed = np.array([seen[path] for path in exact])
    rare = expected < 5  # too few for the test's approximation: one cell together
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    chi_square = np.sum((observed - expected) ** 2 / np.maximum(expected, 1e-9))
    freedom = len(expected) - 1
    # Mean and deviation of chi-square: four deviations are one case in over 10,000; seeds fixed.
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def oracle_log_probs(target, drafter, tokens):
    """Log-probs [1, J, V] of the block after tokens[-1], without any cache."""
    context, size = tokens[:-1], DRAFT.block_size
    positions = jnp.arange(len(context), dtype=jnp.int32)[None]
    rows = target(context[None], positions, causal_attend, DRAFT.tap_layers)
    keys, values = drafter.context_rows(rows.features, positions)
    place = len(context) + np.arange(size)

    def attend(layer, query, key, value):
        kind = DRAFT.attention[layer]
        seen = np.concatenate(
            [np.ones((size, len(context)), bool), block_visible(kind, size)], axis=1
        )
        if kind.window is not None:
            seen[:, : len(context)] = place[:, None] - np.arange(len(context)) < kind.window
        keys_all = jnp.repeat(jnp.concatenate([keys[layer], key], axis=1), 3, axis=2)
        values_all = jnp.repeat(jnp.concatenate([values[layer], value], axis=1), 3, axis=2)
        score = jnp.einsum("bqnh,bknh->bnqk", query, keys_all) * DRAFT.head_dim**-0.5
        weight = jax.nn.softmax(jnp.where(seen[None, None], score, -1e30), axis=-1)
        return jnp.einsum("bnqk,bknh->bqnh", weight, values_all)

    mask = jnp.int32(DRAFT.mask_token_id)
    embed = target.embed(jnp.stack([tokens[-1], mask])[None])[0]
    block = drafter.block_embeddings(embed[:1], embed[1])
    hidden = drafter(block, jnp.array(place, jnp.int32)[None], attend)
    return jax.nn.log_softmax(target.logits(hidden[:, 1:]), axis=-1)


@pytest.mark.parametrize("rounds", [0, 3])
def test_draft_sees_all_committed_rows_within_its_windows(target, drafter, rounds):
    """After prefill, and after rounds whose rows came through `pending`."""
    engine = engine_of(target, drafter, "ddtree", budget=20, slots=1)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    number, tokens = engine.add_request(PROMPTS[1], params, 0), list(PROMPTS[1])
    for _ in range(1 + rounds):
        (progress,) = engine.step()
        tokens += [token for entry in progress.rounds for token in entry.tokens]
    state = engine._state
    plan = dataclasses.replace(engine.plan, candidate_count=VOCAB)

    @jax.jit
    def drafted(state):
        given = state.draft, state.pending, state.root, state.lengths
        return draft(target, drafter, *given, plan)[0]

    candidates = drafted(state)
    engine.abort(number)
    oracle = jax.jit(functools.partial(oracle_log_probs, target, drafter))
    expected = np.array(oracle(jnp.array(tokens, jnp.int32)))[0]
    got = np.zeros_like(expected)
    np.put_along_axis(got, np.asarray(candidates.token)[0], candidates.log_prob[0], axis=1)
    np.testing.assert_allclose(got, expected, atol=2e-4)


def test_a_long_prompt_enters_in_chunks(target, drafter):
    rng = np.random.default_rng(5)
    prompt = rng.integers(3, VOCAB, 700).tolist()
    plan = plan_of("ddtree", tree_budget=16)
    engine = Engine(
        target,
        drafter,
        plan,
        max_slots=2,
        max_length=720,
        dtype=jnp.float32,
        rounds_per_dispatch=4,
    )
    tokens, _ = decode(engine, [prompt], SamplingParams(max_tokens=4, ignore_eos=True))
    sequence = prompt + tokens[0]
    wanted = logits_of(target, sequence, 720).argmax(axis=-1)[len(prompt) - 1 : -1]
    assert tokens[0] == wanted.tolist()


def test_root_only_tree_is_autoregressive(target, drafter):
    autoregressive = RoundPlan.of(TreeSettings(method="autoregressive"), None)
    assert plan_of("ddtree", tree_budget=0) == autoregressive


def test_one_candidate_is_the_chain(target, drafter):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    chain = decode(engine_of(target, drafter, "dflash"), PROMPTS, params)
    plan = plan_of("ddtree", tree_budget=DEPTH, tree_candidates=1)
    assert plan == plan_of("dflash") == plan_of("ddtree", tree_shape="chain")
    assert decode(engine_of(target, drafter, "dflash"), PROMPTS, params) == chain


@pytest.mark.parametrize("method", ["autoregressive", "ddtree"])
def test_stop_token_ends_the_output_and_is_its_last(target, drafter, expected, method):
    stop = expected[0][7]
    first = expected[0].index(stop)
    params = SamplingParams(max_tokens=40, stop_token_ids=[stop], ignore_eos=True)
    tokens, _ = decode(engine_of(target, drafter, method, budget=16), PROMPTS[:1], params)
    assert tokens == [expected[0][: first + 1]]


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_tokens_is_never_overrun(target, drafter, expected, limit):
    engine = engine_of(target, drafter, "ddtree", budget=16)
    tokens, _ = decode(engine, PROMPTS, SamplingParams(max_tokens=limit, ignore_eos=True))
    assert tokens == [text[:limit] for text in expected]


def test_cut_at_stop_against_a_scan():
    rng = np.random.default_rng(0)
    for _ in range(50):
        token = rng.integers(0, 6, (4, 5)).astype(np.int32)
        count = rng.integers(0, 6, 4).astype(np.int32)
        remaining = rng.integers(1, 7, 4).astype(np.int32)
        stops = np.where(rng.random((4, 3)) < 0.5, rng.integers(0, 6, (4, 3)), -1)
        kept, ends = cut_at_stop(
            jnp.array(token), jnp.array(count), jnp.array(stops, jnp.int32), jnp.array(remaining)
        )
        for slot in range(4):
            out, over = [], False
            for wanted in token[slot, : count[slot]]:
                out.append(wanted)
                over = wanted in stops[slot] or len(out) == remaining[slot]
                if over:
                    break
            assert int(kept[slot]) == len(out)
            assert bool(ends[slot]) == over


def test_abort_frees_the_slot(target, drafter, expected):
    engine = engine_of(target, drafter, "autoregressive", slots=1)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first = engine.add_request(PROMPTS[0], params, 0)
    engine.step()
    engine.step()
    engine.abort(first)
    assert not engine.has_unfinished
    tokens, _ = decode(engine, PROMPTS[1:2], params)
    assert tokens == expected[1:2]


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ([], SamplingParams(), "empty prompt"),
        ([TARGET.vocab_size], SamplingParams(max_tokens=5), "token id 61"),
        ([-1], SamplingParams(max_tokens=5), "token id -1"),
        ([3] * 80, SamplingParams(max_tokens=60), "`max_length`"),
        ([3], SamplingParams(max_tokens=5, stop_token_ids=list(range(20))), "stop_token_ids"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(target, drafter, prompt, params, said):
    engine = engine_of(target, drafter, "autoregressive")
    with pytest.raises(ValueError, match=said):
        engine.add_request(prompt, params, 0)
    assert not engine.has_unfinished


def test_programs_are_compiled_once(target, drafter):
    """Arrays that turn from uncommitted to committed would cost every program a second compile."""
    plan = plan_of("autoregressive")
    engine = Engine(
        target, None, plan, max_slots=2, max_length=64, dtype=jnp.float32, rounds_per_dispatch=3
    )
    for prompts in (PROMPTS[:1], PROMPTS[:1] * 3):
        decode(engine, prompts, SamplingParams(max_tokens=9))
        engine.abort(0)
    assert {kind for kind, _ in engine._programs} == {"extend", "admit", "decode"}
    sizes = {kind: program._cache_size() for (kind, _), program in engine._programs.items()}
    assert sizes == {"extend": 0, "admit": 1, "decode": 1}
