"""One round at Qwen3-8B shapes in PyTorch, as one CUDA graph: a peer for ours.

    python scripts/peer_torch.py --out peer.jsonl
    python scripts/peer_torch.py --out peer.jsonl --compile --nodes 64 --slots 8 --rows 8192
    python scripts/peer_torch.py --device cpu --tiny --nodes 1 8 --rows 128 --layers 6

Random bfloat16 weights, static caches, T nodes a slot, prefixes that nearly fill the cache.
`verify`: the target's pass over the nodes, with logits and argmax; their rows enter the cache
first, as SDPA reads keys from one array. `round`: a DFlash drafter (5 layers, 16 context and 16
block rows, the target's head, top-k), `verify`, and the move of one path behind the prefix; the
tree is fixed, neither built nor walked. One node drafts nothing. Attention is the fastest of
several ways over a masked cache, tried at these shapes. --compile sends what lies between
attention calls through inductor first. Times are CUDA events around back-to-back replays.
"""

import argparse
import json
import sys
import time
from collections import namedtuple
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

Sizes = namedtuple("Sizes", "hidden inner heads kv_heads head_dim vocab")
FULL, TINY = Sizes(4096, 12288, 32, 8, 128, 151936), Sizes(64, 96, 4, 2, 32, 1000)
EPS, THETA, BLOCK, DRAFT_LAYERS, TAPS, MASK_TOKEN = 1e-6, 1e6, 16, 5, 5, 7
TILE = 4_194_301  # a prime, so that rows of a matrix do not repeat in step with the tile
# Layout of queries and keys, then SDPA's backend. "folded": query heads of a group are rows.
WAYS = ["matmul", "gqa/CUDNN", "folded/CUDNN", "gqa/EFFICIENT", "folded/EFFICIENT"]
Layer = namedtuple("Layer", "norm qkv head_norm out mlp_norm gate_up down")


def rms(x: Tensor, scale: Tensor | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], scale, EPS)


def heads(x: Tensor, qkv: Tensor, scale: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Normed and rotated heads of query and key [B, R, N + K, H], and of value [B, R, K, H]."""
    rows = F.linear(x, qkv).unflatten(-1, (-1, cos.shape[-1]))
    turned, value = rows.split([scale.shape[0], rows.shape[2] - scale.shape[0]], dim=2)
    turned = rms(turned) * scale
    return torch.addcmul(turned * cos, turned.roll(cos.shape[-1] // 2, -1), sin), value


def finish(x, mixed, out, mlp_norm, gate_up, down, next_norm) -> tuple[Tensor, Tensor]:
    """The layer after attention, and what the next layer begins with."""
    x = x + F.linear(mixed, out)
    gate, up = F.linear(rms(x, mlp_norm), gate_up).chunk(2, -1)
    x = x + F.linear(F.silu(gate) * up, down)
    return x, rms(x, next_norm)


def flex(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    masked = {"score_mod": lambda score, b, head, i, j: score + bias[b, 0, i, j]}
    return flex_attention(query, key, value, **masked, enable_gqa=True)


class Peer:
    """Weights, caches and a fixed tree; graphs are made of `verify` and `round`."""

    def __init__(self, sizes: Sizes, layers: int, slots: int, rows: int, device: str):
        self.sizes, self.slots, self.rows, self.device = sizes, slots, rows, device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.group, self.filled, self.kinds = sizes.heads // sizes.kv_heads, 0, {}
        self.options = {"dtype": self.dtype, "device": device}
        self.tile = torch.randn(TILE, **self.options)
        self.target = [self.layer() for _ in range(layers)]
        self.drafter = [self.layer() for _ in range(DRAFT_LAYERS)]
        self.embedding, self.head = (self.matrix(sizes.vocab, sizes.hidden) for _ in range(2))
        self.fuse = self.matrix(sizes.hidden, TAPS * sizes.hidden)
        self.norm, self.draft_norm, self.context_norm = torch.ones(3, sizes.hidden, **self.options)
        self.taps = [round(1 + i * (layers - 4) / (TAPS - 1)) for i in range(TAPS)]
        # One tensor [L, 2, B, K, S, H], so that rows of all layers move at once.
        shape = (layers, 2, slots, sizes.kv_heads, rows, sizes.head_dim)
        self.cache = self.fill(torch.empty(shape, **self.options), 1.0)
        self.draft_cache = self.fill(self.cache.new_empty(DRAFT_LAYERS, *shape[1:]), 1.0)
        self.frequency = THETA ** (-self.arange(0, sizes.head_dim, 2) / sizes.head_dim)
        self.slot, self.column = self.arange(slots)[:, None], self.arange(rows)
        self.heads, self.finish, self.flex = heads, finish, None

    def arange(self, *ends: int) -> Tensor:
        return torch.arange(*ends, device=self.device)

    def fill(self, x: Tensor, scale: float) -> Tensor:
        """Repeats the tile, rolled and scaled anew at every call: cheap, and no two alike."""
        self.filled += 1
        tile, flat = (self.tile * scale).roll(7919 * self.filled), x.view(-1)
        whole = len(flat) // TILE * TILE
        flat[:whole].view(-1, TILE).copy_(tile.expand(whole // TILE, TILE))
        flat[whole:].copy_(tile[: len(flat) - whole])
        return x

    def matrix(self, rows: int, columns: int) -> Tensor:
        return self.fill(torch.empty(rows, columns, **self.options), columns**-0.5)

    def layer(self) -> Layer:
        hidden, inner, query, kv, size, _ = self.sizes
        norm, mlp_norm = torch.ones(2, hidden, **self.options)
        head_norm = torch.ones(query + kv, size, **self.options)
        qkv, out = self.matrix((query + 2 * kv) * size, hidden), self.matrix(hidden, query * size)
        gate_up, down = self.matrix(2 * inner, hidden), self.matrix(hidden, inner)
        return Layer(norm, qkv, head_norm, out, mlp_norm, gate_up, down)

    def plant(self, nodes: int) -> None:
        """A tree of two children a node, lengths, tokens, and features of committed rows."""
        seen = torch.eye(nodes, dtype=torch.bool)
        for node in range(1, nodes):
            seen[node] |= seen[(node - 1) // 2]
        self.ancestor, self.path = seen.to(self.device), seen[-1].nonzero()[:, 0].to(self.device)
        self.depth = self.ancestor.sum(1) - 1
        self.length = self.rows - max(nodes, BLOCK) - self.slot[:, 0] % 8
        self.token = self.arange(self.slots * nodes).view(-1, nodes) % self.sizes.vocab
        self.pending = torch.randn(self.slots, BLOCK, TAPS * self.sizes.hidden, **self.options)
        self.rank = self.arange(nodes - 1) % 64

    def rope(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, R, 1, H]; sin has the rotation's sign, so that a roll swaps halves."""
        angle = position[..., None, None].float() * self.frequency
        cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def bias(self, visible: Tensor, kind: str) -> Tensor:
        """0 or -inf, [B, 1, R, S], or a row for every query head of a group."""
        bias = torch.zeros(visible.shape, **self.options).masked_fill_(~visible, -torch.inf)
        folded = kind.startswith(("folded", "matmul"))
        return bias[:, None].repeat(1, 1, self.group, 1) if folded else bias[:, None]

    def attend(self, query: Tensor, cache: Tensor, bias: Tensor, kind: str) -> Tensor:
        """query [B, R, N, H], cache [2, B, K, S, H] -> [B, R, N * H]."""
        (key, value), query = cache, query.transpose(1, 2)
        layout, _, backend = kind.partition("/")
        if layout in ("folded", "matmul"):
            query = query.unflatten(1, (-1, self.group)).flatten(2, 3)
        if layout == "matmul":
            score = query @ key.transpose(2, 3)
            score = torch.add(bias, score, alpha=self.sizes.head_dim**-0.5)
            mixed = torch.softmax(score, -1) @ value
        elif layout == "flex":
            mixed = self.flex(query, key, value, bias)
        else:
            gqa, backend = layout == "gqa", f"{backend}_ATTENTION" if query.is_cuda else "MATH"
            with sdpa_kernel(getattr(SDPBackend, backend)):
                mixed = F.scaled_dot_product_attention(query, key, value, bias, enable_gqa=gqa)
        if layout in ("folded", "matmul"):
            mixed = mixed.unflatten(2, (self.group, -1)).flatten(1, 2)
        return mixed.transpose(1, 2).flatten(2)

    def run(self, layers, cache, last_norm, x, position, visible, rows, context=None, taps=()):
        """x [B, R, D] through `layers`; the rows of `context` and x are cached at `rows`."""
        kind, (cos, sin) = self.kinds[x.shape[1]], self.rope(position)
        bias, features = self.bias(visible, kind), []
        norms = [*(layer.norm for layer in layers[1:]), last_norm]
        normed = rms(x, layers[0].norm)
        for i, layer in enumerate(layers):
            given = normed if context is None else torch.cat([context, normed], 1)
            turned, value = self.heads(given, layer.qkv, layer.head_norm, cos, sin)
            query, key = turned.split([self.sizes.heads, self.sizes.kv_heads], dim=2)
            cache[i, 0][self.slot, :, rows] = key
            cache[i, 1][self.slot, :, rows] = value
            mixed = self.attend(query[:, -x.shape[1] :], cache[i], bias, kind)
            x, normed = self.finish(x, mixed, *layer[3:], norms[i])
            features += [x] * taps.count(i)
        return normed, features

    def draft(self) -> Tensor:
        """Takes in 16 committed rows; the top-k of the block become the tree's tokens."""
        context = rms(F.linear(self.pending, self.fuse), self.context_norm)
        block = self.token[:, :1].repeat(1, BLOCK)
        block[:, 1:] = MASK_TOKEN
        rows = self.length[:, None] + self.arange(-BLOCK, BLOCK)
        visible = (self.column < self.length[:, None] + BLOCK)[:, None].expand(-1, BLOCK, -1)
        model, x = (self.drafter, self.draft_cache, self.draft_norm), self.embedding[block]
        hidden, _ = self.run(*model, x, rows, visible, rows, context)
        logits = F.linear(hidden[:, 1:], self.head)
        value, token = logits.topk(min(len(self.depth) - 1, 64))
        self.token[:, 1:] = token[:, self.depth[1:] - 1, self.rank]
        return value.float() - logits.float().logsumexp(-1, keepdim=True)

    def verify(self) -> tuple[Tensor, Tensor]:
        """The target's choice after every node, and the tapped features."""
        nodes, start = len(self.depth), self.length[:, None]
        offset = self.column - start
        below = self.ancestor[:, offset.clamp(0, nodes - 1)].transpose(0, 1)
        visible = (offset < 0)[:, None] | ((offset >= 0) & (offset < nodes))[:, None] & below
        rows, position = start + self.arange(nodes), start + self.depth
        model, x = (self.target, self.cache, self.norm), self.embedding[self.token]
        hidden, taken = self.run(*model, x, position, visible, rows, taps=self.taps)
        return F.linear(hidden, self.head).argmax(-1), torch.cat(taken, -1)

    def round(self) -> None:
        if len(self.depth) > 1:
            self.draft()
        best, features = self.verify()
        old, new = self.length[:, None] + self.path, self.length[:, None] + self.depth[self.path]
        self.cache[:, :, self.slot, :, new] = self.cache[:, :, self.slot, :, old]
        self.pending[:, : len(self.path)] = features[:, self.path]
        self.token[:, :1] = best[:, self.path[-1:]]

    def choose_attention(self, rows: int) -> None:
        """Fastest of the ways that work here, over every layer's cache, so none is warm in L2."""
        shape = (self.slots, rows, self.sizes.heads, self.sizes.head_dim)
        query, times, wanted = torch.randn(shape, **self.options), {}, None
        end = self.length[:, None] + self.arange(1, rows + 1)
        for kind in WAYS + ["flex"] * bool(self.flex):
            bias = self.bias(self.column < end[..., None], kind)
            try:
                got = self.attend(query, self.cache[0], bias, kind).float()
                wanted = got if wanted is None else wanted
                torch.testing.assert_close(got, wanted, rtol=0, atol=float(wanted.max()) / 20)
                work = [lambda c=c, b=bias, k=kind: self.attend(query, c, b, k) for c in self.cache]
                ms = timed(lambda w=work: [one() for one in w], 10, self.device)
                times[kind] = round(min(ms), 4)
            except Exception as error:  # a backend that this build or these shapes lack
                print(f"attention {kind}: {str(error)[:200]!r}", file=sys.stderr)
        self.kinds[rows] = min(times, key=times.__getitem__)
        print(f"attention of {rows} rows, ms over all layers: {times}", file=sys.stderr)


def timed(work, repeats: int, device: str) -> list[float]:
    """Milliseconds of each of `repeats` runs: on a GPU, replays of one graph."""
    if device == "cpu":
        marks = [(work(), time.perf_counter())[1] for _ in range(repeats + 2)]
        return [1e3 * (end - begin) for begin, end in pairwise(marks[1:])]
    for _ in range(3):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 6)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events[5:])]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--nodes", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    add("--slots", type=int, default=1)
    add("--rows", type=int, default=2048, help="rows of a cache")
    add("--layers", type=int, default=36, help="layers of the target")
    add("--repeats", type=int, default=30)
    add("--out", type=Path, help="JSON lines, added to what the file holds")
    add("--compile", action="store_true", help="inductor between attention calls")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu goes with --tiny")
    add("--tiny", action="store_true", help="a model of toy width")
    args = parser.parse_args()
    least = {"slots": 1, "layers": 4, "repeats": 20, "rows": max(*args.nodes, BLOCK) + BLOCK + 8}
    for name, value in least.items():
        if getattr(args, name) < value:
            parser.error(f"--{name} must be at least {value} here, got {getattr(args, name)}")
    if min(args.nodes) < 1 or args.rows % 16:
        parser.error("--nodes must be positive, and --rows a multiple of 16")
    if not (args.tiny if args.device == "cpu" else torch.cuda.is_available()):
        parser.error("without a GPU only --device cpu --tiny runs, as a smoke test")
    return args


@torch.no_grad()
def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # past it plain operations run, quietly
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    out = {"bench": "peer_torch", "device": name, "torch": torch.__version__}
    out |= {name: getattr(args, name) for name in ("slots", "rows", "layers", "repeats", "tiny")}
    files = [sys.stdout, *([args.out.open("a")] if args.out else [])]
    peer = Peer(TINY if args.tiny else FULL, args.layers, args.slots, args.rows, args.device)
    if args.compile:
        pieces = (torch.compile(piece, dynamic=False) for piece in (heads, finish, flex))
        peer.heads, peer.finish, peer.flex = pieces
    for nodes in args.nodes:
        peer.plant(nodes)
        for rows in {nodes, BLOCK} if nodes > 1 else {nodes}:
            peer.choose_attention(rows)
        try:
            peer.round()
        except Exception as error:  # of a compiler: plain operations do as well
            print(f"not compiled: {str(error)[:500]}", file=sys.stderr)
            peer.heads, peer.finish = heads, finish
        out |= {"compiled": peer.heads is not heads, "attention": peer.kinds[nodes]}
        for what, work in (("verify", peer.verify), ("round", peer.round)):
            ms = timed(work, args.repeats, args.device)
            out |= {"what": what, "nodes": nodes}
            out |= {"ms_min": round(min(ms), 4), "ms_median": round(median(ms), 4)}
            for file in files:
                print(json.dumps(out), file=file, flush=True)


if __name__ == "__main__":
    main()
