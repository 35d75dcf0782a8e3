"""Our parameters as Hugging Face files, as Qwen and z-lab write them, and back."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from ddtree_jax.config import AttentionKind, BlockConfig, DraftConfig, RopeConfig, TargetConfig

Arrays = dict[str, np.ndarray]
SHARD_BYTES = 14 * 2**20
_LAYER = {
    "attention_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "attention.query_norm.scale": "self_attn.q_norm.weight",
    "attention.key_norm.scale": "self_attn.k_norm.weight",
    "attention.out": "self_attn.o_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
}
_FUSED = {
    "attention.qkv": [f"self_attn.{name}_proj.weight" for name in "qkv"],
    "mlp.gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
}
TARGET = {"embedding": "model.embed_tokens.weight", "norm.scale": "model.norm.weight"}
DRAFT = {
    "fuse": "fc.weight",
    "context_norm.scale": "hidden_norm.weight",
    "norm.scale": "norm.weight",
}


def _widths(config: BlockConfig) -> dict[str, list[int]]:
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {"attention.qkv": [heads, kv, kv], "mlp.gate_up": [config.intermediate_size] * 2}


def _flip(name: str, value: np.ndarray) -> np.ndarray:
    """[in, out] <-> [out, in]; embeddings and norms stay."""
    return value.T if value.ndim == 2 and name != "embedding" else value


def to_hf(params: Arrays, config: BlockConfig, top: dict[str, str], prefix: str) -> Arrays:
    """Tensors under Hugging Face names, in the order of the layers."""
    tensors = {theirs: _flip(ours, params[ours]) for ours, theirs in top.items()}
    widths = _widths(config)
    for index in range(config.num_layers):
        for ours, theirs in _LAYER.items():
            name = f"layers.{index}.{ours}"
            tensors[f"{prefix}layers.{index}.{theirs}"] = _flip(name, params[name])
        for ours, names in _FUSED.items():
            cuts = np.cumsum(widths[ours])[:-1]
            parts = np.split(params[f"layers.{index}.{ours}"], cuts, axis=1)
            for theirs, part in zip(names, parts, strict=True):
                tensors[f"{prefix}layers.{index}.{theirs}"] = part.T
    return tensors


def from_hf(tensors: Arrays, config: BlockConfig, top: dict[str, str], prefix: str) -> Arrays:
    """Inverse of `to_hf`."""
    params = {ours: _flip(ours, tensors[theirs]) for ours, theirs in top.items()}
    for index in range(config.num_layers):
        for ours, theirs in _LAYER.items():
            name = f"layers.{index}.{ours}"
            params[name] = _flip(name, tensors[f"{prefix}layers.{index}.{theirs}"])
        for ours, names in _FUSED.items():
            parts = [tensors[f"{prefix}layers.{index}.{theirs}"].T for theirs in names]
            params[f"layers.{index}.{ours}"] = np.concatenate(parts, axis=1)
    return params


def save_tensors(tensors: Arrays, folder: Path) -> None:
    """bfloat16 shards of at most SHARD_BYTES, with an index when there are several."""
    shards: list[Arrays] = [{}]
    size = total = 0
    for name, value in tensors.items():
        value = np.ascontiguousarray(value).astype(ml_dtypes.bfloat16)
        # 64 KiB for the shard's header
        if shards[-1] and size + value.nbytes > SHARD_BYTES - 2**16:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size, total = size + value.nbytes, total + value.nbytes
    files = ["model.safetensors"]
    if len(shards) > 1:
        count = len(shards)
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        weight_map = {name: f for f, s in zip(files, shards, strict=True) for name in s}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / "model.safetensors.index.json", index)
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors leaves it to the owner alone


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def _shared(config: BlockConfig, max_positions: int) -> dict[str, Any]:
    """Keys that target and drafter have in common."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": 0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": max_positions,
        "max_window_layers": config.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": 0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope.theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def save_target(params: Arrays, config: TargetConfig, tokenizer_folder: Path, folder: Path) -> None:
    """A Qwen3ForCausalLM folder with its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(to_hf(params, config, TARGET, "model."), folder)
    settings = {"architectures": ["Qwen3ForCausalLM"], **_shared(config, config.max_positions)}
    write_json(folder / "config.json", settings)
    generation = {"do_sample": False, "eos_token_id": 0, "pad_token_id": 0}
    write_json(folder / "generation_config.json", generation)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer_folder / name).resolve() != (folder / name).resolve():
            shutil.copyfile(tokenizer_folder / name, folder / name)


def save_draft(params: Arrays, config: DraftConfig, max_positions: int, folder: Path) -> None:
    """A DFlashDraftModel folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(to_hf(params, config, DRAFT, ""), folder)
    settings = {"architectures": ["DFlashDraftModel"], **_shared(config, max_positions)}
    settings |= {
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.tap_layers),
        },
        "layer_types": ["full_attention"] * config.num_layers,
        "num_target_layers": config.target_num_layers,
    }
    write_json(folder / "config.json", settings)


def read_tensors(folder: Path) -> Arrays:
    tensors: Arrays = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _block(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": data["hidden_size"],
        "intermediate_size": data["intermediate_size"],
        "num_heads": data["num_attention_heads"],
        "num_kv_heads": data["num_key_value_heads"],
        "head_dim": data["head_dim"],
        "rms_norm_eps": data["rms_norm_eps"],
        "rope": RopeConfig.plain(data["rope_theta"]),
        "vocab_size": data["vocab_size"],
    }


def load_target(folder: Path) -> tuple[TargetConfig, Arrays]:
    """What `save_target` wrote."""
    data = json.loads((folder / "config.json").read_text())
    config = TargetConfig(
        **_block(data),
        num_layers=data["num_hidden_layers"],
        tie_embeddings=True,
        max_positions=data["max_position_embeddings"],
        eos_token_ids=(0,),
    )
    return config, from_hf(read_tensors(folder), config, TARGET, "model.")


def load_draft(folder: Path) -> tuple[DraftConfig, Arrays]:
    """What `save_draft` wrote."""
    data = json.loads((folder / "config.json").read_text())
    config = DraftConfig(
        **_block(data),
        block_size=data["block_size"],
        mask_token_id=data["dflash_config"]["mask_token_id"],
        tap_layers=tuple(data["dflash_config"]["target_layer_ids"]),
        target_num_layers=data["num_target_layers"],
        attention=(AttentionKind(causal=False, window=None),) * data["num_hidden_layers"],
    )
    return config, from_hf(read_tensors(folder), config, DRAFT, "")
