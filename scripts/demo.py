"""Three prompts by three methods on the embedded pair: the same text, fewer passes.

python scripts/demo.py [--tree-budget 63] [--max-tokens 96] [--temperature 0]
"""

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ddtree_jax import LLM, RequestOutput, SamplingParams

PROMPTS = (
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "import os\n\n\ndef list_python_files(folder):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
)
METHODS = ("autoregressive", "dflash", "ddtree")


def run(llm: LLM, params: SamplingParams, console: Console) -> tuple[list[RequestOutput], float]:
    """Streams every prompt; returns outputs and the seconds that decoding took."""
    outputs, seconds = [], 0.0
    for prompt in PROMPTS:
        console.print(prompt, style="bold", end="", highlight=False, markup=False)
        begin = time.perf_counter()
        for event in llm.stream(prompt, params):
            console.print(event.text, end="", highlight=False, markup=False)
            if event.output is not None:
                outputs.append(event.output)
        seconds += time.perf_counter() - begin
        console.print("\n")
    return outputs, seconds


def main(
    tree_budget: Annotated[int, typer.Option(help="Nodes below the root.")] = 63,
    max_tokens: Annotated[int, typer.Option(help="New tokens a prompt.")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Completes three Python prompts by three methods and compares them."""
    console = Console()
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0)
    table = Table("method", "tokens", "rounds", "τ", "tokens/s", "same text", title="three prompts")
    texts = None
    for method in METHODS:
        console.rule(method)
        llm = LLM(method=method, tree_budget=tree_budget, max_slots=1, max_length=512)
        # Compiles, so that the figures below are decoding alone.
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, temperature=temperature, seed=0))
        outputs, seconds = run(llm, params, console)
        texts = texts or [output.text for output in outputs]
        tokens = sum(len(output.token_ids) for output in outputs)
        lengths = [n for output in outputs for n in output.stats.accepted_lengths]
        same = [output.text for output in outputs] == texts
        table.add_row(
            method,
            str(tokens),
            str(len(lengths)),
            f"{sum(lengths) / len(lengths):.2f}",
            f"{tokens / seconds:.0f}",
            "yes" if same else "NO",
        )
    console.print(table)
    console.print(
        "τ: mean tokens committed a verify round, bonus included. Every method gives the target's "
        "own text; a tree needs the fewest passes, which is time on a GPU, where a pass costs the "
        "reading of the weights. On a CPU a wide pass costs arithmetic.",
        style="dim",
    )


if __name__ == "__main__":
    typer.run(main)
