"""What the ranks of a run measure together: collectives, the links between pairs, clocks, and the coding of gradients.

All ranks call `measure` and do the same in the same order; whether there is time for more is agreed on by all.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.doctor.findings import Finding
from shoal.parallel.collectives import all_gather_single
from shoal.parallel.compression.exchange import CompressedExchange
from shoal.parallel.compression.payoff import METHODS
from shoal.parallel.compression.wire import all_reduce_bytes
from shoal.processes.board import board_section
from shoal.processes.detect import detect
from shoal.processes.group import choose_backend, join, leave
from shoal.processes.world import World
from shoal.strategies.contract import find_device

SIZES = (8, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
"""Sizes of tensors in bytes; one is left out if the one before took too long."""
LIMIT_SECONDS = 150.0
"""How long the whole measurement may take. What is not measured by then is left out."""
GROUP_SECONDS = 60.0
"""How long a rank waits for the others in one collective."""
_SIZE_SECONDS = 0.5
"""How long a tensor of one size is exchanged again and again."""
_TOO_LONG_SECONDS = 1.0
"""If a size takes longer, larger ones are left out."""
_MAX_LINKS = 28
_NO_TIME = "the time for measuring was over"
MAX_CLOCK_SECONDS = 1.0
"""Clocks of machines that differ by more are reported."""
_SAMPLE_BYTES = 8 << 20
"""The gradients that are coded to measure a method; the time is scaled to the whole model."""


@dataclass(frozen=True)
class Request:
    """What to measure, and how; the same on all ranks."""

    device: str = "auto"
    backend: str = "auto"
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of the gradients whose coding is measured; none if no method of compression is of interest."""
    sizes: tuple[int, ...] = SIZES
    """The bytes of the tensors that are exchanged."""
    limit_seconds: float = LIMIT_SECONDS


@dataclass(frozen=True)
class Timing:
    """How long the slowest rank needed for a collective over all ranks: the median of several times."""

    tensor_bytes: int
    seconds: float
    bytes_per_second: float
    """What each rank sends, divided by the time."""


@dataclass(frozen=True)
class Link:
    """The way from one rank to another, while the others are idle."""

    ranks: tuple[int, int]
    hosts: tuple[str, str]
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Network:
    """What was measured."""

    backend: str
    device: str
    ranks: int
    hosts: tuple[str, ...]
    """The machine of each rank."""
    all_reduce: tuple[Timing, ...] = ()
    """By the size of the tensor, the smallest first."""
    all_gather: tuple[Timing, ...] = ()
    links: tuple[Link, ...] = ()
    links_left_out: int = 0
    clock_offsets: dict[str, float] = field(default_factory=dict)
    """The seconds by which the clock of a machine is ahead of the first one's, by host."""
    coding_seconds: dict[str, float] = field(default_factory=dict)
    """The time to code and decode all gradients, by method of compression."""

    def cost(self, timings: Sequence[Timing], nbytes: float) -> tuple[float, float]:
        """Returns the latency, in seconds, and the bytes per second of a collective over so many bytes.

        The time between the smallest tensor and the next larger one that was measured is taken as a straight line.
        """
        larger = next((one for one in timings if one.tensor_bytes >= nbytes), timings[-1])
        if larger is timings[0]:
            return 0.0, larger.bytes_per_second
        # The time of the smallest tensor is its latency; noise can make it longer than that of a larger one.
        latency = min(timings[0].seconds, 0.99 * larger.seconds)
        return latency, larger.bytes_per_second * larger.seconds / (larger.seconds - latency)


def measure_in_process(request: Request) -> Network:
    """Measures as one of several processes that `shoal.launch.spawn` has started. Ends the process if it hangs."""
    timer = threading.Timer(request.limit_seconds + GROUP_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()
    try:
        return measure(detect(), request)
    finally:
        timer.cancel()


def measure(world: World, request: Request) -> Network:
    """Makes the process group of these ranks, measures, and leaves the group. Returns the same on all ranks."""
    device = find_device(request.device, world.local_rank)
    backend = choose_backend(request.backend, device, world)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    join(world, device, backend, GROUP_SECONDS)
    try:
        return _Measurement(world, device, request).all()
    finally:
        leave(world)


class _Measurement:
    """The measurement, as one rank sees it."""

    def __init__(self, world: World, device: torch.device, request: Request):
        self.world, self.device, self.request = world, device, request
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.deadline = time.monotonic() + request.limit_seconds

    def all(self) -> Network:
        hosts = self._hosts()
        all_reduce = self._collective(self._start_all_reduce)
        all_gather = self._collective(self._start_all_gather)
        pairs = self._pairs()
        # A tensor that takes up to a second: smaller ones fit into the buffers of a slow network, and look fast.
        size = max([one.tensor_bytes for one in all_reduce if one.seconds < 1.0], default=self.request.sizes[0])
        links = self._links(pairs[:_MAX_LINKS], size, hosts)
        return Network(
            dist.get_backend(),
            self.device.type,
            self.ranks,
            hosts,
            all_reduce,
            all_gather,
            links,
            len(pairs) - len(links),
            self._clock_offsets(hosts),
            self._coding_seconds(),
        )

    def _hosts(self) -> tuple[str, ...]:
        board = board_section(self.world, "hosts of the network")
        board.set(str(self.rank), os.uname().nodename if hasattr(os, "uname") else f"node {self.world.node}")
        return tuple(board.get(str(rank)).decode() for rank in range(self.ranks))

    def _agree(self, yes: bool) -> bool:
        """Returns whether all ranks say yes."""
        votes = torch.tensor([float(yes)], device=self.device)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return bool(votes.item())

    def _has_time(self) -> bool:
        return self._agree(time.monotonic() < self.deadline)

    # Collectives over all ranks

    def _start_all_reduce(self, nbytes: int) -> tuple[Callable[[], Any], int]:
        tensor = torch.zeros(max(1, nbytes // 4), device=self.device)
        return lambda: dist.all_reduce(tensor), all_reduce_bytes(tensor.nbytes, self.ranks)

    def _start_all_gather(self, nbytes: int) -> tuple[Callable[[], Any], int]:
        part = torch.zeros(max(1, nbytes // 4 // self.ranks), device=self.device)
        whole = part.new_empty(part.numel() * self.ranks)
        return lambda: all_gather_single(whole, part), part.nbytes * (self.ranks - 1)

    def _collective(self, start: Callable[[int], tuple[Callable[[], Any], int]]) -> tuple[Timing, ...]:
        timings: list[Timing] = []
        for nbytes in self.request.sizes:
            if not self._has_time() or (timings and timings[-1].seconds > _TOO_LONG_SECONDS):
                break
            run, sent = start(nbytes)
            first = self._slowest([self._time(run)])[0]  # opens connections
            second = self._slowest([self._time(run)])[0]
            times = max(2, min(20, int(_SIZE_SECONDS / max(min(first, second), 1e-6))))
            seconds = statistics.median([second, *self._slowest([self._time(run) for _ in range(times)])])
            timings.append(Timing(nbytes, seconds, sent / seconds))
        return tuple(timings)

    def _time(self, run: Callable[[], Any]) -> float:
        self._synchronize()
        began = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - began

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def _slowest(self, seconds: Sequence[float]) -> list[float]:
        """Returns the times of the slowest rank, which are equal on all ranks."""
        times = torch.tensor(seconds, device=self.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times.tolist()

    # Pairs of ranks

    def _pairs(self) -> list[tuple[int, int]]:
        """Returns one pair of ranks for each two machines, and pairs inside of the first machine."""
        size = self.world.local_size
        leaders = range(0, self.ranks, size)
        between = [(a, b) for a in leaders for b in leaders if a < b]
        inside = [(a, b) for a in range(size) for b in range(a + 1, size)]
        return between + (inside[:1] if between else inside)

    def _links(self, pairs: Sequence[tuple[int, int]], nbytes: int, hosts: Sequence[str]) -> tuple[Link, ...]:
        rows = torch.zeros(len(pairs), 2, device=self.device)
        measured = 0
        for row, pair in zip(rows, pairs, strict=True):
            if not self._has_time():
                break
            measured += 1
            if self.rank in pair:
                begins = self.rank == pair[0]
                peer = pair[1] if begins else pair[0]
                latency = self._round_trip(8, peer, begins, times=20) / 2
                seconds = self._round_trip(nbytes, peer, begins, times=3) / 2
                if begins:
                    row[0], row[1] = latency, nbytes / seconds
        dist.all_reduce(rows)  # only one rank of each pair has written its row
        return tuple(
            Link(pair, (hosts[pair[0]], hosts[pair[1]]), *map(float, row))
            for pair, row in zip(pairs[:measured], rows[:measured].tolist(), strict=True)
        )

    def _round_trip(self, nbytes: int, peer: int, begins: bool, times: int) -> float:
        """Returns the seconds in which a tensor goes to the peer and comes back: the median of several times."""
        tensor = torch.zeros(max(1, nbytes // 4), device=self.device)
        seconds = [self._time(lambda: _send_and_receive(tensor, peer, begins)) for _ in range(times + 1)]
        return statistics.median(seconds[1:])  # the first one opens the connection

    def _clock_offsets(self, hosts: Sequence[str]) -> dict[str, float]:
        """Returns by how much the clock of each machine is ahead of the first one's, within half of a round trip."""
        leaders = range(self.world.local_size, self.ranks, self.world.local_size)
        if not self._has_time():
            return {}
        offsets = torch.zeros(self.ranks, dtype=torch.float64, device=self.device)
        for leader in leaders:
            clock = torch.zeros(1, dtype=torch.float64, device=self.device)
            best = float("inf")
            for _ in range(10):
                if self.rank == 0:
                    dist.recv(clock, leader)
                    clock.fill_(time.time())
                    dist.send(clock, leader)
                elif self.rank == leader:
                    sent = time.time()
                    dist.send(clock, 0)
                    dist.recv(clock, 0)
                    received = time.time()
                    if received - sent < best:
                        best = received - sent
                        offsets[leader] = (sent + received) / 2 - clock.item()
        dist.all_reduce(offsets)
        return {hosts[leader]: offsets[leader].item() for leader in leaders}

    # Compression

    def _coding_seconds(self) -> dict[str, float]:
        """Measures every method on gradients like those of the model, but smaller, and scales the time."""
        shapes, seconds = sample_shapes(self.request.shapes), dict[str, float]()
        scale = _numel(self.request.shapes) / max(1, _numel(shapes))
        generator = torch.Generator(self.device).manual_seed(self.rank)
        for name, config in METHODS.items():
            if not shapes or not self._has_time():
                break
            exchange = CompressedExchange(
                config.model_copy(update={"start_step": 0}), None, {"dp_replicate": self.ranks}
            )
            took = []
            for step in range(6):  # the first one allocates, and on a busy machine some are too long
                gradients = {
                    str(index): torch.randn(shape, device=self.device, generator=generator)
                    for index, shape in enumerate(shapes)
                }
                exchange.sum_over_ranks(gradients, step)
                took.append(exchange.wire.numbers()["train/compression_seconds"])
            seconds[name] = scale * min(self._slowest(took[1:]))
        return seconds


def _send_and_receive(tensor: Tensor, peer: int, begins: bool) -> None:
    first, second = (dist.send, dist.recv) if begins else (dist.recv, dist.send)
    first(tensor, peer)
    second(tensor, peer)


def sample_shapes(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the shapes with fewer rows, so that all of them together have about `_SAMPLE_BYTES` in fp32."""
    share = min(1.0, _SAMPLE_BYTES / 4 / max(1, _numel(shapes)))
    return [(max(1, int(shape[0] * share)), *shape[1:]) for shape in shapes if shape]


def _numel(shapes: Sequence[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def judge(network: Network) -> list[Finding]:
    """Returns what the measured network means, apart from the gradients of a config."""
    where = f"{network.backend}, {network.ranks} ranks on {network.device}"
    findings = []
    for name, timings in (("all-reduce", network.all_reduce), ("all-gather", network.all_gather)):
        if not timings:
            findings.append(Finding("not checked", name, _NO_TIME))
            continue
        fastest = max(timings, key=lambda one: one.bytes_per_second)
        says = f"{timings[0].seconds * 1e3:.3g} ms for 8 bytes, {say_speed(fastest.bytes_per_second)} from each rank"
        findings.append(Finding("fine", name, f"{says} ({where})"))
    return findings + _judge_links(network.links) + _judge_clocks(network.clock_offsets)


def _judge_links(links: Sequence[Link]) -> list[Finding]:
    """Finds links that are much slower than the others."""
    if not links:
        return [Finding("not checked", "links", _NO_TIME)]
    usual = statistics.median(link.bytes_per_second for link in links)
    slow = [link for link in links if link.bytes_per_second < usual / 3]
    if not slow:
        return [Finding("fine", "links", f"{len(links)} measured, median {say_speed(usual)} each way")]
    worst = min(slow, key=lambda link: link.bytes_per_second)
    text = (
        f"rank {worst.ranks[0]} ({worst.hosts[0]}) and rank {worst.ranks[1]} ({worst.hosts[1]}) exchange "
        f"{say_speed(worst.bytes_per_second)}, others {say_speed(usual)}; every collective waits for the slowest link"
    )
    return [
        Finding("slow or surprising", "links", text, "look at the cable, port or adapter, or leave the machine out")
    ]


def _judge_clocks(offsets: dict[str, float]) -> list[Finding]:
    """Finds machines whose clocks differ."""
    if not offsets:
        return [Finding("not checked", "clocks", "there is one machine")]
    host, worst = max(offsets.items(), key=lambda item: abs(item[1]))
    if abs(worst) <= MAX_CLOCK_SECONDS:
        return [Finding("fine", "clocks", f"they agree within {abs(worst) * 1e3:.3g} ms")]
    text = f"the clock of {host} is {abs(worst):.3g} s {'ahead of' if worst > 0 else 'behind'} the first machine's"
    return [Finding("slow or surprising", "clocks", f"{text}, so times in logs do not agree", "run chrony or ntpd")]


def say_speed(bytes_per_second: float) -> str:
    """Returns a speed with a unit that suits it."""
    if bytes_per_second < 1e9:
        return f"{bytes_per_second / 1e6:,.3g} MB/s"
    return f"{bytes_per_second / 1e9:,.3g} GB/s"
