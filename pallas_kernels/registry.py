"""All operations, by name."""

from pallas_kernels.cases import Op
from pallas_kernels.pinned_matmul.shapes import OP as PINNED_MATMUL

OPS: dict[str, Op] = {op.name: op for op in (PINNED_MATMUL,)}
