"""Muon for the matrices inside of blocks and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from shoal.tensors import local_slices
from shoal.torch_private import as_shard, declare_skips_on_device


class Muon(Optimizer):
    """Updates the groups with `use_muon` by torch's Muon, and the others by torch's fused AdamW.

    The momentum is elementwise, and so each rank keeps and saves its part of it, as of any optimizer's state. Only the
    orthogonalization needs a whole matrix: it is gathered from the ranks that share it, which all compute the same.
    """

    elementwise = False
    gathers_parts = True
    """It takes parameters that are the local parts of DTensors, although it is not elementwise."""
    found_inf: Tensor | None = None
    """1 if the update is to be skipped, else 0."""
    grad_scale: Tensor | None = None
    """What gradients are divided by."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "original",
        adamw_learning_rate: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ):
        groups = [*groups]
        muon = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        rest = [group for group in groups if not group["use_muon"]] or [{"params": [], "use_muon": False}]
        self._adamw = AdamW(rest, adamw_learning_rate, betas, eps, weight_decay, fused=True)
        inner = iter(self._adamw.param_groups)  # the same dicts, so that a rate that is set here is AdamW's too
        super().__init__([group if group["use_muon"] else next(inner) for group in groups], muon)
        self._adamw.state = self.state
        self._orthogonalizer = torch.optim.Muon(
            [nn.Parameter(torch.zeros(1, 1))],
            weight_decay=0.0,
            momentum=0.0,
            nesterov=False,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        declare_skips_on_device(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"] if group["use_muon"] else ():
                if parameter.grad is not None:
                    self._step_matrix(parameter, parameter.grad, group)
        self._adamw.found_inf, self._adamw.grad_scale = self.found_inf, self.grad_scale  # type: ignore[attr-defined]
        self._adamw.step()

    def _step_matrix(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        gradient = gradient if self.grad_scale is None else gradient / self.grad_scale
        state, momentum, decay = self.state[parameter], group["momentum"], group["lr"] * group["weight_decay"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        average: Tensor = state["momentum_buffer"]
        factor: Any = 1.0
        if self.found_inf is not None:
            # A skipped update takes the average for a gradient, which leaves it as it is, and is multiplied by 0.
            factor = 1 - self.found_inf
            gradient = torch.where(self.found_inf.bool(), average, gradient)
        average.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(average, momentum) if group["nesterov"] else average
        parameter.mul_(1 - decay * factor).add_(self._change(direction, parameter, group["lr"]) * factor)

    def _change(self, direction: Tensor, parameter: nn.Parameter, lr: float) -> Tensor:
        """Returns this rank's part of what is added to a matrix: what torch's Muon makes of a matrix of zeros."""
        whole: DTensor | None = getattr(parameter, "shard_of", None)
        if whole is not None:
            direction = as_shard(direction.to(whole.device_mesh.device_type), whole).full_tensor()
        change = nn.Parameter(torch.zeros_like(direction))
        change.grad = direction.clone()  # which the momentum of a first step could be
        muon = self._orthogonalizer
        muon.param_groups[0] |= {"params": [change], "lr": lr}
        muon.step()
        muon.state.clear()
        part = change.detach() if whole is None else change.detach()[tuple(local_slices(whole))]
        return part.to(parameter.device)


def mark_matrices(groups: list[dict[str, Any]], matrices: set[int]) -> list[dict[str, Any]]:
    """Splits each parameter group in two: the matrices for Muon, by their ids, and the rest.

    A group that says `use_muon` itself stays as it is. Both halves exist also if one is empty: every stage of a
    pipeline must have as many groups as the whole model.
    """
    marked: list[dict[str, Any]] = []
    for group in groups:
        if "use_muon" in group:
            marked.append(group)
            continue
        halves: dict[bool, list[Any]] = {True: [], False: []}
        for parameter in group["params"]:
            halves[id(parameter) in matrices].append(parameter)
        marked += [{**group, "params": half, "use_muon": is_matrix} for is_matrix, half in halves.items()]
    return marked


def matrices_in_blocks(model: nn.Module, blocks: Iterable[str]) -> set[int]:
    """Returns the ids of the 2-D weights inside of those blocks that this rank has, embeddings excluded."""
    modules = dict(model.named_modules())
    inside = [module for name in blocks if name in modules for module in modules[name].modules()]
    own = (p for module in inside if not isinstance(module, nn.Embedding) for p in module.parameters(recurse=False))
    return {id(p) for p in own if p.ndim == 2 and p.requires_grad}
