"""LLM: text in, text out. Tokenizer, loading, stop strings; the engine does the rest."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from convert import ensure_converted
from ddtree_jax.checkpoint import load_draft, load_mtp, load_target, read_config
from ddtree_jax.continuation import Continuation
from ddtree_jax.engine import Engine
from ddtree_jax.engine import Progress as RequestProgress
from ddtree_jax.errors import known_arguments_only, require
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.mtp import MTP
from ddtree_jax.outputs import RequestOutput, StreamEvent
from ddtree_jax.plan import (
    Acceptance,
    Method,
    RoundPlan,
    TreeSettings,
    TreeShape,
    require_integer,
    require_one_of,
)
from ddtree_jax.sampling import SamplingParams

Prompt = str | Sequence[int]
Dtype = Literal["auto", "bfloat16", "float32"]
Kernels = Literal[None, "pallas", "xla"]


@known_arguments_only
class LLM:
    """Lossless batched generation with draft trees.

    target, draft: Hugging Face id, Hugging Face folder or converted folder; both None is the pair
    that ships with the package. method: "autoregressive" (budget 0), "mtp" (the chain of
    mtp_tokens tokens that the target's own MTP block drafts; `draft` is not used), "dflash" (the
    chain of the drafter's top tokens) or "ddtree". tree_budget: nodes below the root; tree_budget
    + 1 rows are verified a round. spine: the top-1 chain enters the tree first. tree_candidates:
    tokens considered a depth, None for as many as the tree could hold. tree_shape: "best_first",
    "chain" or "static". tree_choices: rank paths of a static tree, such as [(0,), (0, 0), (1,)].
    acceptance: "tree_walk", or for comparison "linear", which scans the tree depth first and so
    keeps its first branch only. dtype: "auto" is bfloat16 on a GPU and float32 on a CPU.
    max_slots: sequences decoded together. max_length: prompt and new tokens of one sequence. seed:
    of requests that bring none. rounds_per_dispatch: rounds that run on the device between two
    looks of the host. kernels: None, "pallas" or "xla". trace: outputs carry a RoundTrace a round,
    and every round waits for the host.

    Raises ValueError on arguments that cannot work together, before any compute.
    """

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        *,
        method: Method = "ddtree",
        tree_budget: int = 63,
        spine: bool = False,
        tree_candidates: int | None = None,
        tree_shape: TreeShape | None = None,
        tree_choices: str | Sequence[Sequence[int]] | None = None,
        acceptance: Acceptance = "tree_walk",
        mtp_tokens: int = 3,
        dtype: Dtype = "auto",
        max_slots: int = 8,
        max_length: int = 4096,
        seed: int = 0,
        rounds_per_dispatch: int = 8,
        kernels: Kernels = None,
        trace: bool = False,
        progress: bool = True,
    ):
        settings = TreeSettings(
            method=method,
            tree_budget=tree_budget,
            spine=spine,
            tree_candidates=tree_candidates,
            tree_shape=tree_shape,
            tree_choices=tree_choices,
            acceptance=acceptance,
            mtp_tokens=mtp_tokens,
        )
        require_one_of("dtype", dtype, Dtype)
        require_integer("max_slots", max_slots, 1)
        require_integer("max_length", max_length, 2)
        require_integer("rounds_per_dispatch", rounds_per_dispatch, 1)
        require_integer("seed", seed, 0)
        require_one_of("kernels", kernels, Kernels)
        if target is None:
            target, draft = _embedded_pair(draft)
        width = _width(dtype)
        self._seed, self._request_count, self._traced = seed, 0, trace
        self._inbox: dict[int, deque[RequestProgress]] = {}
        folder, draft_folder, plan = _prepare(
            target, draft, settings, kernels, max_length, progress
        )
        with ThreadPoolExecutor(1) as pool:
            tokenizer = pool.submit(_load_tokenizer, folder)
            self._engine = Engine(
                load_target(folder, width),
                _load_drafter(folder, draft_folder, plan, width),
                plan,
                max_slots=max_slots,
                max_length=max_length,
                dtype=width,
                rounds_per_dispatch=rounds_per_dispatch,
                trace=trace,
            )
            self.tokenizer = tokenizer.result()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continues one prompt or several; outputs in the order of the prompts.

        prompts: texts or token ids. sampling_params: one for all, or one for each.
        Raises ValueError, before any compute, if any prompt or setting cannot be served.
        """
        entries = self._entries(prompts, sampling_params)
        outputs: dict[int, RequestOutput] = {}
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not progress) as bar:
            task = bar.add_task("sequences", total=len(entries))
            for event in self._events(entries):
                if event.output is not None:
                    outputs[event.index] = event.output
                bar.update(task, completed=len(outputs))
        return [outputs[index] for index in range(len(entries))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamEvent]:
        """As `generate`, but yields increments as they come, of all prompts mixed.

        Several streams may be read side by side; they share the slots.
        """
        # Checked here and not in the generator, so that errors come at the call.
        return self._events(self._entries(prompts, sampling_params))

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        sampling_params: SamplingParams | None = None,
        *,
        enable_thinking: bool = False,
    ) -> RequestOutput:
        """Answers a conversation through the tokenizer's chat template.

        Thinking is off by default: DFlash drafters are trained without it.
        """
        return self.generate([self.chat_prompt(messages, enable_thinking)], sampling_params)[0]

    def chat_prompt(
        self, messages: Sequence[dict[str, str]], enable_thinking: bool = False
    ) -> list[int]:
        """Token ids of a conversation that the model is to answer."""
        require(
            self.tokenizer is not None and self.tokenizer.chat_template is not None,
            "`messages` needs a tokenizer with a chat template; this target has none. "
            "Use `generate` with plain prompts",
        )
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=enable_thinking,
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _entries(self, prompts, sampling_params) -> list[Continuation]:
        if isinstance(prompts, str) or all(
            np.ndim(entry) == 0 and not isinstance(entry, str) for entry in prompts
        ):
            prompts = [prompts]
        params = sampling_params if sampling_params is not None else SamplingParams()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        require(
            len(params) == len(prompts),
            f"`sampling_params` must be one or one a prompt: got {len(params)} for "
            f"{len(prompts)} prompts",
        )
        decode = None if self.tokenizer is None else self.decode
        entries = []
        for prompt, one in zip(prompts, params, strict=True):
            require(
                isinstance(one, SamplingParams),
                f"`sampling_params` must hold SamplingParams, got {type(one).__name__}",
            )
            require(
                decode is not None or not one.stop_strings,
                "`stop` needs a tokenizer, and this target has none; use `stop_token_ids`",
            )
            entry = Continuation(
                prompt if isinstance(prompt, str) else None, self._encode(prompt), one, decode
            )
            self._engine.check_request(entry.ids, one)
            entries.append(entry)
        return entries

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            require(
                np.ndim(prompt) == 1 and all(isinstance(t, int | np.integer) for t in prompt),
                f"`prompts` must hold texts or sequences of token ids, got {prompt!r:.60}",
            )
            return [int(token) for token in prompt]
        require(
            self.tokenizer is not None,
            "`prompts` holds text, but this target has no tokenizer; give token ids",
        )
        return self.tokenizer.encode(prompt)

    def most_tokens(self, rounds: int) -> int:
        """Tokens after which an output has surely run `rounds` rounds, unless it ended."""
        return 1 + rounds * self._engine.plan.width

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids; special tokens show only if asked for. Ids without a tokenizer."""
        if self.tokenizer is None:
            return " ".join(str(token) for token in ids)
        return self.tokenizer.decode(ids, skip_special_tokens=not special)

    def _events(self, entries: list[Continuation]) -> Iterator[StreamEvent]:
        numbers: list[int] = []
        try:
            for entry in entries:
                numbers.append(
                    self._engine.add_request(entry.ids, entry.params, self._seed_of(entry))
                )
                self._inbox[numbers[-1]] = deque()
            unfinished = dict(zip(numbers, range(len(entries)), strict=True))
            while unfinished:
                for number, index in list(unfinished.items()):
                    while number in unfinished and self._inbox[number]:
                        event = self._event(index, entries[index], self._inbox[number].popleft())
                        if event.output is not None:
                            del unfinished[number]
                            self._engine.abort(number)
                        yield event
                if unfinished and not any(self._inbox[number] for number in unfinished):
                    self._step()
        finally:
            # A caller may stop listening: nothing of its requests may stay in a slot.
            for number in numbers:
                self._engine.abort(number)
                self._inbox.pop(number, None)

    def _step(self) -> None:
        """Runs the engine once and hands what it brought to whoever asked for it."""
        for progress in self._engine.step():
            self._inbox[progress.request].append(progress)

    def _event(self, index: int, entry: Continuation, progress: RequestProgress) -> StreamEvent:
        tokens = entry.add(progress)
        done = entry.reason is not None
        return StreamEvent(
            index=index,
            text=None if entry.stream is None else entry.stream.take(all=done),
            token_ids=tokens,
            output=entry.output(traced=self._traced) if done else None,
        )

    def _seed_of(self, entry: Continuation) -> int:
        """A request's seed: its own, or the next of this LLM's sequence."""
        self._request_count += 1
        if entry.params.seed is not None:
            return entry.params.seed
        return (self._seed + self._request_count - 1) % 2**32


def _embedded_pair(draft: str | None) -> tuple[str, str]:
    """Folders of the embedded target and of its drafter, or of the named one."""
    assets = files("ddtree_jax") / "assets"
    return str(assets / "target"), str(assets / "draft") if draft is None else draft


def _width(dtype: Dtype) -> jnp.dtype:
    if dtype == "auto":
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    return jnp.dtype(dtype)


def _prepare(
    target: str,
    draft: str | None,
    settings: TreeSettings,
    kernels: str | None,
    max_length: int,
    progress: bool,
) -> tuple[Path, Path | None, RoundPlan]:
    """Converted folders and the plan; all checks that need no weights. No drafter, no folder."""
    require(
        draft is not None or not settings.drafts or settings.method == "mtp",
        f"`method` {settings.method!r} needs `draft`: the drafter made for this target",
    )
    folder = ensure_converted(str(target), "target", progress=progress)
    config = read_config(folder)
    require(
        max_length <= config.max_positions,
        f"`max_length` ({max_length}) must not exceed the target's "
        f"{config.max_positions} positions",
    )
    require(
        settings.method != "mtp" or config.mtp,
        f"`method` 'mtp' needs a target with an MTP block, and {target} has none",
    )
    if not settings.drafts or settings.method == "mtp":
        return folder, None, RoundPlan.of(settings, None, kernels)
    draft_folder = ensure_converted(str(draft), "draft", progress=progress)
    draft_config = read_config(draft_folder)
    draft_config.check_fits(config)
    return folder, draft_folder, RoundPlan.of(settings, draft_config, kernels)


def _load_drafter(
    folder: Path, draft_folder: Path | None, plan: RoundPlan, dtype: jnp.dtype
) -> DFlash | MTP | None:
    """What drafts under `plan`: the target's own MTP block, or a model of its own."""
    if plan.mtp:
        return load_mtp(folder, dtype)
    return None if draft_folder is None else load_draft(draft_folder, dtype)


def _load_tokenizer(folder: Path) -> Any | None:
    if not (folder / "tokenizer.json").exists() and not (folder / "vocab.json").exists():
        return None
    # Seconds of importing, which pass while weights are read (`LLM` calls this in a thread). Its
    # advice to install PyTorch is not for our users.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
