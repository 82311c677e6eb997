"""What is sent between the stages of a pipeline: one tensor of hidden states per micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.errors import UserError

Shape = tuple[tuple[int, ...], torch.dtype]
"""The shape of a tensor without its first dimension, the batch, and its type."""

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_DIMENSIONS = 8
NOTE_LENGTH = MOST_DIMENSIONS + 2


class Arrive(torch.autograd.Function):
    """Drops the padding rows that were added for the wire. The gradient is padded again, since it is sent back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: int) -> Tensor:
        ctx.rows = hidden.shape[0]
        return hidden[:rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _filled(gradient, ctx.rows), None


class Leave(torch.autograd.Function):
    """Pads a hidden state for the wire. Returns a new tensor: torch detaches it in place, which views refuse."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: int) -> Tensor:
        ctx.rows = hidden.shape[0]
        filled = _filled(hidden, rows)
        return filled.clone() if filled is hidden else filled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[: ctx.rows], None


def _filled(tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape[0] == rows:
        return tensor.contiguous()
    filled = tensor.new_zeros((rows, *tensor.shape[1:]))
    filled[: tensor.shape[0]] = tensor
    return filled


def hidden_state_of(output: Any) -> Tensor:
    """Returns the tensor of a stage's output that is sent to the next stage."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    hidden = getattr(output, "logits", output)
    if not isinstance(hidden, Tensor) or hidden.dtype not in TYPES or hidden.ndim > MOST_DIMENSIONS:
        raise UserError(
            f"a pipeline's stage made a {type(output).__name__}, but what travels between stages is one tensor of "
            "hidden states; let the model return it, or an object with logits"
        )
    return hidden


def shape_of(tensor: Tensor) -> Shape:
    return tuple(tensor.shape[1:]), tensor.dtype


def describe(tensor: Tensor) -> Tensor:
    """Encodes the type and shape of a tensor in another one, which is sent ahead of it."""
    sizes = [*tensor.shape[1:]]
    numbers = [TYPES.index(tensor.dtype), len(sizes), *sizes, *[0] * (MOST_DIMENSIONS - len(sizes))]
    return torch.tensor(numbers, device=tensor.device)


def read_note(note: Tensor) -> Shape:
    """Decodes what `describe` encoded."""
    kind, dimensions, *sizes = note.tolist()
    return tuple(sizes[:dimensions]), TYPES[kind]
