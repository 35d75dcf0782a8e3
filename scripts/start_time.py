"""Seconds from a cold process to the first token, of a target and drafter at real shapes.

    python scripts/start_time.py write FOLDER --pair qwen3-8b    # converted, random weights
    python scripts/start_time.py measure FOLDER OUT.jsonl        # runs it in fresh processes

The first process fills the compilation cache (kept under FOLDER), later ones find it warm. Weights
come from FOLDER as a user's would, through `LLM`, so the page cache decides whether from a disk.
Phases: importing, loading weights onto the device, prompt to first token, and one dispatch more.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from records import append, context

app = typer.Typer(add_completion=False, help=__doc__)
Folder = Annotated[Path, typer.Argument(help="Holds target/, draft/ and programs/.")]
PHASES = ("import", "weights", "first_token", "dispatch")
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # as `python -m ddtree_jax` sets it


@app.command("write")
def write_pair(folder: Folder, pair: str = "qwen3-8b") -> None:
    """Writes target/ and draft/ in the converted form, with random weights."""
    from importlib.resources import files as package_files

    import jax
    from real_shapes import PAIRS, abstract_model, random_leaves
    from rich.progress import track

    from ddtree_jax.checkpoint import TOKENIZER_FILES, module_params, write
    from ddtree_jax.models.dflash import DFlash
    from ddtree_jax.models.targets import target_type

    if pair not in PAIRS:
        raise typer.BadParameter(f"`--pair` must be one of {tuple(PAIRS)}, got {pair!r}")
    target, draft = PAIRS[pair]
    assets = Path(str(package_files("ddtree_jax") / "assets" / "target"))
    kinds = (("target", target_type(target), target), ("draft", DFlash, draft))
    for seed, (name, kind, config) in enumerate(kinds):
        structure, leaves = abstract_model(kind, config)
        model = structure.merge(random_leaves(structure, leaves, seed))
        count = len(jax.tree.leaves(leaves))
        params = track(module_params(model), description=name, total=count)
        # The embedded pair's tokenizer, since loading one is a part of every start.
        files = [assets / name for name in TOKENIZER_FILES if (assets / name).exists()]
        write(folder / name, config, params, source={"random": pair}, files=files, replace=True)
        del model, params
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1e9:.2f} GB")


@app.command()
def measure(
    folder: Folder,
    out: Annotated[Path, typer.Argument(help="JSONL file; lines are added.")],
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 100,
    processes: Annotated[int, typer.Option(help="The first has a cold compilation cache.")] = 3,
) -> None:
    """Starts fresh processes one after the other, one line of phases each."""
    for number in range(processes):
        begin = time.time()
        child = subprocess.run(
            [sys.executable, __file__, "child", str(folder), str(begin), str(prompt)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=os.environ | CACHE | {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs")},
        )
        line = json.loads(child.stdout.splitlines()[-1])
        line = {"bench": "start", "warm_cache": number > 0, "prompt": prompt, **line}
        append(out, [line])
        print(line)


@app.command(hidden=True)
def child(folder: Path, begin: float, prompt: int) -> None:
    """One process: times since `begin` (time.time() of the parent before the start)."""
    sys.modules["torch"] = None  # transformers imports it where it is, and we need none
    from ddtree_jax import LLM, SamplingParams

    marks = [begin, time.time()]
    paths = [str(folder / name) for name in ("target", "draft")]
    llm = LLM(*paths, max_slots=1, max_length=2048, progress=False)
    marks.append(time.time())
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    for event in llm.stream([list(range(prompt))], params):
        if event.token_ids and len(marks) < 5:
            marks.append(time.time())
    seconds = {
        f"{phase}_s": round(after - before, 2)
        for phase, before, after in zip(PHASES, marks, marks[1:], strict=False)
    }
    print(json.dumps({**seconds, "total_s": round(marks[3] - begin, 2), **context()}))


if __name__ == "__main__":
    app()
