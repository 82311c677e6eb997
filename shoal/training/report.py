"""The report at step 1: what is in force, and where each setting came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import shoal
from shoal.config.batch import accumulation
from shoal.config.importable import NOT_IMPORTABLE
from shoal.config.imports import takes
from shoal.config.run import DEFAULT, source_of
from shoal.errors import printable
from shoal.lora.adapters import describe_adapters
from shoal.parallel.batch_norm import mixing_modules
from shoal.processes.world import World
from shoal.quantised.layers import describe_layers
from shoal.torch_private import skips_on_device
from shoal.training.first_step import FirstStep
from shoal.training.loaders import EVAL_PREFIX
from shoal.training.not_in_force import settings_not_in_force
from shoal.training.objectives import Turn
from shoal.training.schedules import describe_schedule, schedule_is_by_recipe
from shoal.training.signals import StopFlag
from shoal.transform.kernels import describe_kernels, has_fused_path
from shoal.transform.precision import compute_dtype

if TYPE_CHECKING:
    from shoal.training.loop import Shell


SEPARATOR = f"{'-' * 60}\n"
"""The line between the reports of a run that was interrupted."""
Row = tuple[str, str, tuple[str, ...]]
"""The name of a row, what is in force, and the keys that decide it."""


class Report:
    """Describes a run after its first step, which `first_step` watches."""

    def __init__(self, shell: Shell):
        self.shell, self.engaged, self.device = shell, shell.strategy.engaged, shell.strategy.device
        self.training = shell.config.training
        self.first_step = FirstStep(shell)
        self.loss = ""
        """What a check of the first batch found out about the loss."""
        self.clipping = say_clipping(self.training.max_grad_norm)
        """How gradients are clipped."""
        self.metrics_are_used = ""
        """Where the recipe's metrics are used, if not in training and evaluation."""
        self.unused: list[str] = []
        """The trained parameters that had no gradient in the first step."""

    def write(self, path: Path) -> None:
        """Appends the report to a file, which has those of the runs before that were interrupted."""
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{SEPARATOR if file.tell() else ''}{self}\n")

    def __str__(self) -> str:
        rows = [*self._rows()]
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(f"{name:<{width}}  {printable(what + self._by(keys))}" for name, what, keys in rows)

    def _by(self, keys: tuple[str, ...]) -> str:
        setters = dict.fromkeys(source_of(key, self.shell.run.sources) for key in keys)
        setters.pop(DEFAULT, None)
        return f"  ({', '.join(setters)})" if setters else ""

    def _rows(self) -> Iterator[Row]:
        """Yields what is in force, in the order of the report."""
        yield from self._place()
        yield from self._model()
        yield from self._data()
        yield from self._training()
        yield from self._transforms()
        yield from self._extensions()
        yield from self._saving()
        for what, keys in settings_not_in_force(self.shell):
            yield "not in force", what, keys

    def _place(self) -> Iterator[Row]:
        """Yields where the run is, and how it is spread."""
        shell, strategy, engaged, config = self.shell, self.shell.strategy, self.engaged, self.shell.config
        yield "shoal", f"{shoal.__version__}, torch {torch.__version__}", ()
        yield "run folder", str(shell.output_dir), ("experiment.output_dir", "experiment.name")
        gpu = f" ({torch.cuda.get_device_name(strategy.device)})" if strategy.device.type == "cuda" else ""
        where = f"{engaged.description} on {strategy.device}{gpu}"
        yield "strategy", where, ("distributed.strategy", "training.device")
        if engaged.exchange is not None:
            key = "local_sgd.sync_every" if config.distributed.local_sgd else "compression.method"
            yield "exchange", engaged.exchange.describe(), (f"distributed.{key}",)
        yield "started by", describe_world(strategy.world), ("launch.detect", "launch.procs_per_node", "launch.nodes")
        if variables := config.launch.env:
            shown = ", ".join(f"{name}={value}" for name, value in variables.items())
            yield "environment", shown, self._set_below("launch.env")

    def _model(self) -> Iterator[Row]:
        session = self.shell.session
        trained, frozen = session.parameter_counts
        sizes = f"{trained:,} parameters" + (f", {frozen:,} frozen" if frozen else "")
        kind = type(session.model).__name__.removeprefix("FSDP")  # fully_shard gives the model a class of its own
        yield "model", f"{kind}, {sizes}", ("recipe",)
        if quantised := describe_layers(session.model):
            yield "quantised", quantised, self._set_below("model.load_in", "model.bnb")
        if adapters := describe_adapters(session.meta_model or session.model, trained, trained + frozen):
            yield "adapters", adapters, self._set_below("lora.")
        if session.mode:
            yield "mode", session.mode, ()
        if mixing := mixing_modules(session.model):
            yield "mixes samples", self._mixing(mixing), ("training.sync_batch_norm",)
        if names := session.ungrouped:
            yield "train nothing", f"{_first_of(names)}: in no parameter group, so frozen", ()
        if names := self.unused:
            yield "no gradient", f"{_first_of(names)}: trained, but not used by the loss of this step", ()
        yield self._weights()

    def _data(self) -> Iterator[Row]:
        shell, recipe = self.shell, self.shell.session.recipe
        size = f"{shell.loaders.epoch_size:,} samples an epoch" if shell.loaders.epoch_size else "a stream"
        contents = recipe.data_summary()
        yield "data", f"{size}: {contents}" if contents else size, ("dataset.name", "dataset.train_file")
        if sets := [prefix.removeprefix(EVAL_PREFIX).rstrip("/") for prefix in shell.loaders.evaluation]:
            yield "evaluation", self._evaluation(sets), ("training.eval_steps", "training.eval_epochs")
        if recipe.has_metrics:
            objects = [f"{path} ({type(one).__name__})" for path, one in shell.session.metric_objects.by_path.items()]
            found = f", with the torchmetrics objects {', '.join(objects)}" if objects else ""
            used = f", used {self.metrics_are_used}" if self.metrics_are_used else ""
            yield "metrics", f"{type(recipe).__name__}.metrics{found}{used}", ()

    def _training(self) -> Iterator[Row]:
        """Yields the batch, the steps, and what a step does to the weights."""
        shell, training, engaged, session = self.shell, self.training, self.engaged, self.shell.session
        yield self._batch()
        yield (
            "steps",
            f"{shell.total_steps:,}, from {shell.first_step:,}",
            ("training.max_steps", "training.num_epochs"),
        )
        if training.body:
            yield "body", training.body.removeprefix(NOT_IMPORTABLE), ("training.body",)
        yield self._optimizer()
        if session.turns[0].name:
            yield "objectives", ", then ".join(map(_say_turn, session.turns)), self._set_below("training.objectives")
        precision = training.mixed_precision + (", tf32 matmuls" if training.tf32 else "")
        yield "precision", precision, ("training.mixed_precision", "training.tf32")
        if training.weights_dtype == "bf16":
            states = "weights, gradients and both averages of AdamW in bf16, rounded stochastically"
            yield "states", states, ("training.weights_dtype",)
        if engaged.float8_layers:
            head = engaged.chunked_head  # None in a pipeline, on ranks that have not the last stage
            in_head = training.fp8_head and (head is None or head.is_float8)
            layers = f"{engaged.float8_layers} linear layers" + " and the head" * in_head
            yield "fp8", layers, ("training.mixed_precision", "training.fp8_head")

    def _transforms(self) -> Iterator[Row]:
        """Yields how the model computes: by which kernels, what is recomputed, compiled, recorded."""
        training, engaged = self.training, self.engaged
        if kernels := self._kernels():
            yield "kernels", kernels, ("training.kernels",)
        if names := engaged.checkpointed_modules:
            recomputed = f"{len(names)} module{'s' * (len(names) != 1)}, {training.activation_checkpointing.mode}"
            recomputed += ", inputs in host memory" * (engaged.host_inputs is not None)
            yield "recomputed", recomputed, ("training.activation_checkpointing.mode",)
        chunks = f"in {training.loss_chunks} chunks" if training.loss_chunks > 1 else ""
        if loss := ", ".join(filter(None, (chunks, self.loss))):
            yield "loss", loss, ("training.loss_chunks",)
        if engaged.compiled:
            graphs, breaks, reason = self.first_step.compiled
            said = f"{breaks} breaks, the last because of: {reason}" if breaks else "no breaks"
            said += ", for batches of all sizes" * self.shell.session.recipe.sizes_vary
            modules = f"{len(engaged.compiled.modules)} modules, {graphs} graph{'s' * (graphs != 1)}"
            yield "compile", f"{modules}, {said}", ("training.compile",)
        if engaged.recorded:
            yield "cuda graphs", engaged.recorded.describe(), ("training.cuda_graphs",)
        if self.shell.config.experiment.deterministic:
            yield "deterministic", "yes", ("experiment.deterministic",)

    def _extensions(self) -> Iterator[Row]:
        """Yields callbacks, the recipe's hooks, and its names that are probably misspelt."""
        shell, recipe = self.shell, self.shell.session.recipe
        if callbacks := shell.hooks.describe():
            yield "callbacks", callbacks, ("callbacks",)
        for name, meant in recipe.misspelt_names().items():
            yield "not used", f"{type(recipe).__name__}.{name}: nothing uses it; did you mean {meant}?", ()
        if own_hooks := shell.hooks.describe_recipe():
            yield "recipe's hooks", own_hooks, ()

    def _saving(self) -> Iterator[Row]:
        """Yields what is saved, who watches the run, and from what it started."""
        shell, strategy, checkpoints = self.shell, self.shell.strategy, self.shell.checkpoints
        saving, logging = shell.config.checkpoint, shell.config.logging
        staged_gib = checkpoints.expected_bytes / strategy.world_size / 2**30
        parts = {
            f"{_say_cadence(saving.every, saving.every_epochs)}at the end": True,
            f"the last {saving.keep_last} kept": True,
            f"the best {saving.keep_best} by {saving.metric} ({saving.mode})": saving.keep_best,
            f"every {saving.keep_every}th for good": saving.keep_every,
            f"after {saving.every_minutes or 0:g} minutes": saving.every_minutes,
            f"written in the background from {staged_gib:.2f} GiB of host memory": checkpoints.manager.background,
        }
        kept = ", ".join(part for part, applies in parts.items() if applies)
        yield "checkpoints", kept, ("checkpoint.every", "checkpoint.async_save")
        if references := checkpoints.left_out:
            tensors = {(str(piece.path), piece.key) for one in references.values() for piece in one.pieces}
            files = ", ".join(sorted({path for path, _ in tensors}))
            yield "base", f"{len(tensors)} frozen tensors are not copied, but stay in {files}", ()
        if strategy.world_size > 1:
            factor, every = logging.straggler_factor, logging.every
            named = f"a rank that takes {factor or 0:g} times as long as its peers is named, every {every} steps"
            yield "stragglers", named if factor else "not looked for", ("logging.straggler_factor",)
        if not StopFlag.is_possible():
            yield "signals", "not handled, because the run is not in the main thread; Ctrl-C does not save", ()
        yield "start", checkpoints.progress.started_from, ("checkpoint.resume",)

    def _set_below(self, *starts: str) -> tuple[str, ...]:
        """Returns the keys that somebody has set and that begin with one of these texts."""
        return tuple(key for key in self.shell.run.sources if key.startswith(starts))

    def _kernels(self) -> str:
        """Returns which modules compute by fused kernels, or why none does; an empty text if none could."""
        modules, training, device = dict(self.shell.session.model.named_modules()), self.training, self.device
        if names := [name for name in self.engaged.fused_modules if name in modules]:  # those of this rank's stages
            fused = f"fused in {len(names)} module{'s' * (len(names) != 1)} ({names[0]}{', …' * (len(names) > 1)})"
            own = (modules[name] for name in names)
            how = describe_kernels(own, device, compute_dtype(training.mixed_precision))
            return ", ".join(filter(None, (fused, how)))
        if not any(map(has_fused_path, modules.values())):
            return ""
        if training.kernels == "plain":
            return "plain PyTorch"
        return (
            f"plain PyTorch, because {'fused ones would not be faster' if device.type == 'cuda' else 'there is no GPU'}"
        )

    def _batch(self) -> Row:
        """Returns the row of the global batch: the arithmetic, and a remark on other numbers of processes."""
        checkpoints, data_size = self.shell.checkpoints, self.shell.strategy.data_size
        first, *later = checkpoints.progress.batches.phases
        times = accumulation(first, data_size)
        is_exact = first.global_batch_size == first.batch_size * times * data_size
        return (
            "batch",
            f"{first.global_batch_size} = {'' if is_exact else 'at most '}{first.batch_size} × {times} accumulated "
            f"× {data_size} data-parallel"
            + "".join(f", {phase.global_batch_size} from epoch {phase.first_epoch}" for phase in later)
            + self._batch_advice(first.global_batch_size),
            ("training.global_batch_size", "training.batch_size", "training.gradient_accumulation"),
        )

    def _optimizer(self) -> Row:
        """Returns the row of the optimizer: what it is, its learning rates, schedule, weight decay and clipping."""
        shell, training = self.shell, self.training
        optimizer, groups = shell.session.optimizer, shell.session.optimizer.param_groups
        kind, name = type(optimizer), shell.session.optimizer_name
        fused = "fused" if optimizer.defaults.get("fused") else ""
        waits = "" if skips_on_device(optimizer) else "the host waits each step"
        path = "" if name == f"{kind.__module__}:{kind.__qualname__}" else f"{kind.__module__}.{kind.__qualname__}"
        notes = ", ".join(filter(None, (path, fused, waits)))
        rates, decays = (_distinct(groups, key) for key in ("initial_lr", "weight_decay"))
        by_recipe = schedule_is_by_recipe(shell.session.recipe, shell.total_steps)
        decay = f"weight decay {decays}" if takes(kind, "weight_decay") else "no weight decay"
        schedule = describe_schedule(training, shell.total_steps, by_recipe)
        return (
            "optimizer",
            f"{name} ({notes}), learning rate {rates}, {schedule}, {decay}, {self.clipping}",
            ("training.optimizer.name", "training.learning_rate", "training.lr_scheduler.name"),
        )

    def _evaluation(self, sets: list[str]) -> str:
        """Returns what is evaluated, and when."""
        training = self.training
        said = f"sets {', '.join(sets)}" if sets != [""] else "one set"
        said += f", {_say_cadence(training.eval_steps, training.eval_epochs)}at the end"
        return said + (f", in micro-batches of {training.eval_batch_size}" if training.eval_batch_size else "")

    def _batch_advice(self, global_batch_size: int) -> str:
        """Returns a remark if the number of processes decides the global batch, and so the training."""
        if self.training.global_batch_size is not None or self.shell.strategy.data_size == 1:
            return ""
        return (
            "; another number of processes would train with another batch, unless training.global_batch_size = "
            f"{global_batch_size} is set"
        )

    def _mixing(self, modules: Mapping[str, nn.Module]) -> str:
        """Says which modules mix the samples of a batch, and over which samples they take their statistics."""
        kinds = Counter(type(module).__name__.removeprefix("FSDP") for module in modules.values())
        names = ", ".join([*modules][:3]) + (", …" if len(modules) > 3 else "")
        counted = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
        if self.shell.strategy.data_size == 1:
            whose = "statistics of each micro-batch"
        elif self.training.sync_batch_norm:
            whose = "statistics of the micro-batches of all ranks"
        else:
            whose = "each rank uses its own batch's statistics; training.sync_batch_norm shares them"
        return f"{counted} ({names}); {whose}"

    def _weights(self) -> Row:
        weights = self.shell.session.weights
        origins = {
            "init": "drawn by name",
            "files": f"read from {len(weights.files)} file{'s' * (len(weights.files) != 1)}",
            "built": "as built",
            "empty": "left empty: memory without values, for planning only",
        }
        origin, key = origins[weights.kind], "experiment.seed"
        if source := self.shell.checkpoints.progress.weights_from:
            frozen = f", frozen ones {origin}" if self.shell.checkpoints.progress.is_adapter else ""
            key = "checkpoint.resume" if self.shell.first_step else "checkpoint.init_from"
            origin = f"from {source}{frozen}"
        held = "this process held the whole model once" if weights.kind == "built" else ""
        return "weights", "; ".join(filter(None, (origin, held, weights.reason))), (key,)


def describe_world(world: World) -> str:
    """Returns what started the processes, and how many there are."""
    if world.size == 1:
        return world.environment
    machines = world.size // world.local_size
    return f"{world.environment}, {world.size} processes on {machines} machine{'s' * (machines != 1)}"


def _first_of(names: Sequence[str]) -> str:
    """Returns the first names of many, and how many there are."""
    return f"{', '.join(names[:3])}{', …' * (len(names) > 3)} ({len(names)} in all)"


def _distinct(groups: list[dict[str, Any]], key: str) -> str:
    """Returns the different values of a key in the parameter groups, in their order."""
    values = dict.fromkeys(group[key] for group in groups if key in group and group["params"])
    return " and ".join(f"{value:g}" for value in values)


def _say_cadence(steps: int | None, epochs: int | None) -> str:
    """Returns when something happens besides the end of the run, such as `every 100 steps and `."""
    parts = [f"every {steps} steps"] if steps else []
    parts += [f"after every {f'{epochs} epochs' if epochs > 1 else 'epoch'}"] if epochs else []
    return f"{', '.join(parts)} and " if parts else "only "


def say_clipping(max_norm: float | None, max_value: float | None = None) -> str:
    """Returns how gradients are clipped: all of it by its norm, or each element by its size."""
    norm = f"clipped to {max_norm:g}" if max_norm else ""
    size = f"each element clipped to {max_value:g}" if max_value else ""
    return ", ".join(filter(None, (norm, size))) or "not clipped"


def _say_turn(turn: Turn) -> str:
    """Returns an objective with what it trains, and how."""
    rates, clip = _distinct(turn.optimizer.param_groups, "initial_lr"), say_clipping(turn.max_norm)
    return f"{turn.name} ({len(turn.parameters or ())} tensors, learning rate {rates}, {clip})"
