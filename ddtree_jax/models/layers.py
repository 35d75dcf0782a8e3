"""What target and drafter are made of: RMSNorm, rotary embedding, attention, gated MLP.

Attention itself is a callable given by the caller (`Attend`), so that the same layer serves
prefill, tree verification, drafting and training.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ddtree_jax.config import BlockConfig, RopeConfig

# (layer, query [B,R,N,H], key [B,R,K,H], value [B,R,K,H]) -> mixed values [B,R,N,H]
Attend = Callable[[int, Array, Array, Array], Array]


def project(x: Float[Array, "B R I"], kernel: Float[Array, "I O"]) -> Float[Array, "B R O"]:
    """Matrix product in x.dtype; a GPU accumulates in float32."""
    return jnp.einsum("bri,io->bro", x, kernel, precision=precision_of(x))


def precision_of(x: Array) -> jax.lax.Precision | None:
    """float32 means float32: by default a GPU would round its inputs to TF32."""
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis; the mean of squares in float32."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return normed * self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float[Array, " half"]:
    """Angle a position for each of head_dim / 2 pairs, float32.

    Source: yarn is eq. 23-25 of arXiv 2309.00071, in the form that transformers computes.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    plain = 1.0 / (jnp.float32(rope.theta) ** exponent)
    if rope.scaling is None:
        return plain

    def correction_dim(rotations: float) -> float:
        return (
            head_dim
            * math.log(rope.original_length / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low = max(math.floor(correction_dim(rope.beta_fast)), 0)
    high = min(math.ceil(correction_dim(rope.beta_slow)), head_dim - 1)
    width = max(high - low, 0.001)
    ramp = jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / width, 0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1.0 - ramp)


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: Int[Array, "B R"], dtype: DTypeLike
) -> tuple[Float[Array, "B R half"], Float[Array, "B R half"]]:
    """cos and sin of each position, computed in float32 and rounded to `dtype` as HF does."""
    frequencies = rope_frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None, :]
    gain = 1.0 if rope.attention_factor is None else rope.attention_factor
    return (jnp.cos(angles) * gain).astype(dtype), (jnp.sin(angles) * gain).astype(dtype)


def rotate(
    x: Float[Array, "B R heads H"], cos: Float[Array, "B R half"], sin: Float[Array, "B R half"]
) -> Float[Array, "B R heads H"]:
    """Rotates pairs (i, i + H/2) of each head."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention with per-head norms of query and key before the rotation."""

    def __init__(self, config: BlockConfig, *, dtype: DTypeLike, init: nnx.Initializer, rngs):
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        columns = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        rows = config.num_heads * config.head_dim
        self.qkv = nnx.Param(init(rngs.params(), (config.hidden_size, columns), dtype))
        self.out = nnx.Param(init(rngs.params(), (rows, config.hidden_size), dtype))
        self.query_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
        self.key_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)

    def heads(
        self, x: Float[Array, "B R D"], cos: Array, sin: Array
    ) -> tuple[Float[Array, "B R N H"], Float[Array, "B R K H"], Float[Array, "B R K H"]]:
        """Rotated queries and keys, and values."""
        heads = project(x, self.qkv[...]).reshape(*x.shape[:2], -1, self.head_dim)
        ends = [self.num_heads, self.num_heads + self.num_kv_heads]
        query, key, value = jnp.split(heads, ends, axis=2)
        query = rotate(self.query_norm(query), cos, sin)
        return query, rotate(self.key_norm(key), cos, sin), value

    def mix(self, mixed: Float[Array, "B R N H"]) -> Float[Array, "B R D"]:
        return project(mixed.reshape(*mixed.shape[:2], -1), self.out[...])


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix, gate first."""

    def __init__(self, config: BlockConfig, *, dtype: DTypeLike, init: nnx.Initializer, rngs):
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = nnx.Param(init(rngs.params(), (hidden, 2 * inner), dtype))
        self.down = nnx.Param(init(rngs.params(), (inner, hidden), dtype))

    def __call__(self, x: Float[Array, "B R D"]) -> Float[Array, "B R D"]:
        gate, up = jnp.split(project(x, self.gate_up[...]), 2, axis=-1)
        return project(jax.nn.silu(gate) * up, self.down[...])


class DecoderLayer(nnx.Module):
    """Pre-norm residual layer of Qwen3."""

    def __init__(self, config: BlockConfig, *, dtype: DTypeLike, init: nnx.Initializer, rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, init=init, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, init=init, rngs=rngs)

    def __call__(
        self,
        index: int,
        x: Float[Array, "B R D"],
        cos: Float[Array, "B Y half"],
        sin: Float[Array, "B Y half"],
        attend: Attend,
        context: Float[Array, "B X D"] | None = None,
    ) -> tuple[Float[Array, "B R D"], Float[Array, "B Y K H"], Float[Array, "B Y K H"]]:
        """Returns the layer's output and its new key and value rows (Y = X + R).

        context: X rows before x that only give keys and values, already normed (DFlash). They
        share one matrix product with x, so the weights are read once and never sliced.
        """
        rows = self.attention_norm(x)
        if context is not None:
            rows = jnp.concatenate([context, rows], axis=1)
        query, key, value = self.attention.heads(rows, cos, sin)
        query = query[:, -x.shape[1] :]
        x = x + self.attention.mix(attend(index, query, key, value))
        return x + self.mlp(self.mlp_norm(x)), key, value


def fan_in_normal(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """N(0, 1 / fan_in) for [in, out] matrices."""
    return (jax.random.normal(key, shape) * shape[0] ** -0.5).astype(dtype)
