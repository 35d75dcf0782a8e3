"""Collects one output from the engine's rounds: tokens up to its end, text, accepted lengths."""

from ddtree_jax.engine import Progress
from ddtree_jax.outputs import FinishReason, RequestOutput, RoundTrace, Stats
from ddtree_jax.sampling import SamplingParams
from ddtree_jax.text import Decode, TextStream


class Continuation:
    """One request's output as it grows; `reason` says what ended it, None while it goes on."""

    def __init__(
        self, prompt: str | None, ids: list[int], params: SamplingParams, decode: Decode | None
    ):
        self.prompt, self.ids, self.params = prompt, ids, params
        self.stream = None if decode is None else TextStream(decode, params.stop_strings)
        self.token_ids: list[int] = []
        self.accepted: list[int] = []
        self.reason: FinishReason | None = None
        self.traces: list[RoundTrace] = []

    def add(self, progress: Progress) -> tuple[int, ...]:
        """Takes in new rounds, up to a stop string; returns the tokens kept."""
        before = len(self.token_ids)
        for round_tokens in progress.rounds:
            if round_tokens.accepted:
                self.accepted.append(round_tokens.accepted)
            if round_tokens.trace is not None:
                self.traces.append(round_tokens.trace)
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

    def output(self, *, traced: bool) -> RequestOutput:
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=tuple(self.ids),
            text=None if self.stream is None else self.stream.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.reason,
            stats=Stats(accepted_lengths=tuple(self.accepted)),
            trace=tuple(self.traces) if traced else None,
        )
