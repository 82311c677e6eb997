"""A loop written by hand computes on two processes what it computes on one."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.checkpoint import DamagedCheckpoint
from shoal.errors import UserError
from shoal.strategies import DDPStrategy, DistributedStrategy, FSDPStrategy, Loop, SingleStrategy

Pair = namedtuple("Pair", "a b")
STEPS, ROWS = 4, 12


class Net(nn.Module):
    """With a branch that some batches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.head, self.branch = nn.Linear(16, 1), nn.Linear(16, 1)
        self.seen = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        self.seen += 1
        hidden = self.body(x)
        return self.head(hidden) + self.branch(hidden) if branch else self.head(hidden)


def build() -> Net:
    torch.manual_seed(3)
    return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 4, generator=generator), 3 * torch.randn(ROWS, 1, generator=generator)


def take_steps(
    loop: Loop,
    module: nn.Module,
    steps: range,
    accumulation: int = 1,
    max_norm: float | None = 0.5,
    branch_on: tuple[int, ...] = (0, 1),
) -> list[dict[str, Any]]:
    """Returns what each update saw: the gradients, and their norm."""
    strategy, seen = loop.strategy, []
    for step in steps:
        rows = [part.tensor_split(accumulation) for part in batch(step)]
        for index, (x, y) in enumerate(zip(*rows, strict=True)):
            x, y = (part.tensor_split(strategy.data_size)[strategy.data_rank] for part in (x, y))
            with loop.accumulate(last=index == accumulation - 1):
                with loop.autocast():
                    loss = nn.functional.mse_loss(module(x, strategy.rank in branch_on), y)
                loop.backward(loss / accumulation)
        gradients = {name: p.grad.clone() for name, p in loop.model.named_parameters() if p.grad is not None}
        seen.append({"gradients": gradients, "norm": loop.step(max_norm=max_norm).grad_norm})
    return seen


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def train(strategy: DistributedStrategy, accumulation: int = 1, **options: Any) -> dict[str, Any]:
    with strategy:
        loop = Loop(strategy)
        module, _ = loop.wrap(build(), sgd)
        seen = take_steps(loop, module, range(STEPS), accumulation, **options)
        weights = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
        return {"seen": seen, "weights": weights, "kind": type(module).__name__}


def train_ddp(accumulation: int, **options: Any) -> dict[str, Any]:
    return train(DDPStrategy(device="cpu", **options), accumulation)


@pytest.mark.parametrize(
    ("accumulation", "options"),
    [(1, {}), (3, {}), (3, {"static_graph": True}), (3, {"gradient_as_bucket_view": False})],
    ids=str,
)
def test_ddp_equals_one_process_on_the_whole_batch(pool2, accumulation, options):
    alone = train(SingleStrategy(device="cpu"))
    for ranks in pool2.run(train_ddp, accumulation, **options):
        assert (alone["kind"], ranks["kind"]) == ("Net", "DistributedDataParallel")
        for mine, theirs in zip(alone["seen"], ranks["seen"], strict=True):
            torch.testing.assert_close(theirs["gradients"], mine["gradients"], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(theirs["norm"], mine["norm"], rtol=1e-5, atol=0)
        torch.testing.assert_close(ranks["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
    assert max(update["norm"] for update in alone["seen"]) > 0.5, "nothing was clipped"


def train_with_a_branch_on_one_rank() -> dict[str, Any]:
    return train(DDPStrategy(device="cpu", find_unused_parameters=True), branch_on=(1,))


def test_parameters_unused_on_one_rank(pool2):
    first, second = pool2.run(train_with_a_branch_on_one_rank)
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    assert not torch.equal(first["weights"]["branch.weight"], build().branch.weight)


def count_exchanges(compiled: bool) -> list[int]:
    """How often a gradient bucket is sent in each of three steps of four micro-batches."""
    counts: Counter[int] = Counter()
    step = 0

    def counting(state: Any, bucket):  # DDP refuses annotations that are strings
        counts[step] += 1
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    with DDPStrategy(device="cpu") as strategy:
        loop = Loop(strategy)
        module, _ = loop.wrap(build(), sgd)
        module.register_comm_hook(None, counting)
        if compiled:
            module = torch.compile(module, backend="eager")
        assert type(loop.model) is Net
        for step in range(3):  # noqa: B007
            take_steps(loop, module, range(1), accumulation=4)
    return [counts[step] for step in range(3)]


@pytest.mark.parametrize("compiled", [False, True])
def test_accumulation_exchanges_once(pool2, compiled):
    assert pool2.run(count_exchanges, compiled) == [[1, 1, 1]] * 2


def attributes() -> dict[str, Any]:
    with DDPStrategy(device="cpu") as strategy:
        strategy.barrier()
        loop, mine = Loop(strategy), torch.tensor([1.0 + strategy.rank, 5.0 - strategy.rank])
        assert strategy.mesh is not None
        return {
            "who": (strategy.rank, strategy.world_size, strategy.world.local_rank, strategy.is_main_process),
            "data": (strategy.data_rank, strategy.data_size),
            "device": strategy.device.type,
            "mesh": strategy.mesh["dp_replicate"].size(),
            "reduced": {op: loop.reduce(mine, op).tolist() for op in ("sum", "mean", "max")},
            "default": loop.reduce(mine).tolist(),
            "sum over data": strategy.sum_over_data(mine).tolist(),
            "mine": mine.tolist(),
            "highest": strategy.max_over_ranks(10 * strategy.rank),
            "any rank": (strategy.any_rank(strategy.rank == 1), strategy.any_rank(False)),
        }


@pytest.mark.parametrize("init", [True, False], ids=["in a group that is there", "in a group of its own"])
def test_who_and_where(pool2, init):
    for rank, result in enumerate(pool2.run(attributes, init=init)):
        assert result == {
            "who": (rank, 2, rank, rank == 0),
            "data": (rank, 2),
            "device": "cpu",
            "mesh": 2,
            "reduced": {"sum": [3, 9], "mean": [1.5, 4.5], "max": [2, 5]},
            "default": [1.5, 4.5],
            "sum over data": [3, 9],
            "mine": [1 + rank, 5 - rank],
            "highest": 10,
            "any rank": (True, False),
        }


def test_one_process_has_the_same_verbs():
    for strategy in (SingleStrategy(device="cpu"), DDPStrategy(device="cpu")):
        with strategy:
            loop = Loop(strategy)
            assert (strategy.rank, strategy.world_size, strategy.data_size, strategy.is_main_process) == (0, 1, 1, True)
            assert loop.reduce(torch.tensor(3.0), "mean") == strategy.max_over_ranks(3) == 3
            strategy.barrier()
            module, _ = loop.wrap(build(), lambda model: torch.optim.SGD(model.parameters(), lr=1.0))
            assert loop.model is module
            before = [p.detach().clone() for p in module.parameters()]
            loop.backward(module(batch(0)[0]).square().mean())
            loop.clip(max_norm=1e-3)
            assert loop.step().grad_norm > 1e-2
            moved = [p.detach() - old for p, old in zip(module.parameters(), before, strict=True)]
            assert torch.nn.utils.get_total_norm(moved).item() == pytest.approx(1e-3, rel=1e-2)
            loop.backward(module(batch(0)[0]).square().mean())
            norm = loop.step().grad_norm.item()  # a clip is for one step
            moved = [p.detach() - old for p, old in zip(module.parameters(), before, strict=True)]
            assert torch.nn.utils.get_total_norm(moved).item() == pytest.approx(norm, rel=0.1)
            with pytest.raises(UserError, match="use sum, mean or max"):
                loop.reduce(torch.ones(()), "avg")


def test_to_device_finds_tensors_however_nested():
    strategy = SingleStrategy(device="cpu")
    strategy.device = torch.device("meta")
    t = torch.ones(2)
    given = {"x": t, "list": [t, (t, 1)], "pair": Pair(t, {"deep": [t]}), "order": OrderedDict(a=t), "text": "kept"}
    moved = Loop(strategy).to_device(given)
    assert moved["text"] == "kept"
    assert moved["list"][1][1] == 1
    assert type(moved["pair"]) is Pair
    assert type(moved["order"]) is OrderedDict
    assert type(moved["list"][1]) is tuple
    found = [moved["x"], moved["list"][0], moved["list"][1][0], moved["pair"].a, moved["pair"].b["deep"][0]]
    assert all(tensor.is_meta for tensor in [*found, moved["order"]["a"]])
    assert not t.is_meta


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_optimizers_that_are_not_fused_clip_and_skip_too(kind, precision):
    """Against torch's own: scale, unscale, clip, step."""
    loop, theirs = Loop(SingleStrategy(device="cpu", mixed_precision=precision)), build()
    ours, _ = loop.wrap(build(), lambda model: kind(model.parameters(), lr=0.1))
    reference = kind(theirs.parameters(), lr=0.1)
    for step in range(3):
        x, y = batch(step)
        loop.backward(nn.functional.mse_loss(ours(x), y))
        info = loop.step(max_norm=0.5)
        nn.functional.mse_loss(theirs(x), y).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        assert not info.skipped
        torch.testing.assert_close(info.grad_norm, norm)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)
    loop.backward(ours(batch(0)[0]).sum() * float("inf"))
    assert loop.step(max_norm=0.5).skipped
    torch.testing.assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()), rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in ours.parameters())


# Checkpoints


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.8, 0.9), fused=True)


def train_between(path: str, first: int, last: int, kind: str) -> dict[str, Any]:
    """Goes on from `<path>/<first>`, if it is not the start, to `<path>/<last>`."""
    with DDPStrategy(device="cpu") if kind == "ddp" else SingleStrategy(device="cpu") as strategy:
        loop = Loop(strategy)
        module, optimizer = loop.wrap(build(), adamw)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        if first:
            state = loop.load(f"{path}/{first}")
            assert state["step"] == first
            scheduler.load_state_dict(state["scheduler"])
        for step in range(first, last):
            take_steps(loop, module, range(step, step + 1))
            scheduler.step()
        state = {"step": last, "scheduler": scheduler.state_dict(), "note": ["ü", None, 0.1, True]}
        loop.save(f"{path}/{last}", **state)
        weights = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
        return {"weights": weights, "lr": optimizer.param_groups[0]["lr"]}


@pytest.mark.parametrize(("first", "second"), [("single", "ddp"), ("ddp", "single"), ("ddp", "ddp")])
def test_a_checkpoint_moves_between_one_process_and_two(pool2, tmp_path, first, second):
    def run(folder: str, kind: str, start: int, end: int) -> dict[str, Any]:
        where = str(tmp_path / folder)
        if kind == "single":
            return train_between(where, start, end, kind)
        one, other = pool2.run(train_between, where, start, end, kind)
        torch.testing.assert_close(one["weights"], other["weights"], rtol=0, atol=0)
        return one

    undisturbed = run("whole", "single", 0, 4)
    run("parts", first, 0, 2)
    resumed = run("parts", second, 2, 4)
    torch.testing.assert_close(resumed["weights"], undisturbed["weights"], rtol=1e-4, atol=1e-5)
    assert resumed["lr"] == undisturbed["lr"] == 0.05 / 16
    manifest = json.loads((tmp_path / "parts/4/manifest.json").read_text())
    names = {name.removeprefix("model/") for name in manifest["tensors"] if name.startswith("model/")}
    assert names == set(build().state_dict())
    assert json.loads((tmp_path / "parts/4/trainer.json").read_text())["note"] == ["ü", None, 0.1, True]


def one_process(model: nn.Module, *builders: Any) -> Loop:
    loop = Loop(SingleStrategy(device="cpu"))
    loop.wrap(model, *builders)
    return loop


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Loop, Path]:
    """A loop after one step, and the checkpoint that it wrote."""
    loop, path = one_process(build(), adamw), tmp_path / "saved"
    take_steps(loop, loop.model, range(1))
    loop.save(path, step=1)
    return loop, path


def test_another_model_or_optimizer_is_refused(saved):
    _, path = saved
    other = nn.Linear(2, 2)
    before = other.weight.clone()
    with pytest.raises(
        UserError, match=r"checkpoint of another model: bias is absent in the file and \[2\] in the model.*more\)"
    ) as refusal:
        one_process(other, lambda model: torch.optim.SGD(model.parameters())).load(path)
    assert "\n" not in str(refusal.value)
    assert torch.equal(other.weight, before)

    def halves(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": model.body.parameters()}, {"params": model.head.parameters()}])

    loop = one_process(build(), lambda model: torch.optim.SGD(model.parameters()))
    with pytest.raises(UserError, match="AdamW in 1 parameter groups, but this is SGD in 1"):
        loop.load(path)
    torch.testing.assert_close(loop.model.state_dict(), build().state_dict(), rtol=0, atol=0)
    loop = one_process(build(), halves)
    with pytest.raises(UserError, match="but this is AdamW in 2"):
        loop.load(path)
    torch.testing.assert_close(loop.model.state_dict(), build().state_dict(), rtol=0, atol=0)
    with pytest.raises(UserError, match="there is no folder"):
        one_process(build(), adamw).load(path / "nowhere")


def test_a_damaged_checkpoint_is_refused(saved):
    _, path = saved
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    loop = one_process(build(), adamw)
    with pytest.raises(DamagedCheckpoint, match="does not match its digest"):
        loop.load(path)
    torch.testing.assert_close(loop.model.state_dict(), build().state_dict(), rtol=0, atol=0)


def test_only_a_checkpoint_is_replaced(saved, tmp_path):
    loop, path = saved
    loop.save(path, step=2)
    assert loop.load(path) == {"step": 2}
    thesis = tmp_path / "folder" / "thesis.tex"
    thesis.parent.mkdir()
    loop.save(thesis.parent)  # an empty folder is nobody's
    thesis.parent.rename(tmp_path / "moved")
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    for occupied in (thesis.parent, thesis):
        with pytest.raises(UserError, match="exists and is not a checkpoint"):
            loop.save(occupied)
    assert thesis.read_text() == "years of work"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"best": torch.ones(1)}, r"state\['best'\] is a Tensor.*\.item\(\)"),
        ({"scheduler": {"milestones": {3: 1}}}, r"state\['scheduler'\]\['milestones'\] has the key 3"),
        ({"list": [0, {1}]}, r"state\['list'\]\[1\] is a set"),
    ],
)
def test_state_that_would_not_come_back_is_refused(saved, tmp_path, state, message):
    with pytest.raises(UserError, match=message):
        saved[0].save(tmp_path / "new", **state)
    assert not (tmp_path / "new").exists()


def load_on_two(path: str) -> str:
    """Rank 1 alone sees a broken file."""
    with DDPStrategy(device="cpu") as strategy:
        loop = Loop(strategy)
        loop.wrap(build(), adamw)
        try:
            loop.load(Path(path) if strategy.rank == 0 else Path(path, "elsewhere"))
        except DamagedCheckpoint as damage:
            return str(damage)
        return "loaded"


def test_what_one_rank_cannot_read_no_rank_loads(pool2, saved):
    first, second = pool2.run(load_on_two, str(saved[1]))
    assert "another rank cannot read it" in first
    assert "elsewhere" in second


def test_a_checkpoint_of_the_trainer_opens_in_a_loop_by_hand(toy):
    from shoal.config import load_run

    toy.train()
    run = load_run(toy.config, ())
    recipe = run.recipe_type(run.recipe_config)
    loop, path = Loop(SingleStrategy(device="cpu")), toy.output / "checkpoints" / "step_00000010"
    model, optimizer = loop.wrap(
        recipe.build_model(), lambda model: torch.optim.AdamW(recipe.param_groups(model), fused=True)
    )
    state = loop.load(path)
    assert {"step": 10, "samples": 40, "skipped_steps": 0}.items() <= state.items()
    stored = load_file(path / "model.safetensors")
    torch.testing.assert_close(model.state_dict(), stored, rtol=0, atol=0, check_device=False)
    assert all(optimizer.state[p]["step"] == 10 for p in model.parameters())


def test_a_strategy_takes_one_loop():
    strategy = SingleStrategy(device="cpu")
    Loop(strategy).wrap(build(), sgd)
    with pytest.raises(UserError, match=r"or its strategy, has a model already; .* make another strategy"):
        Loop(strategy).wrap(build(), sgd)


@pytest.mark.parametrize(
    "verb",
    [
        lambda loop: loop.backward(torch.ones((), requires_grad=True)),
        lambda loop: loop.accumulate(last=True),
        lambda loop: loop.clip(max_norm=1.0),
        lambda loop: loop.step(),
        lambda loop: loop.zero_grad(),
        lambda loop: loop.add(sgd(build())),
        lambda loop: loop.save("nowhere"),
        lambda loop: loop.load("nowhere"),
        lambda loop: loop.model,
    ],
)
def test_verbs_before_wrap_are_refused(tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^the loop has no model yet; call loop.wrap\(model, build_optimizer\) first$"):
        verb(Loop(SingleStrategy(device="cpu")))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("limit", [0, 0.0, -1.0, float("nan")])
def test_limits_that_would_leave_nothing_are_refused(limit):
    loop = one_process(build(), sgd)
    for key, verb in (("max_norm", loop.step), ("max_norm", loop.clip), ("max_value", loop.clip)):
        with pytest.raises(UserError, match=f"^{key} = {limit}: a limit has to be above 0; leave it out"):
            verb(**{key: limit})
    take_steps(loop, loop.model, range(1), max_norm=None)


def test_two_optimizers_that_share_a_parameter_are_refused():
    def of_the_head(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.head.parameters())

    message = "^two optimizers, SGD and Adam, have the parameter head.weight, and both would step it"
    with pytest.raises(UserError, match=message):
        one_process(build(), sgd, of_the_head)
    loop = one_process(build(), sgd)
    with pytest.raises(UserError, match=message):
        loop.add(of_the_head(loop.model))
    loop = one_process(build(), of_the_head)
    loop.add(torch.optim.SGD(loop.model.body.parameters()))


def test_a_checkpoint_of_one_optimizer_does_not_open_with_two(saved):
    _, path = saved
    halves = [lambda m: torch.optim.AdamW(m.body.parameters()), lambda m: torch.optim.AdamW(m.head.parameters())]
    loop = one_process(build(), *halves)
    with pytest.raises(UserError, match="was saved with 1 optimizers, but the loop has 2"):
        loop.load(path)


@pytest.mark.parametrize("fused", [True, False])
def test_weights_in_bf16_are_clipped_and_stepped(fused):
    loop = Loop(SingleStrategy(device="cpu"))
    builder = lambda m: torch.optim.SGD(m.parameters(), lr=1.0, fused=fused)  # noqa: E731
    model, _ = loop.wrap(nn.Linear(4, 1, bias=False).bfloat16(), builder)
    before = model.weight.detach().clone()
    loop.backward(model(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
    info = loop.step(max_norm=1.0)
    assert info.grad_norm.dtype == torch.float32
    assert (before - model.weight.detach()).float().norm().item() == pytest.approx(1.0, rel=0.02)


def step_two_optimizers_in_fp16() -> list[float]:
    """Under DDP, whose gradients are never freed; the second step of the first optimizer overflows."""
    with DDPStrategy(device="cpu", mixed_precision="fp16") as strategy:
        loop = Loop(strategy)
        (model,) = loop.wrap(build())
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in (loop.model.body, loop.model.head)]
        loop.add(torch.optim.SGD(loop.model.branch.parameters(), lr=0.0))
        optimizers.append(loop._optimizers[0])
        scales = []
        for factor in (1.0, float("inf"), 1.0):
            loop.backward(model(batch(0)[0]).square().mean() * factor)
            for optimizer in optimizers:
                loop.step(optimizer)
            scales.append(strategy._loss_scale.scale.item())
        return scales


def test_the_loss_scale_of_several_optimizers_is_halved_once(pool2):
    assert pool2.run(step_two_optimizers_in_fp16, init=False) == [[2.0**16, 2.0**15, 2.0**15]] * 2


def mix_verbs_in_fp16(kind: str) -> dict[str, Any]:
    """Returns what each mixture of the loop's verbs and torch's does to a model: the error, or the moved distance."""
    presets: dict[str, Any] = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}
    outcomes: dict[str, Any] = {}
    for how in ("plain plain", "loop loop", "loop plain", "plain loop"):
        with presets[kind](device="cpu", mixed_precision="fp16") as strategy:
            loop = Loop(strategy)
            (model,) = loop.wrap(build())
            optimizers = [torch.optim.SGD(p.parameters(), lr=0.1) for p in (loop.model.body, loop.model.head)]
            before = loop.model.head.weight.detach().clone()
            backward, step = how.split()
            try:
                for _ in range(2):
                    with loop.autocast():
                        loss = model(batch(0)[0]).square().mean()
                    loop.backward(loss) if backward == "loop" else loss.backward()
                    for optimizer in optimizers:
                        loop.step(optimizer) if step == "loop" else optimizer.step()
                        optimizer.zero_grad()
                outcomes[how] = not torch.equal(before, loop.model.head.weight.detach())
            except UserError as error:
                outcomes[how] = str(error)
    return outcomes


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_in_fp16_half_of_the_verbs_are_refused(pool2, kind):
    for outcomes in pool2.run(mix_verbs_in_fp16, kind, init=False):
        assert outcomes["plain plain"] is outcomes["loop loop"] is True
        assert outcomes["loop plain"].endswith("use loop.step(optimizer)")
        assert outcomes["plain loop"].endswith("use loop.backward(loss)")


def test_a_builder_that_takes_the_model_for_parameters_is_told():
    with pytest.raises(UserError, match=r"write lambda model: torch.optim.AdamW\(model.parameters\(\)\)"):
        Loop(SingleStrategy(device="cpu")).wrap(build(), lambda parameters: torch.optim.AdamW(parameters))
