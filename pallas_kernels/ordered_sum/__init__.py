"""The sum of stacked leaves in a fixed tree."""

from pallas_kernels.ordered_sum.op import ordered_sum

__all__ = ["ordered_sum"]
