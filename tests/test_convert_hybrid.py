"""Checkpoints of the newer families: every layout gives the same parameters, or is refused."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
import tiny_hybrid
from hybrid import oracle_of
from safetensors.numpy import save_file
from typer.testing import CliRunner

from convert import convert_target, make_plan, rules
from convert.cli import main
from convert.hf import open_folder
from ddtree_jax import checkpoint
from ddtree_jax.config import HybridConfig, MoEConfig, TargetConfig

HYBRIDS = ("qwen3_5", "qwen3_5_moe")


def mapped(folder):
    """Settings and parameters that the rules give, without writing a checkpoint."""
    plan = make_plan(open_folder(folder))
    rules.report(plan.problems, plan.folder)
    return plan.config, dict(rules.apply(plan.rules, plan.folder, lambda count: None))


def parsed(folder, config, tensors=()):
    """Settings that a config.json alone gives."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ones(2, np.float32) for name in tensors}, folder / "model.safetensors")
    return make_plan(open_folder(folder)).config


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Family -> settings and parameters of its hub layout."""
    root = tmp_path_factory.mktemp("hub")
    return {
        family: mapped(tiny_hybrid.write_hub(root / family, family, mtp=False))
        for family in tiny_hybrid.FAMILIES
    }


@pytest.mark.parametrize("family", tiny_hybrid.FAMILIES)
def test_transformers_own_save_is_the_hub_layout(tmp_path, expected, family):
    """It writes text-only classes, experts one by one, and other keys into config.json."""
    pytest.importorskip("torch")
    oracle = oracle_of(family)
    oracle.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert ("num_local_experts" in config) == (family == "qwen3_moe")
    found, params = mapped(tmp_path)
    assert found == expected[family][0]
    assert_equal(params, expected[family][1])


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("fused", [True, False])
def test_every_prefix_and_expert_layout(tmp_path, expected, prefix, fused):
    family = "qwen3_5_moe"
    config = tiny_hybrid.text_config(family)
    tensors = tiny_hybrid.tensors_of(np.random.default_rng(0), config)
    tensors = tiny_hybrid.renamed(tensors, prefix=prefix, fused=fused)
    folder = tiny.write_hf_folder(tmp_path, config, tensors, shards=3)
    assert_equal(mapped(folder)[1], expected[family][1])


@pytest.mark.parametrize("family", tiny_hybrid.FAMILIES)
def test_both_generations_of_config_are_the_same_model(tmp_path, family):
    old, new = (
        parsed(tmp_path / str(generation), tiny_hybrid.text_config(family, generation=generation))
        for generation in (4, 5)
    )
    assert old == new


def test_settings_of_the_hybrid_and_the_experts(tmp_path):
    config = parsed(tmp_path, tiny_hybrid.hub_config("qwen3_5_moe"))
    assert config.hybrid == HybridConfig(
        attention_layers=(3,),
        rotary_dim=16,
        num_key_heads=2,
        num_value_heads=6,
        key_dim=16,
        value_dim=24,
        conv_width=4,
    )
    assert config.moe == MoEConfig(
        num_experts=8, chosen_count=3, expert_size=48, shared_size=48, normalise=True
    )
    assert (config.attention_layers, config.recurrent_layers) == ((3,), (0, 1, 2))
    assert config.eos_token_ids == (7,) and not config.mtp
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


def test_absent_rotary_share_is_a_quarter(tmp_path):
    config = tiny_hybrid.text_config("qwen3_5", generation=4, partial_rotary_factor=...)
    assert parsed(tmp_path, config).hybrid.rotary_dim == 16


def test_older_conversions_are_plain_targets(tmp_path):
    data = parsed(tmp_path, tiny.target_config()).to_json()
    for name in ("hybrid", "moe", "mtp"):
        del data[name]
    assert TargetConfig.from_json(data) == parsed(tmp_path, tiny.target_config())


def test_gates_and_queries_come_apart(expected, tmp_path):
    """q_proj holds, head by head, the query's rows and then the gate's."""
    _, params = expected["qwen3_5"]
    tensors = tiny_hybrid.tensors_of(np.random.default_rng(0), tiny_hybrid.text_config("qwen3_5"))
    rows = tensors["model.layers.3.self_attn.q_proj.weight"].reshape(6, 2, 64, 64)
    got = params["layers.3.attention.qkv"]
    np.testing.assert_array_equal(got[:, :384], rows[:, 0].reshape(384, 64).T)
    np.testing.assert_array_equal(got[:, 384:768], rows[:, 1].reshape(384, 64).T)
    conv = tensors["model.layers.0.linear_attn.conv1d.weight"]
    np.testing.assert_array_equal(params["layers.0.gdn.conv"], conv[:, 0].T)


def test_the_shared_expert_is_the_last_one(expected):
    _, params = expected["qwen3_5_moe"]
    config = tiny_hybrid.text_config("qwen3_5_moe")
    tensors = tiny_hybrid.tensors_of(np.random.default_rng(0), config)
    mlp = "model.layers.2.mlp."
    for name, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
        got = params[f"layers.2.mlp.{name}"]
        experts = tensors[f"{mlp}experts.{name}_proj"]
        np.testing.assert_array_equal(got[:8], experts.swapaxes(1, 2))
        shared = [tensors[f"{mlp}shared_expert.{part}_proj.weight"] for part in parts]
        np.testing.assert_array_equal(got[8], np.concatenate(shared).T)


def test_a_shared_expert_has_the_width_of_the_others():
    with pytest.raises(ValueError, match="`shared_size` must be None or .* 48, got 32"):
        MoEConfig(num_experts=8, chosen_count=3, expert_size=48, shared_size=32, normalise=True)


@pytest.mark.parametrize("family", HYBRIDS)
def test_mtp_block_is_converted_where_it_is(tmp_path, expected, family):
    folder = tiny_hybrid.write_hub(tmp_path / "hf", family)
    config, params = mapped(folder)
    mtp = {name for name in params if name.startswith("mtp.")}
    assert config.mtp and "mtp.layer.attention.qkv" in mtp
    assert_equal({name: params[name] for name in params.keys() - mtp}, expected[family][1])
    out = convert_target(folder, tmp_path / "out", progress=False)
    block = checkpoint.load_mtp(out, jnp.float32)
    np.testing.assert_array_equal(block.fuse[...], params["mtp.fuse"])
    target = checkpoint.load_target(out, jnp.float32)
    np.testing.assert_array_equal(target.norm.weight[...], params["norm.weight"])


def test_a_target_without_mtp_says_so(tmp_path):
    folder = tiny_hybrid.write_hub(tmp_path / "hf", "qwen3_5", mtp=False)
    out = convert_target(folder, tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="has no MTP block"):
        checkpoint.load_mtp(out, jnp.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "mixed"])
def test_decays_stay_float32_in_a_bfloat16_model(tmp_path, dtype):
    """Files of one generation have them in float32, those of the next in bfloat16."""
    config = tiny_hybrid.text_config("qwen3_5")
    tensors = tiny_hybrid.tensors_of(np.random.default_rng(0), config)
    source = tiny.write_hf_folder(tmp_path / "hf", config, tensors, dtype=dtype)
    out = convert_target(source, tmp_path / "out", progress=False)
    gdn = checkpoint.load_target(out, jnp.bfloat16).layers[0].gdn
    wanted = {name: jnp.float32 for name in ("log_rate", "time_bias", "norm_scale")}
    wanted |= {name: jnp.bfloat16 for name in ("inputs", "conv", "out")}
    assert {name: getattr(gdn, name)[...].dtype for name in wanted} == wanted
    rates = tensors["model.layers.0.linear_attn.A_log"]
    np.testing.assert_allclose(gdn.log_rate[...], rates, rtol=2e-2)


def test_tied_target_with_and_without_a_head(tmp_path):
    config = tiny_hybrid.text_config("qwen3_5", tie_word_embeddings=True)
    tensors = tiny_hybrid.tensors_of(np.random.default_rng(0), config)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    one = mapped(tiny.write_hf_folder(tmp_path / "with", config, tensors | head))[1]
    assert_equal(one, mapped(tiny.write_hf_folder(tmp_path / "without", config, tensors))[1])


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        ("layers.1.linear_attn.A_log", None, r"linear_attn.A_log \[6\] is missing"),
        ("layers.2.mlp.experts.down_proj", None, r"experts.0.down_proj|experts.down_proj"),
        (None, "model.layers.9.stray.weight", "stray.weight is not expected"),
        (None, "mtp.fc.weight", r"tensor mtp.norm.weight \[64\] is missing"),
    ],
)
def test_missing_and_unexpected_tensors_are_named(tmp_path, drop, add, message):
    config = tiny_hybrid.text_config("qwen3_5_moe")
    tensors = tiny_hybrid.tensors_of(np.random.default_rng(0), config)
    if drop is not None:
        del tensors["model." + drop]
    if add is not None:
        tensors[add] = np.ones((64, 128), np.float32)
    with pytest.raises(ValueError, match=message):
        mapped(tiny.write_hf_folder(tmp_path, config, tensors))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_5", {"output_gate_type": "sigmoid"}, "`output_gate_type` is 'sigmoid'"),
        ("qwen3_5", {"attn_output_gate": False}, "`attn_output_gate` is False"),
        ("qwen3_5", {"mtp_num_hidden_layers": 2}, "`mtp_num_hidden_layers` is 2"),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention.*not supported"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 4}, "`attention_layers` must ascend"),
        ("qwen3_5", {"layer_types": ...}, "no `full_attention_interval`"),
        ("qwen3_5", {"rope_parameters": {"rope_type": "default"}}, "no `rope_theta`"),
        ("qwen3_5", {"tie_word_embeddings": ...}, "must say `tie_word_embeddings`"),
        ("qwen3_5", {"linear_num_key_heads": 4}, "`num_value_heads`.*multiple"),
        ("qwen3_5", {"linear_conv_kernel_dim": ...}, "no `linear_conv_kernel_dim`"),
        ("qwen3_5", {"architectures": ["Qwen3NextForCausalLM"]}, "'Qwen3NextForCausalLM' is not"),
        (
            "qwen3_5_moe",
            {"shared_expert_intermediate_size": 32},
            "`shared_expert_intermediate_size` must be `moe_intermediate_size` 48, got 32",
        ),
        ("qwen3_moe", {"norm_topk_prob": ...}, "no `norm_topk_prob`"),
        ("qwen3_moe", {"num_experts": ...}, "one of `num_experts` and"),
        ("qwen3_moe", {"num_local_experts": 4}, r"got \[4, 8\]"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"`mlp_only_layers` \[0\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "`decoder_sparse_step` is 2"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, r"`chosen_count` must be in \[1, 8\], got 9"),
    ],
)
def test_refusals_name_the_key(tmp_path, family, changes, message):
    with pytest.raises(ValueError, match=message):
        parsed(tmp_path, tiny_hybrid.text_config(family, **changes))


def test_the_two_levels_must_agree_on_tied_embeddings(tmp_path):
    config = tiny_hybrid.hub_config("qwen3_5") | {"tie_word_embeddings": True}
    with pytest.raises(ValueError, match=r"`tie_word_embeddings`.*\[False, True\]"):
        parsed(tmp_path, config)


@pytest.mark.parametrize("family", tiny_hybrid.FAMILIES)
def test_command_converts_and_inspects(tmp_path, expected, family):
    source = tiny_hybrid.write_hub(tmp_path / "hf", family, mtp=False)
    for arguments in (("target", source, tmp_path / "out"), ("inspect", tmp_path / "out")):
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
    target = checkpoint.load_target(tmp_path / "out", jnp.bfloat16)
    assert target.config == expected[family][0]
    assert target.embedding[...].dtype == ml_dtypes.bfloat16
