"""Text to token ids and back: a checkpoint's tokenizer.json, or one id a character."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from glm_jax.config_fields import nearest
from glm_jax.errors import GlmError

FILE = "tokenizer.json"
PAD, BOS, EOS = SPECIALS = ("<pad>", "<bos>", "<eos>")
"""Special tokens of `character_tokenizer`, ids 0 to 2."""


class Tokenizer:
    """A thin layer over `tokenizers`: nothing is added to a text, and nothing is dropped from it.

    Chat templates and special tokens at the start are the caller's business.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        added = backend.get_added_tokens_decoder().items()
        self.special_ids = frozenset(i for i, token in added if token.special)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a tokenizer.json, or the one in a checkpoint's directory.

        Raises:
            GlmError: there is none, or it cannot be read.
        """
        path = Path(path)
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise GlmError(f"{file}: no such file; give a tokenizer.json, or a directory with one")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library raises no narrower class
            raise GlmError(f"{file}: is no tokenizer ({error}); copy the file again") from error

    def save(self, directory: str | Path) -> Path:
        """Writes tokenizer.json into an existing directory and returns the file."""
        file = Path(directory) / FILE
        self._backend.save(str(file))
        return file

    @property
    def vocab_size(self) -> int:
        """Ids are below it, special tokens included."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens around it.

        Raises:
            GlmError: a character that no token covers.
        """
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises no narrower class
            raise GlmError(f"text {text!r:.60}: cannot be encoded ({error})") from error

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids; special tokens are left out, or shown by name if `special`."""
        return self._backend.decode(list(map(int, ids)), skip_special_tokens=not special)

    def id_of(self, token: str) -> int:
        """Id of a token by its name, for example `<eos>`.

        Raises:
            GlmError: there is none of that name.
        """
        found = self._backend.token_to_id(token)
        if found is None:
            hint = nearest(token, self._backend.get_vocab())
            raise GlmError(f"token {token!r}: is unknown; {hint}use a token of the vocabulary")
        return found


def character_tokenizer(characters: str) -> Tokenizer:
    """A tokenizer with one id for each of these characters, after the special tokens.

    Raises:
        GlmError: a character is given twice.
    """
    if len(set(characters)) != len(characters):
        repeated = next(c for c in characters if characters.count(c) > 1)
        raise GlmError(f"characters: {repeated!r} is given twice; give each once")
    vocab = {token: i for i, token in enumerate((*SPECIALS, *characters))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab))  # no unknown token: those are refused
    backend.add_special_tokens(list(SPECIALS))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)
