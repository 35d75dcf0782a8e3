"""Qwen3.5 and 3.6: Gated DeltaNet in most layers, gated attention in the rest, dense or MoE."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ddtree_jax.config import TargetConfig
from ddtree_jax.models.gdn import GatedDeltaNet, Recur
from ddtree_jax.models.layers import (
    MLP,
    Attend,
    Implementation,
    fan_in_normal,
    rope_tables,
)
from ddtree_jax.models.moe import MoE
from ddtree_jax.models.qwen3 import Qwen3, TargetRows
from pallas_kernels import add_norm, rotate_heads, skinny_matmul
from pallas_kernels.add_norm import rms_norm


class ZeroCentredNorm(nnx.Module):
    """x / rms(x) * (1 + weight) over the last axis, in float32 up to the result in weight's."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.zeros((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_norm(x, self.weight[...], eps=self.eps, centred=True)

    def after(
        self, x: Float[Array, "B R D"], update: Float[Array, "P B R D"], kernels: Implementation
    ) -> tuple[Float[Array, "B R D"], Float[Array, "B R D"]]:
        """x + update (the sum of its parts), and its norm."""
        weight = self.weight[...]
        return add_norm(x, update, weight, eps=self.eps, centred=True, implementation=kernels)


class GatedAttention(nnx.Module):
    """Grouped-query attention whose output is multiplied by a sigmoid gate, head by head.

    The first dims of a head rotate, two by each angle. Columns of `qkv`: query, gate, key, value.
    """

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.num_kv_heads = config.num_kv_heads
        columns = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
        rows = config.num_heads * config.head_dim
        self.qkv = nnx.Param(fan_in_normal(rngs.params(), (config.hidden_size, columns), dtype))
        self.out = nnx.Param(fan_in_normal(rngs.params(), (rows, config.hidden_size), dtype))
        self.query_norm = ZeroCentredNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
        self.key_norm = ZeroCentredNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)

    def __call__(
        self,
        number: int,
        x: Float[Array, "B R D"],
        cos: Array,
        sin: Array,
        attend: Attend,
        kernels: Implementation,
    ) -> tuple[Float[Array, "P B R D"], Float[Array, "B R K H"], Float[Array, "B R K H"]]:
        """Output in parts, and the rows to cache. number: which of the attention layers."""
        heads = rotate_heads(
            skinny_matmul(x, self.qkv[...], implementation=kernels),
            self.query_norm.weight[...],
            self.key_norm.weight[...],
            cos,
            sin,
            num_kv_heads=self.num_kv_heads,
            eps=self.query_norm.eps,
            centred=True,
            gated=True,
            implementation=kernels,
        )
        mixed = attend(number, heads.query, heads.key, heads.value) * heads.gate
        mixed = mixed.reshape(*x.shape[:2], -1)
        out = skinny_matmul(mixed, self.out[...], implementation=kernels)
        return out, heads.key, heads.value


class HybridLayer(nnx.Module):
    """Pre-norm residual layer: `attention` or `gdn`, then an MLP or experts.

    As in `DecoderLayer`, the norm that reads the output is fused with the last addition.
    """

    def __init__(self, config: TargetConfig, *, attends: bool, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.mixer_norm = ZeroCentredNorm(hidden, eps, dtype=dtype)
        self.attention = GatedAttention(config, dtype=dtype, rngs=rngs) if attends else None
        self.gdn = None if attends else GatedDeltaNet(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = ZeroCentredNorm(hidden, eps, dtype=dtype)
        if config.moe is None:
            self.mlp = MLP(config, dtype=dtype, init=fan_in_normal, rngs=rngs)
        else:
            self.mlp = MoE(config, dtype=dtype, rngs=rngs)

    def finish(
        self,
        x: Float[Array, "B R D"],
        mixed: Float[Array, "P B R D"],
        next_norm: ZeroCentredNorm,
        kernels: Implementation,
    ) -> tuple[Float[Array, "B R D"], Float[Array, "B R D"]]:
        """Residual sums around the mixer's output and the MLP, and their norm for the reader."""
        x, normed = self.mlp_norm.after(x, mixed, kernels)
        return next_norm.after(x, self.mlp(normed, kernels), kernels)


class Qwen3_5(Qwen3):
    """Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM. Source: arXiv 2412.06464 for the recurrence,
    transformers `modeling_qwen3_5` for the rest, in our own equations."""

    def make_layer(self, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> HybridLayer:
        attends = index in self.config.attention_layers
        return HybridLayer(self.config, attends=attends, dtype=dtype, rngs=rngs)

    def make_norm(self, *, dtype: DTypeLike) -> ZeroCentredNorm:
        return ZeroCentredNorm(self.config.hidden_size, self.config.rms_norm_eps, dtype=dtype)

    def __call__(
        self,
        tokens: Int[Array, "B R"],
        positions: Int[Array, "B R"],
        attend: Attend,
        tap_layers: tuple[int, ...] = (),
        recur: Recur | None = None,
        kernels: Implementation = None,
    ) -> TargetRows:
        """As of a plain target; `recur` is the recurrence of the layers that do not attend."""
        x, dtype = self.residual(tokens), self.embedding[...].dtype
        rotary_dim = self.config.hybrid.rotary_dim
        cos, sin = rope_tables(self.config.rope, rotary_dim, positions, dtype)
        outputs, keys, values = [], [], []
        norms = [layer.mixer_norm for layer in self.layers] + [self.norm]
        normed = norms[0](x)
        for index, layer in enumerate(self.layers):
            if layer.attention is None:
                mixed = layer.gdn(index - len(keys), normed, recur, kernels)
            else:
                mixed, key, value = layer.attention(len(keys), normed, cos, sin, attend, kernels)
                keys.append(key)
                values.append(value)
            x, normed = layer.finish(x, mixed, norms[index + 1], kernels)
            outputs.append(x)
        features = self.features(outputs, tap_layers)
        return TargetRows(normed, features, tuple(keys), tuple(values))
