"""Tokenizers: every byte is a token, or a tokenizer.json through the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.data.hub import hub
from shoal.errors import UserError

_EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    vocab_size: int
    eos: int | None
    """The id that ends a document; None if the tokenizer has no end-of-text token that shoal knows."""
    identity: str
    """A text that is equal for tokenizers that encode equally."""

    def encode(self, text: str | bytes) -> NDArray[Any]:
        """Returns token ids. Bytes must be UTF-8, except for the tokenizer `bytes`."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of these token ids."""


class ByteTokenizer:
    """Makes every byte a token, so that it reads any file and needs no download. Byte 0 ends a document."""

    vocab_size = 256
    eos: int | None = 0
    identity = "bytes"

    def encode(self, text: str | bytes) -> NDArray[Any]:
        """Returns the bytes of a text, in UTF-8."""
        return np.frombuffer(text.encode() if isinstance(text, str) else text, np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of these bytes, with a replacement character for those that are not UTF-8."""
        return bytes(int(i) for i in ids).decode(errors="replace")


class JsonTokenizer:
    """Wraps a `tokenizers.Tokenizer`. It adds no special tokens; the caller marks the end of a document."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1  # not the number of tokens, because ids may have gaps
        self.eos: int | None = next((vocabulary[token] for token in _EOS_TOKENS if token in vocabulary), None)
        self.identity: str = tokenizer.to_str()

    def encode(self, text: str | bytes) -> NDArray[Any]:
        text = text.decode() if isinstance(text, bytes) else text
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids]))


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> None:
    """Adds new tokens to a tokenizer of `tokenizers` or a fast one of transformers. They are never split, and are shown
    when text is decoded. Raises UserError for a token that it has already."""
    from tokenizers import AddedToken

    if known := [token for token in tokens if token in tokenizer.get_vocab()]:
        raise UserError(f"model.added_tokens: the tokenizer has {known[0]!r} already; leave it out")
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])


def refuse_bytes(added_tokens: Sequence[str]) -> None:
    """Refuses new tokens for the tokenizer `bytes`, which no file could hold."""
    if added_tokens:
        raise UserError("model.added_tokens: dataset.tokenizer = bytes has bytes alone; use another tokenizer")


def load_tokenizer(name: str, added_tokens: Sequence[str] = ()) -> Tokenizer:
    """Loads a tokenizer: `bytes`, the path of a tokenizer.json, or a Hugging Face Hub repository that has one.

    `added_tokens` are added to it.
    """
    if name == "bytes":
        refuse_bytes(added_tokens)
        return ByteTokenizer()
    path = Path(name).expanduser()
    is_local = path.exists()
    if name.endswith(".json") and not is_local:
        raise UserError(f"dataset.tokenizer = {name!r}: this file does not exist; correct the path")
    with hub("dataset.tokenizer", name, "tokenizers", local=is_local) as tokenizers:
        if is_local:
            tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
        else:
            tokenizer = tokenizers.Tokenizer.from_pretrained(name)
    add_tokens(tokenizer, added_tokens)
    return JsonTokenizer(tokenizer)
