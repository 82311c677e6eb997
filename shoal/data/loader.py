"""The resumable loader: yields the micro-batches of each step, from any position, with or without worker processes."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shoal.data.order import BatchSchedule, SampleKey, samples_at
from shoal.data.reader import Dataset, MapDataset, Reader, open_reader
from shoal.errors import UserError
from shoal.seeding import GeneratorsKept, draw_from_all, mix, seed_generators
from shoal.tensors import map_tensors
from shoal.types import MicroBatch

_UNSEEDED = mix("data that draw nothing")
with GeneratorsKept():
    seed_generators(_UNSEEDED)
    _NEXT_NUMBERS = draw_from_all()


@dataclass(frozen=True, slots=True)
class _Item:
    micro_batch: MicroBatch
    position: int | None
    """The position after the step, set only with the last micro-batch of a step."""

    def pin_memory(self) -> _Item:
        """Returns the item with its tensors in pinned memory. torch's DataLoader calls this method in a thread."""
        data = map_tensors(torch.Tensor.pin_memory, self.micro_batch.data)
        return replace(self, micro_batch=replace(self.micro_batch, data=data))


def _leave_process_group(worker: int) -> None:
    """Puts a worker into a process group of its own. Ctrl-C and launchers signal a whole group, but the training
    process needs its workers until it has saved and stopped."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


@dataclass
class _MicroBatches(IterableDataset[_Item | UserError]):
    """Yields one rank's micro-batches in order. Worker w of W yields every W-th micro-batch, starting with the w-th."""

    open_reader: Callable[[], Reader]
    seed: int
    collate: Callable[[list[Any]], Any]
    batches: BatchSchedule
    epoch_size: int | None
    start: int
    end: int | None
    drop_last: bool
    keep_generators: bool

    def __iter__(self) -> Iterator[_Item | UserError]:
        info = get_worker_info()
        items = self._items(info.id, info.num_workers) if info else self._items(0, 1)
        return items if info or not self.keep_generators else self._keep_generators(items)

    def _keep_generators(self, items: Iterator[_Item | UserError]) -> Iterator[_Item | UserError]:
        while True:
            with GeneratorsKept():
                item = next(items, None)
            if item is None:
                return
            yield item

    def _items(self, worker: int, num_workers: int) -> Iterator[_Item | UserError]:
        try:
            reader = self.open_reader()
            for keys, weight, position in islice(self._plan(reader), worker, None, num_workers):
                epochs, ids = zip(*keys, strict=True)
                yield _Item(MicroBatch(self._fetch(reader, keys), epochs, ids, weight), position)
        except UserError as error:  # yielded, not raised: torch would wrap it into a page of traceback
            yield error

    def _fetch(self, reader: Reader, keys: list[SampleKey]) -> Any:
        """Returns a micro-batch, whose random numbers depend on the seed and its samples alone.

        Seeding takes 8 µs for each sample, and most data draw nothing. So a micro-batch is made without, and one number
        is drawn from every generator afterwards: if it is not the next one, something has drawn. The micro-batch is
        then made again, and it and all later ones are seeded. They are the same whenever that happens.
        """
        if not reader.seeds_samples:
            seed_generators(_UNSEEDED)
            batch = self.collate(reader.fetch(keys))
            if draw_from_all() == _NEXT_NUMBERS:
                return batch
            reader.seeds_samples = True
        samples = reader.fetch(keys)
        seed_generators(mix(self.seed, "collate", *keys[0]))
        return self.collate(samples)

    def _plan(self, reader: Reader) -> Iterator[tuple[list[SampleKey], int, int | None]]:
        """Yields for each micro-batch its samples, its weight, and (with the last one of a step) the position after
        the step."""
        position = self.start
        while self.end is None or position < self.end:
            batch_size = self.batches.phase_at(position, self.epoch_size).batch_size
            size = self.batches.step_size(position, self.epoch_size, self.end)
            step = reader.plan_step(position, size, batch_size)
            if not step.step_size or (self.drop_last and step.step_size < size):  # the stream has ended
                return
            position += step.step_size
            for number, keys in enumerate(step.micro_batches, 1):
                filled = keys or list(islice(cycle(step.filler), batch_size))
                yield filled, int(bool(keys)), position if number == len(step.micro_batches) else None


class Loader:
    """Yields the list of micro-batches of one step after another, from `position` up to `end` or without end.

    Each iteration starts again at the position that the constructor got. The attribute `position` is the number of
    samples that the steps yielded so far have consumed, however far the workers have read ahead: a checkpoint stores
    it, and a new loader starts from it. It counts the samples of all ranks, so it stays valid when the number of ranks
    or the batch size changes.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate: Callable[[list[Any]], Any],
        batches: BatchSchedule,
        *,
        seed: int,
        data_rank: int = 0,
        data_size: int = 1,
        position: int = 0,
        end: int | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch: int = 2,
        drop_last: bool = False,
        keep_generators: bool = True,
    ):
        """`drop_last` leaves out what does not fill a global batch at `end`, or where a stream ends.

        `keep_generators` gives the process's random generators their states back after reading, which takes some 40 µs;
        where they are seeded before every use, as strategies do, nobody needs it.
        """
        if not isinstance(dataset, Dataset):
            raise UserError(
                f"train_data/eval_data: {type(dataset).__name__} has neither __len__ and __getitem__ nor open(start), "
                f"so it cannot be resumed; give it the methods of shoal.data.OrderedStream"
            )
        self.epoch_size = len(dataset) if isinstance(dataset, MapDataset) else None
        if self.epoch_size == 0:
            raise UserError("train_data/eval_data: the dataset has length 0; it must hold at least one sample")
        self.position = self._start = self._step_start = position
        self.waited_seconds = 0.0
        self._samples_at = partial(samples_at, epoch_size=self.epoch_size, seed=seed, shuffle=shuffle)
        self._steps: Generator[list[MicroBatch], None, None] | None = None
        reader = partial(open_reader, dataset, position, seed, shuffle, data_rank, data_size)
        if drop_last and end is not None:
            end = batches.end_of_full_steps(position, end, self.epoch_size)
        source = _MicroBatches(
            reader, seed, collate, batches, self.epoch_size, position, end, drop_last, keep_generators
        )
        pin_memory = pin_memory and torch.accelerator.is_available()
        self._pin_in_iteration = pin_memory and num_workers == 0
        # Without workers torch's DataLoader is not used: its overhead per step is larger than reading a small dataset.
        self._items: Iterable[_Item | UserError] | None = source
        if num_workers > 0:
            self._items = DataLoader(
                source,
                batch_size=None,
                num_workers=num_workers,
                pin_memory=pin_memory,
                persistent_workers=persistent_workers,
                prefetch_factor=prefetch,
                generator=torch.Generator(),  # without it, starting workers would advance the global generator
                worker_init_fn=_leave_process_group,
            )

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        if self._items is None:
            raise RuntimeError("the loader is closed")
        self.position = self._start
        self._steps = self._run(self._items)
        return self._steps

    def _run(self, items: Iterable[_Item | UserError]) -> Generator[list[MicroBatch], None, None]:
        step: list[MicroBatch] = []
        wait_start = perf_counter()
        for item in items:
            if isinstance(item, UserError):
                raise item
            step.append(item.pin_memory().micro_batch if self._pin_in_iteration else item.micro_batch)
            if item.position is not None:
                self._step_start, self.position = self.position, item.position
                self.waited_seconds += perf_counter() - wait_start
                yield step
                step, wait_start = [], perf_counter()

    def last_step(self) -> list[SampleKey]:
        """Returns the keys of all samples that all ranks together took in the step yielded last."""
        return self._samples_at(self._step_start, self.position - self._step_start)

    def close(self) -> None:
        """Ends the workers; this is allowed in the middle of an iteration."""
        if self._steps is not None:
            self._steps.close()
        has_workers = isinstance(self._items, DataLoader)
        self._steps = self._items = None
        if has_workers:
            gc.collect()  # workers end when torch's iterator is freed, and that may be part of a reference cycle
