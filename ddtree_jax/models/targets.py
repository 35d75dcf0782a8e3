"""Which module a target's settings describe."""

from ddtree_jax.config import TargetConfig
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.models.qwen3_5 import Qwen3_5


def target_type(config: TargetConfig) -> type[Qwen3]:
    """Qwen3, dense or MoE, or its hybrid subclass."""
    return Qwen3 if config.hybrid is None else Qwen3_5
