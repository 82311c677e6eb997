"""Tokenizers: every byte is a token, or a tokenizer.json through the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Iterable
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


def load_tokenizer(name: str) -> Tokenizer:
    """Loads a tokenizer: `bytes`, the path of a tokenizer.json, or a Hugging Face Hub repository that has one."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    is_local = path.exists()
    if name.endswith(".json") and not is_local:
        raise UserError(f"dataset.tokenizer = {name!r}: this file does not exist; correct the path")
    with hub("dataset.tokenizer", name, "tokenizers", local=is_local) as tokenizers:
        if is_local:
            return JsonTokenizer(
                tokenizers.Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
            )
        return JsonTokenizer(tokenizers.Tokenizer.from_pretrained(name))
