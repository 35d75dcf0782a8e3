"""The embedded pair over HumanEval: accepted lengths, speed, and whether all methods agree.

    python scripts/evaluate.py scripts/results/humaneval.jsonl --temperature 0 --temperature 1

One JSON line a (method, budget, temperature). Compilation is not timed. Beside every method stands
autoregressive decoding of the same engine in the same run.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated

import typer
from humaneval import chosen_prompts
from records import append, context, loops
from rich.console import Console
from rich.table import Table

from ddtree_jax import LLM, RequestOutput, SamplingParams


def parse_methods(names: list[str]) -> list[tuple[str, int, bool]]:
    """'autoregressive', 'dflash', 'ddtree:63' or 'ddtree:63:spine' -> (method, budget, spine)."""
    parsed = []
    for name in names:
        method, _, rest = name.partition(":")
        if method == "mtp":
            raise typer.BadParameter("the embedded target has no MTP block; sweep.py takes others")
        budget, _, spine = rest.partition(":")
        parsed.append((method, int(budget or 0), spine == "spine"))
    return parsed


def measure(
    llm: LLM, prompts: list[str], params: SamplingParams
) -> tuple[list[RequestOutput], float]:
    """Outputs and the seconds they took; a short pass before compiles what they need."""
    llm.generate(prompts, dataclasses.replace(params, max_tokens=3))
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return outputs, time.perf_counter() - begin


def summary(outputs: list[RequestOutput], seconds: float) -> dict[str, float]:
    """tau pools all rounds of all prompts; tau_prompt is the mean of the prompts' own means."""
    lengths = [length for o in outputs for length in o.stats.accepted_lengths]
    means = [o.stats.mean_accepted_length for o in outputs if o.stats.rounds]
    tokens = sum(len(o.token_ids) for o in outputs)
    return {
        "tokens": tokens,
        "rounds": len(lengths),
        "tau": round(sum(lengths) / len(lengths), 4),
        "tau_prompt": round(sum(means) / len(means), 4),
        "longest": max(lengths),
        "looping": round(sum(loops(o.token_ids) for o in outputs) / len(outputs), 4),
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def show(rows: list[dict]) -> None:
    columns = ("method", "temperature", "tau", "tau_prompt", "looping", "tokens_per_second", "same")
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console(width=120).print(table)


def main(
    out: Annotated[Path, typer.Argument(help="JSONL file; lines are added.")],
    method: Annotated[
        list[str] | None, typer.Option(help="method[:budget[:spine]], repeatable.")
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable; 0.")] = None,
    humaneval: Annotated[Path | None, typer.Option(help="HumanEval.jsonl.gz")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts, spread over the set.")] = None,
    max_tokens: int = 128,
    slots: int = 8,
    dtype: str = "auto",
) -> None:
    """Runs every method at every temperature; the first method is what others must equal."""
    method = method or ["autoregressive", "dflash", "ddtree:63"]
    temperature = temperature or [0.0]
    prompts = chosen_prompts(humaneval, limit)
    rows, texts = [], {}
    for name, (kind, budget, spine) in zip(method, parse_methods(method), strict=True):
        llm = LLM(
            method=kind,
            tree_budget=budget,
            spine=spine,
            max_slots=slots,
            max_length=640,  # the longest prompt has 473 tokens
            dtype=dtype,
            progress=False,
        )
        for degree in temperature:
            params = SamplingParams(max_tokens=max_tokens, temperature=degree, seed=0)
            outputs, seconds = measure(llm, prompts, params)
            tokens = [o.token_ids for o in outputs]
            wanted = texts.setdefault(degree, tokens)
            same = sum(a == b for a, b in zip(tokens, wanted, strict=True))
            row = {"method": name, "temperature": degree, "prompts": len(prompts)}
            row |= {"slots": slots, "max_tokens": max_tokens, "dtype": dtype}
            row |= summary(outputs, seconds) | {"same": f"{same}/{len(tokens)}"} | context()
            rows.append(row)
            append(out, [row])
            print(json.dumps(row), flush=True)
    show(rows)


if __name__ == "__main__":
    typer.run(main)
