"""A linear layer whose weight is quantised and frozen, and the models that have such layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from shoal.errors import UserError
from shoal.forward import computes_as_linear
from shoal.operators import give_gradient, operator
from shoal.quantised.library import import_bitsandbytes
from shoal.quantised.schemes import EightBit, FourBit, Part, Scheme
from shoal.torch_private import version_of

PARTS: tuple[Part, ...] = ("weight", "statistics")


class QuantisedLinear(nn.Module):
    """A linear layer with its weight in 4 or 8 bits, as the frozen parameters `weight` and `statistics`.

    Its outputs and the gradients of its inputs are those of bitsandbytes' Linear4bit and Linear8bitLt. Their parameters
    are subclasses of Tensor which lose their statistics on the meta device and under fully_shard; these are plain.
    """

    weight: nn.Parameter
    statistics: nn.Parameter
    bias: nn.Parameter | None
    original: Tensor | None = None
    """The matrix that was quantised, for an export that an adapter is to be merged into. No forward uses it."""

    def __init__(self, linear: nn.Linear, scheme: Scheme):
        """Quantises the weights of `linear`; they may be on the meta device."""
        super().__init__()
        self.in_features, self.out_features, self.scheme = linear.in_features, linear.out_features, scheme
        matrix = linear.weight.detach()
        for part in PARTS:
            empty = torch.empty(scheme.shapes(self.shape)[part], dtype=scheme.dtypes[part], device="meta")
            data = empty if matrix.is_meta else scheme.quantise(part, matrix)
            parameter = nn.Parameter(data, requires_grad=False)
            parameter.logical_numel = matrix.numel() if part == "weight" else 0  # type: ignore[attr-defined]
            self.register_parameter(part, parameter)
        self.register_parameter("bias", linear.bias)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return self.out_features, self.in_features

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the matrix that the layer multiplies with, or the original if it was given one."""
        if self.original is not None:
            return self.original.to(dtype)
        return self.scheme.dequantise(self.weight, self.statistics, self.shape, dtype)

    @property
    def adds_products(self) -> bool:
        """Whether `forward` takes two factors and adds their product, without a pass over the output."""
        return isinstance(self.scheme, FourBit)

    def forward(self, input: Tensor, added: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Multiplies with the matrix, and adds left @ right.T for `added` = (left, right): in 4 bits where the output
        is, unless the matrix is multiplied in another dtype than these."""
        device = input.device.type if input.device.type != "meta" else "cpu"  # which has no autocast
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        compute = getattr(torch, self.scheme.compute) if self.scheme.compute else autocast or input.dtype
        bias = None if self.bias is None else self.bias.to(compute)
        with torch.autocast(device, enabled=False):
            if isinstance(self.scheme, EightBit):
                output = self._multiply_8bit(input.to(compute), bias, self.scheme)
            else:
                left, right = added if added is not None and added[0].dtype == compute else (None, None)
                tensors = input.to(compute), self.weight, self.statistics, bias, left, right
                output = _multiply_4bit(*tensors, self.scheme.quant_type, self.scheme.double, self.shape, False)
            if added is not None and added[0].dtype != compute:
                output = output + F.linear(*added)
        return output.to(autocast or input.dtype)

    def _multiply_8bit(self, input: Tensor, bias: Tensor | None, scheme: EightBit) -> Tensor:
        import bitsandbytes

        library: Any = bitsandbytes  # it does not say which of its names are public
        state = library.MatmulLtState()
        state.CB, state.SCB, state.has_fp16_weights = self.weight, self.statistics, False
        state.threshold, state.is_training = scheme.threshold, self.training
        output: Tensor = library.matmul(input, self.weight, bias=bias, state=state)
        return output

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme.describe()}"


def _empty_product(input: Tensor, *args: Any) -> Tensor:
    *_, shape, transposed = args
    return input.new_empty((*input.shape[:-1], shape[1 if transposed else 0]))


# An operator, because torch.compile looks into a torch.autograd.Function: it would keep the matrix of the forward for
# the backward, and (torch 2.11) all that a recomputed block computes inside of one.
@operator("multiply_4bit", empty=_empty_product)
def _multiply_4bit(
    input: Tensor,
    weight: Tensor,
    statistics: Tensor,
    bias: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    quant_type: str,
    double: bool,
    shape: Sequence[int],
    transposed: bool,
) -> Tensor:
    """Multiplies with the dequantised matrix, or with the transposed one, and adds the bias and left @ right.T.

    Keeps no matrix.
    """
    scheme = FourBit(cast(Any, quant_type), double)
    matrix = scheme.dequantise(weight, statistics, (shape[0], shape[1]), input.dtype)
    if left is None or right is None:
        return F.linear(input, matrix.mT if transposed else matrix, bias)
    # The adapter's product comes first, because its matrices are small: the large product then adds to it while it
    # writes its output, and nothing reads and writes the output once more.
    output = F.linear(left, right, bias)
    output.view(-1, output.shape[-1]).addmm_(input.reshape(-1, input.shape[-1]), matrix if transposed else matrix.mT)
    return output


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # As attributes: a recomputation ends with the last tensor that is saved, so the last product is not repeated.
    _, ctx.weight, ctx.statistics, _, ctx.left, ctx.right, *ctx.options, ctx.transposed = inputs
    # Of attributes torch does not notice that they have changed.
    ctx.versions = None if ctx.left is None or torch.compiler.is_compiling() else _versions(ctx)


def _versions(ctx: Any) -> tuple[int, int]:
    return version_of(ctx.left), version_of(ctx.right)


def _multiply_backward(ctx: Any, gradient: Tensor) -> Any:
    if ctx.versions is not None and ctx.versions != _versions(ctx):
        raise RuntimeError("a matrix of an adapter has been modified by an inplace operation since the forward")
    for_input = for_bias = for_left = for_right = None
    if ctx.needs_input_grad[0]:
        weight = ctx.weight, ctx.statistics
        for_input = _multiply_4bit(gradient, *weight, None, None, None, *ctx.options, not ctx.transposed)
    if ctx.needs_input_grad[4]:
        for_left = gradient @ ctx.right
    by_token = gradient.reshape(-1, gradient.shape[-1])
    if ctx.needs_input_grad[3]:
        for_bias = by_token.sum(0)
    if ctx.needs_input_grad[5]:
        for_right = by_token.mT @ ctx.left.reshape(-1, ctx.left.shape[-1])
    return for_input, None, None, for_bias, for_left, for_right, None, None, None, None


give_gradient("multiply_4bit", _multiply_backward, keep=_keep_for_backward)


@register_flop_formula(torch.ops.shoal.multiply_4bit)
def _(input: tuple[int, ...], *args: Any, out_shape: tuple[int, ...], **kwargs: Any) -> int:
    left = args[3]
    rank = 0 if left is None else left[-1]
    return 2 * prod(input[:-1]) * (input[-1] + rank) * out_shape[-1]


def quantise_layers(model: nn.Module, scheme: Scheme, skip: Collection[str], key: str) -> None:
    """Replaces the linear layers of a model, except those whose names are in `skip`, and freezes all parameters.

    Raises UserError, which begins with `key`, if there are none.
    """
    import_bitsandbytes(key)
    modules = model.named_modules(remove_duplicate=False)
    found = {name: module for name, module in modules if computes_as_linear(module) and name not in skip}
    if not found:
        raise UserError(f"{key}: the model has no linear layers (nn.Linear) to quantise; leave it out")
    quantised: dict[nn.Module, QuantisedLinear] = {}
    for name, module in found.items():
        if module not in quantised:
            quantised[module] = QuantisedLinear(module, scheme)
        model.set_submodule(name, quantised[module])
    model.requires_grad_(False)


def quantised_layers(model: nn.Module) -> dict[str, QuantisedLinear]:
    """Returns the quantised layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


def describe_layers(model: nn.Module) -> str:
    """Returns what is quantised, for the report; an empty text if nothing is."""
    layers = [*quantised_layers(model).values()]
    if not layers:
        return ""
    scheme = layers[0].scheme
    return f"{len(layers)} linear layers in {scheme.bits} bits: {scheme.describe()}"


def check_gathered(model: nn.Module, dtype: torch.dtype | None, key: str) -> None:
    """Refuses quantised layers whose tensors fully_shard would round, because it gathers parameters in `dtype`.

    It leaves integers alone, and parameters that have the dtype already. `key` is what set the dtype.
    """
    for layer in quantised_layers(model).values():
        rounded = [one for one in layer.scheme.dtypes.values() if one.is_floating_point and one != dtype]
        if dtype is not None and rounded:
            advice = (
                f"set model.bnb_4bit_quant_storage to uint8 or {_say(dtype)}"
                if layer.scheme.bits == 4
                else "leave it out, and use training.mixed_precision = bf16"
            )
            raise UserError(
                f"{key}: FSDP would round the quantised weights, which are kept as {_say(rounded[0])}; {advice}"
            )


def _say(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def dequantise(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Replaces the quantised layers of a whole model by linear layers with the numbers that they stand for.

    The model then computes what it computed before, but for rounding, and can be merged with an adapter and saved.
    """
    for name, layer in quantised_layers(model).items():
        with _linear_in_place(model, name, layer) as linear:
            pass
        linear.weight = nn.Parameter(layer.dequantise(dtype), requires_grad=False)
        model.set_submodule(name, linear)
    return model


Reset = Callable[[nn.Module, nn.Module], None]


def quantised_reset(reset: Reset) -> Reset:
    """Returns a function that draws the parameters of a module as `reset` does, and then quantises them.

    A quantised layer so starts from the numbers that the linear layer in its place would have.
    """

    @torch.no_grad()
    def reset_quantised(model: nn.Module, module: nn.Module) -> None:
        if not isinstance(module, QuantisedLinear):
            reset(model, module)
            return
        name = next(name for name, member in model.named_modules() if member is module)
        with _linear_in_place(model, name, module) as linear:
            reset(model, linear)
        for part in PARTS:
            parameter = getattr(module, part)
            on_meta = parameter.is_meta  # where only the write is of interest
            parameter.copy_(torch.empty_like(parameter) if on_meta else module.scheme.quantise(part, linear.weight))

    return reset_quantised


@contextmanager
def _linear_in_place(model: nn.Module, name: str, layer: QuantisedLinear) -> Iterator[nn.Linear]:
    """Puts a linear layer with the same bias, and an empty weight, in the place of a quantised one for a while."""
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    device = layer.weight.device
    linear.weight = nn.Parameter(torch.empty(layer.shape, device=device), requires_grad=False)
    linear.register_parameter("bias", layer.bias)
    model.set_submodule(name, linear)
    try:
        yield linear
    finally:
        model.set_submodule(name, layer)
