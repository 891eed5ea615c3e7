"""The tree that sums are taken in; it lives with the kernels, which use it too."""

from pallas_kernels.tree import tree_sum

__all__ = ["tree_sum"]
