"""A run folder keeps the config that it was trained with, can be moved aside, and knows the code of its recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ToyRun

from shoal.checkpoint.run_lock import RunLock
from shoal.errors import UserError
from shoal.training.preflight import move_aside


def config_of(toy: ToyRun) -> str:
    return (toy.output / "config.yaml").read_text()


def test_a_finished_run_keeps_its_config(toy: ToyRun) -> None:
    toy.train("training.max_steps=2")
    before = config_of(toy)
    toy.train("training.max_steps=2", "training.learning_rate=0.5")
    with pytest.raises(UserError, match=r"experiment\.seed"):
        toy.train("training.max_steps=3", "experiment.seed=1")
    assert config_of(toy) == before
    toy.train("training.max_steps=3", "training.learning_rate=0.5")
    assert "learning_rate: 0.5" in config_of(toy)


def test_a_fresh_run_moves_the_earlier_one_aside(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("train", "run.yaml", "training.max_steps=2", "checkpoint.every=1")
    assert "finished at step 2" in toy.call(*arguments).stdout
    assert "already finished" in toy.call(*arguments).stdout
    for number in (1, 2):
        fresh = toy.call(*arguments, "--fresh")
        assert "finished at step 2" in fresh.stdout
        assert f"the earlier run is now in {toy.output}.{number}" in fresh.stdout
        assert (Path(f"{toy.output}.{number}") / "checkpoints" / "step_00000002").is_dir()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "already finished" in toy.call(*arguments, "--fresh").stdout


def test_fresh_where_several_would_rename_is_refused(toy: ToyRun) -> None:
    refused = toy.call("train", "run.yaml", "launch.nodes=2", "--fresh")
    assert refused.returncode == 2
    assert "--fresh: several processes or machines" in refused.stderr


def test_a_folder_in_use_is_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.checkpoint.run_lock.HEARTBEAT_SECONDS", 0.1)
    folder = tmp_path / "out"
    assert move_aside(folder) is None
    folder.mkdir()
    with RunLock(folder), pytest.raises(UserError, match="process"):
        move_aside(folder)
    assert move_aside(folder) is None  # it is empty
    (folder / "file").touch()
    assert move_aside(folder) == tmp_path / "out.1"


def test_changed_code_of_a_recipe_is_warned_of(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    toy.train("training.max_steps=1")
    toy.train("training.max_steps=2")
    log = toy.output / "logs" / "rank_0.log"
    assert not log.exists()
    change_recipe("nn.Tanh()", "nn.ReLU()")
    toy.train("training.max_steps=3")
    assert "the recipe's file toy_recipe.py has changed since the checkpoint" in log.read_text()


@pytest.mark.parametrize("where", ["prepare_data", "build_model"])
def test_a_refused_start_leaves_no_run_folder(
    toy: ToyRun, change_recipe: Callable[[str, str], None], where: str
) -> None:
    refusal = f"    def {where}(self):\n        from shoal.errors import UserError\n        raise UserError('no')\n\n"
    change_recipe("    def inputs(", f"{refusal}    def inputs(")
    with pytest.raises(UserError, match="no"):
        toy.train()
    assert not toy.output.exists()
    toy.output.mkdir()
    (toy.output / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="no"):
        toy.train()
    assert (toy.output / "notes.txt").exists()
