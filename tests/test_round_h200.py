"""The whole round at Qwen3-8B shapes, compiled for an H200 without one.

What the CPU cannot show: that it lowers and fits, that no weight and no cache is copied, that
caches are updated in place, and that a round is one command buffer.
"""

import re

import aot
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ddtree_jax.config import AttentionKind, DraftConfig, RopeConfig, TargetConfig
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.params import flatten_model
from ddtree_jax.plan import RoundPlan, TreeSettings
from ddtree_jax.round import make_decode
from ddtree_jax.state import init_state

SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig.plain(1e6),
    "vocab_size": 151936,
}
TARGET = TargetConfig(
    **SHAPE,
    num_layers=36,
    tie_embeddings=False,
    max_positions=40960,
    eos_token_ids=(151645, 151643),
)
DRAFT = DraftConfig(
    **SHAPE,
    block_size=16,
    mask_token_id=151669,
    tap_layers=(1, 9, 17, 25, 33),
    target_num_layers=36,
    attention=(AttentionKind(causal=False, window=None),) * 5,
)
ROWS = 2048


def abstract(tree):
    return jax.tree.map(lambda leaf: aot.argument(leaf.shape, leaf.dtype), tree)


def flat(model_type, config):
    model = nnx.eval_shape(lambda: model_type(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    structure, leaves = flatten_model(model)
    return structure, abstract(leaves)


@pytest.fixture(scope="module")
def round_8b(tmp_path_factory):
    """(compiled program, launch list, bytes of the donated state)"""
    target, target_leaves = flat(Qwen3, TARGET)
    draft, draft_leaves = flat(DFlash, DRAFT)
    state = jax.eval_shape(
        lambda: init_state(TARGET, DRAFT, slots=1, rows=ROWS, dtype=jnp.bfloat16)
    )
    plan = RoundPlan.of(TreeSettings(tree_budget=63), DRAFT, "pallas")
    decode = make_decode(target, draft, plan=plan, mode="greedy", rounds=8)
    with aot.h200():
        lowered = decode.lower(target_leaves, draft_leaves, abstract(state))
    dump = tmp_path_factory.mktemp("xla")
    compiled = aot.compile(lowered, xla_dump_to=str(dump))
    (launches,) = dump.glob("*thunk_sequence_after_thunk_passes.txt")
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return compiled, launches.read_text(), size


def test_state_is_updated_in_place(round_8b):
    compiled, _, size = round_8b
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    # Logits of 64 rows in float32 are 39 MB; a copy of the caches would add 302 MB.
    assert memory.temp_size_in_bytes < 100e6


def test_no_weight_and_no_cache_is_copied(round_8b):
    text = round_8b[0].as_text()
    moved = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose|concatenate|slice)\(", text)
    sizes = {tuple(int(n) for n in shape.split(",")) for shape in moved if shape}
    elements = {shape: int(jnp.prod(jnp.array(shape))) for shape in sizes}
    # The largest array of activations that moves is the tapped features [1, 64, 5 * 4096].
    large = {shape: count for shape, count in elements.items() if count > 64 * 5 * 4096}
    assert not large


def test_round_is_one_command_buffer(round_8b):
    _, launches, _ = round_8b
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


def test_kernels_are_in_the_round(round_8b):
    text = round_8b[0].as_text()
    # 36 target layers, 5 drafter layers, two of the candidates, one build and one walk.
    assert len(re.findall(r"__gpu\$xla\.gpu\.triton", text)) >= 36 + 5 + 4
    assert " sort(" not in text and "__gpu$TopK" not in text
