"""ZeRO by DeepSpeed: what a step agrees on over ranks, what a rank holds, what moves, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PATIENCE_SECONDS, ToyRun
from pool import Pool
from ports import free_port
from strategies.test_fsdp import Batched, Narrow, Overflowing, steps, worst
from test_docs import blocks
from torch import Tensor, nn
from typer.testing import CliRunner
from verify.planted import Block, Ragged, Words

from shoal.checkpoint import open_checkpoint
from shoal.cli.main import app
from shoal.config import load_run
from shoal.data import BatchSchedule, Loader
from shoal.errors import UserError
from shoal.strategies import DeepSpeedStrategy, Loop, SingleStrategy
from shoal.training import train
from shoal.transform.activation_checkpointing import num_recomputed
from shoal.types import ParallelPlan
from shoal.weights import build

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="the package deepspeed is not installed")

ALL_SPLIT = {"stage": 3, "stage3_param_persistence_threshold": 0}
STAGES: dict[str, dict[str, Any]] = {"1": {"stage": 1}, "2": {"stage": 2}, "3": ALL_SPLIT}
SOME_STAGES = ["3", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("1", "2"))]


def zero(options: dict[str, Any], recipe: Any, count: int = 3, sgd: bool = False) -> dict[str, Any]:
    return steps(DeepSpeedStrategy(device="cpu", **options), recipe, count, sgd)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return steps(SingleStrategy(device="cpu"), Narrow(), 3)


@pytest.mark.parametrize("stage", SOME_STAGES)
def test_fewer_rows_than_ranks(pool2: Pool, alone: dict[str, Any], stage: str) -> None:
    """Frozen and shared parameters, and rows that end in the middle of a rank's part; moments too."""
    ranks = pool2.run(zero, STAGES[stage], Narrow(), init=False)
    for outcome in ranks:
        assert outcome["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert outcome["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert outcome["eval"] == pytest.approx(alone["eval"], rel=1e-5)
        assert worst(outcome, alone) < 2e-5
        assert worst(outcome, alone, "moments") < 2e-5
        assert (outcome["norm"], outcome["loss"]) == (ranks[0]["norm"], ranks[0]["loss"])


@pytest.mark.parametrize(
    "options", [{"stage": 2, "offload_optimizer": "cpu"}, ALL_SPLIT | {"offload_parameters": "cpu"}]
)
def test_one_process(alone: dict[str, Any], options: dict[str, Any]) -> None:
    outcome = zero(options, Narrow())
    assert outcome["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert worst(outcome, alone) < 2e-5
    assert not torch.distributed.is_initialized()
    assert "LOCAL_RANK" not in os.environ  # which would make another run think that it is one of several


def test_fp16_skips_together_and_scales(pool2: Pool) -> None:
    ranks = pool2.run(zero, ALL_SPLIT | {"mixed_precision": "fp16"}, Overflowing(1), 4, init=False)
    assert ranks[0]["skipped"] == ranks[1]["skipped"] == [0, 1, 0, 0]
    assert ranks[0]["scale"] == ranks[1]["scale"] == 2.0**15
    assert all(np.isfinite(tensor).all() for tensor in ranks[0]["weights"].values())


@pytest.mark.parametrize("stage", SOME_STAGES)
def test_fp32_skips_together(pool2: Pool, stage: str) -> None:
    for outcome in pool2.run(zero, STAGES[stage], Overflowing(0), 4, init=False):
        assert outcome["skipped"] == [0, 1, 0, 0]
        assert all(np.isfinite(tensor).all() for tensor in outcome["weights"].values())


def held() -> tuple[list[int], int, int]:
    """The largest parameter that was whole at any moment of the start, what is held in the end, and of how much."""
    seen: list[int] = []
    recipe = Ragged()
    with DeepSpeedStrategy(device="cpu", **ALL_SPLIT) as strategy:
        model, weights = build(recipe.build_model, recipe.weights(), seed=0)
        total = sum(p.nbytes for p in model.parameters())

        def optimizer(model: nn.Module) -> Any:
            seen.append(sum(p.to_local().nbytes for p in model.parameters()))  # type: ignore[operator]
            return torch.optim.SGD(model.parameters(), lr=0.1)

        model, _ = strategy.prepare(model, optimizer, recipe.parallel_plan(model), weights)
        return seen, strategy.engaged.parameter_bytes, total


def test_no_rank_ever_has_the_whole_model(pool2: Pool) -> None:
    for seen, after, total in pool2.run(held, init=False):
        assert max(seen) <= 0.55 * total
        assert after <= 0.55 * total


def running_mean() -> tuple[Any, Any]:
    recipe = Batched()
    with DeepSpeedStrategy(device="cpu", stage=1) as strategy:
        model, weights = build(recipe.build_model, recipe.weights(), seed=0)
        build_sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
        model, optimizer = strategy.prepare(model, build_sgd, ParallelPlan(), weights)
        batches, rank = BatchSchedule.constant(8, 4), strategy.data_rank
        loader = Loader(Words(), recipe.collate, batches, seed=0, data_rank=rank, data_size=2)
        seen = []
        model[2].register_forward_pre_hook(lambda module, inputs: seen.append(module.running_mean.clone()))
        for step, micro_batches in zip(range(3), loader, strict=False):
            strategy.forward_backward(model, micro_batches, recipe, step)
            strategy.step(optimizer)
        return seen[2].numpy(), model[2].running_mean.numpy().copy()


def test_running_means_start_every_step_as_rank_0_has_them(pool2: Pool) -> None:
    (first, after), (second, other) = pool2.run(running_mean, init=False)
    assert np.array_equal(first, second)
    assert not np.array_equal(after, other)  # they saw different samples since
    assert np.abs(first).sum() > 0


class Sometimes(Ragged):
    """A layer takes part in these forwards alone."""

    def __init__(self, *forwards: int) -> None:
        super().__init__()
        self.forwards, self.count_forwards = forwards, 0

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.spare = nn.Linear(13, 13)
        *body, spare = model.children()

        def forward(input: Tensor) -> Tensor:
            self.count_forwards += 1
            output = nn.Sequential(*body)(input)
            return spare(output) if self.count_forwards - 1 in self.forwards else output

        model.forward = forward  # type: ignore[method-assign]
        return model


class Peeking(Ragged):
    """Its loss looks at a weight by itself, and calls a module again."""

    def build_model(self) -> nn.Module:
        self.model = super().build_model()
        return self.model

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        again = self.model[4](torch.ones(16)).sum() * 1e-3
        return super().loss(output, batch) + again + self.model[4].weight.detach().norm()


class Again(Peeking):
    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return Ragged.loss(self, output, batch) + self.model[4](torch.ones(16)).sum() * 1e-3


class Number(Ragged):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_parameter("logit_scale", nn.Parameter(torch.tensor(1.0)))
        return model


def refusal(options: dict[str, Any], recipe: Any) -> str:
    try:
        zero(options, recipe, 2)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("forwards", [(), (0, 2), (1, 3), (0, 1)])
@pytest.mark.parametrize("options", [{"stage": 2}, {**ALL_SPLIT, "offload_optimizer": "cpu"}])
def test_a_parameter_without_a_gradient_is_refused(options: dict[str, Any], forwards: tuple[int, ...]) -> None:
    """DeepSpeed would decay it, add the last step's gradient, or lose a part of it, as no other layout does."""
    assert "spare.bias took no part in the loss of a micro-batch on rank 0" in refusal(options, Sometimes(*forwards))


def test_a_loss_that_reads_weights(alone: dict[str, Any]) -> None:
    assert "the recipe's loss reads 4.weight, which is on other ranks" in refusal(ALL_SPLIT, Peeking())
    assert refusal({"stage": 2}, Peeking()) == ""
    assert refusal(ALL_SPLIT, Again()) == ""


@pytest.mark.parametrize("stage", STAGES)
def test_a_number_is_refused(stage: str) -> None:
    assert "parameter logit_scale is a single number, which sharding cannot split" in refusal(STAGES[stage], Number())


class Convolving(Ragged):
    """A weight that lies channels last."""

    def build_model(self) -> nn.Module:
        class Convolution(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Conv2d(16, 16, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last)

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x.transpose(1, 2)[:, :, None]).squeeze(2).transpose(1, 2)

        return nn.Sequential(nn.Embedding(13, 16), Convolution(), nn.Linear(16, 13))


@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_that_lies_otherwise(stage: str) -> None:
    whole = steps(SingleStrategy(device="cpu"), Convolving(), 2)
    assert worst(zero(STAGES[stage], Convolving(), 2), whole) < 2e-5


class Steep(Ragged):
    """Its gradient times 2**16 is finite in fp16, and times twice that is not."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(13, 4), nn.Linear(4, 1, bias=False))

    def count(self, batch: Any) -> int:
        return 1

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return output.float()[0, 0, 0] * 0.9


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_do_not_scale_the_loss(pool2: Pool, stage: str) -> None:
    for outcome in pool2.run(zero, STAGES[stage] | {"mixed_precision": "fp16"}, Steep(), 2, init=False):
        assert outcome["scale"] == 2.0**16
        assert outcome["skipped"] == [0, 0]


def test_a_bias_is_added_before_rounding(pool2: Pool) -> None:
    half = {"mixed_precision": "bf16"}
    alone = steps(SingleStrategy(device="cpu", **half), Ragged(), 1)
    for outcome in pool2.run(zero, ALL_SPLIT | half, Ragged(), 1, init=False):
        assert outcome["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def thaw(stage: str) -> str:
    """What is said of moments that some parameters have and others do not."""
    recipe = Ragged()
    with DeepSpeedStrategy(device="cpu", **STAGES[stage]) as strategy:
        model, weights = build(recipe.build_model, recipe.weights(), seed=0)
        adamw = lambda m: torch.optim.AdamW(m.parameters())  # noqa: E731
        model, optimizer = strategy.prepare(model, adamw, recipe.parallel_plan(model), weights)
        batch = next(iter(Loader(Words(), recipe.collate, BatchSchedule.constant(4, 4), seed=0)))
        strategy.forward_backward(model, batch, recipe, 0)
        strategy.step(optimizer)
        state = strategy.state(model, optimizer)
        del state.optimizer["1.up.weight"]
        with pytest.raises(UserError) as refused:
            strategy.load_state(model, optimizer, state)
        return str(refused.value)


@pytest.mark.parametrize("stage", STAGES)
def test_moments_of_some_are_refused(stage: str) -> None:
    assert thaw(stage).startswith(
        "1.up.weight has no optimizer state in the checkpoint and 0.weight has, but DeepSpeed"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 0}, "use 1, 2 or 3, or distributed.strategy: ddp"),
        ({"stage": 4}, "DeepSpeedStrategy(stage=4)"),
        ({"offload_optimizer": "disk"}, "offload_optimizer='disk'): should be none, cpu, or the path of a folder"),
        ({"offload_optimizer": "/local"}, "ZeRO stage 2 offloads to host memory only; use cpu, or stage=3"),
        ({"offload_parameters": "cpu"}, "ZeRO stage 2 keeps all weights on every device; use stage=3"),
        ({"mixed_precision": "pure_bf16"}, "pure_bf16 is not for strategy deepspeed; use bf16"),
        ({"cpu_checkpointing": True}, "names no blocks to recompute"),
        ({"stage": 3, "config": {"zero_optimization": {"stage": 2}}}, "leave one of them out"),
        ({"config": {"train_batch_size": 8, "zero_optimization": {"stage": 2}}}, "in a loop of your own leave it out"),
        ({"config": "no such file.json"}, "cannot be read: No such file"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: dict[str, Any], words: str) -> None:
    outcome = refusal(options, Ragged())
    assert words in outcome
    assert "\n" not in outcome


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match=r"pip install 'shoal\[deepspeed\]'"):
        DeepSpeedStrategy(device="cpu")


def test_the_loop_in_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (loop,) = blocks(Path(__file__).parents[2] / "docs" / "deepspeed.md", "python")
    monkeypatch.chdir(tmp_path)
    exec(loop, {})
    assert open_checkpoint(tmp_path / "there").shapes["0.weight"] == [256, 64]


def test_a_folder_named_deepspeed_is_not_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of JSONs, beside the config, which makes a package without files."""
    (tmp_path / "deepspeed").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "deepspeed")
    with pytest.raises(UserError, match=r"pip install 'shoal\[deepspeed\]'"):
        DeepSpeedStrategy(device="cpu")


def test_options_reach_the_engine() -> None:
    options = {"reduce_bucket_size": 1000, "sub_group_size": 2000, "contiguous_gradients": False}
    options |= {"stage3_prefetch_bucket_size": 3000, "stage3_max_reuse_distance": 4000}
    options |= {"aio": {"overlap_events": False, "queue_depth": 16}}
    with DeepSpeedStrategy(device="cpu", stage=3, **options) as strategy:
        strategy.prepare(nn.Linear(4, 4), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        engine: Any = strategy.engine
        assert engine.zero_reduce_bucket_size() == 1000
        assert engine.zero_sub_group_size() == 2000
        assert engine.zero_contiguous_gradients() is False
        assert engine.zero_prefetch_bucket_size() == 3000
        assert engine.zero_max_reuse_distance() == 4000
        assert engine._config.aio_config["overlap_events"] is False
        assert engine._config.aio_config["queue_depth"] == 16


def test_optimizers_that_need_whole_tensors_are_refused() -> None:
    model = nn.Linear(4, 4)
    with (
        DeepSpeedStrategy(device="cpu") as strategy,
        pytest.raises(UserError, match="Adafactor is not known to take one element at a time; use one of"),
    ):
        strategy.prepare(model, lambda m: torch.optim.Adafactor(m.parameters()), ParallelPlan())


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_of_another_model_is_refused(stage: int) -> None:
    other = nn.Linear(4, 4)
    with (
        DeepSpeedStrategy(device="cpu", stage=stage) as strategy,
        pytest.raises(UserError, match=r"^the SGD has parameters that are not the model's; build it from the model"),
    ):
        Loop(strategy).wrap(nn.Linear(4, 4), lambda _: torch.optim.SGD(other.parameters(), lr=0.1))


def by_hand(folder: str | None) -> list[float]:
    """A loop of the user's own, which saves and loads in between."""
    with DeepSpeedStrategy(device="cpu", stage=3) as strategy:
        torch.manual_seed(0)
        loop, losses = Loop(strategy), []
        model, _ = loop.wrap(Ragged().build_model().eval(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
        for step in range(4):
            for last in (False, True):
                with loop.accumulate(last=last):
                    ids = torch.arange(6).view(1, 6) + strategy.rank + last
                    loss = model(input=ids).logsumexp(-1).mean() / 2
                    loop.backward(loss)
            loop.step(max_norm=1.0)
            losses.append(loop.reduce(loss.detach()).item())
            if folder and step == 1:
                loop.save(folder, note="two")
                assert loop.load(folder) == {"note": "two"}
        return losses


def test_a_loop_by_hand_saves_and_goes_on(pool2: Pool, tmp_path: Path) -> None:
    undisturbed = pool2.run(by_hand, None, init=False)
    assert pool2.run(by_hand, str(tmp_path / "step"), init=False) == undisturbed
    assert len(set(undisturbed[0])) == 4


def test_what_its_loop_cannot_do_says_what_to_use() -> None:
    with DeepSpeedStrategy(device="cpu") as strategy:
        loop = Loop(strategy)
        model, _ = loop.wrap(nn.Linear(2, 2), lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        with pytest.raises(UserError, match=r"was not built by loop.wrap.* give wrap a function: loop.wrap"):
            loop.step(torch.optim.SGD(model.parameters(), lr=0.1))
        loop.backward(model(torch.ones(1, 2)).sum())
        loop.clip(max_value=0.1)
        with pytest.raises(UserError, match=r"max_value.*use "):
            loop.step()


def test_what_gathers_weights_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would compile DeepSpeed's hooks for every layer and size anew, and give up with pages of warnings."""
    compile, counters = torch.compile, torch._dynamo.utils.counters
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    outcome = zero({**ALL_SPLIT, "compile": True}, Narrow(), count=1)
    assert counters["frames"]["total"] < 100  # 49, and 213 with the hooks
    assert worst(outcome, steps(SingleStrategy(device="cpu"), Narrow(), 1)) < 2e-5


def test_blocks_that_are_recomputed_keep_their_inputs_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    on_cpu = torch.autograd.graph.save_on_cpu

    class Counted(on_cpu):  # type: ignore[misc,valid-type]
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            self.pack_hook, inner = (lambda t: packed.append(tuple(t.shape)) or inner(t)), self.pack_hook

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Counted)
    options = {"stage": 2, "cpu_checkpointing": True, "activation_checkpointing": "full"}
    recomputed = num_recomputed()
    with DeepSpeedStrategy(device="cpu", **options) as strategy:
        blocks = nn.Sequential(Block(), Block())
        sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
        loop = Loop(strategy)
        model, _ = loop.wrap(blocks, sgd)
        loop.backward(model(torch.randn(3, 16, requires_grad=True)).sum())
    assert num_recomputed() == recomputed + 2
    assert packed.count((3, 16)) == 2


# Whole runs

FROZEN = """
from toy_recipe import Toy


class Frozen(Toy):
    def build_model(self):
        model = super().build_model()
        model[0].requires_grad_(False)
        return model
"""
KEYS = ["training.global_batch_size=12", "training.batch_size=2", "model.dropout=0.0", "training.lr_scheduler=constant"]
ZERO = ["distributed.strategy=deepspeed", "distributed.deepspeed.stage3_param_persistence_threshold=0"]


def train_here(config: Path, overrides: list[str]) -> int:
    return train(load_run(config, [*KEYS, *overrides])).step


def test_frozen_layers_move_through_all_stages(toy: ToyRun, pool2: Pool) -> None:
    (toy.folder / "frozen_recipe.py").write_text(FROZEN)
    frozen = "recipe=frozen_recipe:Frozen"
    chain: list[tuple[int, list[str]]] = [
        (1, []),
        (2, [*ZERO, "distributed.zero_stage=3"]),
        (2, ["distributed.strategy=fsdp"]),
        (1, [*ZERO, "distributed.zero_stage=2"]),
        (2, [*ZERO, "distributed.zero_stage=1"]),
    ]
    for turn, (procs, keys) in enumerate(chain, start=1):
        overrides = [frozen, f"training.max_steps={2 * turn}", *keys]
        if procs == 1:
            train_here(toy.config, overrides)
        else:
            pool2.run(train_here, toy.config, overrides, init=False)
    train_here(toy.config, [frozen, f"experiment.output_dir={toy.folder}/alone"])
    assert toy.metrics() == pytest.approx(toy.metrics(output=toy.folder / "alone"), rel=1e-4)
    folders = (toy.output, toy.folder / "alone")
    moved, whole = (open_checkpoint(folder / "checkpoints" / "step_00000010").read() for folder in folders)
    assert moved.model.keys() == whole.model.keys()
    assert torch.equal(moved.model["0.weight"], whole.model["0.weight"])  # frozen
    for name, tensor in whole.model.items():
        assert torch.allclose(moved.model[name], tensor, rtol=1e-4, atol=1e-6), name
    assert moved.optimizer.keys() == whole.optimizer.keys() == {"3.weight", "3.bias"}


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 3)])
def test_a_run_goes_on_as_if_it_had_not_stopped(toy: ToyRun, pool2: Pool, stage: int) -> None:
    keys = [*ZERO, f"distributed.zero_stage={stage}", "checkpoint.async_save=true"]
    pool2.run(train_here, toy.config, [*keys, "training.max_steps=4"], init=False)
    pool2.run(train_here, toy.config, keys, init=False)
    pool2.run(train_here, toy.config, [*keys, f"experiment.output_dir={toy.folder}/undisturbed"], init=False)
    folders = (toy.output, toy.folder / "undisturbed")
    first, second = (open_checkpoint(folder / "checkpoints" / "step_00000010").read() for folder in folders)
    assert all(torch.equal(tensor, second.model[name]) for name, tensor in first.model.items())
    for name, slots in first.optimizer.items():
        assert all(torch.equal(tensor, second.optimizer[name][slot]) for slot, tensor in slots.items())
    assert toy.metrics() == toy.metrics(output=toy.folder / "undisturbed")


def test_a_stage_without_the_strategy_is_said(toy: ToyRun) -> None:
    toy.train("distributed.zero_stage=2", "training.max_steps=1")
    assert "not in force  distributed.zero_stage: the strategy is single" in (toy.output / "report.txt").read_text()


def test_the_report_says_what_is_in_force(toy: ToyRun, pool2: Pool) -> None:
    keys = ["distributed.strategy=deepspeed", "distributed.zero_stage=3", "distributed.offload=all"]
    keys += ["distributed.deepspeed.allgather_bucket_size=1000", "distributed.fsdp.forward_prefetch=true"]
    pool2.run(train_here, toy.config, keys, init=False)
    report = (toy.output / "report.txt").read_text()
    assert "ZeRO-3, optimizer, gradients and weights over 2 ranks, optimizer in the host's memory, weights in" in report
    assert "Sequential, 49 parameters" in report
    assert "distributed.deepspeed.allgather_bucket_size: ZeRO stage 3 gathers weights when they are needed" in report
    assert "distributed.fsdp: the strategy is deepspeed" in report


def test_weights_from_elsewhere_are_taken(toy: ToyRun) -> None:
    """Whose shapes are compared, though a parameter under ZeRO-3 is empty."""
    train_here(toy.config, ["training.max_steps=2"])
    source = toy.output / "checkpoints" / "step_00000002"
    keys = [*ZERO, "distributed.zero_stage=3", f"checkpoint.init_from={source}", "training.max_steps=1"]
    train_here(toy.config, [*keys, "training.learning_rate=1e-12", f"experiment.output_dir={toy.folder}/second"])
    target = toy.folder / "second" / "checkpoints" / "step_00000001"
    here, there = (open_checkpoint(folder).read().model for folder in (source, target))
    assert all(torch.allclose(tensor, here[name]) for name, tensor in there.items())


def test_an_infinite_loss_names_the_first_bad_module(toy: ToyRun, pool2: Pool) -> None:
    recipe = (toy.folder / "toy_recipe.py").read_text()
    spoiled = recipe.replace('return ((output - batch["y"]) ** 2).sum()', "return (output / 0).sum()")
    (toy.folder / "toy_recipe.py").write_text(spoiled)
    outcome = pool2.run(
        failing, toy.config, [*ZERO, "distributed.zero_stage=3", "training.max_skipped_steps=2"], init=False
    )
    assert all("the first bad value is the loss, though the model's output is finite" in text for text in outcome)


def failing(config: Path, overrides: list[str]) -> str:
    try:
        train_here(config, overrides)
    except UserError as error:
        return str(error)
    return ""


def test_the_local_rank_may_come_before_the_command(toy: ToyRun) -> None:
    result = CliRunner().invoke(app, ["--local_rank=1", "config", str(toy.config)])
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_under_its_own_launcher(toy: ToyRun) -> None:
    """Which puts --local_rank before the command."""
    world = urlsafe_b64encode(b'{"localhost": [0, 1]}').decode()
    launcher = [
        sys.executable,
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={world}",
        f"--master_port={free_port()}",
    ]
    command = ["--master_addr=127.0.0.1", "--module", "shoal", "train", str(toy.config)]
    keys = [*KEYS, *ZERO, "training.device=cpu"]  # the launcher shows its processes a GPU, if there is one
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*launcher, *command, *keys],
        cwd=toy.folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    assert "finished at step 10" in result.stdout
    assert "over 2 ranks" in (toy.output / "report.txt").read_text()
