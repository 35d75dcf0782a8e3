"""A grid of decoding settings, one JSON line a (cell, prompt); docs/sweeps.md has the format.

    python scripts/sweep.py --out sweep.jsonl --budget 15 --budget 63 --temperature 0
    python scripts/sweep.py --out sweep.jsonl --config grid.toml --limit 20

Safe to stop and to run again: what the file already holds is not measured twice.
"""

import dataclasses
import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from cells import METHODS, Cell, Grid
from prompts import Prompt, load_prompts, set_name
from records import append, context, loops, repair
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ddtree_jax import LLM, RequestOutput, SamplingParams

Line = dict[str, Any]
WARM_UP_TOKENS = 3


def load(**arguments: Any) -> LLM:
    return LLM(**arguments, progress=False)


def questions(llm: LLM, prompts: Sequence[Prompt]) -> tuple[list, bool]:
    """What `llm` is given, and whether that went through its chat template."""
    chat = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    if not chat:
        return [prompt.plain for prompt in prompts], False
    return [llm.chat_prompt([{"role": "user", "content": p.ask}]) for p in prompts], True


def measure(llm: LLM, cell: Cell, prompts: Sequence[Prompt]) -> Iterator[list[Line]]:
    """Lines as they become final: one at a time with one slot, else all of the timed pass."""
    given, chat = questions(llm, prompts)
    params = [
        SamplingParams(
            max_tokens=cell.max_tokens,
            temperature=cell.temperature,
            # Seeds of their own: with a common one all prompts would share their noise.
            seed=(cell.seed + prompt.index) % 2**32,
        )
        for prompt in prompts
    ]
    # Compiles all that these prompts need, so that nothing compiles while the clock runs.
    short = min(WARM_UP_TOKENS, cell.max_tokens)
    llm.generate(given, [dataclasses.replace(p, max_tokens=short) for p in params])
    if cell.slots == 1:
        for prompt, one, param in zip(prompts, given, params, strict=True):
            yield [describe(cell, prompt, chat, *_time_one(llm, one, param))]
        return
    begin = time.perf_counter()
    outputs = llm.generate(given, params)
    seconds = time.perf_counter() - begin
    tokens = sum(len(output.token_ids) for output in outputs)
    whole = {"cell_seconds": round(seconds, 6), "cell_tokens": tokens, "cell_prompts": len(outputs)}
    yield [
        # Slots share the time, so a prompt's own seconds are its share by tokens.
        describe(cell, prompt, chat, output, {"seconds": seconds * len(output.token_ids) / tokens})
        | whole
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _time_one(llm: LLM, given: Any, params: SamplingParams) -> tuple[RequestOutput, dict]:
    """Output, seconds until its first token and until its end, and ms of a round between."""
    begin, first, output = time.perf_counter(), None, None
    for event in llm.stream([given], params):
        first = time.perf_counter() - begin if first is None else first
        output = event.output
    seconds = time.perf_counter() - begin
    times = {"seconds": seconds, "first_token_seconds": first}
    if output.stats.rounds:
        times["round_ms"] = 1e3 * (seconds - first) / output.stats.rounds
    return output, times


def describe(
    cell: Cell, prompt: Prompt, chat: bool, output: RequestOutput, times: dict[str, float]
) -> Line:
    """The line of one prompt."""
    ids = output.token_ids
    return {
        "cell": cell.key,
        "prompt": prompt.index,
        "prompt_sha256": prompt.sha256,
        "chat": chat,
        "prompt_tokens": len(output.prompt_token_ids),
        "tokens": len(ids),
        "token_sha256": hashlib.sha256(repr(tuple(map(int, ids))).encode()).hexdigest()[:12],
        "finish_reason": output.finish_reason,
        "looping": loops(ids),
        "rounds": output.stats.rounds,
        "accepted_lengths": list(output.stats.accepted_lengths),
        **{name: round(value, 6) for name, value in times.items()},
        "settings": cell.settings,
    }


def unfinished(
    cells: Sequence[Cell], sets: dict[str, list[Prompt]], lines: Sequence[Line]
) -> list[tuple[Cell, list[Prompt]]]:
    """Cells with the prompts that `lines` lack, in order; finished cells are left out."""
    done = {(line["cell"], line["prompt"], line["prompt_sha256"]) for line in lines}
    rest = [
        (cell, [p for p in sets[cell.prompts] if (cell.key, p.index, p.sha256) not in done])
        for cell in cells
    ]
    return [(cell, prompts) for cell, prompts in rest if prompts]


def sweep(
    cells: Sequence[Cell],
    sets: dict[str, list[Prompt]],
    out: Path,
    *,
    load: Callable[..., LLM] = load,
    console: Console | None = None,
) -> int:
    """Measures what `out` does not hold yet and adds it; returns the number of new lines."""
    todo = unfinished(cells, sets, repair(out))
    versions, total = context(), sum(len(prompts) for _, prompts in todo)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    columns += (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    llm, loaded = None, None
    # A long window: cells differ in speed, and the time left should not jump with each.
    with Progress(*columns, console=console, speed_estimate_period=3600) as bar:
        task = bar.add_task("prompts", total=total)
        for cell, prompts in todo:
            if cell.llm_arguments != loaded:
                llm, loaded = None, cell.llm_arguments
                gc.collect()  # the old weights must go before the new ones come
                llm = load(**loaded)
            bar.update(task, description=title(cell))
            for lines in measure(llm, cell, prompts):
                append(out, [line | versions for line in lines])
                bar.advance(task, len(lines))
    return total


def title(cell: Cell) -> str:
    budget = "" if not cell.tree_budget else f" {cell.tree_budget}"
    return f"{cell.prompts} T={cell.temperature:g} ×{cell.slots} {cell.method}{budget}"


def main(
    out: Annotated[Path, typer.Option(help="JSONL file; lines are added.")],
    config: Annotated[Path | None, typer.Option(help="TOML file; flags go before it.")] = None,
    pair: Annotated[
        list[str] | None, typer.Option(help="embedded, or TARGET,DRAFT; repeatable.")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help=f"{', '.join(METHODS)}")] = None,
    budget: Annotated[list[int] | None, typer.Option(help="Of the trees; repeatable; 63.")] = None,
    mtp_tokens: Annotated[list[int] | None, typer.Option(help="Of mtp; repeatable; 3.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Repeatable; 0.")] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="Set name or JSONL path; repeatable; humaneval.")
    ] = None,
    slots: Annotated[list[int] | None, typer.Option(help="Repeatable; 1.")] = None,
    tree_choices: Annotated[str | None, typer.Option(help="Of ddtree:static.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="New tokens a prompt; 128.")] = None,
    max_length: Annotated[int | None, typer.Option(help="With the prompt; 4096.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16 or float32.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling noise; 0.")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts, spread over the set.")] = None,
    baseline: Annotated[
        bool | None, typer.Option(help="Add autoregressive and chain cells; on.")
    ] = None,
) -> None:
    """Runs a grid of method × budget × temperature × prompts × slots × pair."""
    flags = {name: value for name, value in locals().items() if name not in ("out", "config")}
    console = Console(stderr=True)
    try:
        grid = Grid.of(config, **flags)
        sets = {set_name(name): load_prompts(name, grid.limit) for name in grid.prompts}
        cells = grid.cells(jax.devices()[0].device_kind)
        for count in {count for count in grid.slots if count > min(map(len, sets.values()))}:
            console.print(f"note: {count} slots are more than the prompts of a set", style="yellow")
        out.parent.mkdir(parents=True, exist_ok=True)
        added = sweep(cells, sets, out, console=console)
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    console.print(f"{added} new lines in {out}: {len(cells)} cells", highlight=False)


if __name__ == "__main__":
    typer.run(main)
