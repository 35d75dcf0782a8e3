"""Named real shapes, shared by tests and benchmarks.

Qwen3-4B and Qwen3-8B have the same attention: 32 query heads, 8 kv heads, head dim 128 (they
differ in width and MLP only). A DFlash block of 16 gives 15 draft depths.
"""

import dataclasses
import functools


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of one `tree_attention` call; the letters of the design are in the comments."""

    slots: int  # B
    nodes: int  # T, root included
    query_heads: int = 32  # N
    kv_heads: int = 8  # K
    head_dim: int = 128  # H
    cache_rows: int = 2048  # S


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeShapeSizes:
    """Sizes of one `tree_build` call and of the `tree_accept` call that follows it."""

    slots: int  # B
    depths: int = 15  # J
    candidates: int = 63  # M
    budget: int = 63  # T - 1

    @property
    def nodes(self) -> int:
        """T, root included."""
        return self.budget + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopkShape:
    """Sizes of one `topk_logsumexp` call."""

    slots: int  # B
    rows: int = 15  # R, the draft depths
    columns: int = 151936  # V
    k: int = 63  # M


_attention_27b = functools.partial(AttentionShape, query_heads=24, kv_heads=4, head_dim=256)

ATTENTION = {
    "qwen3_8b_decode": AttentionShape(slots=1, nodes=1),
    "qwen3_8b_chain": AttentionShape(slots=1, nodes=16),
    "qwen3_8b_tree": AttentionShape(slots=1, nodes=64),
    "qwen3_8b_tree_batch": AttentionShape(slots=8, nodes=64),
    "qwen3_8b_tree_long": AttentionShape(slots=1, nodes=64, cache_rows=32768),
    "qwen3_8b_large_tree": AttentionShape(slots=1, nodes=256),
    "qwen3_6_27b_tree": _attention_27b(slots=1, nodes=64),
    "qwen3_6_27b_tree_batch": _attention_27b(slots=4, nodes=128),
}

TREE = {
    "dflash_15": TreeShapeSizes(slots=1, budget=15, candidates=15),
    "dflash_63": TreeShapeSizes(slots=1),
    "dflash_63_batch": TreeShapeSizes(slots=8),
    "dflash_255": TreeShapeSizes(slots=1, budget=255, candidates=255),
}

TOPK = {
    "qwen3_chain": TopkShape(slots=1, k=1),
    "qwen3_15": TopkShape(slots=1, k=15),
    "qwen3_16": TopkShape(slots=1, k=16),
    "qwen3_31": TopkShape(slots=1, k=31),
    "qwen3_63": TopkShape(slots=1),
    "qwen3_63_batch": TopkShape(slots=8),
    "qwen3_127": TopkShape(slots=1, k=127),
    "qwen3_255": TopkShape(slots=1, k=255),
    "qwen3_1024": TopkShape(slots=1, k=1024),
    "embedded_chain": TopkShape(slots=8, columns=4096, k=1),
    "embedded_63": TopkShape(slots=8, columns=4096),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GdnShape:
    """Sizes of one `gdn_tree` call and of the `gdn_commit` call that follows it."""

    slots: int  # B
    nodes: int  # T, root included
    key_heads: int = 16
    heads: int = 48  # value heads
    key_dim: int = 128
    value_dim: int = 128
    depths: int = 15  # J


# Qwen3.5/3.6: 48 value heads at 27B, 32 at 4B, 9B and 35B-A3B.
GDN = {
    "qwen3_6_27b_decode": GdnShape(slots=1, nodes=1),
    "qwen3_6_27b_chain": GdnShape(slots=1, nodes=16),
    "qwen3_6_27b_tree": GdnShape(slots=1, nodes=64),
    "qwen3_6_27b_tree_batch": GdnShape(slots=4, nodes=64),
    "qwen3_6_27b_large_tree": GdnShape(slots=1, nodes=129),
}
