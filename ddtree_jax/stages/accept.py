"""Accept: follow the tree from the root as far as the target's own choices lead."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ddtree_jax.plan import RoundPlan
from ddtree_jax.sampling import Requests, SamplingMode, choose_tokens
from ddtree_jax.tree import Tree, Walk
from pallas_kernels import tree_accept
from pallas_kernels.tree_accept import TreePath


def accept(
    logits: Float[Array, "B T V"],
    tree: Tree,
    lengths: Int[Array, " B"],
    requests: Requests,
    plan: RoundPlan,
    mode: SamplingMode,
) -> Walk:
    """The target chooses a token after every node; the rule of `plan` follows equal nodes.

    Lossless: each emitted token is the target's own choice given the tokens before it. (Rejection
    by min(1, p/q) would be biased: these nodes were not sampled from the drafter.)
    """
    depth = plan.max_depth
    wanted = choose_tokens(logits, tree.depth, lengths + 1, requests, max_depth=depth, mode=mode)
    if plan.acceptance == "linear":
        return Walk(wanted, *linear_accept(tree, wanted, depth))
    path = tree_accept(
        tree.token,
        tree.parent,
        tree.valid,
        wanted,
        max_depth=depth,
        implementation=plan.implementation,
    )
    return Walk(wanted, *path)


def linear_accept(tree: Tree, wanted: Int[Array, "B T"], max_depth: int) -> TreePath:
    """The rule of a sequential rejection kernel on a depth-first tree: scan the nodes in order,
    compare the target's token at node i with node i + 1, stop at the first difference.

    A node whose parent is not the node before it counts as a difference: the target's token at
    node i says nothing about it. So the accepted nodes are one path from the root and the rule is
    lossless; every branch but the first is thrown away.
    """
    node = jnp.arange(1, tree.token.shape[1], dtype=jnp.int32)[None, :]
    follows = (tree.parent[:, 1:] == node - 1) & tree.valid[:, 1:]
    agrees = follows & (tree.token[:, 1:] == wanted[:, :-1])
    count = 1 + jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1)
    place = jnp.arange(max_depth + 1, dtype=jnp.int32)[None, :]
    path = jnp.where(place < count[:, None], place, -1)
    bonus = jnp.take_along_axis(wanted, count[:, None] - 1, axis=1)[:, 0]
    return TreePath(path, count, bonus)
