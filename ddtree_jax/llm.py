"""LLM: text in, text out. Tokenizer, loading, stop strings; the engine does the rest."""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from transformers import AutoTokenizer

from convert import ensure_converted
from ddtree_jax import engine
from ddtree_jax.checkpoint import load_draft, load_target, read_config
from ddtree_jax.engine import Engine
from ddtree_jax.errors import known_arguments_only, require
from ddtree_jax.outputs import FinishReason, RequestOutput, Stats, StreamEvent
from ddtree_jax.round import Method, RoundPlan
from ddtree_jax.sampling import SamplingParams
from ddtree_jax.text import TextStream

Prompt = str | Sequence[int]
DTYPES = ("auto", "bfloat16", "float32")


class _Continuation:
    """Collects one output: tokens up to its end, text, accepted lengths."""

    def __init__(self, prompt: str | None, ids: list[int], params: SamplingParams, decode):
        self.prompt, self.ids, self.params = prompt, ids, params
        self.stream = None if decode is None else TextStream(decode, params.stop_strings)
        self.token_ids: list[int] = []
        self.accepted: list[int] = []
        self.reason: FinishReason | None = None

    def add(self, progress: engine.Progress) -> tuple[int, ...]:
        """Takes in new rounds, up to a stop string; returns the tokens kept."""
        before = len(self.token_ids)
        for round_tokens in progress.rounds:
            if round_tokens.accepted:
                self.accepted.append(round_tokens.accepted)
            for token in round_tokens.tokens:
                self.token_ids.append(token)
                if self.stream is not None and self.stream.push(token):
                    self.reason = "stop"
                    return tuple(self.token_ids[before:])
        self.reason = progress.reason
        if self.reason is not None and self.stream is not None:
            self.stream.finish()
            # Bytes held back until now may have completed a stop string.
            self.reason = "stop" if self.stream.stopped else self.reason
        return tuple(self.token_ids[before:])

    def output(self) -> RequestOutput:
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=tuple(self.ids),
            text=None if self.stream is None else self.stream.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.reason,
            stats=Stats(accepted_lengths=tuple(self.accepted)),
        )


@known_arguments_only
class LLM:
    """Lossless batched generation with draft trees.

    target, draft: Hugging Face id, Hugging Face folder or converted folder; both None is the pair
    that ships with the package. method: "autoregressive" (budget 0), "dflash" (the chain of the
    drafter's top tokens) or "ddtree". tree_budget: nodes below the root; tree_budget + 1 rows
    are verified a round. spine: the top-1 chain enters the tree first. tree_candidates: tokens
    considered a depth, None for as many as the tree could hold. dtype: "auto" is bfloat16 on a
    GPU and float32 on a CPU. max_slots: sequences decoded together. max_length: prompt and new
    tokens of one sequence. seed: of requests that bring none. rounds_per_dispatch: rounds that
    run on the device between two looks of the host.

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
        dtype: Literal["auto", "bfloat16", "float32"] = "auto",
        max_slots: int = 8,
        max_length: int = 4096,
        seed: int = 0,
        rounds_per_dispatch: int = 8,
        kernels: str | None = None,
        progress: bool = True,
    ):
        require(
            method in get_args(Method),
            f"`method` must be one of {get_args(Method)}, got {method!r}",
        )
        require(dtype in DTYPES, f"`dtype` must be one of {DTYPES}, got {dtype!r}")
        for name, value, low in (
            ("tree_budget", tree_budget, 0),
            ("max_slots", max_slots, 1),
            ("max_length", max_length, 2),
            ("rounds_per_dispatch", rounds_per_dispatch, 1),
            ("tree_candidates", 1 if tree_candidates is None else tree_candidates, 1),
            ("seed", seed, 0),
        ):
            require(
                isinstance(value, int) and value >= low,
                f"`{name}` must be an integer of at least {low}, got {value!r}",
            )
        if dtype == "auto":
            dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
        if target is None:
            assets = files("ddtree_jax") / "assets"
            target = str(assets / "target")
            draft = str(assets / "draft") if draft is None else draft
        require(
            draft is not None or method == "autoregressive",
            f"`method` {method!r} needs `draft`: the drafter made for this target",
        )
        folder = ensure_converted(str(target), "target", progress=progress)
        config, draft_config = read_config(folder), None
        require(
            max_length <= config.max_positions,
            f"`max_length` ({max_length}) must not exceed the target's "
            f"{config.max_positions} positions",
        )
        if method != "autoregressive":
            draft_folder = ensure_converted(str(draft), "draft", progress=progress)
            draft_config = read_config(draft_folder)
            draft_config.check_fits(config)
        plan = RoundPlan.of(
            method,
            draft_config,
            budget=tree_budget,
            candidates=tree_candidates,
            spine=spine,
            implementation=kernels,
        )
        self.tokenizer = _load_tokenizer(folder)
        self._seed, self._request_count = seed, 0
        self._engine = Engine(
            load_target(folder, jnp.dtype(dtype)),
            load_draft(draft_folder, jnp.dtype(dtype)) if plan.drafts else None,
            plan,
            max_slots=max_slots,
            max_length=max_length,
            dtype=jnp.dtype(dtype),
            rounds_per_dispatch=rounds_per_dispatch,
        )

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
        outputs: dict[int, RequestOutput] = {}
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not progress) as bar:
            task = bar.add_task("sequences", total=None)
            for event in self._run(prompts, sampling_params):
                if event.output is not None:
                    outputs[event.index] = event.output
                bar.update(task, completed=len(outputs), total=self._running_total)
        return [outputs[index] for index in range(len(outputs))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamEvent]:
        """As `generate`, but yields increments as they come, of all prompts mixed."""
        return self._run(prompts, sampling_params)

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

    def _run(self, prompts, sampling_params) -> Iterator[StreamEvent]:
        # Checked here and not in the generator below, so that errors come at the call.
        entries = self._prepare(prompts, sampling_params)
        self._running_total = len(entries)
        return self._events(entries)

    def _prepare(self, prompts, sampling_params) -> list[_Continuation]:
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
            entry = _Continuation(
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

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _events(self, entries: list[_Continuation]) -> Iterator[StreamEvent]:
        numbers: dict[int, int] = {}
        try:
            for index, entry in enumerate(entries):
                seed = entry.params.seed
                if seed is None:
                    seed = (self._seed + self._request_count) % 2**32
                self._request_count += 1
                numbers[self._engine.add_request(entry.ids, entry.params, seed)] = index
            while self._engine.has_unfinished:
                for progress in self._engine.step():
                    index = numbers[progress.request]
                    entry = entries[index]
                    tokens = entry.add(progress)
                    done = entry.reason is not None
                    if done:
                        self._engine.abort(progress.request)
                    text = None if entry.stream is None else entry.stream.take(all=done)
                    yield StreamEvent(
                        index=index,
                        text=text,
                        token_ids=tokens,
                        output=entry.output() if done else None,
                    )
        finally:
            # A caller may stop listening: nothing of its requests may stay in a slot.
            for number in numbers:
                self._engine.abort(number)


def _load_tokenizer(folder) -> Any | None:
    if not (folder / "tokenizer.json").exists() and not (folder / "vocab.json").exists():
        return None
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
