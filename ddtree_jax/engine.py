"""Slots and programs: admits prompts, dispatches rounds, hands out tokens. Host side only."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from ddtree_jax.errors import require
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.mtp import MTP
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.outputs import FinishReason, RoundTrace
from ddtree_jax.params import flatten_model
from ddtree_jax.plan import RoundPlan
from ddtree_jax.prefill import Admission, make_admit, make_extend, split_prompt
from ddtree_jax.round import RoundRecord, make_decode, unpack_report
from ddtree_jax.sampling import (
    MAX_STOP_TOKENS,
    SAMPLING_MODES,
    Requests,
    SamplingMode,
    SamplingParams,
)
from ddtree_jax.state import init_state


class RoundTokens(NamedTuple):
    """Tokens of one round of one request. accepted: root and accepted nodes before any cut; 0 for
    the first token, which prefill gives. trace: None unless the engine traces."""

    tokens: tuple[int, ...]
    accepted: int
    trace: RoundTrace | None = None


class Progress(NamedTuple):
    """What a step brought one request; `reason` says what ended it, None while it goes on."""

    request: int
    rounds: tuple[RoundTokens, ...]
    reason: FinishReason | None


@dataclass(frozen=True, kw_only=True)
class _Request:
    number: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_tokens: tuple[int, ...]


class Engine:
    """Continuous batching over `max_slots` slots of `max_length` tokens.

    A request waits until a slot is free; a slot is refilled as soon as its sequence ends.
    trace: every round comes with a RoundTrace, one round a dispatch.
    """

    def __init__(
        self,
        target: Qwen3,
        drafter: DFlash | MTP | None,
        plan: RoundPlan,
        *,
        max_slots: int,
        max_length: int,
        dtype: DTypeLike,
        rounds_per_dispatch: int,
        trace: bool = False,
    ):
        self.config, self.plan = target.config, plan
        self.max_length, self._trace = max_length, trace
        self._rounds = 1 if trace else rounds_per_dispatch
        drafter = drafter if plan.drafts else None
        self._target, self._target_leaves = flatten_model(target)
        self._drafter, self._draft_leaves = (
            (None, ()) if drafter is None else flatten_model(drafter)
        )
        state = init_state(
            target.config,
            drafter.config if isinstance(drafter, DFlash) else None,
            slots=max_slots,
            rows=-(-max_length // 8) * 8,  # what bulk copies of the cache want
            dtype=dtype,
            mtp_depth=plan.max_depth if plan.mtp else 0,
        )
        # Committed to the weights' device as every later state is: else the first program that
        # takes it would be compiled a second time.
        self._state = jax.device_put(state, self._target_leaves[0].sharding)
        self._waiting: deque[_Request] = deque()
        self._slots: list[_Request | None] = [None] * max_slots
        self._next_number = 0
        self._programs: dict[tuple[str, SamplingMode], object] = {}

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises ValueError when a request cannot be served; costs no compute."""
        require(len(prompt) > 0, "`prompts` holds an empty prompt; give at least one token")
        size = self.config.vocab_size
        for token in prompt:
            require(
                isinstance(token, int | np.integer) and 0 <= token < size,
                f"`prompts` holds token id {token!r}; ids must be integers in [0, {size})",
            )
        require(
            len(prompt) + params.max_tokens <= self.max_length,
            f"prompt ({len(prompt)} tokens) + `max_tokens` ({params.max_tokens}) must not exceed "
            f"`max_length` ({self.max_length}); shorten one or raise `max_length`",
        )
        stops = self._stop_tokens(params)
        require(
            len(stops) <= MAX_STOP_TOKENS,
            f"`stop_token_ids` and the model's own end tokens are {len(stops)}; "
            f"at most {MAX_STOP_TOKENS} fit",
        )

    def add_request(self, prompt: Sequence[int], params: SamplingParams, seed: int) -> int:
        """Queues a prompt; returns its number. Raises ValueError as `check_request` does."""
        self.check_request(prompt, params)
        number = self._next_number
        self._next_number += 1
        self._waiting.append(
            _Request(
                number=number,
                prompt=tuple(int(token) for token in prompt),
                params=params,
                seed=seed,
                stop_tokens=self._stop_tokens(params),
            )
        )
        return number

    def abort(self, number: int) -> None:
        """Frees what a request holds; unknown and finished numbers are ignored."""
        self._waiting = deque(entry for entry in self._waiting if entry.number != number)
        for slot, request in enumerate(self._slots):
            if request is not None and request.number == number:
                self._slots[slot] = None
                active = self._state.active.at[slot].set(False)
                self._state = self._state._replace(active=active)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting) or any(request is not None for request in self._slots)

    def step(self) -> list[Progress]:
        """Fills free slots, or if none could be filled, runs one dispatch of rounds."""
        admitted = self._admit_waiting()
        return admitted if admitted else self._dispatch()

    def _admit_waiting(self) -> list[Progress]:
        admitted = []
        for slot, occupant in enumerate(self._slots):
            if occupant is None and self._waiting:
                admitted.append(self._admit(self._waiting.popleft(), slot))
        return admitted

    def _admit(self, request: _Request, slot: int) -> Progress:
        *chunks, last = split_prompt(request.prompt, slot)
        extend = self._program("extend", "greedy")
        for chunk in chunks:
            self._state = extend(self._target_leaves, self._draft_leaves, self._state, chunk)
        params = request.params
        stops = np.full((1, MAX_STOP_TOKENS), -1, np.int32)
        stops[0, : len(request.stop_tokens)] = request.stop_tokens
        admission = Admission(
            max_tokens=np.array([params.max_tokens], np.int32),
            stop_tokens=stops,
            requests=Requests(
                seed=np.array([request.seed], np.uint32),
                temperature=np.array([params.temperature], np.float32),
                top_k=np.array([params.top_k], np.int32),
                top_p=np.array([params.top_p], np.float32),
            ),
        )
        admit = self._program("admit", params.needs)
        self._state, report = admit(
            self._target_leaves, self._draft_leaves, self._state, last, admission
        )
        token, active = (int(number) for number in np.asarray(report))
        self._slots[slot] = request
        return self._progress(slot, (RoundTokens((token,), 0),), active == 1)

    def _progress(self, slot: int, rounds: tuple[RoundTokens, ...], active: bool) -> Progress:
        """Reports on a slot, and frees it when its sequence ended."""
        request = self._slots[slot]
        if active:
            return Progress(request.number, rounds, None)
        self._slots[slot] = None
        stopped = rounds[-1].tokens[-1] in request.stop_tokens
        return Progress(request.number, rounds, "stop" if stopped else "length")

    def _dispatch(self) -> list[Progress]:
        running = [request for request in self._slots if request is not None]
        if not running:
            return []
        mode = max((r.params.needs for r in running), key=SAMPLING_MODES.index)
        decode = self._program("decode", mode)
        self._state, packed, record = decode(self._target_leaves, self._draft_leaves, self._state)
        report = unpack_report(packed, self._rounds)
        record = None if record is None else jax.tree.map(np.asarray, record)
        progress = []
        for slot, request in enumerate(self._slots):
            if request is None:
                continue
            trace = None if record is None else _trace_of(record, slot)
            rounds = tuple(
                RoundTokens(tuple(tokens[:count].tolist()), int(accepted), trace)
                for tokens, count, accepted in zip(
                    report.token[slot], report.count[slot], report.accepted[slot], strict=True
                )
                if accepted > 0
            )
            progress.append(self._progress(slot, rounds, bool(report.active[slot])))
        return progress

    def _stop_tokens(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self.config.eos_token_ids
        return tuple(dict.fromkeys((*own, *(params.stop_token_ids or ()))))

    def _program(self, kind: str, mode: SamplingMode):
        """Programs are made on first use: a greedy engine never compiles a sampler."""
        if (kind, mode) not in self._programs:
            models = self._target, self._drafter
            if kind == "decode":
                program = make_decode(
                    *models, plan=self.plan, mode=mode, rounds=self._rounds, trace=self._trace
                )
            elif kind == "admit":
                program = make_admit(*models, mode=mode)
            else:
                program = make_extend(*models)
            self._programs[kind, mode] = program
        return self._programs[kind, mode]


def _trace_of(record: RoundRecord, slot: int) -> RoundTrace:
    """One slot's entry of a record whose arrays are numpy's."""
    tree, walk = record
    exists = tree.valid[slot]
    return RoundTrace(
        token=tree.token[slot][exists],
        parent=tree.parent[slot][exists],
        depth=tree.depth[slot][exists],
        log_prob=tree.log_prob[slot][exists],
        wanted=walk.wanted[slot][exists],
        path=tuple(walk.path[slot, : walk.count[slot]].tolist()),
        bonus=int(walk.bonus[slot]),
    )
