"""Text of sampled tokens, and stop strings in it."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders put for the first bytes of a character whose rest is still to come."""


class StopFinder:
    """Finds stop strings in decoded tokens."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]):
        self.tokenizer, self.stop = tokenizer, stop

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the text holds a stop string."""
        text = self._decode(tokens)
        return any(stop in text for stop in self.stop)

    def text(self, tokens: Sequence[int], stop_ids: Sequence[int] = ()) -> str:
        """The text up to the first stop string, without a final stop id or a cut character."""
        tokens = list(tokens)
        if tokens and tokens[-1] in stop_ids:
            tokens.pop()
        text = self._decode(tokens)
        ends = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _decode(self, tokens: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(tokens))
        # At most three bytes of a character can be waiting for the last one.
        for _ in range(3):
            if text.endswith(REPLACEMENT):
                text = text[:-1]
        return text
