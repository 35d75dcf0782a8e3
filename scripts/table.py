"""The main table of sweep results: speed-up and τ of the chain and the best tree.

    python scripts/table.py sweep.jsonl --format markdown
    python scripts/table.py sweep.jsonl more.jsonl --format latex > table.tex

A cell reads "speed-up / τ", of a tree "speed-up / τ [budget]".
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from cells import CONTEXT
from records import Result, Results, differing, pair_name, setting

MISSING = "–"


class Format(StrEnum):
    markdown = "markdown"
    latex = "latex"


def rows_of(results: Results) -> tuple[list[str], dict[float, list[list[str]]]]:
    """Header, and the rows of each temperature in ascending order.

    Settings beside pair and prompts become columns only where they differ.
    """
    contexts = results.contexts()
    extra = differing(contexts, [n for n in CONTEXT if n not in ("pair", "prompts", "temperature")])
    header = ["model", "prompts", *extra, "n", "AR, tokens/s", "chain (DFlash)", "tree (DDTree)"]
    blocks: dict[float, list[list[str]]] = {}
    for context in sorted(contexts, key=lambda context: setting(context, "temperature")):
        base = next(iter(results.find(context, "autoregressive")), None)
        chain = next(iter(results.find(context, "chain")), None)
        tree = results.best_tree(context)
        shown = [result for result in (tree, chain, base) if result is not None]
        if not shown:
            continue
        row = [pair_name(setting(context, "pair")), setting(context, "prompts")]
        row += [str(setting(context, name)) for name in extra]
        row += [str(len(shown[0].lines))]
        row += [MISSING if base is None else f"{base.tokens_per_second():.1f}"]
        row += [figures(results, chain), figures(results, tree)]
        blocks.setdefault(setting(context, "temperature"), []).append(row)
    for rows in blocks.values():
        rows.sort(key=lambda row: row[0])  # stable: sets stay in the order of the sweep
    return header, blocks


def figures(results: Results, result: Result | None) -> str:
    """Speed-up / τ, and of a tree its budget and, unless best first, its shape."""
    if result is None:
        return MISSING
    speedup = results.speedup(result)
    text = f"{MISSING if speedup is None else f'{speedup:.2f}×'} / {result.tau:.2f}"
    if not result.is_tree:
        return text
    shape = "" if result.variant == "best-first" else f" {result.variant}"
    return f"{text} [{result.settings['tree_budget']}{shape}]"


def markdown(header: list[str], blocks: dict[float, list[list[str]]]) -> str:
    """One table a temperature."""
    tables = []
    for temperature, rows in blocks.items():
        lines = [header, ["---", "---", *["---:"] * (len(header) - 2)], *rows]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        tables.append(f"**Temperature {temperature:g}**\n\n{text}\n")
    return "\n".join(tables)


def latex(header: list[str], blocks: dict[float, list[list[str]]]) -> str:
    """One tabular with a block a temperature; needs the package booktabs."""
    lines = [f"\\begin{{tabular}}{{ll{'r' * (len(header) - 2)}}}", "\\toprule", _row(header)]
    for temperature, rows in blocks.items():
        lines += [
            "\\midrule",
            f"\\multicolumn{{{len(header)}}}{{l}}{{\\emph{{Temperature {temperature:g}}}}} \\\\",
            *(_row(row) for row in rows),
        ]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _row(cells: list[str]) -> str:
    names = {"\\": r"\textbackslash{}", "×": r"$\times$", "τ": r"$\tau$", MISSING: "--"}
    names |= {character: f"\\{character}" for character in "_%&#${}"}
    text = ["".join(names.get(character, character) for character in cell) for cell in cells]
    return " & ".join(text) + r" \\"


def main(
    results: Annotated[list[Path], typer.Argument(help="Files of sweep.py.", exists=True)],
    format: Annotated[Format, typer.Option(help="Of the table.")] = Format.markdown,
) -> None:
    """Prints the table; each tree cell is the fastest budget of its settings."""
    try:
        parts = rows_of(Results.of(results))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="RESULTS") from error
    print(markdown(*parts) if format is Format.markdown else latex(*parts), end="")


if __name__ == "__main__":
    typer.run(main)
