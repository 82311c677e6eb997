"""Which samples a rank takes in an epoch, for loops on plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from shoal.data.order import samples_at
from shoal.errors import UserError


class DistributedSampler(Sampler[int]):
    """The samples of one rank, batch by batch, in shoal's order; also the `sampler` of a torch DataLoader.

    The global batches of an epoch, each of `batch_size * world_size` samples, are consecutive slices of one shuffled
    order, and every rank takes its part of each. Ranks have equally many samples: at the end of an epoch some are taken
    twice, as torch's DistributedSampler does, or left out with `drop_last`.
    """

    def __init__(
        self,
        dataset_size: int,
        batch_size: int,
        rank: int,
        world_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ):
        if not isinstance(dataset_size, int):
            raise TypeError(
                f"DistributedSampler: the first argument is a {type(dataset_size).__name__}; write "
                "DistributedSampler(len(dataset), batch_size, rank, world_size), or use torch's"
            )
        if min(dataset_size, batch_size) < 1 or not 0 <= rank < world_size:
            raise UserError(
                f"DistributedSampler({dataset_size}, {batch_size}, {rank}, {world_size}): sizes must be at least 1, "
                "and rank below world_size; correct them"
            )
        self.dataset_size, self.batch_size, self.rank, self.world_size = dataset_size, batch_size, rank, world_size
        self.shuffle, self.seed, self.drop_last, self.epoch = shuffle, seed, drop_last, 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, which has an order of its own."""
        self.epoch = epoch

    def get_indices(self) -> list[int]:
        """Returns the numbers of this rank's samples in the epoch, in their order."""
        size, per_step = self.dataset_size, self.batch_size * self.world_size
        order = [index for _, index in samples_at(self.epoch * size, size, size, self.seed, self.shuffle)]
        full = size - size % per_step
        mine = [
            index
            for start in range(self.rank * self.batch_size, full, per_step)
            for index in order[start : start + self.batch_size]
        ]
        return mine if self.drop_last else mine + self._part_of_last(order, full)

    def _part_of_last(self, order: list[int], full: int) -> list[int]:
        """Returns this rank's part of the samples that fill no global batch."""
        number = -(-(len(order) - full) // self.world_size)
        first = full + self.rank * number
        return [order[place % len(order)] for place in range(first, first + number)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.get_indices())

    def __len__(self) -> int:
        per_step = self.batch_size * self.world_size
        steps, rest = divmod(self.dataset_size, per_step)
        return steps * self.batch_size + (0 if self.drop_last else -(-rest // self.world_size))
