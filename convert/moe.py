"""Experts, and Qwen3MoeForCausalLM: settings and tensors of both expert layouts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert import qwen3
from convert.hf import HFFolder
from convert.qwen3 import field
from convert.rules import Rule, linear, transpose_into
from ddtree_jax.config import MoEConfig, TargetConfig, require

ARCHITECTURE = "Qwen3MoeForCausalLM"


def parse_experts(config: Mapping[str, Any], *, normalise: bool) -> MoEConfig:
    """Settings of the experts. Hub files say `num_experts`, transformers 5 `num_local_experts`.

    Raises:
      ValueError: a count is absent or said twice, some layers have no experts, or the shared
        expert has another width than the others.
    """
    counts = {
        config[name]
        for name in ("num_experts", "num_local_experts")
        if config.get(name) is not None
    }
    require(
        len(counts) == 1,
        "config.json must have one of `num_experts` and `num_local_experts`, or both the same; "
        f"got {sorted(counts)}",
    )
    require(
        config.get("decoder_sparse_step") in (None, 1),
        f"config.json: `decoder_sparse_step` is {config.get('decoder_sparse_step')!r}; "
        "only 1 is supported",
    )
    require(
        not config.get("mlp_only_layers"),
        f"config.json: `mlp_only_layers` {config.get('mlp_only_layers')} are not supported",
    )
    size = field(config, "moe_intermediate_size")
    shared = config.get("shared_expert_intermediate_size")
    require(
        shared in (None, 0, size),
        "config.json: `shared_expert_intermediate_size` must be `moe_intermediate_size` "
        f"{size}, got {shared}; no other is supported",
    )
    return MoEConfig(
        num_experts=counts.pop(),
        chosen_count=field(config, "num_experts_per_tok"),
        expert_size=size,
        shared_size=shared or None,
        normalise=normalise,
    )


def parse_target(folder: HFFolder) -> TargetConfig:
    """Settings of a Qwen3-MoE target.

    Raises:
      ValueError: a key that changes results is absent, or asks for what we cannot do.
    """
    config = folder.config
    experts = parse_experts(config, normalise=field(config, "norm_topk_prob", bool))
    return qwen3.parse_target(folder, moe=experts)


def target_rules(config: TargetConfig, folder: HFFolder) -> list[Rule]:
    """Those of a dense Qwen3, with experts for its MLPs."""
    rules = [rule for rule in qwen3.target_rules(config, folder) if ".mlp." not in rule.destination]
    for layer in range(config.num_layers):
        rules += expert_rules(config, folder, f"model.layers.{layer}.", f"layers.{layer}.")
    return sorted(rules, key=_layer_order)


def _layer_order(rule: Rule) -> int:
    """Rules of a layer go together, so that it can leave memory as soon as it is read."""
    parts = rule.destination.split(".")
    return int(parts[1]) if parts[0] == "layers" else -1


target_ignored = qwen3.target_ignored


def expert_rules(
    config: TargetConfig, folder: HFFolder, source: str, destination: str
) -> list[Rule]:
    """Rules of one layer's `mlp`: router, experts fused or one by one, the shared expert last."""
    hidden, moe = config.hidden_size, config.moe
    mlp, to = source + "mlp.", destination + "mlp."
    rules = [linear(to + "router", hidden, (mlp + "gate.weight", moe.num_experts))]
    rules += [_matrices(config, folder, mlp, to, name) for name in ("gate_up", "down")]
    if moe.has_shared:
        rules.append(linear(to + "shared_gate", hidden, (mlp + "shared_expert_gate.weight", 1)))
    return rules


def _matrices(config: TargetConfig, folder: HFFolder, mlp: str, to: str, name: str) -> Rule:
    """One of the two matrices of every expert. `experts.{name}_proj` [E, out, in] has all but the
    shared one, or each has its own `{part}_proj.weight` [out, in]; gate rows come before up rows.
    """
    moe, hidden = config.moe, config.hidden_size
    parts, rows, columns = {
        "gate_up": (("gate", "up"), moe.expert_size, hidden),
        "down": (("down",), hidden, moe.expert_size),
    }[name]
    fused = mlp + "experts.gate_up_proj" in folder.tensors
    alone = [] if fused else [f"experts.{expert}" for expert in range(moe.num_experts)]
    alone += ["shared_expert"] * moe.has_shared
    sources = [
        (f"{mlp}{owner}.{part}_proj.weight", (rows, columns)) for owner in alone for part in parts
    ]
    if fused:
        shape = (moe.num_experts, len(parts) * rows, columns)
        sources.insert(0, (f"{mlp}experts.{name}_proj", shape))

    def fill(out: np.ndarray, number: int, value: np.ndarray) -> None:
        if value.ndim == 3:
            for expert, matrix in enumerate(value):
                transpose_into(out[expert], matrix)
            return
        owner, part = divmod(number - fused, len(parts))
        expert = owner + moe.num_experts * fused
        transpose_into(out[expert, :, part * rows : (part + 1) * rows], value)

    return Rule(
        destination=to + name,
        sources=tuple(sources),
        fill=fill,
        filled_shape=(moe.num_experts + moe.has_shared, columns, len(parts) * rows),
    )
