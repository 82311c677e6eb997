"""Which gradients carry fp16's loss scale, in a loop that may use its own verbs or torch's."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal.errors import UserError


class ScaledGradients:
    """Refuses a step that would take scaled gradients for plain ones, or plain ones for scaled ones."""

    def __init__(self, model: nn.Module, joined: Collection[Optimizer], verb: str = "loop.step(optimizer)"):
        """`joined` are optimizers that know the loss scale, and refuse a plain step; `verb` steps any of them."""
        self._verb = verb
        self._parameters, self._joined = {id(parameter) for parameter in model.parameters()}, joined
        self._num_backwards = 0
        self._stepped_after: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """After how many backwards of the loop each optimizer has last stepped."""
        this = weakref.ref(self)

        def check(optimizer: Optimizer, *arguments: Any) -> None:
            if (alive := this()) is not None:
                alive._before_plain_step(optimizer)

        weakref.finalize(self, register_optimizer_step_pre_hook(check).remove)

    def after_backward(self) -> None:
        """Notes that the loop has run a backward of a scaled loss."""
        self._num_backwards += 1

    def before_step(self, optimizer: Optimizer) -> None:
        """Is called before the loop steps an optimizer: refuses gradients of a plain `loss.backward()`."""
        is_plain = self._stepped_after.get(optimizer, 0) == self._num_backwards
        self._stepped_after[optimizer] = self._num_backwards
        if is_plain and _has_gradients(optimizer):
            raise UserError(
                "loop.step divides gradients by the loss scale of fp16, and those of loss.backward() do not have it; "
                "use loop.backward(loss)"
            )

    def _before_plain_step(self, optimizer: Optimizer) -> None:
        if not self._num_backwards or optimizer in self._joined:
            return
        if any(id(parameter) in self._parameters for group in optimizer.param_groups for parameter in group["params"]):
            raise UserError(
                f"optimizer.step() does not know the loss scale of fp16, which these gradients have; use {self._verb}"
            )


def _has_gradients(optimizer: Optimizer) -> bool:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    gradients = (getattr(parameter, "shard_of", parameter).grad for parameter in parameters)
    return any(bool(gradient.any()) for gradient in gradients if gradient is not None)  # cleared ones may be zeros
