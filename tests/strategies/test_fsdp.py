"""FSDP: what a step agrees on over ranks, what a rank holds, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verify.planted import Block, Ragged, Words

from shoal.config.schema import TrainingConfig
from shoal.config.schema_distributed import FSDPConfig
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.processes.desync import Desync
from shoal.strategies import DDPStrategy, DistributedStrategy, FSDPStrategy, Loop, SingleStrategy
from shoal.training.optimizers import build_optimizer
from shoal.transform.activation_checkpointing import num_recomputed
from shoal.types import ParallelPlan
from shoal.weights import build


class Narrow(Ragged):
    """Parameters with fewer rows than ranks, a frozen layer, and a layer used twice."""

    def build_model(self) -> nn.Module:
        shared = Block()
        model = nn.Sequential(
            nn.Embedding(13, 16), shared, nn.Linear(16, 3), nn.Linear(3, 16), Block(), shared, nn.Linear(16, 13)
        )
        model[4].requires_grad_(False)
        return model


class Overflowing(Ragged):
    """The loss of one rank's samples is infinite in one step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.calls = rank, 0

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        mine = torch.distributed.get_rank() == self.rank
        return super().loss(output, batch) * (math.inf if mine and self.calls == 4 else 1.0)


def steps(strategy: DistributedStrategy, recipe: Any, count: int, sgd: bool = False) -> dict[str, Any]:
    optimizer_keys: dict[str, Any] = {"optimizer": {"name": "sgd", "momentum": 0.9}} if sgd else {}
    training = TrainingConfig(max_steps=1, learning_rate=1e-2, **optimizer_keys)
    with strategy:
        model, weights = build(recipe.build_model, recipe.weights(), seed=0)
        model, optimizer = strategy.prepare(
            model.eval(),
            lambda m: build_optimizer(training, recipe.param_groups(m)),
            recipe.parallel_plan(model),
            weights,
        )
        rank, size = strategy.data_rank, strategy.data_size
        batches = BatchSchedule.constant(11, 2)
        loader = Loader(Words(), recipe.collate, batches, seed=0, data_rank=rank, data_size=size)
        result: dict[str, Any] = {"loss": [], "norm": [], "skipped": []}
        for step, micro_batches in zip(range(count), loader, strict=False):
            output = strategy.forward_backward(model, micro_batches, recipe, step)
            info = strategy.step(optimizer, 0.5)
            result["loss"].append(output.loss.item())
            result["norm"].append(info.grad_norm.item())
            result["skipped"].append(info.skipped.item())
        result["eval"] = strategy.evaluate(model, micro_batches, recipe).loss.item()
        state = strategy.state(model, optimizer)
        result["weights"] = {name: whole(tensor) for name, tensor in state.model.items()}
        result["moments"] = {f"{n}/{k}": whole(t) for n, slots in state.optimizer.items() for k, t in slots.items()}
        result["grads_left"] = sum(p.grad is not None for p in model.parameters())
        result["scale"] = strategy._loss_scale.scale.item() if strategy._loss_scale else None
        return result


def whole(tensor: Tensor) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def sharded(options: dict[str, Any], recipe: Any, count: int = 3, sgd: bool = False) -> dict[str, Any]:
    return steps(FSDPStrategy(device="cpu", **options), recipe, count, sgd)


def worst(a: dict[str, Any], b: dict[str, Any], what: str = "weights") -> float:
    assert a[what].keys() == b[what].keys()
    return max(float(np.abs(a[what][name] - b[what][name]).max()) for name in a[what])


@pytest.mark.parametrize("sgd", [False, True])
def test_fewer_rows_than_ranks(pool4: Pool, sgd: bool) -> None:
    """Empty shards, frozen and shared parameters; fused AdamW and fused SGD on what each rank holds."""
    alone = steps(SingleStrategy(device="cpu"), Narrow(), 3, sgd)
    ranks = pool4.run(sharded, {}, Narrow(), 3, sgd, init=False)
    for result in ranks:
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert result["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert result["eval"] == pytest.approx(alone["eval"], rel=1e-5)
        assert worst(result, alone) < 2e-5
        assert worst(result, alone, "moments") < 2e-5
        assert (result["norm"], result["loss"]) == (ranks[0]["norm"], ranks[0]["loss"])
        assert result["grads_left"] == 0


def test_fp16_skips_together_and_scales(pool2: Pool) -> None:
    ranks = pool2.run(sharded, {"mixed_precision": "fp16"}, Overflowing(1), 4, init=False)
    assert ranks[0]["skipped"] == ranks[1]["skipped"] == [0, 1, 0, 0]
    assert ranks[0]["scale"] == ranks[1]["scale"] == 2.0**15
    assert all(np.isfinite(tensor).all() for tensor in ranks[0]["weights"].values())


def test_fp32_skips_together(pool2: Pool) -> None:
    for result in pool2.run(sharded, {}, Overflowing(0), 4, init=False):
        assert result["skipped"] == [0, 1, 0, 0]


def test_one_process() -> None:
    """The plain model, or a world of one where the types need it."""
    alone = steps(SingleStrategy(device="cpu"), Ragged(), 3)
    result = sharded({}, Ragged())
    assert result["loss"] == alone["loss"]
    assert worst(result, alone) == 0
    half = sharded({"mixed_precision": "pure_bf16"}, Ragged())
    assert half["loss"] != alone["loss"]
    assert half["loss"] == pytest.approx(alone["loss"], rel=2e-2)
    assert all(tensor.dtype == np.float32 for tensor in half["weights"].values())
    with FSDPStrategy(device="cpu", reduce_dtype="bf16", sharding_strategy="SHARD_GRAD_OP", buffer_dtype="bf16") as one:
        Loop(one).wrap(Ragged().build_model())
        keys = ("distributed.fsdp.sharding_strategy", "distributed.fsdp.reduce_dtype")
        assert one.engaged.not_in_force == dict.fromkeys(keys, "nothing is sharded on one process")
    assert not torch.distributed.is_initialized()


def by_hand(strategy: DistributedStrategy, verb: str) -> dict[str, Any]:
    """A loop of the user's own: a mean over the rank's samples."""
    with strategy:
        torch.manual_seed(0)
        loop, norms = Loop(strategy), []
        model, optimizer = loop.wrap(
            Ragged().build_model().eval(), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True)
        )
        for step in range(3):
            for index in range(2):
                ids = [(8 * step + 4 * index + i) % 61 for i in range(4)]
                mine = ids[strategy.data_rank :: strategy.data_size]
                batch = Ragged().collate([Words()[i] for i in mine])
                with loop.accumulate(last=index == 1):
                    logits = model(batch["input_ids"])
                    loop.backward(logits.float().logsumexp(-1).mean() / 2)
            if verb == "clip":
                loop.clip(max_norm=0.1)
                norms.append(loop.step().grad_norm.item())
            else:
                norms.append(loop.step(max_norm=0.1).grad_norm.item())
        return {"norms": norms, "weights": {n: whole(t) for n, t in strategy.state(model, optimizer).model.items()}}


def by_hand_sharded(verb: str) -> dict[str, Any]:
    return by_hand(FSDPStrategy(device="cpu"), verb)


@pytest.mark.parametrize("verb", ["clip", "step"])
def test_a_loop_by_hand(pool2: Pool, verb: str) -> None:
    alone = by_hand(SingleStrategy(device="cpu"), "step")
    for result in pool2.run(by_hand_sharded, verb, init=False):
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert worst(result, alone) < 1e-4


def look(options: dict[str, Any]) -> dict[str, Any]:
    strategy = FSDPStrategy(device="cpu", **options)
    with strategy:
        (model,) = Loop(strategy).wrap(Normed())
        held = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
        output = model(torch.zeros(2, 6))
        return {
            "held": held,
            "buffer": model.running.dtype,
            "output": output.dtype,
            "units": strategy._engine.units,
        }


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.running = nn.Linear(6, 8), nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_types_of_parameters_and_buffers(pool2: Pool) -> None:
    plain = pool2.run(look, {}, init=False)[0]
    assert (plain["held"], plain["buffer"], plain["output"]) == (4 * 28, torch.float32, torch.float32)
    options = {"mixed_precision": "pure_bf16", "buffer_dtype": "bf16", "reduce_dtype": "bf16"}
    half = pool2.run(look, options, init=False)[0]
    assert (half["held"], half["buffer"], half["output"]) == (4 * 28, torch.bfloat16, torch.bfloat16)
    assert half["units"] == []


def drift(rank_to_change: int) -> str:
    strategy = FSDPStrategy(device="cpu", sharding_strategy="HYBRID_SHARD", mesh={"dp_replicate": 2})
    with strategy:
        torch.manual_seed(0)
        (model,) = Loop(strategy).wrap(Ragged().build_model())
        if strategy.rank == rank_to_change:
            with torch.no_grad():
                model.get_parameter("4.weight").to_local()[0] += 1e-6  # type: ignore[attr-defined]
        try:
            strategy.check_sync(dict(model.named_parameters()))
        except Desync as alarm:
            return str(alarm)
        return ""


def test_the_alarm_compares_replicas_of_shards(pool4: Pool) -> None:
    assert pool4.run(drift, 99, init=False) == [""] * 4
    result = pool4.run(drift, 3, init=False)
    assert result[0] == result[2] == ""  # they hold other shards
    assert "4.weight on rank 3 differs from rank 1" in result[1]


def refusal(options: dict[str, Any]) -> str:
    try:
        with FSDPStrategy(device="cpu", **options) as strategy:
            Loop(strategy).wrap(Ragged().build_model())
    except UserError as error:
        return str(error)
    return ""


HYBRID = {"sharding_strategy": "HYBRID_SHARD"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (HYBRID | {"mesh": {"dp_replicate": 3, "dp_shard": 2}}, "dp_replicate 3 × dp_shard 2 = 6, but there are 4"),
        (HYBRID | {"mesh": {"dp_replicate": 3, "dp_shard": -1}}, "dp_replicate 3 does not divide the 4 processes"),
        (HYBRID | {"mesh": {"dp_replicate": -1, "dp_shard": -1}}, "dp_replicate and dp_shard are both -1"),
        (HYBRID, "HYBRID_SHARD on 1 replicas × 4 shards is not hybrid"),
        ({"mesh": {"dp_replicate": 2, "dp_shard": 2}}, "is not what sharding_strategy FULL_SHARD means on 4"),
        ({"cpu_offload": True}, "cpu_offload = true needs a GPU to offload from"),
        ({"param_dtype": "bf16"}, "param_dtype = bf16, but training.mixed_precision = fp32 computes in fp32"),
        ({"param_dtype": "fp32", "mixed_precision": "pure_bf16"}, "pure_bf16 gathers parameters in bf16"),
        ({"wrap_classes": ["Blok"]}, "wrap_classes names 'Blok', which is no class in the model; did you mean Block?"),
        ({"auto_wrap_policy": "size_based"}, "no module inside the model has 100,000,000 parameters"),
        ({"auto_wrap_policy": "transformer_based"}, "transformer_based, but the model has no repeated blocks"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(pool4: Pool, options: dict[str, Any], words: str) -> None:
    for result in pool4.run(refusal, options, init=False):
        assert words in result
        assert "\n" not in result


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"backward_prefetch": "BACKWARD_POST"}, "always gathers the next unit before"),
        ({"backward_prefetch": None}, "always gathers the next unit before"),
        ({"limit_all_gathers": False}, "always frees a unit"),
        ({"wrap_classes": ["A"], "auto_wrap_policy": "size_based"}, "both choose the units"),
        ({"min_num_params": 5}, "needs auto_wrap_policy: size_based"),
    ],
)
def test_names_from_elsewhere_mean_what_they_say(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FSDPConfig(**keys)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_pure_bf16_needs_fsdp(strategy: str) -> None:
    kind = {"single": SingleStrategy, "ddp": DDPStrategy}[strategy]
    with pytest.raises(UserError, match=r"use distributed\.strategy: fsdp"):
        kind(device="cpu", mixed_precision="pure_bf16")


class Experts(Ragged):
    """Each rank uses another one of two like layers."""

    def build_model(self) -> nn.Module:
        return Either()


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 16), nn.Linear(16, 13)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, input: Tensor) -> Tensor:
        x = self.embed(input)
        return self.head(self.two(x) if torch.distributed.get_rank() else self.one(x))


def different_parameters() -> str:
    try:
        sharded({}, Experts(), 1)
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_use_different_parameters_are_refused(pool2: Pool) -> None:
    """fully_shard would add the gradient of one to that of the other."""
    for result in pool2.run(different_parameters, init=False):
        assert "ranks used different parameters" in result


def save_and_step_by_hand(folder: str | None) -> list[float]:
    with FSDPStrategy(device="cpu") as strategy:
        torch.manual_seed(0)
        loop, losses = Loop(strategy), []
        (model,) = loop.wrap(Ragged().build_model().eval())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        for step in range(4):
            loss = model(torch.arange(6).view(1, 6)).logsumexp(-1).mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if folder and step == 1:
                model(torch.zeros(1, 6, dtype=torch.int64))  # with gradients, but no backward
                loop.add(optimizer)
                loop.save(folder)
                loop.load(folder)
        return losses


def test_saving_leaves_a_loop_by_hand_alone(pool2: Pool, tmp_path: Any) -> None:
    """The loop steps torch's own way: on DTensors, and on the local parts of them once the optimizer was added."""
    undisturbed = pool2.run(save_and_step_by_hand, None, init=False)
    assert pool2.run(save_and_step_by_hand, str(tmp_path / "step"), init=False) == undisturbed
    assert len(set(undisturbed[0])) == 4


class Batched(Ragged):
    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(13, 16), nn.Flatten(), nn.BatchNorm1d(96), nn.Unflatten(1, (6, 16)), nn.Linear(16, 13)
        )


def running_mean() -> tuple[Any, Any, Any]:
    strategy, recipe = FSDPStrategy(device="cpu"), Batched()
    with strategy:
        model, weights = build(recipe.build_model, recipe.weights(), seed=0)
        model, optimizer = strategy.prepare(
            model,
            build_optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
            plan=ParallelPlan(),
            weights=weights,
        )
        loader = Loader(
            Words(), recipe.collate, BatchSchedule.constant(8, 4), seed=0, data_rank=strategy.data_rank, data_size=2
        )
        seen = []
        model[2].register_forward_pre_hook(lambda module, inputs: seen.append(module.running_mean.clone()))
        for step, micro_batches in zip(range(3), loader, strict=False):
            strategy.forward_backward(model, micro_batches, recipe, step)
            strategy.step(optimizer)
        after = model[2].running_mean.numpy().copy()
        stored = strategy.state(model, optimizer).model["2.running_mean"].numpy().copy()
        return seen[2].numpy(), after, stored


def test_running_means_start_every_step_as_rank_0_has_them(pool2: Pool) -> None:
    (first, after, stored), (second, other, other_stored) = pool2.run(running_mean, init=False)
    assert np.array_equal(stored, after)  # rank 0's are saved,
    assert np.array_equal(stored, other_stored)  # whoever writes them
    assert np.array_equal(first, second)
    assert not np.array_equal(after, other)  # they saw different samples since
    assert np.abs(first).sum() > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sharding_strategy": "full_shard"}, "sharding_strategy='full_shard'"),
        ({"auto_wrap_policy": "transformer"}, "auto_wrap_policy='transformer'"),
        ({"param_dtype": "bfloat16"}, "param_dtype='bfloat16'"),
        ({"mixed_precision": "half"}, "mixed_precision='half'): Input should be 'fp32', 'bf16'"),
        ({"sharding_strategy": "NO_SHARD", "reduce_every_micro_batch": True}, "saves nothing with NO_SHARD"),
        ({"loss_chunks": 2}, "a loop of your own computes its loss itself; use a recipe"),
    ],
)
def test_options_in_python_are_checked_too(options: dict[str, Any], words: str) -> None:
    assert words in refusal(options)


def test_a_parameter_that_is_a_number_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UserError, match="parameter scale is a single number"), FSDPStrategy(device="cpu") as strategy:
        Loop(strategy).wrap(model)


def test_a_wrapped_model_does_what_the_options_say() -> None:
    with FSDPStrategy(device="cpu", activation_checkpointing="full") as strategy:
        (model,) = Loop(strategy).wrap(nn.Sequential(Block(), Block()))
        before = num_recomputed()
        model(torch.randn(1, 16)).sum().backward()
        assert num_recomputed() == before + 2


class FrozenHalf(Ragged):
    """A frozen layer that is stored in bf16, as the base of an adapter is."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[1].requires_grad_(False).to(torch.bfloat16)
        model[1].forward = lambda x: x + model[1].up(x.bfloat16()).float().sum() * 0
        return model


def types_inside() -> tuple[torch.dtype, torch.dtype]:
    recipe = FrozenHalf()
    seen: list[torch.dtype] = []
    with FSDPStrategy(device="cpu") as strategy:
        model, _ = strategy.prepare(
            recipe.build_model(), lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
        )
        for module in (model[1].up, model[4]):
            module.register_forward_pre_hook(lambda module, inputs: seen.append(module.weight.dtype))
        loader = Loader(Words(), recipe.collate, BatchSchedule.constant(4, 2), seed=0, data_rank=0, data_size=2)
        strategy.forward_backward(model, next(iter(loader)), recipe, 0)
    return seen[0], seen[1]


def test_a_frozen_bf16_layer_is_gathered_in_bf16(pool2: Pool) -> None:
    assert pool2.run(types_inside, init=False) == [(torch.bfloat16, torch.float32)] * 2
