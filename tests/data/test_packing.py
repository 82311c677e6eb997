"""Packs hold every sample once and few empty positions; mixtures have the shares that their weights say."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_tokenizers import write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.validation import validate
from shoal.data import BatchSchedule, Loader
from shoal.data.instructions import InstructionDataset, Packs, collate_samples, open_instructions, prepare_instructions
from shoal.data.instructions.chat_tokenizer import load_chat_tokenizer
from shoal.data.instructions.describe import describe_data
from shoal.data.instructions.mixture import epoch_counts, epoch_samples
from shoal.data.instructions.packing import pack
from shoal.errors import UserError


def load(tmp_path: Path, **keys: Any) -> Any:
    keys = {"tokenizer": "bytes", "max_seq_length": 32, "cache_dir": str(tmp_path / "cache"), **keys}
    config, tokenizer = InstructionDataset.model_validate(keys), load_chat_tokenizer("bytes")
    prepare_instructions(config, tokenizer)
    return open_instructions(config, tokenizer)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.integers(0, 5))
def test_a_pack_is_never_too_full_and_every_sample_is_in_one(lengths: list[int], seed: int) -> None:
    array = np.array(lengths, np.int64)
    members, bounds = pack(array, 16, seed)
    assert sorted(members.tolist()) == [*range(len(lengths))]
    assert (bounds[0], bounds[-1]) == (0, len(lengths))
    sums = [array[members[a:b]].sum() for a, b in pairwise(bounds)]
    assert all(0 < total <= 16 for total in sums)
    assert len(sums) <= max(1, 2 * -(-sum(lengths) // 16))


@pytest.mark.parametrize("capacity", [1024, 2048, 4096])
def test_packs_of_log_normal_lengths_are_full(capacity: int) -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 0.9, 4000).astype(np.int64).clip(1, capacity)
    members, bounds = pack(lengths, capacity, seed=0)
    assert lengths.sum() / ((len(bounds) - 1) * capacity) > 0.97
    again, _ = pack(lengths, capacity, seed=0)
    other, _ = pack(lengths, capacity, seed=1)
    assert np.array_equal(members, again)
    assert not np.array_equal(members, other)


def test_what_a_pack_holds(tmp_path: Path) -> None:
    records = [{"prompt": "ab", "completion": "c" * size} for size in (3, 9, 20, 1)]
    file = write_lines(tmp_path / "a.jsonl", records)
    plain, packed = load(tmp_path, train_file=file), load(tmp_path, train_file=file, packing=True)
    assert isinstance(packed.train, Packs)
    assert len(packed.train) == 2
    samples = {bytes(plain.train[i]["input_ids"].tolist()): plain.train[i]["labels"].tolist() for i in range(4)}
    found, real = 0, 0
    for index in range(len(packed.train)):
        one = packed.train[index]
        assert one["input_ids"].shape == one["labels"].shape == (32,)
        *bounds, end = [start for start in one["starts"].tolist() if start < 32] + [32]
        for start, stop in zip(bounds, [*bounds[1:], end], strict=True):
            text = bytes(one["input_ids"][start:stop].tolist())
            if text.strip(b"\0"):
                found, real = found + 1, real + len(text)
                assert one["labels"][start:stop].tolist() == samples[text]
            else:  # padding
                assert set(one["labels"][start:stop].tolist()) == {-100}
    assert found == 4
    assert packed.train.fill() == pytest.approx(real / 64)
    with pytest.raises(IndexError):
        packed.train[2]


def test_a_batch_is_padded_at_its_end() -> None:
    samples = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (3, 9)]
    batch = collate_samples(samples, filler=7, limit=32, to_limit=False)
    assert batch["input_ids"].shape == (2, 16)
    assert batch["input_ids"][0].tolist() == [0, 1, 2] + [7] * 13
    assert batch["labels"][0].tolist() == [0, 1, 2] + [-100] * 13
    assert collate_samples(samples, 7, 12, to_limit=False)["labels"].shape == (2, 12)
    assert collate_samples(samples, 7, 32, to_limit=True)["labels"].shape == (2, 32)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0.01, 10)), min_size=1, max_size=5))
def test_shares_of_an_epoch_are_the_weights(sets: list[tuple[int, float]]) -> None:
    sizes, weights = [size for size, _ in sets], [weight for _, weight in sets]
    counts = epoch_counts(sizes, weights)
    assert all(count >= size for count, size in zip(counts, sizes, strict=True))
    for count, weight in zip(counts, weights, strict=True):
        share = weight / sum(weights) * sum(counts)
        assert abs(count - share) <= len(sizes)
    order = epoch_samples(sizes, counts)
    assert len(order) == sum(counts)
    seen = np.bincount(order, minlength=sum(sizes))
    first = 0
    for size, count in zip(sizes, counts, strict=True):
        times = seen[first : first + size]
        assert set(times) <= {count // size, -(-count // size)}
        first += size


def mixture(tmp_path: Path, **keys: Any) -> Any:
    small = write_lines(tmp_path / "small.jsonl", [{"text": f"small {i}"} for i in range(4)])
    large = write_lines(tmp_path / "large.jsonl", [{"text": f"large {i}"} for i in range(30)])
    return load(tmp_path, train_file=[{"file": small, "weight": 1.0}, {"file": large, "weight": 3.0}], **keys)


def texts_of(data: Any, ranks: int, positions: tuple[int, ...] = (0,), steps: int = 5) -> list[str]:
    """Returns the samples that a run trains on, in their order, interrupted at some positions."""
    found: dict[int, str] = {}
    for start, end in zip(positions, (*positions[1:], steps * 8), strict=True):
        for rank in range(ranks):
            loader = Loader(
                data, lambda s: s, BatchSchedule.constant(8, 2), seed=3, data_rank=rank, data_size=ranks,
                position=start, end=end,
            )  # fmt: skip
            for step, micro_batches in enumerate(loader):
                for number, micro in enumerate(micro_batches):
                    for offset, sample in enumerate(micro.data):
                        place = start + step * 8 + (number * ranks + rank) * 2 + offset
                        found[place] = bytes(sample["input_ids"].tolist()).decode()
    return [found[place] for place in sorted(found)]


def test_a_mixture_is_the_same_over_resume_and_world_size(tmp_path: Path) -> None:
    data = mixture(tmp_path).train
    assert len(data) == 40
    whole = texts_of(data, ranks=1)
    assert sum(text.startswith("small") for text in whole) == 10  # a quarter of the epoch
    assert len({text for text in whole if text.startswith("large")}) == 30
    assert texts_of(data, ranks=2) == whole
    assert texts_of(data, ranks=1, positions=(0, 16)) == whole
    assert texts_of(data, ranks=4, positions=(0, 8, 24)) == whole


def test_weights_that_make_no_epoch_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}])

    def made(*weights: float) -> Any:
        keys = {"tokenizer": "bytes", "max_seq_length": 64, "cache_dir": str(tmp_path / "cache")}
        entries = [{"file": file, "weight": weight} for weight in weights]
        config = validate(InstructionDataset, {**keys, "train_file": entries}, {})
        prepare_instructions(config, tokenizer := load_chat_tokenizer("bytes"))
        return open_instructions(config, tokenizer)

    for weights in ((1.0, 1e-9), (1.0, 1e-300), (1e300, 1.0)):
        with pytest.raises(UserError, match=r"dataset.train_file: a weight of .* is more than 1,000,000 times"):
            made(*weights)
    for weight in (0.0, -1.0):
        with pytest.raises(UserError, match=rf"train_file.1.weight = {weight}: should be greater than 0$"):
            made(1.0, weight)
    for same in (5e-324, 1e308):
        assert len(made(same, same).train) == 4
    monkeypatch.setattr("shoal.data.instructions.prepare._MOST_SAMPLES", 100)
    with pytest.raises(UserError, match=r"train_file: with these weights an epoch has 202 samples, more than 100, bec"):
        made(1.0, 100.0)


def test_a_mixture_says_how_often_samples_are_seen(tmp_path: Path) -> None:
    summary = describe_data(mixture(tmp_path), load_chat_tokenizer("bytes"))
    assert summary.startswith("40 samples, 3")
    assert "; format text, loss on answers; " in summary
    assert "small.jsonl 25.0% (each sample 2.50 times an epoch)" in summary
    assert "large.jsonl 75.0% (each sample 1.00 times an epoch)" in summary
    packed = mixture(tmp_path, packing=True)
    assert describe_data(packed, load_chat_tokenizer("bytes")).startswith(
        f"packs, {packed.train.fill():.1%} full, of 40 samples, 3"
    )
    texts = b"".join(bytes(packed.train[i]["input_ids"].tolist()) for i in range(len(packed.train)))
    assert texts.count(b"small") == 10
    assert texts.count(b"large") == 30
