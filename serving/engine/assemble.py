"""Host arrays of a step, padded to a size that a program exists for."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from glm_jax.batch import TokenBatch
from serving.engine.program import Draws, Mixed
from serving.engine.sample import Sample
from serving.engine.sampler import Rows
from serving.engine.scheduler import Span

STOP_IDS = 8
"""Room for stop ids; doubled where a request has more, so that few programs are compiled."""


def mixed(spans: Sequence[Span], n_rows: int, n_draws: int, vocab_size: int) -> Mixed:
    """The batch of some spans, one after the other, in `n_rows` rows."""
    ids, positions, slots, targets = (np.zeros(n_rows, np.int32) for _ in range(4))
    last: Any = np.zeros(n_draws, np.int32)
    drawing, at = [], 0
    for span in spans:
        sample, first, end = span
        rows = slice(at, at + end - first)
        ids[rows], positions[rows] = sample.known(first, end), np.arange(first, end)
        slots[rows] = sample.place
        following = sample.known(first + 1, min(end + 1, sample.n_known))
        targets[at : at + len(following)] = following
        at = rows.stop
        if span.draws:
            last[len(drawing)] = at - 1
            drawing.append(sample)
    valid = np.arange(n_rows) < at
    scores_prompt: Any = np.asarray(any(span.sample.scores_prompt for span in spans))
    targets_T: Any = targets
    state = draws(drawing, n_draws, vocab_size)
    batch = TokenBatch(*(jnp.asarray(x) for x in (ids, positions, slots, valid)), rows=1)
    return Mixed(batch, targets_T, scores_prompt, last, state)


def draws(samples: Sequence[Sample], n_rows: int, vocab_size: int) -> Draws:
    """State of the samples that draw; rows after them are padding."""

    def rows(dtype: Any, value: Callable[[Sample], Any], padding: Any = 0) -> Any:
        out = np.full(n_rows, padding, dtype)
        out[: len(samples)] = [value(sample) for sample in samples]
        return out

    n_stops = STOP_IDS
    while any(len(s.params.stop_ids) > n_stops for s in samples):
        n_stops *= 2
    stop_Rs: Any = np.full((n_rows, n_stops), -1, np.int32)
    for row, sample in enumerate(samples):
        stop_Rs[row, : len(sample.params.stop_ids)] = sample.params.stop_ids
    return Draws(
        token_R=rows(np.int32, lambda s: s.tokens[-1] if s.tokens else s.prompt[-1]),
        position_R=rows(np.int32, lambda s: s.n_known - 1),
        slot_R=rows(np.int32, lambda s: s.place),
        active_R=rows(bool, lambda s: True),
        generated_R=rows(np.int32, lambda s: len(s.tokens)),
        left_R=rows(np.int32, lambda s: s.n_left),
        rows=Rows(
            temperature_R=rows(np.float32, lambda s: s.params.temperature),
            top_k_R=rows(np.int32, lambda s: s.params.top_k or vocab_size, vocab_size),
            top_p_R=rows(np.float32, lambda s: s.params.top_p, 1.0),
            min_p_R=rows(np.float32, lambda s: s.params.min_p),
            # Without stop ids there is nothing to keep back.
            min_tokens_R=rows(np.int32, lambda s: s.params.min_tokens * bool(s.params.stop_ids)),
            stop_Rs=stop_Rs,
            seed_R=rows(np.uint32, lambda s: s.params.seed),
            sample_R=rows(np.int32, lambda s: s.index),
        ),
    )
