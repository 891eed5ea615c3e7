"""Text: stop strings never show, cut characters wait, tokens stay as they were sampled."""

import functools

import numpy as np
import pytest

from serving.engine import Engine
from serving.engine.text import StopFinder
from tests.serving.engine.test_engine import SIZES, alone, contract, model, params, prompt


class Letters:
    """Id i is the character 32 + i."""

    def decode(self, ids):
        return "".join(chr(32 + int(i)) for i in ids)


class Bytes:
    """Id i is a byte."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


@functools.cache
def engine():
    return Engine(model(), contract=contract(), tokenizer=Letters(), **SIZES)


def test_a_stop_string_ends_the_text_and_no_part_of_it_shows():
    free = alone("own", 21)
    text = Letters().decode(free.token_ids)
    stop = text[4:7]  # spans three tokens
    end = text.index(stop)
    completion = engine().generate([prompt(21)], params(stop=("no such text", stop)))[0][0]
    assert completion.text == text[:end] and completion.finish_reason == "stop"
    n = end + len(stop)
    assert completion.token_ids.tolist() == free.token_ids[:n].tolist()
    assert len(completion.logprobs) == len(completion.sampling_logprobs) == n


def test_every_sample_ends_by_its_own_stop():
    free = engine().generate([prompt(21)], params(n=4))[0]
    stop = free[2].text[3:5]
    four = engine().generate([prompt(21)], params(n=4, stop=(stop,)))[0]
    for before, after in zip(free, four, strict=True):
        at = before.text.find(stop)
        assert after.finish_reason == ("stop" if at >= 0 else "length")
        assert after.text == (before.text[:at] if at >= 0 else before.text)
    assert four[2].finish_reason == "stop"


def test_the_stop_id_is_a_token_but_no_text():
    free = alone("own", 21).token_ids.tolist()
    completion = engine().generate([prompt(21)], params(stop_ids=(free[5],)))[0][0]
    assert completion.token_ids.tolist()[-1] == free[5]
    assert completion.text == Letters().decode(completion.token_ids[:-1])


@pytest.mark.parametrize("n_bytes", [1, 2, 3])
def test_a_character_whose_bytes_are_not_all_there_waits(n_bytes):
    whole = "ab\N{GRINNING FACE}".encode()
    finder = StopFinder(Bytes(), ())
    assert finder.text(list(whole)) == "ab\N{GRINNING FACE}"
    assert finder.text(list(whole[: 2 + n_bytes])) == "ab"


def test_the_first_of_several_stops_counts(rng):
    for _ in range(200):
        letters = rng.integers(0, 3, 12) + 65
        stops = ["".join(map(chr, rng.integers(0, 3, rng.integers(1, 4)) + 65)) for _ in range(2)]
        finder, text = StopFinder(Bytes(), stops), bytes(letters.tolist()).decode()
        shown = finder.text(letters.tolist())
        assert text.startswith(shown) and not any(stop in shown for stop in stops)
        assert finder.ends(letters.tolist()) == any(stop in text for stop in stops)
        assert np.array_equal(finder.ends(letters.tolist()), shown != text) or text == shown
