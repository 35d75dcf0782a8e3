"""Hugging Face checkpoints to converted ones: safetensors and config.json in, no torch, no pickle.

`hf` reads a folder, `rules` maps its tensors; `qwen3`, `moe`, `qwen3_5` and `dflash` know the
architectures, `cli` is the command `ddtree-convert`.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from convert import dflash, moe, qwen3, qwen3_5, rules
from convert.hf import HFFolder, open_folder, resolve
from ddtree_jax import checkpoint
from ddtree_jax.config import DraftConfig, TargetConfig, require

Kind = Literal["target", "draft"]
# Architecture -> module with `parse_target`, `target_rules` and `target_ignored`.
_TARGETS = {
    qwen3.ARCHITECTURE: qwen3,
    moe.ARCHITECTURE: moe,
    **dict.fromkeys(qwen3_5.ARCHITECTURES, qwen3_5),
}
_KINDS: dict[str, Kind] = {**dict.fromkeys(_TARGETS, "target"), dflash.ARCHITECTURE: "draft"}


class Plan(NamedTuple):
    """What a folder converts to. `problems` are all reasons why it does not."""

    folder: HFFolder
    kind: Kind
    config: TargetConfig | DraftConfig
    rules: list[rules.Rule]
    problems: list[str]


def kind_of(folder: HFFolder) -> Kind:
    """What an architecture is to us.

    Raises:
      ValueError: unknown architecture.
    """
    name = folder.architecture
    require(
        name in _KINDS,
        f"{folder.path}: architecture {name!r} is not supported; targets are "
        f"{', '.join(_TARGETS)}, drafters {dflash.ARCHITECTURE} (code in a repository is never "
        "run)",
    )
    return _KINDS[name]


def make_plan(folder: HFFolder) -> Plan:
    """Rules for a folder, by its architecture; reads headers only.

    Raises:
      ValueError: unknown architecture, or a config.json that we cannot follow.
    """
    kind = kind_of(folder)
    if kind == "target":
        family = _TARGETS[folder.architecture]
        config = family.parse_target(folder)
        plan, ignored = family.target_rules(config, folder), family.target_ignored(config)
    else:
        config = dflash.parse_draft(folder)
        plan, ignored = dflash.draft_rules(config), dflash.IGNORED
    expected = checkpoint.param_shapes(config)
    return Plan(folder, kind, config, plan, rules.find_problems(plan, folder, expected, ignored))


def convert_target(
    source: str | Path, destination: str | Path, *, progress: bool = True, replace: bool = False
) -> Path:
    """Converts a Qwen3 target (folder or hub id) into the folder `destination`.

    replace: `destination` may be an earlier conversion, which is replaced.

    Raises:
      ValueError: with every problem of the source named, or `destination` is taken.
    """
    return _convert(source, destination, "target", progress=progress, replace=replace)


def convert_draft(
    source: str | Path, destination: str | Path, *, progress: bool = True, replace: bool = False
) -> Path:
    """Converts a DFlash drafter (folder or hub id) into the folder `destination`.

    replace: `destination` may be an earlier conversion, which is replaced.

    Raises:
      ValueError: with every problem of the source named, or `destination` is taken.
    """
    return _convert(source, destination, "draft", progress=progress, replace=replace)


def ensure_converted(source: str | Path, kind: Kind, *, progress: bool = True) -> Path:
    """Converted folder of `source`: itself, or one in the cache, converted the first time.

    The cache is ~/.cache/ddtree_jax or $DDTREE_CACHE; a folder there is named by the contents of
    its source, so changed weights are another conversion.

    Raises:
      ValueError: `source` cannot be found, converted, or is not of this kind.
    """
    path = Path(source).expanduser()
    if checkpoint.is_converted(path):
        found = checkpoint.read_manifest(path)["kind"]
        require(found == kind, f"{path} holds a {found}, expected a {kind}")
        return path
    path, name = resolve(source)
    folder = _open_kind(path, kind)
    digest = folder.digest()
    root = Path(os.environ.get("DDTREE_CACHE") or "~/.cache/ddtree_jax").expanduser()
    destination = root / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{digest[:16]}"
    if not checkpoint.is_converted(destination):
        _write(folder, destination, name, digest, progress=progress, replace=False)
    return destination


def _convert(
    source: str | Path, destination: str | Path, kind: Kind, *, progress: bool, replace: bool
) -> Path:
    checkpoint.check_destination(destination, replace=replace)
    require(not checkpoint.is_converted(source), f"{source} is converted already")
    path, name = resolve(source)
    folder = _open_kind(path, kind)
    return _write(folder, destination, name, folder.digest(), progress=progress, replace=replace)


def _open_kind(path: Path, kind: Kind) -> HFFolder:
    folder = open_folder(path)
    found = kind_of(folder)
    require(found == kind, f"{path} is a {found} ({folder.architecture}), expected a {kind}")
    return folder


def _write(
    folder: HFFolder,
    destination: str | Path,
    name: str,
    digest: str,
    *,
    progress: bool,
    replace: bool,
) -> Path:
    plan = make_plan(folder)
    rules.report(plan.problems, folder)
    with _progress_bar(plan, progress) as on_bytes:
        return checkpoint.write(
            destination,
            plan.config,
            rules.apply(plan.rules, folder, on_bytes),
            source={"name": name, "architecture": folder.architecture, "digest": digest},
            files=folder.copied_files(),
            replace=replace,
        )


@contextlib.contextmanager
def _progress_bar(plan: Plan, shown: bool) -> Iterator[Callable[[int], None]]:
    names = [name for rule in plan.rules for name, _ in rule.sources]
    total = sum(plan.folder.tensors[name].nbytes for name in names)
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.update(task, advance=count)
