"""Trains the embedded target on the Python files of this machine; writes a Hugging Face folder.

PYTHONPATH=. python scripts/train_target.py OUT --work CACHE --minutes 5
"""

import json
import platform
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import flax
import hf_export
import jax
import jax.numpy as jnp
import muon
import numpy as np
import training
import typer
from generate import generate, left_padded
from humaneval import problems
from training import TrainedQwen3

from ddtree_jax.config import RopeConfig, TargetConfig

WINDOW = 512
LATE = 0.65  # from here on functions are mixed in


def config_of(smoke: bool) -> TargetConfig:
    small = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 3, "num_heads": 3}
    full = {"hidden_size": 384, "intermediate_size": 1024, "num_layers": 8, "num_heads": 6}
    return TargetConfig(
        **(small if smoke else full),
        num_kv_heads=1 if smoke else 2,
        head_dim=32 if smoke else 64,
        rms_norm_eps=1e-6,
        rope=RopeConfig.plain(10000.0),
        vocab_size=4096,
        tie_embeddings=True,
        max_positions=4096,
        eos_token_ids=(0,),
    )


def start_corpus(
    work: Path,
    tokenizer: Path | None,
    humaneval: Path | None,
    smoke: bool,
    limit_mb: float,
    seconds: float,
) -> subprocess.Popen:
    """corpus.py beside this process: it forks, which a process with JAX must not."""
    command = [sys.executable, str(Path(__file__).with_name("corpus.py")), str(work)]
    if tokenizer:
        command += ["--tokenizer", str(tokenizer)]
    if humaneval:
        command += ["--humaneval", str(humaneval)]
    if smoke:
        command += ["--limit-mb", "1.5", "--sample-mb", "1", "--workers", "2"]
    else:
        command += ["--limit-mb", str(limit_mb), "--seconds", str(seconds)]
    return subprocess.Popen(command)


def make_step(
    rebuild, config: TargetConfig, attention: str, rates: tuple[float, float], decay: float
):
    """Jitted (params, state, scale, tokens [B, R + 1]) -> (params, state, loss)."""
    attend = training.causal_attend(attention)

    def loss_of(params, tokens):
        model = rebuild(params, jnp.bfloat16)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1])[None], inputs.shape)
        logits = model.logits(model(inputs, positions, attend, kernels="xla").hidden)
        total = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        loss = jnp.mean(total - chosen)
        return loss + 1e-4 * jnp.mean(jnp.square(total)), loss

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, scale, tokens):
        grads, loss = jax.grad(loss_of, has_aux=True)(params, tokens)
        params, state = muon.update(
            params,
            grads,
            state,
            muon_rate=rates[0] * scale,
            adam_rate=rates[1] * scale,
            decay=decay,
            query_columns=config.num_heads * config.head_dim,
        )
        return params, state, loss

    return step


class Windows:
    """Where each step reads: shuffled passes over the files, and late in training functions too."""

    def __init__(self, ranges: dict[str, list[int]], batch: int, seed: int):
        self.files = (ranges["stdlib"][0], ranges["packages"][1])
        self.extra = {name: tuple(ranges[name]) for name in ("stdlib", "functions", "pure")}
        self.batch, self.random = batch, np.random.default_rng(seed)
        self.queue = np.zeros(0, np.int64)
        self.shares: dict[str, float] | None = None

    def _files(self, count: int) -> np.ndarray:
        while len(self.queue) < count:
            first, last = self.files
            shift = self.random.integers(WINDOW)
            starts = np.arange(first + shift, max(last - WINDOW - 1, first + shift + 1), WINDOW)
            self.queue = np.concatenate([self.queue, self.random.permutation(starts)])
        taken, self.queue = self.queue[:count], self.queue[count:]
        return taken

    def plan(self, tokens: float) -> None:
        """Shares of the late phase of `tokens`: no part is read more than about 6 times."""
        wanted = {"stdlib": 0.12, "functions": 0.30, "pure": 0.15}
        self.shares = {
            name: min(share, 6 * (self.extra[name][1] - self.extra[name][0]) / max(tokens, 1))
            for name, share in wanted.items()
        }
        print("mix: late shares", {k: round(v, 3) for k, v in self.shares.items()}, flush=True)

    def offsets(self, late: bool) -> np.ndarray:
        parts, left = [], self.batch
        for name, share in (self.shares or {}).items() if late else ():
            first, last = self.extra[name]
            if last - first > WINDOW + 1:
                count = int(self.random.binomial(self.batch, share))
                parts.append(self.random.integers(first, last - WINDOW - 1, min(count, left)))
                left -= len(parts[-1])
        return np.concatenate([*parts, self._files(left)]).astype(np.int32)


@jax.jit
def read_windows(data: jax.Array, offsets: jax.Array) -> jax.Array:
    return data[offsets[:, None] + jnp.arange(WINDOW + 1)[None, :]].astype(jnp.int32)


def bits_per_byte(
    rebuild, params, tokenizer, humaneval: Path | None, smoke: bool
) -> tuple[float, float]:
    """-log2 p of HumanEval's solutions after their prompts, over their bytes: with the prompt
    first, and with an end token before it."""
    chosen = problems(humaneval)[: 4 if smoke else None]
    pairs = [
        [tokenizer.encode(problem[key]).ids for key in ("prompt", "canonical_solution")]
        for problem in chosen
    ]
    width = max((len(prompt) + len(solution) for prompt, solution in pairs), default=1)
    width = -(-(width + 1) // 128) * 128

    @jax.jit
    def score(params, tokens, first, last):
        model = rebuild(params, jnp.bfloat16)
        positions = jnp.broadcast_to(jnp.arange(width)[None], tokens.shape)
        hidden = model(tokens, positions, training.causal_attend("xla"), kernels="xla").hidden
        logs = jax.nn.log_softmax(model.logits(hidden[:, :-1]), axis=-1)
        label = jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)[..., 0]
        at = jnp.arange(1, width)[None, :]
        return -jnp.sum(jnp.where((at >= first[:, None]) & (at < last[:, None]), label, 0.0))

    nats, size = [0.0, 0.0], sum(len(p["canonical_solution"].encode()) for p in chosen)
    for end_first in (0, 1):
        for begin in range(0, len(pairs), 4):
            rows, firsts, lasts = [], [], []
            for prompt, solution in pairs[begin : begin + 4]:
                row = [0] * end_first + prompt + solution
                rows.append(row + [0] * (width - len(row)))
                firsts.append(end_first + len(prompt))
                lasts.append(len(row))
            arrays = (jnp.asarray(x, jnp.int32) for x in (rows, firsts, lasts))
            nats[end_first] += float(score(params, *arrays))
    plain, after_end = (float(x / np.log(2) / max(size, 1)) for x in nats)
    return plain, after_end


def print_samples(rebuild, params, tokenizer, humaneval: Path | None, smoke: bool) -> list[str]:
    chosen = problems(humaneval)[: 2 if smoke else 8]
    if not chosen:
        return []
    prompts, start = left_padded([tokenizer.encode(p["prompt"]).ids for p in chosen], 400)
    run = jax.jit(
        lambda params, *rest: generate(
            rebuild(params, jnp.bfloat16), *rest, count=16 if smoke else 128
        )
    )
    temperature = jnp.zeros(len(chosen))
    tokens = np.asarray(run(params, prompts, start, temperature, jax.random.key(0)))
    texts = [tokenizer.decode(row[400:].tolist(), skip_special_tokens=False) for row in tokens]
    for problem, text in zip(chosen, texts, strict=True):
        print(f"--- {problem['task_id']} {problem['entry_point']}\n{text}", flush=True)
    return texts


def evaluate(rebuild, params, work: Path, humaneval: Path | None, smoke: bool) -> dict[str, Any]:
    """HumanEval figures; what fails is in the result, since the weights are saved by now."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    found: dict[str, Any] = {}
    try:
        plain, after_end = bits_per_byte(rebuild, params, tokenizer, humaneval, smoke)
        found["humaneval_bits_per_byte"] = plain
        found["humaneval_bits_per_byte_after_end_token"] = after_end
        print("eval:", found, flush=True)
        found["samples"] = print_samples(rebuild, params, tokenizer, humaneval, smoke)
    except Exception as error:  # a missing figure must not cost the run
        found["error"] = repr(error)
        print("eval: failed", repr(error)[:2000], flush=True)
    return found


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "device": str(jax.devices()[0].device_kind),
    }


def warm_up(step, params, batch: int, *, tokens_width: int = WINDOW + 1) -> float:
    """Compiles `step` on copies; returns seconds of one later call."""
    state = muon.init(params)
    params = {name: value + 0.0 for name, value in params.items()}
    tokens = jnp.ones((batch, tokens_width), jnp.int32)
    for _ in range(3):
        begin = time.monotonic()
        params, state, loss = step(params, state, np.float32(0.0), tokens)
        loss.block_until_ready()
    return time.monotonic() - begin


def prepare(config: TargetConfig, batch: int, rates: tuple[float, float], wanted: str, seed: int):
    """(rebuild, params, compiled step, log so far), while the corpus is being read."""
    rebuild, params = training.split(
        lambda rngs: TrainedQwen3(config, dtype=jnp.float32, rngs=rngs), seed
    )
    params = training.zero_outputs(params)
    chosen = training.choose_attention(
        wanted, config.num_heads, config.num_kv_heads, config.head_dim
    )
    step = make_step(rebuild, config, chosen, rates, 0.03)
    seconds = warm_up(step, params, batch)
    print(f"step: {chosen} {seconds:.4f} s", flush=True)
    log = {"versions": versions(), "batch": batch, "attention": chosen, "step_seconds": seconds}
    return rebuild, params, step, log | {"parameters": sum(v.size for v in params.values())}


def main(
    out: Annotated[Path, typer.Argument(help="Hugging Face folder to write")],
    work: Annotated[Path, typer.Option(help="cache of the corpus")] = Path(".cache/corpus"),
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json to use")] = None,
    humaneval: Annotated[Path | None, typer.Option(help="HumanEval.jsonl.gz")] = None,
    minutes: float = 4.5,
    deadline: Annotated[float, typer.Option(help="minutes from start to end of training")] = 7.0,
    batch: int = 256,
    limit_mb: float = 500.0,
    corpus_seconds: float = 100.0,
    muon_rate: float = 0.02,
    adam_rate: float = 0.003,
    attention: str = "auto",
    seed: int = 0,
    smoke: Annotated[bool, typer.Option(help="tiny and short, to see that all works")] = False,
) -> None:
    """Trains the target and writes it to OUT, with train_log.json."""
    begin = time.monotonic()
    if smoke:
        batch, minutes = 4, 0.15
    corpus = start_corpus(work, tokenizer, humaneval, smoke, limit_mb, corpus_seconds)
    config = config_of(smoke)
    rebuild, params, step, log = prepare(config, batch, (muon_rate, adam_rate), attention, seed)
    if corpus.wait() != 0:
        raise SystemExit("corpus.py failed")
    log["corpus"] = json.loads((work / "corpus.json").read_text())
    data = jnp.asarray(np.load(work / "tokens.npy"))
    log["ready_seconds"] = time.monotonic() - begin
    minutes = max(0.1, min(minutes, deadline - log["ready_seconds"] / 60))
    windows = Windows(log["corpus"]["ranges"], batch, seed)

    def batch_at(count: int, progress: float) -> tuple:
        if windows.shares is None and progress > LATE:
            windows.plan(count * batch * WINDOW * (1 - LATE) / LATE)
        return (read_windows(data, windows.offsets(progress > LATE)),)

    def save(params: muon.Params) -> None:
        arrays = {name: np.asarray(value) for name, value in params.items()}
        hf_export.save_target(arrays, config, work, out)
        hf_export.write_json(out / "train_log.json", log)

    params, log["curve"] = training.timed_loop(
        step,
        params,
        muon.init(params),
        batch_at,
        save,
        minutes=minutes,
        tokens_per_step=batch * WINDOW,
        decay=0.5,
        every=5 if smoke else 50,
    )
    log["tokens"] = log["curve"][-1]["step"] * batch * WINDOW
    log["trained_seconds"] = time.monotonic() - begin
    save(params)
    log |= evaluate(rebuild, params, work, humaneval, smoke)
    log["seconds"] = time.monotonic() - begin
    hf_export.write_json(out / "train_log.json", log)
    print(f"{out}: trained {log['trained_seconds']:.0f} s, all {log['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
