"""float32 errors of Gated DeltaNet over trees, against the node recurrence in float64.

    python scripts/gdn_errors.py            # the table of docs/gdn.md, in markdown

Random trees of at most 16 levels, and chains; heads of 128 x 128. Error: the largest difference
in the output (of size 0.2) and in the state after the deepest path (of size 2.5).
"""

import argparse
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gdn_commit, gdn_tree
from pallas_kernels.gdn_tree import definition

HEADS, KEY_HEADS, DIM = 4, 2, 128
# name: nodes, levels, share of log-decays at -80, how far keys differ from a common one
CASES = {
    "T=17": (17, 16, 0.0, None),
    "T=65": (65, 16, 0.0, None),
    "T=129": (129, 16, 0.0, None),
    "T=129, correlated keys": (129, 16, 0.0, 0.5),
    "T=129, half of g = -80": (129, 16, 0.5, None),
    "chain of 64, correlated keys": (64, 64, 0.0, 0.5),
}


class Arguments(NamedTuple):
    """Of `gdn_tree`, as numpy arrays."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray
    state: np.ndarray
    path: np.ndarray


def node_paths(parent: list[int], width: int | None = None) -> np.ndarray:
    """int32 [T, R]: the nodes from the first down to each, then -1; R fits them if not given."""
    paths: list[list[int]] = []
    for node, above in enumerate(parent):
        paths.append([*(paths[above] if above >= 0 else []), node])
    width = max(map(len, paths)) if width is None else width
    return np.array([path + [-1] * (width - len(path)) for path in paths], np.int32)


def inputs(rng, nodes, levels, strong, spread):
    """Arguments in float32 of one slot, and the parents."""
    parent, depth = [-1], [0]
    for node in range(1, nodes):
        chain = levels >= nodes
        choices = [n for n in range(node) if depth[n] < levels - 1]
        parent.append(node - 1 if chain else int(rng.choice(choices)))
        depth.append(depth[parent[-1]] + 1)
    query, key = rng.normal(size=(2, 1, nodes, KEY_HEADS, DIM))
    if spread is not None:
        key = rng.normal(size=(1, 1, KEY_HEADS, DIM)) + spread * key
    value = rng.normal(size=(1, nodes, HEADS, DIM))
    decay = -np.exp(rng.normal(size=(1, nodes, HEADS)) - 3)
    decay = np.where(rng.random(decay.shape) < strong, -80.0, decay if not strong else -1e-3)
    beta = 1 / (1 + np.exp(-rng.normal(size=decay.shape)))
    state = rng.normal(size=(1, HEADS, DIM, DIM)) * 0.5
    arrays = (query, key, value, decay, beta, state)
    return Arguments(*(x.astype(np.float32) for x in arrays), node_paths(parent)[None]), parent


def normalised(x):
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def oracle(args: Arguments, parents: list[list[int]]) -> tuple[np.ndarray, ...]:
    """Outputs, updates, and the state of every node, all float64 in numpy loops over nodes."""
    group = args.value.shape[2] // args.key.shape[2]
    query = np.repeat(normalised(args.query), group, axis=2) * args.key.shape[3] ** -0.5
    key = np.repeat(normalised(args.key), group, axis=2)
    value, decay = np.asarray(args.value, np.float64), np.exp(np.float64(args.log_decay))
    beta, start = np.float64(args.beta), np.float64(args.state)
    out, update = np.zeros(value.shape), np.zeros(value.shape)
    states = np.zeros((value.shape[0], value.shape[1], *start.shape[1:]))
    for slot, parent in enumerate(parents):
        for node, above in enumerate(parent):
            old = start[slot] if above < 0 else states[slot, above]
            old = old * decay[slot, node][:, None, None]
            seen = np.einsum("hde,hd->he", old, key[slot, node])
            update[slot, node] = beta[slot, node][:, None] * (value[slot, node] - seen)
            new = old + key[slot, node][:, :, None] * update[slot, node][:, None, :]
            states[slot, node] = new
            out[slot, node] = np.einsum("hde,hd->he", new, query[slot, node])
    return out, update, states


def errors(rng, case):
    """(output, state) errors of the recurrence, the WY form, and the kernel in interpret mode."""
    arrays, parent = inputs(rng, *case)
    out, _, states = oracle(arrays, [parent])
    deepest = int((arrays.path[0] >= 0).sum(axis=1).argmax())
    path = arrays.path[0, deepest]
    methods = {
        "recurrence": definition,
        "WY by levels": functools.partial(gdn_tree, implementation="xla"),
        "kernel": functools.partial(gdn_tree, implementation="pallas"),
    }
    result = {}
    for name, method in methods.items():
        arguments = [jnp.asarray(x) for x in arrays]
        got = jax.jit(method)(*arguments)
        count = jnp.array([len(path)], jnp.int32)
        new = gdn_commit(
            arguments[5], arguments[1], got.update, arguments[3], jnp.asarray(path[None]), count
        )
        result[name] = (np.abs(got.out - out).max(), np.abs(new[0] - states[0, path[-1]]).max())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    rng = np.random.default_rng(parser.parse_args().seed)
    for number, (name, case) in enumerate(CASES.items()):
        found = errors(rng, case)
        if number == 0:
            print("| case |", " | ".join(f"{method}: o, S" for method in found), "|")
            print("|---" * (1 + len(found)) + "|")
        print(f"| {name} |", " | ".join(f"{o:.1e}, {s:.1e}" for o, s in found.values()), "|")


if __name__ == "__main__":
    main()
