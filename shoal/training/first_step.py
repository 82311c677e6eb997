"""Watches the first step, and stops the run if something that was asked for had no effect in it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.errors import UserError
from shoal.torch_private import CompileCounts, compile_counts
from shoal.training.bitsandbytes_optimizers import has_unpaged
from shoal.transform.activation_checkpointing import num_recomputed
from shoal.transform.compile import CompiledModules
from shoal.transform.precision import HalfWitness

if TYPE_CHECKING:
    from shoal.training.loop import Shell


class FirstStep:
    """Watches the first step of a run, and checks that the settings took effect."""

    def __init__(self, shell: Shell):
        self.session, self.strategy, self.training = shell.session, shell.strategy, shell.config.training
        self.engaged = shell.strategy.engaged
        self.compiled = CompileCounts(0, 0, "")
        """What torch.compile did in the step."""
        self._witness = HalfWitness(self.training.mixed_precision)
        self._recomputed_before = num_recomputed()
        self._compiled_before = compile_counts() if self.training.compile else self.compiled

    def watch(self) -> AbstractContextManager[None]:
        """Returns a context for the step, in which it is seen whether anything computes in half precision."""
        if self.training.mixed_precision != "fp32" and not self.training.compile:  # it cannot look into compiled code
            return self._witness
        return nullcontext()

    def check(self) -> None:
        """Stops the run if something that was asked for had no effect."""
        if self.training.compile:
            self._check_compiled(self.engaged.compiled)
        nothing_recomputed = num_recomputed() == self._recomputed_before
        # What is recomputed inside of a graph is not counted.
        if self.engaged.checkpointed_modules and not self.training.compile and nothing_recomputed:
            raise UserError(
                f"training.activation_checkpointing = {self.training.activation_checkpointing.mode}, but nothing was "
                "computed again in the first step's backward; set it to none or look for what keeps the model's blocks "
                "from being called"
            )
        if self.engaged.host_inputs is not None and not self.engaged.host_inputs.num_kept:
            raise UserError(
                "training.activation_checkpointing.offload = true, but no recomputed block has a positional input that "
                "could be moved; leave it out"
            )
        session, name = self.session, self.session.optimizer_name
        if name.startswith("paged_") and self.strategy.device.type == "cuda" and has_unpaged(session.optimizer):
            raise UserError(
                f"training.optimizer = {name}, but bitsandbytes keeps its state in plain memory of the GPU; use "
                f"{name.removeprefix('paged_')}, or adamw"
            )
        if self.training.weights_dtype == "bf16" and (wrong := _not_bf16(session.model, session.optimizer)):
            raise UserError(
                f"training.weights_dtype = bf16, but {wrong} is not bf16 after the first step; look for code in the "
                "model that casts it, or use weights_dtype: fp32"
            )
        head = self.engaged.chunked_head
        if head is not None and not head.num_scored and not self.training.body:  # a body computes its loss itself
            raise UserError(
                f"{head.cause}, but the model never called the plan's head in the first step; {head.advice}, or mend "
                "the recipe's parallel_plan"
            )
        if self.engaged.exchange is not None:
            self.engaged.exchange.check()
        if self.engaged.recorded is not None and not self.engaged.recorded.recordings:
            raise UserError(
                "training.cuda_graphs = true, but nothing was recorded in the first step; leave it out, or look for "
                "gradients that are there before it"
            )
        precision = self.training.mixed_precision
        if precision != "fp32" and not self.training.compile and not self._witness.seen:
            cause = "put `with run.autocast():` around the forward and the loss" if self.training.body else ""
            raise UserError(
                f"training.mixed_precision = {precision}, but nothing in the first step was computed in {precision}; "
                f"use fp32, or {cause or 'look for code in the model that turns autocast off'}"
            )

    def _check_compiled(self, compiled: CompiledModules | None) -> None:
        before, now = self._compiled_before, compile_counts()
        of_update = getattr(self.session.optimizer, "num_graphs", 0)
        self.compiled = CompileCounts(now.graphs - before.graphs - of_update, now.breaks - before.breaks, now.reason)
        if compiled is None or not self.compiled.graphs or compiled.eager_calls:
            why = f": {now.reason}" if self.compiled.breaks else ""
            has_calls = compiled is not None and compiled.eager_calls
            recomputed = " Recomputed modules are compiled as a whole or not at all." if has_calls else ""
            raise UserError(
                f"training.compile = true, but in the first step the model's blocks ran without being compiled{why}; "
                "TORCH_LOGS=graph_breaks,recompiles shows where; change the model, or set training.compile = "
                f"false.{recomputed}"
            )


def _not_bf16(model: nn.Module, optimizer: Optimizer) -> str:
    """Returns the first trained parameter or tensor of the optimizer's state that is not bf16, or an empty text."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.bfloat16:
            return f"the parameter {name}"
    for slots in optimizer.state.values():
        for slot, value in slots.items():
            if slot != "step" and value.dtype != torch.bfloat16:
                return f"the optimizer's {slot}"
    return ""
