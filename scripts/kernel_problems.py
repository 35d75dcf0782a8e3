"""One call of each op of `pallas_kernels` at given sizes: random arguments, what to compare with
what, and the least bytes and arithmetic that any implementation needs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from kernel_cases import DEPTHS, HEADS, Case, Widths
from real_shapes import spread_tile

from ddtree_jax.tree import Tree, ancestor_mask
from pallas_kernels import (
    add_norm,
    choose_experts,
    gated_matmul,
    grouped_down,
    grouped_gate_up,
    rotate_heads,
    routed_gate_up,
    skinny_matmul,
    sort_by_expert,
    topk_logsumexp,
    tree_accept,
    tree_attention,
    tree_build,
)
from pallas_kernels.grouped_matmul import down_definition, gate_up_definition
from pallas_kernels.skinny_matmul import MOST_ROWS

_EPS = 1e-6
_BF16_ERROR = 1e-2  # of roundings in another place, as a relative norm
_MASKED = -1e30


class Cost(NamedTuple):
    """Least of one call: bytes read and written once, operations of products (0 where none)."""

    bytes: int
    flops: int


class Draw:
    """Random numbers of one copy of the arguments."""

    def __init__(self, tile: jax.Array, seed: jax.Array):
        self._tile, self._seed, self._count = tile, seed, 0

    def normal(self, *shape: int, dtype=jnp.bfloat16, scale: float = 1.0) -> jax.Array:
        self._count += 1
        shift = self._seed * 104729 + self._count * 7919
        return (spread_tile(self._tile, shift, shape) * scale).astype(dtype)

    def key(self) -> jax.Array:
        self._count += 1
        return jax.random.fold_in(jax.random.key(self._seed), self._count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """op takes `implementation`; the definition and rivals take the arguments alone."""

    arguments: Callable[[Draw], tuple]
    op: Callable[..., Any]
    cost: Callable[[tuple, Any], Cost]  # from arguments with values, and the definition's result
    definition: Callable[..., Any] | None = None  # None: the op's "xla" is its definition
    rivals: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    cold: bool = True  # a round reads the arguments from memory, not from what L2 still holds
    tolerance: float = _BF16_ERROR  # integers must be equal whatever it is
    finish: Callable[[Any], Any] = lambda result: result  # what makes results comparable

    def call(self, implementation: str) -> Callable[..., Any]:
        if implementation in self.rivals:
            return self.rivals[implementation]
        return functools.partial(self.op, implementation=implementation)

    def reference(self, *arguments: jax.Array) -> Any:
        return (self.definition or self.call("xla"))(*arguments)


def size(*arrays: Any) -> int:
    """Bytes of arrays or of trees of them."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays))


def moves(arguments: tuple, result: Any) -> Cost:
    """Of an op without products: it reads its arguments and writes its result."""
    return Cost(size(arguments, result), 0)


def candidate_log_prob(draw: Draw, slots: int, nodes: int) -> jax.Array:
    """Log-probs [B, J, M] of the candidates of a drafter that is surer of some depths."""
    logits = draw.normal(slots, DEPTHS, max(nodes - 1, 1), dtype=jnp.float32, scale=2.0)
    return jax.nn.log_softmax(-jnp.sort(-logits, axis=2), axis=2)


def best_first_tree(draw: Draw, slots: int, nodes: int) -> Tree:
    log_prob = candidate_log_prob(draw, slots, nodes)
    shape = tree_build(log_prob, budget=nodes - 1, implementation="xla")
    token = shape.depth * 4096 + shape.rank  # siblings differ in rank
    return Tree(token, shape.parent, shape.depth, shape.valid, shape.score)


def attention(widths: Widths, case: Case) -> Problem:
    heads = HEADS[case.variant] if case.variant else widths.heads
    slots, nodes, rows = case.slots, case.nodes, case.rows
    last = rows - 7  # the last block of a prefix is hardly ever full

    def arguments(draw: Draw) -> tuple:
        query = draw.normal(slots, nodes, heads.queries, heads.dim)
        cache = [draw.normal(slots, rows, heads.keys, heads.dim) for _ in range(2)]
        tree = [draw.normal(slots, nodes, heads.keys, heads.dim) for _ in range(2)]
        first = rows // 8 if case.ragged else last
        lengths = jnp.linspace(first, last, slots).astype(jnp.int32)
        visible = ancestor_mask(best_first_tree(draw, slots, nodes), DEPTHS)
        return query, *cache, *tree, lengths, visible

    def cost(arguments: tuple, out: jax.Array) -> Cost:
        query, key, _, tree_key, _, lengths, visible = arguments
        cached = int(jnp.sum(lengths))
        row = 2 * size(key) // (slots * rows)  # a key and a value
        pairs = nodes * cached + int(jnp.sum(visible))
        moved = cached * row + 2 * size(tree_key) + size(query, visible, lengths, out)
        return Cost(moved, 4 * pairs * heads.queries * heads.dim)

    scale = heads.dim**-0.5
    op = functools.partial(tree_attention, scale=scale)
    return Problem(
        arguments=arguments,
        op=op,
        cost=cost,
        # The scores of all slots at once would not fit at the largest sizes.
        definition=by_slot(functools.partial(op, implementation="xla")),
        rivals={"einsum": functools.partial(einsum_attention, scale=scale)},
    )


def by_slot(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same result, one slot after another."""

    def one(arguments: tuple) -> Any:
        return jax.tree.map(lambda x: x[0], function(*(x[None] for x in arguments)))

    return lambda *arguments: jax.lax.map(one, arguments)


def einsum_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    tree_key: jax.Array,
    tree_value: jax.Array,
    lengths: jax.Array,
    visible: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """What one writes without a kernel: products of the inputs' dtype, sums and softmax float32."""
    slots, nodes, heads, dim = query.shape
    rows, kv_heads = key.shape[1:3]
    grouped = query.reshape(slots, nodes, kv_heads, heads // kv_heads, dim)

    def product(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)

    cached = jnp.arange(rows, dtype=jnp.int32)[None] < lengths[:, None]
    scores = [
        jnp.where(seen, product("btkgh,bskh->bkgts", grouped, keys) * scale, _MASKED)
        for keys, seen in (
            (key, cached[:, None, None, None]),
            (tree_key, visible[:, None, None]),
        )
    ]
    weight = jax.nn.softmax(jnp.concatenate(scores, axis=4), axis=4).astype(value.dtype)
    mixed = product("bkgts,bskh->btkgh", weight[..., :rows], value)
    mixed += product("bkgts,bskh->btkgh", weight[..., rows:], tree_value)
    return mixed.reshape(query.shape).astype(query.dtype)


def layer_product(widths: Widths, case: Case) -> Problem:
    inner, outer = widths.product(case.variant)

    def arguments(draw: Draw) -> tuple:
        x = draw.normal(case.slots, case.nodes, inner)
        return x, draw.normal(inner, outer, scale=inner**-0.5)

    def cost(arguments: tuple, parts: jax.Array) -> Cost:
        x, kernel = arguments
        rows = case.slots * case.nodes
        return Cost(size(x, kernel) + rows * outer * x.dtype.itemsize, 2 * rows * kernel.size)

    return Problem(arguments=arguments, op=skinny_matmul, cost=cost, finish=added)


def added(parts: jax.Array) -> jax.Array:
    """The product: implementations leave it in different numbers of parts."""
    return parts.astype(jnp.float32).sum(axis=0)


def gated_product(widths: Widths, case: Case) -> Problem:
    def arguments(draw: Draw) -> tuple:
        x = draw.normal(case.slots, case.nodes, widths.hidden)
        return x, draw.normal(widths.hidden, 2 * widths.inner, scale=widths.hidden**-0.5)

    def cost(arguments: tuple, out: jax.Array) -> Cost:
        return Cost(size(arguments, out), 2 * case.slots * case.nodes * arguments[1].size)

    return Problem(arguments=arguments, op=gated_matmul, cost=cost)


def product_parts(draw: Draw, widths: Widths, case: Case, product: str, dtype=None) -> jax.Array:
    """Random parts, as many and of the dtype that `skinny_matmul` leaves on a GPU."""
    inner, outer = widths.product(product)
    few = case.slots * case.nodes <= MOST_ROWS
    parts = jax.eval_shape(
        functools.partial(skinny_matmul, dtype=dtype, implementation="pallas" if few else "xla"),
        jax.ShapeDtypeStruct((case.slots, case.nodes, inner), jnp.bfloat16),
        jax.ShapeDtypeStruct((inner, outer), jnp.bfloat16),
    )
    return draw.normal(*parts.shape, dtype=parts.dtype)


def residual(widths: Widths, case: Case) -> Problem:
    def arguments(draw: Draw) -> tuple:
        x = draw.normal(case.slots, case.nodes, widths.hidden)
        update = product_parts(draw, widths, case, "out")
        return x, update, 1.0 + draw.normal(widths.hidden, scale=0.1)

    op = functools.partial(add_norm, eps=_EPS)
    return Problem(arguments=arguments, op=op, cost=moves, cold=False)


def rotation(widths: Widths, case: Case) -> Problem:
    gated = case.variant == "gated"
    heads = widths.gated_heads if gated else widths.heads
    rotary = widths.rotary_dim if gated else heads.dim

    def arguments(draw: Draw) -> tuple:
        parts = product_parts(draw, widths, case, "gated_qkv" if gated else "qkv")
        centre = 0.0 if gated else 1.0
        scales = [centre + draw.normal(heads.dim, scale=0.1) for _ in range(2)]
        angle = draw.normal(case.slots, case.nodes, rotary // 2, dtype=jnp.float32, scale=100.0)
        tables = [turn(angle).astype(jnp.bfloat16) for turn in (jnp.cos, jnp.sin)]
        return parts, *scales, *tables

    op = functools.partial(
        rotate_heads, num_kv_heads=heads.keys, eps=_EPS, centred=gated, gated=gated
    )
    return Problem(arguments=arguments, op=op, cost=moves, cold=False)


def candidates(widths: Widths, case: Case) -> Problem:
    def arguments(draw: Draw) -> tuple:
        shape = (case.slots, DEPTHS, widths.vocab)
        return (draw.normal(*shape, dtype=jnp.float32, scale=3.0),)

    op = functools.partial(topk_logsumexp, k=max(case.nodes - 1, 1))
    return Problem(arguments=arguments, op=op, cost=moves, tolerance=1e-5)


def growth(widths: Widths, case: Case) -> Problem:
    def arguments(draw: Draw) -> tuple:
        return (candidate_log_prob(draw, case.slots, case.nodes),)

    op = functools.partial(tree_build, budget=case.nodes - 1)
    return Problem(arguments=arguments, op=op, cost=moves, cold=False, tolerance=0.0)


def walk(widths: Widths, case: Case) -> Problem:
    def arguments(draw: Draw) -> tuple:
        """The target wants a random child of most nodes, so that walks are some nodes long."""
        tree = best_first_tree(draw, case.slots, case.nodes)
        node = jnp.arange(case.nodes, dtype=jnp.int32)
        child = (tree.parent[:, None] == node[None, :, None]) & tree.valid[:, None]
        chance = jax.random.uniform(draw.key(), child.shape)
        chosen = jnp.argmax(jnp.where(child, chance, -1.0), axis=2)
        taken = child.any(axis=2) & (jax.random.uniform(draw.key(), chosen.shape) < 0.85)
        wanted = jnp.where(taken, jnp.take_along_axis(tree.token, chosen, axis=1), -5)
        return tree.token, tree.parent, tree.valid, wanted

    op = functools.partial(tree_accept, max_depth=DEPTHS)
    return Problem(arguments=arguments, op=op, cost=moves, cold=False, tolerance=0.0)


def chosen_ids(draw: Draw, widths: Widths, tokens: int) -> jax.Array:
    """Every token takes its experts at random, which touches about as many as there can be, and
    the shared one."""
    chance = jax.random.uniform(draw.key(), (tokens, widths.experts))
    ids = jax.lax.top_k(chance, widths.chosen)[1].astype(jnp.int32)
    return jnp.concatenate([ids, jnp.full_like(ids[:, :1], widths.experts)], axis=1)


def choice(widths: Widths, case: Case) -> Problem:
    def arguments(draw: Draw) -> tuple:
        parts = product_parts(draw, widths, case, "router", dtype=jnp.float32)
        x = draw.normal(case.slots, case.nodes, widths.expert_hidden)
        return parts, x, draw.normal(widths.expert_hidden, scale=widths.expert_hidden**-0.5)

    op = functools.partial(choose_experts, count=widths.chosen, normalise=True)
    return Problem(arguments=arguments, op=op, cost=moves, cold=False)


def opening(widths: Widths, case: Case) -> Problem:
    """What a row alone asks of its experts first."""
    chosen = choice(widths, case)
    inner, outer = widths.expert_product("gate_up")
    count = widths.chosen + 1

    def arguments(draw: Draw) -> tuple:
        kernels = draw.normal(widths.experts + 1, inner, outer, scale=inner**-0.5)
        return *chosen.arguments(draw), kernels

    def op(*arguments: jax.Array, implementation: str | None) -> tuple[jax.Array, ...]:
        """Without the order: of a row alone nothing reads it."""
        options = {"count": widths.chosen, "normalise": True, "implementation": implementation}
        return routed_gate_up(*arguments, **options)[:3]

    def cost(arguments: tuple, result: tuple) -> Cost:
        *rest, kernels = arguments
        moved = size(rest, result) + size(kernels) * count // (widths.experts + 1)
        return Cost(moved, 2 * count * inner * outer)

    return Problem(arguments=arguments, op=op, cost=cost)


def expert_order(widths: Widths, case: Case) -> Problem:
    def arguments(draw: Draw) -> tuple:
        return (chosen_ids(draw, widths, case.slots * case.nodes),)

    op = functools.partial(sort_by_expert, experts=widths.experts + 1)
    return Problem(arguments=arguments, op=op, cost=moves, cold=False, tolerance=0.0)


def experts(widths: Widths, case: Case) -> Problem:
    (inner, outer), tokens = widths.expert_product(case.variant), case.slots * case.nodes
    count, opens = widths.experts + 1, case.variant == "gate_up"

    def arguments(draw: Draw) -> tuple:
        ids = chosen_ids(draw, widths, tokens)
        rows = draw.normal(*((tokens,) if opens else ids.shape), inner)
        kernels = draw.normal(count, inner, outer, scale=inner**-0.5)
        weight = () if opens else (jax.random.uniform(draw.key(), ids.shape),)
        order = sort_by_expert(ids, experts=count, implementation="xla")
        return rows, kernels, ids, *weight, order

    def cost(arguments: tuple, out: jax.Array) -> Cost:
        rows, kernels, ids, *rest = arguments
        touched = len(jnp.unique(ids))
        moved = size(rows, ids, rest, out) + touched * size(kernels) // count
        return Cost(moved, 2 * ids.size * inner * outer)

    op, meaning = (
        (grouped_gate_up, gate_up_definition) if opens else (grouped_down, down_definition)
    )
    return Problem(
        arguments=arguments,
        op=functools.partial(op, shared=True),
        cost=cost,
        definition=lambda *arguments: meaning(*arguments[:-1]),
    )


PROBLEMS: dict[str, Callable[[Widths, Case], Problem]] = {
    "tree_attention": attention,
    "skinny_matmul": layer_product,
    "gated_matmul": gated_product,
    "add_norm": residual,
    "rotate_heads": rotation,
    "topk_logsumexp": candidates,
    "tree_build": growth,
    "tree_accept": walk,
    "choose_experts": choice,
    "sort_by_expert": expert_order,
    "grouped_matmul": experts,
    "routed_gate_up": opening,
}
