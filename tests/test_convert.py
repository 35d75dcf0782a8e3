"""From Hugging Face folders: tensors, refusals that name the cause, the cache, the command."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from convert import convert_draft, convert_target, ensure_converted, make_plan, rules
from convert.cli import main
from convert.hf import INDEX, open_folder
from ddtree_jax import checkpoint

SMALL = {"num_hidden_layers": 2}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """One small target in two shards, with an index; tests copy before they damage."""
    folder = tmp_path_factory.mktemp("source") / "hf"
    return tiny.write_hf_target(folder, np.random.default_rng(1), shards=2, **SMALL)


@pytest.fixture
def damaged(source, tmp_path):
    return shutil.copytree(source, tmp_path / "damaged")


def mapped(folder):
    """Parameters that the rules give, without writing a checkpoint."""
    plan = make_plan(open_folder(folder))
    rules.report(plan.problems, plan.folder)
    return dict(rules.apply(plan.rules, plan.folder, lambda count: None))


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


# Tensors.


def test_shards_and_generations_give_equal_parameters(tmp_path):
    folders = [
        tiny.write_hf_target(
            tmp_path / str(shards), np.random.default_rng(1), shards=shards, generation=generation
        )
        for shards, generation in ((1, 4), (3, 5))
    ]
    assert_equal(*(mapped(folder) for folder in folders))


def test_tied_target_ignores_a_second_head_and_rotary_buffers(tmp_path, rng):
    config = tiny.target_config(**SMALL)
    tensors = tiny.target_tensors(rng, config)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32),
    }
    with_extra = tiny.write_hf_folder(tmp_path / "with", config, tensors | extra)
    without = tiny.write_hf_folder(tmp_path / "without", config, tensors)
    assert_equal(mapped(with_extra), mapped(without))


def test_kernels_are_transposed_and_fused_in_order(source):
    params = mapped(source)
    tensors = load_file(source / "model-00001-of-00002.safetensors")
    tensors |= load_file(source / "model-00002-of-00002.safetensors")
    for index in range(2):
        prefix = f"model.layers.{index}."
        parts = [tensors[f"{prefix}self_attn.{part}_proj.weight"].T for part in "qkv"]
        expected = np.concatenate(parts, axis=1)
        np.testing.assert_array_equal(params[f"layers.{index}.attention.qkv"], expected)
        parts = [tensors[f"{prefix}mlp.{part}_proj.weight"].T for part in ("gate", "up")]
        expected = np.concatenate(parts, axis=1)
        np.testing.assert_array_equal(params[f"layers.{index}.mlp.gate_up"], expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_of_the_file_is_kept(tmp_path, rng, dtype):
    folder = tiny.write_hf_draft(tmp_path / "hf", rng, dtype=dtype)
    assert {str(value.dtype) for value in mapped(folder).values()} == {dtype}


def test_fused_kernel_of_mixed_dtypes_takes_the_wider(tmp_path, rng):
    folder = tiny.write_hf_target(tmp_path / "hf", rng, dtype="mixed", **SMALL)
    params = mapped(folder)
    assert params["layers.0.attention.qkv"].dtype == np.float32
    assert params["embedding"].dtype == ml_dtypes.bfloat16
    assert params["norm.scale"].dtype == np.float32


# Bad folders: each names what is wrong.


def edit_shard(folder, change):
    path = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)


def edit_index(folder, key, shard):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][key] = shard
    (folder / INDEX).write_text(json.dumps(index))


EMBED = "model.embed_tokens.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def put(name, value):
    return lambda folder: edit_shard(folder, lambda tensors: tensors.update({name: value}))


def with_value(value):
    def change(tensors):
        tensors[EMBED][3, 5] = value

    return lambda folder: edit_shard(folder, change)


def without_index(folder):
    (folder / INDEX).unlink()
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "extra.safetensors")


def pickles_only(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (put(EMBED, np.zeros((199, 64), np.float32)), rf"{EMBED} has shape \[199, 64\], expected"),
        (put(EMBED, np.zeros((200, 64), np.int32)), f"{EMBED} has dtype I32"),
        (put(EMBED, np.zeros((200, 64), np.float64)), f"{EMBED} has dtype F64"),
        (lambda f: edit_shard(f, lambda t: t.pop(EMBED)), f"{EMBED} is in the index but not in"),
        (lambda f: edit_shard(f, lambda t: t.pop(EMBED)), rf"{EMBED} \[200, 64\] is missing"),
        (put("model.stray.weight", np.ones(3, np.float32)), "model.stray.weight is not expected"),
        (put("model.stray.weight", np.ones(3, np.float32)), "stray.weight is not in the index"),
        (put("model.norm.weight", np.ones(64, np.float32)), "model.norm.weight is in two shards"),
        (with_value(np.nan), f"{EMBED} .*NaN or infinity"),
        (with_value(-np.inf), f"{EMBED} .*NaN or infinity"),
        (lambda f: edit_index(f, EMBED, "../../etc/x.safetensors"), f"{EMBED}.*folder itself"),
        (lambda f: edit_index(f, EMBED, "/etc/x.safetensors"), f"{EMBED}.*folder itself"),
        (lambda f: edit_index(f, EMBED, "model.bin"), f"{EMBED}.*folder itself"),
        (lambda f: edit_index(f, EMBED, 3), f"{EMBED}.*folder itself"),
        (lambda f: edit_index(f, EMBED, "gone.safetensors"), "shard gone.safetensors is missing"),
        (lambda f: edit_index(f, "model.ghost", "gone.safetensors"), "gone.safetensors is missing"),
        (lambda f: (f / INDEX).write_text("{}"), "has no `weight_map`"),
        (lambda f: (f / INDEX).write_text("{"), "is not readable JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (without_index, f"{EMBED} is in two shards"),
        (pickles_only, "pickled weights .pytorch_model.bin.*safetensors"),
    ],
)
def test_bad_folder_is_refused_by_name(damaged, damage, message):
    damage(damaged)
    with pytest.raises(ValueError, match=message):
        convert_target(damaged, damaged.parent / "out", progress=False)
    assert [path.name for path in damaged.parent.iterdir()] == ["damaged"]


def test_all_problems_are_in_one_report(damaged):
    edit_shard(damaged, lambda t: t.update({EMBED: t[EMBED].T, "stray": t[EMBED]}) or t.pop(GATE))
    with pytest.raises(ValueError) as caught:
        convert_target(damaged, damaged.parent / "out", progress=False)
    for name in (EMBED, "stray", GATE):
        assert f"tensor {name} " in str(caught.value)


def test_untied_target_needs_its_head(tmp_path, rng):
    config = tiny.target_config(tied=False, **SMALL)
    tensors = tiny.target_tensors(rng, config)
    del tensors["lm_head.weight"]
    folder = tiny.write_hf_folder(tmp_path / "hf", config, tensors)
    with pytest.raises(ValueError, match=r"lm_head.weight \[200, 64\] is missing"):
        mapped(folder)


def test_draft_with_a_head_of_its_own_is_refused(tmp_path, rng):
    config = tiny.draft_config()
    tensors = tiny.draft_tensors(rng, config) | {"lm_head.weight": np.ones((200, 64), np.float32)}
    with pytest.raises(ValueError, match="lm_head.weight is not expected"):
        mapped(tiny.write_hf_folder(tmp_path / "hf", config, tensors))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_truncated_file_is_named(source, tmp_path_factory, data):
    content = (source / "model-00002-of-00002.safetensors").read_bytes()
    length = data.draw(st.integers(0, len(content) - 1))
    folder = shutil.copytree(source, tmp_path_factory.mktemp("cut") / "hf")
    (folder / "model-00002-of-00002.safetensors").write_bytes(content[:length])
    with pytest.raises(ValueError, match="model-00002-of-00002.safetensors is truncated"):
        open_folder(folder)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_header_bit_is_refused_or_harmless(source, tmp_path_factory, data):
    """Whatever a damaged header says, the answer is a ValueError or parameters."""
    name = "model-00001-of-00002.safetensors"
    content = bytearray((source / name).read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    content[data.draw(st.integers(0, end - 1))] ^= 1 << data.draw(st.integers(0, 7))
    folder = shutil.copytree(source, tmp_path_factory.mktemp("flip") / "hf")
    (folder / name).write_bytes(content)
    try:
        mapped(folder)
    except ValueError as error:
        assert str(folder) in str(error)


# Cache and hub.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_source_is_converted_once(cache, source):
    first = ensure_converted(str(source), "target", progress=False)
    stamp = (first / checkpoint.MANIFEST).stat().st_mtime_ns
    assert first.parent == cache and first.name.startswith("hf-")
    assert ensure_converted(str(source), "target", progress=False) == first
    assert (first / checkpoint.MANIFEST).stat().st_mtime_ns == stamp
    assert ensure_converted(str(first), "target", progress=False) == first
    for path in (source, first):
        with pytest.raises(ValueError, match="expected a draft"):
            ensure_converted(str(path), "draft", progress=False)


def test_digest_follows_every_byte_and_no_place(damaged, source):
    before = open_folder(source).digest()
    assert open_folder(damaged).digest() == before
    seen = {before}
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        content = bytearray((damaged / name).read_bytes())
        content[-1] ^= 1
        (damaged / name).write_bytes(content)
        seen.add(open_folder(damaged).digest())
    (damaged / "config.json").write_text(json.dumps(tiny.target_config(eos_token_id=8, **SMALL)))
    seen.add(open_folder(damaged).digest())
    (damaged / "tokenizer.json").write_text("{}")
    seen.add(open_folder(damaged).digest())
    assert len(seen) == 5


def test_tokenizer_files_come_along(cache, damaged):
    names = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "merges.txt"]
    for name in [*names, "modeling_evil.py", "training_args.bin"]:
        (damaged / name).write_text("{}")
    folder = ensure_converted(str(damaged), "target", progress=False)
    found = {path.name for path in folder.iterdir()}
    assert found == {checkpoint.MANIFEST, "params", *names}


def test_source_that_cannot_be_found_says_what_to_do(cache, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="Download it where there is a network, and pass the"):
        ensure_converted("nobody/nothing-at-all", "target", progress=False)
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        ensure_converted("/nowhere/at/all", "target", progress=False)
    assert not cache.exists()


def test_hub_id_is_downloaded_without_code_and_named(cache, source, monkeypatch):
    asked = {}

    def download(repository, *, allow_patterns):
        asked.update(repository=repository, patterns=allow_patterns)
        return str(source)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = ensure_converted("somebody/model", "target", progress=False)
    assert folder.name.startswith("somebody--model-")
    assert asked["repository"] == "somebody/model"
    assert set(asked["patterns"]) == {"*.json", "*.safetensors", "*.txt", "*.jinja"}


# Command line.


def call(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_command_converts_both_kinds(source, tmp_path, rng):
    result = call("target", source, tmp_path / "target")
    assert result.exit_code == 0 and str(tmp_path / "target") in result.stdout
    model = checkpoint.load_target(tmp_path / "target", jnp.bfloat16)
    assert model.embedding[...].shape == (200, 64)
    draft = tiny.write_hf_draft(tmp_path / "hf", rng, dtype="bfloat16")
    assert call("draft", draft, tmp_path / "draft").exit_code == 0
    assert checkpoint.load_draft(tmp_path / "draft", jnp.float32).config.block_size == 8


def test_command_replaces_only_conversions_and_only_by_force(source, tmp_path):
    assert call("target", source, tmp_path / "out").exit_code == 0
    again = call("target", source, tmp_path / "out")
    assert again.exit_code == 1 and "--force" in again.stderr
    assert call("target", source, tmp_path / "out", "--force").exit_code == 0
    refused = call("target", source, source, "--force")
    assert refused.exit_code == 1 and "never overwritten" in refused.stderr
    assert (source / "config.json").exists()


def test_command_errors_are_one_message(tmp_path):
    result = call("draft", tmp_path, tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr == f"error: {tmp_path} has no config.json\n"
    assert result.stdout == ""


def test_inspect_shows_sources_and_conversions(source, tmp_path):
    convert_target(source, tmp_path / "out", progress=False)
    for folder, dtype in ((source, "F32"), (tmp_path / "out", "float32")):
        result = call("inspect", folder)
        assert result.exit_code == 0, result.stderr
        count = sum(value.size for value in mapped(source).values())
        for text in ("hidden_size", "64", dtype, f"{count:,}", f"{4 * count:,}"):
            assert text in result.stdout


def test_inspect_lists_problems(damaged, tmp_path):
    edit_shard(damaged, lambda tensors: tensors.pop(EMBED))
    result = call("inspect", damaged)
    assert result.exit_code == 1 and f"problem: tensor {EMBED}" in result.stderr
    result = call("inspect", tmp_path / "nowhere")
    assert result.exit_code == 1 and "is no folder" in result.stderr


def test_inspect_finds_changed_bytes(tmp_path, rng):
    draft = tiny.write_hf_draft(tmp_path / "hf", rng)
    folder = convert_draft(draft, tmp_path / "out", progress=False)
    (folder / "params" / "fuse" / "_CHECKPOINT_METADATA").write_text("{}")
    result = call("inspect", folder)
    assert result.exit_code == 1 and "params/fuse/_CHECKPOINT_METADATA" in result.stderr


def test_progress_is_silent_on_request(source, tmp_path, capsys):
    convert_target(source, Path(tmp_path / "out"), progress=False)
    assert capsys.readouterr() == ("", "")
