"""Text holds whole characters and no part of a stop string."""

import pytest

from serving.engine.text import KEPT, WINDOW, TextStream
from tests.serving.engine.models import CFG, alone, bits, new_engine, params, prompt


class Bytes:
    """Token i is byte i: characters are split across tokens."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace")


class Letters:
    """Token i is a letter, or two."""

    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

    def decode(self, ids):
        return "".join(self.letters[i] for i in ids)


class Spaces:
    """Words, with a space before each but the first: decoding in parts loses spaces."""

    def decode(self, ids):
        return " ".join(f"w{i}" for i in ids)


def pushed(stream, ids):
    """Texts that were certain after each token."""
    texts = []
    for token in ids:
        stream.push([token])
        texts.append(stream.settled)
    return texts


def test_a_split_character_waits_for_its_last_byte():
    ids = list("aé€😀".encode())
    texts = pushed(TextStream(Bytes()), ids)
    assert texts == ["a", "a", "aé", "aé", "aé", "aé€", "aé€", "aé€", "aé€", "aé€😀"]


def test_what_could_begin_a_stop_string_waits():
    stream = TextStream(Bytes(), ("stop", "o!"))
    assert pushed(stream, b"a sto") == ["a", "a ", "a ", "a ", "a "]
    assert stream.push(b"re") is None and stream.settled == "a store"
    assert stream.push(b"xo!yz") == 3
    assert stream.text == stream.settled == "a storex"


@pytest.mark.parametrize("tokenizer", [Bytes(), Spaces()])
def test_long_texts_are_those_of_one_decoding(tokenizer):
    ids = list(("é" * 50 + "ab€" * 60).encode())
    stream = TextStream(tokenizer, ("never",))
    for token in ids:
        stream.push([token])
    assert stream.text == tokenizer.decode(ids)
    if isinstance(tokenizer, Bytes):
        assert len(stream._window) < WINDOW + KEPT


def test_a_stop_string_ends_tokens_and_text_at_the_match():
    free = alone("own", 21)
    text = Letters().decode(free.token_ids)
    spelling = new_engine(tokenizer=Letters())
    stop = text[4:6]
    got, other = spelling.generate(
        [prompt(21)] * 2, [params(stop=(stop, "never")), params(stop=("never",))]
    )
    n = text.index(stop) + 2
    assert got[0].text == text[: n - 2] and got[0].finish_reason == "stop"
    assert got[0].token_ids.tolist() == free.token_ids[:n].tolist()
    assert len(got[0].logprobs) == len(got[0].weight_versions) == n
    assert other[0].text == text and other[0].finish_reason == "length"
    assert bits(other[0]) == bits(free)


def test_a_stop_id_is_no_part_of_the_text():
    free = alone("own", 21)
    stop = int(free.token_ids[5])
    got = new_engine(tokenizer=Letters()).generate([prompt(21)], params(stop_ids=(stop,)))[0][0]
    assert got.text == Letters().decode(got.token_ids[:-1])


def test_events_bring_the_text_in_parts():
    spelling = new_engine(tokenizer=Letters())
    free = Letters().decode(alone("own", 21).token_ids)
    spelling.submit(prompt(21), params(stop=(free[6:9],)))
    parts, text = [], None
    while spelling.busy:
        for event in spelling.step():
            parts.append(event.text)
            text = event.completion.text if event.completion else None
    assert "".join(parts) == text == free[:6] and len(parts) > 1
    assert CFG.vocab_size <= len(Letters.letters)
