"""Measures what a rank computes by itself in a step, without the time in which it waits for other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch import nn


class OwnTime:
    """Adds up stretches of a step in which this rank waits for nobody.

    `start` and `stop` mark a stretch. On the CPU a mark is a time; on a GPU it is an event in the current stream, which
    is read when the host has waited for the device anyway. Nothing is exchanged and no device is waited for.
    """

    is_on = False
    """True in steps that are measured; the loop sets it. In others nothing of this is called."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._steps: dict[int, list[list[Any]]] = {}
        """The stretches of each measured step, by its number; a stretch is one mark or two."""
        self._stretches: list[list[Any]] | None = None
        """Those of the step under way, if it is measured."""

    def begin(self, step: int) -> None:
        """Begins a measured step, or the next objective of the same step, and its first stretch."""
        self._stretches = self._steps.setdefault(step, [])
        self.start()

    def end(self) -> None:
        """Ends what `begin` began, so that evaluations are not measured."""
        self._stretches = None

    def start(self) -> None:
        """Begins a stretch."""
        if self._stretches is not None:
            self._stretches.append([self._mark()])

    def stop(self) -> None:
        """Ends the stretch. Called again, it makes the stretch longer: DDP has several buckets of gradients."""
        if self._stretches:
            self._stretches[-1][1:] = [self._mark()]

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Makes every forward of these modules a stretch.

        The hooks run inside of those that fully_shard has registered before, so gathering weights is left out.
        """
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self._unless_compiling(self.start))
            module.register_forward_hook(lambda *_: self._unless_compiling(self.stop), prepend=True)

    @staticmethod
    def _unless_compiling(mark: Callable[[], None]) -> None:
        """A module may be inside of one that is compiled, whose graph cannot hold a clock."""
        if not torch.compiler.is_compiling():
            mark()

    def take_seconds(self) -> list[float]:
        """Returns the seconds of each step that was measured since the last call; the device must have finished it."""
        steps, self._steps = self._steps, {}
        whole = ([marks for marks in stretches if len(marks) == 2] for stretches in steps.values())
        return [sum(self._between(*marks) for marks in stretches) for stretches in whole if stretches]

    def clear(self) -> None:
        """Forgets what was measured."""
        self._steps = {}

    def _mark(self) -> Any:
        if not self._on_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, stop: Any) -> float:
        return start.elapsed_time(stop) / 1000 if self._on_cuda else stop - start


def innermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns those of the modules that contain none of the others."""
    chosen = {*modules}
    return [one for one in chosen if not any(inner in chosen for inner in one.modules() if inner is not one)]
