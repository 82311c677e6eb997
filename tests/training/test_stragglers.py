"""A rank that is slower than its peers is named, and steps have no more collectives than without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from pool import Pool
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.config import load_run
from shoal.strategies.own_time import OwnTime
from shoal.training import train
from shoal.training.stragglers import OwnTimes, Stragglers, find_slowest

LAG = """
class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.set_materialize_grads(False)
        time.sleep(FORWARD_MS / 1000 * slowness())
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(BACKWARD_MS / 1000 * slowness())
        return gradient


class Lag(nn.Linear):
    def forward(self, x):
        return Sleep.apply(super().forward(x))


def slowness():
    return 0 if FAST else SLOWER if torch.distributed.get_rank() == 1 else 1.0


FAST = False


class Toy"""
PLAN = """
    def parallel_plan(self, model):
        return ParallelPlan(blocks=("0", "3"), order=("0", "1", "2", "3"), entry="input")

    def inputs("""
EVERY = 6  # the line after the first step, and then two windows of at least five steps


class CountCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


def train_counting(config: Path, overrides: list[str]) -> Counter[str]:
    """Trains and returns how many collectives of each kind this rank took part in."""
    with CountCollectives() as collectives:
        train(load_run(config, [*overrides, "logging.console=plain", "checkpoint.every=null"]))
    return +collectives.calls  # those that were counted


@pytest.fixture
def slow_toy(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> Callable[..., ToyRun]:
    """Returns a run in which forward, backward and data take these milliseconds, on rank 1 `slower` times as long."""

    def make(forward: int, backward: int, data: int, *, slower: float) -> ToyRun:
        lag = LAG.replace("FORWARD_MS", str(forward)).replace("BACKWARD_MS", str(backward))
        lag = lag.replace("SLOWER", str(slower))
        change_recipe("import torch\n", "import time\nimport torch\n")
        change_recipe("class Toy", lag)
        change_recipe("nn.Linear(1, hidden)", "Lag(1, hidden)")
        change_recipe("    def inputs(", PLAN)
        change_recipe(
            "    def __getitem__(self, i):\n",
            f"    def __getitem__(self, i):\n        time.sleep({data} / 4000 * slowness())\n",
        )
        return toy

    return make


CASES = {
    "ddp, in the backward": ((10, 100, 0), []),
    "fsdp, in the forward": ((110, 0, 0), ["distributed.strategy=fsdp"]),
    "ddp, in the data": ((0, 0, 110), []),
}


@pytest.mark.parametrize("slower", [4.0, pytest.param(1.5, marks=pytest.mark.slow)])  # 1.5 needs a machine to itself
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if "backward" in case else pytest.mark.slow) for case in CASES]
)
def test_a_slow_rank_is_named_within_two_windows(
    case: str,
    slower: float,
    slow_toy: Callable[..., ToyRun],
    change_recipe: Callable[[str, str], None],
    pool2: Pool,
) -> None:
    times, keys = CASES[case]
    toy = slow_toy(*[round(one * 1.5 / slower) for one in times], slower=slower)
    steps = [f"training.max_steps={2 * EVERY}", f"logging.every={EVERY}", *keys]
    steps.append("logging.straggler_factor=1.2")  # on a busy machine both ranks are slower by as much
    counted = pool2.run(train_counting, toy.config, steps, init=False)
    named = [line for line in (toy.output / "logs" / "rank_0.log").read_text().splitlines() if "slower" in line]
    assert len(named) == 1, named
    assert "warning: rank 1 (host " in named[0]
    rank, ratio = toy.metrics("train/slowest_rank"), toy.metrics("train/slowest_ratio")
    assert rank[2 * EVERY] == 1
    assert ratio[2 * EVERY] >= 1.2
    change_recipe("FAST = False", "FAST = True")
    off = [*steps, "logging.straggler_factor=null", f"experiment.output_dir={toy.folder}/off"]
    assert pool2.run(train_counting, toy.config, off, init=False) == counted
    assert sum(counted[0].values()) > 2 * EVERY
    assert "slower" not in (toy.folder / "off" / "logs" / "rank_0.log").read_text()
    assert toy.metrics("train/slowest_rank", output=toy.folder / "off") == {}


def times(*seconds: float, peers: tuple[int, ...] = (), num_steps: int = 5) -> list[OwnTimes]:
    return [
        OwnTimes(f"host{rank}", peers[rank] if peers else 0, 0.0, num_steps, (one,) * num_steps)
        for rank, one in enumerate(seconds)
    ]


def test_the_slowest_is_compared_with_the_median_of_its_peers() -> None:
    slowest = find_slowest(times(1.0, 1.1, 0.9, 2.0))
    assert slowest is not None
    assert (slowest.rank, slowest.ratio) == (3, 2.0)
    # Ranks 0 and 1 have the first stage of a pipeline, 2 and 3 the second: stages are not compared with each other.
    slowest = find_slowest(times(1.0, 1.2, 5.0, 5.5, peers=(0, 0, 1, 1)))
    assert slowest is not None
    assert slowest.rank == 1
    assert find_slowest(times(1.0, 5.0, peers=(0, 1))) is None


def test_a_rank_is_named_once_and_only_if_two_windows_agree() -> None:
    add = Stragglers(1.3).add
    assert add(times(1.0, 1.0, 1.0, 1.5), 10.0) is None  # may be an accident
    assert add(times(1.0, 1.0, 1.5, 1.0), 10.0) is None  # another one
    slow = OwnTimes("node7", 0, 1.25, 5, (1.25, 1.25, 9.0, 1.25, 1.25))
    assert add([*times(1.0, 1.0), slow, *times(1.0)], 10.0) == (
        "rank 2 (host node7) is 1.50 times slower than its peers, and they wait for it: by itself it takes 1.5 s a "
        "step (data 0.25 s, computing 1.25 s), they take 1 s (logging.straggler_factor = 1.3)"
    )
    assert add(times(1.0, 1.0, 1.5, 1.0), 10.0) is None  # it is known
    assert add(times(1.0, 1.0, 1.2, 1.0), 10.0) is None  # it has recovered
    assert add(times(1.0, 1.0, 1.5, 1.0), 10.0) is None
    assert add(times(1.0, 1.0, 1.5, 1.0), 10.0) is not None
    for _ in range(3):
        assert add(times(1.0, 1.5), 100.0) is None  # a fortieth of a step is not worth a line
    off = Stragglers(None).add
    assert [off(times(1.0, 9.0), 10.0) for _ in range(3)] == [None] * 3


def test_a_window_has_five_steps_at_least() -> None:
    add = Stragglers(1.3).add
    named = [add(times(1.0, 1.5, num_steps=1), 2.0) for _ in range(10)]  # a line of the log in every step
    assert [one is not None for one in named] == [False] * 9 + [True]


def test_a_stretch_ends_at_its_last_stop() -> None:
    own_time = OwnTime(torch.device("cpu"))
    own_time.start()
    own_time.stop()
    assert own_time.take_seconds() == []  # no step was begun
    own_time.begin(1)
    own_time.stop()
    once = own_time._steps[1][0][1]
    own_time.stop()
    assert own_time._steps[1][0][1] > once
    own_time.start()  # without a stop: it is left out
    own_time.end()
    own_time.start()
    assert len(own_time._steps[1]) == 2
    (seconds,) = own_time.take_seconds()
    assert seconds > 0
