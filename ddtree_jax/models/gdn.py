"""Gated DeltaNet as a layer (Qwen3.5): projections, convolution, decays, gated norm.

The recurrence is the caller's, as attention is: a callable that knows what came before each row.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Int32

from ddtree_jax.config import HybridConfig, TargetConfig
from ddtree_jax.models.layers import Implementation, fan_in_normal
from pallas_kernels import gated_norm, gdn_heads, normed_matmul, skinny_matmul
from pallas_kernels.gdn_heads import GdnHeads


class GdnRows(NamedTuple):
    """What one layer asks of its recurrence for R rows: arguments of `pallas_kernels.gdn_heads`,
    and the norm's scale."""

    parts: Float[Array, "P B R C"]
    kernel: Float[Array, "W Ck"]
    log_rate: Float32[Array, " Hv"]
    time_bias: Float32[Array, " Hv"]
    scale: Float32[Array, " Dv"]


class Answer(NamedTuple):
    """What the state answers each row. squares: where they are given, scale and gate are in the
    rows already and only the norm is left, as of `pallas_kernels.normed_matmul`."""

    rows: Float[Array, "B R Hv Dv"]
    squares: Float32[Array, "B R Hv Q"] | None = None


# (number of the recurrent layer, its rows) -> what the state answers
Recur = Callable[[int, GdnRows], Answer]


def heads_of(
    config: HybridConfig,
    rows: GdnRows,
    before: Float[Array, "B N Ck"],
    window: Int[Array, "B R W"],
    path: Int32[Array, "B R A"] | None = None,
    implementation: Implementation = None,
) -> GdnHeads:
    """What the recurrence reads; before, window and path as in `gdn_heads`."""
    return gdn_heads(
        rows.parts,
        before,
        rows.kernel,
        window,
        rows.log_rate,
        rows.time_bias,
        num_key_heads=config.num_key_heads,
        key_dim=config.key_dim,
        path=path,
        implementation=implementation,
    )


class GatedDeltaNet(nnx.Module):
    """Columns of `inputs`: query, key, value (they are convolved), output gate, beta, decay."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hybrid = self.config = config.hybrid
        heads, hidden = hybrid.num_value_heads, config.hidden_size
        values = heads * hybrid.value_dim
        columns = hybrid.conv_channels + values + 2 * heads
        self.eps = config.rms_norm_eps
        self.inputs = nnx.Param(fan_in_normal(rngs.params(), (hidden, columns), dtype))
        shape = (hybrid.conv_width, hybrid.conv_channels)
        self.conv = nnx.Param(fan_in_normal(rngs.params(), shape, dtype))
        # These three stay float32 whatever the checkpoint's dtype: they feed every later state.
        self.log_rate = nnx.Param(jnp.zeros((heads,), jnp.float32))
        self.time_bias = nnx.Param(jnp.zeros((heads,), jnp.float32))
        self.norm_scale = nnx.Param(jnp.ones((hybrid.value_dim,), jnp.float32))
        self.out = nnx.Param(fan_in_normal(rngs.params(), (values, hidden), dtype))

    def __call__(
        self, number: int, x: Float[Array, "B R D"], recur: Recur, kernels: Implementation
    ) -> Float[Array, "P B R D"]:
        """number: which of the recurrent layers this is."""
        parts = skinny_matmul(x, self.inputs[...], implementation=kernels)
        scale, out = self.norm_scale[...], self.out[...]
        rows = GdnRows(parts, self.conv[...], self.log_rate[...], self.time_bias[...], scale)
        answer, squares = recur(number, rows)
        options = {"eps": self.eps, "implementation": kernels}
        if squares is not None:
            return normed_matmul(answer, squares, out, **options)
        gated = gated_norm(answer, parts, scale, start=self.config.conv_channels, **options)
        return skinny_matmul(gated.reshape(*x.shape[:2], -1), out, implementation=kernels)
