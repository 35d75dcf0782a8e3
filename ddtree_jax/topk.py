"""Selection over a vocabulary without sorting it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from pallas_kernels import dispatch


def _ordered_bits(x: Float[Array, "*shape"]) -> UInt[Array, "*shape"]:
    """uint32 keys that compare as the float32 values do."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(
    keys: UInt[Array, "B T V"], weight: Float[Array, "B T V"], least: Float[Array, "B T"]
) -> UInt[Array, "B T"]:
    """Largest key t with sum of weight over {keys >= t} >= least, by bisection over its bits."""

    def decide_bit(step: Array, threshold: Array) -> Array:
        higher = threshold | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        mass = jnp.sum(jnp.where(keys >= higher[..., None], weight, 0.0), axis=-1)
        return jnp.where(mass >= least, higher, threshold)

    # A loop inside the round would split a GPU's command buffer; a CPU compiles it faster.
    unroll = dispatch.platform() == "gpu"
    none = jnp.zeros(keys.shape[:-1], jnp.uint32)
    return jax.lax.fori_loop(0, 32, decide_bit, none, unroll=unroll)


def keep_top(
    logits: Float[Array, "B T V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Bool[Array, "B T V"]:
    """Tokens that survive top-k and then top-p (nucleus, arXiv 1904.09751) of the remainder.

    top_k 0 and top_p 1 keep all. Equal logits are kept or dropped together, so the result does
    not depend on their order. Exact: 32 steps of bisection each, no sort.
    """
    keys = _ordered_bits(logits)
    size = logits.shape[-1]
    wanted_count = jnp.where(top_k > 0, jnp.minimum(top_k, size), size).astype(jnp.float32)
    wanted_count = jnp.broadcast_to(wanted_count[:, None], logits.shape[:-1])
    by_count = _largest_threshold(keys, jnp.ones_like(logits), wanted_count)
    kept = keys >= by_count[..., None]
    weight = jnp.where(kept, jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), 0.0)
    wanted_mass = top_p[:, None] * jnp.sum(weight, axis=-1)
    by_mass = _largest_threshold(keys, weight, wanted_mass)
    # top_p = 1 must keep all, whatever the rounding of the two sums.
    by_mass = jnp.where(top_p[:, None] < 1.0, by_mass, jnp.uint32(0))
    return kept & (keys >= by_mass[..., None])
