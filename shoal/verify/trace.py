"""What one layout computes in a few steps, and what it costs each rank. Runs inside the layout's processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.callbacks.run_handle import RunHandle
from shoal.config import Run, derive_batches
from shoal.config.mesh import coordinates
from shoal.config.schema_optimizers import SGD, AdamW
from shoal.data import BatchSchedule, Loader
from shoal.lora.adapters import multiplies_weights
from shoal.observe.flops import flop_counter
from shoal.observe.quiet import quiet_imports
from shoal.parallel.batch_norm import mixing_modules
from shoal.parallel.compression.exchange import CompressedExchange
from shoal.processes.board import once_per_node
from shoal.processes.desync import Desync, check_samples
from shoal.quantised import quantised_layers
from shoal.strategies import Loop, from_config
from shoal.tensors import local_part
from shoal.torch_private import BATCH_NORM, TorchDispatchMode, compile_counts
from shoal.training.evaluation import Evaluation
from shoal.training.hooks import Hooks
from shoal.training.metric_sums import means, sum_over_ranks, to_host
from shoal.training.modes import evaluation_mode
from shoal.training.objectives import Turn, combine, evaluate_turns
from shoal.training.optimizers import set_learning_rate
from shoal.training.session import assemble
from shoal.types import MicroBatch, StepInfo, StepOutput, TrainState, is_defined
from shoal.verify.body import GradientsOfBody
from shoal.verify.draws import WatchDraws, seed_at_forward, seeds_at_forward, turn_off_dropout
from shoal.verify.float64 import recipe_in_float64
from shoal.verify.updates import Updates, update_alone, whole

AVERAGES = ("ema", "swa")
"""The built-in callbacks whose tensors every layout must have alike."""
UPDATE_LEARNING_RATE = 0.01
"""For the update alone: large enough that weight decay is far above the precision of the weights."""
SGD_TRAINING = {"optimizer": SGD(momentum=0.9), "learning_rate": 0.1, "weight_decay": 0.0, "objectives": {}}


@dataclass(frozen=True)
class Shared:
    """What one device computed and every layout is given, so that later checks begin with equal numbers."""

    max_norm: float
    """Half of the first gradient norm of one device, so that clipping is in force at least in the first step."""
    weights: dict[str, Tensor]
    """For the later gradients."""
    gradients: dict[str, Tensor]
    later_gradients: dict[str, Tensor]
    """Both kinds, for the update alone."""


@dataclass(frozen=True)
class CompiledWork:
    """What torch.compile did on one rank."""

    eager_calls: int = 0
    """How many calls of blocks ran uncompiled."""
    graphs: int = 0
    breaks: int = 0
    """At how many places a graph had to end and what follows ran uncompiled."""


@dataclass
class Trace:
    """One rank's account. Tensors are whole, on the CPU, under the names of the plain model."""

    losses: list[float] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """The recipe's metrics: of each step and of the evaluation, those of torchmetrics objects over all steps."""
    grad_norms: list[float] = field(default_factory=list)
    max_norm: float = 0.0
    """What gradients were clipped to."""
    start: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the first step."""
    later_gradients: dict[str, Tensor] = field(default_factory=dict)
    """From the reference's weights after the last step, on the batch after it."""
    sgd_weights: dict[str, Tensor] = field(default_factory=dict)
    """With buffers, as a checkpoint would have them."""
    hook_tensors: dict[str, Tensor] = field(default_factory=dict)
    """What callbacks and the recipe's hooks keep after the steps with SGD, such as an average of the weights."""
    evaluation: list[float] = field(default_factory=list)
    """The loss of an evaluation after the last step with SGD, on the batch after it."""
    adamw_weights: dict[str, Tensor] = field(default_factory=dict)
    updates: dict[str, Updates] = field(default_factory=dict)
    """Updates alone, with the gradients of one device, by the name of the optimizer; that of AdamW is empty."""
    rounded_updates: Updates | None = None
    """The same of AdamW with weights in bf16, if the config asks for them."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of all parameters, frozen ones too."""
    itemsizes: dict[str, int] = field(default_factory=dict)
    """The bytes of an element of each."""
    multiplies_weights: bool = False
    """True if adapters multiply matrices with each other; their FLOPs do not follow from the batch."""
    packed: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """The bytes and the number of weights of each quantised layer, and the bits that a weight should have, by name."""
    parameter_bytes: int = 0
    state_bytes: int = 0
    """What the optimizer keeps on this rank: momentum."""
    flops: int = 0
    """The FLOPs of the matrix products in one step."""
    compiled: CompiledWork | None = None
    """What was compiled in the steps whose operations are not counted; None if nothing is to be compiled."""
    collective_bytes: dict[str, int] = field(default_factory=dict)
    """What one step exchanges, by kind of collective."""
    exchange_errors: list[float] = field(default_factory=list)
    """With compression or local_sgd: how far each exchange with SGD was from what it should be."""
    wire_bytes: tuple[int, int, int] = (0, 0, 0)
    """With compression: what this rank sent in the last exchange, what was promised, and what ddp sends."""
    reuses_seeds: bool = False
    """True if the model was called with one seed for several micro-batches, in one step or in several."""
    desync: str = ""
    rng: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """What decides which random numbers this rank draws in a step (its slice of the batch, its stage, its tokens), and
    the seeds of its generators after the first step."""
    frozen_statistics: list[str] = field(default_factory=list)
    """Batch norms that use their running statistics for the proof, as in an evaluation."""
    mixing: list[str] = field(default_factory=list)
    """Modules whose output for a sample depends on the others in its micro-batch."""
    draws: list[str] = field(default_factory=list)
    """What draws random numbers in the forward, if that changes the loss. Looked for on one device alone."""

    def shared(self) -> Shared:
        """Returns what every layout is given, if this is the trace of one device."""
        return Shared(self.max_norm, self.sgd_weights, self.gradients, self.later_gradients)


def trace(run: Run, steps: int, shared: Shared | None = None, adamw: bool = True, in_float64: bool = False) -> Trace:
    """Trains `steps` steps with SGD and again with AdamW, if `adamw` is true, dropout off, and notes what happens.

    `shared` comes from the trace of one device; it is None if this is that trace. With `in_float64`, parameters,
    buffers and batches are cast to float64. A config with weights in bf16 is traced with weights in fp32, because their
    rounding would hide mistakes; then its update is noted by itself.
    """
    quiet_imports()  # this process was started with this function
    tracer = _Tracer(with_fp32_weights(run), in_float64)
    with tracer.strategy:
        tracer.train_with_sgd(steps, shared)
        if adamw:
            tracer.train_with_adamw(steps)
            tracer.note_update("", shared)
            tracer.update_with_own_optimizer(shared)
            if run.config.training.weights_dtype == "bf16" and not in_float64:
                tracer.update_in_bf16(run, shared)
    if not tracer.strategy.is_main_process:
        _drop_tensors(tracer.trace)
    return tracer.trace


def _drop_tensors(trace: Trace) -> None:
    """Empties what is compared of the first rank alone, whose tensors are whole, so that it is not sent."""
    for name in ("start", "gradients", "later_gradients", "sgd_weights", "adamw_weights", "hook_tensors"):
        setattr(trace, name, {})
    for updates in (*trace.updates.values(), trace.rounded_updates):
        if updates is not None:
            updates.drop_tensors()


class _Tracer:
    def __init__(self, run: Run, in_float64: bool):
        self.run, self.trace, self._in_float64 = run, Trace(), in_float64
        self.strategy = from_config(run.config)
        self.recipe = recipe_in_float64(run.make_recipe()) if in_float64 else run.make_recipe()
        has_inputs = is_defined(self.recipe.loss) and is_defined(self.recipe.inputs)
        self._has_loss = has_inputs or bool(self.recipe.objectives())
        once_per_node(self.strategy.world, self.recipe.prepare_data)

    def train_with_sgd(self, steps: int, shared: Shared | None) -> None:
        self._prepare(SGD_TRAINING)
        trace = self.trace
        trace.start = whole(self.session.state().model)
        trace.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        trace.itemsizes = {name: p.element_size() for name, p in self.model.named_parameters()}
        trace.multiplies_weights = multiplies_weights(self.model)
        held = self.strategy.held()
        for name, layer in quantised_layers(self.model).items():
            trace.packed[name] = (
                held[f"{name}.weight"].nbytes,
                layer.in_features * layer.out_features,
                layer.scheme.bits,
            )
        trace.parameter_bytes = self.strategy.engaged.parameter_bytes
        trace.mixing = [*mixing_modules(self.model)]
        if self.strategy.engaged.recorded is not None:
            self.strategy.engaged.recorded.is_paused = True  # `train_with_adamw` proves recordings
        hooks = self._hooks(steps)
        hooks.call("on_start")
        exchange = self.strategy.engaged.exchange
        if exchange is not None:
            from shoal.verify.exchange import Watch  # which compares traces

            trace.exchange_errors = Watch(exchange).errors
        with closing(self._loader()) as loader:
            batches, measured, seen, expected = iter(loader), list[Mapping[str, Any]](), set[tuple[int, int]](), 0
            watch = WatchDraws(self.model, self.strategy.device) if shared is None else nullcontext()
            for step, micro_batches in enumerate(islice(batches, steps)):
                hooks.call("before_step")
                if step < 2:  # the first sets things up
                    trace.flops, trace.collective_bytes = 0, {}
                outputs, infos = list[StepOutput](), list[StepInfo]()
                for number, turn in enumerate(self.turns):
                    with watch if step == 0 else nullcontext(), seeds_at_forward(self.model) as seeds:
                        outputs.append(self._forward_backward(turn, micro_batches, step, counting=step < 2))
                    if step == 0:
                        if number == 0:
                            trace.rng = self._rng()
                            trace.max_norm = shared.max_norm if shared else norm(self._gradients()) / 2
                            self._set_learning_rates(1 / max(1.0, trace.max_norm))  # no update longer than 0.1
                        if isinstance(watch, WatchDraws) and watch.draws and self._seed_matters(turn, micro_batches):
                            trace.draws = watch.draws
                        trace.gradients |= self._gradients()
                    seen |= {(number, seed) for seed in seeds}  # turns of one step have the same seeds
                    if self.strategy.layout.mesh["pp"] == 1:  # a pipeline calls stages instead of the model
                        expected += len(micro_batches)
                    self._note_desync(micro_batches, loader)
                    trace.losses.append(outputs[-1].loss.item())
                    hooks.call("before_update")
                    infos.append(self.strategy.step(turn.optimizer, trace.max_norm))
                    trace.grad_norms.append(infos[-1].grad_norm.item())
                output, info = combine(outputs, infos)
                measured.append(output.metrics)
                hooks.run.step, hooks.run.output, hooks.run.info = step + 1, output, info
                hooks.call("after_step")
            if isinstance(exchange, CompressedExchange):
                wire = exchange.wire
                trace.wire_bytes = (wire.bytes_sent, wire.bytes_compressed, wire.bytes_uncompressed)
            trace.hook_tensors = whole(dict(hooks.state().tensors))  # type: ignore[arg-type]
            trace.reuses_seeds = len(seen) < expected
            self._note_metrics(measured)
            trace.sgd_weights = whole(self.session.state().model)
            kept = (value for turn in self.turns for slots in turn.optimizer.state.values() for value in slots.values())
            trace.state_bytes = sum(local_part(value).nbytes for value in kept if isinstance(value, Tensor))
            next_batch = next(batches)
            trace.evaluation = [self._evaluate(next_batch)] if self._has_loss else []
            if shared is not None:
                self.session.load_state(TrainState(shared.weights, {}))
            for turn in self.turns:
                if turn is not self.turns[0]:
                    self.model.zero_grad()
                self._forward_backward(turn, next_batch, steps)
                trace.later_gradients |= self._gradients()

    def train_with_adamw(self, steps: int) -> None:
        training = self.run.config.training
        optimizer = training.optimizer if isinstance(training.optimizer, AdamW) else AdamW()
        self._prepare({"optimizer": optimizer, "weight_decay": training.weight_decay or 0.1, "objectives": {}})
        with closing(self._loader()) as loader:
            for step, micro_batches in enumerate(islice(loader, steps)):
                for turn in self.turns:
                    self._forward_backward(turn, micro_batches, step)
                    self.strategy.step(turn.optimizer, self.trace.max_norm)
        self.trace.adamw_weights = whole(self.session.state().model)

    def update_with_own_optimizer(self, shared: Shared | None) -> None:
        """Checks the update of the run's own optimizer, unless it is AdamW, which was checked before, or rounds its
        state to 8 bits, by other scales in each layout."""
        chosen = self.run.config.training.optimizer
        if not self.recipe.builds_optimizer and (isinstance(chosen, AdamW) or chosen.name.endswith("_8bit")):
            return
        self._prepare({}, by_recipe=True)
        self.note_update(self.session.optimizer_name, shared)

    def update_in_bf16(self, run: Run, shared: Shared | None) -> None:
        """Notes what an update alone does to weights in bf16, as the config has them."""
        self.run, self.strategy = run, from_config(run.config, self.strategy.world)
        self.strategy.setup()
        self._prepare({"weight_decay": run.config.training.weight_decay or 0.1, "objectives": {}})
        self.trace.rounded_updates = self._update_alone(shared)

    def note_update(self, name: str, shared: Shared | None) -> None:
        """Notes what an update alone does to the weights; `name` is that of the optimizer."""
        self.trace.updates[name] = self._update_alone(shared)

    def _update_alone(self, shared: Shared | None) -> Updates:
        shared = shared or self.trace.shared()
        self._set_learning_rates(UPDATE_LEARNING_RATE / self.run.config.training.learning_rate)
        return update_alone(
            self.session,
            self.trace.start,
            (shared.gradients, shared.later_gradients),
            shared.max_norm,
            self._loss_scale,
            self._backward_once,
        )

    def _backward_once(self) -> None:
        with closing(self._loader()) as loader:
            self._forward_backward(self.turns[0], next(iter(loader)), 0)

    def _prepare(self, changes: dict[str, Any], by_recipe: bool = False) -> None:
        config, body = self.run.config, self.run.body
        training = config.training.model_copy(update=changes)
        if body is not None and self.strategy.held():  # a loop takes a strategy without a model
            self.strategy = from_config(config, self.strategy.world)
            self.strategy.setup()
        loop = Loop(self.strategy) if body is not None else None
        self.session = assemble(
            self.recipe,
            self.strategy,
            training,
            config.experiment.seed,
            edit=self._edit,
            by_recipe=by_recipe,
            loop=loop,
        )
        self.model, self.turns = self.session.model, self.session.turns
        self._body = GradientsOfBody(self.session, body) if body is not None else None
        if not training.sync_batch_norm:
            self.trace.frozen_statistics = freeze_batch_statistics(self.model)

    def _edit(self, model: nn.Module) -> None:
        """Changes the model before it is placed."""
        turn_off_dropout(model)
        if self._in_float64:
            model.double()

    def _hooks(self, steps: int) -> Hooks:
        """Returns the hooks of the recipe, and those built-in callbacks that keep something of the weights.

        Callbacks of the user may write files or talk to services, and are left out.
        """
        handle = RunHandle(
            config=self.run.config,
            recipe=self.recipe,
            strategy=self.strategy,
            model=self.model,
            optimizer=self.session.optimizer,
            output_dir=Path(self.run.config.output_dir),
            step=0,
            total_steps=steps,
        )
        averages = tuple(choice for choice in self.run.callbacks if choice.name.partition(".")[0] in AVERAGES)
        return Hooks(self.recipe, averages, handle)

    def _set_learning_rates(self, factor: float) -> None:
        for turn in self.turns:
            set_learning_rate(turn.optimizer, factor)

    def _loader(self) -> Loader:
        batches = BatchSchedule(derive_batches(self.run.config.training, self.strategy.data_size))
        return self.session.loader(self.recipe.train_data(), batches)

    def _forward_backward(
        self, turn: Turn, micro_batches: Sequence[MicroBatch], step: int, counting: bool = False
    ) -> StepOutput:
        compute = partial(
            self.strategy.forward_backward, self.model, micro_batches, turn.objective, step, turn.parameters
        )
        if self._body is not None:
            compute = partial(self._body.forward_backward, micro_batches, step)
        if not counting:
            return self._computed_compiled(compute)
        # torch (2.13) would never compile a function again that it was asked to compile where operations are counted.
        with torch.compiler.set_stance("force_eager"), CountCollectives() as collectives, flop_counter() as flops:
            output = compute()
        self.trace.flops += flops.get_total_flops()
        self.trace.collective_bytes = dict(collectives.bytes + Counter(self.trace.collective_bytes))
        return output

    def _computed_compiled(self, compute: Callable[[], StepOutput]) -> StepOutput:
        """Computes a step, and notes whether all blocks that should be compiled are."""
        if not self.strategy.layout.compile:
            return compute()
        compiled, work = self.strategy.engaged.compiled, self.trace.compiled or CompiledWork()
        eager_calls, counts = compiled.eager_calls if compiled else 0, compile_counts()
        output = compute()
        now = compile_counts()
        self.trace.compiled = CompiledWork(
            work.eager_calls + (compiled.eager_calls - eager_calls if compiled else 0),
            work.graphs + now.graphs - counts.graphs,
            work.breaks + now.breaks - counts.breaks,
        )
        return output

    def _note_metrics(self, steps: Sequence[Mapping[str, Any]]) -> None:
        objects = self.session.metric_objects
        sums, paths, _ = sum_over_ranks(self.strategy, to_host(steps), objects.paths_of(steps))
        for step in sums:
            for name, value in means(step).items():
                self.trace.metrics.setdefault(f"train/{name}", []).append(value)
        self.trace.metrics |= {f"train/{name}": [value] for name, value in objects.compute(paths).items()}

    def _seed_matters(self, turn: Turn, micro_batches: Sequence[MicroBatch]) -> bool:
        """Returns whether the loss depends on random numbers; some models draw them and do not use them."""
        if not self._has_loss:
            return True
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        losses = set()
        for seed in (1, 2):
            hook = seed_at_forward(self.model, seed, self.strategy.device)
            with self.session.metric_objects.set_aside():
                losses.add(self.strategy.evaluate(self.model, micro_batches, turn.objective).total.item())
            hook.remove()
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])
        return len(losses) > 1

    def _evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Returns the loss of an evaluation as a run makes it, and notes its metrics."""
        with evaluation_mode(self.model), self.session.metric_objects.set_aside():
            self.strategy.sync_buffers(self.model)
            evaluation = Evaluation(self.session)
            evaluation.add(evaluate_turns(self.strategy, self.model, micro_batches, self.turns))
            values = evaluation.values()
        loss = values.pop("loss")
        self.trace.metrics |= {f"eval/{name}": [value] for name, value in values.items()}
        return loss

    def _rng(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        strategy, device = self.strategy, self.strategy.device
        place = coordinates(strategy.world.rank, strategy.layout.mesh)
        seeds = [torch.default_generator.initial_seed()]
        if device.type != "cpu":
            seeds.append(torch.get_device_module(device).initial_seed())
        return (strategy.data_rank, place["pp"], place["cp"]), tuple(seeds)

    def _gradients(self) -> dict[str, Tensor]:
        scale = self._loss_scale()
        return {name: gradient / scale for name, gradient in whole(self.strategy.gradients(self.model)).items()}

    def _loss_scale(self) -> float:
        """Returns the factor that gradients carry under fp16."""
        is_scaled = self.strategy.layout.precision == "fp16"
        return self.session.state().strategy["loss_scale"].item() if is_scaled else 1.0

    def _note_desync(self, micro_batches: Sequence[MicroBatch], loader: Loader) -> None:
        if self.strategy.data_size == 1 or self.trace.desync:
            return
        try:
            check_samples(micro_batches if self.strategy.is_data_leader else (), loader.last_step())
            self.strategy.check_sync({name: p.grad for name, p in self.model.named_parameters() if p.grad is not None})
        except Desync as desync:
            self.trace.desync = str(desync)


def with_fp32_weights(run: Run) -> Run:
    """Returns the run with weights and optimizer state in fp32."""
    training = run.config.training.model_copy(update={"weights_dtype": "fp32"})
    return replace(run, config=run.config.model_copy(update={"training": training}))


def freeze_batch_statistics(model: nn.Module) -> list[str]:
    """Lets batch norms that train use their running statistics, and returns their names.

    With the statistics of a micro-batch no two layouts compute the same, because their micro-batches differ.
    """
    names = []
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORM) and module.training and module.running_mean is not None:
            module.eval()
            names.append(name)
    return names


def norm(named: dict[str, Tensor]) -> float:
    """Returns the norm of all elements of these tensors."""
    return float(torch.stack([tensor.double().norm() for tensor in named.values()]).norm()) if named else 0.0


class CountCollectives(TorchDispatchMode):
    """Adds up the bytes that each kind of collective is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.bytes[func.__name__.split(".")[0].rstrip("_")] += max(map(_nbytes, args), default=0)  # whole and part
        return func(*args, **(kwargs or {}))


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0
