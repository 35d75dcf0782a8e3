"""Kernel times of a jitted program on a GPU, from jax's own profiler: name, stage, count, time.

With command buffers on, the events of a graph carry no operation, so profile a program compiled
with `NO_COMMAND_BUFFERS`; the kernels are the same.
"""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from jax.profiler import ProfileData

NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


class Kernel(NamedTuple):
    """One kernel of a profile, all its launches together. scope: where it was traced."""

    name: str
    scope: str
    count: int
    microseconds: float


def scopes(compiled_text: str) -> dict[str, str]:
    """HLO instruction -> op_name of its metadata."""
    found = re.findall(r"%?([\w.\-]+) = .*?op_name=\"([^\"]*)\"", compiled_text)
    return dict(found)


def profile(run: Callable[[], object], compiled_text: str) -> list[Kernel]:
    """Runs `run` once under the profiler (warm it up before); longest kernels first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = ProfileData.from_file(str(path))
    where = scopes(compiled_text)
    total: dict[tuple[str, str], list[float]] = {}
    for plane in data.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                stats = dict(event.stats)
                operation = str(stats.get("hlo_op", ""))
                key = (event.name, where.get(operation, operation))
                entry = total.setdefault(key, [0, 0.0])
                entry[0] += 1
                entry[1] += event.duration_ns / 1e3
    kernels = [Kernel(*key, int(count), time) for key, (count, time) in total.items()]
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)
