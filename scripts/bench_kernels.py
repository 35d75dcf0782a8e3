"""Microseconds of every kernel at real shapes, beside the two ceilings of the device.

    python scripts/bench_kernels.py OUT.jsonl
    python scripts/bench_kernels.py OUT.jsonl --op tree_attention --case "slots=1 *" --full
    python scripts/bench_kernels.py OUT.jsonl --op gdn_tree --config value_tile=64,num_warps=8
    python scripts/bench_kernels.py --list

A case runs in a loop on the device, without the host, over as many copies of its arguments as L2
cannot hold (the small ops, whose arguments a round has just written, over one). A line has the
shares `of_copy` and `of_matrix`: least bytes over the copy rate, least arithmetic over the matrix
rate, each over the time; both rates are measured in the same run. Every call of the loop is
compared with the op's definition first; a wrong result is an error and gives no line. What an
implementation refuses, or cannot compile, gives a line with the reason. Safe to stop and to run
again: a case of the file is not measured twice, so give another file after a change.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from bench_timing import alone, ceilings_ms, measure_rates
from kernel_cases import (
    IMPLEMENTATIONS,
    OPS,
    Case,
    Widths,
    default_table,
    full_table,
    select,
    tiny_table,
)
from kernel_configs import MODULES, configured, field_names, modules_for, parse_config
from kernel_loop import ONE_BY_ONE, Loop, first_results, loop_program, microseconds
from kernel_problems import PROBLEMS, Cost, Draw, Problem
from real_shapes import PAIRS, normal_tile
from records import Line, append, context, repair
from recurrent_problems import RECURRENT_PROBLEMS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ALL_PROBLEMS = PROBLEMS | RECURRENT_PROBLEMS
NEEDED = ("bench", "shape", "op", "case", "implementation", "device")
COLD_BYTES = 2 * 50 * 2**20  # twice the L2 of an H200
MOST_COPIES = 48


class WrongResult(Exception):
    """An implementation's result is not the definition's."""


class Prepared(NamedTuple):
    """A case on the device."""

    problem: Problem
    cost: Cost
    floor_us: float
    arguments: tuple[tuple, ...]  # of each copy
    references: tuple[Any, ...]  # the definition's result of each copy, finished, on the host


def plan_loop(prepared: Prepared, implementation: str) -> Loop:
    """Short kernels need long bodies, which hide their launch, and many calls, which hide the
    dispatch; definitions are many kernels each, and long bodies of them slow to compile."""
    copies, cold = len(prepared.arguments), prepared.problem.cold
    on_gpu = jax.default_backend() == "gpu"
    least = 1 if not on_gpu else 32 if implementation == "pallas" else 4 if cold else 8
    unroll = copies * math.ceil(least / copies)
    calls = min(256.0, 10_000 / max(prepared.floor_us, 1.0)) if on_gpu else 2 * unroll
    return Loop(copies, unroll, math.ceil(calls / unroll))


@functools.cache
def tile() -> jax.Array:
    return normal_tile(jax.random.key(0))


def prepare(case: Case, widths: Widths, rates: tuple[float, float]) -> Prepared:
    """Arguments of all copies, and what the definition makes of each."""
    problem = ALL_PROBLEMS[case.op](widths, case)

    @jax.jit
    def make(tile: jax.Array, seed: jax.Array) -> tuple[tuple, Any]:
        # The barrier keeps the definition from seeing arguments before their rounding.
        arguments = jax.lax.optimization_barrier(problem.arguments(Draw(tile, seed)))
        return arguments, problem.reference(*arguments)

    made = [make(tile(), jnp.int32(0))]
    cost, copies = problem.cost(*made[0]), 1
    if problem.cold:
        on_gpu = jax.default_backend() == "gpu"
        copies = min(MOST_COPIES, math.ceil(COLD_BYTES / cost.bytes)) if on_gpu else 2
    made += [make(tile(), jnp.int32(seed)) for seed in range(1, copies)]
    arguments = tuple(found for found, _ in made)
    references = tuple(on_host(problem, result) for _, result in made)
    floor_us = max(ceiling_us(cost, rates).values())
    return Prepared(problem, cost, floor_us, arguments, references)


def ceiling_us(cost: Cost, rates: tuple[float, float]) -> dict[str, float]:
    times = ceilings_ms(cost.bytes / 1e9, cost.flops / 1e12, rates)
    return {"bytes_us": 1e3 * times["bytes_ms"], "flops_us": 1e3 * times["flops_ms"]}


def on_host(problem: Problem, result: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(problem.finish(result))]


def relative_error(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Largest relative norm of a difference; inf where integers differ, NaN where a NaN does."""
    errors = [0.0]
    for ours, theirs in zip(got, want, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return math.inf
        if theirs.dtype == bool or np.issubdtype(theirs.dtype, np.integer):
            errors.append(0.0 if np.array_equal(ours, theirs) else math.inf)
            continue
        ours, theirs = ours.astype(np.float32), theirs.astype(np.float32)
        with np.errstate(invalid="ignore"):
            difference = np.where(ours == theirs, 0.0, ours - theirs)  # inf equals inf
        norm = np.linalg.norm(theirs[np.isfinite(theirs)])
        errors.append(float(np.linalg.norm(difference) / max(norm, 1e-30)))
    return float(np.max(errors))  # NaN stays


def check(prepared: Prepared, results: tuple) -> float:
    """Largest error of any call of the loop, each against its own copy.

    Raises:
      WrongResult: it is above the problem's tolerance.
    """
    problem, references = prepared.problem, itertools.cycle(prepared.references)
    error = float(np.max([relative_error(on_host(problem, x), next(references)) for x in results]))
    if not error <= problem.tolerance:
        raise WrongResult(f"relative error {error:.3g}, at most {problem.tolerance:g} is right")
    return error


def reason(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}"[:300]


def measure(
    prepared: Prepared, implementation: str, repeats: int, rates: tuple[float, float]
) -> Line:
    """Figures of one implementation, or why there are none.

    Raises:
      WrongResult: its result is not the definition's.
    """
    loop, copies = plan_loop(prepared, implementation), prepared.arguments
    call = jax.jit(prepared.problem.call(implementation))  # traced once, not `unroll` times
    options = ONE_BY_ONE if jax.default_backend() == "gpu" else None
    program = jax.jit(loop_program(call, loop), donate_argnums=(0,), compiler_options=options)
    begin = time.perf_counter()
    try:
        shapes = first_results(call, loop, copies[0])
        lowered = program.lower(shapes, copies)
        with alone():
            compiled = lowered.compile()
            seconds = time.perf_counter() - begin
            start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            results = jax.block_until_ready(compiled(start, copies))
    except Exception as error:  # whatever a compiler or an allocator raises is this case's answer
        return {"failed": reason(error)}
    error = check(prepared, results)

    def dispatch() -> tuple:
        nonlocal results
        results = compiled(results, copies)
        return results

    with alone():
        times = microseconds(dispatch, loop.calls, repeats)
    ceilings = ceiling_us(prepared.cost, rates)
    return {
        "us_min": round(min(times), 3),
        "us_median": round(median(times), 3),
        "relative_error": float(f"{error:.3g}"),
        "cold": prepared.problem.cold,
        **loop._asdict(),
        **prepared.cost._asdict(),
        **{name: round(value, 3) for name, value in ceilings.items()},
        "of_copy": round(ceilings["bytes_us"] / min(times), 4),
        "of_matrix": round(ceilings["flops_us"] / min(times), 4),
        "compile_seconds": round(seconds, 1),
    }


def measure_named(
    prepared: Prepared, op: str, name: str, repeats: int, rates: tuple[float, float]
) -> Line:
    """`measure` of an implementation, or of "pallas" and a config behind it."""
    implementation, _, config = name.partition(" ")
    if not config:
        return measure(prepared, implementation, repeats, rates)
    with configured(op, parse_config(config)) as asked:
        found = measure(prepared, implementation, repeats, rates)
    if not asked and "failed" not in found:
        return {"failed": "the kernel that runs this case has no such fields"}
    return found


def run_case(
    case: Case, shape: str, implementations: Sequence[str], repeats: int, rates: tuple[float, float]
) -> Iterator[tuple[str, Line]]:
    """(implementation, its figures, or why there are none as `failed` or `wrong`)"""
    try:
        prepared = prepare(case, Widths.of(shape), rates)
    except jax.errors.JaxRuntimeError as error:  # no memory for the definition, at most
        yield from ((name, {"failed": f"definition: {reason(error)}"}) for name in implementations)
        return
    for name in implementations:
        try:
            found = measure_named(prepared, case.op, name, repeats, rates)
        except WrongResult as error:
            found = {"wrong": str(error)}  # the error itself would keep the arrays alive
        yield name, found


def key(line: Line) -> tuple:
    return tuple(line[name] for name in NEEDED)


def keys_of(case: Case, shape: str, implementation: str) -> Line:
    device = jax.devices()[0].device_kind
    names = ("kernel", shape, case.op, case.name, implementation, device)
    return dict(zip(NEEDED, names, strict=True))


def show(console: Console, lines: Sequence[Line]) -> None:
    table = Table("op", "case", "implementation", "µs", "of copy", "of matrix", "error")
    for line in lines:
        start = (line["op"], line["case"], line["implementation"])
        if "failed" in line:
            table.add_row(*start, line["failed"][:60])
            continue
        shares = (f"{100 * line[name]:.1f}%" for name in ("of_copy", "of_matrix"))
        table.add_row(*start, f"{line['us_min']:.2f}", *shares, f"{line['relative_error']:.1e}")
    console.print(table)


def bench(
    todo: Sequence[tuple[Case, list[str]]], shape: str, out: Path, repeats: int, console: Console
) -> tuple[list[Line], list[str]]:
    """Measures and adds lines to `out`; returns them, and what was wrong."""
    if not todo:
        return [], []
    with alone():
        rates = measure_rates()
    console.print(f"copy {rates[0]:.3f} TB/s, bf16 product {rates[1]:.3f} PFLOP/s")
    common = {"copy_tb_s": round(rates[0], 3), "matmul_pflop_s": round(rates[1], 3), **context()}
    lines, wrong = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("cases", total=sum(len(names) for _, names in todo))
        for case, names in todo:
            bar.update(task, description=f"{case.op} {case.name}")
            for name, found in run_case(case, shape, names, repeats, rates):
                bar.advance(task)
                if "wrong" in found:
                    wrong.append(f"{case.op} {case.name} {name}: {found['wrong']}")
                    continue
                sizes = dataclasses.asdict(case)
                lines.append(keys_of(case, shape, name) | sizes | found | common)
                append(out, lines[-1:])
    return lines, wrong


def names_of(op: str, implementations: Sequence[str], configs: Sequence[str]) -> list[str]:
    """Implementations of an op, and its kernel in each of the configs that fit it."""
    names = [name for name in IMPLEMENTATIONS[op] if name in (implementations or (name,))]
    fitting = [text for text in configs if modules_for(op, parse_config(text))]
    return names + [f"pallas {text}" for text in fitting]


def unfinished(
    cases: Sequence[Case],
    shape: str,
    implementations: Sequence[str],
    configs: Sequence[str],
    lines: Sequence[Line],
) -> list[tuple[Case, list[str]]]:
    """Cases with the implementations that `lines` lack."""
    done = {key(line) for line in lines}

    def missing(case: Case) -> list[str]:
        names = names_of(case.op, implementations, configs)
        return [name for name in names if key(keys_of(case, shape, name)) not in done]

    return [(case, names) for case in cases if (names := missing(case))]


def check_configs(cases: Sequence[Case], configs: Sequence[str]) -> None:
    """Raises ValueError for a config that no kernel of the cases has the fields of."""
    ops = sorted({case.op for case in cases} & set(MODULES))
    for text in configs:
        if not any(modules_for(op, parse_config(text)) for op in ops):
            fields = {op: [field_names(module) for module in MODULES[op]] for op in ops}
            raise ValueError(
                f"`--config` {text}: no kernel of the chosen ops has these fields; there are "
                f"{fields or 'none'}"
            )


def chosen_cases(
    shape: str, full: bool, ops: Sequence[str], patterns: Sequence[str], names: Sequence[str]
) -> list[Case]:
    """Raises ValueError, naming the option, for one that means nothing."""
    if shape not in PAIRS:
        raise ValueError(f"`--shape` must be one of {tuple(PAIRS)}, got {shape!r}")
    known = sorted({name for found in IMPLEMENTATIONS.values() for name in found})
    if not set(names) <= set(known):
        raise ValueError(f"`--implementation` must be one of {known}, got {list(names)}")
    table = tiny_table() if shape == "tiny" else full_table() if full else default_table()
    return select(table, ops, patterns)


def main(
    out: Annotated[Path | None, typer.Argument(help="JSONL file; lines are added.")] = None,
    shape: Annotated[str, typer.Option(help=" or ".join(PAIRS))] = "qwen3-8b",
    op: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(OPS)}")] = None,
    implementation: Annotated[
        list[str] | None, typer.Option(help="xla, pallas, einsum (attention); repeatable.")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Name, or shell pattern of one; repeatable.")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(help="Also the kernel cut up so: num_warps=8,parts=2; repeatable."),
    ] = None,
    full: Annotated[bool, typer.Option(help="The whole grid of sizes.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of a case.")] = 7,
    show_list: Annotated[bool, typer.Option("--list", help="Show the cases, run none.")] = False,
) -> None:
    """Times each op and implementation, and compares it with its definition."""
    console = Console(width=150)
    try:
        cases = chosen_cases(shape, full, op or (), case or (), implementation or ())
        check_configs(cases, config or ())
        if show_list:
            for each in cases:
                console.print(each.op, each.name, highlight=False)
            return
        if out is None:
            raise ValueError("give a JSONL file for the lines, or `--list`")
        held = repair(out, needed=NEEDED, script="bench_kernels.py")
        todo = unfinished(cases, shape, implementation or (), config or (), held)
        lines, wrong = bench(todo, shape, out, repeats, console)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    show(console, lines)
    for text in wrong:
        console.print(f"wrong: {text}", style="bold red", markup=False, soft_wrap=True)
    console.print(f"{len(lines)} new lines in {out}", highlight=False)
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
