"""Where weights come from, and how every layout starts from the same ones.

A model is born with its parameters on the meta device and its buffers real (so tables computed in
constructors are right). Once it is spread, each rank gets memory for its part, and the part's values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_parameter_registration_hook

from shoal.seeding import mix
from shoal.tensors import replace_parameters
from shoal.types import Weights
from shoal.weights.by_name import InitRecorder, draw, parameter_like, why_not_by_name
from shoal.weights.from_files import check_files, in_no_file, read_files


def build(build_model: Callable[[], nn.Module], wanted: Weights, seed: int) -> tuple[nn.Module, Weights]:
    """The model, on meta where its weights are drawn by name or read, else built whole on the CPU; and which it is."""
    if wanted.kind != "built":
        with parameters_on_meta(), InitRecorder() as constructor:
            model = build_model()
        if wanted.kind == "empty":
            return model, wanted
        if wanted.kind == "files":
            return model, replace(wanted, reason=check_files(model, wanted))
        reason = why_not_by_name(model, constructor, wanted.reset)
        if reason is None:
            return model, wanted
        wanted = Weights("built", reason)
    torch.manual_seed(mix(seed, "build"))
    return build_model(), wanted


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules constructed here keep no parameter memory; buffers stay real."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        # The twin is remembered so that one parameter registered twice stays one (tied weights).
        if not hasattr(parameter, "_meta_twin"):
            parameter._meta_twin = parameter_like(parameter, parameter.to("meta"))  # type: ignore[attr-defined]
        twin: nn.Parameter = parameter._meta_twin  # type: ignore[attr-defined]
        return twin

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # may return one
    try:
        yield
    finally:
        handle.remove()


def materialise(
    model: nn.Module,
    device: torch.device,
    seed: int,
    weights: Weights,
    parameters_on: torch.device | None = None,
) -> None:
    """Gives every meta parameter its memory and its first value; moves the rest as it is.

    A parameter that is a DTensor gets its shard: the whole is drawn, or only the shard read, one module at a time.
    `parameters_on` is another device for parameters, under offload.
    """
    allocated = _allocate(model, parameters_on or device)
    is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    if is_sharded or set(model.parameters()) - allocated:  # a FakeTensor could not be moved, not even to where it is
        model.to(parameters_on or device)  # FSDP then looks for the memory its parameters got
    move_buffers(model, device)
    if weights.kind == "files":
        draw(model, seed, weights.reset, allocated & in_no_file(model, weights))
        read_files(model, weights)
    elif weights.kind != "empty":
        draw(model, seed, weights.reset, allocated)


def move_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """To a device and, if they are floating-point, to a type."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device, dtype if buffer.is_floating_point() else None)


def _allocate(model: nn.Module, device: torch.device) -> set[nn.Parameter]:
    """Allocates this rank's part of every meta parameter, and returns the new parameters."""
    before = set(model.parameters())
    replace_parameters(model, lambda p: parameter_like(p, torch.empty_like(p, device=device)) if p.is_meta else p)
    return set(model.parameters()) - before
