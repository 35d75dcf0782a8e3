"""The models against transformers, through files and the real converter, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file

from convert import convert_draft, convert_target
from convert.qwen3 import parse_rope
from ddtree_jax import checkpoint
from ddtree_jax.models.dflash import block_visible
from ddtree_jax.models.layers import rope_frequencies

TOLERANCE = 1e-4
YARN_FULL = tiny.YARN | {"beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 1.3}


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def attention(query, key, value, visible):
    """Softmax attention; visible [query rows, key rows]."""
    groups = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, groups, axis=2), jnp.repeat(value, groups, axis=2)
    scores = jnp.einsum("brnh,bsnh->bnrs", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(visible[None, None], scores, -1e30)
    return jnp.einsum("bnrs,bsnh->brnh", jax.nn.softmax(scores, axis=-1), value)


@pytest.mark.parametrize(
    "settings",
    [
        {"tied": True},
        {"tied": False, "shards": 2},
        {"tied": True, "rope": tiny.YARN},
        {"tied": False, "rope": YARN_FULL, "generation": 4},
    ],
    ids=["tied", "untied", "yarn", "yarn-v4"],
)
def test_target_equals_transformers(tmp_path, transformers, torch, settings):
    rng = np.random.default_rng(3)
    folder = tiny.write_hf_target(tmp_path / "hf", rng, **settings)
    oracle = transformers.Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = rng.integers(0, 200, (2, 100), dtype=np.int32)
    with torch.no_grad():
        result = oracle(torch.tensor(tokens, dtype=torch.long), output_hidden_states=True)

    model = checkpoint.load_target(
        convert_target(folder, tmp_path / "out", progress=False), jnp.float32
    )
    rows = tokens.shape[1]
    causal = np.tril(np.ones((rows, rows), bool))
    out = model(
        jnp.asarray(tokens),
        jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[None], tokens.shape),
        lambda layer, query, key, value: attention(query, key, value, causal),
        tap_layers=(0, 1, 2),
    )
    features = np.split(np.asarray(out.features), 3, axis=-1)
    for index, mine in enumerate([*features, np.asarray(out.hidden)]):
        hidden = result.hidden_states[index + 1].numpy()
        np.testing.assert_allclose(mine, hidden, atol=TOLERANCE, rtol=0)
    logits = np.asarray(model.logits(out.hidden))
    np.testing.assert_allclose(logits, result.logits.numpy(), atol=TOLERANCE, rtol=0)


def draft_oracle(transformers, torch, folder, config):
    """transformers' model of the same backbone, with the drafter's tensors."""
    kinds = transformers.MuseGlimmerAssistantConfig(
        **tiny.DRAFT_SIZES,
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters=config["rope_parameters"],
        max_position_embeddings=config["max_position_embeddings"],
        layer_types=config["layer_types"],
        target_layer_ids=config["dflash_config"]["target_layer_ids"],
        attn_implementation="eager",
    )
    oracle = transformers.MuseGlimmerAssistantModel(kinds).eval()
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    tensors = load_file(folder / "model.safetensors")
    oracle.load_state_dict({names.get(k, k): torch.tensor(v) for k, v in tensors.items()})
    return oracle


def visible_rows(kind, window, causal, start, block):
    """[block, start + block] by positions, from the definition in the paper's reference code."""
    distance = np.arange(start, start + block)[:, None] - np.arange(start + block)[None]
    visible = distance >= 0 if causal else np.ones(distance.shape, bool)
    return visible & (np.abs(distance) < window) if kind == "sliding_attention" else visible


@pytest.mark.parametrize(
    ("kinds", "explicit", "rope"),
    [
        (["full_attention"] * 3, None, None),
        (["sliding_attention", "full_attention", "sliding_attention"], None, tiny.YARN),
        (["sliding_attention"] * 3, False, None),
        (["full_attention"] * 3, True, None),
    ],
    ids=["full", "causal-sliding-and-full-yarn", "sliding-not-causal", "full-causal"],
)
def test_draft_rounds_equal_oracle(tmp_path, transformers, torch, kinds, explicit, rope):
    rng, window, block = np.random.default_rng(5), 6, 8
    changes = {} if explicit is None else {"is_causal": explicit}
    changes |= {"layer_types": kinds, "sliding_window": window, "rope": rope}
    folder = tiny.write_hf_draft(tmp_path / "hf", rng, **changes)
    config = tiny.draft_config(**changes)
    oracle = draft_oracle(transformers, torch, folder, config)
    model = checkpoint.load_draft(
        convert_draft(folder, tmp_path / "out", progress=False), jnp.float32
    )

    features = np.zeros((1, 0, 128), np.float32)
    keys = values = None
    start = 0
    for committed in (19, 1, 4, 8):  # The prompt, then accepted rows of three rounds.
        new = rng.standard_normal((1, committed, 128)).astype(np.float32)
        features = np.concatenate([features, new], axis=1)
        positions = jnp.arange(start, start + committed, dtype=jnp.int32)[None]
        added_keys, added_values = model.context_rows(jnp.asarray(new), positions)
        keys = added_keys if keys is None else _joined(keys, added_keys)
        values = added_values if values is None else _joined(values, added_values)
        start += committed
        rows = rng.standard_normal((1, block, 64)).astype(np.float32)

        mine = model(
            jnp.asarray(rows),
            jnp.arange(start, start + block, dtype=jnp.int32)[None],
            _draft_attend(model.config, keys, values, start),
        )
        masks = {}
        for kind in ("full_attention", "sliding_attention"):
            causal = kind == "sliding_attention" if explicit is None else explicit
            visible = visible_rows(kind, window, causal, start, block)
            masks[kind] = torch.tensor(np.where(visible, 0.0, -1e30), dtype=torch.float32)[
                None, None
            ]
        with torch.no_grad():
            theirs = oracle(
                noise_embeds=torch.tensor(rows),
                context_hidden_states=torch.tensor(features),
                attention_mask=masks,
                use_cache=False,
            ).last_hidden_state
        np.testing.assert_allclose(np.asarray(mine), theirs.numpy(), atol=TOLERANCE, rtol=0)


def _joined(old, new):
    return tuple(jnp.concatenate(pair, axis=1) for pair in zip(old, new, strict=True))


def _draft_attend(config, keys, values, start):
    def attend(layer, query, key, value):
        kind = config.attention[layer]
        block = key.shape[1]
        distance = np.arange(start, start + block)[:, None] - np.arange(start)[None]
        seen = np.ones(distance.shape, bool) if kind.window is None else distance < kind.window
        visible = np.concatenate([seen, block_visible(kind, block)], axis=1)
        key = jnp.concatenate([keys[layer], key], axis=1)
        value = jnp.concatenate([values[layer], value], axis=1)
        return attention(query, key, value, visible)

    return attend


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 64.0, "original_max_position_embeddings": 4096},
        {"factor": 4.0},
        {"factor": 0.5, "original_max_position_embeddings": 1024},
        {"factor": 8.0, "beta_fast": 16.0, "beta_slow": 3.0, "attention_factor": 1.25},
    ],
)
def test_yarn_equals_transformers(transformers, torch, theta, head_dim, scaling):
    del torch  # Only needs to be there.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "rope_theta": theta, **scaling}
    config = transformers.Qwen3Config(
        head_dim=head_dim, max_position_embeddings=32768, rope_parameters=dict(rope)
    )
    frequencies, gain = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    mine = parse_rope({"rope_parameters": rope, "max_position_embeddings": 32768})
    np.testing.assert_allclose(
        np.asarray(rope_frequencies(mine, head_dim)), frequencies.numpy(), rtol=2e-6
    )
    assert mine.attention_factor == pytest.approx(gain, rel=1e-12)
