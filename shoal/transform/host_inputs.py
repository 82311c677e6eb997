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
from shoal.torch_private import storage_key, version_of


def keep_inputs_on_host(blocks: list[nn.Module], device: torch.device) -> HostInputs:
    """Makes these blocks, which are recomputed, keep their inputs in host memory."""
    host_inputs = HostInputs(device)
    for block in blocks:
        add_layer(block, host_inputs.around)
    return host_inputs


class HostInputs:
    """What the blocks of a model keep in host memory: those of their positional inputs that need a gradient.

    Tables that all blocks share stay where they are, and so do inputs whose elements overlap in memory.
    """

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
            storage_key(value): value
            for value in args
            if isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter)
        }
        try:
            with saved_tensors_hooks(partial(self._pack, inputs), self._unpack):
                return forward(*args, **kwargs)
        finally:
            inputs.clear()  # torch keeps the function until the backward

    def _pack(self, inputs: dict[int, Tensor], tensor: Tensor) -> _Kept:
        """Takes a tensor that is saved for the backward, and moves it if it is an input; a compiled block also saves
        others."""
        source = inputs.get(storage_key(tensor))
        values = None
        if source is not None and tensor.is_floating_point() and tensor.numel():
            values = torch.empty_like(tensor, device="cpu", pin_memory=self._has_streams)
        if source is None or values is None or values.stride() != tensor.stride():
            return _Kept(tensor)
        kept = _OnHost(source, tensor, values, self._last())
        self._last = weakref.ref(kept)
        self.num_kept += 1
        if not self._has_streams:
            values.copy_(tensor)
            return kept
        self._out.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._out):
            values.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._out)  # its memory is not used again before it was copied
        return kept

    def _unpack(self, kept: _Kept) -> Tensor:
        kept.check()
        if not isinstance(kept, _OnHost):
            assert kept.tensor is not None
            return kept.tensor
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


class _Kept:
    """A tensor that is saved for the backward. torch checks none that a hook has taken."""

    def __init__(self, tensor: Tensor):
        self.tensor: Tensor | None = tensor
        self._source, self._version = weakref.ref(tensor), version_of(tensor)

    def check(self) -> None:
        """Raises an error if the tensor was changed, and so is not what the forward computed with."""
        source = self._source()
        if source is not None and version_of(source) != self._version:
            raise RuntimeError(
                f"a tensor {tuple(source.shape)} that the forward of a recomputed block was given, or keeps for its "
                "backward, was modified by an inplace operation"
            )


class _OnHost(_Kept):
    """An input of a block in host memory; `source` is the tensor that the block was called with."""

    def __init__(self, source: Tensor, tensor: Tensor, values: Tensor, before: _OnHost | None):
        super().__init__(source)
        self.tensor = None
        self.device, self.values = tensor.device, values
        self.before: Callable[[], _OnHost | None] = weakref.ref(before) if before is not None else lambda: None
        """The tensor that was moved before this one, and so is needed after it; none if its backward is over."""
        self.fetched: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
