"""Prepares instruction data once for each machine, and opens what was prepared.

    <cache>/instructions/<hash of the records, the tokenizer and the keys>.tokens.npy, .counted.npy, .bounds.npy
    <cache>/instructions/<the same hash>.json      what was done to the records of the set; written last
    <cache>/instructions/<hash of the config>.json the sets that belong to a config

Preparing reads the records. Opening reads only the last file, so that ranks do not have to read the records again.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from shoal.data.instructions.chat_tokenizer import ChatTokenizer
from shoal.data.instructions.config import DataSource, InstructionDataset, TooLong
from shoal.data.instructions.lengths import Counts, fit
from shoal.data.instructions.mixture import epoch_counts, epoch_samples
from shoal.data.instructions.packing import pack
from shoal.data.instructions.records import Record, RecordFile, detect_format, open_records, to_conversation
from shoal.data.instructions.samples import Packs, Samples, SampleSet, set_file
from shoal.data.instructions.spans import make_samples
from shoal.data.token_cache import ArrayWriter, atomic_write, locked, open_tokens
from shoal.errors import UserError

_FORMAT = "shoal-instructions-3"
_CHUNK = 256
"""How many records a worker gets at once. Fewer are tokenised without workers."""
_MOST_WORKERS = 8
_MOST_SAMPLES = 1 << 28
"""The longest epoch of a mixture. Its order takes 8 bytes a sample."""


@dataclass(frozen=True)
class _Chunk:
    tokens: NDArray[np.int32]
    counted: NDArray[np.bool_]
    lengths: list[int]
    counts: Counts


@dataclass(frozen=True)
class _Encoder:
    """Turns records into samples. Workers get it by being forked."""

    tokenizer: ChatTokenizer
    loss_on: str
    limit: int
    too_long: TooLong

    def encode(self, records: Sequence[tuple[Record, str]]) -> _Chunk:
        counts, tokens, counted, lengths = Counts(), list[int](), list[bool](), list[int]()
        for record, format in records:
            conversation = to_conversation(record, format, as_chat=self.tokenizer.template is not None)
            made = make_samples(conversation, self.tokenizer, self.loss_on)
            counts.records += 1
            counts.rendered += conversation.messages is not None
            counts.divided += len(made) > 1
            for sample in fit(made, self.limit, self.too_long, record.place, counts):
                tokens += sample.tokens
                counted += sample.counted
                lengths.append(len(sample.tokens))
        return _Chunk(np.array(tokens, np.int32), np.array(counted, bool), lengths, counts)


_worker_encoder: _Encoder | None = None


def _start_worker(encoder: _Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG: the kernel kills it when its parent dies
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for each worker


def _encode_in_worker(records: Sequence[tuple[Record, str]]) -> _Chunk:
    assert _worker_encoder is not None
    return _worker_encoder.encode(records)


def prepare_instructions(config: InstructionDataset, tokenizer: ChatTokenizer) -> None:
    """Tokenises what is not in the cache yet. Call it once per machine, before any rank opens the data."""
    folder = config.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held_out = config.eval_file is None and config.eval_fraction > 0
        groups = [[source] for source in config.sources] if config.is_mixture else [config.sources]
        train = [
            _prepare_set("dataset.train_file", g, config, tokenizer, "train" if held_out else "all") for g in groups
        ]
        key = "dataset.train_file" if held_out else "dataset.eval_file"
        part = "held out" if held_out else "all"
        evaluation = [_prepare_set(key, config.eval_sources, config, tokenizer, part)] if config.eval_sources else []
        names = {"train": train, "eval": evaluation}
        Prepared(config, tokenizer.filler, names).repeats  # noqa: B018, refuses weights that make an epoch too long
        if config.packing:
            for side in (side for side in names if names[side]):
                Prepared(config, tokenizer.filler, names).write_packs(side)
        with locked(config.reference(tokenizer.identity)), atomic_write(config.reference(tokenizer.identity)) as file:
            file.write(json.dumps(names).encode())
    except OSError as error:
        raise UserError(
            f"dataset.cache_dir: the data cannot be prepared in {folder}: {error}; use another folder"
        ) from error


def _prepare_set(
    key: str, sources: Sequence[DataSource], config: InstructionDataset, tokenizer: ChatTokenizer, part: str
) -> str:
    """Returns the name of the prepared files of some sources; writes them first if they do not exist yet."""
    files = [open_records(key, source) for source in sources]
    stem = config.cache_folder() / _content_hash(files, config, tokenizer, part)
    summary = stem.with_name(f"{stem.name}.json")
    with locked(summary):  # a second process waits here, and then finds the files
        parts = ("tokens", "counted", "bounds")
        if not summary.exists() or any(open_tokens(set_file(stem, part)) is None for part in parts):
            _write_set(stem, summary, key, files, config, tokenizer, part)
    return stem.name


def _content_hash(files: Sequence[RecordFile], config: InstructionDataset, tokenizer: ChatTokenizer, part: str) -> str:
    """Returns a hash that changes whenever the samples would."""
    keys = config.model_dump(include={"format", "loss_on", "max_seq_length", "too_long"})
    selection = [part, config.eval_fraction if part != "all" else 0, *(file.selection for file in files)]
    digest = hashlib.blake2b(digest_size=16)
    for text in (_FORMAT, tokenizer.identity, json.dumps([keys, selection])):
        digest.update(hashlib.blake2b(text.encode()).digest())
    for path in (path for file in files for path in file.files):
        with path.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "blake2b").digest())
    return digest.hexdigest()


def _write_set(
    stem: Path,
    summary: Path,
    key: str,
    files: Sequence[RecordFile],
    config: InstructionDataset,
    tokenizer: ChatTokenizer,
    part: str,
) -> None:
    encoder = _Encoder(tokenizer, config.loss_on, config.max_seq_length, config.too_long)
    formats: dict[str, None] = {}
    records = _select(chain.from_iterable(_with_format(file, config.format, formats) for file in files), config, part)
    counts, end, num_counted = Counts(), 0, 0
    digests = [hashlib.blake2b(digest_size=16) for _ in range(3)]
    with ExitStack() as stack:
        names = {"tokens": np.int32, "counted": np.bool_, "bounds": np.int64}
        arrays = {
            name: ArrayWriter(stack.enter_context(atomic_write(set_file(stem, name))), dtype)
            for name, dtype in names.items()
        }
        progress = stack.enter_context(
            Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        )
        task = progress.add_task("tokenising", total=None)
        arrays["bounds"].append([0])
        for chunk in _encode_all(records, encoder, config.preprocessing_num_workers):
            arrays["tokens"].append(chunk.tokens)
            arrays["counted"].append(chunk.counted)
            arrays["bounds"].append(end + np.cumsum(chunk.lengths))
            for digest, values in zip(digests, (chunk.tokens, chunk.counted, np.array(chunk.lengths)), strict=True):
                digest.update(values.tobytes())
            end, num_counted = end + len(chunk.tokens), num_counted + int(chunk.counted.sum())
            counts.add(chunk.counts)
            progress.update(task, advance=len(chunk.lengths), description=f"tokenised {counts.records:,} records")
        samples = arrays["bounds"].length - 1
        if not samples:
            raise UserError(_why_none_is_left(key, ", ".join(file.name for file in files), counts, config, part))
        for array in arrays.values():
            array.finish()
    done = {
        "name": ", ".join(file.name for file in files),
        "format": ", ".join(formats),
        "samples": samples,
        "tokens": end,
        "counted": num_counted,
        "digest": hashlib.blake2b(b"".join(digest.digest() for digest in digests), digest_size=16).hexdigest(),
        **asdict(counts),
    }
    with atomic_write(summary) as file:
        file.write(json.dumps(done).encode())


def _why_none_is_left(key: str, files: str, counts: Counts, config: InstructionDataset, part: str) -> str:
    """Returns why a set has no samples, and what to do about it."""
    if counts.dropped:
        return (
            f"{key} = {files}: no sample is left (all {counts.dropped} samples were too long); raise "
            "dataset.max_seq_length, or change dataset.too_long"
        )
    side, change = ("held out for evaluation", "raise") if part == "held out" else ("left to train on", "lower")
    return f"dataset.eval_fraction = {config.eval_fraction}: no record of {files} is {side}; {change} it, or give more"


def _with_format(file: RecordFile, format: str, formats: dict[str, None]) -> Iterator[tuple[Record, str]]:
    """Yields the records of a file with their format, and notes it."""
    for record in file.read():
        if format == "auto":
            format = detect_format(record)
        formats[format] = None
        yield record, format


def _select(
    records: Iterable[tuple[Record, str]], config: InstructionDataset, part: str
) -> Iterator[tuple[Record, str]]:
    """Yields the records of one side of the split: of `train`, of those `held out`, or all."""
    for record, format in records:
        if part == "all" or (record.fraction < config.eval_fraction) == (part == "held out"):
            yield record, format


def _encode_all(records: Iterator[tuple[Record, str]], encoder: _Encoder, num_workers: int | None) -> Iterator[_Chunk]:
    """Yields the encoded records in their order, by workers if there are many."""
    chunks = iter(lambda: list(islice(records, _CHUNK)), [])
    workers = num_workers or min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
    first = list(islice(chunks, 2))
    if workers == 1 or len(first) < 2:
        yield from map(encoder.encode, chain(first, chunks))
        return
    # Forked, because another start would import transformers again in each worker, which takes longer than most data.
    with ProcessPoolExecutor(workers, get_context("fork"), _start_worker, (encoder,)) as pool:
        waiting: deque[Future[_Chunk]] = deque()
        try:
            for chunk in chain(first, chunks):
                waiting.append(pool.submit(_encode_in_worker, chunk))
                if len(waiting) > 2 * workers:  # more would fill the memory with records
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class Prepared:
    """The prepared data of a config: samples or packs to train and to evaluate on, and what was done to them."""

    def __init__(self, config: InstructionDataset, filler: int, names: dict[str, list[str]]):
        self.config, self._filler, self._names = config, filler, names

    def sets(self, side: str) -> list[SampleSet]:
        """Returns the sets of a side: `train` or `eval`."""
        return [SampleSet(self.config.cache_folder() / name) for name in self._names[side]]

    def summaries(self, side: str) -> list[dict[str, Any]]:
        """Returns what was done to the records of each set of a side."""
        return [json.loads((self.config.cache_folder() / f"{name}.json").read_text()) for name in self._names[side]]

    def digests(self) -> dict[str, dict[str, str]]:
        """Returns for each config key that names files a digest of the samples that they give, by the files' names."""
        digests: dict[str, dict[str, str]] = {}
        for side in self._names:
            key = "dataset.eval_file" if side == "eval" and self.config.eval_file is not None else "dataset.train_file"
            for one in self.summaries(side):
                of_key = digests.setdefault(key, {})
                of_key[one["name"]] = of_key.get(one["name"], "") + one["digest"]  # a name can have several splits
        return digests

    @cached_property
    def repeats(self) -> list[float]:
        """How often an epoch has the samples of each training set."""
        sizes, counts = self._mixture
        return [count / size for size, count in zip(sizes, counts, strict=True)]

    @cached_property
    def _mixture(self) -> tuple[list[int], list[int]]:
        sizes = [len(one) for one in self.sets("train")]
        if not self.config.is_mixture:
            return sizes, sizes
        counts = epoch_counts(sizes, self.config.weights)
        if sum(counts) > _MOST_SAMPLES:
            raise UserError(
                f"dataset.train_file: with these weights an epoch has {sum(counts):,} samples, more than "
                f"{_MOST_SAMPLES:,}, because every file is seen whole in it; give large files larger weights"
            )
        return sizes, counts

    def samples(self, side: str) -> Samples:
        """Returns the samples of an epoch of a side, one by one."""
        if side == "train" and self.config.is_mixture:
            return Samples(self.sets(side), epoch_samples(*self._mixture))
        return Samples(self.sets(side))

    @cached_property
    def train(self) -> Samples | Packs:
        return self._open("train")

    @cached_property
    def evaluation(self) -> Samples | Packs | None:
        return self._open("eval") if self._names["eval"] else None

    def _open(self, side: str) -> Samples | Packs:
        samples, config = self.samples(side), self.config
        if not config.packing:
            return samples
        members, bounds = (open_tokens(set_file(self._packs_stem(side), part)) for part in ("members", "bounds"))
        if members is None or bounds is None:
            raise UserError(f"dataset.cache_dir: packs in {config.cache_folder()} are damaged; start again to prepare")
        return Packs(samples, members, bounds, config.max_seq_length, self._filler)

    def _packs_stem(self, side: str) -> Path:
        config = self.config
        identity = json.dumps([self._names[side], self.repeats, config.max_seq_length, config.packing_seed])
        return (
            config.cache_folder() / hashlib.blake2b(f"{_FORMAT}{side}{identity}".encode(), digest_size=16).hexdigest()
        )

    def write_packs(self, side: str) -> None:
        """Packs the samples of a side, unless that is done."""
        stem = self._packs_stem(side)
        with locked(stem.with_name(f"{stem.name}.json")):
            if any(open_tokens(set_file(stem, part)) is None for part in ("members", "bounds")):
                packed = pack(self.samples(side).lengths(), self.config.max_seq_length, self.config.packing_seed)
                for part, values in zip(("members", "bounds"), packed, strict=True):
                    with atomic_write(set_file(stem, part)) as file:
                        np.save(file, values)


def open_instructions(config: InstructionDataset, tokenizer: ChatTokenizer) -> Prepared:
    """Returns what was prepared; prepares it first if it is not in the cache."""
    if not config.reference(tokenizer.identity).exists():
        prepare_instructions(config, tokenizer)
    return Prepared(config, tokenizer.filler, json.loads(config.reference(tokenizer.identity).read_text()))
