"""The expert product: rows sorted by group, one weight matrix a group."""

from pallas_kernels.grouped_matmul.op import GroupPlan, grouped_matmul, plan_groups

__all__ = ["GroupPlan", "grouped_matmul", "plan_groups"]
