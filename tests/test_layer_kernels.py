"""The kernels of a layer around attention: each against numpy in float64, kernel and definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    add_norm,
    gated_matmul,
    rotate_heads,
    skinny_matmul,
    skinny_matmul_pallas,
)
from pallas_kernels.skinny_matmul import check_product

IMPLEMENTATIONS = ("xla", "pallas")
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2}


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.array(np.random.default_rng(seed).normal(size=shape), dtype)


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def assert_near(ours, theirs, dtype):
    error = np.linalg.norm(wide(ours) - theirs) / np.linalg.norm(theirs)
    assert error < TOLERANCE[dtype]  # NaN fails


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("shape", "columns"), [((1, 1), 80), ((2, 3), 80), ((1, 130), 80), ((2, 3), 300), ((2, 3), 8)]
)
def test_skinny_matmul_is_the_product(shape, columns, dtype, implementation):
    x, kernel = normal(0, *shape, 96, dtype=dtype), normal(1, 96, columns, dtype=dtype)
    parts = skinny_matmul(x, kernel, implementation=implementation)
    assert parts.shape[1:] == (*shape, columns)
    assert_near(jnp.sum(parts.astype(jnp.float32), axis=0), wide(x) @ wide(kernel), dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sole_part_may_stay_wide(implementation):
    x, kernel = (normal(seed, *shape) for seed, shape in ((0, (1, 2, 96)), (1, (96, 16))))
    x, kernel = x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    parts = skinny_matmul(x, kernel, dtype=jnp.float32, implementation=implementation)
    assert parts.dtype == jnp.float32
    assert_near(parts[0], wide(x) @ wide(kernel), jnp.float32)


def test_skinny_matmul_splits_the_inner_axis():
    x, kernel = normal(0, 1, 5, 512), normal(1, 512, 64)
    config = skinny_matmul_pallas.Config(columns=32, block=64, splits=4)
    parts = skinny_matmul_pallas.skinny_matmul(x, kernel, interpret=True, config=config)
    quarters = np.einsum(
        "brpi,pio->pbro", wide(x).reshape(1, 5, 4, 128), wide(kernel).reshape(4, 128, 64)
    )
    assert_near(parts, quarters, jnp.float32)


@pytest.mark.parametrize("rows", [1, 16, 17, 128])
def test_default_config_divides_the_matrices_of_real_models(rows):
    dtype = jnp.dtype(jnp.bfloat16)
    shapes = ((4096, 6144), (4096, 4096), (12288, 4096), (2560, 6144), (9728, 2560), (4096, 2048))
    for inner, columns in shapes:
        config = skinny_matmul_pallas.default_config(inner, columns, dtype, rows)
        assert columns % config.columns == 0
        assert inner % (config.splits * config.block) == 0
        # At least half the multiprocessors of an H200 read.
        assert columns // config.columns * config.splits >= 66


def test_few_rows_draw_more_bytes_at_once():
    """The router of Qwen3.6-35B-A3B, and the in-projection of its recurrent layers."""
    dtype = jnp.dtype(jnp.bfloat16)
    router = skinny_matmul_pallas.default_config(2048, 256, dtype, 1)
    assert (256 // router.columns) * router.splits == 128
    bytes_a_stage = []
    for rows in (1, 64):
        config = skinny_matmul_pallas.default_config(2048, 12352, dtype, rows)
        bytes_a_stage.append(config.columns * config.block * 2)
    assert bytes_a_stage == [32768, 16384]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (2, 9)])
def test_gated_matmul_is_swiglu(shape, dtype, implementation):
    x, gate_up = normal(0, *shape, 48, dtype=dtype), normal(1, 48, 2 * 80, dtype=dtype)
    out = gated_matmul(x, gate_up, implementation=implementation)
    gate, up = np.split(wide(x) @ wide(gate_up), 2, axis=-1)
    assert out.dtype == dtype
    assert_near(out, gate / (1 + np.exp(-gate)) * up, dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("part_count", "residual"), [(1, "same"), (4, "same"), (1, "wide")])
def test_add_norm_adds_then_norms(part_count, residual, dtype, implementation):
    sums = dtype if residual == "same" else jnp.float32
    x, scale = normal(0, 2, 3, 48, dtype=sums), normal(2, 48, dtype=dtype)
    update = normal(1, part_count, 2, 3, 48, dtype=dtype if part_count == 1 else jnp.float32)
    total, normed = add_norm(x, update, scale, eps=1e-2, implementation=implementation)
    expected = wide(x) + wide(update).sum(axis=0)
    assert total.dtype == sums and normed.dtype == dtype
    assert_near(total, expected, sums)
    mean_square = np.mean(np.square(expected), axis=-1, keepdims=True)
    assert_near(normed, expected / np.sqrt(mean_square + 1e-2) * wide(scale), dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_centred_scale_counts_from_one(dtype, implementation):
    x, update = normal(0, 2, 3, 48), normal(1, 2, 2, 3, 48)
    scale = normal(2, 48, dtype=dtype)
    total, normed = add_norm(
        x, update, scale, eps=1e-2, centred=True, implementation=implementation
    )
    expected = wide(x) + wide(update).sum(axis=0)
    assert total.dtype == jnp.float32 and normed.dtype == dtype
    mean_square = np.mean(np.square(expected), axis=-1, keepdims=True)
    expected = expected / np.sqrt(mean_square + 1e-2) * (1 + wide(scale))
    assert_near(normed, expected, dtype)
    if dtype == jnp.bfloat16:  # rounded once, so as near as bfloat16 comes
        np.testing.assert_allclose(wide(normed), expected, rtol=2**-8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("part_count", "rows"), [(1, 1), (2, 11)])
def test_rotate_heads_norms_and_turns(part_count, rows, dtype, implementation):
    slots, queries, keys, head_dim = 2, 6, 2, 16
    parts = normal(
        0, part_count, slots, rows, (queries + 2 * keys) * head_dim,
        dtype=dtype if part_count == 1 else jnp.float32,
    )  # fmt: skip
    scales = [normal(seed, head_dim, dtype=dtype) for seed in (1, 2)]
    angle = np.random.default_rng(3).uniform(0, 6, (slots, rows, head_dim // 2))
    cos, sin = jnp.array(np.cos(angle), dtype), jnp.array(np.sin(angle), dtype)
    heads = rotate_heads(
        parts, *scales, cos, sin, num_kv_heads=keys, eps=1e-6, implementation=implementation
    )
    total = wide(parts).sum(axis=0).reshape(slots, rows, -1, head_dim)

    def turned(x, scale):
        x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) * wide(scale)
        # As complex numbers: pair (i, i + H/2) turns by its angle.
        pair = (x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]) * (
            wide(cos) + 1j * wide(sin)
        )[:, :, None]
        return np.concatenate([pair.real, pair.imag], axis=-1)

    assert_near(heads.query, turned(total[:, :, :queries], scales[0]), dtype)
    assert_near(heads.key, turned(total[:, :, queries : queries + keys], scales[1]), dtype)
    assert_near(heads.value, total[:, :, queries + keys :], dtype)
    assert heads.gate is None


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("gated", "centred"), [(False, False), (True, True)])  # Qwen3 and 3.5
@pytest.mark.parametrize(
    ("part_count", "rows", "head_dim", "pairs"),
    [(1, 5, 32, 16), (3, 5, 32, 4), (1, 3, 256, 32), (2, 1, 16, 8)],
)
def test_rotate_heads_is_its_definition(part_count, rows, head_dim, pairs, gated, centred, dtype):
    slots, queries, keys = 2, 3, 2
    columns = (queries * (1 + gated) + 2 * keys) * head_dim
    parts = normal(
        0, part_count, slots, rows, columns, dtype=dtype if part_count == 1 else jnp.float32
    )
    scales = [normal(seed, head_dim, dtype=dtype) for seed in (1, 2)]
    tables = [normal(seed, slots, rows, pairs, dtype=dtype) for seed in (3, 4)]
    options = {"num_kv_heads": keys, "eps": 1e-6, "centred": centred, "gated": gated}
    ours, theirs = (
        jax.jit(functools.partial(rotate_heads, **options, implementation=implementation))(
            parts, *scales, *tables
        )
        for implementation in ("pallas", "xla")
    )
    assert len(jax.tree.leaves(ours)) == 3 + gated
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == dtype
        assert_near(one, wide(other), dtype)
        assert one.shape == other.shape
    np.testing.assert_array_equal(ours.value, theirs.value)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gated_heads_turn_in_part(dtype, implementation):
    """As the attention of Qwen3.5 writes it out."""
    queries, keys, head_dim, pairs = 4, 2, 32, 4
    parts = normal(0, 1, 2, 3, 2 * (queries + keys) * head_dim, dtype=dtype)
    scales = [normal(seed, head_dim, dtype=dtype) for seed in (1, 2)]
    angle = np.random.default_rng(3).uniform(0, 6, (2, 3, pairs))
    cos, sin = jnp.array(np.cos(angle), dtype), jnp.array(np.sin(angle), dtype)
    heads = rotate_heads(
        parts, *scales, cos, sin, num_kv_heads=keys, eps=1e-6, centred=True, gated=True,
        implementation=implementation,
    )  # fmt: skip
    total = wide(parts)[0].reshape(2, 3, -1, head_dim)
    query, gate, key, value = np.split(total, [queries, 2 * queries, -keys], axis=2)

    def turned(x, scale):
        x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6)
        x = x * (1 + wide(scale))
        pair = x[..., :pairs] + 1j * x[..., pairs : 2 * pairs]
        pair = pair * (wide(cos) + 1j * wide(sin))[:, :, None]
        return np.concatenate([pair.real, pair.imag, x[..., 2 * pairs :]], axis=-1)

    assert_near(heads.query, turned(query, scales[0]), dtype)
    assert_near(heads.key, turned(key, scales[1]), dtype)
    assert_near(heads.value, value, dtype)
    assert_near(heads.gate, 1 / (1 + np.exp(-gate)), dtype)


def test_arguments_of_rotate_heads_are_named():
    def call(heads=8, pairs=8, **settings):
        parts, scales = normal(0, 1, 1, 2, heads * 16), (normal(1, 16), normal(2, 16))
        tables = normal(3, 1, 2, pairs), normal(4, 1, 2, pairs)
        return rotate_heads(parts, *scales, *tables, num_kv_heads=2, eps=1e-6, **settings)

    with pytest.raises(ValueError, match="`num_kv_heads` must leave queries among 4 heads, got 2"):
        call(heads=4)
    with pytest.raises(ValueError, match="`parts` must have as many gate as query heads, got 7"):
        call(heads=7, gated=True)
    with pytest.raises(ValueError, match=r"`cos` must be .* 1 to 8 pairs .* got \(1, 2, 9\)"):
        call(pairs=9)
    with pytest.raises(NotImplementedError, match="power of two, at least 1 of H=16, got 3"):
        call(pairs=3, implementation="pallas")


def test_wrong_shapes_are_named():
    # What the annotations catch in tests, a user meets as these errors.
    x = normal(0, 1, 2, 32)
    with pytest.raises(ValueError, match="`kernel` must be .I, O. to fit x"):
        check_product("kernel", x, normal(1, 16, 32))
    with pytest.raises(ValueError, match="`gate_up` must be bfloat16"):
        check_product("gate_up", x.astype(jnp.bfloat16), normal(1, 32, 64))
    with pytest.raises(ValueError, match="`gate_up` must have an even number"):
        gated_matmul(x, normal(1, 32, 33))
    with pytest.raises(NotImplementedError, match="multiple of 16"):
        skinny_matmul(normal(0, 1, 2, 40), normal(1, 40, 32), implementation="pallas")


def test_a_gpu_takes_the_kernel_for_few_rows_only():
    import aot

    def lowered(rows):
        arguments = [
            aot.argument((1, rows, 256), jnp.bfloat16),
            aot.argument((256, 256), jnp.bfloat16),
        ]
        return aot.lower(skinny_matmul, *arguments).as_text()

    assert "triton" in lowered(64)
    assert "triton" not in lowered(512)
    assert jax.default_backend() == "cpu"
