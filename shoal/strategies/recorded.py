"""Micro-batches from recordings in CUDA graphs, for steps in which the GPU waits for the host.

A step of a small model, or with few tokens, is thousands of short kernels, and the host takes longer to start one than
the GPU to compute it. A CUDA graph is a recording of all kernels of a forward and backward, with the addresses that
they read and write, and the host starts it at once. Whatever Python computed is in it as it was when it was recorded.
So a recording is used only for the state of the model that it was made in, and is compared with the model now and then.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.errors import UserError
from shoal.strategies.cuda_graph import KEY, RECORDING, CudaGraph, check_host_generators, contents_of, tensors_of
from shoal.strategies.engines.plain import PlainEngine
from shoal.strategies.executors import InTurn, Surroundings
from shoal.strategies.measures import Measures
from shoal.strategies.recipe_results import model_inputs
from shoal.tensors import fingerprint, map_tensors, module_state_kept, modules_with_extra_state
from shoal.torch_private import DROPOUT, foreach_zero_
from shoal.types import Objective

MOST = 8
"""The most kinds of micro-batches that are recorded: each recording keeps memory."""
COMPARED_EVERY = 256
"""A recording is compared after 1, 2, 4, 8 … uses, and from then on after every so many."""
WINDOW = 64
"""A warning says so if most of this many micro-batches were computed without a recording."""

LONGEST = 64
"""Longer lists and dicts in attributes are not searched for tensors."""

Attribute = tuple[dict[str, Any], str, list[Tensor]]
"""The attributes of an object, the name of one of them, and the tensors in it."""
Kind = tuple[Any, ...]
"""What a recording depends on: the recipe, the state of the model, and the batch except for its numbers."""


class Graph(Protocol):
    """A recording of what a function computes, such as a CUDA graph."""

    def record(self, function: Callable[[], None]) -> None:
        """Calls a function, of which nothing is computed now."""

    def replay(self) -> None:
        """Computes what the function would, with what is in the same memory now."""


@dataclass
class Recording:
    """A forward and backward in a CUDA graph: the tensors that it reads and writes."""

    graph: Graph
    batch: Any
    """Whose tensors the graph reads, after the recipe has written into it."""
    inputs: list[Tensor]
    """The tensors of the batch as the recipe got it."""
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
    kept: list[Tensor] = field(default_factory=list)
    """What modules and the recipe keep besides parameters and buffers: nothing else may come to be in its memory."""
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

    def __init__(
        self,
        engine: PlainEngine,
        surroundings: Surroundings,
        model: nn.Module,
        new_graph: Callable[[Any], Graph] = CudaGraph,
    ):
        """`new_graph` gets a graph whose memory the new one may use, or None."""
        super().__init__(engine, surroundings)
        self.num_recorded, self.num_plain = 0, 0
        """How many micro-batches were computed by recordings, and how many without."""
        self.is_paused = False
        """True while somebody watches what forward and backward do, of which a recording shows nothing."""
        self.recordings: dict[Kind, Recording] = {}
        self._new_graph = new_graph
        self._modules = [*model.modules()]
        self._dropouts = [module for module in self._modules if isinstance(module, DROPOUT)]
        self._attributes: list[tuple[dict[str, Any], str]] = []
        """Where modules and recipes keep tensors that are neither parameters nor buffers."""
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._seen: Counter[int] = Counter()
        """How often a kind came, by its hash."""
        self._too_large: set[Kind] = set()
        """Kinds that there was no memory to record."""
        self._recent = [0, 0]
        """How many micro-batches there were in the present window, and how many of them without a recording."""
        self._has_warned = False
        self._compares = True
        if stateful := [name or type(module).__name__ for name, module in modules_with_extra_state(model)]:
            raise UserError(
                f"{KEY}: {stateful[0]} is Python state (get_extra_state), which recordings skip; leave the key out"
            )

    def forward_backward(
        self, batches: Sequence[Any], scales: Sequence[Tensor], recipe: Objective, measures: Measures, step: int
    ) -> list[Tensor]:
        if self.is_paused:
            return super().forward_backward(batches, scales, recipe, measures, step)
        losses = []
        for index, (batch, scale) in enumerate(zip(batches, scales, strict=True)):
            task = Task(batch, scale, recipe, measures, (step, index))
            kind = self._kind_of(task)
            # Only then gradients afterwards are those of this micro-batch, and can be compared.
            alone = all(parameter.grad is None for parameter in self._parameters())
            recording, before = self.recordings.get(kind), self.num_plain
            if recording is None and not (alone and self._is_worth_it(kind)):
                losses.append(self._compute(task))
            elif recording is None or (alone and self._compares and recording.is_due()):
                losses.append(self._compute_and_compare(kind, task))
            else:
                losses.append(self._replay(recording, task))
            if recording is not None:
                recording.num_uses += alone
            self._watch(self.num_plain > before)
        return losses

    def describe(self) -> str:
        """Returns what is recorded, for the report."""
        kinds = len(self.recordings)
        return f"forward and backward recorded for {kinds} kind{'s' * (kinds != 1)} of micro-batches"

    def _parameters(self) -> list[nn.Parameter]:
        return [p for module in self._modules for p in module._parameters.values() if p is not None]

    def _kind_of(self, task: Task) -> Kind:
        return id(task.recipe), self._state(), *contents_of(task.batch, self.surroundings.device)

    def _state(self) -> tuple[Any, ...]:
        """Returns what a recording depends on in the model: where its tensors are, what is trained, and modes."""
        tensors = (
            (tensor.data_ptr(), tensor.requires_grad)
            for module in self._modules
            for tensors in (module._parameters, module._buffers)
            for tensor in tensors.values()
            if tensor is not None
        )
        attributes = (tensor.data_ptr() for tensor in self._attribute_tensors())
        modes = (module.training for module in self._modules)
        return *tensors, *attributes, *modes, *(module.p for module in self._dropouts)

    def _attribute_tensors(self) -> list[Tensor]:
        device = self.surroundings.device.type
        return [tensor for values, name in self._attributes for tensor in _kept_in(values.get(name), device)]

    def _is_worth_it(self, kind: Kind) -> bool:
        """Returns whether to record a micro-batch: the first one, and later those of a kind that came before."""
        if len(self._seen) > 1000:
            self._seen.clear()
        number = hash(kind)
        self._seen[number] += 1
        if not self.recordings:
            return True
        return self._seen[number] > 1 and len(self.recordings) < MOST and kind not in self._too_large

    def _watch(self, is_plain: bool) -> None:
        """Warns once if most of the last micro-batches were computed without a recording."""
        self._recent = [self._recent[0] + 1, self._recent[1] + is_plain]
        total, plain = self._recent
        if total < WINDOW:
            return
        self._recent = [0, 0]
        if plain > total // 2 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{KEY}: {plain} of {total} micro-batches were computed without a recording, because their shapes, "
                "other contents of the batch, tensors in attributes, or what is trained were new; pad or pack them to "
                "one length, leave out of the batch what changes, or leave the key out",
                stacklevel=1,
            )

    def _compute(self, task: Task) -> Tensor:
        """Computes a micro-batch without a recording."""
        self.num_plain += 1
        batch, recipe = task.batch, task.recipe
        with self.surroundings.enter(recipe, batch, task.scale, *task.place):
            loss = task.measures.loss(self.engine.module(**model_inputs(recipe, batch)), batch, task.place[1])
        loss.backward(task.scale)
        return loss.detach().float()

    def _compute_and_compare(self, kind: Kind, task: Task) -> Tensor:
        """Computes a micro-batch twice: without a recording, for comparison, and by one, which may have to be made."""
        recording, expected, attributes = self.recordings.get(kind), None, list[Attribute]()
        try:
            expected = self._expect(task)
            if recording is None:
                kind = self._kind_of(task)  # the first forward may have registered buffers
                attributes = self._find_attributes(task.recipe)  # or made tables
                recording = self._record(task, [(p, self._gradients[p]) for p in expected.norms])
                recording.num_uses = 1
        except torch.OutOfMemoryError:
            if not self.recordings:
                raise
        if recording is None or expected is None:  # the exception is gone, and with it what it held
            return self._go_without(kind, recording, task)
        if self._kind_of(task) != kind:
            raise UserError(
                f"{KEY}: the forward puts other tensors in the place of parameters, buffers or attributes, which uses "
                "of a recording would not see; change them in place (copy_), or leave the key out"
            )
        if kind not in self.recordings:
            self._watch_attributes(attributes)
            kind, recording.kept = self._kind_of(task), self._attribute_tensors()
        loss = self._replay(recording, task)
        _compare(recording, expected)
        self.recordings[kind] = recording
        return loss

    def _go_without(self, kind: Kind, recording: Recording | None, task: Task) -> Tensor:
        """Computes a micro-batch once, because there is no memory to compute it twice."""
        self._drop_gradients()
        warnings.warn(
            f"{KEY}: there is no memory to "
            + ("record more kinds of micro-batches" if recording is None else "compare recordings with the model"),
            stacklevel=1,
        )
        if recording is None:
            self._too_large.add(kind)
            return self._compute(task)
        self._compares = False
        return self._replay(recording, task)

    def _expect(self, task: Task) -> Expected:
        """Returns what a micro-batch gives without a recording. Leaves gradients and buffers as they were."""
        batch = map_tensors(_copied, task.batch)  # a recipe may write into it
        attributes = self._find_attributes(task.recipe)
        unseen = [*self._parameters(), *(tensor for _, _, tensors in attributes for tensor in tensors)]
        before = self._fingerprints(unseen)
        with module_state_kept([self.engine.module]):
            with self.surroundings.enter(task.recipe, batch, task.scale, *task.place):
                output = self.engine.module(**model_inputs(task.recipe, batch))
                loss, _ = task.measures.split_loss(output, batch)
            del output  # the logits, which a backward that is not recorded does not keep
            loss.backward(task.scale)
        if not torch.equal(before, self._fingerprints(unseen)):
            raise UserError(
                f"{KEY}: the forward changes parameters or attributes of modules in place, so it cannot be computed "
                "again for comparison; keep what changes in buffers, or leave the key out"
            )
        gradients = {p: p.grad for p in self._parameters() if p.grad is not None}
        norms = _norms_of([*gradients.values()])
        for parameter, gradient in gradients.items():
            self._gradients.setdefault(parameter, gradient)
        self._drop_gradients()
        return Expected(loss.detach().float(), dict(zip(gradients, norms, strict=True)))

    def _find_attributes(self, recipe: Objective) -> list[Attribute]:
        """Returns the tensors on the device that modules and a recipe keep besides parameters and buffers."""
        device = self.surroundings.device.type
        return [
            (vars(owner), name, tensors)
            for owner in (*self._modules, recipe)
            for name, value in getattr(owner, "__dict__", {}).items()
            if name not in ("_parameters", "_buffers") and (tensors := _kept_in(value, device))
        ]

    def _watch_attributes(self, found: Sequence[Attribute]) -> None:
        """Makes recordings depend on what was found before a forward and is still there after it.

        What every forward leaves behind in an attribute is no input of the next.
        """
        device, known = self.surroundings.device.type, {(id(values), name) for values, name in self._attributes}
        added = [
            (values, name)
            for values, name, tensors in found
            if (id(values), name) not in known and [*map(id, tensors)] == [*map(id, _kept_in(values.get(name), device))]
        ]
        if added:
            self._attributes += added
            self.recordings.clear()  # earlier ones did not depend on them

    def _fingerprints(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns numbers that are others after a change, also after one that autograd does not count."""
        return torch.stack([fingerprint(tensor.detach()).to(self.surroundings.device) for tensor in tensors])

    def _drop_gradients(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None

    def _record(self, task: Task, gradients: list[tuple[nn.Parameter, Tensor]]) -> Recording:
        """Returns a recording of a micro-batch."""
        batch, scale = map_tensors(_copied, task.batch), task.scale.detach().to(self.surroundings.device, copy=True)
        inputs, recipe, made = tensors_of(batch), task.recipe, dict[str, Any]()
        _place(gradients)
        # Other seeds than where it is compared, so that random numbers that got into the recording are found there.
        self.surroundings.seed(*RECORDING)

        def forward_backward() -> None:
            with self.surroundings.enter(recipe, batch, scale):
                output = self.engine.module(**model_inputs(recipe, batch))
                loss, beside = task.measures.split_loss(output, batch)
            made["output"] = map_tensors(Tensor.detach, output) if task.measures.has_metrics else None
            made["beside"] = map_tensors(Tensor.detach, dict(beside)) if beside else None
            del output, beside
            loss.backward(scale)
            made["loss"] = loss.detach().float()

        shared = next((recording.graph for recording in self.recordings.values()), None)
        graph = self._new_graph(shared)
        graph.record(forward_backward)
        check_host_generators(self.surroundings)
        if [*map(id, inputs)] != [*map(id, tensors_of(batch))]:
            raise UserError(
                f"{KEY}: the recipe puts tensors into the batch, which uses of a recording would not see; "
                "do that in prepare_batch, or leave the key out"
            )
        known = {parameter for parameter, _ in gradients}
        if any(p.grad is not None and p not in known for p in self._parameters()):
            raise UserError(
                f"{KEY}: parameters get a gradient in some calls of the model and not in others; leave the key out"
            )
        self._drop_gradients()
        return Recording(graph, batch, inputs, scale, recipe, gradients, **made)

    def _replay(self, recording: Recording, task: Task) -> Tensor:
        """Computes a micro-batch by a recording."""
        self.num_recorded += 1
        _place(recording.gradients)
        with torch.no_grad():  # a forward may have asked for gradients of the batch
            for own, tensor in zip(recording.inputs, tensors_of(task.batch), strict=True):
                own.copy_(tensor)
            recording.scale.copy_(task.scale)
        self.surroundings.seed(*task.place)
        recording.graph.replay()
        # Copies, because metrics may keep what they are given, and the next use writes over it.
        output, batch = recording.output, task.batch
        if task.measures.has_metrics:
            output, batch = map_tensors(_copied, output), map_tensors(_copied, recording.batch)
        task.measures.measure(output, batch, recording.beside, task.place[1])
        return recording.loss.clone()


def _kept_in(value: Any, device: str, depth: int = 2) -> list[Tensor]:
    """Returns the tensors on a device that a value is, or holds in short lists, tuples and dicts."""
    if type(value) is Tensor:
        return [value] if value.layout == torch.strided and value.device.type == device else []
    if isinstance(value, dict):
        value = (*value.values(),)
    if not isinstance(value, list | tuple) or not 0 < len(value) <= LONGEST or not depth:
        return []
    return [tensor for entry in value for tensor in _kept_in(entry, device, depth - 1)]


def _place(gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Gives parameters the tensors that recordings add to; 0 where there was no gradient."""
    if missing := [gradient for parameter, gradient in gradients if parameter.grad is None]:
        foreach_zero_(missing)
    for parameter, gradient in gradients:
        if parameter.grad is not None and parameter.grad is not gradient:
            gradient.copy_(parameter.grad)
        parameter.grad = gradient


def _norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns the norm of each gradient, in at least float32."""
    return [
        torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)).float()
        for gradient in gradients
    ]


def _compare(recording: Recording, expected: Expected) -> None:
    """Compares the last use of a recording, which no other micro-batch added to; the host waits for it."""
    found = torch.stack(_norms_of([gradient for _, gradient in recording.gradients]))
    norms = torch.stack([expected.norms.get(p, torch.zeros_like(found[0])) for p, _ in recording.gradients])
    finite = norms.isfinite()
    # Some gradients are nothing but rounding, as that of a bias before a norm.
    near = (found - norms).abs() <= 1e-3 * norms + 1e-4 * norms.where(finite, 0).norm()
    near = near.where(finite, ~found.isfinite())  # an overflow in fp16 may be infinite or NaN
    ends = expected.loss.isfinite() | recording.loss.isfinite()
    if near.all() and (not ends or torch.allclose(recording.loss, expected.loss, rtol=1e-3)):
        return
    raise UserError(
        f"{KEY}: a recording computes otherwise than the model does (loss {recording.loss.item():g} and not "
        f"{expected.loss.item():g}, or other gradients): something that Python computes in the forward, the inputs or "
        "the loss changes between steps, such as an attribute; make it a tensor of the batch, or leave the key out"
    )


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
