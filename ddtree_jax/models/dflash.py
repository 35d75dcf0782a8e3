"""DFlash block-diffusion drafter (arXiv 2602.06036): a block of masks read off target features.

The target's embedding and head are not part of it: the caller embeds the block and applies
the head, so that no variable is shared between two modules.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ddtree_jax.config import AttentionKind, DraftConfig
from ddtree_jax.models.layers import (
    Attend,
    DecoderLayer,
    Implementation,
    RMSNorm,
    fan_in_normal,
    project,
    rope_tables,
    run_layers,
)


def block_visible(kind: AttentionKind, block_size: int) -> Bool[np.ndarray, "R R"]:
    """Which block rows see which: [row, other]. Sliding layers see distances under the window."""
    row = np.arange(block_size)
    distance = row[:, None] - row[None, :]
    visible = distance >= 0 if kind.causal else np.ones_like(distance, bool)
    return visible if kind.window is None else visible & (np.abs(distance) < kind.window)


class DFlash(nnx.Module):
    """DFlashDraftModel. Context rows are keys and values of projected target features."""

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        fused = len(config.tap_layers) * config.hidden_size
        self.fuse = nnx.Param(fan_in_normal(rngs.params(), (fused, config.hidden_size), dtype))
        self.context_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.layers = nnx.List(
            DecoderLayer(config, dtype=dtype, init=fan_in_normal, rngs=rngs)
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)

    def project_context(self, features: Float[Array, "B X CD"]) -> Float[Array, "B X D"]:
        """What every layer reads of committed rows with these target features."""
        return self.context_norm(project(features, self.fuse[...]))

    def context_rows(
        self, features: Float[Array, "B X CD"], positions: Int[Array, "B X"]
    ) -> tuple[tuple[Float[Array, "B X K H"], ...], tuple[Float[Array, "B X K H"], ...]]:
        """Keys and values, one entry a layer, of committed rows; no block is drafted."""
        context = self.project_context(features)
        cos, sin = rope_tables(self.config.rope, self.config.head_dim, positions, context.dtype)
        rows = [layer.attention.heads(context, cos, sin, None) for layer in self.layers]
        return tuple(heads.key for heads in rows), tuple(heads.value for heads in rows)

    def __call__(
        self,
        block: Float[Array, "B R D"],
        positions: Int[Array, "B Y"],
        attend: Attend,
        context: Float[Array, "B X D"] | None = None,
        kernels: Implementation = None,
    ) -> Float[Array, "B R D"]:
        """Hidden rows after the final norm; row j > 0 belongs to the token at its position.

        block: embeddings of the root token, then of the mask token (block_size rows).
        context: projected rows that were not taken in before; `attend` then gets their keys and
        values ahead of the block's, and `positions` begin with theirs. attend: adds the rows
        taken in earlier and the layer's mask (`block_visible`).
        """
        cos, sin = rope_tables(self.config.rope, self.config.head_dim, positions, block.dtype)
        rows = run_layers(
            self.layers, self.norm, block, cos, sin, attend, context=context, kernels=kernels
        )
        return rows[-1].normed

    def block_embeddings(
        self, root: Float[Array, "B D"], mask: Float[Array, " D"]
    ) -> Float[Array, "B R D"]:
        """Block input: the root's embedding, then the mask's."""
        masks = jnp.broadcast_to(
            mask[None, None, :], (root.shape[0], self.config.depth_count, mask.shape[0])
        )
        return jnp.concatenate([root[:, None, :], masks], axis=1)
