"""A run folder keeps the config that it was trained with, can be moved aside, and knows the code of its recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ToyRun

from shoal.checkpoint.run_lock import RunLock
from shoal.errors import UserError
from shoal.training.preflight import move_aside
from shoal.training.refused_start import StartTraces


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
    shorter = toy.call(*arguments, "training.max_steps=1").stdout
    assert "already finished at step 2, past step 1, where this config ends" in shorter
    assert "train anew" in shorter
    assert "--fresh" in shorter
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
    toy.train("training.max_steps=1", "training.lr_scheduler=constant")
    toy.train("training.max_steps=2", "training.lr_scheduler=constant")
    log = toy.output / "logs" / "rank_0.log"
    assert not log.exists()
    change_recipe("nn.Tanh()", "nn.ReLU()")
    toy.train("training.max_steps=3", "training.lr_scheduler=constant")
    assert "the recipe's file toy_recipe.py has changed since the checkpoint" in log.read_text()


@pytest.mark.parametrize("where", ["prepare_data", "build_model"])
def test_a_refused_start_leaves_no_run_folder(
    toy: ToyRun, change_recipe: Callable[[str, str], None], where: str
) -> None:
    refusal = f"    def {where}(self):\n        from shoal.errors import UserError\n        raise UserError('no')\n\n"
    change_recipe("    def inputs(", f"{refusal}    def inputs(")
    with pytest.raises(UserError, match="no"):
        toy.train(f"experiment.output_dir={toy.folder}/runs/deep/one")
    assert not (toy.folder / "runs").exists()
    toy.output.mkdir()
    (toy.output / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="no"):
        toy.train()
    assert (toy.output / "notes.txt").exists()


def test_a_run_that_is_refused_late_leaves_nothing_unless_it_has_trained(
    toy: ToyRun, change_recipe: Callable[[str, str], None]
) -> None:
    """Only an evaluation shows that there is no such metric: loggers are open, and a warning is in the log."""
    wrong = ("checkpoint.keep_best=1", "checkpoint.metric=eval/no", "logging.tensorboard=true")
    with pytest.raises(UserError, match=r"checkpoint\.metric = 'eval/no'"):
        toy.train(*wrong)
    assert not toy.output.exists()
    change_recipe("    def inputs(", f"{REFUSAL_IN_STEP_2}    def inputs(")
    with pytest.raises(UserError, match="no more"):
        toy.train("logging.every=5", "checkpoint.every=5")
    assert {path.name for path in toy.output.iterdir()} == {"config.yaml", "metrics.jsonl", "report.txt"}


REFUSAL_IN_STEP_2 = """\
    def after_step(self, run):
        from shoal.errors import UserError
        if run.step == 2:
            raise UserError("no more")

"""


def test_what_was_there_before_a_refused_start_stays(tmp_path: Path) -> None:
    folder, log = tmp_path / "out", tmp_path / "out" / "logs" / "rank_1.log"

    def start() -> StartTraces:
        traces = StartTraces(folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("refused")
        (folder / "config.yaml").touch()
        return traces

    folder.mkdir()
    start().take_back()
    assert not [*folder.iterdir()]  # the user has made it
    traces = start()
    with RunLock(folder):
        traces.take_back()
    assert log.exists()  # of the run that uses the folder
    start().take_back()
    assert log.exists()  # of an earlier start
