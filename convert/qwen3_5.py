"""Qwen3.5 and 3.6, dense and MoE: config.json of the text part, tensors under every prefix."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert import moe
from convert.hf import HFFolder
from convert.qwen3 import ROTARY_BUFFERS, eos_token_ids, field, parse_block
from convert.rules import Rule, keep, linear, transpose_into
from ddtree_jax.config import HybridConfig, TargetConfig, require

# Architecture -> whether it has experts. The vision part of the multimodal classes is left out.
ARCHITECTURES = {
    "Qwen3_5ForCausalLM": False,
    "Qwen3_5ForConditionalGeneration": False,
    "Qwen3_5MoeForCausalLM": True,
    "Qwen3_5MoeForConditionalGeneration": True,
}
# Hub files, text-only saves, and exports that keep the text model whole.
_PREFIXES = ("model.language_model.", "model.", "language_model.model.")
_VISION = r"(model\.)?(visual|vision_tower)\..*"
# Text alone has one position on all three axes, so these say nothing.
_MROPE_KEYS = ("mrope_section", "mrope_interleaved")
_MTP = "mtp."


def parse_target(folder: HFFolder) -> TargetConfig:
    """Settings of a hybrid target.

    Raises:
      ValueError: a key that changes results is absent, or asks for what we cannot do.
    """
    text = folder.config.get("text_config") or folder.config
    require(isinstance(text, dict), f"config.json: `text_config` must be an object, got {text!r}")
    _refuse_variants(text)
    has_experts = ARCHITECTURES[folder.architecture]
    experts = moe.parse_experts(text, normalise=True) if has_experts else None
    has_mtp = any(name.startswith(_MTP) for name in folder.tensors)
    require(
        not (has_mtp and text.get("mtp_use_dedicated_embeddings")),
        "config.json: `mtp_use_dedicated_embeddings` is true, which is not supported",
    )
    inner = experts.expert_size if has_experts else field(text, "intermediate_size")
    rope, rotary_share = _split_rope(text)
    block = parse_block({**text, **rope, "intermediate_size": inner})
    ties = {
        scope["tie_word_embeddings"]
        for scope in (folder.config, text)
        if scope.get("tie_word_embeddings") is not None
    }
    require(
        len(ties) == 1,
        f"config.json must say `tie_word_embeddings`, once or the same twice; got {sorted(ties)}",
    )
    return TargetConfig(
        **block,
        vocab_size=field(text, "vocab_size"),
        num_layers=field(text, "num_hidden_layers"),
        tie_embeddings=ties.pop(),
        max_positions=field(text, "max_position_embeddings"),
        eos_token_ids=eos_token_ids(folder),
        hybrid=HybridConfig(
            attention_layers=_attention_layers(text),
            rotary_dim=int(block["head_dim"] * rotary_share),
            num_key_heads=field(text, "linear_num_key_heads"),
            num_value_heads=field(text, "linear_num_value_heads"),
            key_dim=field(text, "linear_key_head_dim"),
            value_dim=field(text, "linear_value_head_dim"),
            conv_width=field(text, "linear_conv_kernel_dim"),
        ),
        moe=experts,
        mtp=has_mtp,
    )


def _refuse_variants(text: Mapping[str, Any]) -> None:
    """Keys that only some files have; what they say elsewhere is what the models do."""
    for name, known in (
        ("attn_output_gate", (None, True)),
        ("output_gate_type", (None, "silu", "swish")),
        ("mtp_num_hidden_layers", (None, 0, 1)),
    ):
        require(
            text.get(name) in known,
            f"config.json: `{name}` is {text.get(name)!r}, which is not supported; "
            f"expected one of {known}",
        )


def _split_rope(text: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Rope settings without the keys of this family, and the share of a head that rotates.

    An absent share is 0.25: the class of these models sets it.
    """
    nested = text.get("rope_parameters") or text.get("rope_scaling") or {}
    require(isinstance(nested, dict), f"config.json: rope settings must be an object, got {nested}")
    share = nested.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    rest = {
        name: value
        for name, value in nested.items()
        if name not in (*_MROPE_KEYS, "partial_rotary_factor")
    }
    cleaned = {"rope_parameters": rest, "rope_scaling": None, "partial_rotary_factor": None}
    return cleaned, 0.25 if share is None else float(share)


def _attention_layers(text: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers of full attention: `layer_types`, else every `full_attention_interval`-th."""
    count, kinds = field(text, "num_hidden_layers"), text.get("layer_types")
    if kinds is None:
        interval = field(text, "full_attention_interval")
        return tuple(layer for layer in range(count) if (layer + 1) % interval == 0)
    require(
        isinstance(kinds, list) and len(kinds) == count,
        f"config.json: `layer_types` must have {count} entries (`num_hidden_layers`), got {kinds}",
    )
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "linear_attention"})
    require(not unknown, f"config.json: `layer_types` {unknown} are not supported in this target")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def target_rules(config: TargetConfig, folder: HFFolder) -> list[Rule]:
    """Where each tensor of a hybrid target goes; a tied head is the embedding."""
    vocab, hidden = config.vocab_size, config.hidden_size
    prefix = _prefix(folder)
    rules = [keep("embedding", prefix + "embed_tokens.weight", vocab, hidden)]
    for layer in range(config.num_layers):
        source, to = f"{prefix}layers.{layer}.", f"layers.{layer}."
        attends = layer in config.attention_layers
        rules += layer_rules(config, folder, source, to, attends=attends)
    rules.append(keep("norm.weight", prefix + "norm.weight", hidden))
    if not config.tie_embeddings:
        outer = prefix.removesuffix("model.") if prefix.startswith("language_model.") else ""
        rules.append(linear("head", hidden, (outer + "lm_head.weight", vocab)))
    return rules + (_mtp_rules(config, folder) if config.mtp else [])


def _prefix(folder: HFFolder) -> str:
    """Of the text model's tensors; the first known one where nothing is found."""
    found = [name for name in _PREFIXES if name + "embed_tokens.weight" in folder.tensors]
    return found[0] if found else _PREFIXES[0]


def target_ignored(config: TargetConfig) -> list[str]:
    """The vision part, rotary buffers, and the second copy of a tied head."""
    head = [r"(language_model\.)?lm_head\.weight"] if config.tie_embeddings else []
    return [_VISION, ROTARY_BUFFERS, *head]


def layer_rules(
    config: TargetConfig, folder: HFFolder, source: str, to: str, *, attends: bool
) -> list[Rule]:
    """Rules of one decoder layer; both prefixes end in a dot. Norms keep their raw weights."""
    hidden, inner = config.hidden_size, config.intermediate_size
    rules = [
        keep(to + "mixer_norm.weight", source + "input_layernorm.weight", hidden),
        keep(to + "mlp_norm.weight", source + "post_attention_layernorm.weight", hidden),
    ]
    rules += (_attention_rules if attends else _gdn_rules)(config, source, to)
    if config.moe is not None:
        return rules + moe.expert_rules(config, folder, source, to)
    parts = [(source + f"mlp.{part}_proj.weight", inner) for part in ("gate", "up")]
    return [
        *rules,
        linear(to + "mlp.gate_up", hidden, *parts),
        linear(to + "mlp.down", inner, (source + "mlp.down_proj.weight", hidden)),
    ]


def _attention_rules(config: TargetConfig, source: str, to: str) -> list[Rule]:
    """q_proj holds query and output gate of each head in turn; ours has all queries first."""
    hidden, heads, head = config.hidden_size, config.num_heads, config.head_dim
    queries, keys = heads * head, config.num_kv_heads * head
    attention = source + "self_attn."

    def fill(out: np.ndarray, number: int, value: np.ndarray) -> None:
        if number > 0:
            start = 2 * queries + (number - 1) * keys
            transpose_into(out[:, start : start + keys], value)
            return
        parts = value.reshape(heads, 2, head, hidden)
        for part in range(2):
            columns = out[:, part * queries : (part + 1) * queries]
            transpose_into(columns, parts[:, part].reshape(queries, hidden))

    qkv = Rule(
        destination=to + "attention.qkv",
        sources=(
            (attention + "q_proj.weight", (2 * queries, hidden)),
            (attention + "k_proj.weight", (keys, hidden)),
            (attention + "v_proj.weight", (keys, hidden)),
        ),
        fill=fill,
        filled_shape=(hidden, 2 * queries + 2 * keys),
    )
    return [
        qkv,
        linear(to + "attention.out", queries, (attention + "o_proj.weight", hidden)),
        keep(to + "attention.query_norm.weight", attention + "q_norm.weight", head),
        keep(to + "attention.key_norm.weight", attention + "k_norm.weight", head),
    ]


def _gdn_rules(config: TargetConfig, source: str, to: str) -> list[Rule]:
    hybrid, hidden = config.hybrid, config.hidden_size
    heads, channels, width = hybrid.num_value_heads, hybrid.conv_channels, hybrid.conv_width
    values = heads * hybrid.value_dim
    gdn = source + "linear_attn."

    def fill(out: np.ndarray, number: int, value: np.ndarray) -> None:
        out[...] = value[:, 0, :].T

    inputs = (
        (gdn + "in_proj_qkv.weight", channels),
        (gdn + "in_proj_z.weight", values),
        (gdn + "in_proj_b.weight", heads),
        (gdn + "in_proj_a.weight", heads),
    )
    return [
        linear(to + "gdn.inputs", hidden, *inputs),
        Rule(
            destination=to + "gdn.conv",
            sources=((gdn + "conv1d.weight", (channels, 1, width)),),
            fill=fill,
            filled_shape=(width, channels),
        ),
        keep(to + "gdn.log_rate", gdn + "A_log", heads),
        keep(to + "gdn.time_bias", gdn + "dt_bias", heads),
        keep(to + "gdn.norm_scale", gdn + "norm.weight", hybrid.value_dim),
        linear(to + "gdn.out", values, (gdn + "out_proj.weight", hidden)),
    ]


def _mtp_rules(config: TargetConfig, folder: HFFolder) -> list[Rule]:
    """The block that predicts the token after the next; embedding and head are the target's."""
    hidden = config.hidden_size
    return [
        linear("mtp.fuse", 2 * hidden, (_MTP + "fc.weight", hidden)),
        keep("mtp.embed_norm.weight", _MTP + "pre_fc_norm_embedding.weight", hidden),
        keep("mtp.hidden_norm.weight", _MTP + "pre_fc_norm_hidden.weight", hidden),
        keep("mtp.norm.weight", _MTP + "norm.weight", hidden),
        *layer_rules(config, folder, _MTP + "layers.0.", "mtp.layer.", attends=True),
    ]
