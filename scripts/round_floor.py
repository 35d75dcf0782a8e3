"""The least that a round must read and compute, at the rates that the same run measured."""

from unittest import mock

import jax
import jax.numpy as jnp
from bench_timing import ceilings_ms
from real_shapes import Pair, abstract_model, cut_layers, leaf_names

from ddtree_jax.config import MoEConfig
from ddtree_jax.models.moe import MoE
from ddtree_jax.models.targets import target_type
from ddtree_jax.params import Leaves
from ddtree_jax.plan import RoundPlan
from ddtree_jax.round import run_round
from ddtree_jax.stages.verify import verify
from ddtree_jax.state import DecodeState, init_state
from ddtree_jax.tree import Tree
from pallas_kernels.routed_gate_up import Routed


def leaves_for(pair: Pair, plan: RoundPlan) -> tuple[Leaves, Leaves]:
    """The target's, and the drafter's if there is one in the plan."""
    return pair.leaves[0], pair.leaves[1] if plan.drafts else ()


def bytes_of(tree: object) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def expected_experts(moe: MoEConfig, tokens: int) -> float:
    """Distinct experts that `tokens` rows reach, were each choice uniform and on its own.

    Rows are alike, so they reach fewer: 88 of 102 at 16 rows of 35B-A3B with random weights.
    """
    missed = (1 - moe.chosen_count / moe.num_experts) ** tokens
    return moe.num_experts * (1 - missed)


def lower_expert_count(pair: Pair, plan: RoundPlan, state: DecodeState) -> jax.stages.Lowered:
    """Program of the target's leaves, the drafter's and a state: [layers] distinct experts that
    rows choose in the round that the state is about to run; a shared one is not counted."""
    chosen: list[jax.Array] = []
    route, moe = MoE.route, pair.target.moe

    def recorded(self: MoE, *args, **options) -> Routed:
        routed = route(self, *args, **options)
        chosen.append(routed.ids[:, : moe.chosen_count].reshape(-1))
        return routed

    def counts(target_leaves: Leaves, draft_leaves: Leaves, state: DecodeState) -> jax.Array:
        target, draft = pair.structures
        drafter = draft.merge(draft_leaves) if plan.drafts else None
        run_round(target.merge(target_leaves), drafter, state, plan=plan, mode="greedy")
        reached = jnp.stack(
            [jnp.zeros((moe.num_experts,), bool).at[index].set(True) for index in chosen]
        )
        return jnp.sum(reached, axis=1)

    # One run does not repay a search for the fastest products.
    options = {"xla_gpu_autotune_level": 0} if jax.default_backend() == "gpu" else None
    with mock.patch.object(MoE, "route", recorded):
        program = jax.jit(counts, compiler_options=options)
        return program.lower(*leaves_for(pair, plan), state)


def count_experts(pair: Pair, plan: RoundPlan, state: DecodeState) -> float:
    """Mean over layers of what `lower_expert_count` counts. Costs the compilation of one more
    round."""
    program = lower_expert_count(pair, plan, state).compile()
    return float(program(*leaves_for(pair, plan), state).mean())


def state_and_stash_bytes(pair: Pair, plan: RoundPlan) -> tuple[int, int]:
    """Of one slot: its recurrent state, and what a round keeps of its nodes until commit. From
    the structures of the program, of as few layers as hold every kind."""
    config, hybrid = pair.target, pair.target.hybrid
    if hybrid is None:
        return 0, 0
    short, draft = cut_layers((config, pair.draft), hybrid.attention_layers[0] + 1)
    structure, leaves = abstract_model(target_type(short), short)
    nodes = jax.ShapeDtypeStruct((1, plan.budget + 1), jnp.int32)
    tree = Tree(nodes, nodes, nodes, nodes.update(dtype=bool), nodes.update(dtype=jnp.float32))

    def run(leaves: Leaves, tree: Tree):
        state = init_state(short, draft, slots=1, rows=32, dtype=jnp.bfloat16)
        target, lengths = structure.merge(leaves), state.lengths
        recurrent, active = state.recurrent, state.active
        return verify(target, state.target, tree, lengths, (), plan, recurrent, active).stash

    stash = jax.eval_shape(run, leaves, tree)
    whole = jax.eval_shape(
        lambda: init_state(config, None, slots=1, rows=1, dtype=jnp.bfloat16).recurrent
    )
    layers = len(config.recurrent_layers) // len(short.recurrent_layers)
    return bytes_of(whole), bytes_of(stash) * layers


def _target_weights(pair: Pair, experts: float | None) -> tuple[int, float]:
    """(bytes read, products a row). The embedding is gathered by row; tied, it is the head."""
    moe, read, products = pair.target.moe, 0.0, 0.0
    shared = moe is not None and moe.has_shared  # among the experts, and always read
    for name, leaf in zip(leaf_names(pair.structures[0]), pair.leaves[0], strict=True):
        if name == "embedding" and not pair.target.tie_embeddings:
            continue
        of_experts = leaf.ndim == 3
        read += bytes_of(leaf) * ((experts + shared) / leaf.shape[0] if of_experts else 1)
        products += leaf.size * ((moe.chosen_count + shared) / leaf.shape[0] if of_experts else 1)
    return read, products


def floor_of_round(
    pair: Pair,
    plan: RoundPlan,
    *,
    slots: int,
    rows: int,
    rates: tuple[float, float],
    experts: float | None = None,
) -> dict[str, float]:
    """Least time of a round: bytes that must move once, and arithmetic of the products.

    Weights are read once, of the experts those that some row chose: `experts` of each layer, or
    as many as uniform choices would reach. Caches are read as far as their layers see; recurrent
    states are read and written. rates: GB/ms of a copy, TFLOP/ms of a product.
    """
    target, draft = pair.target, pair.draft
    tokens = slots * (plan.budget + 1)
    if target.moe is not None and experts is None:
        experts = expected_experts(target.moe, tokens)
    state, stash = state_and_stash_bytes(pair, plan)
    weights, products = _target_weights(pair, experts)
    row = 4 * target.num_kv_heads * target.head_dim  # bfloat16 key and value
    moved = weights + slots * (rows * row * len(target.attention_layers) + 2 * state)
    products *= tokens
    if plan.drafts:
        head = target.vocab_size * target.hidden_size
        drafter = sum(leaf.size for leaf in pair.leaves[1])
        seen = sum(min(rows, kind.window or rows) for kind in draft.attention)
        moved += 2 * (drafter + head) + slots * seen * 4 * draft.num_kv_heads * draft.head_dim
        products += slots * draft.block_size * (2 * drafter + head)
    gigabytes, teraflops = moved / 1e9, 2 * products / 1e12
    times = ceilings_ms(gigabytes, teraflops, rates)
    line = {"gigabytes": gigabytes, "teraflops": teraflops, **times}
    line["floor_ms"] = max(times.values())
    if target.hybrid is not None:
        line["state_and_stash_gb"] = (state + stash) / 1e9
    if experts is not None:
        line["experts_read"] = experts
    return {name: round(value, 4) for name, value in line.items()}
