"""Attention of each token over its own list of latent keys."""

from pallas_kernels.sparse_attention.op import sparse_attention

__all__ = ["sparse_attention"]
