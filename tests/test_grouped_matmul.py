"""The experts' products: every implementation against each choice with its own matrix in float64,
and no row depends on another."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sort_by_expert import random_ids

from pallas_kernels import grouped_down, grouped_gate_up, grouped_matmul_pallas, sort_by_expert
from pallas_kernels.grouped_matmul import (
    check_down,
    check_gate_up,
    down_definition,
    gate_up_definition,
)


class Case(NamedTuple):
    """Rows, choices of a row, experts; D, F, dtype. alike: all rows choose the same."""

    rows: int
    chosen: int
    experts: int
    shared: bool = False
    hidden: int = 32
    inner: int = 48
    dtype: type = jnp.float32
    alike: bool = False


CASES = {
    "one_row": Case(1, 3, 8),
    "one_row_shared": Case(1, 4, 9, shared=True),
    "places": Case(5, 2, 12),
    "places_shared": Case(21, 2, 48, shared=True),
    "experts": Case(23, 3, 6),
    "experts_shared": Case(23, 3, 7, shared=True),
    "all_rows_choose_alike": Case(37, 2, 9, alike=True),
    "one_expert": Case(19, 1, 1),
    "large_groups": Case(90, 2, 4, shared=True, hidden=64),
    "wide": Case(3, 2, 6, hidden=128, inner=128),
    "bfloat16": Case(33, 3, 8, shared=True, hidden=64, dtype=jnp.bfloat16),
}


class Arguments(NamedTuple):
    x: jax.Array
    gate_up: jax.Array
    down: jax.Array
    ids: jax.Array
    weight: jax.Array


def arguments(case, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, case.dtype)

    ids = random_ids(rng, case.rows, case.chosen, case.experts, case.shared)
    if case.alike:
        ids = np.broadcast_to(ids[:1], ids.shape)
    weight = rng.uniform(size=ids.shape).astype(np.float32)
    return Arguments(
        normal(case.rows, case.hidden),
        normal(case.experts, case.hidden, 2 * case.inner, scale=case.hidden**-0.5),
        normal(case.experts, case.inner, case.hidden, scale=case.inner**-0.5),
        jnp.asarray(ids),
        jnp.asarray(weight),
    )


def answers(args, shared, implementation):
    """[R, K, F] and [K, R, D]."""
    x, gate_up, down, ids, weight = args
    if implementation == "definition":
        gated = gate_up_definition(x, gate_up, ids)
        return gated, down_definition(gated, down, ids, weight)
    options = {"shared": shared, "implementation": implementation}
    order = sort_by_expert(ids, experts=len(gate_up), implementation=implementation)
    gated = grouped_gate_up(x, gate_up, ids, order, **options)
    return gated, grouped_down(gated, down, ids, weight, order, **options)


def oracle(args):
    x, gate_up, down, ids, weight = (np.asarray(a.astype(jnp.float32), np.float64) for a in args)
    ids = ids.astype(int)
    gate, up = np.split(np.einsum("rd,rkdf->rkf", x, gate_up[ids]), 2, axis=-1)
    gated = gate / (1 + np.exp(-gate)) * up
    return gated, np.einsum("rk,rkf,rkfd->krd", weight, gated, down[ids])


@pytest.mark.parametrize("implementation", ["xla", "pallas", "definition"])
@pytest.mark.parametrize("name", CASES)
def test_each_choice_meets_its_experts_matrices(name, implementation):
    case = CASES[name]
    args = arguments(case)
    run = functools.partial(answers, shared=case.shared, implementation=implementation)
    error = 5e-6 if case.dtype == jnp.float32 else 4e-2
    for got, expected in zip(jax.jit(run)(args), oracle(args), strict=True):
        assert got.dtype == case.dtype
        np.testing.assert_allclose(np.float64(got), expected, atol=error, rtol=error)


def test_kernels_give_the_same_for_any_config():
    case = CASES["experts_shared"]
    args = arguments(case)
    order = sort_by_expert(args.ids, experts=case.experts)
    config = grouped_matmul_pallas.Config(tile_rows=32, tile_columns=16, block_inner=16)
    options = {"shared": True, "interpret": True, "config": config}
    gated = grouped_matmul_pallas.grouped_gate_up(args.x, args.gate_up, args.ids, *order, **options)
    parts = grouped_matmul_pallas.grouped_down(
        gated, args.down, args.ids, args.weight, *order, **options
    )
    for got, expected in zip((gated, parts), oracle(args), strict=True):
        np.testing.assert_allclose(got, expected, atol=5e-6)


@pytest.mark.parametrize("name", ["places_shared", "experts", "experts_shared", "bfloat16"])
def test_a_row_has_the_same_bits_whatever_the_others_are(name):
    case = CASES[name]
    one, other = arguments(case), arguments(case, seed=1)
    row = 7
    kept = [
        jnp.where(jnp.arange(case.rows)[:, None] == row, getattr(one, field), getattr(other, field))
        for field in ("x", "ids", "weight")
    ]
    mixed = one._replace(x=kept[0], ids=kept[1], weight=kept[2])
    run = jax.jit(functools.partial(answers, shared=case.shared, implementation="pallas"))
    (gated, parts), (mixed_gated, mixed_parts) = run(one), run(mixed)
    np.testing.assert_array_equal(gated[row], mixed_gated[row])
    np.testing.assert_array_equal(parts[:, row], mixed_parts[:, row])
    assert not np.array_equal(gated[row + 1], mixed_gated[row + 1])


def test_bad_arguments_are_refused():
    x, gate_up, down, ids, weight = arguments(CASES["experts"])
    order = sort_by_expert(ids, experts=6)
    with pytest.raises(ValueError, match="both float32, got float32 and bfloat16"):
        grouped_gate_up(x, gate_up.astype(jnp.bfloat16), ids, order)
    with pytest.raises(ValueError, match=r"`ids` must have a row for each of x \(22, 32\)"):
        check_gate_up(x[1:], gate_up, ids, order)
    with pytest.raises(ValueError, match=r"`order` must .*\(69,\), \(7,\).*got .*\(66,\), \(7,\)"):
        grouped_gate_up(x, gate_up, ids, sort_by_expert(ids[1:], experts=6))
    gated = jnp.zeros((*ids.shape, 48))
    with pytest.raises(ValueError, match=r"`ids` and `weight` must be \[R, K\] to fit"):
        check_down(gated, down, ids, weight[1:], order)
    with pytest.raises(NotImplementedError, match="multiples of 16, got 32 x 40"):
        grouped_gate_up(x, gate_up[..., :80], ids, order, implementation="pallas")
