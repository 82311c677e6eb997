"""Micro-batches from recordings in CUDA graphs, for steps in which the GPU waits for the host.

A step of a small model, or with few tokens, is thousands of short kernels, and the host takes longer to start one than
the GPU to compute it. A CUDA graph is a recording of all kernels of a forward and backward, with the addresses that
they read and write, and the host starts it at once. Whatever Python computed is in it as it was when it was recorded.
So a recording is used only for the state of the model that it was made in, and is compared with the model now and then.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import UserError, one_line
from shoal.seeding import draw_from_all
from shoal.strategies.engines.plain import PlainEngine
from shoal.strategies.executors import InTurn, Surroundings
from shoal.strategies.measures import Measures
from shoal.strategies.recipe_results import model_inputs
from shoal.tensors import map_tensors, module_state_kept, modules_with_extra_state
from shoal.torch_private import DROPOUT, foreach_norm, foreach_zero_, version_of
from shoal.types import Objective

KEY = "training.cuda_graphs = true"
RECORDING = ("recording",)
"""The place in the run that generators are seeded from while a micro-batch is recorded."""
MOST = 8
"""The most kinds of micro-batches that are recorded: each recording keeps memory."""
COMPARED_EVERY = 256
"""A recording is compared after 1, 2, 4, 8 … uses, and from then on after every so many."""
WINDOW = 64
"""After so many micro-batches without a recording, a warning says so if they are the most."""
PLAIN_VALUES = (bool, int, float, str, bytes, type(None))


@dataclass
class Recording:
    """A forward and backward in a CUDA graph: the tensors that it reads and writes."""

    graph: Any
    inputs: list[Tensor]
    """The tensors of the batch."""
    scale: Tensor
    recipe: Objective
    """Whose forward and loss it is; kept, so that no other object gets its id."""
    gradients: list[tuple[nn.Parameter, Tensor]]
    """The parameters that get a gradient, and the tensors that it is added to."""
    loss: Tensor
    output: Any
    """The output of the model, if metrics need it."""
    beside: Any
    """The metrics that the loss returned."""
    num_uses: int = 0
    """How often it was used where no other micro-batch had left gradients, so that they can be compared."""

    def is_due(self) -> bool:
        """Returns whether to compare the next use."""
        used = self.num_uses
        return (used < COMPARED_EVERY and not used & (used - 1)) or used % COMPARED_EVERY == 0


@dataclass
class Expected:
    """What a micro-batch gives without a recording."""

    loss: Tensor
    norms: dict[nn.Parameter, Tensor]


@dataclass
class Task:
    """A micro-batch that is to be computed."""

    batch: Any
    scale: Tensor
    recipe: Objective
    measures: Measures
    place: tuple[int, int]
    """The step, and the number of the micro-batch in it."""


class Recorded(InTurn):
    """Runs micro-batches in turn; one of a kind that has been recorded is computed by its recording.

    Gradients are added to tensors that stay where they are. The optimizer may still set `.grad` to None after a step.
    """

    def __init__(self, engine: PlainEngine, surroundings: Surroundings, model: nn.Module):
        super().__init__(engine, surroundings)
        self.num_recorded, self.num_plain = 0, 0
        """How many micro-batches were computed by recordings, and how many without."""
        self.is_paused = False
        """True while somebody watches what forward and backward do, of which a recording shows nothing."""
        self.recordings: dict[int, Recording] = {}
        """By the hash of what they depend on."""
        self._modules = [*model.modules()]
        self._dropouts = [module for module in self._modules if isinstance(module, DROPOUT)]
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._seen: Counter[int] = Counter()
        self._pool: Any = None
        self._compares = True
        if stateful := [name or type(module).__name__ for name, module in modules_with_extra_state(model)]:
            raise UserError(
                f"{KEY}: {stateful[0]} is Python state (get_extra_state), which recordings skip; leave it out"
            )

    def forward_backward(
        self, batches: Sequence[Any], scales: Sequence[Tensor], recipe: Objective, measures: Measures, step: int
    ) -> list[Tensor]:
        if self.is_paused:
            return super().forward_backward(batches, scales, recipe, measures, step)
        losses = []
        for index, (batch, scale) in enumerate(zip(batches, scales, strict=True)):
            task = Task(batch, scale, recipe, measures, (step, index))
            key = hash((id(recipe), self._state(), *_contents(batch)))
            # Only then gradients afterwards are those of this micro-batch, and can be compared.
            alone = all(parameter.grad is None for parameter in self._parameters())
            recording = self.recordings.get(key)
            if recording is None and not (alone and self._is_worth_it(key)):
                losses.append(self._compute(task))
            elif recording is None or (alone and self._compares and recording.is_due()):
                losses.append(self._compute_and_compare(key, task))
            else:
                losses.append(self._replay(recording, task))
            if recording is not None:
                recording.num_uses += alone
        return losses

    def describe(self) -> str:
        """Returns what is recorded, for the report."""
        kinds = len(self.recordings)
        return f"forward and backward recorded for {kinds} kind{'s' * (kinds != 1)} of micro-batches"

    def _parameters(self) -> list[nn.Parameter]:
        return [p for module in self._modules for p in module._parameters.values() if p is not None]

    def _state(self) -> tuple[Any, ...]:
        """Returns what a recording depends on in the model: where its tensors are, what is trained, and modes."""
        tensors = (
            (tensor.data_ptr(), tensor.requires_grad)
            for module in self._modules
            for tensors in (module._parameters, module._buffers)
            for tensor in tensors.values()
            if tensor is not None
        )
        modes = (module.training for module in self._modules)
        return *tensors, *modes, *(module.p for module in self._dropouts)

    def _is_worth_it(self, key: int) -> bool:
        """Returns whether to record a micro-batch: the first one, and later those of a kind that came before."""
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[key] += 1
        return not self.recordings or (self._seen[key] > 1 and len(self.recordings) < MOST)

    def _compute(self, task: Task) -> Tensor:
        """Computes a micro-batch without a recording."""
        self.num_plain += 1
        if self.num_plain == WINDOW and self.num_plain > self.num_recorded:
            warnings.warn(
                f"{KEY}: {self.num_plain} of {self.num_plain + self.num_recorded} micro-batches were computed without "
                "a recording, because their shapes, other contents of the batch, or what is trained were new; pad or "
                "pack them to one length, leave out of the batch what changes, or leave the key out",
                stacklevel=1,
            )
        batch, recipe = task.batch, task.recipe
        with self.surroundings.enter(recipe, batch, task.scale, *task.place):
            loss = task.measures.loss(self.engine.module(**model_inputs(recipe, batch)), batch, task.place[1])
        loss.backward(task.scale)
        return loss.detach().float()

    def _compute_and_compare(self, key: int, task: Task) -> Tensor:
        """Computes a micro-batch twice: without a recording, for comparison, and by one, which may have to be made."""
        recording = self.recordings.get(key)
        try:
            expected = self._expect(task)
        except torch.OutOfMemoryError:
            if recording is None:
                raise
            self._compares = False
            self._drop_gradients()
            warnings.warn(f"{KEY}: there is no memory to compare recordings with the model any more", stacklevel=1)
            return self._replay(recording, task)
        if recording is None:
            recording = self._record(task, [(p, self._gradients[p]) for p in expected.norms])
            recording.num_uses = 1
        loss = self._replay(recording, task)
        _compare(recording, expected)
        self.recordings[key] = recording
        return loss

    def _expect(self, task: Task) -> Expected:
        """Returns what a micro-batch gives without a recording. Leaves gradients and buffers as they were."""
        batch = map_tensors(_copied, task.batch)  # a recipe may write into it
        before = [version_of(parameter) for parameter in self._parameters()]
        with module_state_kept([self.engine.module]):
            with self.surroundings.enter(task.recipe, batch, task.scale, *task.place):
                output = self.engine.module(**model_inputs(task.recipe, batch))
                loss, _ = task.measures.split_loss(output, batch)
            loss.backward(task.scale)
        if before != [version_of(parameter) for parameter in self._parameters()]:
            raise UserError(f"{KEY}: the forward changes parameters in place, so it cannot be compared; leave it out")
        gradients = {p: p.grad for p in self._parameters() if p.grad is not None}
        norms = foreach_norm([*gradients.values()], 2, torch.float32)
        for parameter, gradient in gradients.items():
            self._gradients.setdefault(parameter, gradient)
        self._drop_gradients()
        return Expected(loss.detach().float(), dict(zip(gradients, norms, strict=True)))

    def _drop_gradients(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _record(self, task: Task, gradients: list[tuple[nn.Parameter, Tensor]]) -> Recording:
        """Returns a recording of a micro-batch. The device computes nothing meanwhile."""
        batch, scale = map_tensors(_copied, task.batch), task.scale.detach().to(self.surroundings.device, copy=True)
        inputs, graph, stream = _tensors_of(batch), torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        _place(gradients)
        # Other seeds than where it is compared, so that random numbers that got into the recording are found there.
        self.surroundings.seed(*RECORDING)
        try:
            # Other threads read data and save checkpoints meanwhile, which would end a capture of all threads.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                with self.surroundings.enter(task.recipe, batch, scale):
                    output = self.engine.module(**model_inputs(task.recipe, batch))
                    loss, beside = task.measures.split_loss(output, batch)
                loss.backward(scale)
                loss = loss.detach().float()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # which a capture that fails at its end does not do
            first = error.__context__ or error  # ending a failed capture fails, too
            if isinstance(first, torch.OutOfMemoryError):
                raise first from None
            raise UserError(
                f"{KEY}: the forward and backward cannot be recorded, because something in them waits for the GPU or "
                f"moves to the host ({one_line(first, 200)}); leave it out"
            ) from error
        check_host_generators(self.surroundings)
        if [*map(id, inputs)] != [*map(id, _tensors_of(batch))]:
            raise UserError(
                f"{KEY}: the recipe puts tensors into the batch, which uses of a recording would not see; "
                "do that in prepare_batch, or leave it out"
            )
        known = {parameter for parameter, _ in gradients}
        if any(p.grad is not None and p not in known for p in self._parameters()):
            raise UserError(
                f"{KEY}: parameters get a gradient in some calls of the model and not in others; leave it out"
            )
        self._drop_gradients()
        self._pool = self._pool or graph.pool()
        output = output if task.measures.has_metrics else None
        return Recording(graph, inputs, scale, task.recipe, gradients, loss, output, beside)

    def _replay(self, recording: Recording, task: Task) -> Tensor:
        """Computes a micro-batch by a recording."""
        self.num_recorded += 1
        _place(recording.gradients)
        for own, tensor in zip(recording.inputs, _tensors_of(task.batch), strict=True):
            own.copy_(tensor)
        recording.scale.copy_(task.scale)
        self.surroundings.seed(*task.place)
        recording.graph.replay()
        # A copy, because metrics may keep what they are given, and the next use writes over it.
        output = map_tensors(torch.clone, recording.output)
        task.measures.measure(output, task.batch, recording.beside, task.place[1])
        return recording.loss.clone()


def _place(gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Gives parameters the tensors that recordings add to; 0 where there was no gradient."""
    if missing := [gradient for parameter, gradient in gradients if parameter.grad is None]:
        foreach_zero_(missing)
    for parameter, gradient in gradients:
        if parameter.grad is not None and parameter.grad is not gradient:
            gradient.copy_(parameter.grad)
        parameter.grad = gradient


def _compare(recording: Recording, expected: Expected) -> None:
    """Compares the last use of a recording, which no other micro-batch added to; the host waits for it."""
    found = torch.stack(foreach_norm([gradient for _, gradient in recording.gradients], 2, torch.float32))
    norms = torch.stack([expected.norms.get(p, torch.zeros_like(found[0])) for p, _ in recording.gradients])
    # Some gradients are nothing but rounding, as that of a bias before a norm.
    near = (found - norms).abs() <= 1e-3 * norms + 1e-4 * norms.norm()
    near |= (found == norms) | (found.isnan() & norms.isnan())
    if near.all() and torch.allclose(recording.loss, expected.loss, rtol=1e-3, equal_nan=True):
        return
    raise UserError(
        f"{KEY}: a recording computes otherwise than the model does (loss {recording.loss.item():g} and not "
        f"{expected.loss.item():g}, or other gradients): something that Python computes in the forward, the inputs or "
        "the loss changes between steps, such as an attribute; make it a tensor of the batch, or leave the key out"
    )


def _contents(tree: Any) -> Iterator[Any]:
    """Yields what a recording depends on in a batch: everything but the numbers of tensors on the device."""
    if isinstance(tree, Tensor) and type(tree) is Tensor and tree.layout == torch.strided and not tree.is_nested:
        yield from (tree.dtype, tree.device, tree.shape)
        if tree.device.type == "cpu":  # the host can read it
            yield repr(tree.tolist())
    elif isinstance(tree, PLAIN_VALUES):
        yield tree
    elif isinstance(tree, MutableMapping):
        for key, value in tree.items():
            yield key
            yield from _contents(value)
    elif isinstance(tree, list | tuple):
        yield len(tree)
        for value in tree:
            yield from _contents(value)
    else:
        raise UserError(
            f"{KEY}: the batch holds a {type(tree).__name__}, which a recording cannot copy; let prepare_batch return "
            "dicts and lists of plain tensors, numbers and strings, or leave it out"
        )


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _tensors_of(batch: Any) -> list[Tensor]:
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
            "CPU), which a recording would repeat in every step; draw them on the GPU, or leave it out"
        )
