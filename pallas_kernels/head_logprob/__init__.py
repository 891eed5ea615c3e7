"""Log-probabilities of target ids and the most likely ids, without logits of the vocabulary."""

from pallas_kernels.head_logprob.op import Scores, head_logprob

__all__ = ["Scores", "head_logprob"]
