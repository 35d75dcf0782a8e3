"""The block of Qwen3.5/3.6 that predicts the token after the next (multi-token prediction).

It is a drafter of its own: the target's embedding and head are the caller's, as of DFlash.
"""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ddtree_jax.config import TargetConfig
from ddtree_jax.models.layers import Attend, Implementation, fan_in_normal, rope_tables
from ddtree_jax.models.qwen3_5 import HybridLayer, ZeroCentredNorm
from pallas_kernels import skinny_matmul
from pallas_kernels.skinny_matmul import sum_parts


class MTP(nnx.Module):
    """One attention layer over pairs of a position's hidden row and the token that followed it."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fuse = nnx.Param(fan_in_normal(rngs.params(), (2 * hidden, hidden), dtype))
        self.embed_norm = ZeroCentredNorm(hidden, eps, dtype=dtype)
        self.hidden_norm = ZeroCentredNorm(hidden, eps, dtype=dtype)
        self.layer = HybridLayer(config, attends=True, dtype=dtype, rngs=rngs)
        self.norm = ZeroCentredNorm(hidden, eps, dtype=dtype)

    def __call__(
        self,
        embedded: Float[Array, "B R D"],
        hidden: Float[Array, "B R D"],
        positions: Int[Array, "B R"],
        attend: Attend,
        kernels: Implementation = None,
    ) -> tuple[Float[Array, "B R D"], Float[Array, "B R K H"], Float[Array, "B R K H"]]:
        """Rows for the head, which predict position p + 2, and the rows to cache.

        hidden: of position p, after the target's final norm; in a chain, what this gave for
        p - 1. embedded: the token at p + 1. positions: p.
        """
        parts = [self.embed_norm(embedded), self.hidden_norm(hidden)]
        fused = skinny_matmul(
            jnp.concatenate(parts, axis=-1), self.fuse[...], implementation=kernels
        )
        x = sum_parts(fused, jnp.float32)
        rotary_dim = self.config.hybrid.rotary_dim
        cos, sin = rope_tables(self.config.rope, rotary_dim, positions, self.fuse[...].dtype)
        layer = self.layer
        mixed, key, value = layer.attention(0, layer.mixer_norm(x), cos, sin, attend, kernels)
        _, rows = layer.finish(x, mixed, self.norm, kernels)
        return rows, key, value
