"""What `check_batch` refuses before anything runs, each by name."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.batch import TokenBatch
from glm_jax.cache import LatentCache
from glm_jax.checks import check_batch
from glm_jax.errors import GlmError
from glm_jax.numerics.contract import NumericsContract
from tests.glm_jax.models import SMALL

CFG = SMALL.with_overrides(max_position_embeddings=200)
CONTRACT = NumericsContract()
PAGE = CONTRACT.key_block
SLOTS, CAPACITY = 4, 2 * PAGE


def cache_of(table=None) -> LatentCache:
    cache = LatentCache.empty(CFG, SLOTS, CAPACITY)
    return cache if table is None else cache.replace(table_Up=jnp.asarray(table, jnp.int32))


def batch_of(tokens, *, padding=0, rows=1) -> TokenBatch:
    """A batch of (id, position, slot), followed by invalid tokens full of nonsense."""
    everything = np.asarray([*tokens, *[(-9, -9, 99)] * padding], np.int32).reshape(-1, 3)
    valid_T = np.arange(len(everything)) < len(tokens)
    return TokenBatch(*map(jnp.asarray, (*everything.T, valid_T)), rows=rows)


def problems(tokens, cache=None, *, padding=0, rows=1, **options) -> list[str]:
    """The lines of the refusal."""
    batch = batch_of(tokens, padding=padding, rows=rows)
    with pytest.raises(GlmError) as refusal:
        check_batch(CFG, batch, cache or cache_of(), **options)
    head, *lines = str(refusal.value).split("\n  ")
    assert head == f"batch: {len(lines)} problem{'s' * (len(lines) > 1)}:"
    return lines


def test_a_batch_in_order_passes():
    lengths = np.asarray([3, 0, 70, 0])
    tokens = [(0, 3, 0), (159, 70, 2), (5, 4, 0), (7, 71, 2)]
    batch = batch_of(tokens, padding=3)
    targets_T = np.asarray([0, 159, 1, 2, -100, 160, 10**6])
    check_batch(CFG, batch, cache_of(), targets_T, lengths_U=lengths, contract=CONTRACT)
    check_batch(CFG, batch, cache_of(), jnp.asarray(targets_T), lengths_U=jnp.asarray(lengths))
    check_batch(CFG, TokenBatch.from_sequences(CFG, [[1, 2], [3]]), cache_of())


def test_without_a_cache_slots_only_tell_sequences_apart():
    check_batch(CFG, batch_of([(1, 0, 7), (1, 0, 9), (2, 1, 7)]), None)
    with pytest.raises(GlmError, match="slot 7, there are slots 0 to 1"):
        check_batch(CFG, batch_of([(1, 0, 7)]), None, lengths_U=np.zeros(2, int))


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (
            [(1, 0, 0), (160, 1, 0), (-1, 2, 0)],
            "ids_T[1]: token id 160 is outside the vocabulary (0 to 159); check the tokenizer "
            "(and 1 more)",
        ),
        ([(1, -2, 0)], "token 0: position -2; positions count from 0"),
        ([(1, 0, 4)], "token 0: slot 4, there are slots 0 to 3; give one of them"),
        ([(1, 0, -1)], "token 0: slot -1, there are slots 0 to 3; give one of them"),
        (
            [(1, 127, 0), (2, 128, 0), (3, 129, 0)],
            "token 1: position 128, a slot of the cache holds 128 tokens; make it larger "
            "(and 1 more)",
        ),
        (
            [(1, 4, 1), (2, 4, 0), (3, 4, 1), (4, 4, 1)],
            "token 2: slot 1 has another token at position 4; keep one (and 1 more)",
        ),
        ([], "valid_T: no token is valid; do not run an empty batch"),
    ],
)
def test_a_token_out_of_place_is_named(tokens, text):
    assert problems(tokens, padding=2) == [text]


def test_a_position_past_the_model_is_told_from_one_past_the_cache():
    lines = problems([(1, 200, 0)])
    limit = "token 0: position 200, max_position_embeddings is 200; shorten the sequence"
    assert lines == [
        limit,
        "token 0: position 200, a slot of the cache holds 128 tokens; make it larger",
    ]
    with pytest.raises(GlmError, match=re.escape(limit)):
        check_batch(CFG, batch_of([(1, 200, 0)]), None)


def test_a_target_outside_the_vocabulary_is_named():
    tokens = [(1, 0, 0), (2, 1, 0)]
    for bad in (160, -100):
        lines = problems(tokens, targets_T=np.asarray([5, bad]))
        text = f"targets_T[1]: token id {bad} is outside the vocabulary (0 to 159); check the"
        assert lines == [f"{text} tokenizer"]


def test_arrays_that_do_not_fit_each_other_are_named():
    tokens = [(1, 0, 0), (2, 1, 0), (3, 2, 0)]
    lines = problems(tokens, rows=2, targets_T=np.asarray([1, 2]), lengths_U=np.asarray([0]))
    assert lines == [
        "targets_T: shape (2,), ids_T has (3,); give one entry a token",
        "lengths_U: shape (1,); give one for each of the 4 slots",
        "rows: 2 does not divide the batch of 3 tokens; pad it, or use rows=1",
    ]
    batch = dataclasses.replace(batch_of(tokens), slots_T=jnp.zeros(2, jnp.int32))
    with pytest.raises(GlmError, match=r"slots_T: shape \(2,\), ids_T has \(3,\)"):
        check_batch(CFG, batch, None)


def test_tokens_of_a_run_in_different_slots_are_named():
    lines = problems([(1, 0, 0), (2, 1, 0), (3, 0, 1), (4, 0, 2)], rows=2)
    text = "rows: tokens 2 to 3 are of different slots; the 2 tokens of a run share one, use"
    assert lines == [f"{text} rows=1 otherwise"]


def test_a_missing_page_is_named_by_slot_and_position():
    table = [[0, 1], [2, 3], [4, 5], [6, -1]]
    check_batch(CFG, batch_of([(1, 63, 3), (1, 70, 2)]), cache_of(table))
    lines = problems([(1, 63, 3), (2, 70, 3), (3, 71, 3)], cache_of(table))
    assert lines == [
        "token 1: slot 3 has no page for position 70; put one in table_Up (and 1 more)"
    ]
    lines = problems([(1, 70, 1)], cache_of([[0, 1], [-1, 3], [4, 5], [6, -1]]))
    assert lines == [
        "token 0: slot 1 has no page for position 0, which the token attends; restore it in "
        "table_Up"
    ]
    unpaged = LatentCache.empty(CFG, SLOTS, CAPACITY, n_pages=3)
    assert problems([(1, 0, 2)], unpaged)[0].startswith(
        "token 0: slot 2 has no page for position 0"
    )


def test_a_table_that_shares_or_invents_pages_is_named():
    tokens = [(1, 0, 1)]
    assert problems(tokens, cache_of([[0, 1], [2, 3], [4, 1], [6, 2]])) == [
        "table_Up: page 1 stands at [0, 1] and at [2, 1]; use it once (and 1 more pages)"
    ]
    for page in (8, -2):
        assert problems(tokens, cache_of([[0, 1], [2, 3], [4, page], [6, -1]])) == [
            f"table_Up[2, 1]: page {page}; use 0 to 7, or -1 for none"
        ]


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        ([3], "slot 2: holds 4 tokens, the batch brings 1 at position 3; give position 4"),
        ([5], "slot 2: holds 4 tokens, the batch brings 1 at position 5; give position 4"),
        (
            [4, 6],
            "slot 2: holds 4 tokens, the batch brings 2 at positions 4, 6; give positions 4 to 5",
        ),
        (
            [5, 6, 7],
            "slot 2: holds 4 tokens, the batch brings 3 at positions 5 to 7; give positions 4 to 6",
        ),
    ],
)
def test_positions_that_do_not_continue_their_slot_are_named(positions, text):
    tokens = [(1, position, 2) for position in positions] + [(1, 0, 0)]
    lengths = np.asarray([0, 9, 4, 0])
    assert problems(tokens, lengths_U=lengths) == [text]
    check_batch(CFG, batch_of([(1, 5, 2), (1, 0, 0), (1, 4, 2)]), cache_of(), lengths_U=lengths)


def test_a_cache_of_another_contract_is_refused_with_the_fields_named():
    asked = NumericsContract(k_leaf=128, key_block=32)
    (line,) = problems([(1, 0, 0)], contract=asked)
    assert "key_block: 32 here, 64 there" in line and "k_leaf: 128 here, 256 there" in line
    assert line.endswith("; ask for the cache's contract, or begin a new cache")


def test_all_problems_are_in_one_refusal():
    tokens = [(160, 0, 0), (1, 0, 0), (2, -1, 1), (3, 70, 3), (4, 5, 9)]
    table = [[0, 1], [2, 0], [4, 5], [6, -1]]
    lines = problems(
        tokens,
        cache_of(table),
        targets_T=np.full(5, -1),
        lengths_U=np.zeros(4, int),
        contract=NumericsContract(mode="native"),
    )
    starts = (
        "ids_T[0]", "targets_T[0]", "token 2: position -1", "token 1: slot 0 has another",
        "token 4: slot 9", "table_Up: page 0", "token 3: slot 3 has no page", "slot 1: holds 0",
        "slot 3: holds 0", "cache: numerics contract",
    )  # fmt: skip
    assert len(lines) == len(starts)
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start)
