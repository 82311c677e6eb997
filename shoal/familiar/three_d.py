"""Data, pipeline and tensor parallelism at once, by the names of their three sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from shoal.errors import UserError
from shoal.familiar.pipeline import (
    LossFunction,
    PipelineParallelModel,
    apply_pipeline_parallelism,
    plan_of,
)
from shoal.parallel.tensor.layers import check_world_sizes
from shoal.parallel.tensor.tensor_parallel import TensorParallel
from shoal.strategies import Loop, MeshStrategy
from shoal.strategies.module_state import share_model
from shoal.strategies.scaled_gradients import ScaledGradients
from shoal.types import NO_PLAN, ParallelPlan, StepInfo, Weights
from shoal.weights.parameter_extras import check_replaceable, make_contiguous


class ThreeDParallelism:
    """A model spread over a mesh: stages of layers, parts of each layer, and shards of a batch.

    It joins the processes of the run, or uses the process group that is there. Data parallelism also shards the
    weights, as FSDP does.
    """

    def __init__(
        self,
        model: nn.Module,
        data_parallel_size: int = -1,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        *,
        plan: ParallelPlan | None = None,
        **options: Any,
    ):
        """The product of the sizes is the number of processes; -1 takes those that the others leave.

        An nn.Sequential needs no plan for a pipeline. Layers are split by tensor parallelism if they are
        ColumnParallelLinear and so on, or if the plan says how. `options` are those of MeshStrategy.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"ThreeDParallelism: the first argument is a {type(model).__name__}; write ThreeDParallelism(model, "
                "data_parallel_size=..., ...), or MeshStrategy(mesh={...}) for a strategy without a model"
            )
        mesh = {"pp": pipeline_parallel_size, "dp_shard": data_parallel_size, "tp": tensor_parallel_size}
        self.strategy = strategy = MeshStrategy(mesh=mesh, **options)
        strategy.setup()
        assert strategy.mesh is not None
        sides = strategy.layout.mesh
        self.dp_size, self.pp_size, self.tp_size = sides["dp_shard"], sides["pp"], sides["tp"]
        groups = [strategy.mesh.get_group(side) for side in ("dp_shard", "pp", "tp")]
        self.dp_group, self.pp_group, self.tp_group = groups
        if plan is None:
            plan = plan_of(model) if self.pp_size > 1 else ParallelPlan.derive(model)
        if strategy.world_size > 1 and strategy.world.group != "imagined":
            share_model(model)  # all start from rank 0's weights
        strategy._place_model(model, (), plan, Weights("built"), "mean")
        scale, self._scaled = strategy._loss_scale, None
        if scale:
            self._scaled = ScaledGradients(model, strategy._updates, "step(optimizer) of ThreeDParallelism")
        self.model = PipelineParallelModel.of(
            model,
            getattr(strategy, "_pipeline", None),
            strategy.device,
            Loop(strategy).autocast,
            (lambda: scale.scale) if scale else None,
        )

    def forward(self, x: Tensor, num_microbatches: int = 1) -> Tensor:
        """Returns the output for this rank's part of a batch."""
        output: Tensor = self.model(x, num_microbatches)
        return output

    __call__ = forward

    def forward_backward(self, x: Tensor, targets: Tensor, loss_fn: LossFunction, num_microbatches: int = 1) -> Tensor:
        """Computes the gradients of the mean loss over all ranks; returns the loss of this rank's part of the batch.

        Ranks of one data-parallel index, which are those of one pipeline, give the same samples.
        """
        if self._scaled:
            self._scaled.after_backward()
        return self.model.forward_backward(x, targets, loss_fn, num_microbatches)

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> StepInfo:
        """Clips the gradient by its norm over all ranks, updates, and clears it."""
        (optimizer,) = self.strategy._joined(optimizer, self.strategy.engine)
        return self.strategy.step(optimizer, max_norm)

    def close(self) -> None:
        """Leaves the other processes."""
        self.strategy.teardown()

    @staticmethod
    def apply_tensor_parallelism(
        model: nn.Module, tp_group: dist.ProcessGroup, plan: ParallelPlan | None = None
    ) -> nn.Module:
        """Splits the layers of a model over the ranks of a group, as `apply_tensor_parallelism` does."""
        return apply_tensor_parallelism(model, tp_group, plan)

    @staticmethod
    def apply_pipeline_parallelism(
        model: nn.Module, pp_group: dist.ProcessGroup, plan: ParallelPlan | None = None
    ) -> PipelineParallelModel:
        """Leaves this rank's stage in a model, as `apply_pipeline_parallelism` does."""
        return apply_pipeline_parallelism(model, pp_group, plan)


def apply_tensor_parallelism(
    model: nn.Module, tp_group: dist.ProcessGroup, plan: ParallelPlan | None = None
) -> nn.Module:
    """Splits the layers of a model over the ranks of a group, and returns the model, which is changed.

    Its ColumnParallelLinear, RowParallelLinear and TensorParallelAttention say how they are split; `plan.tensor` says
    it for other layers. All ranks start from the first one's weights. Parameters that are split become DTensors.
    """
    check_world_sizes(model, dist.get_world_size(tp_group))
    if dist.get_world_size(tp_group) == 1:
        return model
    check_replaceable(model, "tensor parallelism")
    make_contiguous(model)
    if dist.get_backend(tp_group) != "fake":
        share_model(model, tp_group)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise UserError("apply_tensor_parallelism: the model is on the meta device; give it memory first")
    mesh = DeviceMesh.from_group(tp_group, device.type)
    TensorParallel(mesh).apply(model, plan or NO_PLAN)
    return model
