"""Mixture of experts in place of the MLP (Qwen3-MoE, Qwen3.5-MoE), through grouped products."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ddtree_jax.config import TargetConfig
from ddtree_jax.models.layers import Implementation, fan_in_normal
from pallas_kernels import grouped_down, routed_gate_up, skinny_matmul
from pallas_kernels.routed_gate_up import Routed


class MoE(nnx.Module):
    """Each row goes to its `chosen_count` likeliest experts; no row is ever dropped, and none
    depends on another. A shared expert, where there is one, is the last of the experts and every
    row's choice behind the others, with a gate for its weight."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config.moe
        hidden, inner = config.hidden_size, config.moe.expert_size
        experts = config.moe.num_experts + config.moe.has_shared

        def experts_init(rows: int, columns: int) -> Array:
            values = jax.random.normal(rngs.params(), (experts, rows, columns)) * rows**-0.5
            return values.astype(dtype)

        router = (hidden, config.moe.num_experts)
        self.router = nnx.Param(fan_in_normal(rngs.params(), router, dtype))
        self.gate_up = nnx.Param(experts_init(hidden, 2 * inner))
        self.down = nnx.Param(experts_init(inner, hidden))
        if config.moe.has_shared:
            self.shared_gate = nnx.Param(fan_in_normal(rngs.params(), (hidden, 1), dtype))

    def route(self, x: Float[Array, "B R D"], kernels: Implementation) -> Routed:
        """Each row's experts, the shared one's behind those chosen, and their first products."""
        return routed_gate_up(
            skinny_matmul(x, self.router[...], dtype=jnp.float32, implementation=kernels),
            x,
            self.shared_gate[...].reshape(-1) if self.config.has_shared else None,
            self.gate_up[...],
            count=self.config.chosen_count,
            normalise=self.config.normalise,
            implementation=kernels,
        )

    def __call__(
        self, x: Float[Array, "B R D"], kernels: Implementation
    ) -> Float[Array, "K B R D"]:
        """In parts, one a choice, whose sum is the answer."""
        options = {"shared": self.config.has_shared, "implementation": kernels}
        gated, ids, weight, order = self.route(x, kernels)
        parts = grouped_down(gated, self.down[...], ids, weight, order, **options)
        return parts.reshape(-1, *x.shape)
