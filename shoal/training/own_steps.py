"""A step that is written by hand: its micro-batches, the values to log, and the verbs that its body calls.

The run around it is in `own_loop.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UserError
from shoal.strategies import Loop
from shoal.strategies.measures import NAME, is_reserved
from shoal.training.session import Session
from shoal.types import MicroBatch, StepInfo, StepOutput

FROM_CONFIG: Literal["training.max_grad_norm"] = "training.max_grad_norm"
"""Stands for the limit of the config where `run.step` takes one."""


class Step:
    """One step of a run: its micro-batches, and the values to log."""

    def __init__(self, session: Session, micro_batches: Sequence[MicroBatch], index: int):
        assert session.loop is not None
        self.number = index + 1
        """The number of the step, as in the log: the first is 1."""
        self.batches = Batches(session.loop, session.recipe, micro_batches, index)
        self._loop: Loop = session.loop
        self.logged: dict[str, Tensor | float] = {}
        """By the names in the log, such as `train/accuracy`."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Is entered around the forward and backward of one micro-batch; gradients are exchanged in the last one."""
        return self._accumulating(self.batches.current("step.accumulate()"))

    @contextmanager
    def _accumulating(self, index: int) -> Iterator[None]:
        self.batches.accumulates = True
        try:
            with self._loop.accumulate(last=index == len(self.batches) - 1):
                yield
        finally:
            self.batches.accumulates = False

    def log(self, **values: Tensor | float) -> None:
        """Notes values for the next line of the log, which has their means over ranks. The host does not wait.

        What is logged inside `for batch in step.batches` becomes the mean over the whole batch; outside, the last value
        counts. A name without a slash appears as `train/<name>`.
        """
        weight = self.batches.weight if self.batches.is_open else None
        for name, value in values.items():
            full = name if "/" in name else f"train/{name}"
            single = one_number(value, f"step.log({name}=...)")
            if not NAME.fullmatch(full):
                raise UserError(f"step.log({name}=...) is no good name; use letters, digits and _ . - /")
            if full.startswith("eval/") or is_reserved(full.removeprefix("train/")):
                raise UserError(f"step.log({name}=...): the run logs a number of this name itself; choose another")
            self.logged[full] = single if weight is None else self.logged.get(full, 0.0) + single * weight


class Logged:
    """The values that steps have logged since the last line of the log, the last one of each name."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self._values: dict[str, Tensor | float] = {}

    def add(self, step: Step) -> None:
        """Takes the values of a step that has ended."""
        self._values |= step.logged

    def read(self) -> dict[str, float]:
        """Returns the values, each the mean over ranks. All ranks call it, and the host waits."""
        strategy, names = self._loop.strategy, sorted(self._values)
        seen = crc32(" ".join(names).encode())
        if strategy.max_over_ranks(seen) != -strategy.max_over_ranks(-seen):
            raise UserError(f"step.log: ranks logged different names, this one {', '.join(names) or 'none'}")
        if names:
            values = [torch.as_tensor(self._values[name], device=strategy.device) for name in names]
            means = self._loop.reduce(torch.stack(values)).tolist()
            self._values = dict(zip(names, means, strict=True))
        return {name: float(value) for name, value in self._values.items()}

    def clear(self) -> None:
        """Forgets what a line of the log has shown."""
        self._values = {}

    def load(self, stored: Any) -> None:
        """Takes what `read` returned when a checkpoint was saved. A checkpoint is not trusted, so it is checked."""
        numbers = stored.items() if isinstance(stored, dict) else ()
        self._values = {
            name: float(number) for name, number in numbers if NAME.fullmatch(name) and isinstance(number, int | float)
        }


def one_number(value: Any, where: str) -> Tensor | float:
    """Returns a value that is one number: a tensor without dimensions, or a float."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().float().reshape(())
    if isinstance(value, int | float):
        return float(value)
    kind = f"its shape is {[*value.shape]}" if isinstance(value, Tensor) else f"it is a {type(value).__name__}"
    raise UserError(f"{where}: {kind}; give a single number")


class Batches:
    """This rank's micro-batches of a step, on the device. Generators are seeded before each of them.

    A rank that runs out of samples gets a filler, so that all ranks go through as many: its weight is 0.
    """

    def __init__(self, loop: Loop, recipe: Any, micro_batches: Sequence[MicroBatch], step: int):
        self._loop, self._step = loop, step
        self.micro_batches = micro_batches
        self._batches = loop.prepare_batches(micro_batches, recipe)
        counts: list[Tensor | int] = [recipe.count(batch) for batch in self._batches]
        self.count = loop.total(counts, micro_batches)
        """The number of samples or tokens of the whole batch."""
        self._counts = [count * micro.weight for count, micro in zip(counts, micro_batches, strict=True)]
        self._index: int | None = None
        self._passes = 0
        self.accumulates = False
        """True within `step.accumulate()`."""
        self.last_backward: int | None = None
        """Which micro-batch had a backward last, since the last update."""
        loop.seed(step, "body")

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        again = (self._passes,) if self._passes > 1 else ()  # the first time as the recipe would draw
        for index, batch in enumerate(self._batches):
            self._index = index
            self._loop.seed(self._step, index, *again)
            with nullcontext() if self.micro_batches[index].weight else self._loop.filler():
                yield batch
        self._index = None

    @property
    def is_open(self) -> bool:
        """True within a `for` over the micro-batches."""
        return self._index is not None

    def current(self, verb: str) -> int:
        """Returns which micro-batch is being computed."""
        if self._index is None and len(self) > 1:
            raise UserError(
                f"{verb} outside of `for batch in step.batches:`: a step has {len(self)} micro-batches, and it is not "
                "known which one this is; call it inside"
            )
        return self._index or 0

    def check_computed(self) -> None:
        """Refuses an update before the backward of the last micro-batch, in which gradients are exchanged."""
        if self.last_backward is None:
            raise UserError(
                "run.step(): no run.backward() came before it; call run.backward(loss) in place of loss.backward(), "
                "which would neither weight micro-batches nor log the loss"
            )
        if self.last_backward != len(self) - 1:
            raise UserError(
                f"run.step(): only {self.last_backward + 1} of the {len(self)} micro-batches of this step had a "
                "run.backward(); compute all in `for batch in step.batches:`, and call run.step() after it"
            )

    def terms(self, verb: str) -> Tensor | int:
        """Returns how many samples or tokens of the global batch the current micro-batch has; 0 for a filler."""
        return self._counts[self.current(verb)]

    @property
    def weight(self) -> Tensor:
        """What a mean over the micro-batch counts in a mean over the whole batch, times the number of ranks."""
        share = self.terms("step.log()") / self.count
        # The root is 0 for a count of 0, and NaN for a negative one, so that the update is skipped.
        return torch.where(self.count > 0, share, self.count.sqrt()) * self._loop.num_data_ranks


class Verbs(ABC):
    """What the body of a step calls. They are those of `Loop`, for the model and optimizer of one session."""

    _session: Session | None = None
    _current: Step | None = None

    @property
    def session(self) -> Session:
        """The model in its place, with its optimizer."""
        assert self._session is not None
        return self._session

    @property
    def model(self) -> nn.Module:
        """The module to call. `session.model` is the plain model inside, with its own names."""
        return self.session.strategy.engine

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that `training.optimizer` describes. Its learning rate is set before every step."""
        return self.session.optimizer

    @property
    def recipe(self) -> Any:
        """The recipe."""
        return self.session.recipe

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.session.strategy.device

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self.session.strategy.is_main_process

    @property
    def _loop(self) -> Loop:
        assert self.session.loop is not None
        return self.session.loop

    def autocast(self) -> AbstractContextManager[None]:
        """Is entered around the forward and the loss: computes in `training.mixed_precision`."""
        return self._loop.autocast()

    def backward(self, loss: Tensor) -> None:
        """Runs the backward of a mean over the micro-batch: over samples, or over what `recipe.count` counts.

        Micro-batches are weighted by their counts, so that the gradient is that of the mean over the global batch,
        however it is split.
        """
        batches = self._in_step("run.backward()").batches
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise UserError(
                "run.backward: the loss has no gradient; compute it from what run.model returns, without .item(), "
                ".detach() and torch.no_grad()"
            )
        if loss.ndim:
            raise UserError(f"run.backward: the loss has the shape {[*loss.shape]}; give the mean over the batch")
        if len(batches) > 1 and not batches.accumulates:
            raise UserError(
                f"run.backward: a step has {len(batches)} micro-batches; put `with step.accumulate():` around the "
                "forward and backward of each"
            )
        self._total = self._total + loss.detach().float() * batches.terms("run.backward()")
        self._loop.backward(loss * batches.weight)
        batches.last_backward = batches.current("run.backward()")

    def clip(self, *, max_norm: float | None = None, max_value: float | None = None) -> None:
        """Makes the next `step` clip the gradient, by its norm or each element by its size."""
        self._in_step("run.clip()")
        self._loop.clip(max_norm=max_norm, max_value=max_value)

    def step(self, max_norm: float | Literal["training.max_grad_norm"] | None = FROM_CONFIG) -> StepInfo:
        """Unscales, clips, updates and clears the gradient; an update that is not finite is skipped.

        Without `max_norm` the gradient is clipped to `training.max_grad_norm`.
        """
        batches = self._in_step("run.step()").batches
        batches.check_computed()
        info = self._update(max_norm)
        batches.last_backward = None
        earlier = self._info
        self._info = info if earlier is None else replace(info, skipped=torch.maximum(earlier.skipped, info.skipped))
        return info

    def zero_grad(self) -> None:
        """Drops gradients without a step."""
        self._loop.zero_grad()

    def to_device(self, batch: Any) -> Any:
        """Moves the tensors of a batch to this rank's device, however nested."""
        return self._loop.to_device(batch)

    def reduce(self, tensor: Tensor, op: Literal["sum", "mean", "max"] = "mean") -> Tensor:
        """Returns the sum, mean or maximum over data-parallel ranks, on every rank. All ranks call it."""
        return self._loop.reduce(tensor, op)

    # Inside

    _info: StepInfo | None = None
    _total: Tensor

    @abstractmethod
    def _update(self, max_norm: float | Literal["training.max_grad_norm"] | None) -> StepInfo:
        """Updates the model by the gradients that there are."""

    def _in_step(self, verb: str) -> Step:
        if self._current is None:
            raise UserError(f"{verb} is for the body of a step; call it inside `for step in run.steps():`")
        return self._current

    def _begin(self, micro_batches: Sequence[MicroBatch], index: int) -> Step:
        """Starts a step; `index` counts from 0."""
        self._loop.warm_up()
        self._current, self._info = Step(self.session, micro_batches, index), None
        self._total = torch.zeros((), device=self.device)
        return self._current

    def _end(self) -> tuple[StepOutput, StepInfo]:
        """Ends a step, and returns its results."""
        assert self._current is not None
        step, self._current = self._current, None
        if self._info is None:
            raise UserError(f"step {step.number} ended without run.step(); call it once the backward is done")
        info, self._info = self._info, None
        return StepOutput(self.session.strategy.sum_over_data(self._total), step.batches.count), info
