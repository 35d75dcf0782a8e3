"""Tiny targets of the newer families as modules, transformers' models of the same weights, and
the plainest way to run ours."""

import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tiny_hybrid
from models import causal_attend

from convert import convert_target
from ddtree_jax import checkpoint
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.recurrent import TreeRecurrence, init_recurrent
from ddtree_jax.tree import Tree


@functools.cache
def target_of(family: str, seed: int = 0) -> Qwen3:
    """Our model of `tiny_hybrid.write_hub(family, seed)`, through the converter."""
    with tempfile.TemporaryDirectory() as name:
        source = tiny_hybrid.write_hub(Path(name) / "hf", family, seed)
        folder = convert_target(source, Path(name) / "out", progress=False)
        return checkpoint.load_target(folder, jnp.float32)


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


class Chain(NamedTuple):
    """A chain of R rows after nothing, as a tree, and its mask."""

    tree: Tree
    visible: jax.Array


def chain(slots: int, size: int) -> Chain:
    node = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (slots, size))
    tree = Tree(node, node - 1, node, node >= 0, node.astype(jnp.float32))
    visible = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool))[None], (slots, size, size))
    return Chain(tree, visible)


def run_whole(target: Qwen3, tokens: jax.Array, taps: tuple[int, ...] = ()):
    """TargetRows of whole sequences in one pass, without a cache."""
    recur, size = None, tokens.shape[1]
    if target.config.hybrid is not None:
        state = init_recurrent(target.config, tokens.shape[0], jnp.float32)
        recur = TreeRecurrence(
            target.config.hybrid,
            state,
            *chain(*tokens.shape),
            max_depth=size - 1,
            implementation="xla",
        )
    positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], tokens.shape)
    return target(tokens, positions, causal_attend, taps, recur)
