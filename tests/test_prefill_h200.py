"""A prompt's last chunk at real widths and few layers, compiled for an H200 without one.

What it holds: caches and recurrent states are updated in place, and none is copied or turned.
"""

import jax
import pytest
from compiled_round import compile_admit, moved
from real_shapes import PAIRS, cut_layers

SLOTS, ROWS = 3, 2048


def _dims(shape):
    """Sizes in any order."""
    return tuple(sorted(shape))


@pytest.mark.parametrize(("pair", "layers"), [("qwen3-8b", 2), ("qwen3.6-27b", 4)])
def test_no_state_is_copied(pair, layers):
    program, state = compile_admit(*cut_layers(PAIRS[pair], layers), slots=SLOTS, rows=ROWS)
    leaves = jax.tree.leaves((state.target, state.draft, state.recurrent))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert program.memory_analysis().alias_size_in_bytes >= size
    kept = {_dims(leaf.shape) for leaf in leaves if leaf.size > 1e6}
    assert not kept & {_dims(shape) for shape in moved(program)}
