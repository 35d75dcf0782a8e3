"""The cases of bench_kernels.py: which sizes each op is measured at, and the widths behind them."""

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import NamedTuple

from real_shapes import PAIRS

TREE_OPS = ("gdn_heads", "gdn_tree", "gated_norm", "gdn_commit")
STEP_OPS = ("gdn_step", "normed_matmul")  # of one node a slot
ROW_OPS = (*STEP_OPS, "routed_gate_up")  # the last is of a row alone
RECURRENT_OPS = (*TREE_OPS, *STEP_OPS)
OPS = (
    "tree_attention",
    "skinny_matmul",
    "gated_matmul",
    "add_norm",
    "rotate_heads",
    "topk_logsumexp",
    "tree_build",
    "tree_accept",
    "choose_experts",
    "sort_by_expert",
    "grouped_matmul",
    "routed_gate_up",
    *RECURRENT_OPS,
)
IMPLEMENTATIONS = {op: ("xla", "pallas") for op in OPS}
IMPLEMENTATIONS["tree_attention"] = ("xla", "einsum", "pallas")
DEPTHS = 15  # of a DFlash block of 16
PRODUCTS = ("qkv", "out", "down")
ROTATIONS = ("", "gated")
EXPERT_PRODUCTS = ("gate_up", "down")  # `grouped_gate_up` and `grouped_down`
EXPERT_OPS = {"choose_experts": ("",), "sort_by_expert": ("",), "grouped_matmul": EXPERT_PRODUCTS}


class Heads(NamedTuple):
    """Of an attention layer."""

    queries: int
    keys: int
    dim: int


# Attention of other models, as variants of `tree_attention`.
HEADS = {
    "qwen3-1.7b": Heads(16, 8, 128),
    "qwen3-30b-a3b": Heads(32, 4, 128),
    "qwen3-32b": Heads(64, 8, 128),
    "qwen3.6-27b": Heads(24, 4, 256),
    "qwen3.6-35b-a3b": Heads(16, 2, 256),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the table. The letters of the design are in the comments."""

    op: str
    slots: int = 1  # B
    nodes: int = 64  # T, root included
    rows: int = 0  # S, cached rows, of attention
    variant: str = ""  # which product, or whose heads; the shape's own if empty
    ragged: bool = False  # slots of many lengths

    @property
    def name(self) -> str:
        """Unique within an op."""
        parts = [self.variant, f"slots={self.slots}", f"nodes={self.nodes}"]
        parts += [f"rows={self.rows}" if self.rows else "", "ragged" if self.ragged else ""]
        return " ".join(filter(None, parts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Widths:
    """What a shape of `--shape` means. Experts, and gated attention and Gated DeltaNet, are those
    of the newer targets, Qwen3.6-35B-A3B and 27B, beside either dense model."""

    hidden: int
    inner: int
    heads: Heads
    vocab: int
    experts: int = 256
    chosen: int = 8  # experts of a token, beside the shared one
    expert_hidden: int = 2048
    expert_inner: int = 512
    gated_hidden: int = 5120
    gated_heads: Heads = HEADS["qwen3.6-27b"]
    rotary_dim: int = 64  # of a gated head
    gdn_key_heads: int = 16
    gdn_heads: int = 48
    gdn_dim: int = 128

    @classmethod
    def of(cls, shape: str) -> "Widths":
        target = PAIRS[shape][0]
        return cls(
            hidden=target.hidden_size,
            inner=target.intermediate_size,
            heads=Heads(target.num_heads, target.num_kv_heads, target.head_dim),
            vocab=target.vocab_size,
            **(_TINY if shape == "tiny" else {}),
        )

    def product(self, name: str) -> tuple[int, int]:
        """Inner and outer size of a matrix of a layer."""
        heads, gated = self.heads, self.gated_heads
        return {
            "qkv": (self.hidden, (heads.queries + 2 * heads.keys) * heads.dim),
            "gated_qkv": (self.gated_hidden, 2 * (gated.queries + gated.keys) * gated.dim),
            "out": (heads.queries * heads.dim, self.hidden),
            "down": (self.inner, self.hidden),
            "router": (self.expert_hidden, self.experts),
        }[name]

    def expert_product(self, name: str) -> tuple[int, int]:
        return {
            "gate_up": (self.expert_hidden, 2 * self.expert_inner),
            "down": (self.expert_inner, self.expert_hidden),
        }[name]


_TINY = {
    "experts": 8,
    "chosen": 2,
    "expert_hidden": 64,
    "expert_inner": 32,
    "gated_hidden": 64,
    "gated_heads": Heads(2, 1, 32),
    "rotary_dim": 8,
    "gdn_key_heads": 1,
    "gdn_heads": 2,
    "gdn_dim": 16,
}


def _attention(points: Iterable[tuple[int, int, int]], **settings) -> list[Case]:
    """A case for each (slots, nodes, rows)."""
    return [
        Case(op="tree_attention", slots=slots, nodes=nodes, rows=rows, **settings)
        for slots, nodes, rows in points
    ]


def _cases(op: str, points: Iterable[tuple[int, int]], variants: Iterable[str] = ("",)):
    """A case for each variant at each (slots, nodes)."""
    return [
        Case(op=op, slots=slots, nodes=nodes, variant=variant)
        for variant in variants
        for slots, nodes in points
    ]


def _expert_cases(rows: Iterable[int]) -> list[Case]:
    """What a layer of experts does to so many rows of one slot."""
    points = [(1, count) for count in rows]
    cases = [case for op, names in EXPERT_OPS.items() for case in _cases(op, points, names)]
    return cases + _cases("routed_gate_up", [(1, 1)])


def _recurrent_cases(points: Iterable[tuple[int, int]], slots: Iterable[int]) -> list[Case]:
    """The ops of a tree at each (slots, nodes), and a step of so many slots."""
    cases = [case for op in TREE_OPS for case in _cases(op, points)]
    return cases + [case for op in STEP_OPS for case in _cases(op, [(n, 1) for n in slots])]


def default_table() -> list[Case]:
    """Few enough for one sitting: each op where it matters, one size varied at a time."""
    one_slot = [(1, nodes, 2048) for nodes in (1, 16, 64, 128, 257)]
    contexts = [(1, 64, 512), (1, 64, 8192), (1, 1, 32768), (1, 64, 32768)]
    cases = _attention([*one_slot, *contexts, (8, 64, 2048), (32, 16, 2048)])
    cases += _attention([(8, 64, 8192)], ragged=True)
    for name in ("qwen3-1.7b", "qwen3-32b", "qwen3.6-27b"):
        cases += _attention([(1, 64, 2048)], variant=name)
    cases += _cases("skinny_matmul", [(1, 1), (1, 64)], PRODUCTS)
    cases += _cases("gated_matmul", [(1, 1), (1, 64), (1, 128)])
    cases += _cases("add_norm", [(1, 64), (8, 64)])
    cases += _cases("rotate_heads", [(1, 64), (8, 64)], ROTATIONS)
    cases += _cases("topk_logsumexp", [(1, 64), (8, 64), (1, 257)])
    cases += _cases("tree_build", [(1, 64), (8, 64), (1, 257)])
    cases += _cases("tree_accept", [(1, 64), (32, 257)])
    cases += _expert_cases((1, 16, 64, 128, 512))
    return cases + _recurrent_cases([(1, 1), (1, 64), (1, 128), (4, 64)], slots=(1, 4))


def full_table() -> list[Case]:
    """The whole grid of slots 1 to 32, T 1 to 257, contexts 512 to 32k, and all head groups."""
    slots, nodes, rows = (1, 2, 8, 32), (1, 16, 32, 64, 128, 257), (512, 2048, 8192, 32768)
    points = [(b, t) for b in slots for t in nodes]
    cases = _attention([(b, t, s) for s in rows for b, t in points])
    cases += _attention([(b, t, 8192) for b, t in points if b > 1], ragged=True)
    for name in HEADS:
        cases += _attention([(1, t, s) for s in (2048, 32768) for t in (1, 64, 257)], variant=name)
    drafting = [(b, t) for b, t in points if t > 1]
    cases += _cases("skinny_matmul", points, PRODUCTS)
    cases += _cases("gated_matmul", points)
    cases += _cases("add_norm", points) + _cases("rotate_heads", points, ROTATIONS)
    cases += _cases("topk_logsumexp", drafting)
    cases += _cases("tree_build", drafting) + _cases("tree_accept", drafting)
    cases += _expert_cases((*nodes, 512))
    return cases + _recurrent_cases(points, slots)


def tiny_table() -> list[Case]:
    """For a look without a GPU: one case of every op."""
    cases = _attention([(2, 8, 40)], ragged=True)
    for op in OPS[1:]:
        variants = {"skinny_matmul": PRODUCTS[:1], "grouped_matmul": EXPERT_PRODUCTS[:1]}
        nodes = 1 if op in ROW_OPS else 8
        slots = 1 if op == "routed_gate_up" else 2
        cases += _cases(op, [(slots, nodes)], variants.get(op, ("",)))
    return cases


def select(cases: list[Case], ops: Iterable[str], patterns: Iterable[str]) -> list[Case]:
    """Cases of any of the ops whose name fits any of the shell patterns; none given is all.

    Raises:
      ValueError: an op or a pattern that no case has.
    """
    if ops:
        unknown = set(ops) - set(OPS)
        if unknown:
            raise ValueError(f"`--op` must be one of {OPS}, got {sorted(unknown)}")
        cases = [case for case in cases if case.op in ops]
    patterns = list(patterns)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in cases):
            raise ValueError(f"`--case` {pattern!r} fits no case; `--list` shows them")
    if not patterns:
        return cases
    return [case for case in cases if any(fnmatch.fnmatchcase(case.name, p) for p in patterns)]
