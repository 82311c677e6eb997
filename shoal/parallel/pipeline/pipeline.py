"""Runs the micro-batches of a step through the stages of a pipeline, by torch's schedules.

All ranks of a pipeline load the same micro-batches, so only hidden states are sent between stages, not masks, positions
or labels. Torch wants one shape for everything that is sent: hidden states of short batches are padded with zeros on
the wire, and the model never sees the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoal.config.mesh import micro_batches_needed
from shoal.errors import UserError
from shoal.forward import add_layer
from shoal.parallel.pipeline.stages import count_stages, follow_mode, stages_of
from shoal.parallel.pipeline.wire import (
    NOTE_LENGTH,
    Arrive,
    Leave,
    Shape,
    describe,
    hidden_state_of,
    read_note,
    shape_of,
)
from shoal.tensors import module_state_kept
from shoal.torch_private import agree_on_static_shapes, skip_greeting_itself

Inputs = Sequence[dict[str, Any]]
Score = Callable[[Any, int], Tensor]
Around = Callable[[int], AbstractContextManager[Any]]
NOT_SCALAR = "the recipe's loss has shape {}; it should be one number, a sum"
_KEPT_SCHEDULES = 4  # each has buffers for all micro-batches of a step


@dataclass
class _Stage:
    module: nn.Module
    index: int
    is_last: bool
    done: int = 0
    """The number of micro-batches it has computed in this step; schedules take them in order."""
    sent: dict[Shape, Shape] = field(default_factory=dict)
    received: dict[Shape, Shape] = field(default_factory=dict)
    """The shapes that this stage sends and receives, by the shape of the model's input."""


@dataclass
class _Work:
    """The micro-batches that are being computed."""

    inputs: Inputs
    score: Score
    around: Around
    rows: int | None = None
    """The batch dimension of everything that is sent; None if each hidden state keeps its own."""


class Pipeline:
    """The stages of this rank, and a step through the stages of all ranks.

    It is a layer around their forward, because torch has to see the module that was given to fully_shard: it then
    reduces gradients once, after the last micro-batch. A stage can no longer be called by hand.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        schedule: str,
        group: dist.ProcessGroup,
        device: torch.device,
        entry: str | None,
    ):
        """`modules` are this rank's stages (see `stages_of`); `entry` is the input that hidden states replace."""
        if entry is None:
            raise UserError(
                "distributed.mesh.pp > 1: the recipe's plan has no entry, the input that hidden states replace in "
                "later stages; give ParallelPlan(entry=...) the keyword, such as input_ids"
            )
        self.schedule, self.group, self.device, self.entry = schedule, group, device, entry
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.num_stages = count_stages(self.size, schedule)
        self._rank_of = {s: r for r in range(self.size) for s in stages_of(r, self.size, schedule)}
        self.stages: list[_Stage] = []
        for module, index in zip(modules, stages_of(self.rank, self.size, schedule), strict=True):
            stage = _Stage(module, index, index == self.num_stages - 1)
            add_layer(module, partial(self._compute, stage))
            self.stages.append(stage)
            if isinstance(module, FSDPModule) and schedule == "zbv":
                # zbv computes weight gradients later, and finds weights by the parameters that the forward used.
                module.set_reshard_after_forward(False)
        self._work: _Work | None = None
        self._schedules: dict[tuple[int, int, Shape], Any] = {}
        self._most_rows = 0
        self._known: set[Shape] = set()
        self._trained: set[Shape] = set()
        # The argument of the first stage, which takes its inputs from the micro-batch: fully_shard expects a tensor.
        self._nothing = torch.zeros(1, device=device)
        # A group's communicator is created by its first call, in which all ranks must take part.
        dist.all_reduce(torch.zeros(1, device=device), group=group)

    def step(self, inputs: Inputs, score: Score, around: Around = nullcontext) -> list[Tensor]:
        """Computes the gradients of the sum of all scores; fully_shard sums them over data-parallel ranks.

        `inputs` are the model's keywords for each micro-batch. `score(output, index)` returns the number whose backward
        is run; only the last stage calls it, and these numbers are returned there. `around(index)` is entered around
        everything that a stage computes of a micro-batch, the score included.

        Under fully_shard, call it once per step: gradients of an earlier call may be lost.
        """
        shape = self._one_shape(inputs)
        if shape not in self._trained:
            self._explore(inputs[0], around)
            self._trained.add(shape)
        self._most_rows = max(self._most_rows, *(self._rows(one) for one in inputs))
        # A short step at the end of the data is filled up, as are the rounds of equal length that torch interleaves.
        num = max(len(inputs), micro_batches_needed(self.schedule, self.num_stages))
        while self.schedule == "interleaved" and num % max(1, num // self.size):
            num += 1
        schedule = self._find_schedule(num, shape)
        losses: list[Tensor] = []
        self._begin(_Work(inputs, score, around, self._most_rows))
        first = [self._nothing.repeat(num)] if self.stages[0].index == 0 else []
        has_last = any(stage.is_last for stage in self.stages)
        target = torch.empty(num) if has_last else None  # torch wants one to split into micro-batches
        try:
            schedule.step(*first, target=target, losses=losses, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, UserError):  # torch wraps what a stage raises
                raise error.__cause__ from None
            raise
        finally:
            self._work = None
        return [loss.detach() for loss in losses[: len(inputs)]]

    @torch.no_grad()
    def evaluate(self, inputs: Inputs, score: Score, around: Around = nullcontext) -> list[Tensor]:
        """Returns the scores without gradients, for any number of micro-batches of any shapes.

        In each tick every stage computes one micro-batch, then all ranks send at once. Torch's schedules have an
        `eval`, too, but not for V shapes, nor for fewer micro-batches than stages.
        """
        self._begin(_Work(inputs, score, around))
        # Before the first micro-batch of a new shape, a note says what will be sent. All ranks know which one that is.
        shapes = [self._shape(one) for one in inputs]
        first_of_shape = {shapes.index(shape) for shape in shapes if shape not in self._known}
        self._known.update(shapes)
        losses, arrived = [], dict[int, Tensor]()
        for tick in range(len(inputs) + self.num_stages - 1):
            leaving: dict[int, Tensor] = {}
            for stage in self.stages:
                if 0 <= tick - stage.index < len(inputs):
                    output = stage.module(arrived.pop(stage.index) if stage.index else self._nothing)
                    if stage.is_last:
                        losses.append(output)
                    else:
                        leaving[stage.index + 1] = output
            arrived = self._exchange(leaving, tick + 1, inputs, first_of_shape)
        self._work = None
        for module in (module for stage in self.stages for module in stage.module.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()  # no backward will do it
        return losses

    def _exchange(
        self, leaving: dict[int, Tensor], tick: int, inputs: Inputs, first_of_shape: set[int]
    ) -> dict[int, Tensor]:
        """Sends `leaving` (by the index of the receiving stage) and returns what this rank's stages need in a tick."""
        coming = [s for s in self.stages if s.index and 0 <= tick - s.index < len(inputs)]
        remote = [s for s in coming if self._rank_of[s.index - 1] != self.rank]
        outward = {index: t for index, t in sorted(leaving.items()) if self._rank_of[index] != self.rank}
        expects_note = [s for s in remote if tick - s.index in first_of_shape]
        notes = {s.index: torch.empty(NOTE_LENGTH, dtype=torch.long, device=self.device) for s in expects_note}
        self._transfer({i: describe(t) for i, t in outward.items() if tick - i in first_of_shape}, notes)
        buffers = {}
        for stage in coming:
            one = inputs[tick - stage.index]
            if stage.index in notes:
                stage.received[self._shape(one)] = read_note(notes[stage.index])
            elif stage.index in leaving:
                stage.received[self._shape(one)] = shape_of(leaving[stage.index])
            if stage in remote:
                buffers[stage.index] = self._buffer(stage.received[self._shape(one)], self._rows(one))
        self._transfer(outward, buffers)
        return {s.index: buffers[s.index] if s in remote else leaving[s.index] for s in coming}

    def _transfer(self, outward: dict[int, Tensor], inward: dict[int, Tensor]) -> None:
        """Sends and receives in one batch; two ranks that send to each other in turn would both wait."""
        sends = [dist.P2POp(dist.isend, t, group=self.group, group_peer=self._rank_of[i]) for i, t in outward.items()]
        receives = [
            dist.P2POp(dist.irecv, t, group=self.group, group_peer=self._rank_of[i - 1]) for i, t in inward.items()
        ]
        if sends or receives:
            for work in dist.batch_isend_irecv(sends + receives):
                work.wait()

    def _compute(self, stage: _Stage, forward: Callable[..., Any], arrived: Tensor) -> Tensor:
        """Computes the next micro-batch of a stage: returns the hidden state to send, or the score."""
        work, index = self._work, stage.done
        assert work is not None, "a stage of a pipeline cannot be called by itself"
        stage.done += 1
        if index >= len(work.inputs):
            return self._compute_nothing(stage, arrived)
        inputs = work.inputs[index]
        rows = self._rows(inputs)
        if stage.index:
            inputs = {**inputs, self.entry: Arrive.apply(arrived, rows)}
        with work.around(index):
            output = forward(**inputs)
            if stage.is_last:
                loss = work.score(output, index)
                if loss.ndim:
                    raise UserError(NOT_SCALAR.format([*loss.shape]))
                return loss.to(torch.float32, copy=True)  # torch detaches it in place
        hidden = hidden_state_of(output)
        if not hidden.ndim or hidden.shape[0] != rows:
            raise UserError(
                f"a pipeline's stage made a hidden state of shape {[*hidden.shape]} of a batch of {rows}; its first "
                "dimension should be the batch"
            )
        shape = stage.sent.setdefault(self._shape(work.inputs[index]), shape_of(hidden))
        if shape_of(hidden) != shape:
            raise _ragged(hidden.shape[1:], shape[0])
        return Leave.apply(hidden, work.rows or rows)

    def _compute_nothing(self, stage: _Stage, arrived: Tensor) -> Tensor:
        """Stands in for micro-batches that the schedule needs beyond those of the step: no work, gradients of 0."""
        assert self._work is not None
        assert self._work.rows
        if stage.is_last:
            return arrived.sum(dtype=torch.float32) * 0
        hidden = self._buffer(stage.sent[self._shape(self._work.inputs[0])], self._work.rows).zero_()
        return hidden + arrived.sum() * 0 if stage.index else hidden.requires_grad_()

    def _begin(self, work: _Work) -> None:
        self._work = work
        for stage in self.stages:
            stage.done = 0
            if len(self.stages) > 1:
                follow_mode(stage.module)

    def _explore(self, inputs: dict[str, Any], around: Around) -> None:
        """Evaluates one micro-batch to learn the types and shapes that will be sent.

        Torch would do so itself, in one version with the loss and a backward, in another without.
        """
        if self._trained and any(isinstance(stage.module, FSDPModule) for stage in self.stages):
            # This gathers parameters, so all data-parallel ranks would have to do it in the same step.
            raise _ragged(self._shape(inputs)[0], next(iter(self._trained))[0])
        self._known.discard(self._shape(inputs))  # from an evaluation, maybe in other types
        for stage in self.stages:
            stage.sent.pop(self._shape(inputs), None)
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices), module_state_kept([stage.module for stage in self.stages]):
            self.evaluate([inputs], lambda output, index: torch.zeros((), device=self.device), around)

    def _find_schedule(self, num: int, shape: Shape) -> Any:
        """Returns torch's schedule for this number and shape of micro-batches; it cannot serve others."""
        key = (num, self._most_rows, shape)
        schedule = self._schedules.pop(key, None) or self._make_schedule(num, shape)
        self._schedules[key] = schedule
        if len(self._schedules) > _KEPT_SCHEDULES:
            self._schedules.pop(next(iter(self._schedules)))
        return schedule

    def _make_schedule(self, num: int, shape: Shape) -> Any:
        from torch.distributed import pipelining  # takes seconds to import

        stages = []
        for stage in self.stages:
            arriving, leaving = self._nothing.to("meta"), torch.empty((), device="meta")
            if stage.index:
                arriving = self._buffer(stage.received[shape], self._most_rows, "meta").requires_grad_()
            if not stage.is_last:
                leaving = self._buffer(stage.sent[shape], self._most_rows, "meta")
            stages.append(
                pipelining.PipelineStage(
                    stage.module,
                    stage.index,
                    self.num_stages,
                    self.device,
                    input_args=(arriving,),
                    output_args=leaving.requires_grad_(),
                    group=self.group,
                )
            )
            skip_greeting_itself(stages[-1])
        kinds = {
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B,
            "zbv": pipelining.ScheduleZBVZeroBubble,
        }
        held: Any = stages[0] if self.schedule in ("gpipe", "1f1b") else stages
        schedule = kinds[self.schedule](held, num, loss_fn=lambda loss, target: loss, scale_grads=False)
        if dist.get_backend(self.group) == "fake":
            agree_on_static_shapes(schedule, stages)
        return schedule

    def _buffer(self, shape: Shape, rows: int, device: torch.device | str | None = None) -> Tensor:
        return torch.empty((rows, *shape[0]), dtype=shape[1], device=device or self.device)

    def _rows(self, inputs: dict[str, Any]) -> int:
        entry = inputs.get(self.entry)
        if not isinstance(entry, Tensor) or not entry.ndim:
            raise UserError(
                f"the plan's entry is {self.entry!r}, but the recipe's inputs have no batch of that name; "
                f"they have {', '.join(inputs)}"
            )
        return entry.shape[0]

    def _shape(self, inputs: dict[str, Any]) -> Shape:
        """Returns the shape of the model's input, which decides the shape of what is sent."""
        self._rows(inputs)
        return shape_of(inputs[self.entry])

    def _one_shape(self, inputs: Inputs) -> Shape:
        first = self._shape(inputs[0])
        for one in inputs:
            if self._shape(one) != first:
                raise _ragged(self._shape(one)[0], first[0])
        return first


def _ragged(shape: Sequence[int], other: Sequence[int]) -> UserError:
    return UserError(
        f"ragged data: samples of a pipeline have the shapes {[*shape]} and {[*other]}, but one schedule takes one "
        "shape; pad or pack them to one length"
    )
