"""The tokenizer: a text's ids are its own, and come back as the text."""

import pytest

from glm_jax.errors import GlmError
from glm_jax.tokenizer import SPECIALS, Tokenizer, character_tokenizer

CHARACTERS = "0123456789+ ,\n"


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer(CHARACTERS)


def test_one_id_a_character_after_the_special_tokens(tokenizer):
    assert [tokenizer.id_of(name) for name in SPECIALS] == [0, 1, 2]
    assert tokenizer.encode(CHARACTERS) == list(range(3, 3 + len(CHARACTERS)))
    assert tokenizer.vocab_size == 3 + len(CHARACTERS)
    assert tokenizer.special_ids == {0, 1, 2}


@pytest.mark.parametrize("text", ["", "1 2,3", "  1  ", "00+00", "\n1\n"])
def test_texts_come_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_left_out_or_shown(tokenizer):
    ids = [1, *tokenizer.encode("1+2"), 2]
    assert tokenizer.decode(ids) == "1+2"
    assert tokenizer.decode(ids, special=True) == "<bos>1+2<eos>"


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    file = tokenizer.save(tmp_path)
    for path in (file, tmp_path):
        again = Tokenizer.load(path)
        assert again.encode("1 2,3\n") == tokenizer.encode("1 2,3\n")
        assert again.decode([1, 4, 5, 2]) == tokenizer.decode([1, 4, 5, 2])
        assert again.special_ids == tokenizer.special_ids


def test_what_cannot_be_is_an_error_that_names_it(tokenizer, tmp_path):
    with pytest.raises(GlmError, match="text '1x2': cannot be encoded"):
        tokenizer.encode("1x2")
    with pytest.raises(GlmError, match="token '<eof>': is unknown; did you mean '<eos>'"):
        tokenizer.id_of("<eof>")
    with pytest.raises(GlmError, match="characters: '1' is given twice"):
        character_tokenizer("1231")
    with pytest.raises(GlmError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(GlmError, match="is no tokenizer"):
        Tokenizer.load(tmp_path)
