"""The MTP block: against transformers, against itself without a cache, and in the engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_hybrid
from hybrid import decode, greedy, mtp_of, oracle_of, run_whole, target_of
from models import causal_attend

from ddtree_jax import LLM
from ddtree_jax.engine import Engine
from ddtree_jax.plan import RoundPlan, TreeSettings
from ddtree_jax.sampling import SamplingParams
from ddtree_jax.stages.accept import accept
from ddtree_jax.stages.build import build
from ddtree_jax.stages.commit import commit
from ddtree_jax.stages.draft_mtp import draft_mtp
from ddtree_jax.stages.verify import verify
from ddtree_jax.tree import Candidates

torch = pytest.importorskip("torch")

FAMILIES = ("qwen3_5", "qwen3_5_moe")
VOCAB, SIZE = 200, 40
RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(3, VOCAB, size).tolist() for size in (12, 1, 25, 3, 2)]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.1, top_p=0.95, ignore_eos=True)
PLAN = RoundPlan.of(TreeSettings(method="mtp"), None)


@functools.cache
def engine_of(family, method, slots, length=96, **settings):
    plan = RoundPlan.of(TreeSettings(method=method, **settings), None)
    return Engine(
        target_of(family),
        mtp_of(family),
        plan,
        max_slots=slots,
        max_length=length,
        dtype=jnp.float32,
        rounds_per_dispatch=3,
    )


def greedy_of(family, number):
    return greedy(family, tuple(PROMPTS[number]), 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_block_equals_transformers(family):
    from transformers.modeling_layers import MtpLayer

    oracle = oracle_of(family)
    base = oracle.model
    layer = MtpLayer(base.config, type(base.layers[3]), type(base.norm), 3).eval()
    rng = np.random.default_rng(0)
    config = tiny_hybrid.text_config(family)
    tiny_hybrid.tensors_of(rng, config)  # what `write_hub` draws before the block
    names = {
        "mtp.fc": "eh_proj",
        "mtp.pre_fc_norm_embedding": "enorm",
        "mtp.pre_fc_norm_hidden": "hnorm",
        "mtp.norm": "post_norm",
        "mtp.layers.0": "mtp_block",
    }
    tensors = {}
    for name, value in tiny_hybrid.mtp_tensors(rng, config).items():
        (old,) = [old for old in names if name.startswith(old + ".")]
        tensors[names[old] + name.removeprefix(old)] = torch.tensor(value)
    layer.load_state_dict(tensors)

    embedded, hidden = rng.normal(size=(2, 1, 9, 64)).astype(np.float32)
    place = np.arange(5, 14)
    mask = np.where(np.tril(np.ones((9, 9), bool)), 0.0, -1e30).astype(np.float32)
    positions = torch.tensor(place[None])
    with torch.no_grad():
        theirs = layer(
            torch.tensor(embedded),
            torch.tensor(hidden),
            base.rotary_emb(torch.tensor(hidden), positions[None].expand(3, -1, -1)),
            torch.tensor(mask)[None, None],
            positions,
            None,
        )
    block = mtp_of(family)
    mine, _, _ = jax.jit(lambda *given: block(*given, causal_attend))(
        jnp.asarray(embedded), jnp.asarray(hidden), jnp.asarray(place[None], jnp.int32)
    )
    np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-4, rtol=0)


@functools.cache
def _whole(family):
    """Hidden rows of a sequence; the block's rows and logits of all its pairs."""
    target, block = target_of(family), mtp_of(family)

    @jax.jit
    def pairs(tokens, hidden):
        positions = jnp.arange(SIZE, dtype=jnp.int32)[None]
        rows, _, _ = block(target.embed(tokens), hidden, positions, causal_attend)
        return rows, jax.nn.log_softmax(target.logits(rows), axis=-1)

    return jax.jit(lambda tokens: run_whole(target, tokens).hidden), pairs


def oracle_drafts(family, tokens, count):
    """Tokens and log-probs that the block drafts after `tokens`, everything recomputed."""
    whole, pairs = _whole(family)
    padded = np.zeros((1, SIZE + 1), np.int32)
    padded[0, : len(tokens)] = tokens
    # Pair p: hidden row p and token p + 1. What lies behind a pair is not seen.
    hidden = np.array(whole(jnp.asarray(padded[:, :-1])))
    drafted, log_probs = [], []
    for place in range(len(tokens) - 2, len(tokens) - 2 + count):
        rows, scores = pairs(jnp.asarray(padded[:, 1:]), jnp.asarray(hidden))
        drafted.append(int(scores[0, place].argmax()))
        log_probs.append(float(scores[0, place].max()))
        padded[0, place + 2] = drafted[-1]
        hidden[0, place + 1] = rows[0, place]
    return drafted, log_probs


@functools.cache
def _stages(family):
    """Draft, and a round whose candidates come from outside, jitted."""
    target, block = target_of(family), mtp_of(family)

    @jax.jit
    def draft(state):
        return draft_mtp(target, block, state.draft, state.pending, state.lengths, PLAN)

    @jax.jit
    def finish(state, candidates):
        tree = build(candidates, state.root, PLAN)
        verified = verify(target, state.target, tree, state.lengths, (), PLAN, state.recurrent)
        rows = verified.rows._replace(features=verified.rows.hidden)
        walk = accept(verified.logits, tree, state.lengths, state.requests, PLAN, "greedy")
        return commit(state, tree, rows, walk, verified.stash)

    return draft, finish


@pytest.mark.parametrize(("family", "number"), [("qwen3_5", 0), ("qwen3_5", 1), (FAMILIES[1], 2)])
def test_drafts_are_those_without_a_cache(family, number):
    """After prefill, and after rounds that accepted 4, 1 and 3 rows: each has pairs of its own."""
    engine = engine_of(family, "mtp", 1)
    request = engine.add_request(PROMPTS[number], GREEDY, 0)
    engine.step()
    state = jax.tree.map(jnp.copy, engine._state)
    engine.abort(request)
    truth, emitted = greedy_of(family, number), [int(state.root[0])]
    draft, finish = _stages(family)
    for right in (3, 0, 2, 1):
        candidates, cache = draft(state)
        tokens, log_probs = oracle_drafts(family, PROMPTS[number] + emitted, 3)
        assert np.asarray(candidates.token)[0, :, 0].tolist() == tokens
        np.testing.assert_allclose(candidates.log_prob[0, :, 0], log_probs, atol=1e-4)
        # The round goes on with candidates of which the first `right` are what the target wants.
        ahead = np.array(truth[len(emitted) : len(emitted) + 3], np.int32)
        ahead[right:] = (ahead[right:] + 1) % VOCAB
        given = Candidates(candidates.log_prob, jnp.asarray(ahead)[None, :, None])
        state, found = finish(state._replace(draft=cache), given)
        assert int(found.accepted[0]) == right + 1
        emitted += np.asarray(found.token)[0, : right + 1].tolist()
    assert emitted == truth[: len(emitted)]


@pytest.mark.parametrize(("family", "slots"), [("qwen3_5", 1), ("qwen3_5", 4), (FAMILIES[1], 4)])
def test_engine_gives_transformers_greedy_tokens(family, slots):
    """Five prompts, so that slots are refilled; the shortest has no pair before the first round."""
    wanted = [greedy_of(family, number)[:12] for number in range(len(PROMPTS))]
    assert decode(engine_of(family, "mtp", slots), PROMPTS, GREEDY) == wanted


def test_sampled_tokens_are_those_of_plain_decoding():
    plain = decode(engine_of("qwen3_5", "autoregressive", 4), PROMPTS, SAMPLED)
    assert decode(engine_of("qwen3_5", "mtp", 4), PROMPTS, SAMPLED) == plain


def test_a_long_prompt_and_the_end_of_the_cache():
    """Pairs cross the borders of chunks; drafts past the last cache row harm nothing."""
    prompt = np.random.default_rng(5).integers(3, VOCAB, 530).tolist()
    engine = engine_of("qwen3_5", "mtp", 1, length=536)
    tokens = decode(engine, [prompt], SamplingParams(max_tokens=6, ignore_eos=True))[0]
    with torch.no_grad():
        logits = oracle_of("qwen3_5")(torch.tensor([prompt + tokens])).logits[0]
    assert tokens == logits.argmax(-1).tolist()[len(prompt) - 1 : -1]


def test_settings_of_the_method():
    assert (PLAN.budget, PLAN.max_depth, PLAN.width, PLAN.mtp) == (3, 3, 4, True)
    assert RoundPlan.of(TreeSettings(method="mtp", mtp_tokens=5), None).width == 6
    with pytest.raises(ValueError, match="`mtp_tokens` must be an integer of at least 1"):
        TreeSettings(method="mtp", mtp_tokens=0)


def test_llm_runs_a_target_with_mtp_and_refuses_one_without(tmp_path, monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
    source = tiny_hybrid.write_hub(tmp_path / "hf", "qwen3_5")
    settings = {"dtype": "float32", "max_slots": 4, "max_length": 96, "progress": False}
    llm = LLM(str(source), method="mtp", **settings)
    (output,) = llm.generate([PROMPTS[0]], GREEDY)
    assert list(output.token_ids) == greedy_of("qwen3_5", 0)[:12]
    plain = tiny.write_hf_target(tmp_path / "plain", np.random.default_rng(0))
    with pytest.raises(ValueError, match="'mtp' needs a target with an MTP block"):
        LLM(str(plain), method="mtp", **settings)
