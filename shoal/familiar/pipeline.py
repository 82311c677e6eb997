"""Pipeline parallelism by its usual class name: each process holds some of the layers.

    model = PipelineParallelModel(num_layers=24, num_gpus=4, layer=make_layer)      # started as 4 processes
    optimizer = torch.optim.AdamW(model.parameters())                               # of this process's layers
    loss = model.forward_backward(x, targets, loss_fn, num_microbatches=4)
    optimizer.step()

All processes call the model with the same batch. Training is one call, because a pipeline computes the backward of one
micro-batch while the forward of another runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.parallel.pipeline.pipeline import Pipeline
from shoal.parallel.pipeline.stages import count_stages, cut, stages_of, take_stages
from shoal.types import ParallelPlan

LossFunction = Callable[[Any, Any], Tensor]
"""Returns the mean loss of (output, targets) of a micro-batch."""
ENTRY = "input"
"""The argument of nn.Sequential's forward."""


class PipelineParallelModel(nn.Module):
    """Layers in sequence, in stages over the processes of a group; the stage of this process has real layers."""

    def __init__(
        self,
        num_layers: int | Sequence[nn.Module],
        num_gpus: int | None = None,
        layer: Callable[[], nn.Module] | None = None,
        *,
        schedule: str = "1f1b",
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ):
        """`num_layers` is a number, with a function `layer` that makes one, or a list of layers.

        `num_gpus` is the number of processes, one for each GPU, and has to be that of the process group.
        """
        super().__init__()
        if isinstance(num_layers, int):
            if layer is None:
                raise TypeError(
                    f"PipelineParallelModel(num_layers={num_layers}) needs layer=function, which makes a layer; or "
                    "give a list of layers: PipelineParallelModel(layers, num_gpus)"
                )
            num_layers = [layer() for _ in range(num_layers)]
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        if num_gpus is not None and num_gpus != size:
            raise UserError(
                f"num_gpus = {num_gpus}: there are {size} processes, and every stage needs one; start {num_gpus} by "
                "torchrun, and call setup_distributed() before, or change num_gpus"
            )
        model = nn.Sequential(*num_layers)
        self._take(model, plan_of(model) if size > 1 else ParallelPlan(), schedule, group, device)

    def _take(
        self,
        model: nn.Module,
        plan: ParallelPlan,
        schedule: str,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
    ) -> None:
        """Keeps this process's stages of a model."""
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.layers, self.pipeline, self.device = model, None, torch.device(device or _own_device())
        self._autocast, self._loss_scale = nullcontext, None
        if size > 1:
            group = group or dist.group.WORLD
            assert group is not None
            rank = dist.get_rank(group)
            cuts, mine = cut(model, plan, count_stages(size, schedule)), stages_of(rank, size, schedule)
            stages = take_stages(model, plan, cuts, mine)
            model.to(self.device)
            self.pipeline = Pipeline(stages, schedule, group, self.device, plan.entry)
        model.to(self.device)

    pipeline: Pipeline | None
    _autocast: Callable[[], AbstractContextManager[None]]
    _loss_scale: Callable[[], Tensor] | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        pipeline: Pipeline | None,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        loss_scale: Callable[[], Tensor] | None = None,
    ) -> PipelineParallelModel:
        """Returns a model whose stages are in their place already.

        `autocast` is entered around the forward and the loss; `loss_scale` returns what the loss is multiplied by.
        """
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.layers, self.pipeline, self.device = model, pipeline, device
        self._autocast, self._loss_scale = autocast, loss_scale
        return self

    def forward(self, x: Tensor, num_microbatches: int = 4) -> Tensor:
        """Returns the model's output on every process, computed in micro-batches. To train, call forward_backward."""
        parts = _split(x.to(self.device), num_microbatches)
        if self.pipeline is None:
            with self._autocast():
                return torch.cat([self.layers(part) for part in parts])
        outputs: list[Tensor] = []

        def keep(output: Any, index: int) -> Tensor:
            outputs.append(output)
            return torch.zeros((), device=self.device)

        self.pipeline.evaluate([{self.pipeline.entry: part} for part in parts], keep, lambda index: self._autocast())
        output = _from_last_stage(torch.cat(outputs) if outputs else None, self.pipeline)
        if not torch.is_grad_enabled() or not output.is_floating_point():
            return output
        said: Tensor = _WithoutBackward.apply(output.requires_grad_())
        return said

    def forward_backward(self, x: Tensor, targets: Tensor, loss_fn: LossFunction, num_microbatches: int = 4) -> Tensor:
        """Computes the gradients of the mean loss of a batch, and returns that loss on every process.

        `loss_fn(output, targets)` is the mean over a micro-batch. Gradients are added to those that are there.
        """
        x, targets = x.to(self.device), targets.to(self.device)
        parts, wanted = _split(x, num_microbatches), _split(targets, num_microbatches)
        shares = [len(part) / len(x) for part in parts]
        total = torch.zeros((), device=self.device)

        def score(output: Any, index: int) -> Tensor:
            loss = loss_fn(output, wanted[index]) * shares[index]
            total.add_(loss.detach())
            return loss * self._loss_scale() if self._loss_scale else loss

        if self.pipeline is None:
            for index, part in enumerate(parts):
                with self._autocast():
                    loss = score(self.layers(part), index)
                loss.backward()
            return total
        self.pipeline.step([{self.pipeline.entry: part} for part in parts], score, lambda index: self._autocast())
        dist.all_reduce(total, group=self.pipeline.group)  # of the last stage; the others have 0
        return total


def apply_pipeline_parallelism(
    model: nn.Module,
    pp_group: dist.ProcessGroup,
    plan: ParallelPlan | None = None,
    *,
    schedule: str = "1f1b",
    device: torch.device | str | None = None,
) -> PipelineParallelModel:
    """Leaves this process's stage in a model, and returns the pipeline of the stages in the group.

    An nn.Sequential needs no plan; for any other model it says the order of its modules. The model is changed.
    """
    pipelined = PipelineParallelModel.of(model, None, torch.device(device or _own_device()))
    pipelined._take(model, plan or plan_of(model), schedule, pp_group, device)
    return pipelined


def plan_of(model: nn.Module) -> ParallelPlan:
    """Returns the plan of an nn.Sequential: its layers in their order. Refuses other models."""
    if not isinstance(model, nn.Sequential):
        raise UserError(
            f"a pipeline needs the order of the modules of a {type(model).__name__}; make it an nn.Sequential, or give "
            "plan=ParallelPlan(order=(...), entry=..., blocks=(...))"
        )
    names = [name for name, _ in model.named_children()]
    blocks = tuple(name for name, child in model.named_children() if next(child.parameters(), None) is not None)
    return ParallelPlan(blocks=blocks, order=tuple(names), entry=ENTRY)


def _own_device() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device(found.type, torch.accelerator.current_device_index()) if found else torch.device("cpu")


def _split(batch: Tensor, number: int) -> tuple[Tensor, ...]:
    if not 1 <= number <= len(batch):
        raise UserError(f"num_microbatches = {number}: use 1 to {len(batch)}, which is the number of samples")
    return batch.tensor_split(number)


def _from_last_stage(output: Tensor | None, pipeline: Pipeline) -> Tensor:
    """Returns on every process the output that the process of the last stage has."""
    last, size, group = pipeline.num_stages - 1, pipeline.size, pipeline.group
    holder = next(rank for rank in range(size) if last in stages_of(rank, size, pipeline.schedule))
    source = dist.get_global_rank(group, holder)
    kinds: list[Any] = [(output.shape, output.dtype) if output is not None else None]
    dist.broadcast_object_list(kinds, source, group=group, device=pipeline.device)
    shape, dtype = kinds[0]
    shared = torch.empty(shape, dtype=dtype, device=pipeline.device) if output is None else output.contiguous()
    dist.broadcast(shared, source, group=group)
    return shared


class _WithoutBackward(torch.autograd.Function):
    """Says in the backward what to call instead; without it torch would only say that nothing requires a gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UserError(
            "the output of a pipeline has no backward of its own; call model.forward_backward(x, targets, loss_fn, "
            "num_microbatches)"
        )
