"""Reading a Hugging Face folder: config.json, safetensors headers, tensors one at a time."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ddtree_jax.checkpoint import TOKENIZER_FILES, VERSION
from ddtree_jax.config import require

INDEX = "model.safetensors.index.json"
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Where one tensor is and what its header says. `dtype` is the safetensors name ("BF16")."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * _ITEM_BYTES.get(self.dtype, 0)


@dataclass(frozen=True, kw_only=True)
class HFFolder:
    """A Hugging Face folder whose headers were read. `problems` speak of its index and headers."""

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    tensors: dict[str, Tensor]
    problems: tuple[str, ...]

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures")
        require(
            isinstance(names, list) and len(names) == 1,
            f"{self.path}/config.json: `architectures` must name one class, got {names!r}",
        )
        return names[0]

    def read(self, name: str) -> np.ndarray:
        """One tensor, copied out of its file.

        Raises:
          ValueError: it holds NaN or infinity.
        """
        tensor = self.tensors[name]
        # Opened anew for each tensor: pages of a mapping that stays open count as memory in use.
        with _open(tensor.file) as file:
            value = file.get_tensor(name)
        require(
            _finite(value),
            f"tensor {name} in {tensor.file} holds NaN or infinity; the checkpoint is damaged",
        )
        return value

    def copied_files(self) -> list[Path]:
        return [self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file()]

    def digest(self) -> str:
        """Hash of everything that a conversion reads; changes when any byte does."""
        names = ["config.json", *([INDEX] if (self.path / INDEX).is_file() else [])]
        files = [self.path / name for name in names] + self.copied_files()
        files += sorted({tensor.file for tensor in self.tensors.values()})
        blocks = [
            (path, start)
            for path in files
            for start in range(0, max(path.stat().st_size, 1), _BLOCK_BYTES)
        ]
        total = hashlib.blake2b(f"ddtree_jax {VERSION}".encode(), digest_size=16)
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            for (path, start), part in zip(blocks, pool.map(_block_hash, blocks), strict=True):
                total.update(f"{path.name} {start} {path.stat().st_size} ".encode() + part)
        return total.hexdigest()


def open_folder(path: str | Path) -> HFFolder:
    """Reads config.json and every safetensors header of a folder.

    Raises:
      ValueError: no such folder, no config.json, no safetensors, or an unreadable file.
    """
    path = Path(path)
    require(path.is_dir(), f"{path} is no folder; pass a folder with config.json and safetensors")
    require((path / "config.json").is_file(), f"{path} has no config.json")
    config = _json(path / "config.json")
    generation_path = path / "generation_config.json"
    generation = _json(generation_path) if generation_path.is_file() else {}
    index = _index(path)
    files = sorted(set(index.values())) if index is not None else _loose_files(path)
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    for name in files:
        if not (path / name).is_file():
            count = sum(shard == name for shard in (index or {}).values())
            problems.append(f"shard {name} is missing ({count} tensors of the index are in it)")
            continue
        for key, tensor in _headers(path / name):
            if key in tensors:
                other = tensors[key].file.name
                problems.append(f"tensor {key} is in two shards, {other} and {name}")
            tensors[key] = tensor
    for key, name in (index or {}).items():
        if key not in tensors and (path / name).is_file():
            problems.append(f"tensor {key} is in the index but not in its shard {name}")
        elif key in tensors and tensors[key].file.name != Path(name).name:
            problems.append(f"tensor {key} is in {tensors[key].file.name}; the index says {name}")
    if index is not None:
        problems += [f"tensor {key} is not in the index" for key in tensors if key not in index]
    return HFFolder(
        path=path,
        config=config,
        generation=generation,
        tensors=tensors,
        problems=tuple(problems),
    )


def resolve(source: str | Path) -> tuple[Path, str]:
    """Folder and short name of a source: a folder here, or a hub id, which is downloaded.

    Raises:
      ValueError: neither a folder nor a repository that can be reached.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path, path.resolve().name
    require(
        _HUB_ID.fullmatch(str(source)) is not None,
        f"{source} is neither a folder nor a hub id such as Qwen/Qwen3-4B",
    )
    # Imported here: it costs half a second and a local folder never needs it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = snapshot_download(str(source), allow_patterns=_HUB_FILES)
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{source} is no folder here and could not be downloaded from the hub ({reason}). "
            "Download it where there is a network, and pass the folder."
        ) from error
    return Path(folder), str(source).replace("/", "--")


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    require(isinstance(data, dict), f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def _index(path: Path) -> dict[str, str] | None:
    """Tensor name -> shard file name, or None without an index."""
    if not (path / INDEX).is_file():
        return None
    shards = _json(path / INDEX).get("weight_map")
    require(isinstance(shards, dict) and bool(shards), f"{path / INDEX} has no `weight_map`")
    for key, name in shards.items():
        # A shard outside the folder would let an index read any file of this machine.
        require(
            isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors"),
            f"{path / INDEX}: tensor {key} is said to be in {name!r}; expected the name of a "
            ".safetensors file in the folder itself",
        )
    return shards


def _loose_files(path: Path) -> list[str]:
    if (path / "model.safetensors").is_file():
        return ["model.safetensors"]
    names = sorted(file.name for file in path.glob("*.safetensors"))
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    require(
        bool(names) or not pickles,
        f"{path} has only pickled weights ({', '.join(pickles[:3])}), which can run code when "
        "read; save the model as safetensors",
    )
    require(bool(names), f"{path} has no .safetensors file")
    return names


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is truncated or no safetensors file: {error}") from error


def _headers(path: Path) -> Iterator[tuple[str, Tensor]]:
    with _open(path) as file:
        for key in file.keys():  # noqa: SIM118 - the handle is no mapping
            part = file.get_slice(key)
            yield key, Tensor(file=path, shape=tuple(part.get_shape()), dtype=part.get_dtype())


def _block_hash(block: tuple[Path, int]) -> bytes:
    path, start = block
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(_BLOCK_BYTES), digest_size=16).digest()


def _finite(value: np.ndarray) -> bool:
    """Whether no exponent is all ones. On bits: `isfinite` warns at bfloat16 and is slow."""
    unsigned, exponent = {
        np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7F80),
        np.dtype(np.float16): (np.uint16, 0x7C00),
        np.dtype(np.float32): (np.uint32, 0x7F800000),
    }[value.dtype]
    bits = value.reshape(-1).view(unsigned)
    exponent = unsigned(exponent)
    step = 1 << 22
    return not any(
        bool(((bits[i : i + step] & exponent) == exponent).any()) for i in range(0, bits.size, step)
    )
