"""One round, and the program that runs several of them in a dispatch without the host.

draft -> build -> verify -> accept -> commit
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ddtree_jax.errors import require
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.mtp import MTP
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.params import Leaves, Structure
from ddtree_jax.plan import RoundPlan
from ddtree_jax.sampling import SamplingMode
from ddtree_jax.stages.accept import accept
from ddtree_jax.stages.build import build
from ddtree_jax.stages.commit import Emitted, commit
from ddtree_jax.stages.draft import draft
from ddtree_jax.stages.draft_mtp import draft_mtp
from ddtree_jax.stages.verify import verify
from ddtree_jax.state import DecodeState
from ddtree_jax.tree import Tree, Walk, root_only
from pallas_kernels import dispatch

# (tree, walk, lengths [B]) -> the walk that is committed instead
ForceWalk = Callable[[Tree, Walk, Array], Walk]


class RoundRecord(NamedTuple):
    """The inside of a round, for tracing."""

    tree: Tree
    walk: Walk


def run_round(
    target: Qwen3,
    drafter: DFlash | MTP | None,
    state: DecodeState,
    *,
    plan: RoundPlan,
    mode: SamplingMode,
    force: ForceWalk | None = None,
) -> tuple[DecodeState, Emitted, RoundRecord]:
    """One round of every active slot. force: see `make_decode`."""
    # A slot that does not run sees no prefix, so it costs no attention over its old one.
    lengths = jnp.where(state.active, state.lengths, 0)
    tree, tap_layers = root_only(state.root), ()
    # The scopes name every kernel's stage in a profile (scripts/bench_round.py).
    if plan.drafts:
        pending = state.pending._replace(count=jnp.where(state.active, state.pending.count, 0))
        with jax.named_scope("draft"):
            if plan.mtp:
                candidates, draft_cache = draft_mtp(
                    target, drafter, state.draft, pending, lengths, plan
                )
            else:
                tap_layers = drafter.config.tap_layers
                candidates, draft_cache = draft(
                    target, drafter, state.draft, pending, state.root, lengths, plan
                )
        state = state._replace(draft=draft_cache)
        with jax.named_scope("build"):
            tree = build(candidates, state.root, plan)
    with jax.named_scope("verify"):
        verified = verify(
            target, state.target, tree, lengths, tap_layers, plan, state.recurrent, state.active
        )
    if verified.moved is not None:
        state = state._replace(recurrent=verified.moved)
    rows = verified.rows
    if plan.mtp:
        # What this drafter reads of a committed row.
        rows = rows._replace(features=rows.hidden)
    with jax.named_scope("accept"):
        walk = accept(verified.logits, tree, lengths, state.requests, plan, mode)
        if force is not None:
            walk = force(tree, walk, lengths)
    with jax.named_scope("commit"):
        state, emitted = commit(state, tree, rows, walk, verified.stash, plan.implementation)
    return state, emitted, RoundRecord(tree, walk)


class Report(NamedTuple):
    """What the rounds of one dispatch emitted, on the host (numpy), for slot b and round n."""

    active: np.ndarray  # bool [B]: the slot goes on
    count: np.ndarray  # int32 [B, N]: tokens emitted
    accepted: np.ndarray  # int32 [B, N]: root and accepted nodes; 0 where the slot did not run
    token: np.ndarray  # int32 [B, N, R]


def _record(
    packed: Int[Array, "B X"], emitted: Emitted, index: Int[Array, ""], rounds: int
) -> Int[Array, "B X"]:
    width = emitted.token.shape[1]
    update = jax.lax.dynamic_update_slice
    packed = update(packed, emitted.count[:, None], (0, 1 + index))
    packed = update(packed, emitted.accepted[:, None], (0, 1 + rounds + index))
    return update(packed, emitted.token, (0, 1 + 2 * rounds + width * index))


def unpack_report(packed: Int[Array, "B X"], rounds: int) -> Report:
    """Reads a dispatch's packed report: the one transfer to the host."""
    packed = np.asarray(packed)
    _, count, accepted, token = np.split(packed, [1, 1 + rounds, 1 + 2 * rounds], axis=1)
    return Report(packed[:, 0] == 1, count, accepted, token.reshape(*count.shape, -1))


DecodeProgram = Callable[
    [Leaves, Leaves, DecodeState], tuple[DecodeState, Int[Array, "B X"], RoundRecord | None]
]


def make_decode(
    target: Structure[Qwen3],
    drafter: Structure[DFlash | MTP] | None,
    *,
    plan: RoundPlan,
    mode: SamplingMode,
    rounds: int,
    trace: bool = False,
    force: ForceWalk | None = None,
) -> DecodeProgram:
    """A jitted program of up to `rounds` rounds; the state is donated.

    The loop leaves early when no slot is active; the host reads nothing inside. The second
    result packs all of the report into one array: [active, counts, accepted, tokens] a slot.
    trace: the third result is the record of the one round that runs; None otherwise.
    force: replaces the walk, so that benchmarks commit a given number of nodes. Not lossless.
    """
    require(rounds == 1 or not trace, f"`rounds` must be 1 to trace, got {rounds}")

    # In a command buffer, kernels that do not depend on each other run side by side: the commit of
    # all layers costs about one launch.
    options = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    on_gpu = dispatch.platform() == "gpu"

    @partial(jax.jit, donate_argnums=(2,), compiler_options=options if on_gpu else None)
    def decode(target_leaves: Leaves, draft_leaves: Leaves, state: DecodeState):
        target_model = target.merge(target_leaves)
        draft_model = drafter.merge(draft_leaves) if plan.drafts else None
        slots = state.root.shape[0]

        def more(carry):
            index, state, _ = carry
            return (index < rounds) & jnp.any(state.active)

        def step(carry):
            index, state, packed = carry
            state, emitted, _ = run_round(
                target_model, draft_model, state, plan=plan, mode=mode, force=force
            )
            return index + 1, state, _record(packed, emitted, index, rounds)

        packed = jnp.zeros((slots, 1 + rounds * (2 + plan.width)), jnp.int32)
        record = None
        if trace:
            state, emitted, record = run_round(
                target_model, draft_model, state, plan=plan, mode=mode, force=force
            )
            packed = _record(packed, emitted, jnp.int32(0), rounds)
        else:
            carry = (jnp.int32(0), state, packed)
            _, state, packed = jax.lax.while_loop(more, step, carry)
        return state, packed.at[:, 0].set(state.active.astype(jnp.int32)), record

    return decode
