"""Gated DeltaNet as a layer (Qwen3.5): projections, convolution, decays, gated norm.

The recurrence is the caller's, as attention is: a callable that knows what came before each row.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from ddtree_jax.config import HybridConfig, TargetConfig
from ddtree_jax.models.layers import Implementation, fan_in_normal
from pallas_kernels import skinny_matmul
from pallas_kernels.add_norm import unit_rms
from pallas_kernels.skinny_matmul import sum_parts


class GdnRows(NamedTuple):
    """What one layer asks of its recurrence for R rows.

    mixed: inputs of the convolution (query, key and value channels). kernel: its taps, the last
    of the row itself. log_decay is at most 0.
    """

    mixed: Float[Array, "B R Ck"]
    kernel: Float[Array, "W Ck"]
    log_decay: Float32[Array, "B R Hv"]
    beta: Float32[Array, "B R Hv"]


# (number of the recurrent layer, its rows) -> what the state answers [B, R, Hv, Dv]
Recur = Callable[[int, GdnRows], Array]


class GdnHeads(NamedTuple):
    """Rows after the convolution; query and key are not normalised yet."""

    query: Float[Array, "B R Hk Dk"]
    key: Float[Array, "B R Hk Dk"]
    value: Float[Array, "B R Hv Dv"]


def convolve(
    config: HybridConfig,
    rows: GdnRows,
    before: Float[Array, "B W1 Ck"],
    window: Int[Array, "B R W"],
) -> GdnHeads:
    """silu of the depthwise convolution, cut into heads.

    before: the last W - 1 inputs committed, zero before the start. window: for each row and
    distance 0.., which row of `before` followed by the rows lies that far back on its path.
    """
    inputs = jnp.concatenate([before, rows.mixed], axis=1)
    width = rows.kernel.shape[0]
    total = None
    for distance in range(width):
        tap = jnp.take_along_axis(inputs, window[:, :, distance, None], axis=1)
        kernel = rows.kernel[width - 1 - distance].astype(jnp.float32)[None, None, :]
        part = tap.astype(jnp.float32) * kernel
        total = part if total is None else total + part
    mixed = jax.nn.silu(total.astype(rows.mixed.dtype))
    keys = config.num_key_heads * config.key_dim
    query, key, value = jnp.split(mixed, [keys, 2 * keys], axis=-1)

    def heads(x: Array, size: int) -> Array:
        return x.reshape(*x.shape[:2], -1, size)

    return GdnHeads(
        heads(query, config.key_dim), heads(key, config.key_dim), heads(value, config.value_dim)
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
        hybrid = self.config
        heads = hybrid.num_value_heads
        gate_start = hybrid.conv_channels
        ends = [gate_start, gate_start + heads * hybrid.value_dim]
        product = skinny_matmul(x, self.inputs[...], implementation=kernels)
        mixed, gate, rates = jnp.split(sum_parts(product, x.dtype), ends, axis=-1)
        beta, decay = jnp.split(rates.astype(jnp.float32), 2, axis=-1)
        step = jax.nn.softplus(decay + self.time_bias[...][None, None, :])
        rate = jnp.exp(self.log_rate[...])[None, None, :]
        rows = GdnRows(mixed, self.conv[...], -rate * step, jax.nn.sigmoid(beta))
        answer = self._gated_norm(recur(number, rows), gate.reshape(*x.shape[:2], heads, -1))
        answer = answer.reshape(*x.shape[:2], -1)
        return skinny_matmul(answer, self.out[...], implementation=kernels)

    def _gated_norm(
        self, x: Float[Array, "B R Hv Dv"], gate: Float[Array, "B R Hv Dv"]
    ) -> Float[Array, "B R Hv Dv"]:
        """RMS norm of each head with an ordinary scale, times silu(gate); float32 inside."""
        normed = unit_rms(x, self.eps).astype(x.dtype)
        scaled = normed.astype(jnp.float32) * self.norm_scale[...][None, None, None, :]
        return (scaled * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
