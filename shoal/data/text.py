"""Text data as fixed-length windows of tokens: the `dataset` section of the language-model recipes."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from shoal.data.corpus import load_corpora
from shoal.data.token_cache import atomic_write, locked, open_tokens, tokenize
from shoal.data.tokenizer import load_tokenizer
from shoal.errors import UserError


class TextDataset(BaseModel):
    """The keys of `dataset:` that choose the text and how it is tokenised."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    name: str = "stdlib"
    """`stdlib`: the source code of Python's standard library. `text`: your `files`. Anything else: the name of a
    dataset on the Hugging Face Hub, its local folder, or a local file (JSON lines, Parquet, CSV)."""
    files: str | list[str] | None = None
    """The files, folders or globs to read; for `name: text`."""
    config: str | None = None
    """The configuration of the Hugging Face dataset."""
    split: str = "train"
    """The split of the Hugging Face dataset to train on."""
    text_column: str = "text"
    """The column of the Hugging Face dataset that contains the text."""
    tokenizer: str = "bytes"
    """`bytes`, the path of a tokenizer.json, or the name of a Hugging Face Hub repository that has one."""
    seq_length: Annotated[int, Field(ge=1)] = 256
    """The number of tokens in one sample."""
    eval_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    """The fraction of the text that is held out for evaluation, spread evenly; 0 for none. If the dataset has a
    `validation` split, that is used instead."""
    cache_dir: str | None = None
    """Where tokens are stored. Default: $SHOAL_CACHE, or else ~/.cache/shoal."""

    @model_validator(mode="after")
    def _keys_belong_to_name(self) -> TextDataset:
        if self.name == "text" and not self.files:
            raise UserError("dataset.files: missing; dataset.name = 'text' needs files, folders or globs")
        unused = {"stdlib": ["files", "config", "split", "text_column"], "text": ["config", "split", "text_column"]}
        for key in unused.get(self.name, ["files"]):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:  # not "was set": a resolved config sets every key
                raise UserError(f"dataset.{key} = {value!r}: unused with dataset.name = {self.name!r}; remove it")
        return self

    def cache_folder(self) -> Path:
        """Returns the folder with the token files."""
        return Path(self.cache_dir or os.environ.get("SHOAL_CACHE") or "~/.cache/shoal").expanduser() / "text"

    def reference(self, added_tokens: Sequence[str] = ()) -> Path:
        """Returns the path of the file that lists the token files of this config and these new tokens."""
        text = self.model_dump(include={"name", "files", "config", "split", "text_column", "tokenizer"})
        places = [os.getcwd(), sysconfig.get_path("stdlib")]  # what relative paths and stdlib mean  # noqa: PTH109
        identity = json.dumps([text, places, self.eval_fraction > 0, *([[*added_tokens]] if added_tokens else [])])
        return self.cache_folder() / f"{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}.json"


class TokenWindows:
    """A dataset of windows of `seq_length` tokens; the label of each token is the next token.

    With `holdout_interval` = n, every n-th window is held out for evaluation: the dataset then contains either only
    those windows (`held_out`) or all others.
    """

    def __init__(self, path: Path, seq_length: int, holdout_interval: int | None = None, held_out: bool = False):
        self.path, self.seq_length, self.holdout_interval, self.held_out = path, seq_length, holdout_interval, held_out
        num_windows = max(0, len(self.tokens) - 1) // seq_length
        num_held_out = -(-num_windows // holdout_interval) if holdout_interval else 0
        self._length = num_held_out if held_out else num_windows - num_held_out

    @cached_property
    def tokens(self) -> NDArray[Any]:
        if (tokens := open_tokens(self.path)) is None:
            raise UserError(f"dataset.cache_dir: {self.path} is missing or damaged; start again to prepare the data")
        return tokens

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the tokens: a worker maps the file itself instead of receiving a copy."""
        return {key: value for key, value in self.__dict__.items() if key != "tokens"}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        if self.holdout_interval:  # windows 0, n, 2n, … are held out
            index = index * self.holdout_interval if self.held_out else index + index // (self.holdout_interval - 1) + 1
        start = index * self.seq_length
        window = torch.from_numpy(self.tokens[start : start + self.seq_length + 1].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}


def prepare_text(config: TextDataset, added_tokens: Sequence[str] = ()) -> None:
    """Tokenises what is not in the cache yet. Call it once per machine, before any rank opens the data.

    `added_tokens` are new tokens of the tokenizer.
    """
    folder = config.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = load_tokenizer(config.tokenizer, added_tokens)
        paths = [tokenize(corpus, tokenizer, folder).name for corpus in load_corpora(config) if corpus is not None]
        reference = config.reference(added_tokens)
        with locked(reference), atomic_write(reference) as file:
            file.write(json.dumps(paths).encode())
    except OSError as error:
        raise UserError(
            f"dataset.cache_dir: the text cannot be prepared in {folder}: {error}; use another folder"
        ) from error


def open_text(config: TextDataset, added_tokens: Sequence[str] = ()) -> tuple[TokenWindows, TokenWindows | None]:
    """Returns the windows for training and for evaluation; prepares the text first if it is not in the cache."""
    reference = config.reference(added_tokens)
    if not reference.exists():
        prepare_text(config, added_tokens)
    folder, length = config.cache_folder(), config.seq_length
    train_path, *eval_path = [folder / name for name in json.loads(reference.read_text())]
    interval = round(1 / config.eval_fraction) if config.eval_fraction and not eval_path else None
    train, evaluation = TokenWindows(train_path, length, interval), None
    if interval or eval_path:
        evaluation = TokenWindows((eval_path or [train_path])[0], length, interval, held_out=interval is not None)
    for windows in (train, evaluation):
        if windows is not None and len(windows) == 0:
            needed = f"{2 * length + 1} tokens (one window to train, one to evaluate)"
            raise UserError(
                f"dataset.seq_length = {length}: this needs at least {needed if interval else f'{length + 1} tokens'}, "
                f"but the text has {len(windows.tokens)}; use a shorter seq_length or more text"
            )
    return train, evaluation
