"""A look into a round: its tree as text or JSON, the accepted path, what the target wanted."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.text import Text
from rich.tree import Tree as TextTree

from ddtree_jax.outputs import RoundTrace

Decode = Callable[[Sequence[int]], str]


def describe(trace: RoundTrace, decode: Decode) -> dict[str, Any]:
    """JSON form: nodes in order (parents first) and the token where the walk left the tree."""
    nodes = [
        {
            "token": decode([int(trace.token[node])]),
            "parent": int(trace.parent[node]),
            "depth": int(trace.depth[node]),
            "log_prob": round(float(trace.log_prob[node]), 4),
            "accepted": node in trace.path,
        }
        for node in range(len(trace.token))
    ]
    return {"nodes": nodes, "wanted": decode([trace.bonus])}


def render(trace: RoundTrace, decode: Decode, title: str) -> TextTree:
    """The tree for a terminal: accepted nodes bold, log-prob of each path, the wanted token."""
    accepted = set(trace.path)
    branches: dict[int, TextTree] = {}
    whole = TextTree(Text(title))
    for node in range(len(trace.token)):
        label = Text(repr(decode([int(trace.token[node])])))
        label.stylize("bold green" if node in accepted else "dim")
        if node > 0:
            label.append(f"  {trace.log_prob[node]:.2f}", style="cyan")
        parent = branches.get(int(trace.parent[node]), whole)
        branches[node] = parent.add(label)
    left = branches[trace.path[-1]]
    wanted = Text(f"target wanted {decode([trace.bonus])!r}", style="bold red")
    left.add(wanted)
    return whole


def summary(trace: RoundTrace, decode: Decode) -> str:
    """One line: what the round committed."""
    tokens = [int(trace.token[node]) for node in trace.path[1:]] + [trace.bonus]
    return (
        f"{len(trace.token)} nodes, depth {int(trace.depth.max())}; committed "
        f"{len(trace.path)} tokens: {decode(tokens)!r}"
    )
