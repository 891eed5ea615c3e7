"""What is claimed of every operation, part, shape and backend. A test file subclasses `OpSuite`.

Backends are the XLA twin and, where there is one, the TPU kernel in interpret mode. Equality is of
bits; each claim of equality has a control that shows it could fail.
"""

import jax
import numpy as np
import pytest

from pallas_kernels.backend import INTERPRET, TPU, XLA, Backend
from pallas_kernels.cases import Case, Op, Part
from pallas_kernels.errors import KernelError

ROWS = (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 64, 100, 128, 257)
FEW_ROWS = (2, 17, 64)


def bits(tree) -> list[np.ndarray]:
    """The bits of each array, as unsigned integers."""
    leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [leaf.view(f"u{leaf.dtype.itemsize}") for leaf in leaves]


def n_unequal(a, b) -> int:
    """How many elements of two results differ in bits; shapes and dtypes must agree."""
    pairs = list(zip(bits(a), bits(b), strict=True))
    assert all(x.shape == y.shape and x.dtype == y.dtype for x, y in pairs)
    return sum(int((x != y).sum()) for x, y in pairs)


def row(tree, i: int):
    """One row of each result."""
    return [np.asarray(leaf)[i : i + 1] for leaf in jax.tree.leaves(tree)]


class OpSuite:
    """Claims; `op` is set by the subclass. Parametrised in conftest.py."""

    op: Op
    rows: tuple[int, ...] = ROWS
    """Of the default suite; what takes long to compile has fewer, and the rest when slow."""

    def run(self, part: Part, case: Case, backend: Backend, arrays):
        return jax.jit(part.run(case, backend))(*arrays)

    def test_twin_is_within_its_bound_of_f64(self, part, case, rng):
        arrays = part.arrays(case, rng)
        got = jax.tree.leaves(self.run(part, case, XLA, arrays))
        wide = [np.asarray(a, np.float64) if a.dtype.kind not in "iub" else a for a in arrays]
        right = part.reference(case, *wide)
        for value, (expected, bound) in zip(got, right, strict=True):
            assert value.shape == expected.shape
            found = np.asarray(value, np.float64)
            same = found == expected  # infinities have no difference
            off = np.abs(np.where(same, 0.0, found) - np.where(same, 0.0, expected))
            assert (off <= bound).all()

    def test_kernel_in_interpret_mode_has_the_bits_of_the_twin(self, part, case, rng):
        if "tpu" not in part.kinds:
            with pytest.raises(KernelError, match=f"{self.op.name}: .*no tpu kernel"):
                part.run(case, TPU)(*part.arrays(case, rng))
            return
        arrays = part.arrays(case, rng)
        twin = self.run(part, case, XLA, arrays)
        assert n_unequal(self.run(part, case, INTERPRET, arrays), twin) == 0

    def test_twice_gives_the_same_bits(self, part, rows_case, backend, rng):
        case = rows_case.replace(**{part.row_letter: 17})
        if backend.kind not in part.kinds:
            return  # its refusal is tested with the kernel
        arrays = part.arrays(case, rng)
        f = jax.jit(part.run(case, backend))
        assert n_unequal(f(*arrays), f(*arrays)) == 0

    def test_another_order_has_other_bits(self, part, rows_case, rng):
        case = rows_case.replace(**{part.row_letter: 300})
        arrays = part.arrays(case, rng)
        other = jax.jit(part.mutation(case))(*arrays)
        assert n_unequal(self.run(part, case, XLA, arrays), other) > 0

    def test_a_row_has_the_bits_it_has_alone(self, part, rows_case, backend, rng):
        self.check_rows(part, rows_case, backend, self.rows, rng)

    @pytest.mark.slow
    def test_a_row_has_the_bits_it_has_alone_among_any_number(self, part, rows_case, backend, rng):
        rest = [n for n in ROWS if n not in self.rows]
        self.check_rows(part, rows_case, backend, rest, rng)

    def check_rows(self, part, case, backend, sizes, rng):
        """A probe row first, in the middle and last among NaNs and among other numbers."""
        if not part.by_row or backend.kind not in part.kinds:
            return
        letter = part.row_letter
        probe = part.arrays(case.replace(**{letter: 1}), rng)
        alone = row(self.run(part, case.replace(**{letter: 1}), backend, probe), 0)
        for size in sizes:
            many = case.replace(**{letter: size})
            f = jax.jit(part.run(many, backend))
            others = part.arrays(many, rng)
            for place in {0, size // 2, size - 1}:
                arrays = [np.array(a) for a in probe]
                for i in part.by_row:
                    arrays[i] = np.array(others[i])
                    if place and arrays[i].dtype.kind not in "iub":
                        arrays[i][:] = np.nan
                    arrays[i][place] = probe[i][0]
                assert n_unequal(row(f(*arrays), place), alone) == 0, (size, place)
