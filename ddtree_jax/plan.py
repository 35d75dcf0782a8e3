"""What a round does, as static settings: the tree's shape and the rule that accepts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ddtree_jax.choices import Choices, parse_choices
from ddtree_jax.config import DraftConfig
from ddtree_jax.errors import require

Method = Literal["autoregressive", "mtp", "dflash", "ddtree"]
TreeShape = Literal["best_first", "chain", "static"]
Acceptance = Literal["tree_walk", "linear"]

# Rank paths are packed into words of the kernel: tree_build takes no more.
_MOST_CANDIDATES = 1024


def require_one_of(name: str, value: object, kind: object) -> None:
    """Raises ValueError unless `value` is one of the strings of the Literal `kind`."""
    require(value in get_args(kind), f"`{name}` must be one of {get_args(kind)}, got {value!r}")


def require_integer(name: str, value: object, low: int) -> None:
    """Raises ValueError unless `value` is an integer of at least `low`."""
    require(
        isinstance(value, int) and not isinstance(value, bool) and value >= low,
        f"`{name}` must be an integer of at least {low}, got {value!r}",
    )


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """What a user says about the tree; the arguments of `LLM` of the same names.

    method "autoregressive" is budget 0, "mtp" the chain of mtp_tokens that the target's own MTP
    block drafts, "dflash" the chain of the drafter's top tokens. tree_shape is of method
    "ddtree"; None is "static" with tree_choices and "best_first" without.
    """

    method: Method = "ddtree"
    tree_budget: int = 63
    tree_shape: TreeShape | None = None
    tree_choices: str | Sequence[Sequence[int]] | None = None
    tree_candidates: int | None = None
    spine: bool = False
    acceptance: Acceptance = "tree_walk"
    mtp_tokens: int = 3

    def __post_init__(self) -> None:
        require_one_of("method", self.method, Method)
        require_one_of("acceptance", self.acceptance, Acceptance)
        require_integer("tree_budget", self.tree_budget, 0)
        require_integer("mtp_tokens", self.mtp_tokens, 1)
        if self.tree_candidates is not None:
            require_integer("tree_candidates", self.tree_candidates, 1)
        if self.tree_shape is not None:
            require_one_of("tree_shape", self.tree_shape, TreeShape)
        static = self.tree_shape in (None, "static") and self.method == "ddtree"
        if self.tree_choices is not None:
            require(
                static,
                f"`tree_choices` is for `tree_shape` 'static' of `method` 'ddtree', "
                f"got {self.tree_shape!r} of {self.method!r}",
            )
            parse_choices(self.tree_choices)
        require(
            self.tree_choices is not None or self.tree_shape != "static",
            "`tree_shape` 'static' needs `tree_choices`, such as [(0,), (0, 0), (1,)]",
        )

    @property
    def drafts(self) -> bool:
        return self.method != "autoregressive" and (
            self.tree_budget > 0
            or self.method in ("mtp", "dflash")
            or self.tree_choices is not None
        )


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """Static shape of a round.

    budget: nodes below the root; 0 is autoregressive decoding and runs no drafter.
    max_depth: J, the longest path. candidate_count: M, candidates a depth; 1 is the chain.
    choices: rank paths of a static tree, depth first. mtp: the target's own block drafts, one
    token after the other. implementation: of the kernels; None
    chooses by device.
    """

    budget: int
    max_depth: int
    candidate_count: int
    spine: bool = False
    choices: Choices | None = None
    acceptance: Acceptance = "tree_walk"
    mtp: bool = False
    implementation: str | None = None

    @classmethod
    def of(
        cls,
        settings: TreeSettings,
        draft: DraftConfig | None,
        implementation: str | None = None,
    ) -> "RoundPlan":
        """The plan of what a user said; `draft` is None without a drafter."""
        rest = {"acceptance": settings.acceptance, "implementation": implementation}
        if not settings.drafts:
            return cls(budget=0, max_depth=0, candidate_count=0, **rest)
        if settings.method == "mtp":
            count = settings.mtp_tokens
            return cls(budget=count, max_depth=count, candidate_count=1, mtp=True, **rest)
        require(draft is not None, f"`method` {settings.method!r} needs a drafter: give `draft`")
        depth, most = draft.depth_count, min(draft.vocab_size, _MOST_CANDIDATES)
        if settings.tree_choices is not None:
            choices = parse_choices(settings.tree_choices)
            count = _check_choices(choices, depth, settings.tree_candidates or most)
            rest |= {"choices": choices}
            return cls(budget=len(choices), max_depth=depth, candidate_count=count, **rest)
        if settings.method == "dflash" or settings.tree_shape == "chain":
            return cls(budget=depth, max_depth=depth, candidate_count=1, **rest)
        budget = settings.tree_budget
        count = min(settings.tree_candidates or budget, budget, most)
        return cls(
            budget=budget, max_depth=depth, candidate_count=count, spine=settings.spine, **rest
        )

    @property
    def drafts(self) -> bool:
        return self.budget > 0

    @property
    def width(self) -> int:
        """Most tokens that a round emits."""
        return self.max_depth + 1


def _check_choices(choices: Choices, depth: int, most: int) -> int:
    """Candidates a depth that a static tree reads. Raises ValueError on a node out of reach."""
    for path in choices:
        require(
            len(path) <= depth,
            f"`tree_choices` holds {path}, deeper than the {depth} tokens that a block drafts",
        )
        require(
            max(path) < most,
            f"`tree_choices` holds {path}, a rank beyond the {most} candidates of a depth",
        )
    return 1 + max(max(path) for path in choices)
