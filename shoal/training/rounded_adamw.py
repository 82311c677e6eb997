"""AdamW for weights in bf16: its averages are bf16 too, and all of them are rounded stochastically.

A weight in bf16 has 8 significant bits. Most updates are smaller than half of the last one, so rounding to the nearest
number would drop them, step after step. Stochastic rounding rounds up with a probability that is the dropped part, so
that the expected value of a rounded number is the number.

The random bits are a hash of (seed, name of the parameter, number of its update, index of the element in the whole
tensor). Nothing has to be saved, replicas stay equal, and all layouts round an element in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.seeding import mix
from shoal.tensors import local_slices
from shoal.torch_private import compile_counts, declare_skips_on_device, foreach_add_, is_fake

_WIDTH = 1024
"""The row length of contiguous parts. A constant, so that the compiled kernel knows that it can read many elements at
once, whatever the number of rows."""


def random_bits(numbers: Tensor, seed: Tensor) -> Tensor:
    """Returns 32 random bits for each number, both int32, by the hash function lowbias32.

    Products wrap around. A shift of int32 repeats the sign, so the bits that it fills in are masked.
    """
    bits = numbers + seed
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -0x7B935975
    return bits ^ ((bits >> 16) & 0xFFFF)


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Returns fp32 values rounded up or down to bf16; `bits` are random numbers from 0 to 65535.

    bf16 is the upper half of fp32. Adding random bits to the lower half carries into the upper one with a probability
    that is the lower half's value; then the lower half is cut off.
    """
    rounded = ((values.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(values.isnan(), values, rounded).to(torch.bfloat16)  # the sum of a NaN might be a number


def _update(
    weights: Tensor,
    gradients: Tensor,
    averages: Tensor,
    squares: Tensor,
    rows: Tensor,
    columns: Tensor,
    seed: Tensor,
    factors: Tensor,
    skip: Tensor,
) -> None:
    """Updates a part of one parameter, (rows, columns), in one pass.

    `rows` and `columns` are int32 and add up to the index of an element; `factors` has one row of `_factors`. All of
    them are tensors, so that a compiled function is compiled once. Indices that the compiler makes itself, as those of
    torch.arange, are int64 in a kernel for variable widths (torch 2.11), and their products would not wrap around.
    """
    first_bits = random_bits(rows[:, None] + columns, seed)
    second_bits = random_bits(first_bits, seed)
    divisor, decay, step_size, root_correction, eps, rest1, beta2, rest2 = factors.unbind()
    gradient, old, average, square = (t.float() for t in (gradients, weights, averages, squares))
    gradient = gradient / divisor
    average = average + (gradient - average) * rest1
    square = square * beta2 + gradient * gradient * rest2
    weight = old * decay - step_size * average / (square.sqrt() * root_correction + eps)
    weights.copy_(torch.where(skip, weights, round_to_bf16(weight, first_bits & 0xFFFF)))
    averages.copy_(torch.where(skip, averages, round_to_bf16(average, (first_bits >> 16) & 0xFFFF)))
    squares.copy_(torch.where(skip, squares, round_to_bf16(square, second_bits & 0xFFFF)))


@cache
def _compiled_update() -> Callable[..., None]:
    """Returns `_update` as one kernel. Shapes that differ between calls become variables of the kernel."""
    return torch.compile(_update, fullgraph=True)


class RoundedAdamW(Optimizer):
    """AdamW of parameters in bf16, with state in bf16 and stochastic rounding. It computes in fp32.

    It divides and skips on the device, as torch's fused optimizers do.
    """

    elementwise = True
    rounds_stochastically = True
    found_inf: Tensor | None = None
    """1 if the update is to be skipped, else 0."""
    grad_scale: Tensor | None = None
    """What gradients are divided by."""
    num_graphs = 0
    """How many graphs torch.compile has captured for the update, so that the report can tell them from the model's."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        # `fused`: the counts of steps are on the device, as those of torch's fused optimizers.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})
        declare_skips_on_device(self)
        self._names: dict[Tensor, str] = {}
        self._seed = 0
        self._places: dict[Tensor, tuple[Tensor, Tensor, Tensor]] = {}
        """For each parameter the rows, columns and seed of `_update`; the seed is another one for every update."""

    def name_parameters(self, named: Iterable[tuple[str, Tensor]], seed: int) -> None:
        """Takes the names of the model's parameters and the seed of the run, from which random bits are made."""
        self._names, self._seed, self._places = {parameter: name for name, parameter in named}, seed, {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        before = compile_counts().graphs
        for number, group in enumerate(self.param_groups):
            parameters = {index: p for index, p in enumerate(group["params"]) if p.grad is not None}
            if parameters:
                self._step_group(number, group, parameters)
        self.num_graphs += compile_counts().graphs - before

    def _step_group(self, number: int, group: dict[str, Any], parameters: Mapping[int, Tensor]) -> None:
        states = [self._state_of(parameter) for parameter in parameters.values()]
        counts = [state["step"] for state in states]
        skipped = torch.zeros_like(counts[0]) if self.found_inf is None else self.found_inf
        foreach_add_(counts, [1 - skipped] * len(counts))  # torch would wait for the device to read one number
        taken, skip = torch.stack(counts), skipped.bool()
        factors = self._factors(group, taken).unbind()
        places = [self._place(p, f"{number}.{index}") for index, p in parameters.items()]
        seeds = random_bits(taken.to(torch.int32), torch.stack([seed for *_, seed in places])).unbind()
        for (rows, columns, _), parameter, state, seed, factor in zip(
            places, parameters.values(), states, seeds, factors, strict=True
        ):
            if not parameter.numel():  # a rank may hold nothing of a short tensor
                continue
            assert parameter.grad is not None
            kept = parameter.detach(), state["exp_avg"], state["exp_avg_sq"]
            weights, averages, squares = (tensor.reshape(len(rows), len(columns)) for tensor in kept)
            gradients = parameter.grad.reshape(len(rows), len(columns))
            update = _compiled_update() if parameter.is_cuda and not is_fake(parameter) else _update
            update(weights, gradients, averages, squares, rows, columns, seed, factor, skip)
            for tensor, updated in zip(kept, (weights, averages, squares), strict=True):
                if not tensor.is_contiguous():  # `reshape` has made a copy
                    tensor.copy_(updated.view_as(tensor))

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for slot in ("exp_avg", "exp_avg_sq"):
                state[slot] = torch.zeros_like(parameter, dtype=torch.bfloat16, memory_format=torch.preserve_format)
        return state

    def _factors(self, group: dict[str, Any], taken: Tensor) -> Tensor:
        """Returns the numbers that `_update` multiplies by, a row for each parameter; `taken` counts its updates."""
        lr, (beta1, beta2) = group["lr"], group["betas"]
        divisor = torch.ones_like(taken) if self.grad_scale is None else self.grad_scale.expand_as(taken)
        constants = [1 - lr * group["weight_decay"], group["eps"], 1 - beta1, beta2, 1 - beta2]
        decay, eps, rest1, beta2_, rest2 = (torch.full_like(taken, constant) for constant in constants)
        step_size = lr / (1 - beta1**taken)
        root_correction = (1 - beta2**taken).rsqrt()
        return torch.stack([divisor, decay, step_size, root_correction, eps, rest1, beta2_, rest2], dim=1)

    def _place(self, parameter: Tensor, default_name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Returns where the rows of this rank's part begin in the whole tensor, what columns add, and the seed."""
        if parameter not in self._places:
            whole: Tensor = getattr(parameter, "shard_of", parameter)
            width, first, distance = rows_of_part(whole.shape, local_slices(whole))
            rows = first + distance * torch.arange(parameter.numel() // width)
            seed = torch.tensor(mix(self._seed, "rounding", self._names.get(whole, default_name)) & 0xFFFFFFFF)
            # Of more than 32 bits the lower ones, whatever the sign.
            numbers = (rows, torch.arange(width), seed)
            rows, columns, seed = (number.to(torch.int32).to(parameter.device) for number in numbers)
            self._places[parameter] = rows, columns, seed
        return self._places[parameter]


def rows_of_part(shape: Iterable[int], slices: list[slice]) -> tuple[int, int, int]:
    """Returns how a part of a tensor is seen as rows whose elements follow each other in the whole tensor: the row
    length, the index of the first element in the whole tensor, and the distance of the rows there.

    Layouts split the first dimension, one other dimension, or both; then all rows have the same distance.
    """
    sizes = [*shape]
    lengths = [part.stop - part.start for part in slices]
    strides = [prod(sizes[dimension + 1 :]) for dimension in range(len(sizes))]
    first = sum(part.start * stride for part, stride in zip(slices, strides, strict=True))
    split = [d for d in range(1, len(sizes)) if lengths[d] != sizes[d]]
    if not split:
        numel = prod(lengths)
        width = _WIDTH if numel % _WIDTH == 0 and numel else max(1, numel)
        return width, first, width
    last = split[-1]
    return max(1, prod(lengths[last:])), first, prod(sizes[last:])
