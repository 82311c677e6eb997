"""Asynchronous save: training waits only until the state is copied to host memory; a thread writes the copy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.checkpoint.peers import Peers
from shoal.checkpoint.store import LocalShard, assign_shards, local_shards, publish
from shoal.types import TrainState

PAGE_BYTES = 4096


class Saver:
    """Writes one checkpoint at a time. All ranks call `save` and `wait` in the same order.

    In the background, the shards that this rank writes are copied into buffers that are allocated once, and a thread
    writes those, with a process group of its own. A save that starts before the previous one is on the disk waits for
    it: a disk that is too slow for the interval slows the run down instead of filling its memory.
    """

    def __init__(self, background: bool):
        self.background = background
        # The timeout is long because a slow disk is not a hang; the watchdog reports hangs earlier.
        own_group = background and dist.is_initialized()
        self._peers = Peers(dist.new_group(backend="gloo", timeout=timedelta(days=1)) if own_group else None)
        self._buffers: dict[str, Tensor] = {}
        """Host memory for the shards that this rank writes, by section and name."""
        self._kinds: dict[str, Any] = {}
        """The dtype, shape and region of every shard that this rank held when shards were last assigned."""
        self._names: list[str] = []
        """The shards that this rank writes."""
        self._allocating: threading.Thread | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def reserve(self, state: TrainState) -> None:
        """Begins to allocate the buffers for such a state, in a thread. All ranks call it together.

        New memory takes longer to get than to copy into, above all memory that is pinned for a GPU, and the first save
        would wait for it.
        """
        if not self.background:
            return
        held = local_shards(state)
        self._assign(state, held)

        def allocate() -> None:
            with suppress(Exception):  # the save allocates what is missing, and says why it cannot
                self._allocate(held)

        # Not a daemon: Python would end it in the middle of torch's code when the run fails, and abort.
        self._allocating = threading.Thread(target=allocate, name="allocating")
        self._allocating.start()

    def save(
        self,
        folder: Path,
        state: TrainState,
        trainer: dict[str, Any],
        about: dict[str, Any],
        published: Callable[[], None] = lambda: None,
    ) -> None:
        """Saves a checkpoint and then calls `published`. In the background, errors are raised by the next `wait`."""
        self.wait()
        shards = self._copy(state) if self.background else assign_shards(state)

        def write() -> None:
            try:
                publish(folder, shards, trainer, about, self._peers)
                published()
            except BaseException as error:  # raised by `wait`, in the thread of the training loop
                self._error = error

        if self.background:
            self._thread = threading.Thread(target=write, name="saving", daemon=True)
            self._thread.start()
        else:
            write()
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is being written, and raises the error of the last save on every rank."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _copy(self, state: TrainState) -> dict[str, LocalShard]:
        """Copies the shards that this rank writes into its buffers, because training is about to change them.

        Shards are assigned again only if the kinds of tensors have changed, which happens on all ranks at once.
        """
        held = local_shards(state)
        if _kinds_of(held) != self._kinds:
            self._assign(state, held)
        self._end_allocating()
        self._allocate(held)
        for name, buffer in self._buffers.items():
            buffer.copy_(held[name].tensor, non_blocking=True)
        for device in {held[name].tensor.device for name in self._buffers}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return {name: held[name]._replace(tensor=buffer) for name, buffer in self._buffers.items()}

    def _assign(self, state: TrainState, held: dict[str, LocalShard]) -> None:
        """Agrees with the other ranks on the shards that each writes."""
        names = [*assign_shards(state)]
        self._end_allocating()
        self._buffers.clear()  # frees the old ones before new ones are allocated
        self._names, self._kinds = names, _kinds_of(held)

    def _allocate(self, held: dict[str, LocalShard]) -> None:
        """Allocates the buffers that are missing; in a thread, until the program ends."""
        for name in self._names:
            if name in self._buffers or not threading.main_thread().is_alive():
                continue
            dtype, _, region, tensor = held[name]
            buffer = torch.empty(region.shape, dtype=dtype, pin_memory=tensor.is_cuda)
            if threading.current_thread() is self._allocating and not tensor.is_cuda:
                # A page of new memory exists when it is first written to. By NumPy, because torch would take threads
                # from the training.
                buffer.view(-1).view(torch.uint8).numpy()[::PAGE_BYTES] = 0
            self._buffers[name] = buffer

    def _end_allocating(self) -> None:
        if self._allocating is not None:
            self._allocating.join()
            self._allocating = None


def _kinds_of(held: dict[str, LocalShard]) -> dict[str, Any]:
    return {name: shard[:3] for name, shard in held.items()}
