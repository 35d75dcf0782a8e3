"""A loop on the device around one call: how bench_kernels.py times a kernel without the host."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from bench_timing import timed
from jax.experimental.layout import Layout, with_layout_constraint

# Independent kernels of one command buffer would otherwise overlap.
ONE_BY_ONE = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


class Loop(NamedTuple):
    """`unroll` calls, each with the next of `copies` arguments, `iterations` times."""

    copies: int
    unroll: int
    iterations: int

    @property
    def calls(self) -> int:
        return self.unroll * self.iterations


def loop_program(call: Callable[..., Any], loop: Loop) -> Callable[[tuple, tuple], tuple]:
    """(last results, copies of the arguments) -> results of the last iteration, one a call.

    A barrier hands a call its arguments once the call before has its result, and those of the
    first wait for the loop's index: nothing is hoisted, merged or reordered, and the barrier
    itself costs no kernel. All results leave the loop, else calls would be dropped as dead; their
    buffers are donated from dispatch to dispatch, else each would begin by filling them.
    """

    def program(last: tuple, copies: tuple[tuple, ...]) -> tuple:
        def body(turn: Any, _: tuple) -> tuple:
            results = []
            for number in range(loop.unroll):
                own = copies[number % loop.copies]
                arguments, _ = jax.lax.optimization_barrier((own, turn))
                turn = jax.tree.map(in_rows, call(*jax.tree.map(in_rows, arguments)))
                results.append(turn)
            return tuple(results)

        return jax.lax.fori_loop(0, loop.iterations, body, last)

    return program


def first_results(call: Callable[..., Any], loop: Loop, arguments: tuple) -> tuple:
    """Abstract results of every call of the loop."""
    return (jax.eval_shape(call, *arguments),) * loop.unroll


def in_rows(x: jax.Array) -> jax.Array:
    """The array as it lies in memory: a loop would turn it once, ahead of all calls, for free."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def microseconds(run: Callable[[], Any], calls: int, repeats: int) -> list[float]:
    """Of one call, in each of `repeats` measurements of 20 ms or a dispatch, if that is longer."""
    first = min(timed(run, 2))
    many = min(100, math.ceil(20 / first))
    if first > 1000:
        repeats = min(repeats, 2)

    def batch() -> Any:
        for _ in range(many):
            out = run()
        return out

    return [1e3 * ms / (many * calls) for ms in timed(batch, repeats)]
