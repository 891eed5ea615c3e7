"""Pinned arithmetic: the bits of a row depend on the row alone, and stock arithmetic's do not.

A probe row stands first, in the middle and last among M rows of other numbers; what it gives must
be, bit for bit, what it gives alone, for every size of row tile. Exponents are spread, so that
a sum in another order would show; that it would is asserted for each case.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from glm_jax.numerics.arithmetic import Arithmetic, dot, native, pinned_matmul
from glm_jax.numerics.contract import NumericsContract
from glm_jax.numerics.primitives import layer_norm, rms_norm, rms_scale
from pallas_kernels.tree import tree_sum

ROWS = (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 64, 100, 128, 257)
LADDER = NumericsContract()
CONTRACTS = [dataclasses.replace(LADDER, row_tiles=(tile,)) for tile in (2, 16, 64, 256)]
DTYPES = ("float32", "bfloat16")
MATMULS = [(32, 16), (176, 16), (256, 80), (256, 1024), (600, 48)]
"""[K, N]; 600 is more than two leaves."""


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation on rows."""

    region: Callable[..., jax.Array]
    """`region(ops, x, *weights)`."""
    row: tuple[int, ...]
    """Shape of a row. The last axis is summed over."""
    weights: tuple[tuple[int, ...], ...] = ()
    summed_axes: tuple[int, ...] = ()
    """The axis of each weight that is summed over."""
    permutes: bool = False
    """Whether the result has the summed axis too."""


def product(ops, x_RK, w_KN):
    return ops.product(x_RK, w_KN)


def matmul_by_head(ops, x_RNI, w_NIO):
    return ops.matmul_by_head(x_RNI, w_NIO)


def row_sum(ops, x_RK):
    return ops.row_sum(x_RK.astype(jnp.float32))


def rms(ops, x_RD, gain_D):
    return rms_norm(ops, x_RD, gain_D, 1e-5)


def layer(ops, x_RD, gain_D, bias_D):
    return layer_norm(ops, x_RD, gain_D, bias_D, 1e-6)


CASES = {f"matmul {k}x{n}": Case(product, (k,), ((k, n),), (0,)) for k, n in MATMULS}
CASES["by head 64x32"] = Case(matmul_by_head, (3, 64), ((3, 64, 32),), (1,))
CASES |= {f"row sum {k}": Case(row_sum, (k,)) for k in (32, 80, 256)}
CASES |= {f"rms norm {k}": Case(rms, (k,), ((k,),), (0,), True) for k in (48, 256)}
CASES |= {f"layer norm {k}": Case(layer, (k,), ((k,),) * 2, (0, 0), True) for k in (16, 128)}


def spread(rng, shape, dtype, exponents=12):
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-exponents, exponents + 1, shape)
    return values.astype(jnp.dtype(dtype))


def bits(x):
    x = np.asarray(x)
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def programs() -> dict[tuple[Arithmetic, int], list[int]]:
    """The numbers of rows that run in each program: an arithmetic and a padded number of rows."""
    found, seen = {}, {}
    for contract in (*CONTRACTS, LADDER):
        ops = Arithmetic(contract)
        for n_rows in (*ROWS, 1030) if contract is LADDER else ROWS:
            n_padded = ops.bucket(n_rows)
            # The ladder's programs are those of its tiles, so that most are there already.
            owner = seen.setdefault((ops.row_tile(n_padded), n_padded), ops)
            numbers = found.setdefault((owner, n_padded), [])
            if n_rows not in numbers:
                numbers.append(n_rows)
    assert {tile for tile, _ in seen} == set(LADDER.row_tiles)
    return found


PROGRAMS = programs()


@functools.partial(jax.jit, static_argnums=0)
def run(region, numbers, batches, *weights):
    """All programs at once, as compiling each by itself takes a minute."""
    outs = []
    for (ops, _), n_rows, x in zip(PROGRAMS, numbers, batches, strict=True):
        one = functools.partial(region, ops)
        outs.append(ops.rows(lambda x, one=one: one(x, *weights), n_rows, x))
    return outs


def places(n_rows: int) -> list[int]:
    """First, middle and last."""
    return sorted({0, n_rows // 2, n_rows - 1})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_row_gives_the_same_bits_alone_and_in_any_company(name, dtype, rng):
    case = CASES[name]
    probe, others = spread(rng, case.row, dtype), spread(rng, (2048, *case.row), dtype)
    weights = [spread(rng, shape, dtype) for shape in case.weights]
    alone, compared = None, 0
    for turn in range(max(map(len, PROGRAMS.values()))):
        numbers = [list_of[turn % len(list_of)] for list_of in PROGRAMS.values()]
        batches = [others[:n_padded].copy() for _, n_padded in PROGRAMS]
        for n_rows, x in zip(numbers, batches, strict=True):
            x[places(n_rows)] = probe
        outs = run(case.region, list(map(np.int32, numbers)), batches, *weights)
        if alone is None:
            assert numbers[0] == 1
            alone = bits(outs[0])[0]
        for (ops, n_padded), n_rows, out in zip(PROGRAMS, numbers, outs, strict=True):
            got = bits(out)[places(n_rows)]
            program = f"{n_rows} rows padded to {n_padded}, tiles {ops.contract.row_tiles}"
            np.testing.assert_array_equal(got, np.stack([alone] * len(got)), err_msg=program)
            compared += len(got)
    assert compared >= 3 * 3 * len(ROWS) - 3 * 3 and np.any(alone)


@functools.partial(jax.jit, static_argnums=0)
def apply(region, x, *weights):
    return region(Arithmetic(LADDER), x, *weights)


def reordered(case, order, x, weights):
    """The case's result with the terms of its sums in another order."""
    weights = [np.take(w, order, axis) for w, axis in zip(weights, case.summed_axes, strict=True)]
    out = np.asarray(apply(case.region, x[..., order], *weights))
    return out[..., np.argsort(order)] if case.permutes else out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_reordered_sum_would_differ(name, dtype, rng):
    case = CASES[name]
    x = spread(rng, (64, *case.row), dtype)
    weights = [spread(rng, shape, dtype) for shape in case.weights]
    expected = bits(reordered(case, np.arange(case.row[-1]), x, weights))
    orders = [rng.permutation(case.row[-1]) for _ in range(8)]
    differ = [(bits(reordered(case, order, x, weights)) != expected).any() for order in orders]
    # What is rounded to bf16 at the end hides the order of its f32 sums, or all but.
    rounded = dtype == "bfloat16" and case.region in (matmul_by_head, rms, layer)
    assert all(differ) or rounded


def test_a_stock_product_depends_on_the_number_of_rows(rng):
    @functools.partial(jax.jit, static_argnums=0)
    def multiply(ops, n_rows, x, w):
        return ops.rows(lambda x: ops.product(x, w), n_rows, x)

    def rows_that_differ(ops, x, w):
        """Rows of a product of 1 to 33 rows that are not those of the product of 256."""
        whole, count = bits(multiply(ops, np.int32(256), x, w)), 0
        for n_rows in (m for m in ROWS if m < 64):
            batch = x[: ops.bucket(n_rows)]
            got = bits(multiply(ops, np.int32(n_rows), batch, w))[:n_rows]
            count += (got != whole[:n_rows]).any(axis=1).sum()
        return count

    x, w = spread(rng, (256, 256), "float32", 2), spread(rng, (256, 80), "float32", 2)
    assert rows_that_differ(native(), x, w) > 0
    assert rows_that_differ(Arithmetic(LADDER), x, w) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_contraction_is_the_tree_of_its_leaves(dtype, rng):
    x, w = jnp.asarray(spread(rng, (8, 1100), dtype)), jnp.asarray(spread(rng, (1100, 64), dtype))
    leaves = [
        dot(x[:, k : k + LADDER.k_leaf], w[k : k + LADDER.k_leaf])
        for k in range(0, 1100, LADDER.k_leaf)
    ]
    got = bits(pinned_matmul(x, w, LADDER))
    np.testing.assert_array_equal(got, bits(tree_sum(leaves)))
    assert (got != bits(functools.reduce(jnp.add, leaves))).any()
    assert (got != bits(dot(x, w))).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contract", [LADDER, native().contract], ids=["pinned", "native"])
def test_products_are_within_rounding_of_f64(contract, dtype, rng):
    ops, tolerance = Arithmetic(contract), {"float32": 2e-6, "bfloat16": 5e-3}[dtype]

    def operands(*shapes):
        return [jnp.asarray(spread(rng, shape, dtype)) for shape in shapes]

    def check(got, spec, a, b):
        assert got.dtype == a.dtype
        a, b = (np.asarray(z, np.float64) for z in (a, b))
        size = np.einsum(spec, np.abs(a), np.abs(b))
        exact = np.einsum(spec, a, b)
        assert got.shape == exact.shape
        assert (np.abs(np.asarray(got, np.float64) - exact) <= tolerance * size).all()

    for k, n in MATMULS:
        x, w = operands((5, k), (k, n))
        check(ops.matmul(x, w), "rk,kn->rn", x, w)
    x, w = operands((5, 3, 20), (3, 20, 2, 7))
    check(ops.matmul(x, w), "rnk,nkgf->rgf", x, w)
    x, w = operands((5, 3, 20), (3, 20, 7))
    check(ops.matmul_by_head(x, w), "rni,nio->rno", x, w)
    x = jnp.asarray(spread(rng, (5, 70), "float32"))
    check(ops.row_sum(x), "rk,kw->rw", x, jnp.ones((70, 1)))


def test_a_product_is_rounded_once_to_what_is_asked_for(rng):
    ops = Arithmetic(LADDER)
    x, w = spread(rng, (8, 600), "bfloat16"), spread(rng, (600, 16), "bfloat16")
    wide = ops.matmul(x, w, out=jnp.float32)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(bits(wide), bits(ops.product(x, w)))
    rounded = np.asarray(wide).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits(ops.matmul(x, w)), rounded.view(np.uint16))


def test_operands_of_different_dtypes_are_an_error():
    ops = Arithmetic(LADDER)
    with pytest.raises(TypeError, match="matmul: operands are float32 and bfloat16; cast one"):
        ops.matmul(jnp.zeros((2, 4)), jnp.zeros((4, 3), jnp.bfloat16))
    with pytest.raises(TypeError, match="matmul_by_head: operands are float32 and bfloat16"):
        ops.matmul_by_head(jnp.zeros((2, 3, 4)), jnp.zeros((3, 4, 5), jnp.bfloat16))


def test_the_norm_before_rounding_is_f32(rng):
    ops, gain = Arithmetic(LADDER), jnp.ones(48, jnp.bfloat16)
    x = jnp.asarray(spread(rng, (4, 48), "bfloat16"))
    wide = rms_scale(ops, x, gain, 1e-5)
    assert wide.dtype == jnp.float32
    rounded = np.asarray(wide).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits(rms_norm(ops, x, gain, 1e-5)), rounded.view(np.uint16))


def best_tile(tiles, n_rows):
    """The largest that fits; up to 64 rows also the largest that is at least half full."""
    fitting = [tile for tile in tiles if tile <= n_rows or tile <= min(64, 2 * n_rows)]
    return max(fitting, default=tiles[0])


@pytest.mark.parametrize("tiles", [(8,), (64,), (8, 64, 256), LADDER.row_tiles])
def test_a_bucket_is_the_least_number_of_whole_tiles(tiles):
    ops = Arithmetic(NumericsContract(row_tiles=tiles))
    for n_rows in ROWS:
        n_padded, tile = ops.bucket(n_rows), best_tile(tiles, n_rows)
        assert n_padded % tile == 0 and n_rows <= n_padded < n_rows + tile
        assert n_padded % ops.row_tile(n_padded) == 0
    assert native().bucket(17) == 17


def test_tiles_without_a_used_row_are_not_run(rng):
    ops, x = Arithmetic(NumericsContract(row_tiles=(8,))), spread(rng, (32, 4), "float32")
    traced = []

    def double(part):
        traced.append(jax.tree.leaves(part)[0].shape)
        return {"twice": part["x"] * 2, "number": part["i"]}

    args = {"x": x, "i": jnp.arange(32, dtype=jnp.int32)}
    for n_rows in (0, 1, 8, 9, 32):
        out = jax.jit(lambda n, args: ops.rows(double, n, args))(jnp.asarray(n_rows), args)
        n_run = -(-n_rows // 8) * 8
        np.testing.assert_array_equal(out["twice"][:n_run], 2 * x[:n_run])
        np.testing.assert_array_equal(out["number"][:n_run], np.arange(n_run))
        assert not np.asarray(out["twice"][n_run:]).any()
        assert not np.asarray(out["number"][n_run:]).any()
    assert {shape[0] for shape in traced} == {8}


def test_native_regions_see_all_rows_at_once(rng):
    x, shapes = spread(rng, (13, 4), "float32"), []

    def region(x):
        shapes.append(x.shape)
        return x + 1

    np.testing.assert_array_equal(native().rows(region, jnp.asarray(3), x), x + 1)
    assert shapes == [(13, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_contract_chooses_the_kernel_and_its_bits_are_the_same(dtype, rng, monkeypatch):
    kernels = NumericsContract(kernels="pallas")
    x, w = jnp.asarray(spread(rng, (8, 600), dtype)), jnp.asarray(spread(rng, (600, 80), dtype))
    dy = jnp.asarray(spread(rng, (8, 80), dtype))
    twin, kernel = Arithmetic(LADDER), Arithmetic(kernels)
    np.testing.assert_array_equal(bits(kernel.matmul(x, w)), bits(twin.matmul(x, w)))
    monkeypatch.setattr("pallas_kernels.pinned_matmul.xla.contract", None)  # not called again
    assert jax.vjp(lambda x: kernel.matmul(x, w), x)[1](dy)[0].shape == x.shape
