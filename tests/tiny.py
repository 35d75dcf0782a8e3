"""Tiny random checkpoints in Hugging Face form, written without transformers.

Sizes are asymmetric so that a swapped axis fails, and norms are not one so that a forgotten
scale fails.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

TARGET_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 200,
}
DRAFT_SIZES = TARGET_SIZES | {"num_hidden_layers": 3, "intermediate_size": 96}
MASK_TOKEN = 199
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_COMMON = {
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


def target_config(
    *, generation: int = 5, tied: bool = True, rope: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """config.json of a target as transformers 4 or 5 writes it; a change to ... drops the key."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "sliding_window": None,
        "eos_token_id": 7,
        **TARGET_SIZES,
        **_COMMON,
        **_rope(generation, rope),
    }
    return _changed(config, changes)


def draft_config(
    *, generation: int = 5, rope: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """config.json of a drafter: generation 4 has block and mask id at top level, 5 nested."""
    own = {"block_size": 8, "mask_token_id": MASK_TOKEN}
    nested = {"target_layer_ids": [0, 2], **(own if generation == 5 else {})}
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "num_target_layers": TARGET_SIZES["num_hidden_layers"],
        "dflash_config": nested,
        "layer_types": ["full_attention"] * DRAFT_SIZES["num_hidden_layers"],
        **(own if generation == 4 else {}),
        **DRAFT_SIZES,
        **_COMMON,
        **_rope(generation, rope),
    }
    return _changed(config, changes)


def target_tensors(rng: np.random.Generator, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """float32 tensors of a target under their Hugging Face names."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tensors = {
        "model.embed_tokens.weight": _matrix(rng, vocab, hidden),
        "model.norm.weight": _norm(rng, hidden),
    }
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = _matrix(rng, vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        tensors |= _layer(rng, config, f"model.layers.{layer}.")
    return tensors


def draft_tensors(rng: np.random.Generator, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """float32 tensors of a drafter under their Hugging Face names."""
    hidden, taps = config["hidden_size"], len(config["dflash_config"]["target_layer_ids"])
    tensors = {
        "fc.weight": _matrix(rng, hidden, taps * hidden),
        "hidden_norm.weight": _norm(rng, hidden),
        "norm.weight": _norm(rng, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        tensors |= _layer(rng, config, f"layers.{layer}.")
    return tensors


def write_hf_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    shards: int = 1,
    dtype: str = "float32",
) -> Path:
    """Writes config.json and safetensors. dtype: "float32", "bfloat16", "float16" or "mixed",
    where bfloat16 and float32 alternate."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    kinds = {
        "float32": [np.float32],
        "bfloat16": [ml_dtypes.bfloat16],
        "float16": [np.float16],
        "mixed": [ml_dtypes.bfloat16, np.float32],
    }[dtype]
    cast = {
        name: np.ascontiguousarray(value.astype(kinds[i % len(kinds)]))
        for i, (name, value) in enumerate(tensors.items())
    }
    if shards == 1:
        save_file(cast, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(cast.items())[shard::shards])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_hf_target(
    folder: Path,
    rng: np.random.Generator,
    *,
    shards: int = 1,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """A random target; keywords left over go to `target_config`."""
    settings = target_config(**config)
    return write_hf_folder(
        folder, settings, target_tensors(rng, settings), shards=shards, dtype=dtype
    )


def write_hf_draft(
    folder: Path,
    rng: np.random.Generator,
    *,
    shards: int = 1,
    dtype: str = "float32",
    **config: Any,
) -> Path:
    """A random drafter of `write_hf_target`'s target; keywords left over go to `draft_config`."""
    settings = draft_config(**config)
    return write_hf_folder(
        folder, settings, draft_tensors(rng, settings), shards=shards, dtype=dtype
    )


def _rope(generation: int, rope: dict[str, Any] | None) -> dict[str, Any]:
    theta = 1e4
    if generation == 5:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **(rope or {})}}
    return {"rope_theta": theta, "rope_scaling": rope}


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


def _layer(rng: np.random.Generator, config: dict[str, Any], prefix: str) -> dict[str, np.ndarray]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    norms = {
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "self_attn.q_norm": head,
        "self_attn.k_norm": head,
    }
    return {
        **{f"{prefix}{name}.weight": _matrix(rng, *shape) for name, shape in matrices.items()},
        **{f"{prefix}{name}.weight": _norm(rng, size) for name, size in norms.items()},
    }


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)


def _norm(rng: np.random.Generator, size: int) -> np.ndarray:
    return (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)
