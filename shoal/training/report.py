"""The report at step 1: what is in force, where each setting came from, and a check that it really engaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

import shoal
from shoal.config.batch import accumulation
from shoal.config.importable import NOT_IMPORTABLE
from shoal.config.imports import takes
from shoal.config.run import DEFAULT, source_of
from shoal.errors import UserError, printable
from shoal.lora.adapters import describe_adapters
from shoal.parallel.batch_norm import mixing_modules
from shoal.processes.world import World
from shoal.quantised.layers import describe_layers
from shoal.torch_private import CompileCounts, compile_counts, skips_on_device
from shoal.training.bitsandbytes_optimizers import has_unpaged
from shoal.training.loaders import EVAL_PREFIX
from shoal.training.objectives import Turn
from shoal.training.optimizers import is_by_recipe
from shoal.training.schedules import describe_schedule, schedule_is_by_recipe
from shoal.training.signals import StopFlag
from shoal.transform.activation_checkpointing import num_recomputed
from shoal.transform.compile import CompiledModules
from shoal.transform.kernels import describe_kernels, has_fused_path
from shoal.transform.precision import HalfWitness, compute_dtype

if TYPE_CHECKING:
    from shoal.training.loop import Shell


SEPARATOR = f"{'-' * 60}\n"
"""The line between the reports of a run that was interrupted."""
SECTIONS = {
    "ddp": ("ddp",),
    "fsdp": ("fsdp", "mesh"),
    "mesh": ("fsdp", "mesh"),
    "tensor": ("mesh",),
    "pipeline": ("mesh",),
    "deepspeed": ("deepspeed",),
    "zero_stage": ("deepspeed",),
    "offload": ("deepspeed",),
}
"""Sections and keys of `distributed`, and the strategies that use them."""


class Report:
    """Watches the first step, and describes the run afterwards."""

    def __init__(self, shell: Shell):
        self.shell, self.engaged = shell, shell.strategy.engaged
        self.training = shell.config.training
        self.loss = ""
        """What a check of the first batch found out about the loss."""
        self.clipping = say_clipping(self.training.max_grad_norm)
        """How gradients are clipped."""
        self.metrics_are_used = ""
        """Where the recipe's metrics are used, if not in training and evaluation."""
        self.unused: list[str] = []
        """The trained parameters that had no gradient in the first step."""
        self._witness = HalfWitness(self.training.mixed_precision)
        self._recomputed_before = num_recomputed()
        self._compiled_before = self._compiled = compile_counts() if self.training.compile else CompileCounts(0, 0, "")

    def watch(self) -> AbstractContextManager[None]:
        if self.training.mixed_precision != "fp32" and not self.training.compile:  # it cannot look into compiled code
            return self._witness
        return nullcontext()

    def check(self) -> None:
        """Stops the run if something that was asked for had no effect."""
        if self.engaged.compiled:
            self._check_compiled(self.engaged.compiled)
        nothing_recomputed = num_recomputed() == self._recomputed_before
        # What is recomputed inside of a graph is not counted.
        if self.engaged.checkpointed_modules and not self.training.compile and nothing_recomputed:
            raise UserError(
                f"training.activation_checkpointing = {self.training.activation_checkpointing.mode}, but nothing was "
                "computed again in the first step's backward; set it to none or look for what keeps the model's blocks "
                "from being called"
            )
        if self.engaged.host_inputs is not None and not self.engaged.host_inputs.num_kept:
            raise UserError(
                "training.activation_checkpointing.offload = true, but no recomputed block has a positional input that "
                "could be moved; leave it out"
            )
        name, session = self.shell.session.optimizer_name, self.shell.session
        if name.startswith("paged_") and self.shell.strategy.device.type == "cuda" and has_unpaged(session.optimizer):
            raise UserError(
                f"training.optimizer = {name}, but bitsandbytes keeps its state in plain memory of the GPU; use "
                f"{name.removeprefix('paged_')}, or adamw"
            )
        if self.training.weights_dtype == "bf16" and (wrong := _not_bf16(session.model, session.optimizer)):
            raise UserError(
                f"training.weights_dtype = bf16, but {wrong} is not bf16 after the first step; look for code in the "
                "model that casts it, or use weights_dtype: fp32"
            )
        head = self.engaged.chunked_head
        if head is not None and not head.num_scored and not self.training.body:  # a body computes its loss itself
            raise UserError(
                f"{head.cause}, but the model never called the plan's head in the first step; {head.advice}, or mend "
                "the recipe's parallel_plan"
            )
        if self.engaged.exchange is not None:
            self.engaged.exchange.check()
        if self.engaged.recorded is not None and not self.engaged.recorded.recordings:
            raise UserError(
                "training.cuda_graphs = true, but nothing was recorded in the first step; leave it out, or look for "
                "gradients that are there before it"
            )
        precision = self.training.mixed_precision
        if precision != "fp32" and not self.training.compile and not self._witness.seen:
            cause = "put `with run.autocast():` around the forward and the loss" if self.training.body else ""
            raise UserError(
                f"training.mixed_precision = {precision}, but nothing in the first step was computed in {precision}; "
                f"use fp32, or {cause or 'look for code in the model that turns autocast off'}"
            )

    def _check_compiled(self, compiled: CompiledModules) -> None:
        before, now = self._compiled_before, compile_counts()
        of_update = getattr(self.shell.session.optimizer, "num_graphs", 0)
        self._compiled = CompileCounts(now.graphs - before.graphs - of_update, now.breaks - before.breaks, now.reason)
        if not self._compiled.graphs or compiled.eager_calls:
            why = f": {now.reason}" if self._compiled.breaks else ""
            recomputed = " Recomputed modules are compiled as a whole or not at all." if compiled.eager_calls else ""
            raise UserError(
                f"training.compile = true, but in the first step the model's blocks ran without being compiled{why}; "
                "TORCH_LOGS=graph_breaks,recompiles shows where; change the model, or set training.compile = "
                f"false.{recomputed}"
            )

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

    def _rows(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Yields the name of each row, what is in force, and the keys that decide it."""
        shell, training, config = self.shell, self.training, self.shell.config
        session, strategy, engaged, checkpoints = shell.session, shell.strategy, self.engaged, shell.checkpoints
        sources, saving = shell.run.sources, config.checkpoint
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
            yield "environment", shown, tuple(key for key in sources if key.startswith("launch.env"))
        trained, frozen = session.parameter_counts
        sizes = f"{trained:,} parameters" + (f", {frozen:,} frozen" if frozen else "")
        kind = type(session.model).__name__.removeprefix("FSDP")  # fully_shard gives the model a class of its own
        yield "model", f"{kind}, {sizes}", ("recipe",)
        if quantised := describe_layers(session.model):
            yield (
                "quantised",
                quantised,
                tuple(key for key in sources if key.startswith(("model.load_in", "model.bnb"))),
            )
        if adapters := describe_adapters(session.meta_model or session.model, trained, trained + frozen):
            yield "adapters", adapters, tuple(key for key in sources if key.startswith("lora."))
        if session.mode:
            yield "mode", session.mode, ()
        if mixing := mixing_modules(session.model):
            yield "mixes samples", self._mixing(mixing), ("training.sync_batch_norm",)
        if names := session.ungrouped:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            yield "train nothing", f"{shown} ({len(names)} in all): in no parameter group, so frozen", ()
        if names := self.unused:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            yield "no gradient", f"{shown} ({len(names)} in all): trained, but not used by the loss of this step", ()
        yield self._weights()
        size = f"{shell.loaders.epoch_size:,} samples an epoch" if shell.loaders.epoch_size else "a stream"
        contents = session.recipe.data_summary()
        yield "data", f"{size}: {contents}" if contents else size, ("dataset.name", "dataset.train_file")
        if sets := [prefix.removeprefix(EVAL_PREFIX).rstrip("/") for prefix in shell.loaders.evaluation]:
            yield "evaluation", self._evaluation(sets), ("training.eval_steps", "training.eval_epochs")
        if session.recipe.has_metrics:
            objects = [f"{path} ({type(one).__name__})" for path, one in session.metric_objects.by_path.items()]
            found = f", with the torchmetrics objects {', '.join(objects)}" if objects else ""
            used = f", used {self.metrics_are_used}" if self.metrics_are_used else ""
            yield "metrics", f"{type(session.recipe).__name__}.metrics{found}{used}", ()
        first, *later = checkpoints.progress.batches.phases
        times = accumulation(first, strategy.data_size)
        is_exact = first.global_batch_size == first.batch_size * times * strategy.data_size
        yield (
            "batch",
            f"{first.global_batch_size} = {'' if is_exact else 'at most '}{first.batch_size} × {times} accumulated "
            f"× {strategy.data_size} data-parallel"
            + "".join(f", {phase.global_batch_size} from epoch {phase.first_epoch}" for phase in later)
            + self._batch_advice(first.global_batch_size),
            ("training.global_batch_size", "training.batch_size", "training.gradient_accumulation"),
        )
        yield (
            "steps",
            f"{shell.total_steps:,}, from {shell.first_step:,}",
            ("training.max_steps", "training.num_epochs"),
        )
        if training.body:
            yield "body", training.body.removeprefix(NOT_IMPORTABLE), ("training.body",)
        yield self._optimizer()
        if session.turns[0].name:
            in_turn = ", then ".join(map(_say_turn, session.turns))
            yield "objectives", in_turn, tuple(key for key in sources if key.startswith("training.objectives"))
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
        modules = dict(session.model.named_modules())
        if names := [name for name in engaged.fused_modules if name in modules]:  # those of this rank's stages
            fused = f"fused in {len(names)} module{'s' * (len(names) != 1)} ({names[0]}{', …' * (len(names) > 1)})"
            own, dtype = (modules[name] for name in names), compute_dtype(training.mixed_precision)
            how = describe_kernels(own, strategy.device, dtype)
            yield "kernels", ", ".join(filter(None, (fused, how))), ("training.kernels",)
        elif any(map(has_fused_path, session.model.modules())):
            yield "kernels", self._why_plain(), ("training.kernels",)
        if names := engaged.checkpointed_modules:
            recomputed = f"{len(names)} module{'s' * (len(names) != 1)}, {training.activation_checkpointing.mode}"
            recomputed += ", inputs in host memory" * (engaged.host_inputs is not None)
            yield "recomputed", recomputed, ("training.activation_checkpointing.mode",)
        chunks = f"in {training.loss_chunks} chunks" if training.loss_chunks > 1 else ""
        if loss := ", ".join(filter(None, (chunks, self.loss))):
            yield "loss", loss, ("training.loss_chunks",)
        if engaged.compiled:
            graphs, breaks, reason = self._compiled
            said = f"{breaks} breaks, the last because of: {reason}" if breaks else "no breaks"
            said += ", for batches of all sizes" * session.recipe.sizes_vary
            yield (
                "compile",
                f"{len(engaged.compiled.modules)} modules, {graphs} graph{'s' * (graphs != 1)}, {said}",
                ("training.compile",),
            )
        if engaged.recorded:
            yield "cuda graphs", engaged.recorded.describe(), ("training.cuda_graphs",)
        if config.experiment.deterministic:
            yield "deterministic", "yes", ("experiment.deterministic",)
        if callbacks := shell.hooks.describe():
            yield "callbacks", callbacks, ("callbacks",)
        for name, meant in session.recipe.misspelt_names().items():
            yield "not used", f"{type(session.recipe).__name__}.{name}: nothing uses it; did you mean {meant}?", ()
        if own_hooks := shell.hooks.describe_recipe():
            yield "recipe's hooks", own_hooks, ()
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
            factor, every = config.logging.straggler_factor, config.logging.every
            named = f"a rank that takes {factor or 0:g} times as long as its peers is named, every {every} steps"
            yield "stragglers", named if factor else "not looked for", ("logging.straggler_factor",)
        if not StopFlag.is_possible():
            yield "signals", "not handled, because the run is not in the main thread; Ctrl-C does not save", ()
        yield "start", checkpoints.progress.started_from, ("checkpoint.resume",)
        for decisive, value, idle in (
            ("dataset.num_workers", config.dataset.num_workers, ("dataset.persistent_workers", "dataset.prefetch")),
            ("checkpoint.keep_best", saving.keep_best, ("checkpoint.metric", "checkpoint.mode")),
        ):
            keys = tuple(key for key in idle if key in sources)
            if keys and not value:
                yield "not in force", f"{', '.join(keys)}: {decisive} is 0", keys
        for key, why in self._idle_optimizer_keys().items():
            if keys := tuple(source for source in sources if f"{source}.".startswith(f"{key}.")):
                yield "not in force", f"{key}: {why}", keys
        if training.eval_batch_size and not shell.loaders.evaluation:
            why = "the recipe has no evaluation data"
            yield "not in force", f"training.eval_batch_size: {why}", ("training.eval_batch_size",)
        if config.dataset.drop_last and training.max_steps and shell.loaders.epoch_size:
            why = "training.max_steps ends the run, and every step is full"
            yield "not in force", f"dataset.drop_last: {why}", ("dataset.drop_last",)
        if saving.init_from and shell.first_step:
            why = "the run goes on with its own weights"
            yield "not in force", f"checkpoint.init_from: {why}", ("checkpoint.init_from",)
        place = ("launch.master_addr", "launch.master_port", "launch.node_rank")
        if (keys := tuple(key for key in place if key in sources)) and strategy.world.size == strategy.world.local_size:
            yield "not in force", f"{', '.join(keys)}: the run is on one machine", keys
        for remark in shell.run.remarks:
            yield "not in force", str(remark), ()
        for name, why in shell.hooks.idle().items():
            yield "not in force", f"callbacks: {name}: {why}", ("callbacks",)
        for key, why in engaged.not_in_force.items():
            yield "not in force", f"{key}: {why}", (key,)
        for section, users in SECTIONS.items():
            keys = tuple(key for key in sources if f"{key}.".startswith(f"distributed.{section}."))
            if keys and strategy.name not in users:
                yield "not in force", f"distributed.{section}: the strategy is {strategy.name}", keys

    def _why_plain(self) -> str:
        """Returns why no module is fused though some could be."""
        if self.training.kernels == "plain":
            return "plain PyTorch"
        is_gpu = self.shell.strategy.device.type == "cuda"
        return f"plain PyTorch, because {'fused ones would not be faster' if is_gpu else 'there is no GPU'}"

    def _optimizer(self) -> tuple[str, str, tuple[str, ...]]:
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

    def _idle_optimizer_keys(self) -> dict[str, str]:
        """Returns the keys that have no effect because of what the recipe or the optimizer does, with the reasons."""
        shell, name = self.shell, self.shell.session.optimizer_name
        idle: dict[str, str] = {}
        if is_by_recipe(shell.session.optimizer):
            idle["training.optimizer"] = f"the recipe builds {name}"
        if not takes(type(shell.session.optimizer), "weight_decay"):
            idle["training.weight_decay"] = f"{name} takes none"
        if schedule_is_by_recipe(shell.session.recipe, shell.total_steps):
            keys = ("lr_scheduler", "warmup_steps", "warmup_ratio")
            idle |= {f"training.{key}": "the recipe has a schedule" for key in keys}
        if name.startswith("paged_") and shell.strategy.device.type == "cpu":
            idle["training.optimizer"] = f"{name}: its state is not paged, because there is no GPU"
        if name == "rprop":
            idle["training.max_grad_norm"] = "rprop uses the signs of gradients alone"
        return idle

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

    def _weights(self) -> tuple[str, str, tuple[str, ...]]:
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


def _not_bf16(model: nn.Module, optimizer: Optimizer) -> str:
    """Returns the first trained parameter or tensor of the optimizer's state that is not bf16, or an empty text."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.bfloat16:
            return f"the parameter {name}"
    for slots in optimizer.state.values():
        for slot, value in slots.items():
            if slot != "step" and value.dtype != torch.bfloat16:
                return f"the optimizer's {slot}"
    return ""


def _say_turn(turn: Turn) -> str:
    """Returns an objective with what it trains, and how."""
    rates, clip = _distinct(turn.optimizer.param_groups, "initial_lr"), say_clipping(turn.max_norm)
    return f"{turn.name} ({len(turn.parameters or ())} tensors, learning rate {rates}, {clip})"
