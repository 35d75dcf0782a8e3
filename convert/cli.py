"""The command `ddtree-convert`: target, draft, inspect."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console
from rich.table import Table

from convert import convert_draft, convert_target, make_plan
from convert.hf import open_folder
from ddtree_jax import checkpoint

main = typer.Typer(
    help="Convert Hugging Face checkpoints for ddtree_jax, and look into them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Source = Annotated[str, typer.Argument(help="Folder with config.json and safetensors, or hub id.")]
Destination = Annotated[Path, typer.Argument(help="Folder to write; absent or empty.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an earlier conversion.")]


@main.callback()
def _start() -> None:
    # A conversion needs no accelerator, and must not reserve the memory of one in use.
    jax.config.update("jax_platforms", "cpu")


@main.command()
def target(source: Source, destination: Destination, force: Force = False) -> None:
    """Convert a Qwen3, Qwen3.5 or Qwen3.6 target, dense or MoE."""
    with _plain_errors():
        typer.echo(convert_target(source, destination, replace=force))


@main.command()
def draft(source: Source, destination: Destination, force: Force = False) -> None:
    """Convert a DFlash drafter."""
    with _plain_errors():
        typer.echo(convert_draft(source, destination, replace=force))


@main.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Hugging Face or converted folder.")],
) -> None:
    """Show the settings, sizes and problems of a folder; exit code 1 when it has problems."""
    with _plain_errors():
        describe = _describe_converted if checkpoint.is_converted(folder) else _describe_source
        rows, problems = describe(folder)
    table = Table(title=str(folder), show_header=False)
    for name, value in rows:
        table.add_row(name, str(value))
    Console().print(table, markup=False)
    for problem in problems:
        typer.echo(f"problem: {problem}", err=True)
    if problems:
        raise typer.Exit(1)


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """One message on stderr and exit code 1 for what the caller can mend; bugs keep a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _describe_source(folder: Path) -> tuple[list[tuple[str, Any]], list[str]]:
    source = open_folder(folder)
    plan = make_plan(source)
    tensors = source.tensors.values()
    rows = [
        ("kind", f"Hugging Face {plan.kind} ({source.architecture})"),
        *_config_rows(plan.config.to_json()),
        *_size_rows([(tensor.dtype, tensor.size, tensor.nbytes) for tensor in tensors]),
    ]
    return rows, plan.problems


def _describe_converted(folder: Path) -> tuple[list[tuple[str, Any]], list[str]]:
    manifest = checkpoint.read_manifest(folder)
    sizes = []
    for entry in manifest["params"].values():
        count = 1
        for size in entry["shape"]:
            count *= size
        sizes.append((entry["dtype"], count, count * (4 if entry["dtype"] == "float32" else 2)))
    source = [(f"source {name}", value) for name, value in manifest["source"].items()]
    rows = [
        ("kind", f"converted {manifest['kind']}"),
        *source,
        *_config_rows(checkpoint.read_config(folder).to_json()),
        *_size_rows(sizes),
    ]
    return rows, checkpoint.damaged_files(folder, contents=True)


def _config_rows(config: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in config.items()]


def _size_rows(sizes: list[tuple[str, int, int]]) -> list[tuple[str, Any]]:
    """Rows from (dtype, elements, bytes) of each tensor."""
    dtypes = Counter(dtype for dtype, _, _ in sizes)
    return [
        ("tensors", len(sizes)),
        ("parameters", f"{sum(count for _, count, _ in sizes):,}"),
        ("bytes", f"{sum(nbytes for _, _, nbytes in sizes):,}"),
        ("dtypes", ", ".join(f"{dtype} x {count}" for dtype, count in sorted(dtypes.items()))),
    ]
