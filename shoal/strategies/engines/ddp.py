"""torch's DistributedDataParallel: every rank holds the whole model, and gradients are all-reduced in buckets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shoal.errors import UserError
from shoal.strategies.engines.plain import PlainEngine
from shoal.strategies.module_state import share_model
from shoal.tensors import module_state_kept
from shoal.torch_private import is_fake

# torch 2.13 has a new name for it, and warns about the old one.
_PARAMETERS = signature(DistributedDataParallel).parameters
_BROADCAST_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"

_UNUSED = ("Expected to have finished reduction", "training graph has changed")
"""What DDP's errors say when a gradient never came."""


class DDPEngine(PlainEngine):
    """Wraps the model into DistributedDataParallel over the mesh dimension `dp_replicate`."""

    waits_in = "backward"
    is_warm = False
    _last = True

    def wrap(self, model: nn.Module) -> None:
        self.module = model
        if not any(p.requires_grad for p in model.parameters()):
            return  # DDP refuses a model without gradients
        assert self.mesh is not None
        group = self.mesh.get_group("dp_replicate")
        if is_fake(next(model.parameters())):
            # For a planner: DDP's reducer reads memory, which fake tensors do not have. This sends as many bytes.
            self.is_warm = True
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.register_post_accumulate_grad_hook(
                    lambda p: dist.all_reduce(p.grad, group=group) if self._last else None
                )
            return
        share_model(model, group)
        options = self.layout.ddp.model_dump(exclude={"broadcast_buffers"})
        # Buffers are the strategy's business, as under all engines: DDP would take the list of them before a forward,
        # and fail if the forward registers one or makes one longer. Nor can it send all dtypes over gloo.
        options |= {_BROADCAST_BUFFERS: False, "init_sync": False}
        options["bucket_cap_mb"] = options["bucket_cap_mb"] or default_bucket_mb(model)
        # Freed gradients would be made anew outside DDP's buckets. Where some parameters stay unused they are freed all
        # the same: a zero in the place of a missing gradient would still be decayed.
        self.keeps_gradients = options["gradient_as_bucket_view"] and not options["find_unused_parameters"]
        self.module = DistributedDataParallel(model, process_group=group, **options)
        if self.reduction == "sum":
            self.module.register_comm_hook((group, self.own_time), _sum_over_ranks)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        self._last = last
        if last or not isinstance(self.module, DistributedDataParallel):
            self.is_warm = True
            return nullcontext()
        if self.layout.ddp.static_graph and not self.is_warm:
            return nullcontext()  # a static graph refuses an unsynchronised backward before it is recorded
        return self.module.no_sync()

    def warm_up(self, loss_of_batch: Callable[[], Tensor]) -> None:
        """Runs one backward with a gradient of zero, or two for a static graph.

        DDP fills its buckets in another order after the first backward, and sums over four ranks or more then differ
        in their last bits: without this, a run that was restarted would not repeat one that was not.
        """
        self.is_warm = True
        if not isinstance(self.module, DistributedDataParallel):
            return
        model = self.module.module
        with module_state_kept([model]), _written_parameters_restored(model):
            for _ in range(2 if self.layout.ddp.static_graph else 1):
                loss = loss_of_batch()
                loss.backward(torch.zeros_like(loss))
        model.zero_grad(set_to_none=not self.keeps_gradients)

    def explain(self, error: RuntimeError) -> UserError | None:
        if not any(words in str(error) for words in _UNUSED):
            return None
        if self.layout.ddp.static_graph:
            advice = "distributed.ddp.static_graph = true, but not every step uses the same ones; set it to false"
        else:
            advice = "set distributed.ddp.find_unused_parameters to true, or freeze or remove them"
        return UserError(
            f"some parameters took no part in the loss{self._unused_names(str(error))}, and DDP waits for their "
            f"gradients; {advice}"
        )

    def _unused_names(self, message: str) -> str:
        """Returns the names of the parameters that DDP's message lists by number, or an empty string."""
        found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", message)
        if found is None or not isinstance(self.module, DistributedDataParallel):
            return ""
        trained = [name for name, p in self.module.module.named_parameters() if p.requires_grad]
        names = [trained[int(index)] for index in found[1].split() if int(index) < len(trained)]
        return f" ({', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''})"


@contextmanager
def _written_parameters_restored(model: nn.Module) -> Iterator[None]:
    """Gives the parameters that a forward has written, such as those of a mean teacher, their values back."""
    before = [(p, (p._version, p.data_ptr()), p.detach().to("cpu", copy=True)) for p in model.parameters()]
    yield
    with torch.no_grad():
        for parameter, written, value in before:
            if (parameter._version, parameter.data_ptr()) != written:
                parameter.copy_(value)


def default_bucket_mb(model: nn.Module) -> int:
    """Returns torch's bucket size, or more for a large model: small buckets cost it more than they overlap."""
    gradient_mb = sum(p.nbytes for p in model.parameters() if p.requires_grad) / 2**20
    return max(25, round(gradient_mb / 20))


def _sum_over_ranks(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
    """Sums gradients instead of averaging them, because losses are already divided by the global count."""
    group, own_time = state
    own_time.stop()  # the gradients of this bucket are there; DDP waits for other ranks after the last one
    buffer = bucket.buffer()
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future().then(lambda future: buffer)
