"""A CUDA graph, and what of a batch and of the host's random numbers a recording in it depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor

from shoal.errors import UserError, one_line
from shoal.seeding import draw_from_all
from shoal.strategies.executors import Surroundings
from shoal.tensors import map_tensors

KEY = "training.cuda_graphs = true"
RECORDING = ("recording",)
"""The place in the run that generators are seeded from while a micro-batch is recorded."""
PLAIN_VALUES = (bool, int, float, str, bytes, type(None))


class CudaGraph:
    """All work that a function starts on the current GPU, which can be started again at once.

    It reads and writes the same memory each time. Graphs that are made with each other's memory (`shared`) may not
    compute at the same time.
    """

    def __init__(self, shared: CudaGraph | None = None):
        self._graph = torch.cuda.CUDAGraph()
        self._pool = None if shared is None else shared._graph.pool()

    def record(self, function: Callable[[], None]) -> None:
        """Calls a function whose work the device does not do now, but in each `replay`."""
        stream = torch.cuda.current_stream()
        try:
            # Other threads read data and save checkpoints meanwhile, which would end a capture of all threads.
            with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                function()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # which a capture that fails at its end does not do
            causes = [error, error.__context__]  # ending a failed capture fails, too
            if memory := next((cause for cause in causes if isinstance(cause, torch.OutOfMemoryError)), None):
                raise memory from None
            first = error.__context__ or error
            raise UserError(
                f"{KEY}: the forward and backward cannot be recorded ({one_line(first, 200)}): something in them waits "
                "for the GPU or moves to the host, draws random numbers that torch cannot record, or the model or "
                "recipe keeps the loss or the output of an earlier micro-batch (keep loss.detach()); mend that, or "
                "leave the key out, in a new process"
            ) from error

    def replay(self) -> None:
        self._graph.replay()


def contents_of(tree: Any, device: torch.device) -> Iterator[Any]:
    """Yields what a recording depends on in a batch: everything but the numbers of tensors on the run's device."""
    if isinstance(tree, Tensor):
        if type(tree) is not Tensor or tree.layout != torch.strided or tree.is_nested:
            kind = "a sparse or nested tensor" if type(tree) is Tensor else f"a {type(tree).__name__}"
            raise UserError(f"{KEY}: the batch holds {kind}, {_CANNOT_COPY}")
        yield from (tree.dtype, tree.device, tree.shape)
        if tree.device.type == "cpu" != device.type:  # the host can read it
            yield repr(tree.tolist())
    elif isinstance(tree, PLAIN_VALUES):
        yield from (type(tree), tree)  # 1 == 1.0 == True
    elif isinstance(tree, MutableMapping):
        yield from (dict, len(tree))
        for key, value in tree.items():
            yield key
            yield from contents_of(value, device)
    elif isinstance(tree, list | tuple):
        yield from (list, len(tree))
        for value in tree:
            yield from contents_of(value, device)
    else:
        raise UserError(f"{KEY}: the batch holds a {type(tree).__name__}, {_CANNOT_COPY}")


_CANNOT_COPY = (
    "which a recording cannot copy; let prepare_batch return dicts and lists of plain tensors, numbers and strings, or "
    "leave the key out"
)


def tensors_of(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch, in the order in which it names them."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, batch)
    return tensors


def check_host_generators(surroundings: Surroundings) -> None:
    """Refuses what has drawn from a generator of the host since they were seeded for a recording, which would repeat
    the same numbers."""
    drawn = draw_from_all()
    surroundings.seed(*RECORDING)
    if drawn != draw_from_all():
        raise UserError(
            f"{KEY}: the model or the recipe draws random numbers on the host (Python's, NumPy's, or torch's on the "
            "CPU), which a recording would repeat in every step; draw them on the GPU, or leave the key out"
        )
