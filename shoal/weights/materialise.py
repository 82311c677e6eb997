"""Builds a model without memory for its parameters, and gives each rank its shard of them once the model is sharded.

Every layout starts from the same weights. Parameters are first on the meta device; buffers are real from the beginning,
because constructors compute tables in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_parameter_registration_hook

from shoal.errors import UserError, one_line
from shoal.seeding import mix, seed_generators
from shoal.tensors import is_packed, replace_parameters
from shoal.torch_private import BATCH_NORM
from shoal.types import Weights
from shoal.weights.by_name import InitRecorder, draw, parameter_like, why_not_by_name
from shoal.weights.from_files import check_files, parameters_to_draw, read_files
from shoal.weights.parameter_extras import META_TWIN


def build(build_model: Callable[[], nn.Module], weights: Weights, seed: int) -> tuple[nn.Module, Weights]:
    """Builds the model and returns it with the weights it will start from.

    Its parameters are on the meta device; with `built` weights the model is whole, on the CPU. A model whose parameters
    cannot be drawn by name is built whole too, and the returned weights say why.
    """
    if weights.kind != "built":
        _seed_constructors(seed)  # they may draw buffers
        try:
            with parameters_on_meta(), InitRecorder() as constructor:
                model = build_model()
            reason = why_not_by_name(model, constructor, weights.reset) if weights.kind == "init" else None
        except UserError:
            raise
        except Exception as error:  # what reads the values of parameters in a constructor may raise anything
            if weights.kind != "init":
                raise
            reason = f"its constructor needs the values of parameters ({one_line(error, limit=80)})"
        if weights.kind == "files":
            remarks = filter(None, (weights.reason, check_files(model, weights)))
            return model, replace(weights, reason="; ".join(remarks))
        if reason is None:
            return model, weights
        weights = Weights("built", reason)
    _seed_constructors(seed)
    return build_model(), weights


def _seed_constructors(seed: int) -> None:
    seed_generators(mix(seed, "build"))
    torch.manual_seed(mix(seed, "build"))  # on every device


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within this context, modules are constructed with their parameters on the meta device. Buffers stay real."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        # A tied parameter is registered twice, and must become the same meta parameter both times.
        if not hasattr(parameter, META_TWIN):
            setattr(parameter, META_TWIN, parameter_like(parameter, parameter.to("meta")))
        twin: nn.Parameter = getattr(parameter, META_TWIN)
        return twin

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # torch's type says None
    try:
        yield
    finally:
        handle.remove()


def materialise(
    model: nn.Module,
    device: torch.device,
    seed: int,
    weights: Weights,
    parameter_device: torch.device | None = None,
    draw_dtypes: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}),
) -> None:
    """Gives every meta parameter memory and its first value, and moves everything else to the device.

    A DTensor gets memory for its shard only. Weights by name are drawn whole, one module at a time, and sliced; of
    weights in files only the shard is read. Under offload, `parameter_device` is the device of the parameters.
    `draw_dtypes` has the dtypes in which parameters are drawn, by the dtypes that they have, where these differ.
    """
    place, before = parameter_device or device, set(model.parameters())
    replace_parameters(model, lambda p: parameter_like(p, torch.empty_like(p, device=place)) if p.is_meta else p)
    allocated = set(model.parameters()) - before
    # Not if all parameters are new: `to` fails on FakeTensors, even if they are on the device already.
    if set(model.parameters()) - allocated or any(isinstance(module, FSDPModule) for module in model.modules()):
        model.to(place)  # this also makes FSDP look up the new memory of its parameters
    move_buffers(model, device)
    if weights.kind == "files":
        draw(model, seed, weights.reset, allocated & parameters_to_draw(model, weights), draw_dtypes)
        read_files(model, weights)
    elif weights.kind != "empty":
        draw(model, seed, weights.reset, allocated, draw_dtypes)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives all fp32 parameters another dtype, on meta or in memory. Buffers keep theirs, such as running statistics,
    and so do quantised weights.

    Refuses a model that trains parameters of a third dtype, or has a BatchNorm, which needs one dtype for both.
    """
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORM) and module.affine and module.running_mean is not None:
            raise UserError(
                f"training.weights_dtype = bf16: {name} is a {type(module).__name__}, whose running statistics are "
                "fp32, and torch takes no weights of another dtype; use weights_dtype: fp32"
            )
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float32 and not is_packed(parameter):
            parameter.data = parameter.data.to(dtype)
        elif parameter.requires_grad and parameter.dtype != dtype:
            found = str(parameter.dtype).removeprefix("torch.")
            raise UserError(
                f"training.weights_dtype = bf16: parameter {name} is {found}, and only float32 is cast; make it "
                "float32, or use weights_dtype: fp32"
            )


def move_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Moves all buffers to a device, and casts those that are floating-point to `dtype` if it is given."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device, dtype if buffer.is_floating_point() else None)
