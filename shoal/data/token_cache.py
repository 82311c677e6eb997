"""The token cache: each corpus is tokenised once, into one flat array of tokens that is found again by its contents.

    <cache>/text/<hash of the text and the tokenizer>.npy    the tokens
    <cache>/text/<hash of the config>.json                   the token files that belong to a config

Preparing reads the text. Opening reads only the second file, so that ranks do not have to read the corpus again.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from shoal.data.corpus import Corpus
from shoal.data.tokenizer import Tokenizer
from shoal.errors import UserError

_FORMAT = "shoal-text-1"


def content_hash(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """Returns a hash that changes whenever the tokens would."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (_FORMAT, tokenizer.identity, corpus.selection):
        digest.update(hashlib.blake2b(part.encode()).digest())
    for path in corpus.files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def tokenize(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> Path:
    """Returns the token file of this text in this folder; writes it first if it does not exist yet."""
    path = folder / f"{content_hash(corpus, tokenizer)}.npy"
    with locked(path):  # a second process waits here, and then finds the file
        if open_tokens(path) is None:
            with atomic_write(path) as file:
                _write_tokens(corpus, tokenizer, file)
    return path


def open_tokens(path: Path) -> NDArray[Any] | None:
    """Returns the tokens, memory-mapped, or None if the file is missing, truncated or not a token file."""
    try:
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError, EOFError):
        return None


def _write_tokens(corpus: Corpus, tokenizer: Tokenizer, file: IO[bytes]) -> None:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    separator = np.array([] if tokenizer.eos is None else [tokenizer.eos], dtype)
    array = ArrayWriter(file, dtype)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("tokenising", total=sum(path.stat().st_size for path in corpus.files))
        for number, document in enumerate(corpus.documents()):
            for piece in document:
                try:
                    array.append(tokenizer.encode(piece))
                except UnicodeDecodeError:
                    raise UserError(
                        f"dataset.tokenizer: {corpus.files[number]} is not UTF-8; use dataset.tokenizer: bytes"
                    ) from None
                progress.update(task, advance=len(piece))
            array.append(separator)
    if array.length == 0:
        raise UserError("dataset.name: the dataset contains no text; choose another one")
    array.finish()


class ArrayWriter:
    """Writes a flat array into an .npy file piece by piece, so that it never has to fit into memory."""

    def __init__(self, file: IO[bytes], dtype: Any):
        self._file, self._dtype, self.length = file, np.dtype(dtype), 0
        self._header_bytes = self._write_header()

    def append(self, values: Any) -> None:
        piece = np.asarray(values, self._dtype)
        self._file.write(piece.tobytes())
        self.length += piece.size

    def finish(self) -> None:
        """Writes the length into the header; numpy pads the header so that the length may grow."""
        self._file.seek(0)
        assert self._write_header() == self._header_bytes

    def _write_header(self) -> int:
        shape = (self.length,)
        np.lib.format.write_array_header_1_0(
            self._file, {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": shape}
        )
        return self._file.tell()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock on `path` among all processes. The lock file is never removed: two processes could otherwise hold
    locks on two different files."""
    with path.with_suffix(".lock").open("w") as file:
        with suppress(ImportError):  # Windows has no such locks; there, prepare the data in one process
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Writes a temporary file and renames it at the end, so that no process ever sees half a file. The caller must hold
    the lock on `path`."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
