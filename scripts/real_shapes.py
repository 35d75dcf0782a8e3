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

from ddtree_jax.config import (
    AttentionKind,
    DraftConfig,
    HybridConfig,
    MoEConfig,
    RopeConfig,
    TargetConfig,
)
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.models.targets import target_type
from ddtree_jax.params import Leaves, Structure, flatten_model
from ddtree_jax.state import DecodeState, init_state

Configs = tuple[TargetConfig, DraftConfig]

_TILE = 4_194_301  # prime, so that no matrix repeats it row by row
_STATE_SIZE = 0.2  # entries of a recurrent state: keys and updates of about unit length


def _pair(
    hidden: int, inner: int, *, tie: bool, layers: int = 36, heads: int = 32, vocab: int = 151936
) -> Configs:
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


def _hybrid_pair(
    hidden: int,
    inner: int,
    *,
    layers: int,
    heads: tuple[int, int],
    value_heads: int,
    taps: tuple[int, ...],
    window: int,
    draft_layers: int,
    draft_inner: int,
    moe: MoEConfig | None = None,
    small: bool = False,
) -> Configs:
    """Qwen3.6, three of four layers Gated DeltaNet, and its drafter: sliding layers, then a full
    one. heads: of queries, of keys. small: few and narrow heads, for a look without a GPU."""
    vocab, wide, narrow = (2048, 32, 16) if small else (248320, 256, 128)
    shared = {
        "hidden_size": hidden,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig.plain(1e7),
        "vocab_size": vocab,
    }
    target = TargetConfig(
        **shared,
        intermediate_size=inner,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=wide,
        num_layers=layers,
        tie_embeddings=False,
        max_positions=262144,
        eos_token_ids=(vocab - 1,),
        hybrid=HybridConfig(
            attention_layers=tuple(range(3, layers, 4)),
            rotary_dim=wide // 4,
            num_key_heads=2 if small else 16,
            num_value_heads=value_heads,
            key_dim=narrow,
            value_dim=narrow,
            conv_width=4,
        ),
        moe=moe,
    )
    sliding = AttentionKind(causal=True, window=window)
    full = AttentionKind(causal=False, window=None)
    draft = DraftConfig(
        **shared,
        intermediate_size=draft_inner,
        num_heads=4 if small else 32,
        num_kv_heads=2 if small else 8,
        head_dim=narrow,
        block_size=16,
        mask_token_id=vocab - 250,
        tap_layers=taps,
        target_num_layers=layers,
        attention=(sliding,) * (draft_layers - 1) + (full,),
    )
    return target, draft


def _experts(count: int, chosen: int, size: int) -> MoEConfig:
    return MoEConfig(
        num_experts=count, chosen_count=chosen, expert_size=size, shared_size=size, normalise=True
    )


_TINY = {"layers": 8, "heads": (4, 2), "value_heads": 4, "taps": (1, 3, 5), "window": 32}
_TINY |= {"draft_layers": 3, "draft_inner": 128, "small": True}

# "tiny..." are for a look without a GPU.
PAIRS = {
    "qwen3-8b": _pair(4096, 12288, tie=False),
    "qwen3-4b": _pair(2560, 9728, tie=True),
    "qwen3.6-27b": _hybrid_pair(
        5120,
        17408,
        layers=64,
        heads=(24, 4),
        value_heads=48,
        taps=(1, 16, 31, 46, 61),
        window=2048,
        draft_layers=5,
        draft_inner=17408,
    ),
    "qwen3.6-35b-a3b": _hybrid_pair(
        2048,
        512,
        layers=40,
        heads=(16, 2),
        value_heads=32,
        taps=(1, 6, 11, 16, 22, 27, 32, 37),
        window=4096,
        draft_layers=6,
        draft_inner=6144,
        moe=_experts(256, 8, 512),
    ),
    "tiny": _pair(64, 128, tie=True, layers=8, heads=4, vocab=2048),
    "tiny-hybrid": _hybrid_pair(64, 128, **_TINY),
    "tiny-moe": _hybrid_pair(64, 32, **_TINY, moe=_experts(16, 4, 32)),
}


def cut_layers(pair: Configs, layers: int | None) -> Configs:
    """The same widths with fewer target layers, for quick looks."""
    target, draft = pair
    if layers is None or layers >= target.num_layers:
        return pair
    taps = tuple(sorted({min(tap, layers - 2) for tap in draft.tap_layers}))
    hybrid = target.hybrid
    if hybrid is not None:
        kept = tuple(layer for layer in hybrid.attention_layers if layer < layers)
        hybrid = dataclasses.replace(hybrid, attention_layers=kept)
    target = dataclasses.replace(target, num_layers=layers, hybrid=hybrid)
    return target, dataclasses.replace(draft, tap_layers=taps, target_num_layers=layers)


def normal_tile(key: jax.Array) -> jax.Array:
    """What `spread_tile` makes arrays from."""
    return jax.random.normal(key, (_TILE,))


def spread_tile(tile: jax.Array, shift: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The tile, rolled and repeated to `shape`."""
    size = int(np.prod(shape))
    return jnp.tile(jnp.roll(tile, shift), -(-size // tile.size))[:size].reshape(shape)


@partial(jax.jit, static_argnums=(2, 3))
def _fill(
    tile: jax.Array,
    shift: jax.Array,
    shape: tuple[int, ...],
    dtype: str,
    scale: float = 1.0,
    mean: float = 0.0,
) -> jax.Array:
    """About N(mean, scale**2). Rounded before it is repeated: nothing wider than the result."""
    return spread_tile((mean + scale * tile).astype(dtype), shift, shape)


def _leaf(name: str, leaf: jax.ShapeDtypeStruct, tile: jax.Array, shift: jax.Array) -> jax.Array:
    """A weight as large as trained ones are, by the name of its module's field."""
    fill = partial(_fill, tile, shift, leaf.shape, str(leaf.dtype))
    if name == "log_rate":  # rates that forget within a token, and ones that keep thousands
        return jnp.log(jnp.linspace(0.05, 8.0, leaf.size)).astype(leaf.dtype)
    if name == "time_bias":
        return fill(1.0, -2.0)
    if name in ("scale", "norm_scale"):
        return fill(0.1, 1.0)
    if name == "weight":  # of a norm that multiplies by 1 + weight
        return fill(0.1)
    if name == "embedding":
        return fill(0.02)
    return fill(leaf.shape[-2] ** -0.5)  # [..., in, out]


def leaf_names(structure: Structure) -> list[str]:
    """The field of each leaf, in the order of leaves."""
    numbers = range(structure.tree.num_leaves)
    flat, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(structure.tree, numbers))
    return [
        next(str(key.key) for key in reversed(path) if isinstance(key, jax.tree_util.DictKey))
        for path, _ in flat
    ]


def random_leaves(structure: Structure, leaves: Leaves, seed: int) -> Leaves:
    """Arrays for abstract leaves."""
    tile = normal_tile(jax.random.key(seed))
    named = enumerate(zip(leaf_names(structure), leaves, strict=True))
    return tuple(_leaf(*entry, tile, jnp.int32(7919 * (number + 1))) for number, entry in named)


def abstract_model(kind: type[Qwen3] | type[DFlash], config: object) -> tuple[Structure, Leaves]:
    """Structure and abstract leaves, bfloat16 where a module leaves the dtype to its caller."""
    return flatten_model(nnx.eval_shape(lambda: kind(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and a drafter with random weights, or with the shapes of weights alone."""

    target: TargetConfig
    draft: DraftConfig
    structures: tuple[Structure[Qwen3], Structure[DFlash]]
    leaves: tuple[Leaves, Leaves]

    @classmethod
    def abstract(cls, target: TargetConfig, draft: DraftConfig) -> "Pair":
        kinds = ((target_type(target), target), (DFlash, draft))
        structures, leaves = zip(*(abstract_model(*kind) for kind in kinds), strict=True)
        return cls(target, draft, structures, leaves)

    @classmethod
    def random(cls, target: TargetConfig, draft: DraftConfig) -> "Pair":
        pair = cls.abstract(target, draft)
        models = enumerate(zip(pair.structures, pair.leaves, strict=True))
        leaves = tuple(random_leaves(*model, seed=seed) for seed, model in models)
        return dataclasses.replace(pair, leaves=leaves)


def random_state(
    target: TargetConfig, draft: DraftConfig | None, *, slots: int, rows: int, room: int
) -> DecodeState:
    """All slots active behind `rows` random cache rows, with `room` for more."""
    tile = normal_tile(jax.random.key(1))
    state = init_state(target, draft, slots=slots, rows=rows + room, dtype=jnp.bfloat16)

    def fill(tree, first: int, scale: float = 1.0):
        leaves, structure = jax.tree.flatten(tree)
        made = [
            _fill(tile, jnp.int32(104729 * (first + number)), leaf.shape, str(leaf.dtype), scale)
            for number, leaf in enumerate(leaves)
        ]
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
    if state.recurrent is not None:
        matrix = fill(state.recurrent.matrix, 9000, _STATE_SIZE)
        conv = fill(state.recurrent.conv, 11000)
        state = state._replace(recurrent=state.recurrent._replace(matrix=matrix, conv=conv))
    if draft is not None:
        features = fill(state.pending.features, 7000)
        pending = state.pending._replace(features=features, count=many(4))
        state = state._replace(draft=fill(state.draft, 5000), pending=pending)
    return state
