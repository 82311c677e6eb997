"""State of modules that is not a parameter: every step starts with that of the first data-parallel rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from strategies.nets import (
    PLAN,
    SLOW_ZERO_1,
    ZERO_1,
    ZERO_3,
    Net,
    Points,
    adamw,
    make,
    micro_batch,
    needs_deepspeed,
    rows,
    squares,
    whole,
)
from torch import Tensor, nn

from shoal.checkpoint import open_checkpoint, write_checkpoint
from shoal.errors import UserError
from shoal.strategies import DistributedStrategy, Loop
from shoal.types import MicroBatch, Weights

BUILT = Weights("built")
LAYOUTS = ["ddp", "fsdp", "fsdp_no_shard", ZERO_1, ZERO_3]
SOME_LAYOUTS = ["ddp", "fsdp", ZERO_3, SLOW_ZERO_1, pytest.param("fsdp_no_shard", marks=pytest.mark.slow)]
STEPS = 6


class LateMean(nn.Module):
    """Adds a running mean of what it sees to its output, from the fourth forward on: no first step shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean = nn.Buffer(torch.zeros((), dtype=torch.int64)), nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls > 3:
                self.mean = self.mean.lerp(x.detach().mean(0), 0.5)  # another tensor, as many models write it
        return x + self.mean


class LateNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.late = LateMean()

    def forward(self, x: Tensor) -> Tensor:
        return self.late(super().forward(x))


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind()


def batches(strategy: DistributedStrategy, step: int, count: int = 2) -> list[MicroBatch]:
    """Returns this rank's micro-batches of a step; other ranks have other samples."""
    seeds = range(count * (step * strategy.data_size + strategy.data_rank), 1_000_000)
    return [micro_batch(*rows(4, seed)) for seed, _ in zip(seeds, range(count), strict=False)]


def watch_starts(model: nn.Module, watched: str, path: str) -> list[Tensor]:
    """Returns a list that gets a tensor's value before each forward of the module that has it."""
    seen: list[Tensor] = []
    module = model.get_submodule(watched)
    module.register_forward_pre_hook(lambda module, inputs: seen.append(getattr(module, path).detach().clone()))
    return seen


def train(
    kind: str, net: type[nn.Module], folder: Path | None = None, stop: int = STEPS, resume: Path | None = None
) -> dict[str, Any]:
    """Trains from step 0, or from the checkpoint `resume`; with `folder` it saves after every step."""
    with make(kind) as strategy:
        model, optimizer = strategy.prepare(build(net), adamw, PLAN, BUILT)
        first = 0
        if resume is not None:
            checkpoint = open_checkpoint(resume)
            strategy.load_state(model, optimizer, checkpoint.checked_state(strategy.held()))
            first = checkpoint.trainer["step"]
        starts = watch_starts(model, "late", "mean")
        for step in range(first, stop):
            strategy.forward_backward(model, batches(strategy, step), Points(), step)
            strategy.step(optimizer)
            if folder:
                write_checkpoint(folder / str(step + 1), strategy.state(model, optimizer), {"step": step + 1}, {})
        return {"starts": starts[-2 * (stop - first) :: 2], "end": whole(strategy.state(model, optimizer).model)}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("kind", SOME_LAYOUTS)
def test_a_buffer_that_begins_to_move_late(tmp_path: Path, pool2: Pool, kind: str) -> None:
    """All ranks start a step with rank 0's value; saving changes nothing; a resumed run ends as an undisturbed one."""
    first, second = pool2.run(train, kind, LateNet, init=False)
    assert all(map(torch.equal, first["starts"], second["starts"]))
    assert first["starts"][-1].abs().sum() > 0
    saved, _ = pool2.run(train, kind, LateNet, tmp_path, init=False)
    assert_equal(saved["end"], first["end"])
    resumed, _ = pool2.run(train, kind, LateNet, None, STEPS, tmp_path / "4", init=False)
    assert_equal(resumed["end"], first["end"])


@pytest.mark.parametrize("kind", ["tp_fsdp", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_a_buffer_that_begins_to_move_late_on_a_mesh(tmp_path: Path, pool4: Pool, kind: str) -> None:
    ranks = pool4.run(train, kind, LateNet, init=False)
    for result in ranks[1:]:
        assert all(map(torch.equal, ranks[0]["starts"], result["starts"]))
    assert ranks[0]["starts"][-1].abs().sum() > 0
    saved = pool4.run(train, kind, LateNet, tmp_path, init=False)[0]
    assert_equal(saved["end"], ranks[0]["end"])


def train_by_hand(kind: str, exchange: str | None, folder: Path | None) -> dict[str, Any]:
    with make(kind) as strategy:
        loop = Loop(strategy)
        module, _ = loop.wrap(build(LateNet), adamw, plan=PLAN, exchange=exchange)
        starts = watch_starts(loop.model, "late", "mean")
        for step in range(STEPS):
            micro_batches = batches(strategy, step)
            for index, micro in enumerate(micro_batches):
                with loop.accumulate(last=index == 1):
                    loop.backward(squares(module(micro.data["x"]), micro.data["y"]).mean() / 2)
            loop.step()
            if folder:
                loop.save(folder / str(step))
        return {"starts": starts[::2], "end": whole(strategy.state(loop.model, loop._optimizers[0]).model)}


@pytest.mark.parametrize("kind", [*SOME_LAYOUTS, "ddp at_step"])
def test_a_loop_by_hand_has_the_same_rule(tmp_path: Path, pool2: Pool, kind: str) -> None:
    options = [*kind.split(), None][:2]
    first, second = pool2.run(train_by_hand, *options, None, init=False)
    assert all(map(torch.equal, first["starts"], second["starts"]))
    assert first["starts"][-1].abs().sum() > 0
    saved, _ = pool2.run(train_by_hand, *options, tmp_path, init=False)
    assert_equal(saved["end"], first["end"])


class Table(nn.Module):
    """Computes a table in its forward, and a longer one when it is needed. Ranks see different lengths."""

    persistent = False

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > getattr(self, "length", 0):
            self.length = len(x)
            self.register_buffer("table", torch.arange(float(len(x)))[:, None].cos(), persistent=self.persistent)
        return x * self.table[: len(x)]


class Stored(Table):
    persistent = True


class WithTable(Net):
    table_class: type[nn.Module] = Table

    def __init__(self) -> None:
        super().__init__()
        self.rotate = self.table_class()

    def forward(self, x: Tensor) -> Tensor:
        return self.rotate(super().forward(x))


class WithStoredTable(WithTable):
    table_class = Stored


def growing(kind: str, net: type[nn.Module] = WithTable) -> tuple[dict[str, Tensor], list[str]]:
    with make(kind) as strategy:
        model, optimizer = strategy.prepare(build(net), adamw, PLAN, BUILT)
        for step in range(4):
            parts = [micro_batch(*rows(4 + step * (1 + rank), 10 * step + rank)) for rank in range(2)]
            mine = parts if strategy.data_size == 1 else [parts[strategy.data_rank]]
            strategy.forward_backward(model, mine, Points(), step)
            strategy.step(optimizer)
        state = strategy.state(model, optimizer)
        return whole(state.model), [*strategy.held()]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_cache_may_grow_in_the_forward(pool2: Pool, kind: str) -> None:
    expected, _ = growing("single")
    for trained, held in pool2.run(growing, kind, init=False):
        assert trained.keys() == expected.keys() == set(held)
        torch.testing.assert_close(trained, expected)


def test_a_cache_may_grow_in_a_pipeline(pool2: Pool) -> None:
    """The first forward there is one that only explores shapes."""
    expected, _ = growing("single", Piped)
    for trained, _ in pool2.run(growing_piped, init=False):
        for name, tensor in trained.items():
            torch.testing.assert_close(tensor, expected[name])


class CachedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.calls = nn.Parameter(torch.ones(1)), nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1  # another tensor
        self.register_buffer("cache", torch.ones(len(x), 1), persistent=False)
        return x * self.factor * self.cache


class Piped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = CachedScale()  # type: ignore[assignment]


def growing_piped() -> tuple[dict[str, Tensor], list[str]]:
    with make("pp") as strategy:
        model, optimizer = strategy.prepare(build(Piped), adamw, PLAN, BUILT)
        for step in range(4):
            parts = [micro_batch(*rows(4 + step * (1 + rank), 10 * step + rank)) for rank in range(2)]
            strategy.forward_backward(model, parts, Points(), step)
            strategy.step(optimizer)
        return whole(strategy.state(model, optimizer).model), []


@pytest.mark.parametrize("kind", ["single", "ddp", "fsdp", SLOW_ZERO_1])
def test_a_persistent_buffer_from_a_forward_is_refused(pool2: Pool, kind: str) -> None:
    words = "buffer rotate.table was absent before the first step and is [4, 1] float32 now"
    found = [refused(kind)] if kind == "single" else pool2.run(refused, kind, init=False)
    for message in found:
        assert words in message
        assert "persistent=False" in message
        assert "\n" not in message


def refused(kind: str) -> str:
    try:
        growing(kind, WithStoredTable)
    except UserError as error:
        return str(error)
    return "trained"


def test_a_loop_refuses_it_when_it_saves(tmp_path: Path) -> None:
    with make("single") as strategy:
        loop = Loop(strategy)
        module, _ = loop.wrap(build(WithStoredTable), adamw)
        loop.backward(module(torch.ones(4, 4)).sum())
        with pytest.raises(UserError, match=r"buffer rotate\.table was absent before the first step"):
            loop.save(tmp_path / "saved")


DTYPES = [torch.int16, torch.uint16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.float64]


class ManyTypes(Net):
    def __init__(self) -> None:
        super().__init__()
        for dtype in DTYPES:
            self.register_buffer(str(dtype).partition(".")[2], torch.zeros((), dtype=dtype))
        self.turned = nn.Buffer(torch.zeros(3, 2).T)  # not contiguous
        self.spread = nn.Buffer(torch.zeros(1).expand(4))  # four elements in the memory of one
        self.nothing = nn.Buffer(torch.zeros(0, 3))


def many_types(kind: str, by_hand: bool) -> list[float]:
    with make(kind) as strategy:
        model = build(ManyTypes)
        if by_hand:
            for buffer in model.buffers():
                if buffer.stride() != (0,):
                    buffer.fill_(strategy.rank == 0)
            Loop(strategy).wrap(model, adamw, plan=PLAN)
        else:
            strategy.prepare(model, adamw, PLAN, BUILT)
            for buffer in model.buffers():
                buffer.fill_(strategy.rank == 0)
            strategy.sync_buffers(model)
        return [float(b.to(torch.complex64).real.sum()) for b in model.buffers()]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", ZERO_1])
def test_buffers_of_all_types_are_sent(pool2: Pool, kind: str, by_hand: bool) -> None:
    spread = 0.0 if by_hand else 4.0
    assert pool2.run(many_types, kind, by_hand, init=False) == [[1.0] * len(DTYPES) + [6.0, spread, 0.0]] * 2


def different_models() -> str:
    try:
        with make("ddp") as strategy:
            strategy.prepare(Net(6 + strategy.rank), adamw, PLAN, BUILT)
    except UserError as error:
        return str(error)
    return "trained"


def test_ranks_that_built_different_models_are_refused(pool2: Pool) -> None:
    for message in pool2.run(different_models, init=False):
        assert "ranks have built different models" in message


class Counter(nn.Module):
    """Counts the rows that it has seen, in Python and on a tensor that it keeps to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.total = {"rows": 0, "note": "ü"}, torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen["rows"] += len(x) * 100 + int(1000 * x.detach().abs().sum())  # other samples, other counts
            self.total = self.total + x.detach().sum()
        return x + self.seen["rows"] % 7 / 10


class InJson(Counter):
    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = dict(state)


class InTensor(Counter):
    def get_extra_state(self) -> Any:
        return torch.tensor([self.seen["rows"]])

    def set_extra_state(self, state: Any) -> None:
        self.seen["rows"] = int(state)


class InTuple(Counter):
    def get_extra_state(self) -> Any:
        return {"all": [(1, 2)]}

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError


class OneWay(Counter):
    def get_extra_state(self) -> Any:
        return 1


class Counting(Net):
    def __init__(self, json: type[Counter] = InJson, tensor: type[Counter] = InTensor) -> None:
        super().__init__()
        self.act, self.late = nn.Sequential(nn.Tanh(), json()), tensor()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.late(super().forward(x))


class CountingPiped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.scale = nn.Sequential(nn.Tanh(), InJson()), nn.Sequential(InTensor())  # type: ignore[assignment]


def count_rows(kind: str, folder: Path | None = None, resume: Path | None = None, by_hand: bool = False) -> Any:
    net = CountingPiped if kind == "pp" else Counting
    with make(kind) as strategy:
        loop = Loop(strategy)
        if by_hand:
            module, optimizer = loop.wrap(build(net), adamw, plan=PLAN)
            model = loop.model
        else:
            model, optimizer = strategy.prepare(build(net), adamw, PLAN, BUILT)
        first = 0
        if resume and by_hand:
            first = loop.load(resume)["step"]
        elif resume:
            checkpoint = open_checkpoint(resume)
            strategy.load_state(model, optimizer, checkpoint.checked_state(strategy.held()))
            first = checkpoint.trainer["step"]
        for step in range(first, 4):
            if by_hand:
                (micro,) = batches(strategy, step, 1)
                loop.backward(squares(module(micro.data["x"]), micro.data["y"]).mean())
                loop.step()
            else:
                strategy.forward_backward(model, batches(strategy, step), Points(), step)
                strategy.step(optimizer)
            if folder and by_hand:
                loop.save(folder / str(step + 1), step=step + 1)
            elif folder:
                write_checkpoint(folder / str(step + 1), strategy.state(model, optimizer), {"step": step + 1}, {})
        state = strategy.state(model, optimizer)
        return {**whole(state.model), **whole(state.strategy)}


@pytest.mark.parametrize(
    ("kind", "by_hand"),
    [
        *((kind, False) for kind in ("single", "ddp", "fsdp", "pp")),
        pytest.param("zero_3", False, marks=needs_deepspeed),
        *((kind, True) for kind in ("single", "ddp")),
        pytest.param("fsdp", True, marks=pytest.mark.slow),
        pytest.param("zero_3", True, marks=[needs_deepspeed, pytest.mark.slow]),
        *(pytest.param("zero_1", by_hand, marks=[needs_deepspeed, pytest.mark.slow]) for by_hand in (False, True)),
    ],
)
def test_extra_state_is_saved_and_comes_back(tmp_path: Path, pool2: Pool, kind: str, by_hand: bool) -> None:
    def run(folder: Path | None, resume: Path | None) -> list[Any]:
        if kind == "single":
            return [count_rows(kind, folder, resume, by_hand)]
        return pool2.run(count_rows, kind, folder, resume, by_hand, init=False)

    undisturbed, resumed = run(tmp_path, None), run(None, tmp_path / "2")
    names = {name for name in undisturbed[0] if "_extra_state" in name}
    assert names == {"act.1._extra_state.json", "scale.0._extra_state" if kind == "pp" else "late._extra_state"}
    for first, second in zip(undisturbed, resumed, strict=True):
        assert_equal({name: first[name] for name in names}, {name: undisturbed[0][name] for name in names})
        assert_equal(second, first)


def refusal_of(*kinds: type[Counter]) -> str:
    with make("single") as strategy, pytest.raises(UserError) as caught:
        strategy.prepare(Counting(*kinds), adamw, PLAN, BUILT)
    return str(caught.value)


def test_extra_state_that_a_checkpoint_cannot_hold_is_refused() -> None:
    message = refusal_of(InTuple)
    assert message.startswith("act.1._extra_state: get_extra_state of InTuple returns a tuple at [0] at ['all'], which")
    message = refusal_of(InJson, OneWay)
    assert message.startswith("late._extra_state: OneWay defines get_extra_state and not set_extra_state")


def test_buffers_of_all_types_are_saved(tmp_path: Path) -> None:
    with make("single") as strategy:
        model, optimizer = strategy.prepare(build(ManyTypes), adamw, PLAN, BUILT)
        for buffer in model.buffers():
            buffer.fill_(1)
        write_checkpoint(tmp_path / "saved", strategy.state(model, optimizer), {}, {})
        for buffer in model.buffers():
            buffer.zero_()
        checkpoint = open_checkpoint(tmp_path / "saved")
        strategy.load_state(model, optimizer, checkpoint.checked_state(strategy.held()))
        sums = [float(buffer.to(torch.complex64).real.sum()) for buffer in model.buffers()]
        assert sums == [1.0] * len(DTYPES) + [6.0, 4.0, 0.0]
