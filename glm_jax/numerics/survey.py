"""The survey of operations: which ones change a row's bits with the number of rows, and the price.

Each operation is computed for the first M rows of the same data, for many M, and compared bit by
bit with the first M rows of a large batch. Stock operations get exactly M rows; pinned ones get the
bucket of M, filled up with the rows that follow, as the forward does.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.bench.timing import clocked, interleaved, median_cpu_s
from glm_jax.errors import GlmError
from glm_jax.numerics.arithmetic import Arithmetic
from glm_jax.numerics.contract import NumericsContract
from glm_jax.numerics.survey_operations import Operation, operations

ROW_COUNTS = (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 64, 100, 128, 257)
REFERENCE_ROWS = 1024
PRICED = (8, 1024)
"""Row counts at which the price is taken: a decode step, and a prompt."""
REPEATS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changes:
    """Elements whose bits differ from those in the reference batch."""

    by_rows: dict[int, int]
    """Unequal elements by number of rows."""
    compared: int
    """Elements compared over all numbers of rows."""

    @property
    def unequal(self) -> int:
        """Over all numbers of rows."""
        return sum(self.by_rows.values())

    @property
    def at(self) -> list[int]:
        """Numbers of rows at which anything differs."""
        return [m for m, n in self.by_rows.items() if n]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """What was found of one operation."""

    name: str
    dtype: str
    stock: Changes
    pinned: Changes
    price: dict[int, float]
    """Pinned over stock in CPU seconds, by number of rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """All operations."""

    lines: tuple[Line, ...]
    contract: NumericsContract
    reference_rows: int

    @property
    def ok(self) -> bool:
        """Nothing pinned changes, and something stock does: else nothing was proved."""
        return not any(x.pinned.unequal for x in self.lines) and any(
            x.stock.unequal for x in self.lines
        )

    def to_json(self) -> dict[str, Any]:
        """JSON with stable keys."""
        return {
            "ok": self.ok,
            "contract_digest": self.contract.digest,
            "device_kind": self.contract.device_kind,
            "jax": self.contract.jax,
            "reference_rows": self.reference_rows,
            "operations": [_line_json(line) for line in self.lines],
        }


def _line_json(line: Line) -> dict[str, Any]:
    def changes(x: Changes) -> dict[str, Any]:
        rows = {str(m): n for m, n in x.by_rows.items()}
        return {"unequal": x.unequal, "compared": x.compared, "unequal_by_rows": rows}

    return {
        "name": line.name,
        "dtype": line.dtype,
        "stock": changes(line.stock),
        "pinned": changes(line.pinned),
        "price": {str(m): round(x, 3) for m, x in line.price.items()},
    }


def survey(
    dtypes: Iterable[str] = ("float32", "bfloat16"),
    *,
    contract: NumericsContract | None = None,
    row_counts: Iterable[int] = ROW_COUNTS,
    reference_rows: int = REFERENCE_ROWS,
    priced: Iterable[int] = PRICED,
    select: Callable[[str], bool] = lambda name: True,
    progress: Callable[[str], None] = lambda text: None,
) -> Survey:
    """Surveys the operations of the `small` config.

    Args:
        dtypes: of weights and activations.
        contract: the numerics of the pinned forms (default: pinned).
        row_counts: numbers of rows to compare.
        reference_rows: rows of the batch they are compared with.
        priced: numbers of rows to time.
        select: which operations, by name.
        progress: called with what is being done.

    Raises:
        GlmError: a number of rows that does not fit, or no operation.
    """
    contract, row_counts = contract or NumericsContract(), tuple(row_counts)
    ops, lines = Arithmetic(contract), []
    for m in row_counts:
        if not 1 <= m <= ops.bucket(m) <= reference_rows or ops.bucket(reference_rows) != (
            reference_rows
        ):
            raise GlmError(
                f"row_counts: {m} rows fill a bucket of {ops.bucket(m)}, the reference has "
                f"{reference_rows} rows; use fewer rows, and a reference of whole tiles"
            )
    for dtype in dtypes:
        for operation in operations(dtype, reference_rows):
            if select(operation.name):
                progress(f"{dtype}: {operation.name}")
                lines.append(_examine(operation, dtype, ops, row_counts, reference_rows, priced))
    if not lines:
        raise GlmError("select: no operation of that name")
    return Survey(lines=tuple(lines), contract=contract, reference_rows=reference_rows)


def _examine(
    operation: Operation,
    dtype: str,
    ops: Arithmetic,
    row_counts: tuple[int, ...],
    reference_rows: int,
    priced: Iterable[int],
) -> Line:
    stock = jax.jit(operation.stock)
    pinned = jax.jit(operation.pinned, static_argnums=0)

    def run_stock(m):
        return stock(operation.shared, *(x[:m] for x in operation.rows))

    def run_pinned(m):
        rows = (x[: ops.bucket(m)] for x in operation.rows)
        return pinned(ops, jnp.int32(m), operation.shared, *rows)

    return Line(
        name=operation.name,
        dtype=dtype,
        stock=_compare(run_stock, row_counts, reference_rows),
        pinned=_compare(run_pinned, row_counts, reference_rows),
        price={m: _price(operation, stock, pinned, ops, m) for m in priced},
    )


def _compare(run: Callable[[int], Any], row_counts: tuple[int, ...], reference: int) -> Changes:
    whole = [_bits(x) for x in jax.tree.leaves(run(reference))]
    by_rows, compared = {}, 0
    for m in row_counts:
        part = [_bits(x) for x in jax.tree.leaves(run(m))]
        pairs = [(a[:m], b[:m]) for a, b in zip(part, whole, strict=True)]
        by_rows[m] = sum(int(np.sum(a != b)) for a, b in pairs)
        compared += sum(a.size for a, _ in pairs)
    return Changes(by_rows=by_rows, compared=compared)


def _bits(x: jax.Array) -> np.ndarray:
    """As integers: NaN equals itself, and -0 differs from +0."""
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


def _price(operation: Operation, stock: Any, pinned: Any, ops: Arithmetic, m: int) -> float:
    """Ratio of the medians of interleaved runs; the arrays are cut before the clock starts."""
    exact = [x[:m] for x in operation.rows]
    filled, n_used = [x[: ops.bucket(m)] for x in operation.rows], jnp.int32(m)
    calls = 20 if m <= 64 else 2

    def repeated(run):
        return clocked(lambda: [run() for _ in range(calls)])

    tasks = {
        "stock": repeated(lambda: stock(operation.shared, *exact)),
        "pinned": repeated(lambda: pinned(ops, n_used, operation.shared, *filled)),
    }
    samples = interleaved(tasks, REPEATS, warm_up=2)
    return median_cpu_s(samples["pinned"]) / median_cpu_s(samples["stock"])
