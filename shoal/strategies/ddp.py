"""Replicas: every rank holds the whole model, takes its share of the batch, and gradients are summed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.errors import UserError
from shoal.strategies.base import DistributedStrategy, Objective
from shoal.torch_private import uncompiled
from shoal.types import MicroBatch, ParallelPlan, StepOutput

# The newer name since torch 2.13, where the old one warns.
_NAMES = signature(DistributedDataParallel).parameters
_BROADCAST_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"

_UNUSED = ("Expected to have finished reduction", "training graph has changed")
"""How DDP says that a gradient never came."""


class DDPStrategy(DistributedStrategy):
    """torch's DistributedDataParallel over the mesh dimension `dp_replicate`."""

    name = "ddp"

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        bucket_cap_mb: int | None = None,
        broadcast_buffers: bool = True,
        **options: Any,
    ):
        super().__init__(**options)
        self.options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "bucket_cap_mb": bucket_cap_mb,
            _BROADCAST_BUFFERS: broadcast_buffers,
        }
        # Freed gradients would be made anew outside DDP's buckets. Where some stay unused they are freed all the same:
        # a zero in their place would still be decayed.
        self.keeps_gradients = gradient_as_bucket_view and not find_unused_parameters
        self._warm = False

    def mesh_sizes(self) -> dict[str, int]:
        return {"dp_replicate": self.world.size}

    def wrap(self, model: nn.Module, plan: ParallelPlan) -> nn.Module:
        model = super().wrap(model, plan)
        if self.mesh is None or not any(p.requires_grad for p in model.parameters()):
            return model
        options = dict(self.options)
        options["bucket_cap_mb"] = options["bucket_cap_mb"] or default_bucket_mb(model)
        return DistributedDataParallel(model, process_group=self.mesh.get_group("dp_replicate"), **options)

    def prepare(self, *args: Any, **options: Any) -> Any:
        self._warm = False
        prepared = super().prepare(*args, **options)
        if isinstance(self.engine, DistributedDataParallel):
            self.engine.register_comm_hook(None, _sum_over_ranks)
        return prepared

    def forward_backward(
        self, model: nn.Module, micro_batches: Sequence[MicroBatch], recipe: Objective, step: int
    ) -> StepOutput:
        try:
            if not self._warm:
                self._warm_up(model, micro_batches[0], recipe)
            return super().forward_backward(model, micro_batches, recipe, step)
        except RuntimeError as error:
            if not any(words in str(error) for words in _UNUSED):
                raise
            if self.options["static_graph"]:
                advice = "distributed.ddp.static_graph = true, but not every step uses the same ones; set it to false"
            else:
                advice = "set distributed.ddp.find_unused_parameters to true, or freeze or remove them"
            raise UserError(f"some parameters took no part in the loss, and DDP waits for them; {advice}") from error

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        model = uncompiled(model)
        if self.options["static_graph"] and not self._warm:  # in a first step by hand, as `_warm_up` explains
            self._warm = last
            return nullcontext()
        if last or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return model.no_sync()

    def unwrap(self, model: nn.Module) -> nn.Module:
        model = super().unwrap(model)
        return super().unwrap(model.module) if isinstance(model, DistributedDataParallel) else model

    def _warm_up(self, model: nn.Module, micro: MicroBatch, recipe: Objective) -> None:
        """Backs once, or twice for a static graph, through nothing.

        DDP fills its buckets in another order after the first backward, and sums over four ranks or more then differ
        in their last bits: without this, a run that was restarted would not repeat one that was not. A static graph
        also refuses an unsynchronised backward before it is recorded.
        """
        self._warm = True
        if not isinstance(self.engine, DistributedDataParallel):
            return
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        batch = self.ready(micro, recipe)
        for _ in range(2 if self.options["static_graph"] else 1):
            with self.autocast(), self.scoring(batch):
                loss = recipe.loss(self.engine(**recipe.inputs(batch)), batch)
            loss.backward(torch.zeros_like(loss))
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        model.zero_grad(set_to_none=not self.keeps_gradients)


def default_bucket_mb(model: nn.Module) -> int:
    """torch's, or more for a large model: small buckets cost it more than they overlap."""
    gradient_mb = sum(p.nbytes for p in model.parameters() if p.requires_grad) / 2**20
    return max(25, round(gradient_mb / 20))


def _sum_over_ranks(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    """Losses are already divided by the global count, so gradients are summed, not averaged.

    Multiplying the loss by the number of ranks would undo the average too, but round twice.
    """
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: buffer)
