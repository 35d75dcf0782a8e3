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
      ValueError: a count is absent or said twice, or some layers have no experts.
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
    shared = config.get("shared_expert_intermediate_size")
    return MoEConfig(
        num_experts=counts.pop(),
        chosen_count=field(config, "num_experts_per_tok"),
        expert_size=field(config, "moe_intermediate_size"),
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
    """Rules of one layer's `mlp`: router, experts fused or one by one, shared expert."""
    hidden, moe = config.hidden_size, config.moe
    mlp, to = source + "mlp.", destination + "mlp."
    rules = [linear(to + "router", hidden, (mlp + "gate.weight", moe.num_experts))]
    if mlp + "experts.gate_up_proj" in folder.tensors:
        rules += _fused(config, mlp, to)
    else:
        rules += _one_by_one(config, mlp, to)
    if moe.shared_size is not None:
        shared, size = mlp + "shared_expert.", moe.shared_size
        parts = [(shared + f"{part}_proj.weight", size) for part in ("gate", "up")]
        rules += [
            linear(to + "shared.gate_up", hidden, *parts),
            linear(to + "shared.down", size, (shared + "down_proj.weight", hidden)),
            linear(to + "shared_gate", hidden, (mlp + "shared_expert_gate.weight", 1)),
        ]
    return rules


def _fused(config: TargetConfig, mlp: str, to: str) -> list[Rule]:
    """[E, out, in] for all experts at once; gate rows come before up rows."""
    experts, hidden, inner = config.moe.num_experts, config.hidden_size, config.moe.expert_size

    def fill(out: np.ndarray, number: int, value: np.ndarray) -> None:
        for expert in range(experts):
            transpose_into(out[expert], value[expert])

    def rule(name: str, source: str, rows: int, columns: int) -> Rule:
        return Rule(
            destination=to + name,
            sources=((mlp + source, (experts, rows, columns)),),
            fill=fill,
            filled_shape=(experts, columns, rows),
        )

    return [
        rule("gate_up", "experts.gate_up_proj", 2 * inner, hidden),
        rule("down", "experts.down_proj", hidden, inner),
    ]


def _one_by_one(config: TargetConfig, mlp: str, to: str) -> list[Rule]:
    """`experts.{e}.{gate,up,down}_proj.weight`, each [out, in]."""
    experts, hidden, inner = config.moe.num_experts, config.hidden_size, config.moe.expert_size

    def rule(name: str, parts: tuple[str, ...], rows: int, columns: int) -> Rule:
        def fill(out: np.ndarray, number: int, value: np.ndarray) -> None:
            expert, part = divmod(number, len(parts))
            transpose_into(out[expert, :, part * rows : (part + 1) * rows], value)

        names = [
            f"{mlp}experts.{expert}.{part}_proj.weight"
            for expert in range(experts)
            for part in parts
        ]
        return Rule(
            destination=to + name,
            sources=tuple((source, (rows, columns)) for source in names),
            fill=fill,
            filled_shape=(experts, columns, len(parts) * rows),
        )

    return [
        rule("gate_up", ("gate", "up"), inner, hidden),
        rule("down", ("down",), hidden, inner),
    ]
