"""The shell: generation, streamed, and a look into a round.

python -m ddtree_jax "prompt" [options]
python -m ddtree_jax explain "prompt" --round 3
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console

from ddtree_jax.explain import describe, render, summary
from ddtree_jax.llm import LLM
from ddtree_jax.outputs import RequestOutput
from ddtree_jax.sampling import SamplingParams

Prompt = Annotated[str, typer.Argument(help="Text to continue; - reads standard input.")]
Target = Annotated[str | None, typer.Option(help="HF id, HF folder or converted folder.")]
Draft = Annotated[str | None, typer.Option(help="The drafter of that target.")]
Method = Annotated[str, typer.Option(help="autoregressive, mtp, dflash or ddtree.")]
Budget = Annotated[int, typer.Option(help="Nodes below the root.")]
Spine = Annotated[bool, typer.Option(help="The top-1 chain enters the tree first.")]
Choices = Annotated[str | None, typer.Option(help="A static tree, such as '[(0,), (0, 0), (1,)]'.")]
Acceptance = Annotated[str, typer.Option(help="tree_walk or linear.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int, typer.Option(help="Of the sampling noise.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32.")]
Length = Annotated[int, typer.Option(help="Prompt and new tokens together.")]

errors = Console(stderr=True)


@contextmanager
def plain_errors() -> Iterator[None]:
    """What a user can put right is said in one line."""
    try:
        yield
    except ValueError as error:
        errors.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def keep_programs() -> None:
    """Compiled programs outlive the process, unless the user has set a place for them."""
    if jax.config.jax_compilation_cache_dir is None:
        root = Path(os.environ.get("DDTREE_CACHE") or "~/.cache/ddtree_jax").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(root / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def read(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt


def report(output: RequestOutput, seconds: float) -> str:
    stats, count = output.stats, len(output.token_ids)
    return (
        f"{count} tokens in {stats.rounds} rounds, {stats.mean_accepted_length:.2f} a round, "
        f"{count / seconds:.1f} tokens/s (compilation included), "
        f"finish reason: {output.finish_reason}"
    )


def generate(
    prompt: Prompt,
    target: Target = None,
    draft: Draft = None,
    method: Method = "ddtree",
    tree_budget: Budget = 63,
    spine: Spine = False,
    tree_choices: Choices = None,
    acceptance: Acceptance = "tree_walk",
    max_tokens: Annotated[int, typer.Option(help="Most new tokens.")] = 256,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text.")] = None,
    chat: Annotated[bool, typer.Option(help="Ask through the chat template.")] = False,
    dtype: Dtype = "auto",
    max_length: Length = 4096,
) -> None:
    """Continues PROMPT. Without --target the pair that ships with the package is used.

    `python -m ddtree_jax explain PROMPT` shows the tree of one round.
    """
    keep_programs()
    with plain_errors():
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
            tree_choices=tree_choices,
            acceptance=acceptance,
            dtype=dtype,
            max_slots=1,
            max_length=max_length,
        )
        text = read(prompt)
        messages = [{"role": "user", "content": text}]
        events = llm.stream(llm.chat_prompt(messages) if chat else text, params)
    begin, output = time.perf_counter(), None
    for event in events:
        print(event.text if event.text is not None else event.token_ids, end="", flush=True)
        output = event.output
    print()
    errors.print(report(output, time.perf_counter() - begin), style="dim", highlight=False)


def explain(
    prompt: Prompt,
    round_number: Annotated[int, typer.Option("--round", min=1, help="Counted from 1.")] = 1,
    target: Target = None,
    draft: Draft = None,
    tree_budget: Budget = 31,
    spine: Spine = False,
    tree_choices: Choices = None,
    acceptance: Acceptance = "tree_walk",
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the round here.")
    ] = None,
    dtype: Dtype = "auto",
    max_length: Length = 1024,
) -> None:
    """Shows the tree of one round: accepted path in bold, log-probs, what the target wanted."""
    keep_programs()
    with plain_errors():
        llm = LLM(
            target,
            draft,
            tree_budget=tree_budget,
            spine=spine,
            tree_choices=tree_choices,
            acceptance=acceptance,
            dtype=dtype,
            max_slots=1,
            max_length=max_length,
            trace=True,
        )
        text = read(prompt)
        most = llm.most_tokens(round_number)
        (output,) = llm.generate(
            text, SamplingParams(max_tokens=most, temperature=temperature, seed=seed)
        )
        if len(output.trace) < round_number:
            raise ValueError(
                f"`--round` {round_number} does not exist: the output ended after "
                f"{len(output.trace)} rounds"
            )
    trace, decode = output.trace[round_number - 1], partial(llm.decode, special=True)
    Console().print(render(trace, decode, f"round {round_number} of {text!r:.60}"))
    Console().print(summary(trace, decode), highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps(describe(trace, decode), indent=1))


def main() -> None:
    """`explain` is a command of its own; anything else is a prompt."""
    if sys.argv[1:2] == ["explain"]:
        del sys.argv[1]
        typer.run(explain)
    else:
        typer.run(generate)


if __name__ == "__main__":
    main()
