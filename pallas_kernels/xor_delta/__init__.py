"""Which bits of a weight changed."""

from pallas_kernels.xor_delta.op import BLOCK, xor_apply, xor_delta

__all__ = ["BLOCK", "xor_apply", "xor_delta"]
