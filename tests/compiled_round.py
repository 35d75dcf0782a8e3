"""A whole round compiled for an H200 without one, and what its tests ask of the program."""

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
from ddtree_jax.round import make_decode
from ddtree_jax.state import DecodeState, init_state


class CompiledRound(NamedTuple):
    """launches: the launch list after all passes. state: abstract, as it is donated."""

    program: jax.stages.Compiled
    launches: str
    state: DecodeState

    @property
    def state_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state))

    @property
    def moved(self) -> dict[tuple[int, ...], int]:
        """Shape -> elements of every array that is copied, transposed, joined or cut."""
        pattern = r"= \w+\[([\d,]+)\]\S* (?:copy|transpose|concatenate|slice)\("
        found = re.findall(pattern, self.program.as_text())
        sizes = {tuple(int(n) for n in shape.split(",")) for shape in found if shape}
        return {shape: int(jnp.prod(jnp.array(shape))) for shape in sizes}

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
    target_config: TargetConfig, draft_config: DraftConfig, *, rows: int, dump: Path
) -> CompiledRound:
    """Eight rounds of a tree of 63 nodes, one slot, bfloat16, greedy."""
    target, target_leaves = abstract_model(target_type(target_config), target_config)
    draft, draft_leaves = abstract_model(DFlash, draft_config)
    state = jax.eval_shape(
        lambda: init_state(target_config, draft_config, slots=1, rows=rows, dtype=jnp.bfloat16)
    )
    plan = RoundPlan.of(TreeSettings(tree_budget=63), draft_config, "pallas")
    decode = make_decode(target, draft, plan=plan, mode="greedy", rounds=8)
    with aot.h200():
        lowered = decode.lower(*_abstract((target_leaves, draft_leaves, state)))
    program = aot.compile(lowered, xla_dump_to=str(dump))
    (launches,) = dump.glob("*thunk_sequence_after_thunk_passes.txt")
    return CompiledRound(program, launches.read_text(), state)
