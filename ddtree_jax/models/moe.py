"""Mixture of experts in place of the MLP (Qwen3-MoE, Qwen3.5-MoE), through grouped matmuls."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ddtree_jax.config import TargetConfig
from ddtree_jax.models.layers import MLP, Implementation, fan_in_normal, project
from pallas_kernels import grouped_matmul, skinny_matmul
from pallas_kernels.skinny_matmul import sum_parts


def places_by_group(
    group: Int[Array, " R"], groups: int
) -> tuple[Int[Array, " R"], Int[Array, " groups"]]:
    """Place of each entry when entries are sorted by group, stable, and the size of each group.

    Counting instead of sorting: one reduction over pairs of entries.
    """
    entry = jnp.arange(group.shape[0], dtype=jnp.int32)
    equal = group[:, None] == group[None, :]
    before = jnp.sum(equal & (entry[None, :] < entry[:, None]), axis=1, dtype=jnp.int32)
    below = jnp.sum(group[None, :] < group[:, None], axis=1, dtype=jnp.int32)
    number = jnp.arange(groups, dtype=jnp.int32)
    sizes = jnp.sum(group[:, None] == number[None, :], axis=0, dtype=jnp.int32)
    return before + below, sizes


class MoE(nnx.Module):
    """Each row goes to its `chosen_count` likeliest experts; no row is ever dropped, and none
    depends on another. A shared expert, where there is one, serves all rows behind a gate."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config.moe
        hidden, experts, inner = config.hidden_size, config.moe.num_experts, config.moe.expert_size

        def experts_init(rows: int, columns: int) -> Array:
            values = jax.random.normal(rngs.params(), (experts, rows, columns)) * rows**-0.5
            return values.astype(dtype)

        self.router = nnx.Param(fan_in_normal(rngs.params(), (hidden, experts), dtype))
        self.gate_up = nnx.Param(experts_init(hidden, 2 * inner))
        self.down = nnx.Param(experts_init(inner, hidden))
        if config.moe.shared_size is not None:
            sizes = dataclasses.replace(config, intermediate_size=config.moe.shared_size)
            self.shared = MLP(sizes, dtype=dtype, init=fan_in_normal, rngs=rngs)
            self.shared_gate = nnx.Param(fan_in_normal(rngs.params(), (hidden, 1), dtype))

    def choose(
        self, x: Float[Array, "B R D"], kernels: Implementation = None
    ) -> tuple[Float[Array, "B R chosen"], Int[Array, "B R chosen"]]:
        """Weights, in x.dtype, and ids of each row's experts; softmax over all in float32."""
        product = skinny_matmul(x, self.router[...], dtype=jnp.float32, implementation=kernels)
        logits = sum_parts(product, jnp.float32)
        weight, index = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.config.chosen_count)
        if self.config.normalise:
            weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
        return weight.astype(x.dtype), index.astype(jnp.int32)

    def __call__(
        self, x: Float[Array, "B R D"], kernels: Implementation
    ) -> Float[Array, "1 B R D"]:
        """In one part, as an MLP's answer may come in several."""
        slots, rows, hidden = x.shape
        weight, index = self.choose(x, kernels)
        place, sizes = places_by_group(index.reshape(-1), self.config.num_experts)
        copies = jnp.repeat(x.reshape(-1, hidden), self.config.chosen_count, axis=0)
        sent = jnp.zeros_like(copies).at[place].set(copies, unique_indices=True)
        product = grouped_matmul(sent, self.gate_up[...], sizes, implementation=kernels)
        gate, up = jnp.split(product, 2, axis=-1)
        gated = jax.nn.silu(gate) * up
        given = grouped_matmul(gated, self.down[...], sizes, implementation=kernels)
        # Back to the order of rows: a gather, so that the sum has one order on every device.
        given = given[place].reshape(slots, rows, self.config.chosen_count, hidden)
        mixed = jnp.sum(
            given.astype(jnp.float32) * weight[..., None].astype(jnp.float32), axis=2
        ).astype(x.dtype)
        if self.config.shared_size is None:
            return mixed[None]
        gate = jax.nn.sigmoid(project(x, self.shared_gate[...]))
        return (mixed + gate * sum_parts(self.shared(x, kernels), x.dtype))[None]
