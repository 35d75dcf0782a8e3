"""Targets and drafters at the shapes of real checkpoints, with random weights made on the device.

Weights are one random tile, rolled by another amount for every matrix and repeated: never zeros,
no two matrices alike, and made in milliseconds where `jax.random` takes a minute for 8 B.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.config import AttentionKind, DraftConfig, RopeConfig, TargetConfig
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.params import Leaves, Structure, flatten_model
from ddtree_jax.state import DecodeState, init_state

_TILE = 4_194_301  # prime, so that no matrix repeats it row by row


def _pair(
    hidden: int, inner: int, *, tie: bool, layers: int = 36, heads: int = 32, vocab: int = 151936
) -> tuple[TargetConfig, DraftConfig]:
    """Qwen3 and its DFlash drafter of 5 layers, block 16."""
    taps = tuple(int(tap) for tap in np.linspace(1, layers - 3, 5))
    shared = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": heads,
        "num_kv_heads": heads // 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig.plain(1e6),
        "vocab_size": vocab,
    }
    target = TargetConfig(
        **shared,
        num_layers=layers,
        tie_embeddings=tie,
        max_positions=40960,
        eos_token_ids=(vocab - 1,),
    )
    draft = DraftConfig(
        **shared,
        block_size=16,
        mask_token_id=vocab - 267,
        tap_layers=taps,
        target_num_layers=layers,
        attention=(AttentionKind(causal=False, window=None),) * 5,
    )
    return target, draft


PAIRS = {
    "qwen3-8b": _pair(4096, 12288, tie=False),
    "qwen3-4b": _pair(2560, 9728, tie=True),
    "tiny": _pair(64, 128, tie=True, layers=8, heads=4, vocab=2048),  # for a look without a GPU
}


def cut_layers(pair: tuple[TargetConfig, DraftConfig], layers: int | None) -> tuple:
    """The same widths with fewer target layers, for quick looks."""
    target, draft = pair
    if layers is None or layers >= target.num_layers:
        return pair
    taps = tuple(sorted({min(tap, layers - 2) for tap in draft.tap_layers}))
    target = dataclasses.replace(target, num_layers=layers)
    return target, dataclasses.replace(draft, tap_layers=taps, target_num_layers=layers)


def normal_tile(key: jax.Array) -> jax.Array:
    """What `spread_tile` makes arrays from."""
    return jax.random.normal(key, (_TILE,))


def spread_tile(tile: jax.Array, shift: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The tile, rolled and repeated to `shape`."""
    size = int(np.prod(shape))
    return jnp.tile(jnp.roll(tile, shift), -(-size // tile.size))[:size].reshape(shape)


@partial(jax.jit, static_argnums=(2, 3))
def _fill(tile: jax.Array, shift: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    flat = spread_tile(tile, shift, shape)
    if len(shape) == 1:  # scales of norms
        return (1.0 + 0.1 * flat).astype(dtype)
    # [in, out] matrices; the embedding's rows are about as large as a trained model's.
    scale = 0.02 if shape[0] > shape[1] and shape[0] > 100_000 else shape[0] ** -0.5
    return (scale * flat).astype(dtype)


def random_leaves(leaves: Leaves, seed: int) -> Leaves:
    """Arrays for abstract leaves."""
    tile = normal_tile(jax.random.key(seed))
    return tuple(
        _fill(tile, jnp.int32(7919 * (number + 1)), leaf.shape, str(leaf.dtype))
        for number, leaf in enumerate(leaves)
    )


def abstract_model(kind: type[Qwen3] | type[DFlash], config: object) -> tuple[Structure, Leaves]:
    """Structure and abstract bfloat16 leaves."""
    return flatten_model(nnx.eval_shape(lambda: kind(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))


def random_state(
    target: TargetConfig, draft: DraftConfig | None, *, slots: int, rows: int, room: int
) -> DecodeState:
    """All slots active behind `rows` random cache rows, with `room` for more."""

    def build(key: jax.Array) -> DecodeState:
        state = init_state(target, draft, slots=slots, rows=rows + room, dtype=jnp.bfloat16)
        tile = normal_tile(key)

        def fill(tree, first: int):
            leaves, structure = jax.tree.flatten(tree)
            made = [
                _fill(tile, jnp.int32(104729 * (first + number)), leaf.shape, "float32")
                for number, leaf in enumerate(leaves)
            ]
            made = [(x * x.shape[0] ** 0.5).astype(jnp.bfloat16) for x in made]
            return jax.tree.unflatten(structure, made)

        def many(value: int) -> jax.Array:
            return jnp.full((slots,), value, jnp.int32)

        state = state._replace(
            target=fill(state.target, 1),
            lengths=many(rows),
            root=jnp.arange(slots, dtype=jnp.int32) + 1000,
            active=jnp.ones((slots,), bool),
            remaining=many(2**30),
        )
        if draft is not None:
            features = fill(state.pending.features, 7000)
            state = state._replace(
                draft=fill(state.draft, 5000), pending=state.pending._replace(features=features)
            )
            state = state._replace(pending=state.pending._replace(count=many(4)))
        return state

    return jax.jit(build)(jax.random.key(1))
