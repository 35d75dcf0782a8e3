"""What target and drafter are made of: RMSNorm, rotary embedding, attention, gated MLP.

Attention itself is a callable given by the caller (`Attend`), so that the same layer serves
prefill, tree verification, drafting and training.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ddtree_jax.config import BlockConfig, RopeConfig
from pallas_kernels import add_norm, dispatch, gated_matmul, rotate_heads, skinny_matmul
from pallas_kernels.add_norm import rms_norm
from pallas_kernels.rotate_heads import Heads

# (layer, query [B,R,N,H], key [B,R,K,H], value [B,R,K,H]) -> mixed values [B,R,N,H]
Attend = Callable[[int, Array, Array, Array], Array]
Implementation = dispatch.Implementation | None


class LayerRows(NamedTuple):
    """What a layer gives: its output and that output normed for its reader; the new key and value
    rows, Y = X + R with X rows of context."""

    output: Float[Array, "B R D"]
    normed: Float[Array, "B R D"]
    key: Float[Array, "B Y K H"]
    value: Float[Array, "B Y K H"]


def project(x: Float[Array, "B R I"], kernel: Float[Array, "I O"]) -> Float[Array, "B R O"]:
    """Matrix product in x.dtype; a GPU accumulates in float32."""
    return jnp.einsum("bri,io->bro", x, kernel, precision=dispatch.precision_of(x))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis; the mean of squares in float32."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_norm(x, self.scale[...], eps=self.eps)

    def after(
        self, x: Float[Array, "B R D"], update: Float[Array, "P B R D"], kernels: Implementation
    ) -> tuple[Float[Array, "B R D"], Float[Array, "B R D"]]:
        """x + update (the sum of its parts), and its norm."""
        return add_norm(x, update, self.scale[...], eps=self.eps, implementation=kernels)


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


class Attention(nnx.Module):
    """Grouped-query attention with per-head norms of query and key before the rotation."""

    def __init__(self, config: BlockConfig, *, dtype: DTypeLike, init: nnx.Initializer, rngs):
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        columns = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        rows = config.num_heads * config.head_dim
        self.qkv = nnx.Param(init(rngs.params(), (config.hidden_size, columns), dtype))
        self.out = nnx.Param(init(rngs.params(), (rows, config.hidden_size), dtype))
        self.query_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
        self.key_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)

    def heads(
        self, x: Float[Array, "B R D"], cos: Array, sin: Array, kernels: Implementation
    ) -> Heads:
        """Rotated queries and keys, and values."""
        return rotate_heads(
            skinny_matmul(x, self.qkv[...], implementation=kernels),
            self.query_norm.scale[...],
            self.key_norm.scale[...],
            cos,
            sin,
            num_kv_heads=self.num_kv_heads,
            eps=self.eps,
            implementation=kernels,
        )

    def mix(
        self, mixed: Float[Array, "B R N H"], kernels: Implementation
    ) -> Float[Array, "P B R D"]:
        rows = mixed.reshape(*mixed.shape[:2], -1)
        return skinny_matmul(rows, self.out[...], implementation=kernels)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix, gate first."""

    def __init__(self, config: BlockConfig, *, dtype: DTypeLike, init: nnx.Initializer, rngs):
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = nnx.Param(init(rngs.params(), (hidden, 2 * inner), dtype))
        self.down = nnx.Param(init(rngs.params(), (inner, hidden), dtype))

    def __call__(
        self, x: Float[Array, "B R D"], kernels: Implementation
    ) -> Float[Array, "P B R D"]:
        gated = gated_matmul(x, self.gate_up[...], implementation=kernels)
        return skinny_matmul(gated, self.down[...], implementation=kernels)


class DecoderLayer(nnx.Module):
    """Pre-norm residual layer of Qwen3.

    The norm that reads this layer's output is the next layer's, and is fused with this layer's
    last addition; so a layer takes rows that are normed already.
    """

    def __init__(self, config: BlockConfig, *, dtype: DTypeLike, init: nnx.Initializer, rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, init=init, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, init=init, rngs=rngs)

    def __call__(
        self,
        index: int,
        x: Float[Array, "B R D"],
        normed: Float[Array, "B R D"],
        cos: Float[Array, "B Y half"],
        sin: Float[Array, "B Y half"],
        attend: Attend,
        next_norm: RMSNorm,
        *,
        context: Float[Array, "B X D"] | None = None,
        kernels: Implementation = None,
    ) -> LayerRows:
        """normed: x after this layer's attention_norm. next_norm: what reads the output.

        context: X rows before x that only give keys and values, already normed (DFlash). They
        share one matrix product with x, so the weights are read once and never sliced.
        kernels: implementation of the kernels, see `pallas_kernels.dispatch.choose`.
        """
        rows = normed if context is None else jnp.concatenate([context, normed], axis=1)
        heads = self.attention.heads(rows, cos, sin, kernels)
        mixed = attend(index, heads.query[:, -x.shape[1] :], heads.key, heads.value)
        x, normed = self.mlp_norm.after(x, self.attention.mix(mixed, kernels), kernels)
        x, normed = next_norm.after(x, self.mlp(normed, kernels), kernels)
        return LayerRows(x, normed, heads.key, heads.value)


def run_layers(
    layers: Sequence[DecoderLayer],
    final_norm: RMSNorm,
    x: Float[Array, "B R D"],
    cos: Float[Array, "B Y half"],
    sin: Float[Array, "B Y half"],
    attend: Attend,
    *,
    context: Float[Array, "B X D"] | None = None,
    kernels: Implementation = None,
) -> list[LayerRows]:
    """What every layer gives; the last one's `normed` is after the final norm."""
    norms = [layer.attention_norm for layer in layers][1:] + [final_norm]
    rows, normed = [], layers[0].attention_norm(x)
    for index, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
        rows.append(
            layer(index, x, normed, cos, sin, attend, norm, context=context, kernels=kernels)
        )
        x, normed = rows[-1].output, rows[-1].normed
    return rows


def fan_in_normal(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """N(0, 1 / fan_in) for [in, out] matrices."""
    return (jax.random.normal(key, shape) * shape[0] ** -0.5).astype(dtype)
