"""The converted folder: whole or refused, values kept, little memory, nothing left by a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny

from convert import convert_draft, convert_target
from ddtree_jax import checkpoint
from ddtree_jax.config import DraftConfig, TargetConfig


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """One target of mixed dtypes and one drafter; tests copy before they damage."""
    root, rng = tmp_path_factory.mktemp("converted"), np.random.default_rng(0)
    small = {"num_hidden_layers": 2, "num_target_layers": ...}
    target = tiny.write_hf_target(root / "hf", rng, dtype="mixed", tied=False, **small)
    draft = tiny.write_hf_draft(root / "hf_draft", rng, layer_types=["full_attention"] * 3)
    convert_target(target, root / "target", progress=False)
    convert_draft(draft, root / "draft", progress=False)
    return root


def params(folder, dtype=jnp.float32):
    load = (
        checkpoint.load_target
        if isinstance(checkpoint.read_config(folder), TargetConfig)
        else checkpoint.load_draft
    )
    return dict(checkpoint.module_params(load(folder, dtype)))


def copy(converted, tmp_path, name="target"):
    return shutil.copytree(converted / name, tmp_path / name)


def test_configs_come_back_typed(converted):
    assert isinstance(checkpoint.read_config(converted / "target"), TargetConfig)
    draft = checkpoint.read_config(converted / "draft")
    assert isinstance(draft, DraftConfig)
    assert draft.tap_layers == (0, 2) and draft.num_layers == 3


def test_is_converted_only_for_converted(converted):
    assert checkpoint.is_converted(converted / "target")
    assert not checkpoint.is_converted(converted / "hf")
    assert not checkpoint.is_converted(converted / "nowhere")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_loaded_parameters_have_the_dtype_asked_for(converted, dtype):
    model = checkpoint.load_target(converted / "target", dtype)
    leaves = jax.tree.leaves(checkpoint.nnx.state(model))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(dtype)}
    assert {leaf.shape for leaf in leaves} == {
        shape for shape in checkpoint.param_shapes(model.config).values()
    }


def test_bfloat16_load_is_the_rounded_float32_load(converted):
    wide = params(converted / "target")
    for name, value in params(converted / "target", jnp.bfloat16).items():
        np.testing.assert_array_equal(value, wide[name].astype(ml_dtypes.bfloat16))


def test_written_module_comes_back_equal(converted, tmp_path):
    model = checkpoint.load_draft(converted / "draft", jnp.float32)
    folder = checkpoint.write(
        tmp_path / "again", model.config, checkpoint.module_params(model), source={"name": "test"}
    )
    before, after = params(converted / "draft"), params(folder)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


def test_wrong_kind_is_refused(converted):
    with pytest.raises(ValueError, match="holds a draft, expected a target"):
        checkpoint.load_target(converted / "draft", jnp.float32)


def test_every_missing_or_short_file_is_named(converted, tmp_path):
    folder = copy(converted, tmp_path)
    names = list(checkpoint.read_manifest(folder)["files"])
    assert any(name.startswith("params/layers.1/") for name in names)
    for name in names:
        path = folder / name
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(ValueError, match=f"{name} is missing.*convert the source again"):
            checkpoint.load_target(folder, jnp.float32)
        if content:
            path.write_bytes(content[:-1])
            with pytest.raises(ValueError, match=f"{name} has {len(content) - 1} bytes"):
                checkpoint.load_target(folder, jnp.float32)
        path.write_bytes(content)
    checkpoint.load_target(folder, jnp.float32)


def test_changed_byte_is_found_by_contents(converted, tmp_path):
    folder = copy(converted, tmp_path)
    name = max(checkpoint.read_manifest(folder)["files"].items(), key=lambda item: item[1]["bytes"])
    path = folder / name[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert checkpoint.damaged_files(folder, contents=False) == []
    assert checkpoint.damaged_files(folder, contents=True) == [
        f"{name[0]} was changed since the conversion"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest: manifest.update(version=99), "version 99.*convert the source again"),
        (lambda manifest: manifest.update(format="other"), "'other'"),
        (lambda manifest: manifest.update(kind="judge"), "`kind`.*'judge'"),
        (lambda manifest: manifest.pop("params"), r"lacks \['params'\]"),
        (lambda manifest: manifest["config"].pop("rope"), r"missing keys \['rope'\]"),
        (lambda manifest: manifest["config"].update(num_heads=-1), "`num_heads`"),
        (lambda manifest: manifest["config"].update(rope=3), "`config` is damaged"),
    ],
)
def test_damaged_manifest_is_refused(converted, tmp_path, change, message):
    folder = copy(converted, tmp_path)
    path = folder / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=message):
        checkpoint.load_target(folder, jnp.float32)


def test_unreadable_manifest_is_refused(converted, tmp_path):
    folder = copy(converted, tmp_path)
    (folder / checkpoint.MANIFEST).write_text('{"format": ')
    with pytest.raises(ValueError, match=r"ddtree\.json cannot be read.*convert the source again"):
        checkpoint.read_config(folder)
    with pytest.raises(ValueError, match="is no converted checkpoint"):
        checkpoint.read_config(tmp_path)


def test_config_of_another_size_is_refused(converted, tmp_path):
    folder = copy(converted, tmp_path)
    path = folder / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["config"]["intermediate_size"] += 2
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down is stored as \[160, 64\]"):
        checkpoint.load_target(folder, jnp.float32)


def test_group_that_orbax_cannot_read_is_named(converted, tmp_path):
    folder = copy(converted, tmp_path)
    path = folder / "params" / "layers.1" / "state" / "_METADATA"
    path.write_bytes(b" " * path.stat().st_size)
    with pytest.raises(ValueError, match=r"params/layers\.1 cannot be read; delete the folder"):
        checkpoint.load_target(folder, jnp.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pairs: pairs[:-1], "never came"),
        (lambda pairs: [*pairs, pairs[0]], "came twice"),
        (lambda pairs: [*pairs, ("layers.9.stray", pairs[0][1])], "stray"),
        (lambda pairs: [(pairs[0][0], pairs[0][1].T), *pairs[1:]], "has shape"),
    ],
)
def test_write_refuses_other_parameters_and_leaves_nothing(converted, tmp_path, change, message):
    model = checkpoint.load_draft(converted / "draft", jnp.float32)
    pairs = sorted(checkpoint.module_params(model))
    pairs.sort(key=lambda pair: pair[0] != "fuse")
    with pytest.raises(ValueError, match=message):
        checkpoint.write(tmp_path / "out", model.config, change(pairs), source={})
    assert list(tmp_path.iterdir()) == []


def test_taken_destination_is_refused(converted, tmp_path):
    folder = copy(converted, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="--force"):
        convert_target(converted / "hf", folder, progress=False)
    for replace in (False, True):
        with pytest.raises(ValueError, match="never overwritten"):
            convert_target(converted / "hf", other, progress=False, replace=replace)
    convert_target(converted / "hf", folder, progress=False, replace=True)
    with pytest.raises(ValueError, match="is converted already"):
        convert_target(folder, tmp_path / "twice", progress=False)
    (tmp_path / "empty").mkdir()
    convert_target(converted / "hf", tmp_path / "empty", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "other", "target"]


def test_folder_that_another_process_finished_stays(converted, tmp_path):
    model = checkpoint.load_draft(converted / "draft", jnp.float32)

    def racing():
        yield from checkpoint.module_params(model)
        shutil.copytree(converted / "draft", tmp_path / "out")

    checkpoint.write(tmp_path / "out", model.config, racing(), source={"name": "late"})
    assert checkpoint.read_manifest(tmp_path / "out")["source"]["name"] == "hf_draft"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def run_python(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )


STOPS_HALFWAY = """
import sys, time
import convert
from convert import rules
whole = rules.apply
def halfway(*arguments):
    for count, pair in enumerate(whole(*arguments)):
        if count == 12:
            print("halfway", flush=True)
            time.sleep(600)
        yield pair
rules.apply = halfway
convert.convert_target(sys.argv[1], sys.argv[2], progress=False)
"""


def test_killed_conversion_leaves_nothing_that_loads(converted, tmp_path):
    destination = tmp_path / "out"
    with run_python(STOPS_HALFWAY, converted / "hf", destination) as process:
        assert process.stdout.readline() == "halfway\n"
        partial = tmp_path / f"out.partial-{process.pid}"
        assert (partial / "params" / "layers.0").is_dir()
        living = tmp_path / f"out.partial-{os.getppid()}"
        living.mkdir()
        process.send_signal(signal.SIGKILL)
    assert not destination.exists()
    with pytest.raises(ValueError, match="no converted checkpoint"):
        checkpoint.load_target(partial, jnp.float32)

    convert_target(converted / "hf", destination, progress=False)
    checkpoint.load_target(destination, jnp.float32)
    assert not partial.exists(), "what a dead process left is removed"
    assert living.exists(), "what a living process writes is not"


# Not getrusage: its maximum is inherited from the process that started this one.
REPORTS_MEMORY = """
import sys
import convert
convert.convert_target(sys.argv[1], sys.argv[2], progress=False)
with open("/proc/self/status") as status:
    peak = next(line for line in status if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024)
"""


def conversion_memory(root: Path, layers: int) -> tuple[int, int]:
    """(MB of weights, peak MB) of a conversion in a process of its own."""
    config = tiny.target_config(
        hidden_size=1024, intermediate_size=1536, num_hidden_layers=layers, vocab_size=2048
    )
    rng = np.random.default_rng(1)
    first = tiny.target_tensors(rng, config | {"num_hidden_layers": 1})
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in first.items()}
    for layer in range(1, layers):
        tensors |= {
            name.replace("layers.0.", f"layers.{layer}."): value
            for name, value in tensors.items()
            if "layers.0." in name
        }
    tiny.write_hf_folder(root / "hf", config, tensors, shards=4, dtype="bfloat16")
    size = sum(value.nbytes for value in tensors.values()) >> 20
    with run_python(REPORTS_MEMORY, root / "hf", root / "out") as process:
        peak = int(process.stdout.read())
    shutil.rmtree(root)
    return size, peak


def test_memory_of_a_conversion_does_not_grow_with_the_model(tmp_path):
    small, small_peak = conversion_memory(tmp_path / "small", 2)
    large, large_peak = conversion_memory(tmp_path / "large", 25)
    print(f"{small} MB of weights: peak {small_peak} MB; {large} MB: peak {large_peak} MB")
    assert large - small > 200
    assert large_peak - small_peak < 80
