"""What a request asks for, and the token that the target would choose.

The noise is keyed by (request seed, absolute position): the text does not depend on method,
budget, slot or batch mates.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from ddtree_jax.errors import known_arguments_only, require
from ddtree_jax.topk import keep_top

MAX_STOP_TOKENS = 16


@known_arguments_only
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt; the names are vLLM's.

    max_tokens: most new tokens. temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off.
    seed: None takes the next one of the LLM's own sequence. stop: strings that end the text,
    which is cut before them. stop_token_ids: tokens that end the output, kept in `token_ids`.
    ignore_eos: the model's own end tokens do not stop.

    Raises ValueError on a value outside its range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, low in (("max_tokens", 1), ("top_k", 0)):
            value = getattr(self, name)
            require(
                isinstance(value, int) and not isinstance(value, bool) and value >= low,
                f"`{name}` must be an integer of at least {low}, got {value!r}",
            )
        require(
            isinstance(self.temperature, int | float) and 0 <= self.temperature < float("inf"),
            f"`temperature` must be 0 (greedy) or positive, got {self.temperature!r}",
        )
        require(
            isinstance(self.top_p, int | float) and 0 < self.top_p <= 1,
            f"`top_p` must be in (0, 1], got {self.top_p!r}",
        )
        require(
            self.seed is None or (isinstance(self.seed, int) and 0 <= self.seed < 2**32),
            f"`seed` must be None or an integer in [0, 2**32), got {self.seed!r}",
        )
        for text in self.stop_strings:
            require(
                isinstance(text, str) and text != "",
                f"`stop` must hold non-empty strings, got {text!r}",
            )
        for token in self.stop_token_ids or ():
            require(
                isinstance(token, int) and token >= 0,
                f"`stop_token_ids` must hold token ids, got {token!r}",
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def needs(self) -> "SamplingMode":
        """The least that a program must do to serve this request."""
        if self.temperature == 0:
            return "greedy"
        return "filtered" if self.top_k > 0 or self.top_p < 1 else "sample"


# What a compiled program can serve; each mode serves the ones before it too.
SamplingMode = Literal["greedy", "sample", "filtered"]
SAMPLING_MODES: tuple[SamplingMode, ...] = ("greedy", "sample", "filtered")


class Requests(NamedTuple):
    """Sampling settings on the device, one entry a slot."""

    seed: UInt[Array, " B"]
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]


def position_noise(
    seed: UInt[Array, " B"], position: Int[Array, "B R"], size: int
) -> Float[Array, "B R V"]:
    """Gumbel noise of each position of each request, float32."""

    def row(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (size,))

    return jax.vmap(jax.vmap(row, (None, 0)))(seed, position)


def choose_tokens(
    logits: Float[Array, "B T V"],
    depth: Int[Array, "B T"],
    next_position: Int[Array, " B"],
    requests: Requests,
    *,
    max_depth: int,
    mode: SamplingMode,
) -> Int[Array, "B T"]:
    """The target's own token after each node, int32; argmax ties go to the lowest id.

    next_position: absolute position of the token after the root; a node of depth d chooses the
    token at next_position + d. Sampling is argmax(logits / temperature + noise), the Gumbel form
    of a draw from the softmax, over the tokens that top-k and top-p leave.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if mode == "greedy":
        return greedy
    sampled = requests.temperature > 0
    scaled = logits / jnp.where(sampled, requests.temperature, 1.0)[:, None, None]
    offset = jnp.arange(max_depth + 1, dtype=jnp.int32)[None, :]
    noise = position_noise(requests.seed, next_position[:, None] + offset, logits.shape[-1])
    noisy = scaled + jnp.take_along_axis(noise, jnp.clip(depth, 0)[..., None], axis=1)
    if mode == "filtered":
        kept = keep_top(scaled, requests.top_k, requests.top_p)
        noisy = jnp.where(kept, noisy, -jnp.inf)
    drawn = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    return jnp.where(sampled[:, None], drawn, greedy)
