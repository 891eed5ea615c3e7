"""Token batches: the rectangle that sequences become, and each refusal."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.batch import TokenBatch
from glm_jax.cache import causal_mask
from glm_jax.errors import GlmError
from glm_jax.presets import preset

CFG = preset("tiny").with_overrides(max_position_embeddings=10)


def test_sequences_are_padded_on_the_right():
    batch = TokenBatch.from_sequences(CFG, [[5, 6, 7], [8]])
    assert batch.ids_T.reshape(2, 3).tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.valid_T.reshape(2, 3).tolist() == [[True] * 3, [True, False, False]]
    assert batch.positions_T.reshape(2, 3).tolist() == [[0, 1, 2]] * 2
    assert batch.slots_T.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.slots_G.tolist() == [0, 1]
    assert (batch.rows, batch.n_tokens, batch.n_groups) == (3, 6, 2)


def test_rows_and_start():
    batch = TokenBatch.from_sequences(CFG, [[5, 6], [8]], start=[0, 7], rows=4)
    assert batch.positions_T.reshape(2, 4).tolist() == [[0, 1, 2, 3], [7, 8, 9, 10]]
    assert batch.valid_T.reshape(2, 4).sum(axis=1).tolist() == [2, 1]


def test_arrays_and_lists_are_the_same():
    ids = np.arange(6).reshape(2, 3)
    from_array, from_lists = (TokenBatch.from_sequences(CFG, x) for x in (ids, ids.tolist()))
    np.testing.assert_array_equal(from_array.ids_T, from_lists.ids_T)


def test_the_last_position_and_the_last_id_fit():
    full = TokenBatch.from_sequences(CFG, [[CFG.vocab_size - 1] * 10])
    assert full.positions_T[-1] == 9 and full.ids_T[-1] == CFG.vocab_size - 1
    assert TokenBatch.from_sequences(CFG, [[0]], start=[9]).positions_T.tolist() == [9]


def test_integers_of_any_kind_are_positions():
    start = [np.int64(2), jnp.asarray(1)]
    batch = TokenBatch.from_sequences(CFG, [[5], [6]], start=start, rows=np.int32(1))
    assert batch.positions_T.tolist() == [2, 1]


def test_used_tokens_end_with_the_last_valid_one():
    batch = TokenBatch.from_sequences(CFG, [[5, 6, 7], [8]])
    assert int(batch.n_used) == 4
    nothing = dataclasses.replace(batch, valid_T=jnp.zeros(6, bool))
    assert int(nothing.n_used) == 0


def test_appended_padding_is_invalid_and_keeps_the_runs_that_fit():
    batch = TokenBatch.from_sequences(CFG, [[5, 6, 7], [8]])
    longer = batch.padded(9)
    assert longer.valid_T.tolist() == batch.valid_T.tolist() + [False] * 3
    assert longer.ids_T.tolist() == [*batch.ids_T.tolist(), 0, 0, 0]
    assert (longer.rows, longer.n_groups) == (3, 3)
    assert (batch.padded(8).rows, batch.padded(8).n_groups) == (1, 8)
    assert batch.padded(6) is batch


@pytest.mark.parametrize(
    ("sequences", "options", "text"),
    [
        ([], {}, "sequences: the batch is empty; give at least one sequence"),
        (np.zeros((0, 4), int), {}, "sequences: the batch is empty; give at least one sequence"),
        ([[1], []], {}, r"sequences\[1\]: shape \(0,\); need a non-empty flat list of token ids"),
        ([[[1, 2]]], {}, r"sequences\[0\]: shape \(1, 2\); need a non-empty flat list"),
        ([7], {}, r"sequences\[0\]: shape \(\); need a non-empty flat list"),
        ([[1.0, 2.0]], {}, r"sequences\[0\]: dtype float64; token ids are integers"),
        ([["a"]], {}, r"sequences\[0\]: dtype <U1; token ids are integers"),
        ([[True]], {}, r"sequences\[0\]: dtype bool; token ids are integers"),
        ([[1], [2, 160]], {}, r"sequences\[1\]\[1\]: token id 160 .*\(0 to 159\); check the tok"),
        ([[3, -1]], {}, r"sequences\[0\]\[1\]: token id -1 is outside the vocabulary"),
        ([[1] * 11], {}, r"sequences\[0\]: positions 0 to 10 do not fit .* = 10; shorten"),
        ([[1, 2]], {"start": [9]}, r"sequences\[0\]: positions 9 to 10 do not fit"),
        ([[1, 2]], {"start": [9]}, "do not fit .*; shorten the sequence or start it earlier"),
        ([[1, 2]], {"start": [-1]}, r"start\[0\]: -1 is negative; positions count from 0"),
        ([[1, 2]], {"start": [0, 0]}, "start: 2 positions for 1 sequences; give one a sequence"),
        ([[1, 2]], {"start": [1.7]}, "start: 1.7 is no integer; give whole numbers"),
        (
            [[1, 2]],
            {"start": np.asarray([1.0])},
            "start: np.float64.1.0. is no integer; give whole",
        ),
        ([[1, 2]], {"start": [True]}, "start: True is no integer; give whole numbers"),
        ([[1, 2]], {"start": ["1"]}, "start: '1' is no integer; give whole numbers"),
        ([[1, 2]], {"rows": 2.5}, "rows: 2.5 is no integer; give whole numbers"),
        (
            [[1, 2, 3]],
            {"rows": 2},
            r"rows: 2 is shorter than the longest sequence \(3 tokens\); give at least 3, or leave",
        ),
        ([[1], [[2], [3, 4]]], {}, r"sequences\[1\]: is a ragged list of lists; need a non-empty"),
    ],
)
def test_refusals_name_field_value_and_remedy(sequences, options, text):
    with pytest.raises(GlmError, match=text):
        TokenBatch.from_sequences(CFG, sequences, **options)


def test_a_row_sees_its_own_sequence_up_to_itself_and_padding_sees_nothing():
    causal_GRS = causal_mask(TokenBatch.from_sequences(CFG, [[1, 2, 3], [4]]), None)
    assert causal_GRS.astype(int).tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        [[1, 0, 0], [0, 0, 0], [0, 0, 0]],
    ]


def test_a_row_sees_all_cached_positions_up_to_its_own():
    batch = TokenBatch.from_sequences(CFG, [[1], [2]], start=[2, 0])
    assert causal_mask(batch, 4).astype(int).tolist() == [[[1, 1, 1, 0]], [[1, 0, 0, 0]]]


def test_an_invalid_token_is_seen_by_nobody_wherever_it_stands():
    batch = TokenBatch.from_sequences(CFG, [[1, 2, 3]])
    hole = dataclasses.replace(batch, valid_T=jnp.asarray([False, True, True]))
    causal_GRS = causal_mask(hole, None)
    assert causal_GRS.astype(int).tolist() == [[[0, 0, 0], [0, 1, 0], [0, 1, 1]]]
