"""Kernel times of a jitted program on a GPU, from jax's own profiler: name, stage, count, time.

With command buffers on, launches overlap as they do in use, but carry no operation: `launches` and
`busy` say how long kernels of some names run. `profile` tells kernels by where they were traced,
and so wants a program compiled with `NO_COMMAND_BUFFERS`; the kernels are the same.
"""

import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
from jax.profiler import ProfileData

NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


class Launch(NamedTuple):
    """One launch of a kernel, in microseconds of the profile's clock."""

    name: str
    operation: str  # "" in a command buffer
    begin: float
    end: float


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


def launches(run: Callable[[], object]) -> list[Launch]:
    """Runs `run` once under the profiler (warm it up before); in order of their begin."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = ProfileData.from_file(str(path))
    found = []
    for plane in data.planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                operation = str(dict(event.stats).get("hlo_op", ""))
                begin, time = event.start_ns / 1e3, event.duration_ns / 1e3
                found.append(Launch(event.name, operation, begin, begin + time))
    return sorted(found, key=lambda launch: launch.begin)


def busy(found: list[Launch]) -> float:
    """Microseconds in which any of these launches runs: what overlaps counts once."""
    total, until = 0.0, -math.inf
    for launch in sorted(found, key=lambda launch: launch.begin):
        total += max(0.0, launch.end - max(launch.begin, until))
        until = max(until, launch.end)
    return total


def profile(run: Callable[[], object], compiled_text: str) -> list[Kernel]:
    """`launches` by kernel and scope, the longest first."""
    where = scopes(compiled_text)
    total: dict[tuple[str, str], list[float]] = {}
    for launch in launches(run):
        key = (launch.name, where.get(launch.operation, launch.operation))
        entry = total.setdefault(key, [0, 0.0])
        entry[0] += 1
        entry[1] += launch.end - launch.begin
    kernels = [Kernel(*key, int(count), time) for key, (count, time) in total.items()]
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)
