"""Micro-batches from recordings in CUDA graphs, for steps in which the GPU waits for the host.

A step of a small model, or with few tokens, is thousands of short kernels, and the host takes longer to start one than
the GPU to compute it. A CUDA graph is a recording of all kernels of a forward and backward, with the addresses that
they read and write, and the host starts it at once. Whatever Python computed is in it as it was when it was recorded.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError, one_line
from shoal.seeding import draw_from_all
from shoal.strategies.engines.plain import NOTHING, PlainEngine
from shoal.strategies.executors import InTurn, Surroundings
from shoal.strategies.measures import Measures
from shoal.strategies.recipe_results import model_inputs
from shoal.tensors import map_tensors, module_state_kept
from shoal.torch_private import DROPOUT, foreach_norm, foreach_zero_
from shoal.types import Objective

KEY = "training.cuda_graphs = true"
RECORDING = ("recording",)
"""The place in the run that generators are seeded from while a micro-batch is recorded."""
MOST = 8
"""The most shapes that are recorded: each recording has its own copy of the batch, and takes a while."""
PLAIN_BEFORE_WARNING = 32


@dataclass
class Recording:
    """A forward and backward in a CUDA graph: the tensors that it reads and writes."""

    graph: Any
    inputs: list[Tensor]
    """The tensors of the batch."""
    scale: Tensor
    loss: Tensor
    output: Any
    """The output of the model, if metrics need it."""
    beside: Any
    """The metrics that the loss returned."""


class Recorded(InTurn):
    """Runs micro-batches in turn; one whose shapes have been recorded is computed by its recording.

    Gradients are added to tensors that stay where they are. The optimizer may still set `.grad` to None after a step.
    """

    def __init__(self, engine: PlainEngine, surroundings: Surroundings, model: nn.Module):
        super().__init__(engine, surroundings)
        self.num_recorded, self.num_plain = 0, 0
        """How many micro-batches were computed by recordings, and how many without."""
        self.is_paused = False
        """True while somebody watches what forward and backward do, of which a recording shows nothing."""
        self.recordings: dict[Hashable, Recording] = {}
        self._modules, self._tensors = [*model.modules()], [*model.parameters(), *model.buffers()]
        self._dropouts = [module for module in self._modules if isinstance(module, DROPOUT)]
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._seen: Counter[Hashable] = Counter()
        self._pool: Any = None

    def forward_backward(
        self, batches: Sequence[Any], scales: Sequence[Tensor], recipe: Objective, measures: Measures, step: int
    ) -> list[Tensor]:
        if self.is_paused:
            return super().forward_backward(batches, scales, recipe, measures, step)
        losses = []
        for index, (batch, scale) in enumerate(zip(batches, scales, strict=True)):
            key = self._key(batch)
            if (recording := self.recordings.get(key)) is not None and not measures.is_filler(index):
                losses.append(self._replay(recording, batch, scale, measures, step, index))
                continue
            alone = all(parameter.grad is None for parameter in self._trained)
            loss = self._run(batch, scale, recipe, measures, step, index)
            if alone and not measures.is_filler(index) and self._is_worth_it(key):
                self._record(key, batch, scale, recipe, measures, (step, index), loss)
            losses.append(loss)
        return losses

    def describe(self) -> str:
        """Returns what is recorded, for the report."""
        shapes = len(self.recordings)
        return f"forward and backward recorded for {shapes} shape{'s' * (shapes != 1)} of micro-batches"

    def _run(self, batch: Any, scale: Tensor, recipe: Objective, measures: Measures, step: int, index: int) -> Tensor:
        self.num_plain += 1
        if self.num_plain == PLAIN_BEFORE_WARNING and self.num_plain > self.num_recorded:
            warnings.warn(
                f"{KEY}: {self.num_plain} of {self.num_plain + self.num_recorded} micro-batches were computed without "
                "a recording, because their shapes were new; pad or pack them to one length, or leave the key out",
                stacklevel=1,
            )
        alone = self.surroundings.filler([self.engine.module]) if measures.is_filler(index) else NOTHING
        with alone:
            with self.surroundings.enter(recipe, batch, scale, step, index):
                loss = measures.loss(self.engine.module(**model_inputs(recipe, batch)), batch, index)
            loss.backward(scale)
        return loss.detach().float()

    def _key(self, batch: Any) -> Hashable:
        """Returns all that a recording depends on: shapes and numbers of the batch, and the state of the model."""
        shapes = repr(map_tensors(_described, batch))
        tensors = tuple((tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors)
        modes = tuple(module.training for module in self._modules)
        return shapes, tensors, modes, tuple(module.p for module in self._dropouts)

    def _is_worth_it(self, key: Hashable) -> bool:
        """Returns whether to record a micro-batch: the first one, and later those whose shapes came before."""
        self._seen[key] += 1
        if not self.recordings:
            return True
        used = [parameter.grad is not None for parameter in self._trained]
        recorded = {id(parameter) for parameter, _ in self._gradients}
        alike = used == [id(parameter) in recorded for parameter in self._trained]
        return alike and self._seen[key] > 1 and len(self.recordings) < MOST

    def _record(
        self,
        key: Hashable,
        batch: Any,
        scale: Tensor,
        recipe: Objective,
        measures: Measures,
        place: tuple[int, int],
        loss: Tensor,
    ) -> None:
        """Records a micro-batch that has just been computed, computes it again by the recording, and compares.

        Afterwards gradients are those of the recording.
        """
        if not self._gradients:
            self._gradients = [(p, p.grad) for p in self._trained if p.grad is not None]
        self._place_gradients()
        norms = foreach_norm([gradient for _, gradient in self._gradients])
        with module_state_kept([self.engine.module]):  # the comparison computes the micro-batch once more
            recording = self._captured(map_tensors(torch.clone, batch), scale.clone(), recipe, measures)
            foreach_zero_([gradient for _, gradient in self._gradients])
            self.surroundings.seed(*place)
            recording.graph.replay()
        found = foreach_norm([gradient for _, gradient in self._gradients])
        pairs = zip([loss, *norms], [recording.loss, *found], strict=True)
        if not all(torch.allclose(one, other, rtol=1e-3, equal_nan=True) for one, other in pairs):
            raise UserError(
                f"{KEY}: the recording of a micro-batch computes otherwise than its model does (the loss is "
                f"{recording.loss.item():g} and not {loss.item():g}, or gradients differ), because the model or the "
                "recipe changes from call to call; leave it out"
            )
        self.recordings[key] = recording

    def _captured(self, batch: Any, scale: Tensor, recipe: Objective, measures: Measures) -> Recording:
        """Returns a recording that reads this batch and this scale. The device computes nothing meanwhile."""
        graph = torch.cuda.CUDAGraph()
        # Other seeds than in the comparison, so that random numbers that got into the recording are found there.
        self.surroundings.seed(*RECORDING)
        try:
            # Other threads read data and save checkpoints meanwhile, which would end a capture of all threads.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                with self.surroundings.enter(recipe, batch, scale):
                    output = self.engine.module(**model_inputs(recipe, batch))
                    loss, beside = measures.split_loss(output, batch)
                loss.backward(scale)
                loss = loss.detach().float()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = error.__context__ or error  # ending a failed capture fails, too
            raise UserError(
                f"{KEY}: the forward and backward cannot be recorded, because something in them waits for the GPU or "
                f"moves to the host ({one_line(first, 200)}); leave it out"
            ) from error
        check_host_generators(self.surroundings)
        self._pool = self._pool or graph.pool()
        return Recording(graph, _tensors_of(batch), scale, loss, output if measures.has_metrics else None, beside)

    def _replay(
        self, recording: Recording, batch: Any, scale: Tensor, measures: Measures, step: int, index: int
    ) -> Tensor:
        self.num_recorded += 1
        self._place_gradients()
        for own, tensor in zip(recording.inputs, _tensors_of(batch), strict=True):
            own.copy_(tensor)
        recording.scale.copy_(scale)
        self.surroundings.seed(step, index)
        recording.graph.replay()
        measures.measure(recording.output, batch, recording.beside, index)
        return recording.loss.clone()

    def _place_gradients(self) -> None:
        """Gives parameters the tensors that recordings add to; 0 where there was no gradient."""
        if missing := [gradient for parameter, gradient in self._gradients if parameter.grad is None]:
            foreach_zero_(missing)
        for parameter, gradient in self._gradients:
            if parameter.grad is not None and parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient


def _tensors_of(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch, in the order in which it names them."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, batch)
    return tensors


def _described(tensor: Tensor) -> Any:
    """Returns what a recording depends on: numbers only of a tensor that the host can read."""
    about = tensor.dtype, tensor.device, tuple(tensor.shape)
    return (*about, tensor.tolist()) if tensor.device.type == "cpu" else about


def check_host_generators(surroundings: Surroundings) -> None:
    """Refuses what has drawn from a generator of the host since they were seeded for a recording, which would repeat
    the same numbers."""
    drawn = draw_from_all()
    surroundings.seed(*RECORDING)
    if drawn != draw_from_all():
        raise UserError(
            f"{KEY}: the model or the recipe draws random numbers on the host (Python's, NumPy's, or torch's on the "
            "CPU), which a recording would repeat in every step; draw them on the GPU, or leave it out"
        )
