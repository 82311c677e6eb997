"""Tokenising once: each corpus becomes one flat array of tokens in a cache, found again by its contents.

    <cache>/text/<hash of the text and the tokenizer>.npy    the tokens
    <cache>/text/<hash of the config>.json                   which token files a config stands for

Preparing looks at the text; opening only follows the second file, so that ranks need not read the corpus again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    digest = hashlib.blake2b(digest_size=16)
    for part in (_FORMAT, tokenizer.identity, corpus.selection):
        digest.update(hashlib.blake2b(part.encode()).digest())
    for path in corpus.files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def tokenize(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> Path:
    """The token file of this text in this folder, made now if it is not there yet."""
    path = folder / f"{content_hash(corpus, tokenizer)}.npy"
    with locked(path):  # whoever comes second waits, and then finds the file
        if open_tokens(path) is None:
            with replacing(path) as file:
                _write_tokens(corpus, tokenizer, file)
    return path


def open_tokens(path: Path) -> NDArray[Any] | None:
    """The tokens, memory-mapped; None if the file is missing, cut short or something else."""
    try:
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError, EOFError):
        return None


def _write_tokens(corpus: Corpus, tokenizer: Tokenizer, file: IO[bytes]) -> None:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    separator = b"" if tokenizer.eos is None else np.array(tokenizer.eos, dtype).tobytes()
    header_bytes = _write_header(file, dtype, 0)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("tokenising", total=sum(path.stat().st_size for path in corpus.files))
        for number, document in enumerate(corpus.documents()):
            for piece in document:
                try:
                    file.write(tokenizer.encode(piece).astype(dtype).tobytes())
                except UnicodeDecodeError:
                    raise UserError(
                        f"dataset.tokenizer: {corpus.files[number]} is not UTF-8; only bytes can read that"
                    ) from None
                progress.update(task, advance=len(piece))
            file.write(separator)
    count = (file.tell() - header_bytes) // dtype.itemsize
    if count == 0:
        raise UserError("dataset.name: there is no text in it")
    file.seek(0)
    assert _write_header(file, dtype, count) == header_bytes  # numpy leaves room for the length to grow


def _write_header(file: IO[bytes], dtype: np.dtype[Any], count: int) -> int:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone with `path` among all processes. The lock file stays: were it removed, two could hold different ones."""
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Writes beside `path`, which must be locked, and renames at the end, so that nobody ever sees half a file."""
    beside = path.with_suffix(".tmp")
    with beside.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
