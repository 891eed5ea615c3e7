"""Sums in a fixed balanced binary tree."""

from collections.abc import Sequence

from jaxtyping import Array


def tree_sum(leaves: Sequence[Array]) -> Array:
    """Adds neighbours pairwise until one is left; an odd one out passes up unchanged.

    For a power of two of leaves this is the balanced tree; a leaf of exact zeros does not change
    the bits of its siblings' sum, so a short list equals the same list padded with zeros.
    """
    if not leaves:
        raise ValueError("tree_sum: no leaves")
    level = list(leaves)
    while len(level) > 1:
        level = [
            level[i] + level[i + 1] if i + 1 < len(level) else level[i]
            for i in range(0, len(level), 2)
        ]
    return level[0]
