"""Static trees: `tree_choices` as EAGLE and vLLM write them, parsed and checked."""

import ast
from collections.abc import Sequence

from ddtree_jax.errors import require

Choices = tuple[tuple[int, ...], ...]


def parse_choices(choices: str | Sequence[Sequence[int]]) -> Choices:
    """Paths of ranks, one a node, in depth-first order.

    choices: a sequence of tuples or a Python literal of one, such as
    "[(0,), (0, 0), (0, 1), (1,), (1, 0)]": (0, 1) is the second-likeliest token of depth 2 below
    the likeliest of depth 1.

    Raises ValueError that names the first offending entry: not a tuple of ranks, negative,
    duplicate, or without its parent.
    """
    if isinstance(choices, str):
        try:
            choices = ast.literal_eval(choices)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(
                f"`tree_choices` must be a Python literal such as '[(0,), (0, 0), (1,)]', "
                f"got {choices!r:.80} ({type(error).__name__})"
            ) from error
    require(
        isinstance(choices, list | tuple) and len(choices) > 0,
        f"`tree_choices` must be a non-empty list of tuples of ranks, got {choices!r:.80}",
    )
    paths = [_path(entry) for entry in choices]
    known = set()
    for path in paths:
        require(path not in known, f"`tree_choices` holds {path} twice; name each node once")
        known.add(path)
    for path in paths:
        require(
            len(path) == 1 or path[:-1] in known,
            f"`tree_choices` holds {path} without its parent {path[:-1]}; add the parent",
        )
    return tuple(sorted(paths))


def _path(entry: object) -> tuple[int, ...]:
    require(
        isinstance(entry, list | tuple)
        and len(entry) > 0
        and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in entry),
        f"`tree_choices` holds {entry!r:.60}; each node must be a non-empty tuple of integer ranks",
    )
    require(
        all(rank >= 0 for rank in entry),
        f"`tree_choices` holds {tuple(entry)} with a negative rank; ranks count from 0",
    )
    return tuple(entry)
