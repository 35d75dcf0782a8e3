"""Tiny random models in float32, and the plainest way to run them: the oracle of other tests."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.config import AttentionKind, DraftConfig, RopeConfig, TargetConfig
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.qwen3 import Qwen3

VOCAB = 61
SHAPE = {
    "hidden_size": 48,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig.plain(1e4),
    "vocab_size": VOCAB,
}
TARGET = TargetConfig(
    **SHAPE,
    intermediate_size=80,
    num_layers=2,
    tie_embeddings=False,
    max_positions=512,
    eos_token_ids=(1,),
)
DRAFT = DraftConfig(
    **SHAPE,
    intermediate_size=64,
    block_size=6,
    mask_token_id=2,
    tap_layers=(0, 1),
    target_num_layers=2,
    attention=(
        AttentionKind(causal=False, window=None),
        AttentionKind(causal=True, window=9),
    ),
)


def randomise(model: nnx.Module, seed: int) -> nnx.Module:
    """Norm scales off one, so that a forgotten scale shows; the rest is random already."""
    rng = np.random.default_rng(seed)

    def change(leaf):
        if leaf.ndim > 1:
            return leaf
        return jnp.array(1 + 0.2 * rng.normal(size=leaf.shape), leaf.dtype)

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(change, state))


def tiny_target(seed: int = 0) -> Qwen3:
    model = Qwen3(TARGET, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    # Larger embeddings make the next token depend on the last ones.
    model.embedding.set_value(model.embedding[...] * 50)
    return randomise(model, seed)


def tiny_drafter(seed: int = 1) -> DFlash:
    return randomise(DFlash(DRAFT, dtype=jnp.float32, rngs=nnx.Rngs(seed)), seed)


def causal_attend(layer, query, key, value):
    """Full causal attention over the rows given, in plain numpy order of operations."""
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2)
    score = jnp.einsum("bqnh,bknh->bnqk", query, key) * query.shape[-1] ** -0.5
    size = query.shape[1]
    seen = jnp.tril(jnp.ones((size, size), bool))[None, None]
    weight = jax.nn.softmax(jnp.where(seen, score, -1e30), axis=-1)
    return jnp.einsum("bnqk,bknh->bqnh", weight, value)


@nnx.jit
def _run(target: Qwen3, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return target.logits(target(tokens, positions, causal_attend).hidden)


def logits_of(target: Qwen3, tokens: list[int], size: int = 96) -> np.ndarray:
    """Logits after each token of one sequence, by one pass without any cache."""
    padded = np.zeros((1, size), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_run(target, jnp.array(padded)))[0, : len(tokens)]


def greedy_continuation(target: Qwen3, prompt: list[int], count: int) -> list[int]:
    """The next `count` tokens by argmax, recomputing everything each time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(target, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
