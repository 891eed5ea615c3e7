"""Host arrays of a step, padded to a bucket."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from glm_jax.batch import TokenBatch
from serving.engine.program import Decoding
from serving.engine.request import Sample
from serving.engine.sampler import Rows
from serving.engine.scheduler import Span


class Step(NamedTuple):
    """Arguments of a mixed step."""

    arrays: tuple[Any, ...]
    """Batch, targets, rows after which a token is drawn, their state, and how many there are."""
    drawing: list[Sample]
    """Samples that draw, in the order of those rows."""
    scores_prompt: bool


def step(spans: Sequence[Span], bucket: Callable[[int], int], vocab_size: int) -> Step:
    """The batch of some spans, one after the other."""
    n_tokens = sum(span.last - span.first for span in spans)
    n_rows = bucket(n_tokens)
    ids, positions, slots, targets = (np.zeros(n_rows, np.int32) for _ in range(4))
    ends, at = [], 0
    for sample, first, last in spans:
        rows = slice(at, at + last - first)
        ids[rows], positions[rows] = sample.known(first, last), np.arange(first, last)
        assert sample.slot is not None, "only running samples are planned"
        slots[rows] = sample.slot
        following = sample.known(first + 1, min(last + 1, sample.n_known))
        targets[at : at + len(following)] = following
        at = rows.stop
        ends.append(at - 1)
    valid = np.arange(n_rows) < n_tokens
    batch = TokenBatch(
        jnp.asarray(ids), jnp.asarray(positions), jnp.asarray(slots), jnp.asarray(valid)
    )
    drawing = [(span.sample, end) for span, end in zip(spans, ends, strict=True) if span.draws]
    n_draws = bucket(max(1, len(drawing)))
    last_R = np.zeros(n_draws, np.int32)
    last_R[: len(drawing)] = [end for _, end in drawing]
    samples = [sample for sample, _ in drawing]
    arrays = (
        batch,
        jnp.asarray(targets),
        jnp.asarray(last_R),
        decoding(samples, n_draws, vocab_size),
        jnp.int32(len(drawing)),
    )
    scores_prompt = any(
        s.params.prompt_logprobs and first < len(s.prompt) - 1 for s, first, _ in spans
    )
    return Step(arrays, samples, scores_prompt)


def decoding(samples: Sequence[Sample], n_rows: int, vocab_size: int) -> Decoding:
    """State of the samples that draw; rows after them are padding."""

    def rows(dtype: Any, value: Callable[[Sample], Any], padding: Any) -> Any:
        out = np.full(n_rows, padding, dtype)
        out[: len(samples)] = [value(sample) for sample in samples]
        return jnp.asarray(out)

    most = max([1, *(len(s.params.stop_ids) for s in samples)])
    stop_Rs = np.full((n_rows, 1 << (most - 1).bit_length()), -1, np.int32)
    for row, sample in enumerate(samples):
        stop_Rs[row, : len(sample.params.stop_ids)] = sample.params.stop_ids
    return Decoding(
        token_R=rows(np.int32, lambda s: s.known(s.n_known - 1, s.n_known)[0], 0),
        position_R=rows(np.int32, lambda s: s.n_known - 1, 0),
        slot_R=rows(np.int32, lambda s: s.slot, 0),
        active_R=rows(bool, lambda s: True, False),
        generated_R=rows(np.int32, lambda s: len(s.tokens), 0),
        left_R=rows(np.int32, lambda s: s.n_left, 0),
        rows=Rows(
            temperature_R=rows(np.float32, lambda s: s.params.temperature or 1.0, 1.0),
            greedy_R=rows(bool, lambda s: s.params.greedy, True),
            top_p_R=rows(np.float32, lambda s: s.params.top_p, 1.0),
            top_k_R=rows(np.int32, lambda s: s.params.top_k or vocab_size, vocab_size),
            min_p_R=rows(np.float32, lambda s: s.params.min_p, 0.0),
            seed_R=rows(np.uint32, lambda s: s.params.seed, 0),
            sample_R=rows(np.int32, lambda s: s.index, 0),
            min_tokens_R=rows(np.int32, lambda s: s.params.min_tokens, 0),
            stop_Rs=jnp.asarray(stop_Rs),
        ),
    )
