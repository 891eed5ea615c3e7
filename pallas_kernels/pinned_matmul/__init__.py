"""A product whose contraction is cut in leaves that a tree adds."""

from pallas_kernels.pinned_matmul.op import pinned_matmul
from pallas_kernels.pinned_matmul.order import Order

__all__ = ["Order", "pinned_matmul"]
