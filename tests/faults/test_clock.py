"""A clock that is set back an hour in the middle of a run: nothing is measured by it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ToyRun
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from shoal.checkpoint import run_lock
from shoal.checkpoint.run_lock import RunLock
from shoal.observe.loggers import TensorBoardLogger

HOUR = 3600.0


class Clock:
    """A clock in the place of `time.time`, which can be set back."""

    def __init__(self) -> None:
        self.behind = 0.0
        self._real = time.time

    def __call__(self) -> float:
        return self._real() - self.behind


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


def wall_times(folder: Path) -> list[tuple[int, float]]:
    """Returns step and time of every number, in the order in which TensorBoard reads them."""
    return [
        (event.step, event.wall_time)
        for path in sorted(folder.glob("*tfevents*"))
        for event in EventFileLoader(str(path)).Load()
        if event.HasField("summary")
    ]


def test_tensorboard_reads_steps_in_order(tmp_path: Path, clock: Clock) -> None:
    for start in (0, 4, 8):
        logger = TensorBoardLogger(tmp_path, start)
        logger.log(start + 1, {"train/loss": 1.0})
        logger.log(start + 2, {"train/loss": 1.0})
        clock.behind += HOUR
        logger.log(start + 3, {"train/loss": 1.0})
        logger.log(start + 4, {"train/loss": 1.0})
        logger.close()
    steps, times = zip(*wall_times(tmp_path / "tensorboard"), strict=True)
    assert steps == tuple(range(1, 13))
    for start in (0, 4, 8):
        assert list(times[start : start + 4]) == sorted(times[start : start + 4])


def test_a_run_goes_on(toy: ToyRun, clock: Clock, change_recipe: Callable[[str, str], None]) -> None:
    """Its lock, its saves by the clock, its watchdog and its logs."""
    change_recipe("    def loss(", "    calls = 0\n\n    def loss(")
    change_recipe(
        "        return ((output",
        "        import time\n        Toy.calls += 1\n"
        f"        if Toy.calls == 5:\n            time.time.behind += {HOUR}\n        return ((output",
    )
    keys = ["checkpoint.every=null", "checkpoint.every_minutes=1", "logging.tensorboard=true"]
    limits = ["distributed.timeout=100", "distributed.init_timeout=100"]
    assert toy.train(*keys, *limits).step == 10
    assert clock.behind == HOUR
    assert [path.name for path in (toy.output / "checkpoints").iterdir()] == ["step_00000010"]
    assert [*toy.metrics()] == [*range(1, 11)]
    assert not (toy.output / "run.lock").exists()
    assert toy.train(*keys, *limits, "training.max_steps=12").first_step == 10
    steps = [step for step, _ in wall_times(toy.output / "tensorboard")]
    assert steps == sorted(steps)


@pytest.mark.parametrize("ahead_seconds", [HOUR, -HOUR])
def test_a_claim_of_a_dead_run_is_given_up_whatever_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_seconds: float
) -> None:
    """A run died while it took over the folder of another dead one, and then the clock was set back."""
    monkeypatch.setattr(run_lock, "CLAIM_SECONDS", 0.5)
    with RunLock(tmp_path) as first:
        text = json.loads(first.path.read_text())
    (tmp_path / "run.lock").write_text(json.dumps(text | {"process_started": "1"}))
    claim = tmp_path / f".run.lock.after.{text['token']}"
    claim.touch()
    stamp = time.time() + ahead_seconds
    os.utime(claim, (stamp, stamp))
    with RunLock(tmp_path) as taken:
        taken.check()
    assert not [*tmp_path.iterdir()]


def test_heartbeats_are_seen_after_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that the time of the file changes counts, not how."""
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.2)
    real_utime, behind = os.utime, [0.0]

    def utime(path: int | str | Path, times: tuple[float, float] | None = None) -> None:
        behind[0] += HOUR
        stamp = time.time() - behind[0]
        real_utime(path, times or (stamp, stamp))

    monkeypatch.setattr(run_lock.os, "utime", utime)
    with RunLock(tmp_path) as held:
        with pytest.raises(run_lock.UserError, match="in use by process"), RunLock(tmp_path):
            pass
        held.check()
