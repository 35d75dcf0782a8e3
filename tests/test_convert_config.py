"""config.json of both generations: read alike, nothing guessed, refusals that name the key."""

import json

import pytest
import tiny
from safetensors.numpy import save_file

from convert import make_plan
from convert.hf import open_folder
from ddtree_jax.config import AttentionKind


def parsed(folder, config):
    """Settings that a config.json alone gives."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not (folder / "model.safetensors").exists():
        save_file({}, folder / "model.safetensors")
    return make_plan(open_folder(folder)).config


@pytest.mark.parametrize("rope", [None, tiny.YARN])
@pytest.mark.parametrize("kind", ["target", "draft"])
def test_both_generations_of_config_are_the_same_model(tmp_path, kind, rope):
    build = tiny.target_config if kind == "target" else tiny.draft_config
    old = parsed(tmp_path / "4", build(generation=4, rope=rope))
    assert old == parsed(tmp_path / "5", build(generation=5, rope=rope))
    assert old.rope.theta == 1e4
    assert old.rope.scaling == (None if rope is None else "yarn")


def test_yarn_defaults_are_those_of_transformers(tmp_path):
    rope = parsed(tmp_path, tiny.target_config(rope={"rope_type": "yarn", "factor": 64})).rope
    assert (rope.scaling, rope.factor, rope.original_length) == ("yarn", 64.0, 512)
    assert (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)
    assert rope.attention_factor == pytest.approx(1.4158883)


def test_head_dim_may_be_derived(tmp_path):
    config = tiny.target_config(head_dim=..., hidden_size=96)
    assert parsed(tmp_path, config).head_dim == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is not supported"),
        ({"architectures": ["Evil"], "auto_map": {"AutoModel": "evil.Evil"}}, "'Evil' is not"),
        ({"architectures": ...}, "`architectures` must name one class, got None"),
        ({"rope_parameters": {"rope_type": "default"}}, "no `rope_theta`"),
        ({"rope_parameters": ...}, "no `rope_theta`"),
        ({"rope": {"rope_type": "llama3", "factor": 8.0}}, "'llama3', which is not supported"),
        ({"rope": {"rope_type": "yarn"}}, "no `factor`"),
        ({"rope": tiny.YARN | {"mscale": 0.7}}, r"\['mscale'\] are not supported"),
        ({"rope": tiny.YARN | {"truncate": False}}, "`truncate` must be true"),
        ({"rope": {"partial_rotary_factor": 0.25}}, "`partial_rotary_factor` must be 1"),
        ({"use_sliding_window": True}, "`use_sliding_window` is true"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention.*not supported"),
        ({"attention_bias": True}, "`attention_bias` must be false"),
        ({"hidden_act": "gelu"}, "`hidden_act` must be 'silu', got 'gelu'"),
        ({"tie_word_embeddings": ...}, "no `tie_word_embeddings`"),
        ({"rms_norm_eps": ...}, "no `rms_norm_eps`"),
        ({"vocab_size": "200"}, "`vocab_size` must be int, got '200'"),
        ({"eos_token_id": ...}, "has `eos_token_id`"),
        ({"eos_token_id": 200}, "outside the vocabulary"),
        ({"num_key_value_heads": 4}, "`num_heads`.*multiple"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config`"),
    ],
)
def test_target_config_refusals_name_the_key(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        parsed(tmp_path, tiny.target_config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"block_size": 8}}, "no `mask_token_id`"),
        ({"dflash_config": {"mask_token_id": 5}}, "no `block_size`"),
        ({"mask_token_id": 200, "generation": 4}, r"`mask_token_id` must be in \[0, 200\)"),
        ({"num_target_layers": ...}, "no `num_target_layers`"),
        ({"vocab_size": ...}, "no `vocab_size`"),
        ({"num_target_layers": 2}, "names layer 2; the target has 2"),
        ({"layer_types": ["full_attention"]}, "`layer_types` must have 3 entries"),
        ({"layer_types": ["linear_attention"] * 3}, "linear_attention.*not supported"),
        ({"layer_types": ["sliding_attention"] * 3}, "no `sliding_window`"),
        ({"layer_types": ..., "use_sliding_window": True}, "add `layer_types`"),
        ({"is_causal": "yes"}, "must be true or false, got 'yes'"),
        ({"final_logit_softcapping": 30.0}, "`final_logit_softcapping` is 30.0"),
        ({"architectures": ["DFlash2DraftModel"]}, "'DFlash2DraftModel' is not supported"),
    ],
)
def test_draft_config_refusals_name_the_key(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        parsed(tmp_path, tiny.draft_config(**changes))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({}, 7, (7,)),
        ({"eos_token_id": [9, 7]}, 7, (9, 7)),
        ({"eos_token_id": 9}, [7, 9, 8], (9, 7, 8)),
        ({"eos_token_id": 9}, ..., (9,)),
        ({}, None, ()),
    ],
)
def test_stop_tokens_of_both_files_are_united(tmp_path, generation, config, expected):
    tmp_path.joinpath("generation_config.json").write_text(json.dumps(generation))
    assert parsed(tmp_path, tiny.target_config(eos_token_id=config)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [(True, 6), (False, None), (True, 6)]),
        ({"is_causal": False}, [(False, 6), (False, None), (False, 6)]),
        ({"causal": True}, [(True, 6), (True, None), (True, 6)]),
        ({"causal": True, "is_causal": False}, [(False, 6), (False, None), (False, 6)]),
    ],
)
def test_attention_kinds(tmp_path, changes, expected):
    config = tiny.draft_config(
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=6,
    )
    config["dflash_config"] |= {k: v for k, v in changes.items() if k == "causal"}
    config |= {k: v for k, v in changes.items() if k == "is_causal"}
    kinds = tuple(AttentionKind(causal=causal, window=window) for causal, window in expected)
    assert parsed(tmp_path, config).attention == kinds


def test_window_of_full_layers_is_ignored(tmp_path):
    config = parsed(tmp_path, tiny.draft_config(sliding_window=6))
    assert config.attention == (AttentionKind(causal=False, window=None),) * 3


@pytest.mark.parametrize(
    ("layers", "target_layers", "expected"),
    [(5, 36, (1, 9, 17, 25, 33)), (8, 48, (1, 7, 14, 20, 26, 32, 39, 45)), (1, 36, (18,))],
)
def test_absent_tap_layers_follow_the_reference_formula(tmp_path, layers, target_layers, expected):
    config = tiny.draft_config(
        num_hidden_layers=layers, layer_types=..., num_target_layers=target_layers
    )
    del config["dflash_config"]["target_layer_ids"]
    assert parsed(tmp_path, config).tap_layers == expected


def test_nested_draft_settings_come_before_top_level(tmp_path):
    config = tiny.draft_config(generation=5, block_size=4, mask_token_id=3)
    parsed_config = parsed(tmp_path, config)
    assert (parsed_config.block_size, parsed_config.mask_token_id) == (8, tiny.MASK_TOKEN)
