"""Tiny random checkpoints of Qwen3-MoE and Qwen3.5 (dense and MoE) in Hugging Face form.

Tensors come under the names that transformers has in memory (prefix `model.`, experts fused);
`renamed` gives the layouts of files. Sizes are asymmetric and nothing is zero or one, so that a
swapped axis, a forgotten scale or a wrong norm shows.
"""

from pathlib import Path
from typing import Any

import numpy as np
import tiny

HYBRID_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 200,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
EXPERT_SIZES = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
FAMILIES = ("qwen3_moe", "qwen3_5", "qwen3_5_moe")
_COMMON = {
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 7,
    "tie_word_embeddings": False,
}
_THETA = 1e4


def text_config(family: str, *, generation: int = 5, **changes: Any) -> dict[str, Any]:
    """config.json of a text-only class; a change to ... drops the key. generation 4 has rope and
    partial_rotary_factor at top level, and the interval in place of the layer types."""
    hybrid, experts = family != "qwen3_moe", family != "qwen3_5"
    sizes = HYBRID_SIZES if hybrid else tiny.TARGET_SIZES | {"num_hidden_layers": 2}
    config = {**sizes, **_COMMON}
    if experts:
        config |= EXPERT_SIZES
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _THETA}
    if hybrid:
        name = "Qwen3_5MoeForCausalLM" if experts else "Qwen3_5ForCausalLM"
        config |= {"architectures": [name], "model_type": f"{family}_text"}
        if experts:
            config |= {"shared_expert_intermediate_size": 48}
        if generation == 5:
            config["layer_types"] = ["linear_attention"] * 3 + ["full_attention"]
            rope |= {"partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]}
        else:
            config |= {"full_attention_interval": 4, "partial_rotary_factor": 0.25}
    else:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    config |= {"rope_parameters": rope} if generation == 5 else {"rope_theta": _THETA}
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


def hub_config(family: str, **changes: Any) -> dict[str, Any]:
    """config.json as the hub has it: the hybrids are the text part of a multimodal class."""
    text = text_config(family, **changes)
    if family == "qwen3_moe":
        return text
    (name,) = text.pop("architectures")
    text |= {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    return {
        "architectures": [name.replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": family,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": {"depth": 1},
    }


def tensors_of(rng: np.random.Generator, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """float32 tensors under their names in memory; `config` is of a text-only class."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    hybrid = "linear_conv_kernel_dim" in config
    tensors = {
        "model.embed_tokens.weight": _matrix(rng, vocab, hidden) * 6,
        "model.norm.weight": _norm(rng, hidden, hybrid),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _matrix(rng, vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        attends = not hybrid or layer % 4 == 3
        tensors |= layer_tensors(rng, config, f"model.layers.{layer}.", attends=attends)
    return tensors


def mtp_tensors(rng: np.random.Generator, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The MTP block of a hybrid target."""
    hidden = config["hidden_size"]
    names = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return {
        "mtp.fc.weight": _matrix(rng, hidden, 2 * hidden),
        **{f"mtp.{name}.weight": _norm(rng, hidden, True) for name in names},
        **layer_tensors(rng, config, "mtp.layers.0.", attends=True),
    }


def vision_tensors() -> dict[str, np.ndarray]:
    return {"model.visual.blocks.0.attn.qkv.weight": np.ones((6, 2), np.float32)}


def layer_tensors(
    rng: np.random.Generator, config: dict[str, Any], prefix: str, *, attends: bool
) -> dict[str, np.ndarray]:
    """One decoder layer; experts fused."""
    hidden, hybrid = config["hidden_size"], "linear_conv_kernel_dim" in config
    tensors = {
        "input_layernorm.weight": _norm(rng, hidden, hybrid),
        "post_attention_layernorm.weight": _norm(rng, hidden, hybrid),
    }
    if attends:
        head = config["head_dim"]
        queries, keys = (config[f"num_{x}_heads"] * head for x in ("attention", "key_value"))
        tensors |= {
            "self_attn.q_proj.weight": _matrix(rng, queries * (2 if hybrid else 1), hidden),
            "self_attn.k_proj.weight": _matrix(rng, keys, hidden),
            "self_attn.v_proj.weight": _matrix(rng, keys, hidden),
            "self_attn.o_proj.weight": _matrix(rng, hidden, queries),
            "self_attn.q_norm.weight": _norm(rng, head, hybrid),
            "self_attn.k_norm.weight": _norm(rng, head, hybrid),
        }
    else:
        tensors |= _gdn_tensors(rng, config)
    tensors |= _expert_tensors(rng, config) if "num_experts" in config else _mlp(rng, config)
    return {prefix + name: value for name, value in tensors.items()}


def _gdn_tensors(rng: np.random.Generator, config: dict[str, Any]) -> dict[str, np.ndarray]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + values
    tensors = {
        "in_proj_qkv.weight": _matrix(rng, channels, hidden),
        "in_proj_z.weight": _matrix(rng, values, hidden),
        "in_proj_b.weight": _matrix(rng, heads, hidden),
        "in_proj_a.weight": _matrix(rng, heads, hidden),
        "conv1d.weight": (0.5 * rng.standard_normal((channels, 1, 4))).astype(np.float32),
        "A_log": np.log(rng.uniform(0.05, 8.0, heads)).astype(np.float32),
        "dt_bias": (rng.standard_normal(heads) - 2).astype(np.float32),
        "norm.weight": _norm(rng, config["linear_value_head_dim"], False),
        "out_proj.weight": _matrix(rng, hidden, values),
    }
    return {f"linear_attn.{name}": value for name, value in tensors.items()}


def _mlp(
    rng: np.random.Generator, config: dict[str, Any], name: str = "mlp", size: int | None = None
) -> dict[str, np.ndarray]:
    hidden, inner = config["hidden_size"], size or config["intermediate_size"]
    return {
        f"{name}.gate_proj.weight": _matrix(rng, inner, hidden),
        f"{name}.up_proj.weight": _matrix(rng, inner, hidden),
        f"{name}.down_proj.weight": _matrix(rng, hidden, inner),
    }


def _expert_tensors(rng: np.random.Generator, config: dict[str, Any]) -> dict[str, np.ndarray]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    experts, shared = config["num_experts"], config.get("shared_expert_intermediate_size")
    tensors = {
        # Far apart, so that no rounding changes which experts are chosen.
        "mlp.gate.weight": _matrix(rng, experts, hidden) * 3,
        "mlp.experts.gate_up_proj": _experts(rng, experts, 2 * inner, hidden),
        "mlp.experts.down_proj": _experts(rng, experts, hidden, inner),
    }
    if shared:
        tensors |= _mlp(rng, config, "mlp.shared_expert", shared)
        tensors["mlp.shared_expert_gate.weight"] = _matrix(rng, 1, hidden)
    return tensors


def renamed(
    tensors: dict[str, np.ndarray], *, prefix: str = "model.", fused: bool = True
) -> dict[str, np.ndarray]:
    """Names of a file: another prefix of the text model, experts one by one."""
    result = {}
    for name, value in tensors.items():
        if name.startswith("model."):
            name = prefix + name.removeprefix("model.")
        if name == "lm_head.weight" and prefix.startswith("language_model."):
            name = "language_model." + name
        stem, _, last = name.rpartition(".")
        if fused or not stem.endswith("experts"):
            result[name] = value
            continue
        for expert, matrix in enumerate(value):
            parts = {"down": matrix}
            if last == "gate_up_proj":
                parts = dict(zip(("gate", "up"), np.split(matrix, 2), strict=True))
            for part, rows in parts.items():
                result[f"{stem}.{expert}.{part}_proj.weight"] = rows
    return result


def write_hub(folder: Path, family: str, seed: int = 0, *, mtp: bool = True) -> Path:
    """A checkpoint as the hub has it: fused experts (one by one for Qwen3-MoE), MTP, vision."""
    rng = np.random.default_rng(seed)
    config = text_config(family)
    tensors = tensors_of(rng, config)
    if family == "qwen3_moe":
        return tiny.write_hf_folder(folder, config, renamed(tensors, fused=False))
    tensors = renamed(tensors, prefix="model.language_model.")
    if mtp:
        tensors |= mtp_tensors(rng, config)
    return tiny.write_hf_folder(folder, hub_config(family), tensors | vision_tensors(), shards=2)


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)


def _experts(rng: np.random.Generator, experts: int, rows: int, columns: int) -> np.ndarray:
    return np.stack([_matrix(rng, rows, columns) for _ in range(experts)])


def _norm(rng: np.random.Generator, size: int, zero_centred: bool) -> np.ndarray:
    return ((0 if zero_centred else 1) + 0.2 * rng.standard_normal(size)).astype(np.float32)
