"""What both trainings share: parameters as a flat dict, bf16 passes, attention, the timed loop."""

import collections
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import muon
import numpy as np
from flax import nnx
from muon import Params

from ddtree_jax.models import layers
from ddtree_jax.models.qwen3 import Qwen3

SAVE_SECONDS = 90
MASKED = -1e9  # finite, so that rows which see nothing stay finite


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """einsum of two arrays with a float32 result, whose backward products stay in bf16."""
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)


def _product_backward(subscripts, saved, cotangent):
    inputs, result = subscripts.split("->")
    first, second = inputs.split(",")
    left, right = saved
    cotangent = cotangent.astype(left.dtype)
    return (
        jnp.einsum(f"{result},{second}->{first}", cotangent, right),
        jnp.einsum(f"{result},{first}->{second}", cotangent, left),
    )


product.defvjp(
    lambda subscripts, left, right: (product(subscripts, left, right), (left, right)),
    _product_backward,
)


def head(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
    """float32 logits [..., V]."""
    flat = product("nd,vd->nv", hidden.reshape(-1, hidden.shape[-1]), embedding)
    return flat.reshape(*hidden.shape[:-1], -1)


@jax.custom_vjp
def lookup(embedding: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of the embedding. Its gradient is a product with one-hot rows: scattering 100,000
    rows onto 4,096 in bf16 is slow, loses sums and is not deterministic."""
    return embedding[tokens]


def _lookup_backward(saved, cotangent):
    embedding, tokens = saved
    one_hot = jax.nn.one_hot(tokens.reshape(-1), embedding.shape[0], dtype=cotangent.dtype)
    flat = cotangent.reshape(-1, cotangent.shape[-1])
    grad = jnp.einsum("nv,nd->vd", one_hot, flat, preferred_element_type=jnp.float32)
    return grad.astype(embedding.dtype), np.zeros(tokens.shape, jax.dtypes.float0)


lookup.defvjp(lambda embedding, tokens: (embedding[tokens], (embedding, tokens)), _lookup_backward)


class TrainedQwen3(Qwen3):
    """Qwen3 whose embedding and tied head have the gradients above."""

    def embed(self, tokens: jax.Array) -> jax.Array:
        return lookup(self.embedding[...], tokens)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return head(hidden, self.embedding[...])


def _name(path: tuple[Any, ...]) -> str:
    """'layers.0.attention.qkv' of a key path; the entry for a variable's value has no place."""
    parts = [getattr(k, "key", getattr(k, "name", getattr(k, "idx", None))) for k in path]
    return ".".join(str(part) for part in parts if part not in ("value", "raw_value", None))


def split(make: Callable[[nnx.Rngs], nnx.Module], seed: int) -> tuple[Callable, Params]:
    """(rebuild, params): rebuild(params, dtype) is the module with these parameters."""
    graph, state = nnx.split(make(nnx.Rngs(seed)))
    flat, tree = jax.tree_util.tree_flatten_with_path(state)
    names = [_name(path) for path, _ in flat]
    assert len(set(names)) == len(names), names

    def rebuild(params: Params, dtype: Any) -> nnx.Module:
        leaves = [params[name].astype(dtype) for name in names]
        return nnx.merge(graph, jax.tree_util.tree_unflatten(tree, leaves))

    return rebuild, dict(zip(names, (leaf for _, leaf in flat), strict=True))


def zero_outputs(params: Params) -> Params:
    """Layers start as the identity: an embedding of scale 0.02 would drown in their outputs."""
    ends = (".out", ".down")
    return {k: jnp.zeros_like(v) if k.endswith(ends) else v for k, v in params.items()}


def masked_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array
) -> jax.Array:
    """Dense grouped attention; visible [B, R, S] is True where a row may look."""
    batch, rows, heads, size = query.shape
    grouped = query.reshape(batch, rows, key.shape[2], -1, size)
    scores = product("brkgh,bskh->bkgrs", grouped, key)
    scores = jnp.where(visible[:, None, None], scores * size**-0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgrs,bskh->brkgh", weights, value).reshape(batch, rows, heads, size)


def causal_attend(implementation: str) -> layers.Attend:
    def attend(_: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        if implementation == "cudnn":
            return jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation="cudnn"
            )
        rows = query.shape[1]
        return masked_attention(query, key, value, jnp.tril(jnp.ones((1, rows, rows), bool)))

    return attend


def choose_attention(wanted: str, heads: int, kv_heads: int, size: int) -> str:
    """'cudnn' if its gradients work here and agree with ours, else 'xla'."""
    if wanted != "auto":
        return wanted
    if jax.default_backend() != "gpu":
        return "xla"
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(4, 512, count, size) for count in (heads, kv_heads, kv_heads)]
    rows = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]

    def gradients(implementation: str) -> list[np.ndarray]:
        attend = causal_attend(implementation)
        total = jax.jit(
            jax.grad(lambda *x: jnp.sum(attend(0, *x).astype(jnp.float32) ** 2), (0, 1, 2))
        )
        return [np.asarray(grad, np.float32) for grad in total(*rows)]

    try:
        ours, theirs = gradients("xla"), gradients("cudnn")
    except Exception as error:  # whatever cuDNN's bindings raise, we can do without
        print(f"attention: xla, because cudnn failed: {str(error)[:300]}", flush=True)
        return "xla"
    gap = max(np.abs(a - b).max() / np.abs(a).max() for a, b in zip(ours, theirs, strict=True))
    print(f"attention: cudnn against xla differs by {gap:.4f} of the largest gradient", flush=True)
    return "cudnn" if gap < 0.03 else "xla"


def rate_scale(progress: float, warmup: float, decay: float) -> float:
    """Linear warm-up, constant, then linear to 0 over the last `decay` of the time."""
    return min(1.0, progress / warmup, (1.0 - progress) / decay)


def timed_loop(
    step: Callable[..., tuple[Any, Any, jax.Array]],
    params: Params,
    state: muon.OptState,
    batch_at: Callable[[int, float], tuple],
    save: Callable[[Params], None],
    *,
    minutes: float,
    tokens_per_step: int,
    decay: float,
    every: int,
) -> tuple[Params, list[dict[str, float]]]:
    """Trains for `minutes`. step(params, state, scale, *batch); at most 6 steps run ahead.

    The rate follows the clock, so the end of training is the end of the decay at any speed.
    `save` is called now and then, so that a run that is cut off leaves weights behind.
    """
    begin, count, pending, curve = time.monotonic(), 0, collections.deque(), []
    saved = begin
    recent: list[float] = []
    while (progress := (time.monotonic() - begin) / (60 * minutes)) < 1.0:
        scale = np.float32(rate_scale(progress, 0.02, decay))
        params, state, loss = step(params, state, scale, *batch_at(count, progress))
        pending.append(loss)
        count += 1
        if len(pending) > 6:
            recent.append(float(pending.popleft()))
        if time.monotonic() - saved > SAVE_SECONDS:
            save(params)
            saved = time.monotonic()
        if len(recent) == every:
            seconds = time.monotonic() - begin
            rate = (count - len(pending)) * tokens_per_step / seconds
            entry = {
                "step": count - len(pending),
                "loss": round(sum(recent) / every, 4),
                "scale": round(float(scale), 4),
                "tokens_per_second": round(rate),
                "seconds": round(seconds, 1),
            }
            curve.append(entry)
            recent.clear()
            print("train:", *(f"{k} {v}" for k, v in entry.items()), flush=True)
    recent += [float(loss) for loss in pending]
    seconds = time.monotonic() - begin
    if recent:
        last = {"step": count, "loss": round(sum(recent) / len(recent), 4), "scale": 0.0}
        curve.append(
            last
            | {
                "tokens_per_second": round(count * tokens_per_step / seconds),
                "seconds": round(seconds, 1),
            }
        )
        print("train: end", *(f"{k} {v}" for k, v in curve[-1].items()), flush=True)
    return params, curve
