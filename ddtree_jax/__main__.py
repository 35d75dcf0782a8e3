"""python -m ddtree_jax "prompt": generation from the shell, streamed."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console

from ddtree_jax.llm import LLM
from ddtree_jax.outputs import RequestOutput
from ddtree_jax.sampling import SamplingParams

app = typer.Typer(add_completion=False)


def _report(output: RequestOutput, seconds: float) -> str:
    stats, count = output.stats, len(output.token_ids)
    return (
        f"{count} tokens in {stats.rounds} rounds, {stats.mean_accepted_length:.2f} a round, "
        f"{count / seconds:.1f} tokens/s (compilation included), "
        f"finish reason: {output.finish_reason}"
    )


def _keep_programs() -> None:
    """Compiled programs outlive the process, unless the user has set a place for them."""
    if jax.config.jax_compilation_cache_dir is None:
        root = Path(os.environ.get("DDTREE_CACHE") or "~/.cache/ddtree_jax").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(root / "programs"))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")],
    target: Annotated[
        str | None, typer.Option(help="HF id, HF folder or converted folder.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="The drafter of that target.")] = None,
    method: Annotated[str, typer.Option(help="autoregressive, dflash or ddtree.")] = "ddtree",
    tree_budget: Annotated[int, typer.Option(help="Nodes below the root.")] = 63,
    spine: Annotated[bool, typer.Option(help="The top-1 chain enters the tree first.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling noise.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text.")] = None,
    chat: Annotated[bool, typer.Option(help="Ask through the chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    max_length: Annotated[int, typer.Option(help="Prompt and new tokens together.")] = 4096,
) -> None:
    """Continues PROMPT. Without --target the pair that ships with the package is used."""
    console = Console(stderr=True)
    _keep_programs()
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
        )
        llm = LLM(
            target,
            draft,
            method=method,
            tree_budget=tree_budget,
            spine=spine,
            dtype=dtype,
            max_slots=1,
            max_length=max_length,
        )
        text = sys.stdin.read() if prompt == "-" else prompt
        events = llm.stream(
            llm.chat_prompt([{"role": "user", "content": text}]) if chat else text, params
        )
    except ValueError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        raise typer.Exit(1) from error
    begin, output = time.perf_counter(), None
    for event in events:
        print(event.text if event.text is not None else event.token_ids, end="", flush=True)
        output = event.output
    print()
    console.print(_report(output, time.perf_counter() - begin), style="dim", highlight=False)


if __name__ == "__main__":
    app()
