"""Collectives that count the bytes which a rank sends, and clocks for the time that they and the coding take.

An all-reduce of b bytes over n ranks sends 2·b·(n−1)/n from every rank, an all-gather of b bytes from each b·(n−1), an
all-to-all of b bytes b·(n−1)/n: the fewest that are possible, which ring algorithms reach.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.parallel.collectives import all_gather_single


class Wire:
    """The collectives of one group of ranks, with what the last exchange has sent."""

    def __init__(self, group: dist.ProcessGroup | None, steps_per_exchange: int = 1):
        """`steps_per_exchange` divides the numbers, so that they are those of one step."""
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)
        self._steps, self._by_messages = steps_per_exchange, dist.get_backend(group) == "gloo"
        self.bytes_sent = 0
        """By this rank, in the last exchange."""
        self.bytes_uncompressed = 0
        """What an all-reduce of all gradients in their own dtype would have sent in every step."""
        self.parameters = self.compressible = 0
        """The number of parameters that the last exchange was about, and of those that the method compresses."""
        self.bytes_compressed = 0
        """What a rank sends in an exchange with compression, also while it has not begun."""
        self._coding, self._whole = _Clock(), _Clock()

    def start(self) -> None:
        """Begins the account of an exchange."""
        self.bytes_sent = 0
        self._coding, self._whole = _Clock(), _Clock()

    @contextmanager
    def exchanging(self, device: torch.device) -> Iterator[None]:
        """Is entered around an exchange, messages and coding."""
        with self._whole.running(device):
            yield

    @contextmanager
    def coding(self, device: torch.device) -> Iterator[None]:
        """Is entered where something is encoded or decoded."""
        with self._coding.running(device):
            yield

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the ranks in place, and returns it."""
        self.bytes_sent += all_reduce_bytes(tensor.nbytes, self.ranks)
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, with the rank as first dimension."""
        return self.start_all_gather(tensor)()

    def start_all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begins an all-gather, and returns a function that waits for it and returns the tensors of all ranks."""
        self.bytes_sent += tensor.nbytes * (self.ranks - 1)
        gathered = tensor.new_empty((self.ranks, *tensor.shape))
        if self._by_messages:
            gathered[self.rank] = tensor
            return self._send_rows(gathered, [tensor.contiguous()] * self.ranks)
        all_gather_single(gathered.view(-1), tensor.reshape(-1), group=self.group)
        return lambda: gathered

    def start_all_to_all(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begins to send row r to rank r; returns a function that waits, and returns the rows in the order of ranks."""
        self.bytes_sent += tensor.nbytes * (self.ranks - 1) // self.ranks
        received = torch.empty_like(tensor)
        if self._by_messages:
            received[self.rank] = tensor[self.rank]
            return self._send_rows(received, [*tensor.unbind()])
        dist.all_to_all_single(received, tensor, group=self.group)
        return lambda: received

    def _send_rows(self, received: Tensor, rows: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Sends each other rank its row, and receives one of each; returns a function that waits.

        All receives are posted first. gloo asks the other side whether it is ready, on the connection that the data
        takes: where both sides begin with sending, as in gloo's own all-to-all, one question waits behind the other
        side's data, and a link that can send both ways at once is used one way after the other.
        """
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        names = {rank: dist.get_global_rank(self.group, rank) if self.group else rank for rank in others}
        posted = [dist.irecv(received[rank], names[rank], group=self.group) for rank in others]
        posted += [dist.isend(rows[rank], names[rank], group=self.group) for rank in others]
        kept = [*rows]  # their memory is needed until they are sent

        def wait() -> Tensor:
            for work in posted:
                if work is not None:
                    work.wait()
            kept.clear()
            return received

        return wait

    def numbers(self) -> dict[str, float]:
        """Returns the numbers of the last exchange for a line of the log, per step."""
        return {
            "train/wire_bytes": self.bytes_sent / self._steps,
            "train/wire_bytes_uncompressed": self.bytes_uncompressed,
            "train/compression_seconds": self._coding.seconds() / self._steps,
            "train/exchange_seconds": self._whole.seconds() / self._steps,
        }


def all_reduce_bytes(nbytes: float, ranks: int) -> int:
    """Returns what each rank sends in an all-reduce of so many bytes."""
    return int(2 * nbytes * (ranks - 1) / ranks)


def sum_in_buckets(tensors: Sequence[Tensor], wire: Wire, bucket_bytes: int = 25 << 20) -> None:
    """Sums tensors over ranks in place; those of one dtype are sent together, at least `bucket_bytes` at a time."""
    bucket, size = list[Tensor](), 0
    for tensor in sorted(tensors, key=lambda tensor: str(tensor.dtype)):
        if bucket and (size >= bucket_bytes or tensor.dtype != bucket[0].dtype):
            _sum_together(bucket, wire)
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        _sum_together(bucket, wire)


def _sum_together(bucket: list[Tensor], wire: Wire) -> None:
    joined = wire.all_reduce(torch.cat([tensor.reshape(-1) for tensor in bucket]))
    for tensor, total in zip(bucket, joined.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(total.view_as(tensor))


class _Clock:
    """Adds up times; on a GPU by events in its stream, which are read when a line of the log is due."""

    def __init__(self) -> None:
        self._seconds, self._events = 0.0, list[tuple[torch.Event, torch.Event]]()

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        if device.type == "cpu":
            since = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - since
            return
        events = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
        events[0].record()
        yield
        events[1].record()
        self._events.append(events)

    def seconds(self) -> float:
        for _, end in self._events[-1:]:
            end.synchronize()
        return self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1000
