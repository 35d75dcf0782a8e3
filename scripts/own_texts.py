"""Texts that the target wrote itself: prompts from the corpus, continued in large batches."""

import json
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from generate import generate


class Sizes(NamedTuple):
    """P prompt tokens at most, N new ones, A blocks a sequence."""

    prompt: int
    count: int
    anchors: int
    generate_batch: int
    batch: int


class Texts(NamedTuple):
    """Sequences [n, P + N]: padded on the left by `start`; tokens from `end` on are not the
    target's, which had ended. Sampled at `temperature`."""

    tokens: jax.Array
    start: jax.Array
    end: jax.Array
    temperature: jax.Array


class Prompts:
    """Cuts behind docstrings or a little later (65 %), and anywhere in files (35 %)."""

    def __init__(self, work: Path, width: int, seed: int):
        log = json.loads((work / "corpus.json").read_text())
        self.tokens = jnp.asarray(np.load(work / "tokens.npy"))
        cuts = np.load(work / "cuts.npy")
        self.cuts = cuts[cuts[:, 1] - cuts[:, 0] >= 12]
        self.files = (log["ranges"]["stdlib"][0], log["ranges"]["packages"][1])
        self.width, self.random = width, np.random.default_rng(seed)
        self.order = np.zeros(0, np.int64)

    def draw(self, count: int) -> tuple[jax.Array, jax.Array]:
        """(tokens [count, P], start [count]); functions in shuffled passes."""
        documented = int(0.65 * count) if len(self.cuts) else 0
        while len(self.order) < documented:
            self.order = np.concatenate([self.order, self.random.permutation(len(self.cuts))])
        picked, self.order = self.cuts[self.order[:documented]], self.order[documented:]
        # Greedy texts repeat when a prompt does: some prompts run into the body.
        shift = self.random.integers(1, 48, documented) * (self.random.random(documented) < 0.4)
        picked = picked + shift[:, None] * np.asarray([0, 1])
        first, last = self.files
        ends = self.random.integers(first + self.width, last, count - documented)
        lengths = self.random.integers(min(48, self.width // 2), self.width, count - documented)
        ends = np.concatenate([picked[:, 1], ends])
        lengths = np.concatenate([picked[:, 1] - picked[:, 0], lengths])
        start = self.width - np.minimum(lengths, self.width)
        order = self.random.permutation(count)
        return cut_prompts(
            self.tokens, ends[order].astype(np.int32), start[order].astype(np.int32), self.width
        )


@partial(jax.jit, static_argnames="width")
def cut_prompts(tokens, ends, start, width: int):
    column = jnp.arange(width)[None, :]
    rows = tokens[jnp.maximum(ends[:, None] - width + column, 0)].astype(jnp.int32)
    return jnp.where(column < start[:, None], 0, rows), start


def make_generate(rebuild_target, count: int):
    """Jitted (target params, prompts, start, temperature, key) -> Texts."""

    @jax.jit
    def run(params, prompts, start, temperature, key):
        target = rebuild_target(params, jnp.bfloat16)
        tokens = generate(target, prompts, start, temperature, key, count)
        ended = tokens[:, prompts.shape[1] :] == 0
        # The end token itself still is the target's.
        length = jnp.where(ended.any(1), jnp.argmax(ended, 1) + 1, count)
        end = prompts.shape[1] + length.astype(jnp.int32)
        return Texts(tokens.astype(jnp.uint16), start, end, temperature)

    return run


def own_texts(run, target_params, work: Path, sizes: Sizes, minutes: float, seed: int):
    """Continuations for about `minutes`."""
    prompts, batch = Prompts(work, sizes.prompt, seed), sizes.generate_batch
    temperature = np.resize(np.float32([0, 1, 0, 1, 0, 1, 0, 1, 0.7, 0]), batch)
    key, parts, begin = jax.random.key(seed), [], time.monotonic()
    while time.monotonic() - begin < 60 * minutes:
        rows, start = prompts.draw(batch)
        parts.append(
            run(target_params, rows, start, temperature, jax.random.fold_in(key, len(parts)))
        )
        if len(parts) > 1:  # one batch ahead of the device
            parts[-2].tokens.block_until_ready()
        if len(parts) % 10 == 0:
            seconds = time.monotonic() - begin
            rate = len(parts) * batch * sizes.count / max(seconds, 1e-9)
            print(f"own texts: {len(parts) * batch}, {rate:.0f} tok/s, {seconds:.0f} s", flush=True)
    return Texts(*(jnp.concatenate(column) for column in zip(*parts, strict=True)))
