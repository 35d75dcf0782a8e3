"""The draft tree of one round, its accepted path marked; from `python -m ddtree_jax explain`."""

import json
from pathlib import Path
from typing import Any

import matplotlib
from figures import BLUE, COLUMN, STYLE, VERMILLION
from matplotlib.figure import Figure

ROW, HEAD = 0.115, 0.34  # inches: a node's row; title and legend
FAINT = "#767676"
KEYS = {"token": str, "parent": int, "depth": int, "log_prob": int | float, "accepted": bool}


def read_tree(path: Path) -> dict[str, Any]:
    """Raises ValueError, naming the node, on anything but a tree in the format of explain."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"`tree` {path} is not JSON ({error})") from error
    nodes = data.get("nodes") if isinstance(data, dict) else None
    if not isinstance(nodes, list) or not nodes or not isinstance(data.get("wanted"), str):
        raise ValueError(
            f'`tree` {path} must hold {{"nodes": [...], "wanted": "..."}} as written by '
            "`python -m ddtree_jax explain PROMPT --json FILE`"
        )
    for index, node in enumerate(nodes):
        wrong = [
            name
            for name, kind in KEYS.items()
            if not isinstance(node, dict) or not isinstance(node.get(name), kind)
        ]
        if wrong or not -1 <= node["parent"] < index or (node["parent"] == -1) != (index == 0):
            raise ValueError(
                f"`tree` {path}: node {index} needs {list(KEYS)} and a parent before it (-1 for "
                f"the root alone), got {node!r:.120}"
            )
    return data


def show_token(token: str) -> str:
    """A token in quotes' place: escapes for what is invisible, an open box for spaces."""
    text = repr(token)[1:-1].replace(" ", "␣")
    return text if len(text) <= 18 else text[:17] + "…"


def _rows(nodes: list[dict]) -> list[int]:
    """Nodes depth first, likelier children first: each gets a row of its own."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(node["parent"], []).append(index)
    order, stack = [], [0]
    while stack:
        index = stack.pop()
        order.append(index)
        stack += sorted(children.get(index, []), key=lambda child: nodes[child]["log_prob"])
    return order


def tree_figure(data: dict[str, Any]) -> Figure:
    """One row a node, indented by depth; accepted nodes blue, the target's next token red."""
    nodes = data["nodes"]
    order = _rows(nodes)
    path = [i for i in order if nodes[i]["accepted"] or nodes[i]["parent"] < 0]
    last = max(path, key=lambda i: nodes[i]["depth"])
    # The target's own next token goes right below the node that it follows.
    rows = {}
    for index in order:
        rows[index] = len(rows)
        if index == last:
            rows["wanted"] = len(rows)
    with matplotlib.rc_context(STYLE):
        height = ROW * len(rows) + HEAD
        figure = Figure(figsize=(COLUMN, height))
        axes = figure.add_axes((0.02, 0.0, 0.96, 1 - HEAD / height))
        # A shallow tree keeps the step of a deep one: labels stay beside their nodes.
        deepest = max(12, *(node["depth"] + 1 for node in nodes))
        axes.set(xlim=(-0.5, deepest * 1.38 + 2.5), ylim=(len(rows) - 0.4, -0.9))
        axes.axis("off")
        for index in sorted(order, key=lambda i: i in path):  # the path lies on top
            _draw_node(axes, nodes, rows, index, index in path)
        x, y = nodes[last]["depth"] + 1, rows["wanted"]
        axes.plot([x - 1, x - 1, x], [rows[last], y, y], color=VERMILLION, lw=1, ls=(0, (2, 1)))
        axes.plot([x], [y], "o", ms=4, mfc="white", mec=VERMILLION)
        _label(axes, x, y, data["wanted"], VERMILLION, "bold")
        right = axes.get_xlim()[1]
        axes.text(right, -0.9, "log p", ha="right", va="center", size=5.5, color=FAINT)
        _caption(figure, len(nodes) - 1, len(path), height)
    return figure


def _draw_node(axes, nodes: list[dict], rows: dict, index: int, accepted: bool) -> None:
    node, y = nodes[index], rows[index]
    x, color = node["depth"], BLUE if accepted else "#b8b8b8"
    if node["parent"] >= 0:
        top = rows[node["parent"]]
        axes.plot([x - 1, x - 1, x], [top, y, y], color=color, lw=1.6 if accepted else 0.6)
        right = axes.get_xlim()[1]
        text = f"{node['log_prob']:.1f}"
        axes.text(right, y, text, ha="right", va="center", size=5.5, color=FAINT)
    axes.plot([x], [y], "o", ms=4 if accepted else 2.5, color=color)
    weight = "bold" if accepted else "normal"
    _label(axes, x, y, node["token"], BLUE if accepted else "#404040", weight)


def _label(axes, x: float, y: float, token: str, color: str, weight: str) -> None:
    axes.text(
        x + 0.35,
        y,
        show_token(token),
        va="center",
        size=6,
        color=color,
        weight=weight,
        family="monospace",
        parse_math=False,
    )


def _caption(figure: Figure, budget: int, count: int, height: float) -> None:
    parts = (
        (0.02, f"{budget} drafted nodes", "#404040"),
        (0.34, f"root and {count - 1} accepted", BLUE),
        (0.68, "the target's next", VERMILLION),
    )
    for x, text, color in parts:
        figure.text(x, 1 - 0.1 / height, text, va="center", size=7, color=color)
