"""Rounds of the newer targets at real widths and few layers, compiled for an H200 without one.

What it holds: the program lowers and fits, no weight, cache or recurrent state is copied, all of
the state is updated in place, and a round is one command buffer.
"""

import re

import pytest
from compiled_round import compile_round

from ddtree_jax.config import (
    AttentionKind,
    DraftConfig,
    HybridConfig,
    MoEConfig,
    RopeConfig,
    TargetConfig,
)

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


@pytest.fixture(scope="module", params=TARGETS)
def compiled_round(request, tmp_path_factory):
    config = TARGETS[request.param]
    dump = tmp_path_factory.mktemp("xla")
    return compile_round(config, draft_config(config), rows=ROWS, dump=dump)


def test_state_is_updated_in_place(compiled_round):
    memory = compiled_round.program.memory_analysis()
    assert memory.alias_size_in_bytes >= compiled_round.state_bytes


def _dims(shape):
    """Sizes in any order, without ones."""
    return tuple(sorted(size for size in shape if size > 1))


def test_no_weight_and_no_state_is_copied(compiled_round):
    moved, state = compiled_round.moved, compiled_round.state
    # Weights are larger than any activation that moves (the MLP's rows and the tapped features).
    assert not {shape: count for shape, count in moved.items() if count > 64 * 18_000}
    recurrent = state.recurrent
    kept = (recurrent.matrix[0], recurrent.conv[0], state.target.keys[0], state.draft.keys[0])
    assert not {_dims(leaf.shape) for leaf in kept} & {_dims(shape) for shape in moved}


def test_round_is_one_command_buffer(compiled_round):
    assert compiled_round.body == ["kCommandBuffer"]


def test_kernels_are_in_the_round(compiled_round):
    """Three recurrences, of three kernels each, and three commits; the heads of one attention layer
    and of two of the drafter."""
    text = compiled_round.program.as_text()
    counts = {
        "gdn_pairs": 3,
        "gdn_meet": 3,
        "gdn_tree": 3,
        "gdn_commit": 3,
        "rotate_heads": 3,
    }
    for name, count in counts.items():
        calls = re.findall(rf'custom-call\(.*op_name="[^"]*/{name}/', text)
        assert len(calls) == count, name


def test_a_round_of_one_token_moves_the_state_where_it_lies(tmp_path):
    """Three recurrent layers: a kernel each, no commit, and no copy of a state or an input."""
    config = TARGETS["35b_a3b"]
    found = compile_round(config, draft_config(config), rows=ROWS, dump=tmp_path, budget=0)
    assert found.program.memory_analysis().alias_size_in_bytes >= found.state_bytes
    text = found.program.as_text()
    for name, count in {"gdn_step": 3, "gdn_commit": 0, "gdn_heads": 0, "gated_norm": 0}.items():
        assert len(re.findall(rf'custom-call\(.*op_name="[^"]*/{name}/', text)) == count, name
    recurrent = found.state.recurrent
    kept = {_dims(leaf.shape) for leaf in (recurrent.matrix[0], recurrent.conv[0])}
    assert not kept & {_dims(shape) for shape in found.moved}
