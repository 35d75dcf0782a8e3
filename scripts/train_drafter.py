"""Trains the embedded DFlash drafter on continuations of the target's own (arXiv 2602.06036).

PYTHONPATH=. python scripts/train_drafter.py TARGET OUT --work CACHE --minutes 4
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import hf_export
import jax
import jax.numpy as jnp
import ml_dtypes
import muon
import numpy as np
import training
import typer
from generate import causal_visible, left_padded, positions_of
from humaneval import problems
from own_texts import Sizes, Texts, make_generate, own_texts
from replay import simulate
from train_target import start_corpus, versions
from training import MASKED, TrainedQwen3, head, product

from ddtree_jax.config import AttentionKind, DraftConfig, RopeConfig, TargetConfig
from ddtree_jax.models.dflash import DFlash

FULL = Sizes(prompt=272, count=192, anchors=24, generate_batch=2048, batch=256)
SMOKE = Sizes(prompt=48, count=32, anchors=3, generate_batch=16, batch=4)


def config_of(target: TargetConfig, smoke: bool) -> DraftConfig:
    return DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=96 if smoke else 768,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=1e-6,
        rope=RopeConfig.plain(target.rope.theta),
        vocab_size=target.vocab_size,
        block_size=16,
        mask_token_id=1,
        tap_layers=(0, 1) if target.num_layers < 8 else (1, 4, 6),
        target_num_layers=target.num_layers,
        attention=(AttentionKind(causal=False, window=None),) * (2 if smoke else 4),
    )


def block_attention(query, key, value, context_key, context_value, seen):
    """Block rows over their context and their own block, under one softmax.

    query [B,A,R,N,H], key and value [B,A,R,K,H], context [B,S,K,H], seen [B,A,S]. The two parts
    are never joined: a dense mask over all blocks would cost A times the in-block scores.
    """
    size = query.shape[-1]
    grouped = query.reshape(*query.shape[:3], key.shape[3], -1, size) * size**-0.5
    far = product("barkgh,bskh->bkgars", grouped, context_key)
    far = jnp.where(seen[:, None, None, :, None, :], far, MASKED)
    near = product("barkgh,batkh->bkgart", grouped, key)
    top = jnp.maximum(far.max(-1, keepdims=True), near.max(-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    far, near = jnp.exp(far - top), jnp.exp(near - top)
    total = far.sum(-1, keepdims=True) + near.sum(-1, keepdims=True)
    far, near = (far / total).astype(value.dtype), (near / total).astype(value.dtype)
    mixed = jnp.einsum("bkgars,bskh->barkgh", far, context_value)
    mixed += jnp.einsum("bkgart,batkh->barkgh", near, value)
    return mixed.reshape(query.shape)


def draft_hidden(drafter: DFlash, embedding, features, texts: Texts, anchors):
    """Hidden rows [B, A, block, D] of blocks whose roots sit at columns `anchors` [B, A]."""
    width, block = texts.tokens.shape[1], drafter.config.block_size
    batch, count = anchors.shape
    keys, values = drafter.context_rows(features, positions_of(texts.start, width))
    column = jnp.arange(width)[None, None, :]
    seen = (column >= texts.start[:, None, None]) & (column < anchors[..., None])

    def attend(index, query, key, value):
        blocks = [x.reshape(batch, count, block, *x.shape[2:]) for x in (query, key, value)]
        mixed = block_attention(*blocks, keys[index], values[index], seen)
        return mixed.reshape(query.shape)

    roots = embedding[jnp.take_along_axis(texts.tokens, anchors, axis=1)]
    rows = drafter.block_embeddings(
        roots.reshape(batch * count, -1), embedding[drafter.config.mask_token_id]
    )
    offset = jnp.arange(block)[None, None, :]
    places = (anchors - texts.start[:, None])[..., None] + offset
    hidden = drafter(
        rows.reshape(batch, count * block, -1), places.reshape(batch, -1), attend, kernels="xla"
    )
    return hidden.reshape(batch, count, block, -1)


def expected_embeddings(target: TrainedQwen3, hidden, texts: Texts, prompt: int):
    """Mean embedding [B, N, D] of each new token under what the target would have drawn.

    Cross-entropy against soft labels p is logsumexp(z) - h . sum_v p_v E_v, so this one row
    stands for the whole distribution. At temperature 0 it is the token's own embedding.
    """
    embedding = target.embedding[...]
    safe = jnp.where(texts.temperature > 0, texts.temperature, 1.0)[:, None, None]
    chances = jax.nn.softmax(head(hidden[:, prompt - 1 : -1], embedding) / safe, axis=-1)
    soft = jnp.einsum(
        "bnv,vd->bnd",
        chances.astype(embedding.dtype),
        embedding,
        preferred_element_type=jnp.float32,
    )
    hard = embedding[texts.tokens[:, prompt:]].astype(jnp.float32)
    return jnp.where(texts.temperature[:, None, None] > 0, soft, hard)


def run_target(target: TrainedQwen3, texts: Texts, taps: tuple[int, ...]):
    width = texts.tokens.shape[1]
    visible = causal_visible(texts.start, width)
    return target(
        texts.tokens,
        positions_of(texts.start, width),
        lambda _, query, key, value: training.masked_attention(query, key, value, visible),
        taps,
        kernels="xla",
    )


def make_step(
    rebuild,
    rebuild_target,
    config: DraftConfig,
    sizes: Sizes,
    rates: tuple[float, float],
    decay: float,
    gamma: float,
):
    """Jitted (params, state, scale, target params, texts, key) -> (params, state, loss)."""
    weight = jnp.exp(-jnp.arange(config.depth_count) / gamma)

    def loss_of(params, embedding, features, expected, texts, anchors):
        drafter = rebuild(params, jnp.bfloat16)
        hidden = draft_hidden(drafter, embedding, features, texts, anchors)[:, :, 1:]
        total = jax.nn.logsumexp(head(hidden, embedding), axis=-1)
        place = anchors[..., None] + 1 + jnp.arange(config.depth_count)
        valid = place < texts.end[:, None, None]
        row = jnp.minimum(place - sizes.prompt, sizes.count - 1).reshape(place.shape[0], -1)
        wanted = jnp.take_along_axis(expected, row[..., None], axis=1).reshape(hidden.shape)
        chosen = jnp.sum(hidden.astype(jnp.float32) * wanted, axis=-1)
        weights = jnp.where(valid, weight[None, None, :], 0.0)
        return jnp.sum((total - chosen) * weights) / jnp.maximum(jnp.sum(weights), 1.0)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, scale, target_params, texts, key):
        target = rebuild_target(target_params, jnp.bfloat16)
        texts = texts._replace(tokens=texts.tokens.astype(jnp.int32))
        rows = run_target(target, texts, config.tap_layers)
        expected = expected_embeddings(target, rows.hidden, texts, sizes.prompt)
        # One anchor a stratum, from the last prompt token to the last but one.
        share = jax.random.uniform(key, (texts.tokens.shape[0], sizes.anchors))
        share = (share + jnp.arange(sizes.anchors)[None]) / sizes.anchors
        room = (texts.end - sizes.prompt)[:, None]
        anchors = sizes.prompt - 1 + jnp.floor(share * room).astype(jnp.int32)
        loss, grads = jax.value_and_grad(loss_of)(
            params, target.embedding[...], rows.features, expected, texts, anchors
        )
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


def evaluate(
    rebuild, params, rebuild_target, target_params, work: Path, humaneval: Path | None, smoke: bool
) -> dict[str, float]:
    """Mean tokens a round on HumanEval, by temperature: the chain, and the tree of 64 nodes."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    prompt, count, size = (64, 20, 2) if smoke else (416, 128, 41)
    chosen = problems(humaneval)[: 2 if smoke else None]
    run = make_generate(rebuild_target, count)

    @jax.jit
    def candidates(params, target_params, texts):
        target, drafter = rebuild_target(target_params, jnp.bfloat16), rebuild(params, jnp.bfloat16)
        texts = texts._replace(tokens=texts.tokens.astype(jnp.int32))
        features = run_target(target, texts, drafter.config.tap_layers).features
        anchors = jnp.broadcast_to(prompt - 1 + jnp.arange(count)[None], (size, count))
        embedding = target.embedding[...]
        hidden = draft_hidden(drafter, embedding, features, texts, anchors)[:, :, 1:]
        logs = jax.nn.log_softmax(head(hidden, embedding), axis=-1)
        return jax.lax.top_k(logs, 16)

    found: dict[str, list[tuple[int, int]]] = {}
    for begin in range(0, len(chosen) - size + 1, size):
        prompts, start = left_padded(
            [tokenizer.encode(p["prompt"]).ids for p in chosen[begin : begin + size]], prompt
        )
        for temperature in (0.0, 1.0):
            heat = jnp.full(size, temperature, jnp.float32)
            texts = run(target_params, prompts, start, heat, jax.random.key(begin))
            logs, tokens = (np.asarray(x) for x in candidates(params, target_params, texts))
            for row in range(size):
                text = np.asarray(texts.tokens[row, prompt:])
                for name, budget in (("chain", 0), ("tree64", 64)):
                    tally = simulate(text, logs[row], tokens[row], budget)
                    found.setdefault(f"{name} T={temperature:g}", []).append(tally)
    return {
        name: sum(done for done, _ in tallies) / sum(rounds for _, rounds in tallies)
        for name, tallies in found.items()
    }


class Batches:
    """Shuffled passes over `texts`, as arguments of the step."""

    def __init__(self, texts: Texts, target_params: muon.Params, size: int, seed: int):
        self.texts, self.target_params, self.size = texts, target_params, size
        self.random, self.key = np.random.default_rng(seed), jax.random.key(seed)
        self.queue = np.zeros(0, np.int64)
        self.take = jax.jit(lambda texts, index: Texts(*(column[index] for column in texts)))

    def __call__(self, count: int, _: float) -> tuple:
        while len(self.queue) < self.size:
            order = self.random.permutation(len(self.texts.start))
            self.queue = np.concatenate([self.queue, order])
        index, self.queue = self.queue[: self.size].astype(np.int32), self.queue[self.size :]
        key = jax.random.fold_in(self.key, count)
        return self.target_params, self.take(self.texts, index), key


def warm_up(run, step, target_params, params, sizes: Sizes) -> float:
    """Compiles both programs on empty texts; returns seconds of one later step."""
    batch = sizes.generate_batch
    rows = jnp.zeros((batch, sizes.prompt), jnp.int32)
    numbers = jnp.zeros(batch, jnp.int32)
    texts = run(target_params, rows, numbers, np.zeros(batch, np.float32), jax.random.key(0))
    texts = texts._replace(end=jnp.full(batch, sizes.prompt + sizes.count, jnp.int32))
    print("generation compiled", flush=True)
    batches = Batches(texts, target_params, sizes.batch, 0)
    params = {name: value + 0.0 for name, value in params.items()}
    state = muon.init(params)
    for count in range(3):
        begin = time.monotonic()
        params, state, loss = step(params, state, np.float32(0.0), *batches(count, 0.0))
        loss.block_until_ready()
    seconds = time.monotonic() - begin
    print(f"step: {seconds:.4f} s", flush=True)
    return seconds


def load_models(target_folder: Path, seed: int, smoke: bool):
    """(target config, its parameters, its rebuild, drafter config, parameters, rebuild)."""
    target_config, arrays = hf_export.load_target(target_folder)
    target_params = {k: jnp.asarray(v.astype(ml_dtypes.bfloat16)) for k, v in arrays.items()}
    rebuild_target, _ = training.split(
        lambda rngs: TrainedQwen3(target_config, dtype=jnp.bfloat16, rngs=rngs), 0
    )
    config = config_of(target_config, smoke)
    rebuild, params = training.split(
        lambda rngs: DFlash(config, dtype=jnp.float32, rngs=rngs), seed
    )
    params = training.zero_outputs(params)
    return target_config, target_params, rebuild_target, config, params, rebuild


def texts_report(texts: Texts, sizes: Sizes) -> dict[str, int]:
    own = int(np.sum(np.asarray(texts.end) - sizes.prompt))
    print(f"own texts: {len(texts.start)}, {own} tokens", flush=True)
    return {"sequences": len(texts.start), "own_tokens": own}


def finish(log: dict, out: Path, begin: float, measure: Callable[[], dict[str, float]]) -> None:
    """Evaluates saved weights; what fails is in the log."""
    log["trained_seconds"] = time.monotonic() - begin
    print(f"saved {out} at {log['trained_seconds']:.0f} s", flush=True)
    try:
        log["humaneval_tokens_a_round"] = measure()
    except Exception as error:  # a missing figure must not cost the run
        log["error"] = repr(error)
    log["seconds"] = time.monotonic() - begin
    hf_export.write_json(out / "train_log.json", log)
    print("eval:", log.get("error", log.get("humaneval_tokens_a_round")), flush=True)
    print(f"done in {log['seconds']:.0f} s", flush=True)


def main(
    target: Annotated[Path, typer.Argument(help="folder that train_target.py wrote")],
    out: Annotated[Path, typer.Argument(help="Hugging Face folder to write")],
    work: Annotated[Path, typer.Option(help="cache of the corpus")] = Path(".cache/corpus"),
    humaneval: Annotated[Path | None, typer.Option(help="HumanEval.jsonl.gz")] = None,
    minutes: float = 4.0,
    generate_minutes: float = 1.3,
    deadline: Annotated[float, typer.Option(help="minutes from start to end of training")] = 7.0,
    limit_mb: float = 400.0,
    corpus_seconds: float = 60.0,
    muon_rate: float = 0.02,
    adam_rate: float = 0.003,
    gamma: Annotated[float, typer.Option(help="depth at which a label's weight is 1/e")] = 5.0,
    seed: int = 1,
    smoke: Annotated[bool, typer.Option(help="tiny and short, to see that all works")] = False,
) -> None:
    """Trains a drafter for TARGET and writes it to OUT, with train_log.json."""
    begin = time.monotonic()
    sizes = SMOKE if smoke else FULL
    if smoke:
        minutes, generate_minutes = 0.08, 0.02
    corpus = start_corpus(
        work, target / "tokenizer.json", humaneval, smoke, limit_mb, corpus_seconds
    )
    target_config, target_params, rebuild_target, config, params, rebuild = load_models(
        target, seed, smoke
    )
    log = {"versions": versions(), "sizes": sizes._asdict()}
    run = make_generate(rebuild_target, sizes.count)
    step = make_step(rebuild, rebuild_target, config, sizes, (muon_rate, adam_rate), 0.03, gamma)
    log["step_seconds"] = warm_up(run, step, target_params, params, sizes)
    if corpus.wait() != 0:
        raise SystemExit("corpus.py failed")
    log["ready_seconds"] = time.monotonic() - begin
    texts = own_texts(run, target_params, work, sizes, generate_minutes, seed)
    log |= texts_report(texts, sizes) | {"generated_seconds": time.monotonic() - begin}
    minutes = max(0.1, min(minutes, deadline - (time.monotonic() - begin) / 60))

    def save(params: muon.Params) -> None:
        arrays = {k: np.asarray(v) for k, v in params.items()}
        hf_export.save_draft(arrays, config, target_config.max_positions, out)
        hf_export.write_json(out / "train_log.json", log)

    batches = Batches(texts, target_params, sizes.batch, seed)
    rows = sizes.batch * sizes.anchors * config.depth_count
    params, log["curve"] = training.timed_loop(
        step,
        params,
        muon.init(params),
        batches,
        save,
        minutes=minutes,
        tokens_per_step=rows,
        decay=0.5,
        every=5 if smoke else 50,
    )
    save(params)
    models = (rebuild, params, rebuild_target, target_params)
    finish(log, out, begin, partial(evaluate, *models, work, humaneval, smoke))


if __name__ == "__main__":
    typer.run(main)
