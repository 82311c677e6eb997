"""Keeps the inputs of recomputed blocks in host memory between the forward and the backward.

Copies run on streams of their own, so that they overlap with computing: the input of a block goes to the host while the
block computes, and the input of the block before it comes back while a block's backward computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.errors import UserError
from shoal.forward import add_layer
from shoal.torch_private import storage_key


def keep_inputs_on_host(blocks: list[nn.Module], device: torch.device) -> HostInputs:
    """Makes these blocks, which are recomputed, keep their inputs in host memory."""
    host_inputs = HostInputs(device)
    for block in blocks:
        add_layer(block, host_inputs.around)
    return host_inputs


class HostInputs:
    """What the blocks of a model keep in host memory: their positional inputs."""

    def __init__(self, device: torch.device):
        if device.type not in ("cuda", "cpu"):
            raise UserError(
                f"training.activation_checkpointing.offload = true: it moves tensors between a CUDA device and the "
                f"host, and this run is on {device.type}; leave it out"
            )
        self._has_streams = device.type == "cuda"
        if self._has_streams:
            self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._last: Callable[[], _OnHost | None] = lambda: None
        self.num_kept = 0
        """The number of tensors that were moved so far."""

    def around(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a block's forward; a layer around it."""
        inputs = {
            storage_key(value) for value in args if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        }
        with saved_tensors_hooks(partial(self._pack, inputs), self._unpack):
            return forward(*args, **kwargs)

    def _pack(self, inputs: set[int], tensor: Tensor) -> Tensor | _OnHost:
        """Moves a tensor that is saved for the backward, if it is an input; a compiled block also saves others, and
        wants their strides to stay."""
        if not tensor.is_floating_point() or not tensor.is_contiguous() or storage_key(tensor) not in inputs:
            return tensor
        kept = _OnHost(tensor, self._last())
        self._last = weakref.ref(kept)
        self.num_kept += 1
        if not self._has_streams:
            kept.values = tensor.clone()
            return kept
        kept.values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._out.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._out):
            kept.values.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._out)  # its memory is not used again before it was copied
        return kept

    def _unpack(self, kept: Tensor | _OnHost) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._fetch(kept)
        before = kept.before()
        if before is not None:
            self._fetch(before)  # the backward needs it next
        tensor = kept.fetched
        assert tensor is not None
        kept.fetched = None
        if self._has_streams:
            current = torch.cuda.current_stream(tensor.device)
            assert kept.arrived is not None
            current.wait_event(kept.arrived)
            tensor.record_stream(current)
        return tensor

    def _fetch(self, kept: _OnHost) -> None:
        """Begins to copy a tensor back to its device, unless that has begun."""
        if kept.fetched is not None:
            return
        if not self._has_streams:
            kept.fetched = kept.values.clone()
            return
        self._in.wait_stream(self._out)
        with torch.cuda.stream(self._in):
            kept.fetched = kept.values.to(kept.device, non_blocking=True)
            kept.arrived = self._in.record_event()


class _OnHost:
    """A tensor in host memory."""

    values: Tensor

    def __init__(self, tensor: Tensor, before: _OnHost | None):
        self.device = tensor.device
        self.before: Callable[[], _OnHost | None] = weakref.ref(before) if before is not None else lambda: None
        """The tensor that was moved before this one, and so is needed after it; none if its backward is over."""
        self.fetched: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
