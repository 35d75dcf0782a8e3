"""Prefill: a prompt enters a slot in chunks, each verified like a chain that is accepted whole."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ddtree_jax.cache import KVCache, row_index, write_rows
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.mtp import MTP
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.params import Leaves, Structure
from ddtree_jax.recurrent import ChunkRecurrence
from ddtree_jax.sampling import Requests, SamplingMode, choose_tokens
from ddtree_jax.stages.commit import cut_at_stop
from ddtree_jax.stages.draft_mtp import prefill_mtp
from ddtree_jax.state import DecodeState
from pallas_kernels import tree_attention

CHUNK_SIZES = (32, 128, 512)


class Chunk(NamedTuple):
    """Part of a prompt: `count` tokens of `token`, at positions start.., for one slot."""

    token: Int[Array, "1 P"]
    count: Int[Array, " 1"]
    start: Int[Array, " 1"]
    slot: Int[Array, " 1"]


class Admission(NamedTuple):
    """What a slot needs to know of its request, beside the prompt."""

    max_tokens: Int[Array, " 1"]
    stop_tokens: Int[Array, "1 E"]
    requests: Requests


def split_prompt(prompt: Sequence[int], slot: int) -> list[Chunk]:
    """Chunks of at most 512 tokens; the last is padded to the next chunk size."""
    largest, chunks = CHUNK_SIZES[-1], []
    for start in range(0, len(prompt), largest):
        part = prompt[start : start + largest]
        size = next(size for size in CHUNK_SIZES if size >= len(part))
        token = np.zeros((1, size), np.int32)
        token[0, : len(part)] = part
        numbers = (np.array([number], np.int32) for number in (len(part), start, slot))
        chunks.append(Chunk(token, *numbers))
    return chunks


def _slot_cache(cache: KVCache, slot: Int[Array, " 1"]) -> KVCache:
    def take(layer: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(layer, slot[0], 1, axis=0)

    return jax.tree.map(take, cache)


def _run_chunk(
    target: Qwen3, drafter: DFlash | MTP | None, state: DecodeState, chunk: Chunk
) -> tuple[DecodeState, Array]:
    """Writes the chunk's rows to both caches and moves the recurrent state on; returns the
    target's hidden rows [1, P, D]."""
    size = chunk.token.shape[1]
    offset = jnp.arange(size, dtype=jnp.int32)
    positions = chunk.start[:, None] + offset[None, :]
    causal = (offset[:, None] >= offset[None, :])[None]
    prefix = _slot_cache(state.target, chunk.slot)

    def attend(layer: int, query: Array, key: Array, value: Array) -> Array:
        # The plain definition: a kernel for few rows gains nothing on a wide chunk.
        return tree_attention(
            query,
            prefix.keys[layer],
            prefix.values[layer],
            key,
            value,
            chunk.start,
            causal,
            scale=target.config.head_dim**-0.5,
            implementation="xla",
        )

    taps, recur = drafter.config.tap_layers if isinstance(drafter, DFlash) else (), None
    if state.recurrent is not None:
        recur = ChunkRecurrence(
            target.config.hybrid, state.recurrent, chunk.slot, chunk.start, chunk.count, size
        )
    rows = target(chunk.token, positions, attend, taps, recur)
    if recur is not None:
        state = state._replace(recurrent=recur.take())
    index = row_index(chunk.start, chunk.count, size, state.target.keys[0].shape[1])
    # After all reads of the cache: a write that need not wait for them costs a copy of it.
    cache, hidden = jax.lax.optimization_barrier((state.target, rows.hidden))
    state = state._replace(target=write_rows(cache, rows.keys, rows.values, index, chunk.slot))
    if isinstance(drafter, DFlash):
        keys, values = drafter.context_rows(rows.features, positions)
        state = state._replace(draft=write_rows(state.draft, keys, values, index, chunk.slot))
    elif drafter is not None:
        state = _extend_mtp(target, drafter, state, chunk, hidden)
    return state, hidden


def _extend_mtp(
    target: Qwen3, block: MTP, state: DecodeState, chunk: Chunk, hidden: Array
) -> DecodeState:
    """Takes a chunk's pairs into the MTP block's cache; its last row waits for the next token."""
    features = state.pending.features
    keys, values, index = prefill_mtp(
        target,
        block,
        _slot_cache(state.draft, chunk.slot),
        features[chunk.slot, :1],
        hidden,
        chunk.token,
        chunk.start,
        chunk.count,
    )
    last = jnp.take_along_axis(hidden, (chunk.count - 1)[:, None, None], axis=1)
    pending = state.pending._replace(features=features.at[chunk.slot, :1].set(last))
    cache = write_rows(state.draft, keys, values, index, chunk.slot)
    return state._replace(draft=cache, pending=pending)


def make_extend(target: Structure[Qwen3], drafter: Structure[DFlash | MTP] | None):
    """A jitted program for every chunk of a prompt but its last; the state is donated."""

    @partial(jax.jit, donate_argnums=(2,))
    def extend(target_leaves: Leaves, draft_leaves: Leaves, state: DecodeState, chunk: Chunk):
        drafting = drafter.merge(draft_leaves) if drafter is not None else None
        return _run_chunk(target.merge(target_leaves), drafting, state, chunk)[0]

    return extend


def make_admit(
    target: Structure[Qwen3], drafter: Structure[DFlash | MTP] | None, *, mode: SamplingMode
):
    """A jitted program for the last chunk: chooses the first token and starts the slot.

    Returns the state and [first token, slot still active] (int32 [2]).
    """

    @partial(jax.jit, donate_argnums=(2,))
    def admit(
        target_leaves: Leaves,
        draft_leaves: Leaves,
        state: DecodeState,
        chunk: Chunk,
        admission: Admission,
    ):
        target_model = target.merge(target_leaves)
        drafting = drafter.merge(draft_leaves) if drafter is not None else None
        state, hidden = _run_chunk(target_model, drafting, state, chunk)
        last = jnp.take_along_axis(hidden, (chunk.count - 1)[:, None, None], axis=1)
        length = chunk.start + chunk.count
        first = choose_tokens(
            target_model.logits(last),
            jnp.zeros((1, 1), jnp.int32),
            length,
            admission.requests,
            max_depth=0,
            mode=mode,
        )
        one = jnp.ones((1,), jnp.int32)
        emitted, ends = cut_at_stop(first, one, admission.stop_tokens, admission.max_tokens)
        new = {
            "lengths": length,
            "root": first[:, 0],
            "active": ~ends,
            "remaining": admission.max_tokens - emitted,
            "stop_tokens": admission.stop_tokens,
            "requests": admission.requests,
        }
        if state.pending is not None:
            # DFlash has seen all rows; the MTP block's last pair needed the token chosen here.
            waiting = 1 if isinstance(drafting, MTP) else 0
            pending = state.pending._replace(
                token=state.pending.token.at[chunk.slot, 0].set(first[:, 0]),
                count=state.pending.count.at[chunk.slot].set(waiting),
            )
            state = state._replace(pending=pending)

        def put(whole: Array, entry: Array) -> Array:
            return whole.at[chunk.slot].set(entry)

        fields = {name: jax.tree.map(put, getattr(state, name), new[name]) for name in new}
        report = jnp.concatenate([first[:, 0], (~ends).astype(jnp.int32)])
        return state._replace(**fields), report

    return admit
