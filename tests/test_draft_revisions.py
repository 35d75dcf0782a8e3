"""Published revisions of DFlash drafters: each is read as what it is, in either layout."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file

from convert import convert_draft, make_plan
from convert.hf import open_folder
from ddtree_jax import checkpoint
from ddtree_jax.config import AttentionKind

FULL = AttentionKind(causal=False, window=None)


def sliding(window):
    """Causal inside the block, unless a file says otherwise."""
    return AttentionKind(causal=True, window=window)


# hidden, layers, q / kv heads, inner, target layers, taps, mask id, kinds, window, top level?
REVISIONS = {
    "qwen3-8b": (4096, 5, 32, 8, 12288, 36, (1, 9, 17, 25, 33), 151669, 0, None, True),
    "qwen3.5-4b-early": (2560, 5, 32, 8, 9728, 32, (1, 8, 15, 22, 29), 248070, 0, None, True),
    "qwen3.5-4b": (2560, 6, 32, 8, 9216, 32, tuple(range(1, 30, 4)), 248077, 5, 4096, False),
    "qwen3.5-27b": (
        5120, 6, 32, 8, 17408, 64, (1, 10, 18, 27, 35, 44, 52, 61), 248077, 5, 4096, False,
    ),
    "qwen3.6-35b-a3b": (
        2048, 6, 32, 8, 6144, 40, (1, 6, 11, 16, 22, 27, 32, 37), 248077, 5, 4096, False,
    ),
    "qwen3.6-27b": (5120, 5, 32, 8, 17408, 64, (1, 16, 31, 46, 61), 248070, 4, 2048, False),
}  # fmt: skip


def config_of(name):
    hidden, layers, heads, kv, inner, target, taps, mask, slides, window, top = REVISIONS[name]
    own = {"block_size": 16, "mask_token_id": mask}
    kinds = ["sliding_attention"] * slides + ["full_attention"] * (layers - slides)
    return tiny.draft_config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=248320,
        num_target_layers=target,
        layer_types=kinds,
        sliding_window=window,
        dflash_config={"target_layer_ids": list(taps), **({} if top else own)},
        **(own if top else {}),
    )


@pytest.mark.parametrize("name", REVISIONS)
def test_revision_is_read_as_published(tmp_path, name):
    hidden, layers, _, _, _, _, taps, mask, slides, window, _ = REVISIONS[name]
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    save_file({}, tmp_path / "model.safetensors")
    plan = make_plan(open_folder(tmp_path))
    config = plan.config
    assert (config.block_size, config.depth_count, config.mask_token_id) == (16, 15, mask)
    assert config.tap_layers == taps and config.num_layers == layers
    assert config.attention == (sliding(window),) * slides + (FULL,) * (layers - slides)
    # Tensors: 11 a layer and three around them; as many taps as the file says feed `fuse`.
    assert len({source for rule in plan.rules for source, _ in rule.sources}) == 11 * layers + 3
    assert checkpoint.param_shapes(config)["fuse"] == (len(taps) * hidden, hidden)


def test_six_layers_read_eight_taps(tmp_path):
    """Numbers of taps and of layers are independent, and both go through the converter."""
    config = {
        "num_hidden_layers": 6,
        "num_target_layers": 32,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "sliding_window": 4,
        "dflash_config": {
            "target_layer_ids": list(range(1, 30, 4)),
            "block_size": 8,
            "mask_token_id": tiny.MASK_TOKEN,
        },
    }
    source = tiny.write_hf_draft(tmp_path / "hf", np.random.default_rng(0), **config)
    draft = checkpoint.load_draft(
        convert_draft(source, tmp_path / "out", progress=False), jnp.float32
    )
    features = jnp.ones((1, 3, 8 * 64), jnp.float32)
    keys, _ = draft.context_rows(features, jnp.arange(3, dtype=jnp.int32)[None])
    assert len(keys) == 6 and keys[0].shape == (1, 3, 2, 32)


@pytest.mark.parametrize("place", ["is_causal", "causal"])
def test_a_file_may_make_sliding_layers_see_ahead(tmp_path, place):
    config = config_of("qwen3.6-27b")
    (config if place == "is_causal" else config["dflash_config"])[place] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    kinds = make_plan(open_folder(tmp_path)).config.attention
    assert kinds[0] == AttentionKind(causal=False, window=2048) and kinds[4] == FULL
