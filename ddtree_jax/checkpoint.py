"""The converted checkpoint: written by `convert`, loaded by the engine.

A folder holds `ddtree.json` (what it is, its settings, its parameters and files), `params/`
with one Orbax checkpoint a group (a decoder layer or a top-level parameter), and the source's
tokenizer files. Groups keep the memory of a conversion at one layer, whatever the model's size.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from orbax.checkpoint import v1 as ocp

from ddtree_jax.config import DraftConfig, TargetConfig, require
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.mtp import MTP
from ddtree_jax.models.qwen3 import Qwen3
from ddtree_jax.models.targets import target_type

FORMAT = "ddtree_jax"
VERSION = 1
MANIFEST = "ddtree.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
_KINDS = {"target": TargetConfig, "draft": DraftConfig}
_AGAIN = "delete the folder and convert the source again"
# Files of a group are read in parallel at this grain: 3x faster than one chunk an array.
_CHUNK_BYTES = 1 << 26
_READERS = 4  # groups read at once; each holds its bytes on the host


def is_converted(path: str | Path) -> bool:
    """True when `path` is a folder that a conversion finished."""
    return (Path(path) / MANIFEST).is_file()


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """`ddtree.json` of a converted folder, its format and version checked.

    Raises:
      ValueError: it is missing, damaged or of another version.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} is no converted checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {_AGAIN}") from error
    keys = {"format", "version", "kind", "config", "source", "params", "files"}
    missing = sorted(keys - set(manifest)) if isinstance(manifest, dict) else sorted(keys)
    require(not missing, f"{path} lacks {missing}; {_AGAIN}")
    require(
        (manifest["format"], manifest["version"]) == (FORMAT, VERSION),
        f"{path} is {manifest['format']!r} version {manifest['version']!r}, expected {FORMAT!r} "
        f"version {VERSION}; {_AGAIN}",
    )
    require(
        manifest["kind"] in _KINDS,
        f"{path}: `kind` must be one of {sorted(_KINDS)}, got {manifest['kind']!r}; {_AGAIN}",
    )
    return manifest


def read_config(folder: str | Path) -> TargetConfig | DraftConfig:
    """Settings of a converted folder; their type says whether it is a target or a drafter."""
    manifest = read_manifest(folder)
    config_type = _KINDS[manifest["kind"]]
    try:
        return config_type.from_json(manifest["config"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder}/{MANIFEST}: `config` is damaged ({error}); {_AGAIN}") from error


def load_target(folder: str | Path, dtype: DTypeLike) -> Qwen3:
    """The target with its parameters in `dtype` on the default device.

    Raises:
      ValueError: not a converted target, or a part is missing or damaged.
    """
    config = _read_kind(Path(folder), "target")
    return _load(Path(folder), config, target_type(config), dtype)


def load_draft(folder: str | Path, dtype: DTypeLike) -> DFlash:
    """The drafter with its parameters in `dtype` on the default device.

    Raises:
      ValueError: not a converted drafter, or a part is missing or damaged.
    """
    return _load(Path(folder), _read_kind(Path(folder), "draft"), DFlash, dtype)


def load_mtp(folder: str | Path, dtype: DTypeLike) -> MTP:
    """The MTP block that came with a target, its parameters in `dtype` on the default device.

    Raises:
      ValueError: not a converted target, it has no MTP block, or a part is missing or damaged.
    """
    config = _read_kind(Path(folder), "target")
    require(
        config.mtp,
        f"{folder} has no MTP block: its source has no `mtp.*` tensors (transformers leaves them "
        "out when it saves a model)",
    )
    return _load(Path(folder), config, MTP, dtype)


@functools.lru_cache(maxsize=4)
def param_shapes(config: TargetConfig | DraftConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by dotted name ("layers.0.attention.qkv"); allocates nothing."""
    if isinstance(config, DraftConfig):
        modules = [DFlash]
    else:
        modules = [target_type(config), *([MTP] if config.mtp else [])]
    shapes = {}
    for module in modules:
        pure = nnx.to_pure_dict(_abstract(module, config, np.float32)[1])
        shapes |= {name: tuple(leaf.shape) for name, leaf in _named(pure, _prefix(module))}
    return shapes


def module_params(module: Qwen3 | DFlash) -> Iterator[tuple[str, np.ndarray]]:
    """Dotted names and values of a module's parameters, as `write` takes them."""
    for name, leaf in _named(nnx.to_pure_dict(nnx.state(module, nnx.Param))):
        yield name, np.asarray(leaf)


def write(
    folder: str | Path,
    config: TargetConfig | DraftConfig,
    params: Iterable[tuple[str, np.ndarray]],
    *,
    source: Mapping[str, Any],
    files: Iterable[Path] = (),
    replace: bool = False,
) -> Path:
    """Writes a converted folder: beside `folder` first, then renamed, so it is whole or absent.

    params: dotted name and value, each once; dtypes are kept. A group leaves memory when its
      last member has come, so give them layer by layer.
    source: where they came from, for `ddtree.json`. files: copied beside it.
    replace: an existing converted folder may be replaced; anything else there is refused.

    Raises:
      ValueError: `folder` is taken, or the parameters are not those of `config`.
    """
    folder = Path(folder).absolute()
    check_destination(folder, replace=replace)
    with _staging(folder, replace) as partial:
        described = _write_groups(partial / "params", param_shapes(config), params)
        for file in files:
            shutil.copyfile(file, partial / Path(file).name)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "kind": "target" if isinstance(config, TargetConfig) else "draft",
            "config": config.to_json(),
            "source": dict(source),
            "params": described,
            "files": _fingerprints(partial),
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return folder


def check_destination(folder: str | Path, *, replace: bool) -> None:
    """Raises ValueError unless `folder` is absent, empty, or converted and to be replaced."""
    folder = Path(folder)
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    require(
        is_converted(folder),
        f"{folder} exists and is no converted checkpoint; it is never overwritten: choose another "
        "destination",
    )
    require(
        replace, f"{folder} holds a converted checkpoint; pass --force (`replace`) to replace it"
    )


def damaged_files(folder: str | Path, *, contents: bool) -> list[str]:
    """What is wrong with the files of a converted folder; with `contents`, hashes are compared."""
    folder, problems = Path(folder), []
    for name, entry in read_manifest(folder)["files"].items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != entry["bytes"]:
            problems.append(f"{name} has {path.stat().st_size} bytes, expected {entry['bytes']}")
        elif contents and _hash(path) != entry["blake2b"]:
            problems.append(f"{name} was changed since the conversion")
    return problems


def _read_kind(folder: Path, kind: str) -> TargetConfig | DraftConfig:
    found = read_manifest(folder)["kind"]
    require(found == kind, f"{folder} holds a {found}, expected a {kind}; pass it as `{found}`")
    return read_config(folder)


def _prefix(module: type[nnx.Module]) -> str:
    """Of the module's parameters in a folder: an MTP block lies beside its target."""
    return "mtp." if module is MTP else ""


def _load(
    folder: Path, config: TargetConfig | DraftConfig, module: type[nnx.Module], dtype: DTypeLike
) -> Any:
    described, prefix = read_manifest(folder)["params"], _prefix(module)
    problems = damaged_files(folder, contents=False) + _wrong_shapes(config, described)
    require(not problems, f"{folder} is damaged: {'; '.join(problems)}; {_AGAIN}")
    graph, state = _abstract(module, config, dtype)
    pure = nnx.to_pure_dict(state)
    sharding = jnp.zeros(()).sharding  # The default device, however it was chosen.
    groups: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
    for name, leaf in _named(pure, prefix):
        abstract = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        groups.setdefault(_group(name), {})[name] = abstract
    arrays = {}
    with ThreadPoolExecutor(_READERS) as pool:
        load = functools.partial(_load_group, folder)
        for loaded in pool.map(load, groups.keys(), groups.values()):
            arrays |= loaded
    named = [name for name, _ in _named(pure, prefix)]
    leaves = [arrays[name] for name in named]
    nnx.replace_by_pure_dict(state, jax.tree.unflatten(jax.tree.structure(pure), leaves))
    return nnx.merge(graph, state)


def _load_group(
    folder: Path, group: str, abstract: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    path = (folder / "params" / group).absolute()
    try:
        # Without the abstract tree, dtypes are the file's and list indices become strings.
        return ocp.load(path, abstract)
    except Exception as error:  # Orbax raises bare Exception for damaged chunks.
        raise ValueError(f"{path} cannot be read; {_AGAIN}: {error}") from error


def _wrong_shapes(config: TargetConfig | DraftConfig, described: dict[str, Any]) -> list[str]:
    """Parameters that `ddtree.json` describes otherwise than its own settings ask for."""
    expected = {name: list(shape) for name, shape in param_shapes(config).items()}
    stored = {name: entry["shape"] for name, entry in described.items()}
    return [
        f"parameter {name} is stored as {stored.get(name)}, the settings say {expected.get(name)}"
        for name in sorted(expected.keys() | stored.keys())
        if expected.get(name) != stored.get(name)
    ]


def _abstract(
    module: type[nnx.Module], config: TargetConfig | DraftConfig, dtype: DTypeLike
) -> tuple[Any, Any]:
    """Graph and parameter state, all ShapeDtypeStruct: initial values are never computed."""
    return nnx.split(nnx.eval_shape(lambda: module(config, dtype=dtype, rngs=nnx.Rngs(0))))


def _named(pure: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    paths = jax.tree_util.tree_leaves_with_path(pure)
    return [(prefix + ".".join(str(part.key) for part in path), leaf) for path, leaf in paths]


def _group(name: str) -> str:
    """Orbax checkpoint that a parameter lives in: its decoder layer, or its first name."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def _write_groups(
    folder: Path, shapes: dict[str, tuple[int, ...]], params: Iterable[tuple[str, np.ndarray]]
) -> dict[str, Any]:
    waiting: dict[str, set[str]] = {}
    for name in shapes:
        waiting.setdefault(_group(name), set()).add(name)
    folder.mkdir()
    described, held = {}, {}
    for name, value in params:
        require(
            name in shapes and name not in described,
            f"parameter {name} came twice or is not of this model",
        )
        require(
            value.shape == shapes[name],
            f"parameter {name} has shape {value.shape}, expected {shapes[name]}",
        )
        described[name] = {"shape": list(value.shape), "dtype": str(value.dtype)}
        group = _group(name)
        held.setdefault(group, {})[name] = value
        waiting[group].remove(name)
        if not waiting[group]:
            _save_group(folder / group, held.pop(group))
    missing = sorted(set(shapes) - set(described))
    require(not missing, f"parameters never came: {missing}")
    return described


def _save_group(path: Path, tree: dict[str, np.ndarray]) -> None:
    context = ocp.Context()
    saving = context.array.saving
    saving.use_compression = False  # Saves 22 % of the bytes, costs 4x the time to save and load.
    # Chunks must divide the shape: an odd first dimension would give slivers (47 s for 300 MB).
    if all(value.shape[0] % 64 == 0 for value in tree.values()):
        saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    with context:
        ocp.save(path, tree)


@contextlib.contextmanager
def _staging(folder: Path, replace: bool) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place when the block ends well."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        if replace and is_converted(folder):
            old = partial.with_name(partial.name + ".old")
            folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old)
            return
        try:
            partial.rename(folder)
        except OSError:
            # Another process finished first: its folder may be in use already, so it stays.
            if not is_converted(folder):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Removes what killed conversions left, and what a process with our id left before us."""
    prefix = f"{folder.name}.partial-"
    for path in folder.parent.iterdir():
        if not path.name.startswith(prefix):
            continue
        pid = path.name.removeprefix(prefix).removesuffix(".old")
        if pid.isdigit() and (int(pid) == os.getpid() or not _alive(int(pid))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _fingerprints(folder: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "blake2b": _hash(path)}
        for path in paths
    }


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
