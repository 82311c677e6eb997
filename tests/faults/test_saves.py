"""A save that fails, or whose process dies, at any call to the system: no checkpoint is lost, and nothing is left over.

A run saves step 8, which makes it remove step 4; or it saves step 6 again. This file is also a script, in which
processes really die.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import ToyRun
from faulty_files import FaultyFiles, Killed, can_fail

from shoal.checkpoint import CheckpointManager, find_latest_checkpoint, open_checkpoint, rotation, step_folders
from shoal.checkpoint.folders import remove_checkpoint, step_of
from shoal.types import TrainState

OLD_STEPS = [4, 6]


def state_of(step: int) -> TrainState:
    weight = torch.full((4, 3), float(step))
    return TrainState({"weight": weight, "bias": weight[0] + 1}, {"weight": {"exp_avg": weight / 2}})


def save(manager: CheckpointManager, step: int) -> None:
    trainer = {"step": step, "metrics": {"eval/loss": 1 / step}}
    manager.save_state(state_of(step), trainer, {"config": {"name": "a run"}})


def new_manager(folder: Path) -> CheckpointManager:
    return CheckpointManager(folder, keep_last=2, is_main_process=not dist.is_initialized() or dist.get_rank() == 0)


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of two steps."""
    return make_saved_run(tmp_path_factory.mktemp("saved"))


def make_saved_run(folder: Path) -> Path:
    manager = new_manager(folder)
    for step in OLD_STEPS:
        save(manager, step)
    return folder


def latest_step(folder: Path) -> int:
    """Returns the step of the latest checkpoint, after comparing every tensor with its digest and its value."""
    latest = find_latest_checkpoint(folder)
    assert latest is not None
    checkpoint = open_checkpoint(latest)
    step = int(checkpoint.trainer["step"])
    assert latest.name == f"step_{step:08d}"
    read, expected = checkpoint.read(), state_of(step)
    torch.testing.assert_close([read.model, read.optimizer], [expected.model, expected.optimizer], rtol=0, atol=0)
    return step


def check_that_the_run_goes_on(folder: Path, manager: CheckpointManager, allowed_steps: set[int]) -> None:
    """Checks what a failed save has left, and that the next save makes it right."""
    assert latest_step(folder) in allowed_steps
    assert find_latest_checkpoint(folder) is not None
    save(manager, 10)
    assert latest_step(folder) == 10
    left = sorted(path.name for path in manager.folder.iterdir())
    assert len(left) == 2, left
    assert left[1] == "step_00000010"
    open_checkpoint(manager.folder / left[0]).read()


def attempts(saved: Path, folder: Path, step: int, fault: int | str) -> Iterator[tuple[Path, FaultyFiles]]:
    """Yields a copy of the run, and the file layer, for each call of a save that can fail in this way."""
    whole = folder / "whole"
    shutil.copytree(saved, whole)
    with FaultyFiles(whole).installed() as counted:
        save(new_manager(whole), step)
    assert {"rename", "write", "fsync", "unlink"} <= {*counted.calls}
    for number, name in enumerate(counted.calls, 1):
        if can_fail(name, fault):
            copy = folder / f"{number} {name}"
            shutil.copytree(saved, copy)
            yield copy, FaultyFiles(copy, number, fault)
            shutil.rmtree(copy)


@pytest.mark.parametrize("step", [pytest.param(8, marks=pytest.mark.slow), 6])
def test_a_process_that_dies_at_any_call(saved_run: Path, tmp_path: Path, step: int) -> None:
    for folder, faulty in attempts(saved_run, tmp_path, step, "raise"):
        with pytest.raises(Killed), faulty.installed():
            save(new_manager(folder), step)
        manager = new_manager(folder)
        manager.clean()
        check_that_the_run_goes_on(folder, manager, {6, step})


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", [pytest.param(8, marks=pytest.mark.slow), 6])
def test_an_error_at_any_call(saved_run: Path, tmp_path: Path, step: int, fault: int) -> None:
    """The process lives on. A save that raises has not replaced anything; one that does not is complete."""
    for folder, faulty in attempts(saved_run, tmp_path, step, fault):
        manager = new_manager(folder)
        manager.saved_step = 6
        raised = ""
        with faulty.installed():
            try:
                save(manager, step)
            except OSError as error:
                raised = str(error)
        where = f"{folder.name}: {raised}"
        if raised:
            assert os.strerror(fault) in raised, where
            assert manager.saved_step == 6, where
        else:
            assert manager.saved_step == latest_step(folder) == step, where
        check_that_the_run_goes_on(folder, manager, {6, step})


def clean_slowly(folder: Path) -> list[str]:
    """Lists the checkpoints after a cleaning in which the file system keeps rank 0 waiting."""
    real_rename = Path.rename

    def slow_rename(path: Path, target: Path) -> Path:
        time.sleep(0.3)
        return real_rename(path, target)

    with patch.object(Path, "rename", slow_rename):
        new_manager(folder).clean()
    return [path.name for path in step_folders(folder)]


def test_all_ranks_see_a_checkpoint_that_a_killed_run_had_moved_away(
    saved_run: Path, tmp_path: Path, pool2: Any
) -> None:
    """It was killed while it replaced the checkpoint of step 6 by one of the same step."""
    shutil.copytree(saved_run, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step_00000006").rename(checkpoints / ".step_00000006.old")
    expected = [f"step_{step:08d}" for step in OLD_STEPS]
    assert pool2.run(clean_slowly, tmp_path / "run") == [expected, expected]


@pytest.mark.parametrize("background", ["false", "true"])
def test_a_disk_that_is_full_during_rotation(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], background: str
) -> None:
    """Old checkpoints that cannot be removed are reported in one line, kept, and removed by the next save."""
    failures = iter([OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "step_00000002")])

    def remove(path: Path) -> None:
        for error in failures:
            raise error
        remove_checkpoint(path)

    monkeypatch.setattr(rotation, "remove_checkpoint", remove)
    keys = ["checkpoint.keep_last=2", f"checkpoint.async_save={background}"]
    assert toy.train(*keys, "training.max_steps=6").step == 6
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    reason = "[Errno 28] No space left on device: 'step_00000002'"
    assert line == f"warning: old checkpoints could not be removed: {reason}; the next save tries again"
    assert [step_of(path) for path in step_folders(toy.output)] == [2, 4, 6]
    assert toy.train(*keys).first_step == 6
    assert [step_of(path) for path in step_folders(toy.output)] == [8, 10]


def die_at_every_call(folder: Path, step: int, size: int, rank_that_dies: int) -> int:
    """Runs in a script: forks `size` processes for every call of a save. Returns the number of calls."""
    saved = make_saved_run(folder / "saved")
    number, died = 0, True
    while died:
        number += 1
        copy = folder / str(number)
        shutil.copytree(saved, copy)
        children = []
        for rank in range(size):
            children.append(os.fork())
            if children[-1] == 0:
                save_as_rank(copy, step, rank, size, number if rank == rank_that_dies else 0)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        died = codes[rank_that_dies] == 137
        assert died or codes == [0] * size, codes
        manager = new_manager(copy)
        manager.clean()
        check_that_the_run_goes_on(copy, manager, {6, step} if died else {step})
        shutil.rmtree(copy)
    return number - 1


def save_as_rank(folder: Path, step: int, rank: int, size: int, at: int) -> None:
    """Saves in a forked process, which ends here."""
    code = 1
    try:
        if size > 1:
            store = dist.FileStore(str(folder.with_name(f"store {folder.name}")), size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        with FaultyFiles(folder, at, "exit").installed():
            save(new_manager(folder), step)
        code = 0
    finally:
        os._exit(code)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rank_that_dies"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("step", [8, 6])
def test_processes_that_really_die_at_any_call(tmp_path: Path, step: int, size: int, rank_that_dies: int) -> None:
    command = [sys.executable, __file__, str(tmp_path), str(step), str(size), str(rank_that_dies)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) >= (4 if rank_that_dies else 40)


if __name__ == "__main__":
    run_folder, *numbers = sys.argv[1:]
    print(die_at_every_call(Path(run_folder), *map(int, numbers)))
