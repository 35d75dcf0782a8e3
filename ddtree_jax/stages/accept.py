"""Accept: walk the tree from the root as far as the target's own choices lead."""

from jaxtyping import Array, Float, Int

from ddtree_jax.sampling import Requests, SamplingMode, choose_tokens
from ddtree_jax.tree import Tree
from pallas_kernels import tree_accept
from pallas_kernels.tree_accept import TreePath


def accept(
    logits: Float[Array, "B T V"],
    tree: Tree,
    lengths: Int[Array, " B"],
    requests: Requests,
    *,
    max_depth: int,
    mode: SamplingMode,
    implementation: str | None,
) -> TreePath:
    """The target chooses a token after every node; the walk follows equal children.

    Lossless: each emitted token is the target's own choice given the tokens before it. (Rejection
    by min(1, p/q) would be biased: these nodes were not sampled from the drafter.)
    """
    wanted = choose_tokens(
        logits, tree.depth, lengths + 1, requests, max_depth=max_depth, mode=mode
    )
    return tree_accept(
        tree.token,
        tree.parent,
        tree.valid,
        wanted,
        max_depth=max_depth,
        implementation=implementation,
    )
