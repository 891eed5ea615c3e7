"""The expert product and its gradients: right, and in bits a function of a row and its group."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.backend import INTERPRET, XLA
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_matmul import grouped_matmul, pallas_tpu, plan_groups, xla
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_matmul.shapes import OP
from pallas_kernels.pinned_matmul import Order
from tests.pallas_kernels.op_suite import OpSuite

TILE, K, N, E = 8, 24, 12, 5
COUNTS = {
    "even": (8, 8, 8, 8, 8),
    "off the tile": (3, 9, 17, 1, 10),
    "empty groups": (0, 13, 0, 27, 0),
    "one group takes all": (0, 0, 40, 0, 0),
    "the last takes all": (0, 0, 0, 0, 40),
    "one row": (0, 0, 0, 1, 0),
    "no row": (0, 0, 0, 0, 0),
}
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}


class TestGroupedMatmul(OpSuite):
    op = OP


@functools.partial(jax.jit, static_argnames=("tile", "product", "backend"))
def run(x_MK, w_EKN, counts_E, dy_MN, tile=TILE, product=xla.product, backend=XLA):
    """Product, dx and dw."""
    plan = plan_groups(counts_E, x_MK.shape[0] - tile, tile)
    y_MN, back = jax.vjp(
        lambda x, w: grouped_matmul(x, w, plan, tile, product, implementation=backend), x_MK, w_EKN
    )
    return y_MN, *back(dy_MN)


def make(rng, counts, dtype="float32", *, spare=0.0, tile=TILE):
    """Rows, matrices, counts and cotangents; the spare rows of both hold `spare`."""
    n_rows = sum(counts)

    def rows(width):
        values = np.full((n_rows + tile, width), spare, np.float32)
        values[:n_rows] = rng.standard_normal((n_rows, width))
        return jnp.asarray(values, dtype)

    w_EKN = jnp.asarray(rng.standard_normal((len(counts), K, N)), dtype)
    return rows(K), w_EKN, jnp.asarray(counts, jnp.int32), rows(N)


def exact(x_MK, w_EKN, counts_E, dy_MN):
    """Product, dx and dw in f64, without spare rows."""
    n_rows, counts = int(np.sum(counts_E)), np.asarray(counts_E)
    x, w, dy = (np.asarray(a, np.float64) for a in (x_MK[:n_rows], w_EKN, dy_MN[:n_rows]))
    dw = np.zeros(w.shape)
    for group, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        dw[group] = x[end - count : end].T @ dy[end - count : end]
    y = grouped_matmul_reference(x, w, counts)
    dx = grouped_matmul_reference(dy, w.swapaxes(1, 2), counts)
    return y, dx, dw


def assert_bits_equal(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    np.testing.assert_array_equal(
        np.ascontiguousarray(a).view(unsigned), np.ascontiguousarray(b).view(unsigned)
    )


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", COUNTS)
def test_product_and_gradients_are_within_rounding_of_f64(name, dtype, rng):
    arrays = make(rng, COUNTS[name], dtype)
    n_rows = sum(COUNTS[name])
    magnitude = exact(*(jnp.abs(a) for a in arrays))
    got = run(*arrays)
    for value, right, size, terms in zip(
        (got[0][:n_rows], got[1][:n_rows], got[2]),
        exact(*arrays),
        magnitude,
        (K, N, max(n_rows, 1)),
        strict=True,
    ):
        assert value.dtype == dtype
        # f32 sums of `terms` products (twice over for their order), then one rounding.
        bound = 2 * terms * 2.0**-24 * size + ROUNDING[dtype] * np.abs(right)
        assert (np.abs(np.asarray(value, np.float64) - right) <= bound).all()


def test_the_given_arithmetic_makes_the_product_and_dx_tile_by_tile(rng):
    arrays, n_rows = make(rng, COUNTS["off the tile"]), sum(COUNTS["off the tile"])
    shapes = set()

    def doubled(x_RK, w_KN):
        shapes.add((x_RK.shape, w_KN.shape))
        return 2 * xla.product(x_RK, w_KN)

    (y, dx, dw), (y2, dx2, dw2) = run(*arrays), run(*arrays, product=doubled)
    assert shapes == {((TILE, K), (K, N)), ((TILE, N), (N, K))}
    assert_bits_equal(2 * y[:n_rows], y2[:n_rows])
    assert_bits_equal(2 * dx[:n_rows], dx2[:n_rows])
    assert_bits_equal(dw, dw2)  # the weight gradient has an order of its own


def test_the_arithmetic_is_in_f32_until_the_one_rounding(rng):
    arrays = make(rng, COUNTS["even"], "bfloat16")
    n_rows = sum(COUNTS["even"])

    def shifted(x_RK, w_KN):
        return xla.product(x_RK, w_KN) + 2.0**-12  # lost if the product came rounded

    wide = np.asarray(exact(*arrays)[0]) + 2.0**-12
    y_MN = np.asarray(run(*arrays, product=shifted)[0][:n_rows], np.float64)
    assert (np.abs(y_MN - wide) <= ROUNDING["bfloat16"] * np.abs(wide) + 1e-4).all()
    small = np.abs(wide) < 0.05
    assert (y_MN[small] != np.asarray(run(*arrays)[0][:n_rows], np.float64)[small]).any()


def test_jit_changes_nothing_but_rounding(rng):
    x_MK, w_EKN, counts_E, _ = make(rng, COUNTS["off the tile"])
    y_MN, *_ = run(x_MK, w_EKN, counts_E, jnp.zeros((x_MK.shape[0], N)))
    plan = plan_groups(counts_E, x_MK.shape[0] - TILE, TILE)
    np.testing.assert_allclose(grouped_matmul(x_MK, w_EKN, plan, TILE), y_MN, atol=1e-5)


@pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)
@pytest.mark.parametrize("name", ["empty groups", "one group takes all", "no row"])
def test_the_weight_gradient_of_a_group_without_rows_is_plus_zero(backend, name, rng):
    # Spare cotangents are negative: a product with a zeroed row would leave -0.
    *_, dw_EKN = run(*make(rng, COUNTS[name], spare=-1.0), backend=backend)
    empty = np.asarray(COUNTS[name]) == 0
    assert empty.any()
    assert not np.asarray(dw_EKN)[empty].view(np.uint32).any()


@pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("spare", [np.nan, np.inf])
def test_spare_rows_may_hold_anything(backend, spare, dtype, rng):
    counts = COUNTS["off the tile"]
    x_MK, w_EKN, counts_E, dy_MN = make(rng, counts, dtype)
    n_rows = sum(counts)
    clean = run(x_MK, w_EKN, counts_E, dy_MN, backend=backend)
    dirty = run(
        x_MK.at[n_rows:].set(spare), w_EKN, counts_E, dy_MN.at[n_rows:].set(spare), backend=backend
    )
    for a, b in zip(clean, dirty, strict=True):
        assert_bits_equal(a[:n_rows], b[:n_rows])


@pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_nan_in_one_group_stays_there(backend, dtype, rng):
    counts = COUNTS["off the tile"]
    x_MK, w_EKN, counts_E, dy_MN = make(rng, counts, dtype)
    clean = run(x_MK, w_EKN, counts_E, dy_MN, backend=backend)
    group, n_rows = 1, sum(counts)
    mine = np.repeat(np.arange(E), counts) == group
    rows = np.flatnonzero(mine)
    dirty = run(
        x_MK.at[rows].set(np.nan),
        w_EKN.at[group].set(np.nan),
        counts_E,
        dy_MN.at[rows].set(np.nan),
        backend=backend,
    )
    for a, b, others in zip(clean, dirty, (~mine, ~mine, np.arange(E) != group), strict=True):
        assert_bits_equal(np.asarray(a)[:n_rows][others], np.asarray(b)[:n_rows][others])
        assert np.isnan(np.asarray(b[:n_rows], np.float32)[~others]).all()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("backend", "tile"), [(XLA, 8), (XLA, 128), (INTERPRET, 8)], ids=("xla-8", "xla-128", "tpu-8")
)
def test_a_row_has_the_same_bits_alone_and_anywhere_in_its_group(backend, tile, dtype, rng):
    x_MK, w_EKN, _, dy_MN = make(rng, (0, 0, 1, 0, 0), dtype, tile=tile)
    y_alone, dx_alone, _ = run(
        x_MK, w_EKN, jnp.asarray((0, 0, 1, 0, 0)), dy_MN, tile, backend=backend
    )
    for counts, place in (
        ((0, 0, 40, 0, 0), 0),
        ((0, 0, 40, 0, 0), 39),
        ((5, 11, 20, 3, 1), 23),
        ((1, 0, 9, 0, 30), 9),
        ((13, 26, 1, 0, 0), 39),
    ):
        others_MK, _, counts_E, others_MN = make(rng, counts, dtype, tile=tile)
        y_MN, dx_MK, _ = run(
            others_MK.at[place].set(x_MK[0]),
            w_EKN,
            counts_E,
            others_MN.at[place].set(dy_MN[0]),
            tile,
            backend=backend,
        )
        assert_bits_equal(y_MN[place], y_alone[0])
        assert_bits_equal(dx_MK[place], dx_alone[0])


@pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)
def test_the_order_of_groups_does_not_matter(backend, rng):
    counts = COUNTS["off the tile"]
    x_MK, w_EKN, counts_E, dy_MN = make(rng, counts)
    y_MN, dx_MK, dw_EKN = run(x_MK, w_EKN, counts_E, dy_MN, backend=backend)
    order = np.asarray([3, 0, 4, 2, 1])
    group_M = np.repeat(np.arange(E), counts)
    rows = np.concatenate([np.flatnonzero(group_M == group) for group in order])
    spare = np.arange(len(rows), len(rows) + TILE)
    placed = np.concatenate([rows, spare])
    y2_MN, dx2_MK, dw2_EKN = run(
        x_MK[placed], w_EKN[order], counts_E[order], dy_MN[placed], backend=backend
    )
    assert_bits_equal(y2_MN[: len(rows)], y_MN[rows])
    assert_bits_equal(dx2_MK[: len(rows)], dx_MK[rows])
    assert_bits_equal(dw2_EKN, dw_EKN[order])


@pytest.mark.parametrize("tile", [1, 3, 8, 64])
def test_a_plan_covers_every_row_once_and_in_order(tile):
    for counts in COUNTS.values():
        plan = plan_groups(jnp.asarray(counts, jnp.int32), sum(counts), tile)
        plan = type(plan)(*map(np.asarray, plan))
        covered = []
        for i in range(int(plan.n_tiles)):
            start, end = int(plan.start_of_tile[i]), int(plan.end_of_tile[i])
            covered += [
                (int(plan.group_of_tile[i]), row) for row in range(start, min(start + tile, end))
            ]
        assert covered == list(
            zip(np.repeat(np.arange(E), counts), range(sum(counts)), strict=True)
        )
        assert int(plan.n_tiles) == sum(-(-count // tile) for count in counts)


@pytest.fixture
def without_shape_checks():
    """What a user gets who does not run the tests: our own error, not that of the annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize(
    ("x_shape", "w_shape", "w_dtype", "error", "text"),
    [
        ((9, K), (E, K, N), "bfloat16", TypeError, "x is float32, w is bfloat16; cast one"),
        ((9, K), (E, K + 1, N), "float32", ValueError, r"x \(9, 24\) does not fit w \(5, 25, 12\)"),
        ((9, K, 1), (E, K, N), "float32", ValueError, r"x \(9, 24, 1\) does not fit"),
        ((9, K), (K, N), "float32", ValueError, r"does not fit w \(24, 12\)"),
        ((7, K), (E, K, N), "float32", ValueError, "x has 7 rows, fewer than the spare tile of 8"),
    ],
)
def test_refusals(x_shape, w_shape, w_dtype, error, text):
    plan = plan_groups(jnp.zeros(E, jnp.int32), 1, TILE)
    with pytest.raises(error, match=text):
        grouped_matmul(jnp.zeros(x_shape), jnp.zeros(w_shape, w_dtype), plan, TILE)


def test_tiles_over_vmem_are_refused():
    plan = plan_groups(jnp.zeros(E, int), 8, TILE)
    tiles = pallas_tpu.Tiles((128,), 2048, 8, 4, 2048)
    x, w = jnp.zeros((256, 4096)), jnp.zeros((E, 4096, 2048))
    with pytest.raises(KernelError, match="over vmem_mib 4; nearest is leaves_a_step 4"):
        pallas_tpu.forward(x, w, plan, "nn", Order(), True, tiles)
    with pytest.raises(KernelError, match="over vmem_mib 4; nearest is gradient_tile 1024"):
        pallas_tpu.weight_gradient(x, x[:, :2048], w, plan, TILE, True, tiles)
    with pytest.raises(KernelError, match="gradient_tile 100: must be a multiple of 128"):
        pallas_tpu.Tiles((128,), 2048, 8, 4, 100)


@pytest.mark.parametrize("row_tile", [16, 48])
def test_visits_cover_every_row_of_every_group_once(row_tile):
    for counts in COUNTS.values():
        n_rows, counts_E = sum(counts), jnp.asarray(counts, jnp.int32)
        group_v, tile_v, n, start_E, end_E = map(
            np.asarray, pallas_tpu.plan_visits(counts_E, n_rows + TILE, row_tile)
        )
        visits = list(zip(group_v[: n[0]], tile_v[: n[0]], strict=True))
        assert len(set(visits)) == len(visits) and (np.diff(tile_v) >= 0).all()
        rows = [
            (g, r)
            for g, t in visits
            for r in range(t * row_tile, (t + 1) * row_tile)
            if start_E[g] <= r < end_E[g]
        ]
        group_M = np.repeat(np.arange(E), counts)
        assert sorted(rows) == list(zip(group_M, range(n_rows), strict=True))


@pytest.mark.parametrize("backend", [XLA, INTERPRET], ids=str)
def test_groups_among_more_matrices_give_the_bits_of_their_own(backend, rng):
    x_MK, w_EKN, counts_E, dy_MN = make(rng, COUNTS["empty groups"])
    stack = jnp.concatenate([jnp.full_like(w_EKN, np.nan), w_EKN, jnp.full_like(w_EKN, np.nan)])

    @jax.jit
    def apart(first):
        plan = plan_groups(counts_E, 40, TILE).among(first)

        def multiply(x, w):
            return grouped_matmul(x, w, plan, TILE, implementation=backend)

        y, back = jax.vjp(multiply, x_MK, stack)
        return y, *back(dy_MN)

    y, dx, dw = apart(jnp.int32(E))
    own = run(x_MK, w_EKN, counts_E, dy_MN, backend=backend)
    assert_bits_equal(y[:40], own[0][:40])
    assert_bits_equal(dx[:40], own[1][:40])
    assert_bits_equal(dw[E : 2 * E], own[2])
    assert not np.asarray(dw[:E]).any() and not np.asarray(dw[2 * E :]).any()
