"""The numbers of a log line. They stay on the device until a line is due."""

from __future__ import annotations

import socket
import time
from math import inf

import torch
from torch import nn

from shoal.config.mesh import coordinates
from shoal.config.schema import TrainingConfig
from shoal.data import Loader
from shoal.errors import UserError
from shoal.observe.flops import count_forward_flops, peak_flops
from shoal.strategies.contract import prepare_batch
from shoal.tensors import map_tensors
from shoal.training.metric_sums import SinceLog, add_up, means, read_steps, sum_over_ranks, to_host
from shoal.training.session import Session
from shoal.training.stragglers import OwnTimes, Stragglers, find_slowest
from shoal.types import MicroBatch, Objective, StepInfo, StepOutput


class Meter:
    """Keeps each step's results on the device; the host waits for them only in `read` and before a checkpoint."""

    def __init__(
        self,
        session: Session,
        training: TrainingConfig,
        loader: Loader,
        skipped_steps: int = 0,
        since_log: SinceLog | None = None,
        straggler_factor: float | None = None,
        skipped_in_a_row: int = 0,
    ):
        """`skipped_steps` and `since_log` are those of the checkpoint that the run goes on from."""
        strategy = self._strategy = session.strategy
        self._unit, self._objects = session.recipe.unit, session.metric_objects
        precision = training.mixed_precision.removeprefix("pure_")
        peak = peak_flops(strategy.device, "tf32" if training.tf32 and precision == "fp32" else precision)
        self._peak_flops = peak and peak * strategy.world_size
        self._steps: list[tuple[StepOutput, StepInfo]] = []
        self._counted = self._grad_norm = 0.0
        self._skipped_steps = skipped_steps
        self._since_log = since_log or SinceLog()
        known = self._since_log.object_paths.items()  # the recipe may have changed since
        self._since_log.object_paths = {name: path for name, path in known if path in self._objects.by_path}
        self.skipped_in_a_row = skipped_in_a_row
        self.straggler: str | None = None
        """What the last line has to say about a rank that is slower than its peers."""
        self._stragglers = Stragglers(straggler_factor)
        self._is_first_line = True
        self._own_time = strategy.engaged.own_time if strategy.world_size > 1 and straggler_factor else None
        self.flops_per_sample: float | None = None
        self.restart_clock(loader)

    def add(self, output: StepOutput, info: StepInfo) -> None:
        """Keeps a step's results. Adding them up here would launch a handful of kernels in every step."""
        self._steps.append((output, info))

    def read(self, loader: Loader, restart: bool = True) -> dict[str, float]:
        """Returns the mean loss and the recipe's metrics since the last line, the norm of the last step, and rates
        since the clock was last restarted; restarts the clock.

        Without `restart` the next line begins where this one began. All ranks call it together.
        """
        times = self._settle(loader)
        seconds, since_log = max(time.perf_counter() - self._since, 1e-9), self._since_log
        measured = {**means(since_log.metrics), **self._objects.compute(since_log.object_paths)}
        num_samples = loader.position - self._position
        metrics = {
            "train/loss": since_log.loss,
            **{f"train/{name}": value for name, value in measured.items()},
            "train/grad_norm": self._grad_norm,
            "train/skipped_steps": self._skipped_steps,
            f"train/{self._unit}_per_second": (num_samples if self._unit == "samples" else self._counted) / seconds,
            "train/data_seconds": loader.waited_seconds - self._waited,
        }
        if self.flops_per_sample and self._peak_flops:
            metrics["train/mfu"] = self.flops_per_sample * num_samples / seconds / self._peak_flops
        if slowest := find_slowest(times):
            metrics |= {"train/slowest_rank": slowest.rank, "train/slowest_ratio": slowest.ratio}
        # The first step compiles and fills caches, which takes ranks different times.
        self.straggler = self._stragglers.add(times, seconds) if times and not self._is_first_line else None
        self._is_first_line = False
        if restart:
            self._objects.reset(since_log.object_paths)
            self._since_log = SinceLog()
        self.restart_clock(loader)
        return metrics

    def skipped_steps(self) -> int:
        self._settle()
        return self._skipped_steps

    def since_log(self) -> SinceLog:
        """Returns what a checkpoint needs, so that a resumed run writes the same next line."""
        self._settle()
        return self._since_log

    def restart_clock(self, loader: Loader) -> None:
        """Leaves the time until now, such as that of an evaluation, out of the rates."""
        self._settle()
        self._counted = 0.0
        self._position, self._waited = loader.position, loader.waited_seconds
        if self._own_time is not None:
            self._own_time.clear()
        self._since = time.perf_counter()

    def measure_next(self, is_measured: bool) -> None:
        """Says whether the next step is one of those in which ranks are compared."""
        if self._own_time is not None:
            self._own_time.is_on = is_measured

    def _settle(self, loader: Loader | None = None) -> list[OwnTimes]:
        """Waits for the steps since the last call, and adds them up, one after another and in float64.

        So a line of the log does not depend on where checkpoints and evaluations settled in between. With `loader` the
        times of all ranks since the clock was restarted are returned, too, if they were measured.
        """
        if not self._steps:
            return []
        since_log = self._since_log
        numbers = read_steps(self._strategy, self._steps)
        self._grad_norm = numbers.grad_norms[-1]
        for total, count in zip(numbers.totals, numbers.counts, strict=True):
            since_log.total, since_log.count = since_log.total + total, since_log.count + count
            self._counted += count
        if self._counted == inf:
            raise UserError("the recipe's count of a batch is infinite; it must be a finite number, at least 0")
        measured = [output.metrics for output, _ in self._steps]
        own_times = self._own_times(loader) if loader is not None else None
        sums, paths, times_by_rank = sum_over_ranks(
            self._strategy, to_host(measured), self._objects.paths_of(measured), own_times
        )
        since_log.metrics = add_up(sums, since_log.metrics)
        since_log.object_paths |= paths
        for skipped in numbers.skipped:
            self._skipped_steps += int(skipped)
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self._steps.clear()
        return [] if None in times_by_rank else times_by_rank

    def _own_times(self, loader: Loader) -> OwnTimes | None:
        """Returns the times of this rank since the clock was restarted, if any step since then was measured."""
        if self._own_time is None or not (computing := self._own_time.take_seconds()):
            return None
        stage = coordinates(self._strategy.rank, self._strategy.layout.mesh)["pp"]
        data = loader.waited_seconds - self._waited
        return OwnTimes(socket.gethostname(), stage, data, len(self._steps), tuple(computing))


def flops_per_sample(
    meta_model: nn.Module | None, micro: MicroBatch, recipe: Objective, seed: int, device: torch.device
) -> float | None:
    """Counts, without computing, the model FLOPs of a forward and backward (twice the forward) for one sample.

    `meta_model` is the model on meta, as it was before any layout changed it.
    """
    if meta_model is None:
        return None
    # The whole batch, also if ranks share sequences.
    batch = map_tensors(lambda tensor: tensor.to("meta"), prepare_batch(micro, recipe, seed, device))
    forward = count_forward_flops(lambda: meta_model(**recipe.inputs(batch)))
    return 3 * forward / len(micro.ids) if forward else None
