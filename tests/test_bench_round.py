"""The benchmark of a round on tiny pairs: weights, the floor's count, and what it refuses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from bench_round import Cell, check_round, force, gdn_ms, main
from device_profile import Launch, busy
from real_shapes import PAIRS, Pair, leaf_names, random_state
from round_floor import expected_experts, floor_of_round, state_and_stash_bytes

from ddtree_jax.round import Report
from ddtree_jax.tree import Tree, Walk


def test_rounds_of_a_hybrid_pair_commit_what_is_forced(tmp_path):
    out = tmp_path / "out.jsonl"
    sizes = {"layers": 4, "nodes": [1, 16], "slots": [2], "rows": [64], "rounds": 2, "repeats": 1}
    main(out, pair="tiny-moe", forced_accept="2,5", count=True, **sizes)
    one, tree = (json.loads(line) for line in out.read_text().splitlines())
    assert [line["committed"] for line in (one, tree)] == [1.0, 3.5]
    assert 4 <= one["experts_read"] <= 8 and one["experts_read"] < tree["experts_read"] <= 16


def test_a_forced_walk_is_not_known_before_the_real_one():
    """Else XLA moves commits in between the layers, and the round is none that anybody runs."""
    row = jnp.arange(4, dtype=jnp.int32)[None]
    tree = Tree(row, row - 1, row, row >= 0, row.astype(jnp.float32))
    forced, one = force((2,), 8), jnp.ones((1,), jnp.int32)

    def run(count):
        return forced(tree, Walk(row, row, count, one), 8 * one)

    walk = run(one)
    assert walk.path.tolist() == [[0, 1, -1, -1]] and walk.count.tolist() == [2]
    # An argument that the result does not need is no argument of the lowered program.
    assert "@main(%arg0" in jax.jit(lambda count: run(count).path).lower(one).as_text()


def test_random_weights_suit_their_place():
    pair = Pair.random(*PAIRS["tiny-moe"])
    named = list(zip(leaf_names(pair.structures[0]), pair.leaves[0], strict=True))
    for name, leaf in named:
        assert jnp.all(jnp.isfinite(leaf)), name
        wide = name in ("log_rate", "time_bias", "norm_scale")
        assert leaf.dtype == (jnp.float32 if wide else jnp.bfloat16), name
    spread = {name: float(jnp.std(leaf.astype(jnp.float32))) for name, leaf in named}
    assert spread["router"] == pytest.approx(64**-0.5, rel=0.1)
    experts = [leaf for name, leaf in named if leaf.ndim == 3]
    for leaf in experts:
        assert float(jnp.std(leaf.astype(jnp.float32))) == pytest.approx(
            leaf.shape[1] ** -0.5, rel=0.1
        )
    state = random_state(*PAIRS["tiny-moe"], slots=2, rows=32, room=8).recurrent
    assert {leaf.dtype.name for leaf in state.matrix} == {"float32"}
    assert {leaf.dtype.name for leaf in state.conv} == {"bfloat16"}
    assert all(jnp.std(leaf.astype(jnp.float32)) > 0.1 for leaf in jax.tree.leaves(state))


def test_compiling_alone_fills_the_cache_and_writes_nothing(tmp_path, monkeypatch):
    compiled = []
    real = jax.stages.Lowered.compile

    def recorded(self, *args, **options):
        compiled.append(self.as_text())
        return real(self, *args, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", recorded)
    cell = {"layers": 4, "nodes": [1], "slots": [1], "rows": [32], "rounds": 1, "repeats": 1}
    out = tmp_path / "out.jsonl"
    main(out, pair="tiny-moe", count=True, compile_only=True, **cell)
    assert not out.exists() and len(compiled) == 2  # the cell, and the count of experts
    main(out, pair="tiny-moe", count=True, **cell)
    assert compiled[:2] == compiled[2:]  # what the cache goes by


# Sizes of docs/gdn.md, and by hand: weights without the embedding, caches, twice the states.
@pytest.mark.parametrize(
    ("name", "nodes", "gigabytes", "state", "stash"),
    [
        ("qwen3-8b", 1, 15.1 + 0.302, 0, 0),
        ("qwen3.6-27b", 1, 51.25 + 0.134 + 0.310, 155e6, 0),
        ("qwen3.6-27b", 64, 51.25 + 0.134 + 0.310 + 6.0 + 0.042, 155e6, 152e6),
        ("qwen3.6-35b-a3b", 1, 5.87 + 0.042 + 0.130, 65e6, 0),
    ],
)
def test_floor_counts_what_must_move(name, nodes, gigabytes, state, stash):
    pair = Pair.abstract(*PAIRS[name])
    plan = Cell(1, nodes, 2048).plan(pair.draft)
    floor = floor_of_round(pair, plan, slots=1, rows=2048, rates=(4.3, 0.7))
    assert floor["gigabytes"] == pytest.approx(gigabytes, rel=0.01)
    assert floor["floor_ms"] == max(floor["bytes_ms"], floor["flops_ms"])
    assert state_and_stash_bytes(pair, plan) == pytest.approx((state, stash), rel=0.02)


def test_experts_that_rows_reach():
    moe = PAIRS["qwen3.6-35b-a3b"][0].moe
    assert expected_experts(moe, 1) == pytest.approx(8)
    assert expected_experts(moe, 10_000) == pytest.approx(256)


def test_a_round_that_computed_nothing_is_refused():
    target, draft = PAIRS["tiny-hybrid"]
    state = random_state(target, draft, slots=1, rows=32, room=8)
    plan = Cell(1, 16, 32).plan(draft)

    def report(accepted, token=7):
        shape = (1, len(accepted))
        tokens = np.full((*shape, plan.width), token)
        return Report(np.ones(1, bool), np.ones(shape, int), np.array([accepted]), tokens)

    check_round(state, report([2, 5, 2]), plan, (2, 5))
    with pytest.raises(RuntimeError, match="committed"):
        check_round(state, report([2, 2, 2]), plan, (2, 5))
    with pytest.raises(RuntimeError, match="not finite"):
        check_round(state, report([2, 5], token=0), plan, (2, 5))
    broken = (state.recurrent.matrix[0] * jnp.nan, *state.recurrent.matrix[1:])
    broken = state._replace(recurrent=state.recurrent._replace(matrix=broken))
    with pytest.raises(RuntimeError, match="not finite"):
        check_round(broken, report([2, 5]), plan, (2, 5))


def test_launches_side_by_side_count_once():
    spans = [("gdn_tree", 0, 2), ("gdn_meet", 1, 5), ("gdn_pairs", 2, 4), ("gdn_commit", 7, 8)]
    found = [Launch(name, "", begin * 1e3, end * 1e3) for name, begin, end in spans]
    assert busy(found) == 6e3
    others = [Launch("gdn_heads", "", 5e3, 7e3), Launch("add_norm", "", 0.0, 9e3)]
    assert gdn_ms(found[::-1] + others, rounds=2) == 3.0
    assert busy([]) == 0.0


def test_a_profile_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match="`--profile` needs a GPU"):
        main(tmp_path / "out.jsonl", pair="tiny-hybrid", with_profile=True)
