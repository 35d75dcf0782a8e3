"""Calls of the ops of a Gated DeltaNet layer, as `kernel_problems` has those of the others."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from kernel_cases import DEPTHS, Case, Widths
from kernel_problems import Cost, Draw, Problem, added, best_first_tree, by_slot, moves, size

from ddtree_jax.recurrent import tree_window
from ddtree_jax.tree import node_paths
from pallas_kernels import (
    gated_norm,
    gdn_commit,
    gdn_heads,
    gdn_step,
    gdn_tree,
    gdn_wy,
    normed_matmul,
)
from pallas_kernels.gdn_step import GdnStep
from pallas_kernels.gdn_tree import definition as gdn_definition

_EPS = 1e-6
_TAPS = 4


def _columns(widths: Widths) -> tuple[int, int, int]:
    """Of the in-projection: convolved channels, those of the gate, and beta with decay."""
    values = widths.gdn_heads * widths.gdn_dim
    return 2 * widths.gdn_key_heads * widths.gdn_dim + values, values, 2 * widths.gdn_heads


def heads(widths: Widths, case: Case) -> Problem:
    slots, (channels, values, rates) = case.slots, _columns(widths)

    def arguments(draw: Draw) -> tuple:
        parts = draw.normal(1, slots, case.nodes, channels + values + rates)
        before, kernel = draw.normal(slots, _TAPS, channels), draw.normal(_TAPS, channels)
        lengths = jnp.arange(slots, dtype=jnp.int32) + 5
        tree = best_first_tree(draw, slots, case.nodes)
        window = tree_window(tree, lengths, _TAPS)
        scales = (draw.normal(widths.gdn_heads, dtype=jnp.float32) for _ in range(2))
        return parts, before, kernel, window, *scales, node_paths(tree, DEPTHS)

    def op(*arguments: jax.Array, **options: Any) -> Any:
        """As a round calls it, with scales."""
        sizes = {"num_key_heads": widths.gdn_key_heads, "key_dim": widths.gdn_dim}
        return gdn_heads(*arguments[:-1], path=arguments[-1], **sizes, **options)

    return Problem(arguments=arguments, op=op, cost=moves, cold=False)


def gated_output(widths: Widths, case: Case) -> Problem:
    channels, values, rates = _columns(widths)
    rows = (case.slots, case.nodes)

    def arguments(draw: Draw) -> tuple:
        parts = draw.normal(1, *rows, channels + values + rates)
        scale = draw.normal(widths.gdn_dim, dtype=jnp.float32)
        return draw.normal(*rows, widths.gdn_heads, widths.gdn_dim), parts, scale

    def cost(arguments: tuple, out: jax.Array) -> Cost:
        return Cost(3 * size(out) + size(arguments[2]), 0)  # of parts it reads the gate alone

    op = functools.partial(gated_norm, start=channels, eps=_EPS)
    return Problem(arguments=arguments, op=op, cost=cost, cold=False)


def delta_net(widths: Widths, case: Case) -> Problem:
    slots, nodes, dim = case.slots, case.nodes, widths.gdn_dim
    keys, heads = widths.gdn_key_heads, widths.gdn_heads

    def arguments(draw: Draw) -> tuple:
        query, key = (draw.normal(slots, nodes, keys, dim) for _ in range(2))
        value = draw.normal(slots, nodes, heads, dim)
        raw = [draw.normal(slots, nodes, heads, dtype=jnp.float32) for _ in range(2)]
        state = draw.normal(slots, heads, dim, dim, dtype=jnp.float32, scale=0.5)
        path = node_paths(best_first_tree(draw, slots, nodes), DEPTHS)
        decay, beta = -jnp.exp(raw[0] - 3.0), jax.nn.sigmoid(raw[1])
        scales = gdn_wy.scales(query, key, decay, path)
        return query, key, value, decay, beta, state, path, *scales

    def op(*arguments: jax.Array, **options: Any) -> Any:
        """As a round calls it, told of scales."""
        return gdn_tree(*arguments[:7], scales=gdn_wy.GdnScales(*arguments[7:]), **options)

    def cost(arguments: tuple, result: Any) -> Cost:
        """Two products with the state a node; for each ancestor, two of its key and two of its
        update, of which the solve is one."""
        pairs = int(jnp.sum(arguments[6] >= 0))
        states = 4 * slots * nodes * heads * dim * dim
        return Cost(size(arguments, result), states + 4 * pairs * dim * (keys + heads))

    return Problem(
        arguments=arguments,
        op=op,
        cost=cost,
        definition=by_slot(lambda *arguments: gdn_definition(*arguments[:7])),
    )


def accepted_state(widths: Widths, case: Case) -> Problem:
    """A path of four nodes, or as many as there are."""
    slots, nodes, dim = case.slots, case.nodes, widths.gdn_dim
    shape = (slots, nodes, widths.gdn_heads)

    def arguments(draw: Draw) -> tuple:
        state = draw.normal(slots, widths.gdn_heads, dim, dim, dtype=jnp.float32, scale=0.5)
        key = draw.normal(slots, nodes, widths.gdn_key_heads, dim)
        update = draw.normal(*shape, dim, dtype=jnp.float32)
        decay = -jnp.exp(draw.normal(*shape, dtype=jnp.float32) - 3.0)
        place = jnp.arange(DEPTHS + 1, dtype=jnp.int32)
        path = jnp.broadcast_to(jnp.where(place < nodes, place, -1), (slots, DEPTHS + 1))
        return state, key, update, decay, path, jnp.full((slots,), min(4, nodes), jnp.int32)

    def cost(arguments: tuple, state: jax.Array) -> Cost:
        steps = min(4, nodes)
        return Cost(2 * size(state), 2 * steps * state.size)

    return Problem(arguments=arguments, op=gdn_commit, cost=cost)


def token(widths: Widths, case: Case) -> Problem:
    """All of a layer's recurrence but its norm for one token a slot."""
    slots, heads, dim = case.slots, widths.gdn_heads, widths.gdn_dim
    channels, values, rates = _columns(widths)

    def arguments(draw: Draw) -> tuple:
        parts = draw.normal(1, slots, 1, channels + values + rates)
        conv, kernel = draw.normal(slots, _TAPS, channels), draw.normal(_TAPS, channels)
        scales = (draw.normal(count, dtype=jnp.float32) for count in (heads, heads, dim))
        state = draw.normal(slots, heads, dim, dim, dtype=jnp.float32, scale=0.5)
        lengths = jnp.arange(slots, dtype=jnp.int32) + 5
        return parts, conv, kernel, *scales, state, lengths, jnp.ones((slots,), jnp.int32)

    def cost(arguments: tuple, result: Any) -> Cost:
        """Three products with the state, and what is written of the convolution is one row."""
        moved = size(arguments) + size(result.out, result.state) + size(result.conv) // _TAPS
        return Cost(moved, 6 * result.state.size)

    op = functools.partial(gdn_step, num_key_heads=widths.gdn_key_heads)

    def finish(step: GdnStep) -> GdnStep:
        return step._replace(squares=jnp.sum(step.squares, axis=3))

    return Problem(arguments=arguments, op=op, cost=cost, cold=False, finish=finish)


def normed_product(widths: Widths, case: Case) -> Problem:
    """The out-projection of a layer, of what `gdn_step` leaves."""
    heads, dim, hidden = widths.gdn_heads, widths.gdn_dim, widths.gated_hidden
    rows = (case.slots, case.nodes, heads)

    def arguments(draw: Draw) -> tuple:
        squares = dim * jax.random.uniform(draw.key(), (*rows, 1), minval=0.1)
        kernel = draw.normal(heads * dim, hidden, scale=(heads * dim) ** -0.5)
        return draw.normal(*rows, dim), squares, kernel

    def cost(arguments: tuple, out: jax.Array) -> Cost:
        return Cost(size(arguments, out), 2 * arguments[0].size * hidden)

    op = functools.partial(normed_matmul, eps=_EPS)
    return Problem(arguments=arguments, op=op, cost=cost, finish=added)


RECURRENT_PROBLEMS = {
    "gdn_heads": heads,
    "gdn_tree": delta_net,
    "gated_norm": gated_output,
    "gdn_commit": accepted_state,
    "gdn_step": token,
    "normed_matmul": normed_product,
}
