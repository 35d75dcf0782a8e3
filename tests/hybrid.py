"""Tiny targets of the newer families as modules, transformers' models of the same weights, and
the plainest way to run ours."""

import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tiny_hybrid
from models import causal_attend

from convert import convert_target
from ddtree_jax import checkpoint
from ddtree_jax.config import HybridConfig
from ddtree_jax.models.gdn import Answer, GdnRows, heads_of
from ddtree_jax.models.mtp import MTP
from ddtree_jax.models.qwen3 import Qwen3
from pallas_kernels import gdn_chunk


@functools.cache
def _load(family: str, seed: int, load) -> Qwen3 | MTP:
    """What `load` makes of `tiny_hybrid.write_hub(family, seed)` after conversion."""
    with tempfile.TemporaryDirectory() as name:
        source = tiny_hybrid.write_hub(Path(name) / "hf", family, seed)
        folder = convert_target(source, Path(name) / "out", progress=False)
        return load(folder, jnp.float32)


def target_of(family: str, seed: int = 0) -> Qwen3:
    return _load(family, seed, checkpoint.load_target)


def mtp_of(family: str, seed: int = 0) -> MTP:
    return _load(family, seed, checkpoint.load_mtp)


@functools.cache
def oracle_of(family: str, seed: int = 0):
    """transformers' model of the same weights, in float32."""
    import torch
    import transformers

    config = tiny_hybrid.text_config(family)
    names = {
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
        "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    }
    settings, model = names[family]
    known = {key: value for key, value in config.items() if key != "architectures"}
    oracle = model(settings(**known, attn_implementation="eager")).eval()
    tensors = tiny_hybrid.tensors_of(np.random.default_rng(seed), config)
    oracle.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})
    return oracle


class WholeRecurrence:
    """The recurrence of whole sequences from their start, by the chunked form."""

    def __init__(self, config: HybridConfig, slots: int, size: int):
        self._config, self._slots, self._size = config, slots, size

    def __call__(self, number: int, rows: GdnRows) -> jax.Array:
        config, slots, size = self._config, self._slots, self._size
        width = config.conv_width
        place = np.arange(size)[:, None] + width - 1 - np.arange(width)[None, :]
        window = jnp.broadcast_to(jnp.asarray(place, jnp.int32)[None], (slots, size, width))
        before = jnp.zeros((slots, width - 1, config.conv_channels), rows.parts.dtype)
        heads = heads_of(config, rows, before, window)
        shape = (slots, config.num_value_heads, config.key_dim, config.value_dim)
        count = jnp.full((slots,), size, jnp.int32)
        zeros = jnp.zeros(shape, jnp.float32)
        return Answer(gdn_chunk(*heads[:5], zeros, count)[0])


def run_whole(target: Qwen3, tokens: jax.Array, taps: tuple[int, ...] = ()):
    """TargetRows of whole sequences, of up to 64 tokens, in one pass without a cache."""
    hybrid, recur = target.config.hybrid, None
    if hybrid is not None:
        recur = WholeRecurrence(hybrid, *tokens.shape)
    place = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = jnp.broadcast_to(place, tokens.shape)
    return target(tokens, positions, causal_attend, taps, recur)


def decode(engine, prompts, params):
    """Tokens of each prompt; seeds are the places in the list."""
    numbers = [engine.add_request(prompt, params, seed) for seed, prompt in enumerate(prompts)]
    tokens = {number: [] for number in numbers}
    while engine.has_unfinished:
        for progress in engine.step():
            tokens[progress.request] += [t for part in progress.rounds for t in part.tokens]
    return [tokens[number] for number in numbers]


@functools.cache
def greedy(family: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """transformers' own continuation of a prompt, everything recomputed at each step."""
    import torch

    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = oracle_of(family)(torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]
