"""Exact top-k selection under a total order."""

from pallas_kernels.top_k_select.op import mask_to_ids, order_key, select_mask

__all__ = ["mask_to_ids", "order_key", "select_mask"]
