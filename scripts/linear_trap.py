"""The trap that started this project: draft trees verified by a linear scan.

    python scripts/linear_trap.py                       # the five-node example, step by step
    python scripts/linear_trap.py --measure OUT.json    # and the embedded pair over HumanEval

A production server grew trees and verified them with the sequential kernel it had for chains:
compare the target's token at node i with draft node i + 1, stop at the first difference. On a
depth-first tree that is the first branch alone. Both rules are lossless; one throws the tree
away.
"""

import heapq
import json
from pathlib import Path
from typing import Annotated

import typer
from humaneval import chosen_prompts
from rich.console import Console
from rich.table import Table

from ddtree_jax import LLM, SamplingParams

FIVE = ((0,), (0, 0), (0, 1), (1,), (1, 0))
# A node's worth in the static tree: product of these over its ranks, as EAGLE's default tree was
# chosen from average hit rates of ranks.
RANK_WEIGHTS = (0.60, 0.15, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01, 0.008, 0.006)
RULES = ("tree_walk", "linear")


def static_tree(nodes: int, depth: int) -> list[tuple[int, ...]]:
    """The `nodes` rank paths of the greatest weight, at most `depth` long."""
    heap, chosen = [(-RANK_WEIGHTS[0], (0,))], []
    while len(chosen) < nodes:
        cost, path = heapq.heappop(heap)
        chosen.append(path)
        rank = path[-1]
        if rank + 1 < len(RANK_WEIGHTS):
            sibling = cost / RANK_WEIGHTS[rank] * RANK_WEIGHTS[rank + 1]
            heapq.heappush(heap, (sibling, (*path[:-1], rank + 1)))
        if len(path) < depth:
            heapq.heappush(heap, (cost * RANK_WEIGHTS[0], (*path, 0)))
    return chosen


Ranks = tuple[int, ...]


def walk_steps(wanted: Ranks) -> tuple[list[str], int]:
    """The tree walk on five nodes when the target wants the path `wanted`: lines, and accepted."""
    lines, path = [], ()
    while path != wanted:
        path = wanted[: len(path) + 1]
        lines.append(f"child {path} is what the target chose: accepted")
    return lines, len(path)


def scan_steps(wanted: Ranks) -> tuple[list[str], int]:
    """The linear scan on the same nodes as they lie in memory, depth first."""
    lines, before = [], ()
    for place, node in enumerate(FIVE):
        on_path = wanted[: len(before)] == before and len(wanted) > len(before)
        choice = wanted[: len(before) + 1] if on_path else None
        if node != choice:
            lines.append(
                f"after {before or 'the root'} lies {node}, but the target chose "
                f"{choice or 'something else'}: stop"
            )
            return lines, place
        lines.append(f"{node} is what the target chose: accepted")
        before = node
    return lines, len(FIVE)


def show(console: Console, wanted: Ranks) -> None:
    console.print(f"\nThe target wants [bold]{wanted or 'nothing of the tree'}[/]")
    for name, style, (lines, count) in (
        ("tree walk", "green", walk_steps(wanted)),
        ("linear scan", "red", scan_steps(wanted)),
    ):
        console.print(f"  [{style}]{name}: {count} of {len(wanted)} accepted[/]", highlight=False)
        for line in lines:
            console.print(f"    {line}", highlight=False)


def measure(prompts: list[str], temperatures: list[float], max_tokens: int, slots: int):
    """One row a (shape, rule, temperature): mean tokens a round, and whether texts agree."""
    static = static_tree(60, 6)
    shapes = {
        "chain": {"tree_shape": "chain"},
        "static 60": {"tree_choices": static},
        "best-first 63": {"tree_budget": 63},
    }
    texts, rows = {}, []
    for shape, settings in shapes.items():
        for rule in RULES:
            llm = LLM(**settings, acceptance=rule, max_slots=slots, max_length=640, progress=False)
            for degree in temperatures:
                params = SamplingParams(max_tokens=max_tokens, temperature=degree, seed=0)
                outputs = llm.generate(prompts, params)
                tokens = [output.token_ids for output in outputs]
                wanted = texts.setdefault(degree, tokens)
                lengths = [n for output in outputs for n in output.stats.accepted_lengths]
                row = {"shape": shape, "rule": rule, "temperature": degree}
                row |= {"tau": round(sum(lengths) / len(lengths), 4), "rounds": len(lengths)}
                row |= {"prompts": len(prompts), "max_tokens": max_tokens}
                row["same"] = sum(a == b for a, b in zip(tokens, wanted, strict=True))
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def draw(rows: list[dict], out: Path) -> None:
    """Bars of mean tokens a round: a pair of rules for each shape, a panel a temperature."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {"tree_walk": "#0072B2", "linear": "#D55E00"}
    labels = {"tree_walk": "tree walk", "linear": "linear scan"}
    degrees = sorted({row["temperature"] for row in rows})
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure, axes = plt.subplots(1, len(degrees), figsize=(6.8, 2.6), sharey=True, squeeze=False)
    for axis, degree in zip(axes[0], degrees, strict=True):
        for side, rule in enumerate(RULES):
            heights = [
                next(
                    row["tau"]
                    for row in rows
                    if (row["shape"], row["rule"], row["temperature"]) == (shape, rule, degree)
                )
                for shape in shapes
            ]
            places = [index + 0.4 * side - 0.2 for index in range(len(shapes))]
            bars = axis.bar(places, heights, 0.38, color=colours[rule], label=labels[rule])
            axis.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
        axis.set_xticks(range(len(shapes)), shapes, fontsize=8)
        axis.set_title(f"temperature {degree:g}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    axes[0][0].set_ylabel("tokens a round (τ)", fontsize=9)
    axes[0][-1].legend(frameon=False, fontsize=8, loc="upper left")
    figure.tight_layout()
    for suffix in ("png", "svg"):
        figure.savefig(out.with_suffix(f".{suffix}"), dpi=200)
    plt.close(figure)


def main(
    measure_to: Annotated[
        Path | None, typer.Option("--measure", help="JSON file; a .png and a .svg go beside it.")
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable; 0 and 1.")] = None,
    limit: Annotated[int, typer.Option(help="HumanEval prompts, spread over the set.")] = 32,
    max_tokens: int = 128,
    slots: int = 8,
) -> None:
    """Shows the trap on five nodes; with --measure, what it costs the embedded pair."""
    console = Console()
    console.print(f"Five nodes, depth first as they lie in memory: {list(FIVE)}")
    for wanted in ((1,), (0, 1), (0, 0), ()):
        show(console, wanted)
    if measure_to is None:
        return
    prompts = chosen_prompts(limit=limit)
    rows = measure(prompts, temperature or [0.0, 1.0], max_tokens, slots)
    measure_to.write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, measure_to)
    table = Table("shape", "rule", "temperature", "τ", "same text")
    for row in rows:
        same = f"{row['same']}/{row['prompts']}"
        table.add_row(
            row["shape"], row["rule"], f"{row['temperature']:g}", f"{row['tau']:.2f}", same
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
