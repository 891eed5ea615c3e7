"""Scores of the sparse indexer over paged keys."""

from pallas_kernels.indexer_scores.op import indexer_scores

__all__ = ["indexer_scores"]
