"""State of Gated DeltaNet layers: what a slot keeps beside its cache, and how it moves on.

As with the cache, verify only reads it: each layer's rows of a tree stay outside as a stash until
commit moves the state along the accepted path. A root alone is always accepted, so there verify
moves the state itself.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from ddtree_jax.config import HybridConfig, TargetConfig
from ddtree_jax.models.gdn import Answer, GdnRows, heads_of
from ddtree_jax.tree import Tree, ancestors, node_paths
from pallas_kernels import gdn_chunk, gdn_commit, gdn_step, gdn_tree


class RecurrentState(NamedTuple):
    """One entry a recurrent layer. matrix: float32 whatever the model's dtype. conv: the last
    W inputs of the convolution, that of position p in row p mod W, so that a new one takes the
    place of the oldest and none moves; in the model's dtype, zero before the start."""

    matrix: tuple[Float32[Array, "B Hv Dk Dv"], ...]
    conv: tuple[Float[Array, "B W Ck"], ...]


class Stash(NamedTuple):
    """Rows of one layer that commit may need: of each node its input to the convolution, its key,
    the update it makes and its log-decay. Nothing of a state's size."""

    mixed: Float[Array, "B T Ck"]
    key: Float[Array, "B T Hk Dk"]
    update: Float32[Array, "B T Hv Dv"]
    log_decay: Float32[Array, "B T Hv"]


def init_recurrent(config: TargetConfig, slots: int, dtype: DTypeLike) -> RecurrentState | None:
    """The state before any token; None for a target whose layers all attend."""
    hybrid = config.hybrid
    if hybrid is None:
        return None
    matrix = (slots, hybrid.num_value_heads, hybrid.key_dim, hybrid.value_dim)
    conv = (slots, hybrid.conv_width, hybrid.conv_channels)
    layers = config.recurrent_layers
    return RecurrentState(
        tuple(jnp.zeros(matrix, jnp.float32) for _ in layers),
        tuple(jnp.zeros(conv, dtype) for _ in layers),
    )


def tree_window(tree: Tree, lengths: Int[Array, " B"], width: int) -> Int[Array, "B T W"]:
    """For each node and distance 0..W-1: the row that lies so far back on its path, in the W
    committed inputs followed by the tree's. One table serves all layers."""
    window = []
    for distance, ancestor in enumerate(ancestors(tree, width)):
        committed = (lengths[:, None] + tree.depth - distance) % width
        window.append(jnp.where(ancestor < 0, committed, width + ancestor))
    return jnp.stack(window, axis=2)


class TreeRecurrence:
    """The recurrence of a tree's nodes; `stash` fills as the layers of one pass call it."""

    def __init__(
        self,
        config: HybridConfig,
        state: RecurrentState,
        tree: Tree,
        lengths: Int[Array, " B"],
        *,
        max_depth: int,
        implementation: str | None,
    ):
        self.stash: list[Stash] = []
        self._config, self._state, self._path = config, state, node_paths(tree, max_depth)
        self._window = tree_window(tree, lengths, config.conv_width)
        self._implementation = implementation

    def __call__(self, number: int, rows: GdnRows) -> Answer:
        before, path = self._state.conv[number], self._path
        heads = heads_of(self._config, rows, before, self._window, path, self._implementation)
        nodes = gdn_tree(
            *heads[:5],
            self._state.matrix[number],
            path,
            scales=heads.scales,
            implementation=self._implementation,
        )
        self.stash.append(Stash(heads.mixed, heads.key, nodes.update, heads.log_decay))
        return Answer(nodes.out)


class _Moving:
    """A recurrence that moves the state itself; `take` gives what its layers left in `_after`, once
    all of them have called."""

    def __init__(self, config: HybridConfig, state: RecurrentState):
        self._config, self._state = config, state
        self._after: list[tuple[Array, Array]] = []

    def take(self) -> RecurrentState:
        return RecurrentState(*zip(*self._after, strict=True))


class StepRecurrence(_Moving):
    """The recurrence of one token a slot, `count` 0 or 1."""

    def __init__(
        self,
        config: HybridConfig,
        state: RecurrentState,
        lengths: Int[Array, " B"],
        count: Int[Array, " B"],
        implementation: str | None,
    ):
        super().__init__(config, state)
        self._lengths, self._count, self._implementation = lengths, count, implementation

    def __call__(self, number: int, rows: GdnRows) -> Answer:
        step = gdn_step(
            rows.parts,
            self._state.conv[number],
            rows.kernel,
            rows.log_rate,
            rows.time_bias,
            rows.scale,
            self._state.matrix[number],
            self._lengths,
            self._count,
            num_key_heads=self._config.num_key_heads,
            implementation=self._implementation,
        )
        self._after.append((step.state, step.conv))
        return Answer(step.out, step.squares)


def commit_recurrent(
    state: RecurrentState,
    stash: tuple[Stash, ...],
    path: Int[Array, "B R"],
    lengths: Int[Array, " B"],
    count: Int[Array, " B"],
    implementation: str | None,
) -> RecurrentState:
    """The state after the first `count` nodes of `path`, of which the root is at position
    `lengths`; count 0 changes nothing."""
    matrix, conv = [], []
    for old, before, rows in zip(state.matrix, state.conv, stash, strict=True):
        matrix.append(
            gdn_commit(
                old,
                rows.key,
                rows.update,
                rows.log_decay,
                path,
                count,
                implementation=implementation,
            )
        )
        conv.append(_keep_inputs(before, rows.mixed, path, lengths, count))
    return RecurrentState(tuple(matrix), tuple(conv))


def _keep_inputs(
    before: Float[Array, "B W Ck"],
    mixed: Float[Array, "B T Ck"],
    path: Int[Array, "B R"],
    lengths: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Float[Array, "B W Ck"]:
    """`before` with the path's last W rows in their places."""
    width = before.shape[1]
    row, last = jnp.arange(width, dtype=jnp.int32)[None, :], (lengths + count)[:, None] - 1
    # The latest position that belongs in a row, counted from the path's start.
    place = last - (last - row) % width - lengths[:, None]
    on_path = jnp.clip(place, 0, path.shape[1] - 1)
    node = jnp.maximum(jnp.take_along_axis(path, on_path, axis=1), 0)
    new = jnp.take_along_axis(mixed, node[:, :, None], axis=1)
    return jnp.where((place >= 0)[:, :, None], new, before)


class ChunkRecurrence(_Moving):
    """The recurrence of part of a prompt: P rows, `count` of them real, in one slot; the others
    stay as they are."""

    def __init__(
        self,
        config: HybridConfig,
        state: RecurrentState,
        slot: Int[Array, " 1"],
        start: Int[Array, " 1"],
        count: Int[Array, " 1"],
        size: int,
    ):
        super().__init__(config, state)
        self._slot, self._start, self._count = slot, start, count
        self._path = jnp.arange(size, dtype=jnp.int32)[None, :]
        width = config.conv_width
        place = self._path[:, :, None] - jnp.arange(width, dtype=jnp.int32)[None, None, :]
        self._window = jnp.where(place < 0, (start[0] + place) % width, width + place)

    def __call__(self, number: int, rows: GdnRows) -> Answer:
        layer = self._state.matrix[number], self._state.conv[number]
        matrix, before = (self._of_slot(part) for part in layer)
        heads = heads_of(self._config, rows, before, self._window)
        out, matrix = gdn_chunk(*heads[:5], matrix, self._count)
        kept = _keep_inputs(before, heads.mixed, self._path, self._start, self._count)
        moved = zip(layer, (matrix, kept), strict=True)
        self._after.append(tuple(part.at[self._slot].set(entry) for part, entry in moved))
        return Answer(out)

    def _of_slot(self, part: Array) -> Array:
        """The slot's entry; nothing of the slot's last request is left at a prompt's start."""
        return jnp.where(self._start[0] == 0, jnp.zeros((), part.dtype), part[self._slot])
