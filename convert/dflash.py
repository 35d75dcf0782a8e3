"""DFlashDraftModel (arXiv 2602.06036): its config.json and tensors."""

from collections.abc import Mapping
from typing import Any

from convert.hf import HFFolder
from convert.qwen3 import ROTARY_BUFFERS, block_rules, field, parse_block
from convert.rules import Rule, keep, linear
from ddtree_jax.config import AttentionKind, DraftConfig, require

ARCHITECTURE = "DFlashDraftModel"
IGNORED = [ROTARY_BUFFERS]
# Successors of DFlash read these; a value that does something is refused, not dropped.
_NEUTRAL = {
    "output_multiplier": (None, 1),
    "input_embedding_scale": (None, 1),
    "final_logit_softcapping": (None, 0),
    "sample_from_anchor": (None, False),
}


def parse_draft(folder: HFFolder) -> DraftConfig:
    """Settings of a DFlash drafter. Newer files keep block and mask id in `dflash_config`.

    Raises:
      ValueError: a key that changes results is absent, or asks for what we cannot do.
    """
    config = folder.config
    nested = config.get("dflash_config") or {}
    require(isinstance(nested, dict), f"config.json: `dflash_config` must be an object: {nested!r}")
    both = {**config, **{key: value for key, value in nested.items() if value is not None}}
    for name, values in _NEUTRAL.items():
        require(
            both.get(name) in values,
            f"config.json: `{name}` is {both.get(name)!r}, which is not supported",
        )
    layers = field(config, "num_hidden_layers")
    target_layers = field(both, "num_target_layers")
    return DraftConfig(
        **parse_block(config),
        vocab_size=field(config, "vocab_size"),
        block_size=field(both, "block_size"),
        mask_token_id=field(both, "mask_token_id"),
        tap_layers=_tap_layers(both, layers, target_layers),
        target_num_layers=target_layers,
        attention=_attention(config, nested, layers),
    )


def _tap_layers(both: Mapping[str, Any], layers: int, target_layers: int) -> tuple[int, ...]:
    """The file's layers; without them those of the reference code, spread over the target."""
    ids = both.get("target_layer_ids")
    if ids is not None:
        require(
            isinstance(ids, list) and all(type(layer) is int for layer in ids),
            f"config.json: `target_layer_ids` must be a list of integers, got {ids!r}",
        )
        return tuple(ids)
    if layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers))


def _attention(
    config: Mapping[str, Any], nested: Mapping[str, Any], layers: int
) -> tuple[AttentionKind, ...]:
    """One kind a layer. Causal: `is_causal`, else `dflash_config.causal`, else where sliding."""
    kinds = config.get("layer_types")
    if kinds is None:
        require(
            not config.get("use_sliding_window"),
            "config.json: `use_sliding_window` is true without `layer_types`: add `layer_types`",
        )
        kinds = ["full_attention"] * layers
    require(
        isinstance(kinds, list) and len(kinds) == layers,
        f"config.json: `layer_types` must have {layers} entries (`num_hidden_layers`), got {kinds}",
    )
    unknown = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
    require(not unknown, f"config.json: `layer_types` {unknown} are not supported")
    causal = config.get("is_causal")
    causal = nested.get("causal") if causal is None else causal
    require(
        causal is None or isinstance(causal, bool),
        f"config.json: `is_causal` / `dflash_config.causal` must be true or false, got {causal!r}",
    )
    result = []
    for kind in kinds:
        sliding = kind == "sliding_attention"
        window = field(config, "sliding_window") if sliding else None
        result.append(AttentionKind(causal=sliding if causal is None else causal, window=window))
    return tuple(result)


def draft_rules(config: DraftConfig) -> list[Rule]:
    """Where each tensor of a DFlashDraftModel goes: 11 a layer, and three around them."""
    hidden = config.hidden_size
    rules = [
        linear("fuse", len(config.tap_layers) * hidden, ("fc.weight", hidden)),
        keep("context_norm.scale", "hidden_norm.weight", hidden),
    ]
    for layer in range(config.num_layers):
        rules += block_rules(config, f"layers.{layer}.", f"layers.{layer}.")
    return [*rules, keep("norm.scale", "norm.weight", hidden)]
