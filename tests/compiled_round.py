"""A whole round, or a prompt's chunk, compiled for an H200 without one, and what tests ask of the
program."""

import re
from pathlib import Path
from typing import NamedTuple

import aot
import jax
import jax.numpy as jnp
from real_shapes import abstract_model

from ddtree_jax.config import DraftConfig, TargetConfig
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.targets import target_type
from ddtree_jax.plan import RoundPlan, TreeSettings
from ddtree_jax.prefill import Admission, Chunk, make_admit
from ddtree_jax.round import make_decode
from ddtree_jax.state import DecodeState, init_state


def moved(program: jax.stages.Compiled) -> dict[tuple[int, ...], int]:
    """Shape -> elements of every array that is copied, transposed, joined or cut."""
    pattern = r"= \w+\[([\d,]+)\]\S* (?:copy|transpose|concatenate|slice)\("
    found = re.findall(pattern, program.as_text())
    sizes = {tuple(int(n) for n in shape.split(",")) for shape in found if shape}
    return {shape: int(jnp.prod(jnp.array(shape))) for shape in sizes}


class CompiledRound(NamedTuple):
    """launches: the launch list after all passes. state: abstract, as it is donated."""

    program: jax.stages.Compiled
    launches: str
    state: DecodeState

    @property
    def moved(self) -> dict[tuple[int, ...], int]:
        return moved(self.program)

    @property
    def state_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state))

    @property
    def body(self) -> list[str]:
        """Kinds of the launches of one round, outermost only."""
        body = self.launches[self.launches.index("body:") :]
        inner = [line for line in body.splitlines()[1:] if line.strip()]
        depth = len(inner[0]) - len(inner[0].lstrip())
        top = []
        for line in inner:
            if len(line) - len(line.lstrip()) < depth:
                break
            if len(line) - len(line.lstrip()) == depth:
                top.append(line.split(":")[1].split()[0])
        return top


def _abstract(tree):
    return jax.tree.map(lambda leaf: aot.argument(leaf.shape, leaf.dtype), tree)


def compile_round(
    target_config: TargetConfig,
    draft_config: DraftConfig,
    *,
    rows: int,
    dump: Path,
    budget: int = 63,
) -> CompiledRound:
    """Eight rounds of a tree of `budget` nodes, one slot, bfloat16, greedy; 0 runs no drafter."""
    target, target_leaves = abstract_model(target_type(target_config), target_config)
    draft, draft_leaves = abstract_model(DFlash, draft_config)
    drafting = draft_config if budget else None
    state = jax.eval_shape(
        lambda: init_state(target_config, drafting, slots=1, rows=rows, dtype=jnp.bfloat16)
    )
    plan = RoundPlan.of(TreeSettings(tree_budget=budget), draft_config, "pallas")
    decode = make_decode(target, draft, plan=plan, mode="greedy", rounds=8)
    with aot.h200():
        lowered = decode.lower(*_abstract((target_leaves, draft_leaves, state)))
    program = aot.compile(lowered, xla_dump_to=str(dump))
    (launches,) = dump.glob("*thunk_sequence_after_thunk_passes.txt")
    return CompiledRound(program, launches.read_text(), state)


def compile_admit(
    target_config: TargetConfig, draft_config: DraftConfig, *, slots: int, rows: int
) -> tuple[jax.stages.Compiled, DecodeState]:
    """The last chunk of a prompt, 512 tokens, and the abstract state that it is donated."""
    target, target_leaves = abstract_model(target_type(target_config), target_config)
    draft, draft_leaves = abstract_model(DFlash, draft_config)
    state = jax.eval_shape(
        lambda: init_state(target_config, draft_config, slots=slots, rows=rows, dtype=jnp.bfloat16)
    )
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    chunk = Chunk(jax.ShapeDtypeStruct((1, 512), jnp.int32), one, one, one)
    like_one_slot = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype),
        (state.stop_tokens, state.requests),
    )
    admission = Admission(one, *like_one_slot)
    arguments = _abstract((target_leaves, draft_leaves, state, chunk, admission))
    with aot.h200():
        lowered = make_admit(target, draft, mode="greedy").lower(*arguments)
    return aot.compile(lowered), state
