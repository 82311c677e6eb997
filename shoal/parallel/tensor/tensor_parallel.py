"""Tensor and sequence parallelism: ranks share the work of each layer, and each holds a part of its weights.

Parameters are DTensors, so that whatever stores, counts or shards them knows which part a rank has. The computation is
plain: a split module sees its rank's part as an ordinary tensor, and ranks exchange activations only at the boundaries
that the plan names. DTensor could find the exchanges by itself, but would often gather where that is not needed.

With sequence parallelism the activations between these boundaries are split by tokens: the vocabulary-parallel
embedding splits them at first, an all-reduce becomes a reduce-scatter, and the next boundary gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal.errors import UserError
from shoal.forward import add_layer, view_parameters
from shoal.parallel.collectives import gather_tokens, gather_vocabulary, scatter_tokens, sum_gradients, sum_over
from shoal.parallel.pipeline.stages import PassThrough
from shoal.parallel.tensor.sequence_parallel import check_length, check_plan
from shoal.types import ParallelPlan, TensorStyle


class TensorParallel:
    """Cuts a model for the ranks of one group."""

    def __init__(self, mesh: DeviceMesh, sequence: bool = False) -> None:
        self.mesh, self.sequence = mesh, sequence
        self.group: dist.ProcessGroup = mesh.get_group()
        self.size: int = mesh.size()
        self.rank: int = mesh.get_local_rank()
        self.split_parameters: list[str] = []
        self._entering, self._entering_region, self._leaving = (
            self._enter_layer,
            self._enter_region_layer,
            self._leave_layer,
        )
        self._used_in_part = self._view_used_in_part
        self.scattered = sequence
        """True while each rank has some of the tokens between boundaries. A sequence that does not divide, such as the
        one token that generation adds, is kept whole on all ranks."""

    def apply(self, model: nn.Module, plan: ParallelPlan) -> None:
        """Cuts the parameters that the plan names, and puts layers around the forward of their modules."""
        styles = resolve(model, plan)
        modules = dict(model.named_modules())
        if self.sequence:
            check_plan(styles, modules)
        self._cut(model, styles)
        for name, style in styles.items():
            if isinstance(style, str) and name in modules:
                self._apply_style(name, modules[name], style, styles)
        self.split_parameters = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]

    def enter(self, tensor: Tensor) -> Tensor:
        """Returns an activation that all ranks use, each for its part of the work."""
        if self.scattered:
            return gather_tokens(tensor, self.group)
        return sum_gradients(tensor, self.group)

    def leave(self, tensor: Tensor) -> Tensor:
        """Returns the sum of the ranks' parts; with sequence parallelism this rank's tokens of it."""
        if self.scattered:
            return scatter_tokens(tensor, self.group)
        return sum_over(tensor, self.group)

    def _cut(self, model: nn.Module, styles: Mapping[str, TensorStyle]) -> None:
        """Replaces the parameters that are split by DTensors."""
        whole = dict(model.named_parameters(remove_duplicate=False))
        parts: dict[int, nn.Parameter] = {}
        dimensions = _dimensions(model, whole, styles)
        for name, dimension in dimensions.items():
            parameter = whole[name]
            owner, _, key = name.rpartition(".")
            if id(parameter) not in parts:
                even = "vocabulary" not in (styles.get(name), styles.get(owner))
                self._check_split(model, name, parameter, dimension, even)
                parts[id(parameter)] = self._part(parameter, dimension)
            model.get_submodule(owner)._parameters[key] = parts[id(parameter)]
        if tied := next((name for name in whole if name not in dimensions and id(whole[name]) in parts), None):
            raise UserError(
                f"parameter {tied} is tied to one that the plan splits; add it to `tensor` of parallel_plan"
            )

    def _check_split(self, model: nn.Module, name: str, parameter: Tensor, dimension: int, even: bool) -> None:
        length = parameter.shape[dimension]
        region = model.get_submodule(".".join(name.split(".")[:-2]))
        per_head = getattr(region, "head_dim", 1)  # a rank computes whole heads
        units = length // per_head if isinstance(per_head, int) and length % per_head == 0 else length
        if units % self.size if even else (self.size - 1) * -(-length // self.size) >= length:
            what = f"{units} heads of {name}" if units != length else f"{length} of {name} {[*parameter.shape]}"
            raise UserError(f"distributed.mesh.tp = {self.size} does not divide the {what}")

    def _part(self, parameter: nn.Parameter, dimension: int) -> nn.Parameter:
        length = parameter.shape[dimension]
        chunk = -(-length // self.size)
        start = min(self.rank * chunk, length)
        own = parameter.detach().narrow(dimension, start, min(chunk, length - start)).clone()
        part = DTensor.from_local(
            own, self.mesh, [Shard(dimension)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    def _apply_style(self, name: str, module: nn.Module, style: str, styles: Mapping[str, TensorStyle]) -> None:
        match style:
            case "column":
                view_parameters(module, local)
                regions = [outer for outer, kind in styles.items() if kind in ("region", "sum")]
                if not any(outer == "" or name.startswith(f"{outer}.") for outer in regions):
                    add_layer(module, self._entering)
            case "row":
                view_parameters(module, local, hidden=("bias",))
                add_layer(module, self._leaving)
                if hasattr(module, "sum_over_inputs"):  # a layer that needs whole rows of its weight, such as DoRA's
                    module.sum_over_inputs = self._sum  # type: ignore[assignment]
                if module._parameters.get("bias") is not None:  # added once, after the sum over ranks
                    add_layer(module, lambda forward, *args: forward(*args) + self._shared(module._parameters["bias"]))
            case "vocabulary" if isinstance(module, nn.Embedding):
                self._share_embedding(module)
            case "vocabulary":
                self._share_head(module)
            case "region" | "sum":
                add_layer(module, self._entering_region)
                if style == "sum":
                    add_layer(module, self._leaving)
                for key, member in module.named_modules(prefix=name):
                    if key not in styles or key == name:  # every rank computes a part of their gradients
                        view_parameters(member, self._used_in_part)
            case "sequence" if self.sequence:
                view_parameters(module, self._used_in_part)  # for this rank's tokens

    # Layers, each bound once: torch.compile makes one graph for all blocks if they are the same objects everywhere.

    def _enter_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Changes the first tensor that a module is called with."""
        if args:
            return forward(self.enter(args[0]), *args[1:], **kwargs)
        first = next(iter(kwargs))
        return forward(**{**kwargs, first: self.enter(kwargs[first])})

    def _enter_region_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same, and other positional arguments that are split parameters become this rank's part."""
        return self._enter_layer(lambda *args, **kwargs: forward(*map(local, args), **kwargs), *args, **kwargs)

    def _leave_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Changes what a module returns; the first of several outputs, since attention also returns its weights."""
        output = forward(*args, **kwargs)
        return (self.leave(output[0]), *output[1:]) if isinstance(output, tuple) else self.leave(output)

    def _sum(self, tensor: Tensor) -> Tensor:
        return sum_over(tensor, self.group)

    def _view_used_in_part(self, parameter: Tensor) -> Tensor:
        """Returns this rank's part of a split parameter; the gradients of a whole one are summed over ranks."""
        return local(parameter) if isinstance(parameter, DTensor) else sum_gradients(parameter, self.group)

    def _shared(self, parameter: Tensor | None) -> Tensor:
        """Returns a parameter that all ranks have; with sequence parallelism each adds it to other tokens."""
        assert parameter is not None
        return sum_gradients(parameter, self.group) if self.scattered else parameter

    def _share_embedding(self, module: nn.Embedding) -> None:
        """Makes each rank look up the tokens that it has, and zeros for others; the sum is the embedding."""
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise UserError(
                "tensor parallelism cannot split an embedding with max_norm, scale_grad_by_freq or sparse; take its "
                "style `vocabulary` out of the recipe's parallel_plan"
            )
        chunk = -(-module.num_embeddings // self.size)

        def embed(forward: Callable[..., Any], tokens: Tensor) -> Tensor:
            self.scattered = self.sequence and tokens.shape[-1] % self.size == 0
            if self.sequence and torch.is_grad_enabled():
                check_length(tokens.shape[-1], self.size)
            first, last = self.rank * chunk, min((self.rank + 1) * chunk, module.num_embeddings)
            foreign = (tokens < first) | (tokens >= last)
            padding = module.padding_idx  # the row that gets no gradient, by its place in the whole table
            module.padding_idx = padding - first if padding is not None and first <= padding < last else None
            try:
                rows = forward((tokens - first).masked_fill(foreign, 0))  # the module may also scale what it finds
            finally:
                module.padding_idx = padding
            return self.leave(rows.masked_fill(foreign[..., None], 0))

        view_parameters(module, local)
        add_layer(module, embed)

    def _share_head(self, module: nn.Module) -> None:
        """Makes each rank compute the logits of some tokens, and gathers them; the chunked loss does without that."""

        def logits(forward: Callable[..., Any], hidden: Tensor, *weight: Tensor) -> Tensor:
            vocabulary = module.out_features if isinstance(module, nn.Linear) else weight[0].shape[-1]
            return gather_vocabulary(forward(self.enter(hidden), *map(local, weight)), vocabulary, self.group)

        view_parameters(module, local)
        add_layer(module, logits)


def resolve(model: nn.Module, plan: ParallelPlan) -> dict[str, TensorStyle]:
    """Returns the plan's styles by full name. Layers made for tensor parallelism have a `tensor_style` of their own."""
    names = [name for name, module in model.named_modules() if not isinstance(module, PassThrough)]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    styles: dict[str, TensorStyle] = {
        name: module.tensor_style
        for name, module in model.named_modules()
        if isinstance(getattr(module, "tensor_style", None), str)
    }
    for pattern, style in plan.tensor.items():
        places = parameters if isinstance(style, int) else [*names, *parameters] if style == "vocabulary" else names
        found = [name for name in places if _matches(name, pattern)]
        staged = any(isinstance(module, PassThrough) for module in model.modules())
        if not found and not staged:  # it may be in another stage
            kind = "parameter" if isinstance(style, int) else "module"
            raise UserError(f"the recipe's plan splits {pattern!r}, but the model has no {kind} of that name")
        styles |= dict.fromkeys(found, style)
    if not styles:
        raise UserError(
            "distributed.mesh.tp > 1: the recipe's plan says nothing of tensor parallelism; give its parallel_plan "
            "`tensor` styles, or use fsdp"
        )
    return styles


def local(value: Any) -> Any:
    """Returns this rank's part of a DTensor, through which gradients flow; any other value unchanged."""
    return value.to_local() if isinstance(value, DTensor) else value


def _matches(name: str, pattern: str) -> bool:
    """Compares a name with a pattern, in which `*` stands for one part between dots."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _dimensions(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], styles: Mapping[str, TensorStyle]
) -> dict[str, int]:
    """Returns the dimension that each split parameter is split along, by its name."""
    dimensions: dict[str, int] = {}
    for name, style in styles.items():
        if isinstance(style, int):
            dimensions[name] = style
        elif name in parameters:
            dimensions[name] = parameters[name].ndim - 1  # a head (embd, vocab)
        elif style in ("column", "row", "vocabulary"):
            module = model.get_submodule(name)
            kinds = nn.Linear if style != "vocabulary" else nn.Linear | nn.Embedding
            if style == "vocabulary" and next(module.parameters(recurse=False), None) is None:
                continue  # a head that gets its weight as an argument
            if not isinstance(module, kinds):
                raise UserError(f"the plan splits {name} as {style}, which is not for a {type(module).__name__}")
            dimensions[f"{name}.weight"] = 1 if style == "row" else 0
            if style != "row" and getattr(module, "bias", None) is not None:
                dimensions[f"{name}.bias"] = 0
    return dimensions
