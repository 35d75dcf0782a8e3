"""The whole round on a GPU at real shapes, with random weights: milliseconds beside the floor.

    python scripts/bench_round.py OUT.jsonl --slots 1 --nodes 1 --nodes 64 --rows 2048
    python scripts/bench_round.py OUT.jsonl --nodes 64 --profile     # kernels by stage
    python scripts/bench_round.py OUT.jsonl --nodes 64 --compile-only    # before, beside others

nodes is T, the root included: 1 is autoregressive decoding, 16 with --chain the DFlash chain. A
cell runs `rounds` rounds a dispatch, all on the device, and is timed around the dispatch. The floor
(`round_floor`) is the larger of two times: the bytes that a round must move over the copy rate, and
its arithmetic over the matrix rate, both rates measured first in the same run.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from bench_timing import alone, measure_rates, timed
from device_profile import NO_COMMAND_BUFFERS, Kernel, Launch, busy, launches, profile
from real_shapes import PAIRS, Pair, cut_layers, random_state
from records import append, context
from rich.console import Console
from rich.table import Table
from round_floor import count_experts, floor_of_round, leaves_for, lower_expert_count

from ddtree_jax.config import DraftConfig
from ddtree_jax.plan import RoundPlan, TreeSettings
from ddtree_jax.round import Report, make_decode, unpack_report
from ddtree_jax.state import DecodeState
from ddtree_jax.tree import Tree, Walk

STAGES = ("draft", "build", "verify", "accept", "commit")
GDN_KERNELS = ("gdn_pairs", "gdn_meet", "gdn_tree", "gdn_commit", "gdn_step")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One point of the table. nodes: T; chain: the drafter's top tokens only."""

    slots: int
    nodes: int
    rows: int
    chain: bool = False

    def plan(self, draft: DraftConfig) -> RoundPlan:
        """With the spine, since random drafters give flat trees, a path is always 15 deep."""
        if self.nodes == 1:
            return RoundPlan.of(TreeSettings(method="autoregressive"), draft)
        if self.chain:
            return RoundPlan.of(TreeSettings(method="dflash"), draft)
        return RoundPlan.of(TreeSettings(tree_budget=self.nodes - 1, spine=True), draft)


def force(pattern: tuple[int, ...], rows: int) -> Callable[[Tree, Walk, jax.Array], Walk]:
    """Makes round n commit pattern[n % len] nodes, root included, as far as the tree is deep.

    How far a slot has come tells which entry is next: its length behind `rows`.
    """
    ends = jnp.cumsum(jnp.array(pattern, jnp.int32))

    def forced(tree: Tree, walk: Walk, lengths: jax.Array) -> Walk:
        place = jnp.searchsorted(ends, (lengths - rows) % ends[-1], side="right")
        wanted_depth = jnp.array(pattern, jnp.int32)[place] - 1
        deepest = jnp.max(jnp.where(tree.valid, tree.depth, 0), axis=1)
        depth = jnp.minimum(jnp.minimum(wanted_depth, deepest), walk.path.shape[1] - 1)
        match = tree.valid & (tree.depth == depth[:, None])
        node = jnp.argmax(match, axis=1).astype(jnp.int32)
        path = jnp.full_like(walk.path, -1)
        slot = jnp.arange(path.shape[0])
        for _ in range(path.shape[1]):
            at = jnp.maximum(tree.depth[slot, jnp.maximum(node, 0)], 0)
            path = jnp.where(
                (jnp.arange(path.shape[1])[None] == at[:, None]) & (node >= 0)[:, None],
                node[:, None],
                path,
            )
            node = jnp.where(node >= 0, tree.parent[slot, jnp.maximum(node, 0)], -1)
        # As a real walk, this one is not known before the target's logits are: else XLA may commit
        # a layer's rows before the next layer runs.
        path = jnp.where(walk.count[:, None] >= 0, path, -1)
        return walk._replace(path=path, count=depth + 1)

    return forced


def cell_state(pair: Pair, cell: Cell, rounds: int) -> DecodeState:
    plan = cell.plan(pair.draft)
    draft = pair.draft if plan.drafts else None
    room = rounds * plan.width
    return random_state(pair.target, draft, slots=cell.slots, rows=cell.rows, room=room)


def lower_cell(
    pair: Pair, cell: Cell, state: DecodeState, rounds: int, pattern: tuple[int, ...]
) -> jax.stages.Lowered:
    """The program of a cell; leaves and state may be shapes alone."""
    plan = cell.plan(pair.draft)
    decode = make_decode(
        pair.structures[0],
        pair.structures[1] if plan.drafts else None,
        plan=plan,
        mode="greedy",
        rounds=rounds,
        force=force(pattern, cell.rows) if plan.drafts else None,
    )
    return decode.lower(*leaves_for(pair, plan), state)


def compile_cell(
    pair: Pair,
    cell: Cell,
    *,
    rounds: int,
    pattern: tuple[int, ...],
    with_profile: bool,
    count: bool,
    options: dict[str, str],
) -> float:
    """Seconds that it took to bring a cell's programs into jax's compilation cache, without
    weights: several processes can do so at once."""
    begin = time.perf_counter()
    state = jax.eval_shape(lambda: cell_state(pair, cell, rounds))
    lowered = lower_cell(pair, cell, state, rounds, pattern)
    lowered.compile(compiler_options=options or None)
    if with_profile:
        lowered.compile(compiler_options={**options, **NO_COMMAND_BUFFERS})
    if count:
        lower_expert_count(pair, cell.plan(pair.draft), state).compile()
    return time.perf_counter() - begin


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(x))


def check_round(state: DecodeState, report: Report, plan: RoundPlan, pattern: tuple[int, ...]):
    """Raises RuntimeError unless the rounds computed numbers and committed what was forced: a
    time of anything else means nothing."""
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    # The last layer's rows lie in the cache. Logits that are not finite give token 0 everywhere.
    if not (all(_is_finite(leaf) for leaf in floats) and report.token.any()):
        raise RuntimeError("a round gave values that are not finite")
    rounds = report.accepted.shape[1]
    wanted = np.resize(pattern, rounds) if plan.drafts else np.ones(rounds, int)
    within = max(pattern) <= min(plan.width, plan.budget + 1)
    if (within or not plan.drafts) and (report.accepted != wanted).any():
        raise RuntimeError(f"rounds committed {report.accepted.tolist()}, not {wanted.tolist()}")


def run_cell(
    pair: Pair,
    cell: Cell,
    *,
    rounds: int,
    repeats: int,
    pattern: tuple[int, ...],
    rates: tuple[float, float],
    with_profile: bool,
    count: bool,
    options: dict[str, str],
) -> tuple[dict, list[Kernel]]:
    """A line of the table, and the kernels of one dispatch if asked for."""
    plan = cell.plan(pair.draft)
    leaves = leaves_for(pair, plan)
    state = cell_state(pair, cell, rounds)
    begin = time.perf_counter()
    lowered = lower_cell(pair, cell, state, rounds, pattern)
    with alone():
        compiled = lowered.compile(compiler_options=options or None)
    seconds = time.perf_counter() - begin
    start = jax.device_get((state.lengths, state.root))
    floor = floor_of_cell(pair, cell, state, rates, count=count)

    def dispatch() -> jax.Array:
        nonlocal state
        lengths, root = (jnp.asarray(x) for x in start)
        fresh = state._replace(lengths=lengths, root=root, remaining=jnp.full_like(root, 2**30))
        state, packed, _ = compiled(*leaves, fresh)
        return packed

    with alone():
        dispatch()
        packed = dispatch()
        times = [t / rounds for t in timed(dispatch, repeats)]
    report = unpack_report(packed, rounds)
    check_round(state, report, plan, pattern)
    line = {
        **dataclasses.asdict(cell),
        "ms_min": round(min(times), 4),
        "ms_median": round(median(times), 4),
        **floor,
        "committed": round(float(report.accepted.mean()), 3),
        "compile_seconds": round(seconds, 1),
    }
    kernels = []
    if with_profile:
        if pair.target.hybrid is not None:
            line["gdn_ms"] = gdn_ms(launches(dispatch), rounds)
        with alone():
            compiled = lowered.compile(compiler_options={**options, **NO_COMMAND_BUFFERS})
        dispatch()
        kernels = profile(dispatch, compiled.as_text())
        line |= profile_fields(kernels, rounds, hybrid=pair.target.hybrid is not None)
    return line, kernels


def floor_of_cell(
    pair: Pair, cell: Cell, state: DecodeState, rates: tuple[float, float], *, count: bool
) -> dict:
    """The floor of a line. count: with the experts that are read, not their expectation."""
    plan, experts = cell.plan(pair.draft), None
    if count:
        with alone():
            experts = count_experts(pair, plan, state)
    return floor_of_round(
        pair, plan, slots=cell.slots, rows=cell.rows, rates=rates, experts=experts
    )


def profile_fields(kernels: list[Kernel], rounds: int, *, hybrid: bool) -> dict:
    """What a line has of a profile."""
    fields = {
        "stage_ms": stage_times(kernels, rounds),
        "launches": sum(kernel.count for kernel in kernels) // rounds,
    }
    return fields | ({"gdn_share": gdn_share(kernels)} if hybrid else {})


def stage_of(scope: str) -> str:
    return next((stage for stage in STAGES if f"/{stage}/" in scope), "rest")


def stage_times(kernels: list[Kernel], rounds: int) -> dict[str, float]:
    """Kernel milliseconds a round by stage."""
    total = dict.fromkeys((*STAGES, "rest"), 0.0)
    for kernel in kernels:
        total[stage_of(kernel.scope)] += kernel.microseconds / 1e3 / rounds
    return {stage: round(time, 4) for stage, time in total.items()}


def gdn_ms(found: list[Launch], rounds: int) -> float:
    """Milliseconds of a round, as it runs, in which the recurrence or its commit does."""
    own = [launch for launch in found if launch.name in GDN_KERNELS]
    return round(busy(own) / 1e3 / rounds, 4)


def gdn_share(kernels: list[Kernel]) -> float:
    """Part of the kernels' time, one by one, that the recurrence and its commit take."""
    own = sum(
        kernel.microseconds
        for kernel in kernels
        if any(f"/{name}/" in kernel.scope for name in GDN_KERNELS)
    )
    return round(own / sum(kernel.microseconds for kernel in kernels), 4)


def show_kernels(console: Console, kernels: list[Kernel], rounds: int, count: int = 60) -> None:
    table = Table("µs a round", "launches", "µs each", "stage", "kernel", "operation")
    for kernel in kernels[:count]:
        per_round = kernel.microseconds / rounds
        table.add_row(
            f"{per_round:.1f}",
            f"{kernel.count / rounds:.1f}",
            f"{kernel.microseconds / kernel.count:.2f}",
            stage_of(kernel.scope),
            kernel.name[:48],
            "/".join(kernel.scope.split("/")[-3:])[-60:],
        )
    console.print(table)


def table_cells(
    slots: list[int] | None, nodes: list[int] | None, rows: list[int] | None, chain: bool
) -> list[Cell]:
    """All combinations, then the chain of each."""
    cells = [
        Cell(slot_count, node_count, row_count)
        for row_count in rows or (2048,)
        for slot_count in slots or (1,)
        for node_count in nodes or (1, 16, 64, 128, 256)
    ]
    chains = [dataclasses.replace(cell, nodes=16, chain=True) for cell in cells] if chain else []
    return cells + list(dict.fromkeys(chains))


def parse_option(item: str) -> tuple[str, str | bool | int]:
    """'name=value' of an XLA compile option; the compiler wants booleans and integers as such."""
    name, equals, value = item.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"`--option` must be name=value, got {item!r}")
    if value in ("true", "false"):
        return name, value == "true"
    return name, int(value) if value.isdigit() else value


def check_profile(with_profile: bool) -> None:
    if with_profile and jax.default_backend() != "gpu":
        raise typer.BadParameter(
            "`--profile` needs a GPU, for it times kernels; leave it out, or add --compile-only"
        )


def parse_pattern(text: str) -> tuple[int, ...]:
    """'2,5,8' -> (2, 5, 8)"""
    try:
        pattern = tuple(int(part) for part in text.split(","))
    except ValueError:
        pattern = ()
    if not pattern or min(pattern) < 1:
        raise typer.BadParameter(
            f"`--forced-accept` must be counts of at least 1 such as 2,5,8, got {text!r}"
        )
    return pattern


def main(
    out: Annotated[Path, typer.Argument(help="JSONL file; lines are added.")],
    pair: Annotated[str, typer.Option(help=" or ".join(PAIRS))] = "qwen3-8b",
    layers: Annotated[int | None, typer.Option(help="Fewer target layers, for a look.")] = None,
    slots: Annotated[list[int] | None, typer.Option(help="Repeatable; 1.")] = None,
    nodes: Annotated[list[int] | None, typer.Option(help="T, repeatable; 1 16 64 128 256.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Cached rows, repeatable; 2048.")] = None,
    chain: Annotated[bool, typer.Option(help="Also the DFlash chain.")] = False,
    forced_accept: Annotated[str, typer.Option(help="Nodes committed a round: 3 or 2,5,8.")] = "4",
    rounds: Annotated[int, typer.Option(help="Rounds a dispatch.")] = 16,
    repeats: Annotated[int, typer.Option(help="Dispatches timed.")] = 7,
    with_profile: Annotated[bool, typer.Option("--profile", help="Kernels by stage.")] = False,
    count: Annotated[
        bool, typer.Option("--count-experts", help="Experts read, not their expectation.")
    ] = False,
    option: Annotated[list[str] | None, typer.Option(help="XLA option name=value.")] = None,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Fill jax's compilation cache, write nothing.")
    ] = False,
) -> None:
    if pair not in PAIRS:
        raise typer.BadParameter(f"`--pair` must be one of {tuple(PAIRS)}, got {pair!r}")
    pattern = parse_pattern(forced_accept)
    console = Console(width=170)
    options = dict(parse_option(item) for item in option or ())
    cut = cut_layers(PAIRS[pair], layers)
    cells = table_cells(slots, nodes, rows, chain)
    settings = {
        "rounds": rounds,
        "pattern": pattern,
        "with_profile": with_profile,
        "count": count and cut[0].moe is not None,
        "options": options,
    }
    if compile_only:
        shapes = Pair.abstract(*cut)
        for cell in cells:
            console.print(f"{cell}: {compile_cell(shapes, cell, **settings):.1f} s")
        return
    check_profile(with_profile)
    with alone():
        rates = measure_rates()
    console.print(f"copy {rates[0]:.3f} TB/s, bf16 product {rates[1]:.3f} PFLOP/s")
    models = Pair.random(*cut)
    common = {
        "bench": "round",
        "pair": pair,
        "target_layers": models.target.num_layers,
        "forced_accept": forced_accept,
        "copy_tb_s": round(rates[0], 3),
        "matmul_pflop_s": round(rates[1], 3),
        "options": options,
        **context(),
    }
    for cell in cells:
        line, kernels = run_cell(models, cell, repeats=repeats, rates=rates, **settings)
        append(out, [{**common, **line}])
        console.print(line)
        if kernels:
            show_kernels(console, kernels, rounds)


if __name__ == "__main__":
    typer.run(main)
