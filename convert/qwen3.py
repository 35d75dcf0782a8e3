"""Qwen3ForCausalLM: its config.json and tensors; the block and rope parts serve DFlash too."""

import math
from collections.abc import Mapping
from typing import Any

from convert.hf import HFFolder
from convert.rules import Rule, keep, linear
from ddtree_jax.config import BlockConfig, MoEConfig, RopeConfig, TargetConfig, require

ARCHITECTURE = "Qwen3ForCausalLM"
ROTARY_BUFFERS = r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"
# Keys of the rope settings that this reader obeys; another one would change the rotation unseen.
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate"}
_YARN_KEYS = {
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
}


def field(config: Mapping[str, Any], name: str, kind: type = int) -> Any:
    """A required key of config.json. Integers pass for float; bool passes for neither."""
    value = config.get(name)
    require(value is not None, f"config.json has no `{name}`, which changes results: add it")
    accepted = (int, float) if kind is float else (kind,)
    require(
        isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)),
        f"config.json: `{name}` must be {kind.__name__}, got {value!r}",
    )
    return kind(value)


def parse_rope(config: Mapping[str, Any]) -> RopeConfig:
    """Rope settings of both generations of config.json.

    transformers 5 nests them in `rope_parameters`; 4 has `rope_theta` and `rope_scaling`.

    Raises:
      ValueError: no theta, or a kind of scaling other than yarn.
    """
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    require(isinstance(nested, dict), f"config.json: rope settings must be an object, got {nested}")
    theta = nested.get("rope_theta", config.get("rope_theta"))
    require(
        isinstance(theta, int | float),
        "config.json has no `rope_theta`, neither in `rope_parameters` nor at top level; it "
        f"changes results: add it (got {theta!r})",
    )
    kind = nested.get("rope_type", nested.get("type", "default"))
    require(
        kind in ("default", "yarn"),
        f"config.json: rope type must be 'default' or 'yarn', got {kind!r}, which is not supported",
    )
    unknown = sorted(set(nested) - _ROPE_KEYS - (_YARN_KEYS if kind == "yarn" else set()))
    require(not unknown, f"config.json: rope settings {unknown} are not supported")
    partial = nested.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    require(
        partial in (None, 1, 1.0),
        f"config.json: `partial_rotary_factor` must be 1, got {partial!r}, which is not supported",
    )
    require(nested.get("truncate", True) is True, "config.json: rope `truncate` must be true")
    return _yarn(nested, config, float(theta)) if kind == "yarn" else RopeConfig.plain(float(theta))


def _yarn(nested: dict[str, Any], config: Mapping[str, Any], theta: float) -> RopeConfig:
    """Source: transformers `_compute_yarn_parameters`, whose optional keys these are."""
    factor = field(nested, "factor", float)
    lengths = [
        scope["original_max_position_embeddings"]
        for scope in (nested, config)
        if scope.get("original_max_position_embeddings") is not None
    ]
    require(
        len(set(lengths)) < 2,
        f"config.json has two values of `original_max_position_embeddings`: {lengths}",
    )
    gain = nested.get("attention_factor")
    if gain is None:
        gain = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_length=lengths[0] if lengths else field(config, "max_position_embeddings"),
        beta_fast=float(nested.get("beta_fast") or 32),
        beta_slow=float(nested.get("beta_slow") or 1),
        attention_factor=float(gain),
    )


def parse_block(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of BlockConfig. An absent head_dim is hidden size / heads, as transformers has it."""
    activation = field(config, "hidden_act", str)
    require(activation == "silu", f"config.json: `hidden_act` must be 'silu', got {activation!r}")
    bias = config.get("attention_bias")
    require(
        bias in (None, False),
        f"config.json: `attention_bias` must be false, got {bias!r}; biases are not supported",
    )
    require(
        config.get("quantization_config") is None,
        "config.json: `quantization_config` is set; convert the checkpoint before quantisation",
    )
    heads, hidden = field(config, "num_attention_heads"), field(config, "hidden_size")
    if config.get("head_dim") is None:
        require(
            hidden % heads == 0,
            f"config.json has no `head_dim`, and `hidden_size` ({hidden}) is no multiple of "
            f"`num_attention_heads` ({heads})",
        )
    return {
        "hidden_size": hidden,
        "intermediate_size": field(config, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": field(config, "num_key_value_heads"),
        "head_dim": hidden // heads
        if config.get("head_dim") is None
        else field(config, "head_dim"),
        "rms_norm_eps": field(config, "rms_norm_eps", float),
        "rope": parse_rope(config),
    }


def parse_target(folder: HFFolder, moe: MoEConfig | None = None) -> TargetConfig:
    """Settings of a Qwen3 target; `moe` where experts take the place of its MLPs.

    Raises:
      ValueError: a key that changes results is absent, or asks for what we cannot do.
    """
    config = folder.config
    require(
        not config.get("use_sliding_window"),
        "config.json: `use_sliding_window` is true; sliding attention in a target is not supported",
    )
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    require(
        not kinds, f"config.json: `layer_types` {sorted(kinds)} are not supported in this target"
    )
    sizes = {} if moe is None else {"intermediate_size": moe.expert_size}
    return TargetConfig(
        **parse_block({**config, **sizes}),
        vocab_size=field(config, "vocab_size"),
        num_layers=field(config, "num_hidden_layers"),
        tie_embeddings=field(config, "tie_word_embeddings", bool),
        max_positions=field(config, "max_position_embeddings"),
        eos_token_ids=eos_token_ids(folder),
        moe=moe,
    )


def eos_token_ids(folder: HFFolder) -> tuple[int, ...]:
    """generation_config.json's ids, then config.json's (its text part's last), each once."""
    text = folder.config.get("text_config") or {}
    found = [
        scope["eos_token_id"]
        for scope in (folder.generation, folder.config, text)
        if "eos_token_id" in scope
    ]
    require(
        bool(found),
        "neither generation_config.json nor config.json has `eos_token_id`; add it (null for none)",
    )
    ids: list[int] = []
    for entry in found:
        ids += entry if isinstance(entry, list) else [] if entry is None else [entry]
    require(
        all(isinstance(token, int) and not isinstance(token, bool) for token in ids),
        f"`eos_token_id` must be an integer or a list of them, got {found}",
    )
    return tuple(dict.fromkeys(ids))


def block_rules(config: BlockConfig, source: str, destination: str) -> list[Rule]:
    """Rules of one decoder layer; both prefixes end in a dot."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query_rows, kv_rows = config.num_heads * head, config.num_kv_heads * head
    attention = source + "self_attn."
    qkv = (
        (attention + "q_proj.weight", query_rows),
        (attention + "k_proj.weight", kv_rows),
        (attention + "v_proj.weight", kv_rows),
    )
    gate_up = ((source + f"mlp.{part}_proj.weight", inner) for part in ("gate", "up"))
    norms = (
        ("attention_norm.scale", "input_layernorm.weight", hidden),
        ("attention.query_norm.scale", "self_attn.q_norm.weight", head),
        ("attention.key_norm.scale", "self_attn.k_norm.weight", head),
        ("mlp_norm.scale", "post_attention_layernorm.weight", hidden),
    )
    return [
        *(keep(destination + to, source + name, size) for to, name, size in norms),
        linear(destination + "attention.qkv", hidden, *qkv),
        linear(destination + "attention.out", query_rows, (attention + "o_proj.weight", hidden)),
        linear(destination + "mlp.gate_up", hidden, *gate_up),
        linear(destination + "mlp.down", inner, (source + "mlp.down_proj.weight", hidden)),
    ]


def target_rules(config: TargetConfig, folder: HFFolder) -> list[Rule]:
    """Where each tensor of a Qwen3ForCausalLM goes; a tied head is the embedding."""
    del folder  # one layout only
    vocab, hidden = config.vocab_size, config.hidden_size
    rules = [keep("embedding", "model.embed_tokens.weight", vocab, hidden)]
    for layer in range(config.num_layers):
        rules += block_rules(config, f"model.layers.{layer}.", f"layers.{layer}.")
    rules.append(keep("norm.scale", "model.norm.weight", hidden))
    if not config.tie_embeddings:
        rules.append(linear("head", hidden, ("lm_head.weight", vocab)))
    return rules


def target_ignored(config: TargetConfig) -> list[str]:
    """Some tied files carry the head a second time; old files carry rotary buffers."""
    return [ROTARY_BUFFERS, *([r"lm_head\.weight"] if config.tie_embeddings else [])]
