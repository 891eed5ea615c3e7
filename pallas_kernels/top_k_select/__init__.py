"""Exact top-k selection under a total order."""

from pallas_kernels.top_k_select.op import top_k_select
from pallas_kernels.top_k_select.xla import mask_to_ids, order_key, select_mask

__all__ = ["mask_to_ids", "order_key", "select_mask", "top_k_select"]
