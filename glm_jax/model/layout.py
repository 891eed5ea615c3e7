"""Which layers repeat, so that each kind is traced once and scanned."""

from typing import NamedTuple

LayerKind = tuple[str, str]
"""(`dense` | `sparse`, `full` | `shared`): the layer's feed-forward and its indexer."""


class SegmentLayout(NamedTuple):
    """`repeats` copies of a short pattern of layer kinds, one after the other."""

    pattern: tuple[LayerKind, ...]
    repeats: int
    first_layer: int

    @property
    def n_layers(self) -> int:
        """Layers in the segment."""
        return len(self.pattern) * self.repeats

    def layer(self, repeat: int, position: int) -> int:
        """Number of the model layer at `position` of the given repeat."""
        return self.first_layer + repeat * len(self.pattern) + position


def segments(kinds: tuple[LayerKind, ...]) -> tuple[SegmentLayout, ...]:
    """Cuts the layers into repeated patterns with the fewest traced layer bodies.

    GLM-5.2's 78 layers become (dense, full) x 3, (sparse, shared) x 3 and
    (sparse full, sparse shared x 3) x 18: six bodies.
    """
    n = len(kinds)
    # best[i]: (bodies, number of segments, cut) for layers i..n-1, by dynamic programming.
    best: list[tuple[int, int, tuple[SegmentLayout, ...]]] = [(0, 0, ())] * (n + 1)
    for i in reversed(range(n)):
        options = []
        for period in range(1, n - i + 1):
            pattern, repeats, end = kinds[i : i + period], 0, i
            while kinds[end : end + period] == pattern:
                repeats, end = repeats + 1, end + period
                bodies, count, rest = best[end]
                segment = SegmentLayout(pattern, repeats, i)
                options.append((bodies + period, count + 1, (segment, *rest)))
        best[i] = min(options, key=lambda option: option[:2])
    return best[0][2]
