"""Qwen3 target, dense or MoE: embedding, decoder layers, final norm, head, feature taps."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from ddtree_jax.config import TargetConfig
from ddtree_jax.models.layers import (
    Attend,
    DecoderLayer,
    Implementation,
    RMSNorm,
    fan_in_normal,
    rope_tables,
    run_layers,
)
from ddtree_jax.models.moe import MoE
from pallas_kernels import dispatch


class TargetRows(NamedTuple):
    """What one pass over R rows gives.

    hidden: after the final norm, the head's input. features: outputs of the tapped layers,
    concatenated in tap order. keys, values: the new cache rows, one entry a layer. All in the
    weights' dtype.
    """

    hidden: Float[Array, "B R D"]
    features: Float[Array, "B R CD"]
    keys: tuple[Float[Array, "B R K H"], ...]
    values: tuple[Float[Array, "B R K H"], ...]


class Qwen3(nnx.Module):
    """Qwen3ForCausalLM and Qwen3MoeForCausalLM. Source: transformers `modeling_qwen3` and
    `modeling_qwen3_moe`, in our own equations."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(
            (0.02 * nnx.initializers.normal(1.0)(rngs.params(), shape)).astype(dtype)
        )
        self.layers = nnx.List(
            self.make_layer(index, dtype=dtype, rngs=rngs) for index in range(config.num_layers)
        )
        self.norm = self.make_norm(dtype=dtype)
        if not config.tie_embeddings:
            self.head = nnx.Param(fan_in_normal(rngs.params(), shape[::-1], dtype))

    def make_layer(self, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Module:
        """Layer `index`: one kind for all here, other kinds in subclasses."""
        layer = DecoderLayer(self.config, dtype=dtype, init=fan_in_normal, rngs=rngs)
        if self.config.moe is not None:
            layer.mlp = MoE(self.config, dtype=dtype, rngs=rngs)
        return layer

    def make_norm(self, *, dtype: DTypeLike) -> nnx.Module:
        """The norm before the head."""
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, dtype=dtype)

    def embed(self, tokens: Int[Array, "B R"]) -> Float[Array, "B R D"]:
        return self.embedding[...][tokens]

    def residual(self, tokens: Int[Array, "B R"]) -> Float32[Array, "B R D"]:
        """The residual stream before the first layer.

        float32 whatever the weights are: rounded to bfloat16 after every layer, it lets the passes
        of a tree and of one row part at wider gaps (scripts/results/kernel_log.md).
        """
        return self.embed(tokens).astype(jnp.float32)

    def features(
        self, outputs: Sequence[Float[Array, "B R D"]], tap_layers: tuple[int, ...]
    ) -> Float[Array, "B R CD"]:
        """Of each layer's output, what `TargetRows.features` holds."""
        tapped = [outputs[index] for index in tap_layers] or [outputs[-1][..., :0]]
        return jnp.concatenate(tapped, axis=-1).astype(self.embedding[...].dtype)

    def logits(self, hidden: Float[Array, "B R D"]) -> Float[Array, "B R V"]:
        """float32 logits of rows after the final norm (the target's or the drafter's)."""
        if self.config.tie_embeddings:
            subscripts, kernel = "brd,vd->brv", self.embedding[...]
        else:
            subscripts, kernel = "brd,dv->brv", self.head[...]
        return jnp.einsum(
            subscripts,
            hidden,
            kernel,
            precision=dispatch.precision_of(hidden),
            preferred_element_type=jnp.float32,
        )

    def __call__(
        self,
        tokens: Int[Array, "B R"],
        positions: Int[Array, "B R"],
        attend: Attend,
        tap_layers: tuple[int, ...] = (),
        recur: None = None,
        kernels: Implementation = None,
    ) -> TargetRows:
        """Runs R rows; `attend` decides what each sees. Without taps `features` has size 0.

        recur: None; only hybrid targets have a recurrence (`qwen3_5`).
        """
        x = self.residual(tokens)
        dtype = self.embedding[...].dtype
        cos, sin = rope_tables(self.config.rope, self.config.head_dim, positions, dtype)
        rows = run_layers(self.layers, self.norm, x, cos, sin, attend, kernels=kernels)
        return TargetRows(
            rows[-1].normed,
            self.features([layer.output for layer in rows], tap_layers),
            tuple(layer.key for layer in rows),
            tuple(layer.value for layer in rows),
        )
