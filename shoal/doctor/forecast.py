"""What the model of a config needs of disk and network: sizes without memory, and seconds on a measured network."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.config import Run, derive_batches
from shoal.config.batch import accumulation
from shoal.config.layout import Layout, layout_of
from shoal.config.mesh import data_size, say_mesh
from shoal.doctor.findings import Finding
from shoal.doctor.network import Network
from shoal.parallel.compression.payoff import Comparison, compare_methods
from shoal.parallel.compression.wire import all_reduce_bytes
from shoal.tensors import logical_numel
from shoal.training.optimizers import freeze_ungrouped
from shoal.weights.materialise import build, cast_weights

SLOW_EXCHANGE_SECONDS = 0.5
"""An exchange that takes longer than this in every step is reported."""
_CHECK = "exchange of a step"
_LOCAL_SGD = "a faster network, or distributed.local_sgd (docs/slow_networks.md)"


@dataclass(frozen=True)
class ModelSize:
    """The tensors of a model, as far as disk and network see them."""

    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the trained parameters, and so of the gradients."""
    parameters: int
    """The number of elements of all parameters, frozen ones too."""
    checkpoint_bytes: int
    """About the size of a checkpoint."""

    @property
    def trained(self) -> int:
        """The number of elements of the trained parameters."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)


def size_model(run: Run) -> ModelSize:
    """Builds the recipe's model with its parameters on the meta device, and returns its sizes."""
    recipe = run.make_recipe()
    model, weights = build(recipe.build_model, recipe.weights(), run.config.experiment.seed)
    freeze_ungrouped(model, recipe.param_groups(model))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stored = (
        [*model.parameters(), *model.buffers()] if weights.kind != "files" else trained
    )  # frozen ones stay in files
    itemsize = 4
    if run.config.training.weights_dtype == "bf16":
        itemsize = 2
        cast_weights(model, torch.bfloat16)
    slots = _optimizer_slots(run) * sum(logical_numel(parameter) for parameter in trained)
    return ModelSize(
        tuple(tuple(parameter.shape) for parameter in trained),
        sum(logical_numel(parameter) for parameter in model.parameters()),
        sum(tensor.numel() * tensor.element_size() for tensor in stored) + itemsize * slots,
    )


def _optimizer_slots(run: Run) -> int:
    """Returns how many numbers the optimizer keeps for a parameter; 2, as AdamW, for those that are not known."""
    optimizer = run.config.training.optimizer
    if optimizer.name == "sgd":
        return int(bool(getattr(optimizer, "momentum", 0)))
    return 1 if optimizer.name in ("lion", "muon", "lion_8bit") else 2


def choose_layout(run: Run, ranks: int, local_size: int) -> Layout:
    """Returns the layout that the config means on so many processes."""
    config = run.config
    return layout_of(config.training, config.distributed, ranks, local_size, config.experiment.deterministic)


def can_compress(layout: Layout) -> bool:
    """Returns whether `distributed.compression` is possible in a layout: ranks exchange gradients of replicas."""
    return layout.engine == "ddp"


def forecast(run: Run, model: ModelSize, network: Network, local_size: int) -> tuple[list[Finding], Comparison | None]:
    """Says how long the measured network needs for the gradients of a step, and which compression would pay."""
    layout = choose_layout(run, network.ranks, local_size)
    if not network.all_reduce or not network.all_gather:
        return [Finding("not checked", _CHECK, "the time for measuring was over")], None
    inside = {side: size for side, size in layout.mesh.items() if side in ("pp", "cp", "tp") and size > 1}
    if inside:
        text = f"ranks exchange activations too on {say_mesh(layout.mesh)}, which is not forecast"
        return [Finding("not checked", _CHECK, text)], None
    if not can_compress(layout):
        return [_forecast_shards(run, layout, model, network)], None
    latency, speed = network.cost(network.all_reduce, 4 * model.trained)
    shapes = [torch.Size(shape) for shape in model.shapes]
    comparison = compare_methods(shapes, network.ranks, speed, network.coding_seconds, latency_seconds=latency)
    seconds = comparison.plain_seconds
    says = (
        f"{model.trained:,} trained parameters: each rank sends {_in_mb(comparison.plain_bytes)} in a step, "
        f"{seconds:.3g} s at {_in_mbit(speed)}, partly during the backward"
    )
    # local_sgd is in the table too, but changes the training much more than compression does.
    best = next((option for option in comparison.options if option.payoff.pays and option.is_compression), None)
    if seconds < SLOW_EXCHANGE_SECONDS:
        return [Finding("fine", _CHECK, says)], comparison
    if best is None:
        return [Finding("slow or surprising", _CHECK, f"{says}; no compression is faster", _LOCAL_SGD)], comparison
    advice = (
        f"distributed.{best.setting} exchanges in {best.payoff.compressed_seconds:.3g} s, and pays as long as the "
        f"computing of a step takes less than {best.payoff.pays_while_computing:.3g} s (docs/slow_networks.md)"
    )
    return [Finding("slow or surprising", _CHECK, says, advice)], comparison


def _forecast_shards(run: Run, layout: Layout, model: ModelSize, network: Network) -> Finding:
    """Says how long the exchange of shards takes; it is during forward and backward, as far as these last."""
    phase = derive_batches(run.config.training, data_size(layout.mesh))[0]
    sent = shard_bytes(layout, model, accumulation(phase, data_size(layout.mesh)))
    latency, speed = network.cost(network.all_gather, 4 * model.parameters)
    seconds = latency + sent / speed
    says = (
        f"{model.parameters:,} parameters under {layout.strategy}: each rank sends {_in_mb(sent)} in a step, "
        f"{seconds:.3g} s at {_in_mbit(speed)}, as far as possible during forward and backward"
    )
    if seconds < SLOW_EXCHANGE_SECONDS:
        return Finding("fine", _CHECK, says)
    fix = "fewer micro-batches (training.batch_size), or replicas between slow machines: distributed.mesh.dp_replicate"
    return Finding("slow or surprising", _CHECK, says, fix)


def shard_bytes(layout: Layout, model: ModelSize, micro_batches: int) -> float:
    """Returns what each rank sends in a step for the shards of weights and gradients."""
    mesh, gradients = layout.mesh, 4 * model.trained
    weights = (2 if layout.param_dtype != "fp32" else 4) * model.parameters
    gathers, reductions = 1, 1  # ZeRO 1: both once, at the end of a step
    shards, replicas = mesh["dp_shard"], mesh["dp_replicate"]
    if layout.engine == "deepspeed":
        shards, replicas = layout.world_size, 1  # below stage 3 the mesh calls them replicas
        reductions = micro_batches if layout.zero.stage > 1 else 1
        gathers = 2 * micro_batches if layout.zero.stage == 3 else 1
    elif layout.engine == "fully_shard":
        once = layout.fsdp.sharding_strategy == "SHARD_GRAD_OP"
        gathers = micro_batches * (1 if once else 2)
        reductions = micro_batches if layout.fsdp.reduce_every_micro_batch else 1
    along = (shards - 1) / shards * (gathers * weights + reductions * gradients)
    return along + all_reduce_bytes(gradients / shards, replicas)


def _in_mb(size: float) -> str:
    if size < 1e5:
        return f"{size / 1e3:,.3g} kB"
    return f"{size / 1e6:,.3g} MB" if size < 1e9 else f"{size / 1e9:,.3g} GB"


def _in_mbit(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 8 / 1e6:,.0f} Mbit/s"
