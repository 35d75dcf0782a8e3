"""Figures of sweep results, PNG and SVG, one column wide.

    python scripts/plot.py sweep.jsonl --out figures
    python scripts/plot.py --tree round.json --out figures

By budget, by slots, the rounds' lengths, stage times where measured; and the tree of a round.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import matplotlib
import typer
from cells import CONTEXT
from figures import BLACK, BLUE, CYCLE, ORANGE, STYLE, legend, panels, save
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, PercentFormatter
from records import Result, Results, differing, pair_name, setting
from tree_picture import read_tree, tree_figure

MARKERS = {"best-first": "o", "spine": "s", "static": "D", "linear": "x"}


def groups(results: Results, free: tuple[str, ...]) -> dict[str, list[tuple]]:
    """Contexts that share a figure, since they differ in `free` alone, under its name."""
    contexts = results.contexts()
    fixed = [name for name in CONTEXT if name not in free]
    named = differing(contexts, [name for name in fixed if name not in ("pair", "prompts")])
    found: dict[tuple, list[tuple]] = {}
    for context in contexts:
        found.setdefault(tuple(setting(context, name) for name in fixed), []).append(context)
    out: dict[str, list[tuple]] = {}
    for members in found.values():
        first = sorted(members, key=lambda c: tuple(setting(c, name) for name in free))
        parts = [pair_name(setting(first[0], "pair")), setting(first[0], "prompts")]
        parts += [f"{name}-{setting(first[0], name)}" for name in named]
        name = " ".join(parts)
        while name in out:  # two targets of one name in different folders
            name += " other"
        out[name] = first
    return out


def budget_figure(results: Results, contexts: list[tuple]) -> Figure | None:
    """Speed-up and τ against the budget; a colour a temperature, the chain dashed."""
    drawn = [context for context in contexts if results.trees(context)]
    if not drawn:
        return None
    figure, (top, bottom) = panels(2, 1.55)
    budgets = set()
    for context, color in zip(drawn, _cycle(len(drawn)), strict=True):
        trees = results.trees(context)
        budgets |= {tree.settings["tree_budget"] for tree in trees}
        for variant in dict.fromkeys(tree.variant for tree in trees):
            line = [tree for tree in trees if tree.variant == variant]
            label = f"T = {setting(context, 'temperature'):g}"
            label += "" if variant == "best-first" else f", {variant}"
            _series(results, (top, bottom), line, color, label, MARKERS[variant])
        for chain in results.find(context, "chain"):
            _levels(results, (top, bottom), chain, color)
    top.plot([], [], color=BLACK, ls="--", lw=0.9, label="chain (DFlash)")
    top.set_ylabel("speed-up over AR (×)")
    bottom.set(ylabel="τ (tokens / round)", xlabel="budget (nodes below the root)")
    bottom.set_xscale("log", base=2)
    bottom.set_xticks(sorted(budgets), [str(budget) for budget in sorted(budgets)])
    bottom.xaxis.set_minor_locator(NullLocator())
    bottom.set_xlim(min(budgets) / 1.3, max(budgets) * 1.3)
    for axes in (top, bottom):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], min_n_ticks=3))
    legend(figure, top, 3)
    return figure


def _series(results: Results, axes: tuple, line: list[Result], color, label, marker) -> None:
    x = [result.settings["tree_budget"] for result in line]
    speedups = [results.speedup(result) for result in line]
    y = [float("nan") if speedup is None else speedup for speedup in speedups]
    style = {"color": color, "marker": marker, "label": label}
    style |= {"ls": "-" if marker == "o" else ":"}
    axes[0].plot(x, y, **style)
    axes[1].plot(x, [result.tau for result in line], **style)


def _levels(results: Results, axes: tuple, chain: Result, color: str) -> None:
    speedup = results.speedup(chain)
    if speedup is not None:
        axes[0].axhline(speedup, color=color, ls="--", lw=0.9)
    axes[1].axhline(chain.tau, color=color, ls="--", lw=0.9)


def acceptance_figure(results: Results, contexts: list[tuple]) -> Figure | None:
    """Share of rounds by the tokens they committed, chain beside the fastest tree."""
    pairs = []
    for context in contexts:
        chain, tree = next(iter(results.find(context, "chain")), None), results.best_tree(context)
        if chain is not None and tree is not None:
            pairs.append((setting(context, "temperature"), chain, tree))
    if not pairs:
        return None
    most = max(n for _, *both in pairs for result in both for n in result.accepted)
    lengths = range(1, most + 1)
    figure, rows = panels(len(pairs), 1.25)
    for axes, (temperature, chain, tree) in zip(rows, pairs, strict=True):
        parts = (("chain", chain, -0.2, ORANGE), ("fastest tree", tree, 0.2, BLUE))
        for label, result, offset, color in parts:
            counts = result.accepted
            share = [counts[n] / counts.total() for n in lengths]
            axes.bar([n + offset for n in lengths], share, 0.4, color=color, label=label)
        title = f"T = {temperature:g}: chain τ = {chain.tau:.2f}; {tree_label(tree)}"
        axes.set_title(f"{title}, τ = {tree.tau:.2f}", loc="left", pad=3, size=7)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.set_xticks(lengths[:: -(-most // 16)])
        axes.set_ylabel("share of rounds")
        axes.grid(axis="x", visible=False)
    rows[-1].set_xlabel("tokens committed in a round")
    legend(figure, rows[0], 2)
    return figure


def tree_label(tree: Result) -> str:
    shape = "tree" if tree.variant == "best-first" else f"{tree.variant} tree"
    return f"{shape}, budget {tree.settings['tree_budget']}"


def stage_figure(results: Results, contexts: list[tuple]) -> Figure | None:
    """Milliseconds of a round by stage, a bar a cell; None where nothing measured them."""
    measured = [
        (result, result.stage_ms)
        for context in contexts
        for result in results.cells.values()
        if result.context == context and result.stage_ms
    ]
    if not measured:
        return None
    figure, (axes,) = panels(1, 0.24 * len(measured) + 0.55)
    names = list(dict.fromkeys(name for _, stages in measured for name in stages))
    left = [0.0] * len(measured)
    for name, color in zip(names, _cycle(len(names)), strict=True):
        width = [stages.get(name, 0.0) for _, stages in measured]
        axes.barh(range(len(measured)), width, 0.7, left=left, color=color, label=name)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.set_yticks(range(len(measured)), [_bar_label(result) for result, _ in measured])
    axes.set_ylim(len(measured) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("time of a round (ms)")
    legend(figure, axes, 3)
    return figure


def _bar_label(result: Result) -> str:
    kind = {"autoregressive": "AR", "best-first": "tree"}.get(result.variant, result.variant)
    sized = result.settings["method"] in ("ddtree", "mtp")
    budget = f" {result.settings['tree_budget']}" if sized else ""
    return f"{kind}{budget}, T = {result.settings['temperature']:g}"


def slots_figure(results: Results, contexts: list[tuple]) -> Figure | None:
    """Tokens a second against slots; of the trees the fastest at each number of slots."""
    slots = sorted({setting(context, "slots") for context in contexts})
    if len(slots) < 2:
        return None
    temperatures = sorted({setting(context, "temperature") for context in contexts})
    figure, rows = panels(len(temperatures), 1.5)
    styles = {"autoregressive": ("^", BLACK), "chain": ("s", ORANGE), "fastest tree": ("o", BLUE)}
    for axes, temperature in zip(rows, temperatures, strict=True):
        here = [c for c in contexts if setting(c, "temperature") == temperature]
        for label, (marker, color) in styles.items():
            points = _by_slots(results, here, label)
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, color=color, label=label)
        axes.set_title(f"T = {temperature:g}", loc="left", pad=3)
        axes.set_ylabel("tokens / s")
        axes.set_ylim(bottom=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(slots, [str(count) for count in slots])
        axes.xaxis.set_minor_locator(NullLocator())
    rows[-1].set_xlabel("slots (sequences decoded together)")
    legend(figure, rows[0], 3)
    return figure


def _by_slots(results: Results, contexts: list[tuple], label: str) -> list[tuple[int, float]]:
    points = []
    for context in contexts:
        tree = results.best_tree(context)
        found = [tree] if label == "fastest tree" else results.find(context, label)
        if found and found[0] is not None:
            points.append((setting(context, "slots"), found[0].tokens_per_second()))
    return sorted(points)


def _cycle(count: int) -> list[str]:
    return [CYCLE[index % len(CYCLE)] for index in range(count)]


def all_figures(results: Results) -> Iterator[tuple[str, Figure]]:
    """Every figure that the results can fill, with its file name."""
    kinds = (
        ("budget", budget_figure, ("temperature",)),
        ("acceptance", acceptance_figure, ("temperature",)),
        ("stages", stage_figure, ("temperature",)),
        ("slots", slots_figure, ("temperature", "slots")),
    )
    for kind, draw, free in kinds:
        for name, contexts in groups(results, free).items():
            with matplotlib.rc_context(STYLE):
                figure = draw(results, contexts)
            if figure is not None:
                yield f"{kind} {name}", figure


def main(
    results: Annotated[list[Path] | None, typer.Argument(help="Files of sweep.py.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the figures.")] = Path("figures"),
    tree: Annotated[
        Path | None, typer.Option(help="JSON of `python -m ddtree_jax explain`.")
    ] = None,
) -> None:
    """Draws all figures that RESULTS can fill, and the tree of a round."""
    if not results and tree is None:
        raise typer.BadParameter("expected files of sweep.py, or --tree FILE; got neither")
    try:
        figures = list(all_figures(Results.of(results))) if results else []
        if tree is not None:
            figures.append((f"tree {tree.stem}", tree_figure(read_tree(tree))))
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    for name, figure in figures:
        for path in save(figure, out, name):
            print(path)


if __name__ == "__main__":
    typer.run(main)
