"""The five stages of a round, in order:

    draft   features and root        -> candidates a depth  (one block of the drafter)
    build   candidates               -> tree                (best first, under the budget)
    verify  tree and cache           -> logits, new rows    (one forward pass of the target)
    accept  logits and tree          -> path, next root     (a walk from the root)
    commit  path and new rows        -> caches, lengths     (only accepted rows are written)

`draft_mtp` takes the place of draft where the target's own MTP block drafts.
`ddtree_jax.round` composes them; no stage knows another.
"""
