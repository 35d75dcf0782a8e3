"""The kernel benchmark at tiny sizes, and its loop as an H200 would run it."""

import json
import math
import re

import aot
import bench_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from bench_kernels import ALL_PROBLEMS, relative_error
from kernel_cases import (
    IMPLEMENTATIONS,
    OPS,
    ROW_OPS,
    Widths,
    default_table,
    full_table,
    tiny_table,
)
from kernel_loop import ONE_BY_ONE, Loop, first_results, loop_program
from kernel_problems import Draw
from typer.testing import CliRunner

from pallas_kernels import skinny_matmul_pallas

TRITON_CALL = "__gpu$xla.gpu.triton"
MOSAIC_CALL = "mosaic_gpu_v2"
KEYS = {
    *bench_kernels.NEEDED, "slots", "nodes", "rows", "variant", "ragged", "us_min", "us_median",
    "relative_error", "cold", "copies", "unroll", "iterations", "bytes", "flops", "bytes_us",
    "flops_us", "of_copy", "of_matrix", "compile_seconds", "copy_tb_s", "matmul_pflop_s",
    "jax", "python", "ddtree_jax", "commit",
}  # fmt: skip


@pytest.fixture(autouse=True)
def rates(monkeypatch):
    monkeypatch.setattr(bench_kernels, "measure_rates", lambda: (2.0, 0.5))


def run(*arguments):
    app = typer.Typer()
    app.command()(bench_kernels.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def bench(out, *arguments):
    return run(out, "--shape", "tiny", "--repeats", 1, *arguments)


def read(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_a_kernel_is_measured_as_it_is_asked_to_be_cut_up(tmp_path, monkeypatch):
    seen = []
    real = skinny_matmul_pallas.pl.pallas_call

    def recorded(*args, **options):
        seen.append(options["compiler_params"].num_warps)
        return real(*args, **options)

    monkeypatch.setattr(skinny_matmul_pallas.pl, "pallas_call", recorded)
    out = tmp_path / "out.jsonl"
    options = ("--op", "skinny_matmul", "--implementation", "pallas")
    result = bench(out, *options, "--config", "num_warps=2", "--config", "columns=16,splits=7")
    assert result.exit_code == 0, result.output
    lines = {line["implementation"]: line for line in read(out)}
    assert list(lines) == ["pallas", "pallas num_warps=2", "pallas columns=16,splits=7"]
    assert "us_min" in lines["pallas num_warps=2"] and 2 in seen
    # A config that cannot be is a line of its own, as what does not compile is.
    assert lines["pallas columns=16,splits=7"]["failed"]
    seen.clear()
    assert bench(out, *options, "--config", "num_warps=2").output.count("0 new lines") == 1
    assert not seen


def test_a_config_of_another_kernel_gives_no_figure(tmp_path):
    out = tmp_path / "out.jsonl"
    options = ("--op", "tree_attention", "--implementation", "pallas", "--config")
    assert bench(out, *options, "warpgroups=1").exit_code == 0  # Mosaic's, on a GPU only
    plain, other = read(out)
    assert "us_min" in plain and "no such fields" in other["failed"]


@pytest.mark.parametrize(
    ("config", "message"),
    [("num_warps", "must be fields such as"), ("parts=2", "no kernel of the chosen ops")],
)
def test_a_config_that_means_nothing_is_named(config, message, tmp_path):
    result = bench(tmp_path / "out.jsonl", "--op", "gdn_tree", "--config", config)
    assert result.exit_code == 1 and message in result.output and "`--config`" in result.output


@pytest.mark.parametrize("op", OPS)
def test_every_implementation_is_measured(op, tmp_path):
    out = tmp_path / "out.jsonl"
    result = bench(out, "--op", op)
    assert result.exit_code == 0, result.output
    lines = read(out)
    assert [line["implementation"] for line in lines] == list(IMPLEMENTATIONS[op])
    for line in lines:
        assert set(line) == KEYS and line["op"] == op
        assert 0 < line["us_min"] <= line["us_median"]
        assert line["copies"] == (2 if line["cold"] else 1)
        assert 0 <= line["relative_error"] <= 1e-2
        # The measured copy rate is below an H200's, which is then the ceiling.
        assert line["bytes_us"] == pytest.approx(line["bytes"] / 4.3e6, abs=1e-3)
        assert line["of_copy"] == pytest.approx(line["bytes_us"] / line["us_min"], abs=1e-3)


def test_a_torn_file_is_completed_and_nothing_measured_twice(tmp_path):
    out, chosen = tmp_path / "out.jsonl", ("--op", "gated_matmul")
    assert bench(out, *chosen, "--implementation", "xla").exit_code == 0
    first = out.read_bytes()
    assert bench(out, *chosen).exit_code == 0
    whole = out.read_bytes()
    assert whole.startswith(first) and len(read(out)) == 2
    out.write_bytes(whole[:-40])
    result = bench(out, *chosen)
    assert result.exit_code == 0 and "1 new lines" in result.output
    assert [line["implementation"] for line in read(out)] == ["xla", "pallas"]
    assert "0 new lines" in bench(out, *chosen).output


def test_a_wrong_kernel_gives_an_error_and_no_line(tmp_path, monkeypatch):
    kernel = skinny_matmul_pallas.skinny_matmul
    # Wrong by 3 percent of the result.
    monkeypatch.setattr(
        skinny_matmul_pallas, "skinny_matmul", lambda *a, **k: kernel(*a, **k) * 1.03
    )
    out = tmp_path / "out.jsonl"
    result = bench(out, "--op", "skinny_matmul")
    assert result.exit_code == 1
    assert "skinny_matmul qkv slots=2 nodes=8 pallas: relative error 0.03" in result.output
    assert [line["implementation"] for line in read(out)] == ["xla"]


def test_a_refusal_is_a_line_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(skinny_matmul_pallas, "unsupported", lambda *_: "it is closed today")
    out = tmp_path / "out.jsonl"
    result = bench(out, "--op", "skinny_matmul")
    assert result.exit_code == 0
    xla, pallas = read(out)
    assert "failed" not in xla
    assert pallas["failed"].startswith("NotImplementedError: the Pallas kernel of skinny_matmul")
    assert "it is closed today" in pallas["failed"] and "us_min" not in pallas


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "conv"), "`--op` must be one of"),
        (("--case", "slots=5*"), "`--case` 'slots=5*' fits no case"),
        (("--shape", "qwen9"), "`--shape` must be one of"),
        (("--implementation", "cuda"), "`--implementation` must be one of"),
        ((), "give a JSONL file"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 1 and message in result.output.replace("\n", "")


def test_another_scripts_file_is_left_alone(tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text('{"cell": 1}\n')
    result = bench(out, "--op", "add_norm")
    assert result.exit_code == 1 and "is no line of bench_kernels.py" in result.output
    assert out.read_text() == '{"cell": 1}\n'


def test_list_shows_the_chosen_cases():
    result = run("--list", "--op", "tree_attention", "--case", "*rows=32768")
    assert result.output.splitlines() == [
        "tree_attention slots=1 nodes=1 rows=32768",
        "tree_attention slots=1 nodes=64 rows=32768",
    ]


@pytest.mark.parametrize("table", [default_table, full_table, tiny_table])
def test_names_are_unique_and_every_op_is_there(table):
    names = [(case.op, case.name) for case in table()]
    assert len(set(names)) == len(names)
    assert {op for op, _ in names} == set(OPS)


def test_errors_of_results():
    ones, some = np.ones(4, np.float32), np.array([1, -np.inf], np.float32)
    assert relative_error([ones], [ones]) == relative_error([some], [some]) == 0
    assert relative_error([ones * np.float32(1.5)], [ones]) == 0.5
    assert math.isnan(relative_error([ones, ones * np.nan], [ones, ones]))
    assert relative_error([np.array([1, 2])], [np.array([1, 3])]) == math.inf
    assert relative_error([-some], [some]) == math.inf
    assert relative_error([ones[:1]], [ones]) == math.inf


def lowered_loop(case, implementation, loop):
    """The timed program of a case at Qwen3-8B widths, for an H200."""
    problem = ALL_PROBLEMS[case.op](Widths.of("qwen3-8b"), case)
    tile = jax.ShapeDtypeStruct((4096,), jnp.float32)
    shapes = jax.eval_shape(lambda t: problem.arguments(Draw(t, jnp.int32(0))), tile)
    arguments = jax.tree.map(lambda x: aot.argument(x.shape, x.dtype), shapes)
    call = jax.jit(problem.call(implementation))
    with aot.h200():
        results = first_results(call, loop, arguments)
    results = jax.tree.map(lambda x: aot.argument(x.shape, x.dtype), results)
    copies = (arguments,) * loop.copies
    return aot.lower(loop_program(call, loop), results, copies, donate_argnums=(0,))


@pytest.mark.parametrize("op", OPS)
def test_kernels_lower_for_an_h200_at_real_shapes(op):
    nodes = 1 if op in ROW_OPS else 64
    cases = [case for case in default_table() if case.op == op and case.nodes == nodes]
    for case in cases[:4]:
        text = lowered_loop(case, "pallas", Loop(1, 1, 2)).as_text()
        assert TRITON_CALL in text or MOSAIC_CALL in text, case.name
    assert cases


@pytest.mark.parametrize("implementation", ["pallas", "einsum"])
def test_the_loop_holds_every_call_and_turns_no_cache(implementation):
    case = next(c for c in default_table() if c.op == "tree_attention" and c.nodes == 64)
    lowered = lowered_loop(case, implementation, Loop(2, 4, 8))
    text = aot.compile(lowered, **ONE_BY_ONE).as_text()
    # A known count: else the host would ask the device after every iteration.
    assert re.findall(r'"known_trip_count":{"n":"(\d+)"}', text) == ["8"]
    if implementation == "pallas":
        for target in (MOSAIC_CALL, TRITON_CALL):  # attention, and the merge of its parts
            assert text.count(f'custom_call_target="{target}"') == 4
        assert not re.search(r"= bf16\S* copy\(", text)  # nothing but the kernels
    # Caches enter the loop as they lie: turned ahead of it, they would be read for less.
    cache = rf"bf16\[1,{case.rows},8,128\]"
    layouts = re.findall(rf"= {cache}(\{{[\d,]+\}}) (?:get-tuple-element|copy)\(", text)
    assert len(layouts) >= 4 and set(layouts) == {"{3,2,1,0}"}
