"""Rounds of the newer targets at real widths and few layers, compiled for an H200 without one.

What it holds: the program lowers and fits, no weight, cache or recurrent state is copied, all of
the state is updated in place, and a round is one command buffer.
"""

import re

import aot
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ddtree_jax.config import (
    AttentionKind,
    DraftConfig,
    HybridConfig,
    MoEConfig,
    RopeConfig,
    TargetConfig,
)
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.targets import target_type
from ddtree_jax.params import flatten_model
from ddtree_jax.plan import RoundPlan, TreeSettings
from ddtree_jax.round import make_decode
from ddtree_jax.state import init_state

ROWS, LAYERS = 2048, 4
EXPERTS = MoEConfig(
    num_experts=256, chosen_count=8, expert_size=512, shared_size=512, normalise=True
)


def hybrid_config(hidden, inner, heads, kv_heads, value_heads, moe=None):
    return TargetConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=256,
        rms_norm_eps=1e-6,
        rope=RopeConfig.plain(1e7),
        vocab_size=248320,
        num_layers=LAYERS,
        tie_embeddings=False,
        max_positions=262144,
        eos_token_ids=(248046,),
        hybrid=HybridConfig(
            attention_layers=(3,),
            rotary_dim=64,
            num_key_heads=16,
            num_value_heads=value_heads,
            key_dim=128,
            value_dim=128,
            conv_width=4,
        ),
        moe=moe,
    )


TARGETS = {
    "27b": hybrid_config(5120, 17408, 24, 4, 48),
    "35b_a3b": hybrid_config(2048, 512, 16, 2, 32, EXPERTS),
}


def draft_config(target):
    sliding = AttentionKind(causal=True, window=2048)
    return DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=6144,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig.plain(1e7),
        vocab_size=target.vocab_size,
        block_size=16,
        mask_token_id=248070,
        tap_layers=(0, 1, 2),
        target_num_layers=LAYERS,
        attention=(sliding, AttentionKind(causal=False, window=None)),
    )


def abstract(tree):
    return jax.tree.map(lambda leaf: aot.argument(leaf.shape, leaf.dtype), tree)


def flat(module, config):
    model = nnx.eval_shape(lambda: module(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    structure, leaves = flatten_model(model)
    return structure, abstract(leaves)


@pytest.fixture(scope="module", params=TARGETS)
def compiled_round(request, tmp_path_factory):
    """(name, compiled program, launch list, state)"""
    config = TARGETS[request.param]
    drafting = draft_config(config)
    target, target_leaves = flat(target_type(config), config)
    draft, draft_leaves = flat(DFlash, drafting)
    state = jax.eval_shape(
        lambda: init_state(config, drafting, slots=1, rows=ROWS, dtype=jnp.bfloat16)
    )
    plan = RoundPlan.of(TreeSettings(tree_budget=63), drafting, "pallas")
    decode = make_decode(target, draft, plan=plan, mode="greedy", rounds=8)
    with aot.h200():
        lowered = decode.lower(target_leaves, draft_leaves, abstract(state))
    dump = tmp_path_factory.mktemp("xla")
    compiled = aot.compile(lowered, xla_dump_to=str(dump))
    (launches,) = dump.glob("*thunk_sequence_after_thunk_passes.txt")
    return request.param, compiled, launches.read_text(), state


def test_state_is_updated_in_place(compiled_round):
    _, compiled, _, state = compiled_round
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= size


def _dims(shape):
    """Sizes in any order, without ones."""
    return tuple(sorted(size for size in shape if size > 1))


def test_no_weight_and_no_state_is_copied(compiled_round):
    _, compiled, _, state = compiled_round
    moved = re.findall(
        r"= \w+\[([\d,]+)\]\S* (?:copy|transpose|concatenate|slice)\(", compiled.as_text()
    )
    sizes = {tuple(int(n) for n in shape.split(",")) for shape in moved if shape}
    elements = {shape: int(jnp.prod(jnp.array(shape))) for shape in sizes}
    # Weights are larger than any activation that moves (the MLP's rows and the tapped features).
    assert not {shape: count for shape, count in elements.items() if count > 64 * 18_000}
    kept = (state.recurrent.matrix[0], state.target.keys[0], state.draft.keys[0])
    assert not {_dims(leaf.shape) for leaf in kept} & {_dims(shape) for shape in elements}


def test_round_is_one_command_buffer(compiled_round):
    _, _, launches, _ = compiled_round
    body = launches[launches.index("body:") :]
    inner = [line for line in body.splitlines()[1:] if line.strip()]
    depth = len(inner[0]) - len(inner[0].lstrip())
    top = []
    for line in inner:
        if len(line) - len(line.lstrip()) < depth:
            break
        if len(line) - len(line.lstrip()) == depth:
            top.append(line.split(":")[1].split()[0])
    assert top == ["kCommandBuffer"]


def test_kernels_are_in_the_round(compiled_round):
    """Three recurrences, three commits, attention of the target and of the drafter."""
    _, compiled, _, _ = compiled_round
    text = compiled.as_text()
    for name, count in (("gdn_tree", 3), ("gdn_commit", 3)):
        calls = re.findall(rf'custom-call\(.*op_name="[^"]*/{name}/', text)
        assert len(calls) == count, name
