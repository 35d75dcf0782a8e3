"""Settings of models: what a checkpoint says, checked, and nothing guessed.

`TargetConfig` and `DraftConfig` are written by `convert` and read back by `checkpoint`.
A number that changes results has no default here: it comes from the file, or the load fails.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ddtree_jax.errors import require


class _Settings:
    """JSON form shared by the settings below."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def _fields_of(cls, data: dict[str, Any]) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(cls)}
        missing, unknown = sorted(names - set(data)), sorted(set(data) - names)
        require(
            not missing and not unknown,
            f"{cls.__name__}: missing keys {missing}, unknown keys {unknown}; "
            "convert the source again",
        )
        return dict(data)


@dataclass(frozen=True, kw_only=True)
class RopeConfig(_Settings):
    """Rotary embedding over the whole head.

    `scaling` is None or "yarn" (Peng et al., 2023, arXiv 2309.00071); the yarn fields are None
    without it. `attention_factor` multiplies cos and sin.
    """

    theta: float
    scaling: str | None
    factor: float | None
    original_length: int | None
    beta_fast: float | None
    beta_slow: float | None
    attention_factor: float | None

    def __post_init__(self) -> None:
        require(self.theta > 1, f"`theta` must be over 1, got {self.theta}")
        require(
            self.scaling in (None, "yarn"),
            f"`scaling` must be None or 'yarn', got {self.scaling!r}; no other is supported",
        )
        yarn = (
            self.factor,
            self.original_length,
            self.beta_fast,
            self.beta_slow,
            self.attention_factor,
        )
        if self.scaling == "yarn":
            require(
                all(value is not None and value > 0 for value in yarn),
                "yarn needs positive factor, original_length, beta_fast, beta_slow and "
                f"attention_factor, got {yarn}",
            )

    @classmethod
    def plain(cls, theta: float) -> "RopeConfig":
        """Unscaled rotary embedding with base `theta`."""
        return cls(
            theta=theta,
            scaling=None,
            factor=None,
            original_length=None,
            beta_fast=None,
            beta_slow=None,
            attention_factor=None,
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RopeConfig":
        return cls(**cls._fields_of(data))


@dataclass(frozen=True, kw_only=True)
class BlockConfig(_Settings):
    """Sizes of one Qwen3-shaped decoder layer, which target and drafter share."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig

    def _check_block(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            require(
                isinstance(value, int) and value > 0,
                f"`{name}` must be a positive integer, got {value!r}",
            )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"`num_heads` ({self.num_heads}) must be a multiple of `num_kv_heads` "
            f"({self.num_kv_heads})",
        )
        require(self.head_dim % 2 == 0, f"`head_dim` must be even, got {self.head_dim}")
        require(self.rms_norm_eps > 0, f"`rms_norm_eps` must be positive, got {self.rms_norm_eps}")


@dataclass(frozen=True, kw_only=True)
class HybridConfig(_Settings):
    """What sets Qwen3.5 apart: Gated DeltaNet in most layers, gated attention in the others.

    `attention_layers` are the others, ascending. `rotary_dim` of their head dims rotate.
    """

    attention_layers: tuple[int, ...]
    rotary_dim: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            require(value > 0, f"`{field.name}` must be positive, got {value}")
        require(
            self.num_value_heads % self.num_key_heads == 0,
            f"`num_value_heads` ({self.num_value_heads}) must be a multiple of `num_key_heads` "
            f"({self.num_key_heads})",
        )
        require(
            len(self.attention_layers) > 0
            and list(self.attention_layers) == sorted(set(self.attention_layers)),
            f"`attention_layers` must ascend and hold one at least, got {self.attention_layers}",
        )

    @property
    def conv_channels(self) -> int:
        """Inputs of the convolution: all query heads, all key heads, all value heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "HybridConfig":
        fields = cls._fields_of(data)
        fields["attention_layers"] = tuple(fields["attention_layers"])
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class MoEConfig(_Settings):
    """Experts in place of the MLP. `shared_size` is the width of the shared expert, None without;
    it is computed as one of the others, so it has their width.

    `normalise`: weights of the chosen experts are divided by their sum.
    """

    num_experts: int
    chosen_count: int
    expert_size: int
    shared_size: int | None
    normalise: bool

    def __post_init__(self) -> None:
        require(
            0 < self.chosen_count <= self.num_experts,
            f"`chosen_count` must be in [1, {self.num_experts}], got {self.chosen_count}",
        )
        require(self.expert_size > 0, f"`expert_size` must be positive, got {self.expert_size}")
        require(
            self.shared_size in (None, self.expert_size),
            f"`shared_size` must be None or the `expert_size` {self.expert_size}, "
            f"got {self.shared_size}; no other is supported",
        )

    @property
    def has_shared(self) -> bool:
        return self.shared_size is not None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "MoEConfig":
        return cls(**cls._fields_of(data))


@dataclass(frozen=True, kw_only=True)
class TargetConfig(BlockConfig):
    """A Qwen3 target. `eos_token_ids` end a sequence unless the request ignores them.

    hybrid: None for Qwen3, whose layers all attend. moe: None where MLPs are dense. mtp: the
    checkpoint has a block that predicts the token after the next.
    """

    vocab_size: int
    num_layers: int
    tie_embeddings: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    hybrid: HybridConfig | None = None
    moe: MoEConfig | None = None
    mtp: bool = False

    def __post_init__(self) -> None:
        self._check_block()
        for name in ("vocab_size", "num_layers", "max_positions"):
            require(getattr(self, name) > 0, f"`{name}` must be positive")
        if self.hybrid is not None:
            last, rotary = self.hybrid.attention_layers[-1], self.hybrid.rotary_dim
            require(
                last < self.num_layers,
                f"`attention_layers` names layer {last}; there are {self.num_layers}",
            )
            require(
                rotary <= self.head_dim and rotary % 2 == 0,
                f"`rotary_dim` must be even and at most `head_dim` {self.head_dim}, got {rotary}",
            )
        for token in self.eos_token_ids:
            require(
                0 <= token < self.vocab_size,
                f"`eos_token_ids` holds {token}, outside the vocabulary of {self.vocab_size}",
            )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with keys and values to cache, in order; the rest keep a recurrent state."""
        if self.hybrid is None:
            return tuple(range(self.num_layers))
        return self.hybrid.attention_layers

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.num_layers)) - set(self.attention_layers)))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TargetConfig":
        # Conversions of before these three were known are of plain Qwen3 targets.
        fields = cls._fields_of({"hybrid": None, "moe": None, "mtp": False, **data})
        fields["rope"] = RopeConfig.from_json(fields["rope"])
        if fields["hybrid"] is not None:
            fields["hybrid"] = HybridConfig.from_json(fields["hybrid"])
        if fields["moe"] is not None:
            fields["moe"] = MoEConfig.from_json(fields["moe"])
        fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
        return cls(**fields)


@dataclass(frozen=True, kw_only=True)
class AttentionKind(_Settings):
    """How one drafter layer sees: `causal` inside the block, at most `window` positions (self
    counted) back, and for a layer that is not causal, ahead."""

    causal: bool
    window: int | None

    def __post_init__(self) -> None:
        require(
            self.window is None or self.window > 0,
            f"`window` must be None or positive, got {self.window}",
        )


@dataclass(frozen=True, kw_only=True)
class DraftConfig(BlockConfig):
    """A DFlash drafter (arXiv 2602.06036). It borrows the target's embedding and head.

    `tap_layers` are the target layers whose outputs feed it; `attention` has one entry a layer.
    """

    vocab_size: int
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    target_num_layers: int
    attention: tuple[AttentionKind, ...]

    def __post_init__(self) -> None:
        self._check_block()
        require(self.block_size >= 2, f"`block_size` must be at least 2, got {self.block_size}")
        require(
            0 <= self.mask_token_id < self.vocab_size,
            f"`mask_token_id` must be in [0, {self.vocab_size}), got {self.mask_token_id}",
        )
        require(len(self.tap_layers) > 0, "`tap_layers` must name at least one target layer")
        for layer in self.tap_layers:
            require(
                0 <= layer < self.target_num_layers,
                f"`tap_layers` names layer {layer}; the target has {self.target_num_layers}",
            )
        require(len(self.attention) > 0, "`attention` must have one entry a layer, got none")

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def depth_count(self) -> int:
        """Positions a block predicts: its first row is the root, which is known."""
        return self.block_size - 1

    def check_fits(self, target: TargetConfig) -> None:
        """Raises ValueError when this drafter was not made for `target`."""
        pairs = (
            ("hidden size", self.hidden_size, target.hidden_size),
            ("vocabulary size", self.vocab_size, target.vocab_size),
            ("number of target layers", self.target_num_layers, target.num_layers),
        )
        wrong = [f"{name} {mine} != {theirs}" for name, mine, theirs in pairs if mine != theirs]
        require(
            not wrong,
            f"`draft` does not fit `target`: {'; '.join(wrong)} (drafter, then target). "
            "Use the drafter that was trained for this target.",
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "DraftConfig":
        fields = cls._fields_of(data)
        fields["rope"] = RopeConfig.from_json(fields["rope"])
        fields["tap_layers"] = tuple(fields["tap_layers"])
        fields["attention"] = tuple(AttentionKind(**entry) for entry in fields["attention"])
        return cls(**fields)
