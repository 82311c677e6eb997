"""Saving while training goes on: a step waits only until its state is copied aside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.checkpoint.peers import Peers
from shoal.checkpoint.store import LocalShard, deal_out, local_shards, publish
from shoal.types import TrainState


class Saver:
    """Writes one checkpoint at a time. All ranks call `save` and `wait` at the same places.

    In the background, what this rank writes is copied into buffers that are allocated once, and a thread writes those,
    talking to the other ranks in a process group of its own. A save that comes before the last one is on the disk
    waits for it: a disk that is slower than the interval slows the run down instead of filling its memory.
    """

    def __init__(self, background: bool):
        self.background = background
        # A slow disk is not a hang, and whoever watches for those speaks first.
        options: Any = {"backend": "gloo", "timeout": timedelta(days=1)}
        self._peers = Peers(dist.new_group(**options) if background and dist.is_initialized() else None)
        self._buffers: dict[str, Tensor] = {}
        """Host memory for what this rank writes."""
        self._known: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        folder: Path,
        state: TrainState,
        trainer: dict[str, Any],
        about: dict[str, Any],
        published: Callable[[], None] = lambda: None,
    ) -> None:
        """`published` is called when the checkpoint is there. What fails raises here, or in the next `wait`."""
        self.wait()
        shards = self._copy(state) if self.background else deal_out(state)

        def work() -> None:
            try:
                publish(folder, shards, trainer, about, self._peers)
                published()
            except BaseException as error:  # the loop's thread is to raise it
                self._error = error

        if self.background:
            self._thread = threading.Thread(target=work, name="saving", daemon=True)
            self._thread.start()
        else:
            work()
            self.wait()

    def wait(self) -> None:
        """Until nothing is being written. Raises what went wrong, on every rank."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _copy(self, state: TrainState) -> dict[str, LocalShard]:
        """Copies what this rank writes into its buffers, because training is about to change it.

        Dealt out anew only when the state is another one, as it is for all ranks at once.
        """
        held = local_shards(state)
        known = {name: shard[:3] for name, shard in held.items()}
        if known != self._known:
            shards = deal_out(state)
            self._buffers.clear()  # before others are allocated
            for name, (dtype, _, region, tensor) in shards.items():
                self._buffers[name] = torch.empty(region.shape, dtype=dtype, pin_memory=tensor.is_cuda)
            self._known = known
        for name, buffer in self._buffers.items():
            buffer.copy_(held[name].tensor, non_blocking=True)
        for device in {held[name].tensor.device for name in self._buffers}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return {name: held[name]._replace(tensor=buffer) for name, buffer in self._buffers.items()}
