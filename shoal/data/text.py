"""Text as fixed-length windows of tokens: the `dataset` section of the language-model recipes."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from shoal.data.corpus import load_corpora
from shoal.data.prepare import locked, open_tokens, replacing, tokenize
from shoal.data.tokenizer import load_tokenizer
from shoal.errors import UserError


class TextDataset(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    name: str = "stdlib"
    """`stdlib`: the source of Python's standard library. `text`: your `files`. Anything else: a Hugging Face dataset by
    its name on the Hub or its local folder."""
    files: str | list[str] | None = None
    """With `name: text`: files, folders or globs."""
    config: str | None = None
    """With a Hugging Face dataset: which of its configurations."""
    split: str = "train"
    text_column: str = "text"
    tokenizer: str = "bytes"
    """`bytes`, the path of a tokenizer.json, or the name of a Hub repository that has one."""
    seq_length: Annotated[int, Field(ge=1)] = 256
    eval_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    """Held out for evaluation, spread evenly; a `validation` split is used instead where there is one; 0 for none."""
    cache_dir: str | None = None
    """Default: $SHOAL_CACHE, else ~/.cache/shoal."""

    @model_validator(mode="after")
    def _keys_belong_to_name(self) -> TextDataset:
        if self.name == "text" and not self.files:
            raise UserError("dataset.files: missing; with dataset.name 'text' give files, folders or globs")
        foreign = {"stdlib": ["files", "config", "split", "text_column"], "text": ["config", "split", "text_column"]}
        for key in foreign.get(self.name, ["files"]):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:  # not "was given": a resolved config gives every key
                raise UserError(f"dataset.{key}: {value!r} has no use with dataset.name {self.name!r}; leave it out")
        return self

    def cache_folder(self) -> Path:
        return Path(self.cache_dir or os.environ.get("SHOAL_CACHE") or "~/.cache/shoal").expanduser() / "text"

    def reference(self) -> Path:
        """The file that says which token files this config stands for."""
        text = self.model_dump(include={"name", "files", "config", "split", "text_column", "tokenizer"})
        place = [os.getcwd(), sysconfig.get_path("stdlib")]  # what relative paths and stdlib mean  # noqa: PTH109
        identity = json.dumps([text, place, self.eval_fraction > 0])
        return self.cache_folder() / f"{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}.json"


class TokenWindows:
    """Windows of `seq_length` tokens and, as labels, the tokens that follow each.

    With `every` = n, each n-th window is held out: `held_out` chooses between those and the others.
    """

    def __init__(self, path: Path, seq_length: int, every: int | None = None, held_out: bool = False):
        self.path, self.seq_length, self.every, self.held_out = path, seq_length, every, held_out
        windows = max(0, len(self.tokens) - 1) // seq_length
        num_held_out = -(-windows // every) if every else 0
        self._length = num_held_out if held_out else windows - num_held_out

    @cached_property
    def tokens(self) -> NDArray[Any]:
        if (tokens := open_tokens(self.path)) is None:
            raise UserError(f"dataset.cache_dir: {self.path} is missing or damaged; prepare the data again")
        return tokens

    def __getstate__(self) -> dict[str, Any]:
        """Without the tokens: a worker maps the file itself instead of receiving a copy."""
        return {key: value for key, value in self.__dict__.items() if key != "tokens"}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._length:
            raise IndexError(index)
        if self.every:
            index = index * self.every if self.held_out else index + index // (self.every - 1) + 1
        start = index * self.seq_length
        window = torch.from_numpy(self.tokens[start : start + self.seq_length + 1].astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}


def prepare_text(config: TextDataset) -> None:
    """Tokenises what is not in the cache yet. Once per machine, before any rank opens the data."""
    folder = config.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = load_tokenizer(config.tokenizer)
        paths = [tokenize(corpus, tokenizer, folder).name for corpus in load_corpora(config) if corpus is not None]
        with locked(config.reference()), replacing(config.reference()) as file:
            file.write(json.dumps(paths).encode())
    except OSError as error:
        raise UserError(f"dataset.cache_dir: cannot prepare the text in {folder}: {error}") from error


def open_text(config: TextDataset) -> tuple[TokenWindows, TokenWindows | None]:
    """The windows to train on and to evaluate on, prepared first if nobody has."""
    if not config.reference().exists():
        prepare_text(config)
    folder = config.cache_folder()
    train_path, *eval_path = [folder / name for name in json.loads(config.reference().read_text())]
    length = config.seq_length
    every = round(1 / config.eval_fraction) if config.eval_fraction and not eval_path else None
    train = TokenWindows(train_path, length, every)
    evaluation = None
    if every or eval_path:
        evaluation = TokenWindows(eval_path[0] if eval_path else train_path, length, every, held_out=every is not None)
    for part in (train, evaluation):
        if part is not None and len(part) == 0:
            needed, held_out = (2 * length + 1, ", one of them to evaluate on") if every else (length + 1, "")
            found = len(part.tokens)
            raise UserError(
                f"dataset.seq_length: {length} needs at least {needed} tokens{held_out}; the text has {found}"
            )
    return train, evaluation
