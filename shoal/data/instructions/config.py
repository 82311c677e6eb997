"""The `dataset:` section of recipe text_lora: which records to train on, and how they become samples."""

from __future__ import annotations

import hashlib
import json
import os
from math import frexp, ldexp
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from shoal.errors import UserError

Format = Literal["auto", "text", "alpaca", "prompt_completion", "messages", "sharegpt"]
TooLong = Literal["truncate", "drop", "split"]


_MOST_TIMES = 1e6
"""The largest weight of a mixture divided by the smallest."""


class DataSource(BaseModel):
    """An entry of `train_file` or `eval_file` with options."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    file: str
    """A file (.jsonl, .json, .parquet, .csv), or the name of a dataset on the Hugging Face Hub or of its local
    folder."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The share of the samples that come from this entry, relative to the weights of the others. The largest may be a
    million times the smallest."""
    split: str = "train"
    """The split of a Hugging Face dataset."""
    config: str | None = None
    """The configuration of a Hugging Face dataset."""


def _kind(value: Any) -> str:
    return "list" if isinstance(value, list) else "options" if isinstance(value, dict | DataSource) else "text"


# So that a mistake in an entry is named, and not each type that it does not have.
_by_kind = Discriminator(_kind, custom_error_type="entry", custom_error_message="Give a file, or {file: …, split: …}")
Entry = Annotated[Annotated[str, Tag("text")] | Annotated[DataSource, Tag("options")], _by_kind]
Entries = Annotated[
    Annotated[str, Tag("text")] | Annotated[DataSource, Tag("options")] | Annotated[list[Entry], Tag("list")], _by_kind
]


class InstructionDataset(BaseModel):
    """The keys of `dataset:` that choose the records, the template, and which tokens count."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    train_file: Entries
    """The records to train on: a file (.jsonl, .json, .parquet, .csv), the name of a dataset on the Hugging Face Hub,
    `{file: …, split: …}`, a list of these that is read as one set, or a mixture: a list of `{file: …, weight: …}`."""
    eval_file: Entries | None = None
    """The records to evaluate on, given as in `train_file`."""
    eval_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Without `eval_file`: the fraction of the training records that is held out. A hash of the record decides, so
    that equal records are never on both sides."""
    format: Format = "auto"
    """The shape of the records. `auto` tells by the keys of the first record of each file: `text`; `instruction`,
    `input`, `output` (alpaca); `prompt`, `completion`; `messages`; `conversations` (sharegpt)."""
    chat_template: str | None = None
    """A template to use instead of the one of the tokenizer: a name (chatml, llama3, gemma, mistral, alpaca, or one of
    several that the tokenizer has), the path of a Jinja file, or the text of a template."""
    loss_on: Literal["answers", "all"] = "answers"
    """`answers`: only tokens of assistant turns or completions count, with the token that ends them. `all`: every
    token counts. A record of format text has no prompt, so that all of it counts."""
    max_seq_length: Annotated[int, Field(ge=2)] = 2048
    """The largest number of tokens in a sample, and with `packing` the number of tokens in every pack."""
    too_long: TooLong = "truncate"
    """What happens to samples with more than `max_seq_length` tokens: cut off the end, leave the sample out, or split
    it into several."""
    packing: bool = False
    """Put several samples into one sequence of `max_seq_length` tokens. They do not attend to each other."""
    packing_seed: Annotated[int, Field(ge=0)] = 0
    """The seed by which samples are distributed over packs."""
    pad_to_max: bool = False
    """Pad every batch to `max_seq_length`, not to its longest sample. Pipelines and `cp` need it, unless samples are
    packed."""
    preview_prompts: Annotated[int, Field(ge=0)] = 3
    """The number of evaluation prompts that the model answers after each evaluation."""
    preview_tokens: Annotated[int, Field(ge=1)] = 64
    """The largest number of tokens in each of these answers."""
    preprocessing_num_workers: Annotated[int, Field(ge=1)] | None = None
    """The number of processes that tokenise. Default: the number of cores, at most 8."""
    tokenizer: str | None = None
    """The folder of a tokenizer, a tokenizer.json, its name on the Hub, or `bytes`. Default: that of `model.name`."""
    cache_dir: str | None = None
    """Where tokens are stored. Default: $SHOAL_CACHE, or else ~/.cache/shoal."""

    @model_validator(mode="after")
    def _check(self) -> InstructionDataset:
        for key in ("train_file", "eval_file"):
            entries = getattr(self, key)
            if entries is None or isinstance(entries, str):
                continue
            entries = [entries] if isinstance(entries, DataSource) else entries
            if not entries:
                raise UserError(f"dataset.{key} = []: the list is empty; name a file")
            weighted = [isinstance(entry, DataSource) and entry.weight is not None for entry in entries]
            if any(weighted) and not all(weighted):
                raise UserError(f"dataset.{key}: some entries have a weight and others have none; give all or none one")
            if any(weighted) and key == "eval_file":
                raise UserError("dataset.eval_file: weights have no effect in an evaluation; leave them out")
            weights = [entry.weight for entry in entries if isinstance(entry, DataSource) and entry.weight is not None]
            if weights and max(weights) / _MOST_TIMES > min(weights):
                raise UserError(
                    f"dataset.{key}: a weight of {max(weights):g} beside one of {min(weights):g} is more than "
                    f"{_MOST_TIMES:,.0f} times as much; give weights that are nearer to each other"
                )
        if self.eval_file is not None and self.eval_fraction:
            raise UserError(
                f"dataset.eval_fraction = {self.eval_fraction}: no effect with dataset.eval_file; leave one out"
            )
        if self.packing and self.pad_to_max:
            raise UserError("dataset.pad_to_max = true: packs always have max_seq_length tokens; leave it out")
        if not self.packing and self.packing_seed:
            raise UserError(f"dataset.packing_seed = {self.packing_seed}: no effect without dataset.packing")
        return self

    @property
    def sources(self) -> list[DataSource]:
        """The entries of `train_file`."""
        return as_sources(self.train_file)

    @property
    def eval_sources(self) -> list[DataSource]:
        """The entries of `eval_file`, or those of `train_file` if a part of them is held out, or none."""
        if self.eval_file is not None:
            return as_sources(self.eval_file)
        return self.sources if self.eval_fraction else []

    @property
    def is_mixture(self) -> bool:
        """True if the entries of `train_file` have weights."""
        return self.sources[0].weight is not None

    @property
    def weights(self) -> list[float]:
        """The weights of the entries of a mixture, times the power of two that makes the largest about 1."""
        weights = [source.weight or 1.0 for source in self.sources]
        exponent = frexp(max(weights))[1]
        return [ldexp(weight, -exponent) for weight in weights]

    def cache_folder(self) -> Path:
        """Returns the folder with the tokens."""
        return Path(self.cache_dir or os.environ.get("SHOAL_CACHE") or "~/.cache/shoal").expanduser() / "instructions"

    def reference(self, tokenizer_identity: str) -> Path:
        """Returns the path of the file that lists the prepared files of this config and this tokenizer."""
        unrelated = {"cache_dir", "preprocessing_num_workers", "pad_to_max", "preview_prompts", "preview_tokens"}
        identity = json.dumps([self.model_dump(exclude=unrelated), os.getcwd(), tokenizer_identity])  # noqa: PTH109
        return self.cache_folder() / f"{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}.json"


def as_sources(entries: Entries) -> list[DataSource]:
    """Returns the entries of a key as a list of sources."""
    listed = entries if isinstance(entries, list) else [entries]
    return [DataSource(file=entry) if isinstance(entry, str) else entry for entry in listed]
