"""One optimizer's update: the norm of the whole gradient, clipping, skipping what is not finite, the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from shoal.errors import UserError
from shoal.parallel.sharding.shards import (
    ELEMENTWISE,
    HALF,
    drop_gradients,
    hold_shards,
    is_elementwise,
    norm_of,
    split_over,
    take_gradients,
    total_norm,
)
from shoal.processes.group import cpu_group
from shoal.strategies.state import note_initial_state, sharded_parameter
from shoal.tensors import is_on_host
from shoal.torch_private import foreach_norm, skips_on_device
from shoal.transform.loss_scale import LossScale
from shoal.types import StepInfo

CLIPPING_EPSILON = 1e-6
"""What torch's `clip_grad_norm_` and DeepSpeed add to the norm before they divide by it. All layouts must do the same:
without it here, ZeRO would clip a gradient with a norm of 0.008 to a length that is 1.3e-4 shorter."""


class Update:
    """Steps an optimizer whose parameters are plain tensors that this rank holds whole."""

    steps_otherwise = False
    """True if a direct `optimizer.step()` needs a hook to use the right gradients."""

    def __init__(
        self,
        optimizer: Optimizer,
        loss_scale: LossScale | None,
        keeps_gradients: bool = False,
        average_over: Sequence[dist.ProcessGroup | None] = (),
    ):
        """`average_over` are the groups over which gradients are averaged here, if no engine does so earlier."""
        self.optimizer, self.loss_scale, self._keeps_gradients = optimizer, loss_scale, keeps_gradients
        self._average_over, self._stepping = average_over, False
        alike = {(parameter.device, parameter.dtype) for parameter in self._parameters()}
        self._is_of_one_kind = len(alike) == 1 and not {dtype for _, dtype in alike} & HALF
        """True if all gradients are on one device and in one type that is not half precision."""
        note_initial_state(optimizer)
        if self.steps_otherwise or loss_scale or average_over:
            optimizer.register_step_pre_hook(self._before_step)
        if isinstance(optimizer, torch.optim.SGD):
            optimizer.register_step_pre_hook(_start_momentum)

    def step(self, max_norm: float | None = None, max_value: float | None = None) -> StepInfo:
        """Unscales, clips and updates; an update whose gradient is not finite is skipped on the device.

        Fused optimizers, and others that say so, do all of it on the device, through the two tensors that torch's
        GradScaler also sets, and the host does not wait to know. The rest get divided gradients, and the host waits.
        """
        optimizer, loss_scale = self.optimizer, self.loss_scale
        gradients = self.gradients()
        norm = self.norm(gradients).float()  # fused optimizers take no other type for what is made of it
        if loss_scale:
            norm = norm / loss_scale.scale
        number = norm.item() if is_on_host(norm) else None
        skipped, divisor = _judge_on_device(norm, max_norm) if number is None else _judge(norm, number, max_norm)
        if loss_scale:
            divisor = loss_scale.scale * (1 if divisor is None else divisor)
        if max_value:
            bound = torch.as_tensor(max_value, device=norm.device) * (1 if divisor is None else divisor)
            for gradient in gradients:
                gradient.clamp_(min=-bound, max=bound)
        self._stepping = True
        try:
            if skips_on_device(optimizer):
                # Without `found_inf` torch need not take back that it has counted the step.
                optimizer.found_inf = None if number is not None and isfinite(number) else skipped  # type: ignore[attr-defined]
                optimizer.grad_scale = divisor  # type: ignore[attr-defined]
                optimizer.step()
            elif not skipped:
                if divisor is not None:
                    for gradient in gradients:
                        gradient.div_(divisor)
                optimizer.step()
        finally:
            self._stepping = False
            optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
        self.zero_grad()
        return StepInfo(norm, skipped)

    def gradients(self) -> list[Tensor]:
        """Returns the gradients that the optimizer is about to use."""
        for parameter in self._used_on_any_rank() if self._average_over else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # other ranks used it
            for group in self._average_over:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)
        return [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    def _used_on_any_rank(self) -> list[nn.Parameter]:
        """Returns the parameters that have a gradient on any of the ranks to average over."""
        parameters = [parameter for parameter in self._parameters() if parameter.requires_grad]
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        for group in self._average_over:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=cpu_group(group))
        return [parameter for parameter, is_used in zip(parameters, used.tolist(), strict=True) if is_used]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Returns the norm of the whole gradient, equal on all ranks."""
        if not gradients or not self._is_of_one_kind:
            return norm_of(gradients)
        # What get_total_norm computes, to the bit, with one Python call instead of thirty.
        return torch.linalg.vector_norm(torch.stack(foreach_norm(gradients))).detach()

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        if self._keeps_gradients or getattr(self.optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            self.optimizer.zero_grad(set_to_none=not self._keeps_gradients)
            return
        for group in self.optimizer.param_groups:  # what torch does, without twenty Python calls for its profiler
            for parameter in group["params"]:
                parameter.grad = None

    def has_gradients(self) -> bool:
        """Returns whether a backward has left gradients that no step has used. It is the same on all ranks."""
        used = self._used_on_any_rank()
        if not self._keeps_gradients:
            return bool(used)
        return bool(get_total_norm([p.grad for p in used if p.grad is not None]))  # those that were cleared are zero

    def check_used(self) -> None:
        """Raises if ranks used different parameters in the last step, where that would go wrong silently."""

    def _before_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        """Makes a plain `optimizer.step()` step the gradients that `step` would, or refuses it."""
        if self._stepping:
            return
        if self.loss_scale:
            raise UserError(
                "optimizer.step() does not know the loss scale of fp16; use step(optimizer, max_norm) of the strategy "
                "or loop"
            )
        self.gradients()


def _start_momentum(optimizer: Optimizer, *arguments: Any) -> None:
    """Gives the momentum of fused SGD its first value, 0, where a parameter has none.

    By itself, torch allocates all of it in the first step, and leaves it unfilled if that step is skipped on the
    device; and it fails for a parameter whose first gradient comes later. Not with dampening: torch leaves that out of
    the first step, so 0 would be another first value.
    """
    for group in optimizer.param_groups:
        if group["momentum"] and group["fused"] and not group["dampening"]:
            for parameter in group["params"]:
                if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class ShardedUpdate(Update):
    """Steps an optimizer whose parameters may be DTensors, on this rank's part of them.

    Fused kernels take plain tensors alone, and an elementwise update of the parts is the update of the whole. Calls of
    `optimizer.step()` and `optimizer.zero_grad()` by hand work on the parts, too.
    """

    steps_otherwise = True

    def __init__(
        self,
        optimizer: Optimizer,
        loss_scale: LossScale | None,
        max_over_data: Callable[[int], int],
        stages: dist.ProcessGroup | None = None,
        norm_device: torch.device | None = None,
    ):
        """`stages` are the ranks of a pipeline, which have other parameters and add up their norms."""
        split = any(split_over(p) for group in optimizer.param_groups for p in group["params"])
        if split and not getattr(optimizer, "gathers_parts", False) and not is_elementwise(optimizer):
            raise UserError(
                f"{type(optimizer).__name__} looks at whole tensors, but this layout splits parameters and would "
                f"update each part as if it were a tensor; use one of torch.optim's {', '.join(sorted(ELEMENTWISE))}, "
                "or strategy ddp"
            )
        hold_shards(optimizer)
        super().__init__(optimizer, loss_scale)
        self._max_over_data, self._stages, self._norm_device = max_over_data, stages, norm_device
        self._used: int | None = None
        optimizer.zero_grad = lambda set_to_none=True: self.zero_grad()  # type: ignore[method-assign]

    def gradients(self) -> list[Tensor]:
        parameters, first = self._parameters(), self._used is None
        take_gradients(parameters)
        self._used = crc32(bytes(p.grad is None for p in parameters))
        if first:
            self.check_used()
        return [p.grad for p in parameters if p.grad is not None]

    def has_gradients(self) -> bool:
        return any(getattr(p, "shard_of", p).grad is not None for p in self._parameters())

    def check_used(self) -> None:
        """fully_shard adds up gradients by their place in a unit, so all ranks must have used the same parameters."""
        used = self._used or 0
        if self._max_over_data(used) != -self._max_over_data(-used):
            raise UserError(
                "ranks used different parameters in the same step, and FSDP would add their gradients to each other; "
                "let every rank use all of them, for instance by adding `0 * unused_output.sum()` to the loss"
            )

    def norm(self, gradients: list[Tensor]) -> Tensor:
        norm = total_norm(
            (p.grad, split_over(getattr(p, "shard_of", p))) for p in self._parameters() if p.grad is not None
        )
        if self._stages is None:
            return norm
        square = norm.to(self._norm_device).square().double()  # other stages may have parameters of other dtypes
        dist.all_reduce(square, group=self._stages)
        return square.to(norm.dtype).sqrt()

    def zero_grad(self) -> None:
        drop_gradients(self._parameters())


def _judge_on_device(norm: Tensor, max_norm: float | None) -> tuple[Tensor, Tensor | None]:
    """Returns 1 if the norm is infinite or NaN, else 0, and what gradients are divided by so that they are clipped."""
    skipped = (norm - norm).ne_(0)  # the difference of infinity or NaN to itself is NaN
    return skipped, ((norm + CLIPPING_EPSILON) / max_norm).clamp_(min=1) if max_norm else None


def _judge(norm: Tensor, number: float, max_norm: float | None) -> tuple[Tensor, Tensor | None]:
    """Returns the same as `_judge_on_device` for a norm whose number the host has.

    Computing with Python's numbers takes a third of the time of operations on tensors with one number each.
    """
    divisor = (number + CLIPPING_EPSILON) / max_norm if max_norm else 1.0
    return norm.new_full((), not isfinite(number)), norm.new_full((), divisor) if divisor > 1 else None


def check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuses an optimizer over parameters that are not the model's: it would train nothing."""
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise UserError(
            f"the {type(optimizer).__name__} has parameters that are not the model's; build it from the model that the "
            "builder is given, whose parameters may be new ones"
        )


def check_separate(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Refuses a parameter that two optimizers have: each of them would step it."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    owners: dict[Tensor, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            whole = sharded_parameter(parameter)
            owner = owners.setdefault(whole, optimizer)
            if owner is not optimizer:
                raise UserError(
                    f"two optimizers, {type(owner).__name__} and {type(optimizer).__name__}, have the parameter "
                    f"{names.get(whole, 'of another model')}, and both would step it; give each parameter to one"
                )
