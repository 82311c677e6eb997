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
from shoal.checkpoint.store import Share, deal_out, publish, shares_of, write_checkpoint
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
        alone = not background or not dist.is_initialized()
        self._peers = Peers(None if alone else dist.new_group(backend="gloo", timeout=timedelta(days=1)))
        self._buffers: dict[str, Tensor] = {}
        self._hand: set[str] = set()
        self._known: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def staging_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

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
        if not self.background:
            write_checkpoint(folder, state, trainer, about)
            published()
            return
        staged = self._stage(self._shares(state))

        def work() -> None:
            try:
                publish(folder, staged, trainer, about, self._peers)
                published()
            except BaseException as error:  # the loop's thread is to raise it
                self._error = error

        self._thread = threading.Thread(target=work, name="saving", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written. Raises what went wrong, on every rank."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    @property
    def idle(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def _shares(self, state: TrainState) -> dict[str, Share]:
        """What this rank writes. Dealt out anew only when the state is another one, as it is for all ranks at once."""
        held = shares_of(state)
        known = {name: share[:3] for name, share in held.items()}
        if known != self._known:
            self._hand, self._known = set(deal_out(state)), known
            self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in self._hand}
        return {name: held[name] for name in self._hand}

    def _stage(self, shares: dict[str, Share]) -> dict[str, Share]:
        """Copies of what training is about to change."""
        devices = set()
        for name, share in shares.items():
            source = share.tensor
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                pin = source.device.type == "cuda"
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=pin)
                self._buffers[name] = buffer
            buffer.copy_(source, non_blocking=True)
            devices.add(source.device)
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        return {name: share._replace(tensor=self._buffers[name]) for name, share in shares.items()}
