"""Compares with recorded outputs of the published DDTree implementation on the embedded pair.

    python scripts/compare_reference.py scripts/results/reference_ddtree.json

The file holds, for a few HumanEval prompts, what liranringel/ddtree (MIT) gave in float32 on a
CPU, greedy, 128 new tokens, its attention set to "sdpa": token ids of its autoregressive
decoding, whether its chain and trees gave the same, and their accepted lengths. Here the same
prompts run through our engine: tokens must be equal, mean accepted lengths within 1%.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from humaneval import problems
from rich.console import Console
from rich.table import Table

from ddtree_jax import LLM, SamplingParams


def mean(lengths: list[list[int]]) -> float:
    flat = [length for row in lengths for length in row]
    return sum(flat) / len(flat)


def compare(recorded: dict, prompts: list[str], key: str, slots: int) -> dict:
    """Runs one method of the record; returns equal outputs and both mean accepted lengths."""
    method, _, budget = key.partition("_")
    llm = LLM(
        method=method,
        tree_budget=int(budget or 0),
        max_slots=slots,
        max_length=640,
        dtype="float32",
        progress=False,
    )
    outputs = llm.generate(prompts, SamplingParams(max_tokens=recorded["max_new_tokens"]))
    entries = recorded["prompts"]
    equal = [
        list(output.token_ids) == entry["autoregressive"]
        for output, entry in zip(outputs, entries, strict=True)
    ]
    theirs = mean([entry[key]["accepted"] for entry in entries])
    # A round that our engine leaves out (max_tokens was reached) the reference runs no more.
    ours = mean([list(output.stats.accepted_lengths) for output in outputs])
    return {
        "method": key,
        "equal": sum(equal),
        "prompts": len(equal),
        "tau_reference": theirs,
        "tau": ours,
        "relative": ours / theirs - 1,
        "same_rounds": sum(
            list(output.stats.accepted_lengths) == entry[key]["accepted"]
            for output, entry in zip(outputs, entries, strict=True)
        ),
    }


def main(
    record: Annotated[Path, typer.Argument(help="JSON of the reference's outputs.")],
    limit: Annotated[int | None, typer.Option(help="First prompts only.")] = None,
    slots: int = 8,
) -> None:
    """Prints a table; exits with 1 if tokens differ or a mean is off by over 1%."""
    recorded = json.loads(record.read_text())
    recorded["prompts"] = recorded["prompts"][:limit]
    texts = {problem["task_id"]: problem["prompt"] for problem in problems()}
    prompts = [texts[entry["task_id"]] for entry in recorded["prompts"]]
    table = Table("method", "equal outputs", "τ reference", "τ", "difference", "equal rounds")
    failed = False
    for key in ("dflash", *(f"ddtree_{budget}" for budget in recorded["budgets"])):
        row = compare(recorded, prompts, key, slots)
        failed |= row["equal"] < row["prompts"] or abs(row["relative"]) > 0.01
        table.add_row(
            key,
            f"{row['equal']}/{row['prompts']}",
            f"{row['tau_reference']:.4f}",
            f"{row['tau']:.4f}",
            f"{row['relative']:+.2%}",
            f"{row['same_rounds']}/{row['prompts']}",
        )
    Console().print(table)
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
