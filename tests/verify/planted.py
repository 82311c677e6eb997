"""Small recipes for `prove`, and typical bugs of distributed training that it must find."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call

from shoal.config.layout import Layout
from shoal.processes.detect import detect
from shoal.processes.world import World
from shoal.recipes import Recipe
from shoal.recipes.causal_lm import CausalLMRecipe
from shoal.strategies import DDPStrategy, DistributedStrategy, native
from shoal.strategies.contract import Engaged, prepare_batch
from shoal.strategies.engines import ddp
from shoal.strategies.engines.plain import PlainEngine
from shoal.strategies.executors import InTurn, Overlapped, Surroundings
from shoal.strategies.native import NativeStrategy
from shoal.strategies.update import ShardedUpdate, Update
from shoal.tensors import local_part, replace_parameters
from shoal.training import session
from shoal.training.optimizers import build_optimizer
from shoal.transform.float8_head import Float8Weight
from shoal.types import StepInfo, StepOutput
from shoal.verify import trace as trace_module
from shoal.verify.trace import Trace, trace
from shoal.weights.materialise import materialise


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Words:
    """A dataset of sequences with one to six labels."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 13, (7,), generator=generator)
        labels = ids[1:].clone()
        labels[1 + index % 6 :] = -100
        return {"input_ids": ids[:-1], "labels": labels}


class Ragged(Recipe):
    """Trains a small model on sequences with different numbers of labels."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(13, 16), Block(), nn.Dropout(0.2), Block(), nn.Linear(16, 13))

    def train_data(self) -> Words:
        return Words()

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["input_ids"]}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


class Matrices(Ragged):
    """Names what Muon trains."""

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ("up" in name or "down" in name)]
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        return [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]


class Frozen(Ragged):
    """Freezes most of the model, as with adapters."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[1].requires_grad_(False)
        model[3].requires_grad_(False)
        return model


class AveragesItself(Ragged):
    """Keeps an average in the model, which every forward changes in place."""

    def build_model(self) -> nn.Module:
        return WithAverage(super().build_model())


class WithAverage(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net, self.average = net, copy.deepcopy(net).requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            for average, parameter in zip(self.average.parameters(), self.net.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
        output: Tensor = self.net(input)
        return output


class AveragesByData(AveragesItself):
    """Changes it behind autograd's back, which does not count as a change in place."""

    def build_model(self) -> nn.Module:
        return WithHiddenAverage(super(AveragesItself, self).build_model())


class WithHiddenAverage(WithAverage):
    def forward(self, input: Tensor) -> Tensor:
        for average, parameter in zip(self.average.parameters(), self.net.parameters(), strict=True):
            average.data.lerp_(parameter.data, 0.1)
        output: Tensor = self.net(input)
        return output


class AveragesInHook(AveragesItself):
    """Changes it after each step, where parameters are not gathered."""

    def build_model(self) -> nn.Module:
        return ByHook(super(AveragesItself, self).build_model())

    def after_step(self, run: Any) -> None:
        with torch.no_grad():
            for average, parameter in zip(run.model.average.parameters(), run.model.net.parameters(), strict=True):
                average.lerp_(parameter, 0.1)


class ByHook(WithAverage):
    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.net(input)
        return output


class Quiet(Ragged):
    """Has a gradient whose norm is far below 1, a usual limit for clipping."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, batch) / 100


class Silent(Ragged):
    """Has gradients that are exactly 0."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, batch) * 0


class Loud(Ragged):
    """Has a gradient whose norm is far above 1, so that updates of that size would not be stable."""

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return super().loss(output, batch) * 1000


class Scale(nn.Module):
    """Multiplies by a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Scaled(Ragged):
    """Has a parameter without dimensions, which FSDP refuses."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(*super().build_model(), Scale())


class Unused(Ragged):
    """Has parameters that take no part in the loss, which DDP refuses."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[1].unused = nn.Linear(2, 2)
        return model


class Attention(nn.Module):
    """A residual attention whose queries, keys and values come from one matrix and one bias."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x, need_weights=False)[0]


class Fused(Ragged):
    """Has a fused bias, of which the gradient of the keys' third is zero except for rounding."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(13, 16), Attention(), Block(), nn.Linear(16, 13))


class Drop(nn.Module):
    """Calls dropout as a function, with a probability that no attribute has."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.2, self.training)


class Draw(nn.Module):
    """Draws a number and does not use it, like models that may skip layers."""

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(())
        return x


class Dropping(Ragged):
    """Has dropout that cannot be turned off from outside."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(13, 16), Block(), nn.Sequential(Draw(), Drop()), nn.Linear(16, 13))


class Encoder(Ragged):
    """Has dropout in modules and as a function in attention, and draws a number that it does not use."""

    def build_model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        return nn.Sequential(nn.Embedding(13, 16), Draw(), layer, nn.Linear(16, 13))


class RunningMean(nn.Module):
    """Keeps a running mean of its inputs, and subtracts it in an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x - self.mean
        self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
        return x


class Tracking(Ragged):
    """Has a buffer that each rank changes by its own samples; only an evaluation uses it."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(13, 16), RunningMean(), Block(), nn.Linear(16, 13))


class Normed(Ragged):
    """Has a BatchNorm, which mixes the samples of a batch."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(13, 16), nn.Flatten(), nn.BatchNorm1d(96), nn.Unflatten(1, (6, 16)), nn.Linear(16, 13)
        )


class Jump(nn.Module):
    """Returns x, and has a derivative of 1 or 2, which the last bits of a number in fp32 decide."""

    def forward(self, x: Tensor) -> Tensor:
        is_even = (x.detach() * 2**24).floor() % 2 == 0
        slope = torch.where(is_even, x, 2 * x)
        return x.detach() + (slope - slope.detach())


class OverflowsInParts(nn.Module):
    """Overflows in fp32, and not in float64, if there are several processes."""

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + 100.0
        if dist.is_initialized() and dist.get_world_size() > 1:
            return x + shifted.exp().sum(-1, keepdim=True).log() - 100.0
        return x + shifted.logsumexp(-1, keepdim=True) - 100.0


class Jumping(Ragged):
    """Has gradients that jump by rounding errors, as those of ReLU and max-pooling seldom do, after a BatchNorm."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(13, 16), nn.Flatten(), nn.BatchNorm1d(96), Jump(), nn.Unflatten(1, (6, 16)), nn.Linear(16, 13)
        )


class Overflowing(Ragged):
    """Is right in float64 alone."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(13, 16), OverflowsInParts(), nn.Linear(16, 13))


class Stubborn(Jumping):
    """Cannot compute in float64."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.append(InSingle())
        return model


class InSingle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(13))

    def forward(self, x: Tensor) -> Tensor:
        return x.float() @ self.weight


class Mixing(Ragged):
    """Has a BatchNorm that keeps no running statistics, so that it mixes samples in every mode."""

    def build_model(self) -> nn.Module:
        norm = nn.BatchNorm1d(96, track_running_stats=False)
        return nn.Sequential(nn.Embedding(13, 16), nn.Flatten(), norm, nn.Unflatten(1, (6, 16)), nn.Linear(16, 13))


class Tabled(Ragged):
    """Has a buffer with more bytes than all parameters together."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("table", torch.zeros(4096))
        return model


class GatherEverything(NativeStrategy):
    """Shards the wrong way: every rank holds a part, gathers all of it, and computes all of the batch."""

    def _place_model(self, model: nn.Module, builders: Any, plan: Any, weights: Any, *rest: Any) -> Any:
        assert self.mesh is not None
        mesh = self.mesh["tp"]
        materialise(model, self.device, self._seed, weights)
        replace_parameters(model, lambda p: nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])))

        class Gathering(nn.Module):
            def forward(self, **inputs: Any) -> Any:
                whole = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[operator]
                return functional_call(model, whole, kwargs=inputs)

        engine = PlainEngine(self.layout, self.device, self.mesh, "sum")
        engine.wrap(Gathering())
        self._engine = engine
        self._executor = InTurn(engine, Surroundings(self.device, "fp32", 0, (0,), None))
        self._module_state = self._find_module_state(model)
        self.engaged = Engaged(parameter_bytes=sum(local_part(p).nbytes for p in model.parameters()))
        return [build(model) for build in builders]

    def step(self, optimizer: Any, max_norm: float | None = None) -> StepInfo:
        optimizer.zero_grad()
        return StepInfo(torch.zeros(()), torch.zeros(()))

    def evaluate(self, model: nn.Module, *args: Any) -> StepOutput:
        return super().evaluate(self.engine, *args)

    def load_state(self, *args: Any) -> None:
        pass


def _gather_everything(config: Any, world: World | None = None) -> NativeStrategy:
    world = world or detect()
    sides = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": world.size}
    return GatherEverything(Layout("gather everything", "plain", sides), world, device="cpu")


def _wrong_rank(config: Any, world: World | None = None) -> DistributedStrategy:
    strategy = DDPStrategy(device="cpu")
    strategy.data_rank = 0
    return strategy


def _count_of_first_micro_batch(self: DistributedStrategy, values: Any, micro_batches: Any) -> Tensor:
    return torch.as_tensor(values[0])


def _no_all_reduce(state, bucket):  # type: ignore[no-untyped-def]
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _sum_without_last_rank(state, bucket):  # type: ignore[no-untyped-def]
    buffer = bucket.buffer()
    if dist.get_rank() == dist.get_world_size() - 1:
        buffer.zero_()
    dist.all_reduce(buffer)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def _times(factor: float, function: Any) -> Any:
    return lambda *args, **kwargs: factor * function(*args, **kwargs)


def _with_gradients_times(factor: float, names: tuple[str, ...]) -> Any:
    """Multiplies the gradients of parameters whose names contain one of these, after the micro-batches of a step."""
    forward_backward = DistributedStrategy.forward_backward

    def wrong(self: DistributedStrategy, model: nn.Module, *args: Any, **kwargs: Any) -> StepOutput:
        output = forward_backward(self, model, *args, **kwargs)
        for key, parameter in model.named_parameters():
            if parameter.grad is not None and any(name in key for name in names):
                parameter.grad.mul_(factor)
        return output

    return patch.object(DistributedStrategy, "forward_backward", wrong)


def _one_step_ahead(step: Any) -> Any:
    """Lets AdamW correct its averages as if it had made one more step."""

    def step_ahead(self: Update, *args: Any) -> StepInfo:
        for slots in self.optimizer.state.values():
            if "step" in slots:
                slots["step"] += 1
        return step(self, *args)

    return step_ahead


def _step_without_clipping(step: Any) -> Any:
    return lambda self, max_norm=None, max_value=None: step(self, None, max_value)


def _with_other_groups(**factors: float) -> Any:
    """Builds optimizers with some numbers multiplied."""

    def build(training: Any, groups: Any) -> Any:
        optimizer = build_optimizer(training, groups)
        for group in optimizer.param_groups:
            for key, factor in factors.items():
                if key in group:
                    value = group[key]
                    group[key] = tuple(factor * one for one in value) if isinstance(value, tuple) else factor * value
        return optimizer

    return patch.object(session, "build_optimizer", build)


def _without_optimizer_state(restore: Any) -> Any:
    return lambda model, optimizer, own, state: restore(model, optimizer, own, replace(state, optimizer={}))


def _with_scaled_gradients(step: Any) -> Any:
    def step_without_unscaling(self: Update, *args: Any) -> StepInfo:
        loss_scale, self.loss_scale = self.loss_scale, None
        try:
            return step(self, *args)
        finally:
            self.loss_scale = loss_scale

    return step_without_unscaling


def _seed_with(rng_key: Any) -> Any:
    """Seeds generators with another key than the rank's own."""
    enter = Surroundings.enter

    def enter_with_key(self: Surroundings, *args: Any) -> Any:
        self._rng_key = rng_key()
        return enter(self, *args)

    return patch.object(Surroundings, "enter", enter_with_key)


def _seed_without(index: int) -> Any:
    """Seeds generators without the step (0) or the micro-batch (1)."""
    enter = Surroundings.enter

    def enter_without(self: Surroundings, recipe: Any, batch: Any, scale: Any, *place: Any) -> Any:
        return enter(self, recipe, batch, scale, *place[:index], *place[index + 1 :])

    return patch.object(Surroundings, "enter", enter_without)


def _with_finite_gradients(step: Any) -> Any:
    def step_finite(self: Update, *args: Any) -> StepInfo:
        for gradient in self.gradients():
            gradient.nan_to_num_(posinf=1.0)
        return step(self, *args)

    return step_finite


def _norm_of_own_stage(norm: Any) -> Any:
    def norm_without_stages(self: ShardedUpdate, gradients: list[Tensor]) -> Tensor:
        stages, self._stages = self._stages, None
        try:
            return norm(self, gradients)
        finally:
            self._stages = stages

    return norm_without_stages


def _without_gradient_of_last(forward_backward: Any) -> Any:
    def forget_last(self: Overlapped, batches: Any, scales: Any, *args: Any) -> Any:
        *others, last = scales
        return forward_backward(self, batches, [*others, 0 * last], *args)

    return forget_last


def _first_part_of_sequences(self: DistributedStrategy, micro_batches: Any, recipe: Any) -> list[Any]:
    batches = [prepare_batch(micro, recipe, self._seed, self.device) for micro in micro_batches]
    return [recipe.split_sequence(batch, 0, self.layout.mesh["cp"]) for batch in batches]


def _without_last_micro_batch(score: Any) -> Any:
    def score_others(self: InTurn, *args: Any) -> list[Tensor]:
        *losses, last = score(self, *args)
        return [*losses, 0 * last]

    return score_others


def _compute_twice(forward_backward: Any) -> Any:
    def twice(self: InTurn, batches: Any, scales: Any, recipe: Any, measures: Any, step: int) -> Any:
        with torch.no_grad():
            self.score(self.engine.module, batches, recipe, measures)
        return forward_backward(self, batches, scales, recipe, measures, step)

    return twice


def trace_with(bug: str, *args: Any) -> Trace:
    """Traces the run while a bug is planted in its strategy."""
    patches = {
        "forgotten 1/accumulation": lambda: patch.object(DistributedStrategy, "_sum", _count_of_first_micro_batch),
        "missing all-reduce": lambda: patch.object(ddp, "_sum_over_ranks", _no_all_reduce),
        "one rank's gradient lost": lambda: patch.object(ddp, "_sum_over_ranks", _sum_without_last_rank),
        "wrong rank's data": lambda: patch.object(trace_module, "from_config", _wrong_rank),
        "no gradients of queries and keys": lambda: _with_gradients_times(0.0, ("q_proj", "k_proj")),
        "gradients 9% too large": lambda: _with_gradients_times(1.09, ("",)),
        "logits a quarter too large": lambda: patch.object(Float8Weight, "logits", _times(1.25, Float8Weight.logits)),
        "no clipping": lambda: patch.object(Update, "step", _step_without_clipping(Update.step)),
        "decay twice": lambda: _with_other_groups(weight_decay=2),
        "no decay": lambda: _with_other_groups(weight_decay=0),
        "wrong betas": lambda: _with_other_groups(betas=0.98),
        "wrong bias correction": lambda: patch.object(Update, "step", _one_step_ahead(Update.step)),
        "learning rate 1% too high": lambda: _with_other_groups(initial_lr=1.01, lr=1.01),
        "loss scale stays": lambda: patch.object(Update, "step", _with_scaled_gradients(Update.step)),
        "optimizer state lost": lambda: patch.object(
            native, "restore_state", _without_optimizer_state(native.restore_state)
        ),
        "evaluation forgets a micro-batch": lambda: patch.object(
            InTurn, "score", _without_last_micro_batch(InTurn.score)
        ),
        "steps draw the same": lambda: _seed_without(0),
        "micro-batches draw the same": lambda: _seed_without(1),
        "infinite gradients are applied": lambda: patch.object(Update, "step", _with_finite_gradients(Update.step)),
        "data ranks draw the same": lambda: _seed_with(lambda: (0,)),
        "tensor ranks draw differently": lambda: _seed_with(lambda: (dist.get_rank(),)),
        "norm of one stage": lambda: patch.object(ShardedUpdate, "norm", _norm_of_own_stage(ShardedUpdate.norm)),
        "gradient of a micro-batch lost": lambda: patch.object(
            Overlapped, "forward_backward", _without_gradient_of_last(Overlapped.forward_backward)
        ),
        "same tokens on all ranks": lambda: patch.object(
            DistributedStrategy, "_prepare_batches", _first_part_of_sequences
        ),
        "computes twice": lambda: patch.object(InTurn, "forward_backward", _compute_twice(InTurn.forward_backward)),
        "gathers everything": lambda: patch.object(trace_module, "from_config", _gather_everything),
    }
    with patches[bug]():
        return trace(*args)


class TrainedNorms(CausalLMRecipe):
    """A language model of which the norms are trained, so that gradients go through everything else."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        return model
