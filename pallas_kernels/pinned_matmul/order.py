"""The constants that the bits of a product depend on."""

import dataclasses
from typing import Literal

from pallas_kernels.errors import KernelError

Layout = Literal["nn", "nt", "tn"]
"""Which axes are contracted: `nn` a[m,k] b[k,n]; `nt` a[m,k] b[n,k]; `tn` a[k,m] b[k,n]."""

AXES: dict[Layout, tuple[int, int]] = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}
"""Contracted axis of each operand."""


@dataclasses.dataclass(frozen=True)
class Order:
    """How a product is cut. Defaults are those of the numerics contract."""

    k_leaf: int = 256
    """A contraction is cut in leaves of this width, added in a balanced binary tree in f32."""
    column_block: int = 128
    """f32 products of fewer than `block_below` rows are computed in blocks of this width."""
    block_below: int = 64
    column_pad: int = 64
    """Columns are padded with zeros to a multiple of this."""
    row_leaf: int = 128
    """Leaf of the contraction over rows that makes the weight gradient."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise KernelError(f"pinned_matmul: {field.name} {value}: must be positive")
