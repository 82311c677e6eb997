"""Pipelines: whatever the schedule, gradients and scores are those of the plain model on the same micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.config.mesh import STAGES_PER_RANK, micro_batches_needed
from shoal.errors import UserError
from shoal.parallel.pipeline.pipeline import Pipeline
from shoal.parallel.pipeline.stages import count_stages, cut, stages_of, take_stages
from shoal.types import ParallelPlan

VOCABULARY, WIDTH, TIME = 13, 16, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.recompute = False

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self.compute, hidden, mask, use_reentrant=False)
        return self.compute(hidden, mask)

    def compute(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden + mask[..., None] * self.down(F.gelu(self.up(self.norm(hidden))))


class Blocks(nn.Module):
    """Takes tokens and a mask that all blocks look at."""

    plan = ParallelPlan(
        blocks=tuple(f"blocks.{i}" for i in range(8)),
        order=("embed", *(f"blocks.{i}" for i in range(8)), "norm", "head"),
        entry="tokens",
    )

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden))


def blocks(recompute: bool = False) -> tuple[nn.Module, ParallelPlan]:
    model = Blocks()
    for block in model.blocks:
        block.recompute = recompute
    return model, Blocks.plan


def llama() -> tuple[nn.Module, ParallelPlan]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    layers = tuple(f"model.layers.{i}" for i in range(4))
    order = ("model.embed_tokens", *layers, "model.norm", "lm_head")
    return LlamaForCausalLM(config), ParallelPlan(blocks=layers, order=order, entry="input_ids")


def linears() -> tuple[nn.Module, ParallelPlan]:
    """Under autocast, what it sends is bf16."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(7)]
    names = tuple(map(str, range(8)))
    return nn.Sequential(*layers, nn.Linear(WIDTH, VOCABULARY)), ParallelPlan(names, order=names, entry="input")


def batch(entry: str, number: int, rows: int = 3) -> tuple[dict[str, Any], Tensor]:
    """Inputs and labels of the `number`-th micro-batch in the world."""
    random = torch.Generator().manual_seed(number)
    labels = torch.randint(VOCABULARY, (rows, TIME), generator=random)
    if entry == "input":
        return {entry: torch.randn(rows, TIME, WIDTH, generator=random)}, labels
    tokens = torch.randint(VOCABULARY, (rows, TIME), generator=random)
    mask = torch.ones(rows, TIME, dtype=torch.long)
    mask[0, -1 - number % 2 :] = 0
    return {entry: tokens, "mask" if entry == "tokens" else "attention_mask": mask}, labels


def rows_of(number: int) -> int:
    return 3 - number % 2


def loss_of(output: Any, labels: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def autocast(build: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=build is linears)


def plain(build: Any, numbers: list[int], training: bool = True) -> Any:
    """Losses and gradients of one device."""
    torch.manual_seed(0)
    model, plan = build()
    losses = []
    for number in numbers:
        inputs, labels = batch(plan.entry, number, rows_of(number))
        with autocast(build):
            loss = loss_of(model.train(training)(**inputs), labels)
        loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters()}


def piped(build: Any, schedule: str, sizes: tuple[int, int, int], nums: tuple[int, ...]) -> dict[str, Any]:
    """The same on a mesh of pp × dp_replicate × dp_shard: what this rank has of it after the last of some steps."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    pp, data_size = sizes[0], sizes[1] * sizes[2]
    rank, data_rank = mesh.get_local_rank("pp"), dist.get_rank() % data_size
    torch.manual_seed(0)
    model, plan = build()
    mine = stages_of(rank, pp, schedule)
    stages = take_stages(model, plan, cut(model, plan, count_stages(pp, schedule)), mine)
    owned = [name for name, _ in model.named_parameters()]
    if data_size > 1:
        data_mesh = mesh["dp_replicate", "dp_shard"] if sizes[1] > 1 else mesh["dp_shard"]
        for stage in stages:
            for name in plan.blocks:
                if [*stage.get_submodule(name).parameters()]:
                    fully_shard(stage.get_submodule(name), mesh=data_mesh)
            fully_shard(stage, mesh=data_mesh)
            for module in stage.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
    pipeline = Pipeline(stages, schedule, mesh.get_group("pp"), torch.device("cpu"), plan.entry)
    result: dict[str, Any] = {"owned": owned}
    for num in nums:
        numbers = [data_rank * num + i for i in range(num)]
        batches = [batch(plan.entry, number, rows_of(number)) for number in numbers]
        result["scored"], result["entered"] = scored, entered = [], []

        def score(output: Any, index: int, batches: Any = batches, scored: list[int] = scored) -> Tensor:
            scored.append(index)
            return loss_of(output, batches[index][1])

        def around(index: int, entered: list[int] = entered) -> Any:
            entered.append(index)
            return autocast(build)

        model.zero_grad()
        inputs = [one for one, _ in batches]
        result["losses"] = [loss.item() for loss in pipeline.step(inputs, score, around)]
    result["gradients"] = {name: _whole(p.grad) for name, p in model.named_parameters()}
    result["scored"], result["entered"] = scored[:], entered[-num * len(stages) :]
    result["types"] = {shape[1] for stage in pipeline.stages for shape in stage.sent.values()}
    model.eval()
    result["evaluated"] = [loss.item() for loss in pipeline.evaluate(inputs[:1], score, around)]
    result["evaluated"] += [loss.item() for loss in pipeline.evaluate(inputs, score, around)]
    result["names"] = [name for name, _ in model.named_parameters()]
    return result


def _whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def check(result: list[dict[str, Any]], build: Any, sizes: tuple[int, int, int], num: int) -> None:
    data_size = sizes[1] * sizes[2]
    losses, gradients = plain(build, [*range(data_size * num)])
    seen: set[str] = set()
    for one in result:
        assert one["owned"] == one["names"] == [*one["gradients"]]
        assert sorted(one["entered"]) == sorted([*range(num)] * (len(one["entered"]) // num))
        seen |= {*one["owned"]}
        for name, gradient in one["gradients"].items():
            wanted = gradients[name]
            assert gradient is wanted is None or (gradient - wanted).norm() / wanted.norm() < 1e-5, name
    assert seen == {*gradients}
    scoring = [one for one in result if one["losses"]]
    assert len(scoring) == data_size
    assert [loss for one in scoring for loss in one["losses"]] == pytest.approx(losses, rel=1e-5)
    assert all(one["scored"] == [*range(num)] for one in scoring)
    losses, _ = plain(build, [*range(data_size * num)], training=False)
    for rank, one in enumerate(scoring):
        own = losses[rank * num : (rank + 1) * num]
        assert one["evaluated"] == pytest.approx([own[0], *own], rel=1e-5)
    assert not any(one["evaluated"] for one in result if not one["losses"])


def recomputing() -> tuple[nn.Module, ParallelPlan]:
    return blocks(recompute=True)


def half_frozen() -> tuple[nn.Module, ParallelPlan]:
    """Whole stages have nothing to learn, nor anything to send back."""
    model, plan = blocks()
    for module in (model.embed, *model.blocks[:5]):
        module.requires_grad_(False)
    return model, plan


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
@pytest.mark.parametrize(
    ("build", "sizes", "nums"),
    [
        (blocks, (4, 1, 1), (5, 11)),  # another number in the second step, and one that does not divide
        # Also fewer than stages, as in a short step at the end of the data.
        pytest.param(recomputing, (2, 1, 2), (4, 1), marks=pytest.mark.slow),
        pytest.param(llama, (2, 2, 1), (5,), marks=pytest.mark.slow),
        pytest.param(llama, (2, 1, 2), (4,), marks=pytest.mark.slow),
        pytest.param(blocks, (2, 1, 2), (5,), marks=pytest.mark.slow),
        pytest.param(blocks, (2, 2, 1), (4,), marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_plain_model(
    pool4: Pool, schedule: str, build: Any, sizes: tuple[int, int, int], nums: tuple[int, ...]
) -> None:
    check(pool4.run(piped, build, schedule, sizes, nums), build, sizes, nums[-1])


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("build", [linears, half_frozen])
def test_types_and_frozen_stages_are_as_they_are(pool4: Pool, schedule: str, build: Any) -> None:
    result = pool4.run(piped, build, schedule, (4, 1, 1), (4,))
    check(result, build, (4, 1, 1), 4)
    assert result[0]["types"] == {torch.bfloat16 if build is linears else torch.float32}


def refusals() -> list[str]:
    """On two ranks: what a pipeline says to each of some mistakes."""
    group, cpu, said = dist.group.WORLD, torch.device("cpu"), []

    def attempt(*sizes: tuple[int, int], score: Any = None, entry: str | None = "x", stage: Any = nn.Linear) -> None:
        try:
            pipeline = Pipeline([Named(stage(3, 3))], "1f1b", group, cpu, entry)
            pipeline.step([{"x": torch.zeros(size)} for size in sizes], score or (lambda output, index: output.sum()))
        except UserError as error:
            said.append(str(error))

    attempt((2, 3), (2, 4))
    attempt((2, 3), (1, 3), entry=None)
    attempt((2, 3), (1, 3), entry="y")
    return said


class Named(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_what_a_schedule_cannot_do_is_refused(pool2: Pool) -> None:
    ragged, no_entry, other_entry = pool2.run(refusals)[0]
    assert "ragged data: samples of a pipeline have the shapes [4] and [3]" in ragged
    assert "plan has no entry" in no_entry
    assert "the plan's entry is 'y', but the recipe's inputs have no batch of that name; they have x" in other_entry
    assert [micro_batches_needed(schedule, 4) for schedule in STAGES_PER_RANK] == [1, 4, 1, 1]


def test_a_mistake_inside_of_a_stage_is_told_as_it_is(lonely: None) -> None:
    pipeline = Pipeline([Named(nn.Linear(3, 3))], "gpipe", dist.group.WORLD, torch.device("cpu"), "x")
    with pytest.raises(UserError, match=r"loss has shape \[2, 3\]; it should be one number"):
        pipeline.step([{"x": torch.zeros(2, 3)}], lambda output, index: output)


def test_finding_out_what_travels_leaves_no_trace(lonely: None) -> None:
    """One forward more than there are micro-batches, once per shape; buffers and random numbers do not notice."""
    model = Named(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)))
    forwards: list[int] = []
    model.inner[0].register_forward_hook(lambda *_: forwards.append(1))
    pipeline = Pipeline([model], "gpipe", dist.group.WORLD, torch.device("cpu"), "x")
    for _ in range(2):
        torch.manual_seed(0)
        drawn = [loss.item() for loss in pipeline.step([{"x": torch.ones(2, 3)}] * 2, lambda out, index: out.sum())]
    assert model.inner[1].num_batches_tracked == 4
    assert len(forwards) == 5
    torch.manual_seed(0)
    assert drawn == [model.inner(torch.ones(2, 3)).sum().item() for _ in range(2)]


@pytest.fixture
def lonely() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Clock:
    """The time on one rank. Work takes time; what arrives from another rank brings the time at which it was sent."""

    def __init__(self) -> None:
        self.now = 0.0

    def work(self, sent: Tensor, seconds: float) -> Tensor:
        """Returns what is sent on: the time at which the work is done, which waits for what was sent."""
        self.now = max(self.now, sent.max().item()) + seconds
        return torch.full_like(sent, self.now)


class TimedInput(torch.autograd.Function):
    """The part of a stage that goes from its input to its output, and back from its output's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return clock.work(x, seconds)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.clock.work(gradient, ctx.seconds), None, None


class TimedWeight(torch.autograd.Function):
    """The gradient of a stage's weight, which schedules may compute later."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return torch.zeros_like(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.clock.work(gradient, ctx.seconds), None, None


class TimedStage(nn.Module):
    """Takes `seconds` for the forward, as many for its input's gradient and as many for its weight's."""

    def __init__(self, clock: Clock, seconds: float):
        super().__init__()
        self.clock, self.seconds, self.weight = clock, seconds, nn.Parameter(torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return TimedInput.apply(x, self.clock, self.seconds) + TimedWeight.apply(self.weight, self.clock, self.seconds)


def seconds_of_a_step(schedule: str, num: int) -> float:
    """Returns when this rank is done. All schedules have the same work to do: two stages have half the size each."""
    held = stages_of(dist.get_rank(), dist.get_world_size(), schedule)
    clock = Clock()
    stages = [TimedStage(clock, 1 / len(held)) for _ in held]
    pipeline = Pipeline(stages, schedule, dist.group.WORLD, torch.device("cpu"), "x")
    inputs = [{"x": torch.zeros(1, 1, requires_grad=True)} for _ in range(num)]  # or the first stage has less to do
    pipeline.step(inputs, lambda output, index: output.sum())  # the first one also finds out shapes
    clock.now = 0.0
    pipeline.step(inputs, lambda output, index: output.sum())
    return clock.now


@pytest.mark.parametrize(("schedule", "idle"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 1 / 2), ("zbv", 1 / 6)])
def test_a_step_takes_what_the_schedule_promises(pool4: Pool, schedule: str, idle: float) -> None:
    """A micro-batch takes a rank 3 seconds, of a clock that is only counted.

    While the first one comes and the last one goes, p - 1 ranks' time is lost: all of it if each has one stage, half of
    it with two, and a forward of half a stage, a sixth, if the gradients of weights fill the gaps (from 2p - 1
    micro-batches on).
    """
    num, ranks = 8, 4
    taken = max(pool4.run(seconds_of_a_step, schedule, num))
    assert taken == pytest.approx(3 * (num + idle * (ranks - 1)), rel=0.01)
