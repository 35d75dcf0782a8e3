"""Where bfloat16 texts of two methods part: how close the target's two likeliest tokens were there.

    python scripts/first_differences.py OUT.jsonl

In float32 all methods give one text. In bfloat16 a pass over 64 rows rounds otherwise than a pass
over one, so a near-tie can fall to the other side; from there on the texts differ. This takes the
first difference of every prompt and gives the gap of the top two logits at that place, T=0.
"""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from humaneval import chosen_prompts
from records import append, context
from rich.console import Console

from convert import ensure_converted
from ddtree_jax import LLM, SamplingParams
from ddtree_jax.checkpoint import load_target
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.params import flatten_model
from pallas_kernels import tree_attention


def first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int | None:
    """First place where two outputs differ, None if one begins with the other."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (a, b) in pairs if a != b), None)


def next_logits(target: Qwen3, tokens: jax.Array, last: jax.Array) -> jax.Array:
    """float32 logits [V] after tokens[0, last], by one causal pass."""
    rows = tokens.shape[1]
    causal = jnp.tril(jnp.ones((1, rows, rows), bool))

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        nothing = jnp.zeros((1, 1, *key.shape[2:]), key.dtype)
        return tree_attention(
            query,
            nothing,
            nothing,
            key,
            value,
            jnp.zeros((1,), jnp.int32),
            causal,
            scale=target.config.head_dim**-0.5,
        )

    positions = jnp.arange(rows, dtype=jnp.int32)[None]
    hidden = target(tokens, positions, attend).hidden
    return target.logits(jax.lax.dynamic_slice_in_dim(hidden, last, 1, axis=1))[0, 0]


def main(
    out: Annotated[Path, typer.Argument(help="JSONL file; lines are added.")],
    humaneval: Annotated[Path | None, typer.Option(help="HumanEval.jsonl.gz")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts, spread over the set.")] = None,
    max_tokens: int = 128,
    slots: int = 8,
    budget: int = 63,
) -> None:
    prompts = chosen_prompts(humaneval, limit)
    params = SamplingParams(max_tokens=max_tokens)
    texts = {}
    for method in ("autoregressive", "ddtree"):
        llm = LLM(method=method, tree_budget=budget, max_slots=slots, progress=False)
        texts[method] = [output.token_ids for output in llm.generate(prompts, params)]
    assets = files("ddtree_jax") / "assets" / "target"
    folder = ensure_converted(str(assets), "target", progress=False)
    width = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    structure, leaves = flatten_model(load_target(folder, width))
    logits_of = jax.jit(lambda leaves, *rest: next_logits(structure.merge(leaves), *rest))
    gaps = []
    for prompt, ours, theirs in zip(prompts, *texts.values(), strict=True):
        place = first_difference(ours, theirs)
        if place is None:
            continue
        tokens = [*llm.tokenizer.encode(prompt), *ours[:place]]
        padded = np.zeros((1, -(-len(tokens) // 256) * 256), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(logits_of(leaves, padded, len(tokens) - 1))
        top = np.sort(logits)[-2:]
        gaps.append(float(top[1] - top[0]))
        both = {int(token) for token in np.argsort(logits)[-2:]}
        line = {"prompt": len(gaps), "place": place, "gap": round(gaps[-1], 4)}
        line["top_two"] = {ours[place], theirs[place]} == both
        append(out, [line | context()])
    worst = max(gaps, default=0.0)
    Console().print(
        f"{len(prompts) - len(gaps)} of {len(prompts)} outputs equal; of {len(gaps)} first "
        f"differences the largest top-2 gap is {worst:.4f}, the median {np.median(gaps or [0]):.4f}"
    )


if __name__ == "__main__":
    typer.run(main)
