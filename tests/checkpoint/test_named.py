"""`last` and `best` in the place of a checkpoint's path, checkpoints that scripts have named, and saved dicts."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from conftest import ToyRun
from torch import nn

import shoal
from shoal.checkpoint import CheckpointManager, find_latest_checkpoint, open_checkpoint
from shoal.checkpoint.latest import named_checkpoint
from shoal.checkpoint.store import TRAINER
from shoal.checkpoint.trees import TREE, read_tree
from shoal.errors import UserError

KEYS = ["training.eval_steps=2", "checkpoint.keep_last=9", "checkpoint.keep_best=1", "training.max_steps=6"]


def test_last_and_best_are_taken_wherever_a_path_is(toy: ToyRun) -> None:
    keys = [*KEYS, "checkpoint.mode=max"]  # the best is an early one
    toy.train(*keys)
    (best, _), *_ = CheckpointManager(toy.output, mode="max").best()
    assert best < 6
    folder = toy.output / "checkpoints"
    for name, step in {"last": 6, "best": best}.items():
        for path in (toy.output / name, folder / name):
            assert named_checkpoint(path) == folder / f"step_{step:08d}", path
        shown = json.loads(toy.call("checkpoint", "show", str(toy.output / name), "--json").stdout)
        assert Path(shown["path"]).name == f"step_{step:08d}"
        assert f"step_{step:08d}  good" in toy.call("checkpoint", "verify", str(toy.output / name)).stdout
    recipe = import_module("toy_recipe").Toy
    stored = open_checkpoint(folder / f"step_{best:08d}").read().model
    torch.testing.assert_close(dict(shoal.load(toy.output / "best", recipe=recipe).state_dict()), stored)
    outcome = toy.train(*keys, "checkpoint.resume=best")
    assert outcome.first_step == best
    other = f"experiment.output_dir={toy.folder}/other"
    assert toy.train(*keys, other, f"checkpoint.resume={toy.output}/last").first_step == 6


def test_a_name_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    for name, words in {"last": "no good checkpoint", "best": "no checkpoint that was evaluated"}.items():
        with pytest.raises(UserError, match=f"{words}; give the path of a checkpoint"):
            named_checkpoint(tmp_path / name)
    (tmp_path / "best").mkdir()
    assert named_checkpoint(tmp_path / "best") == tmp_path / "best", "a folder that is there is meant"


def test_names_that_scripts_give(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "there")
    for name in ("step_3", "step_100", "step_20"):
        manager.save_checkpoint({"a": 1}, step=1).rename(tmp_path / name)
    assert find_latest_checkpoint(tmp_path) == tmp_path / "step_100"
    (tmp_path / "step_100" / "manifest.json").write_text("{}")
    assert find_latest_checkpoint(tmp_path) == tmp_path / "step_20", "a damaged one is passed over"
    manager.save_checkpoint({"a": 1}, step=1, final=True).rename(tmp_path / "final")
    assert named_checkpoint(tmp_path / "last") == tmp_path / "final"


def test_any_dict_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    steps = {0: [1, None, True], "name": "ü"}
    state = {"model": model.state_dict(), "betas": (0.9, 0.95), "steps": steps, "t": torch.ones(3)}
    manager = CheckpointManager(tmp_path, keep_last=1)
    for step in (1, 2):
        path = manager.save_checkpoint(state=state, step=step)
    assert [one.name for one in manager.folder.iterdir()] == ["step_00000002"]
    manager.save_checkpoint(state, 3, final=True)
    assert [one.name for one in sorted(manager.folder.iterdir())] == ["final", "step_00000002"]
    loaded = manager.load_checkpoint(path)
    torch.testing.assert_close([loaded["model"], loaded["t"]], [dict(model.state_dict()), torch.ones(3)])
    assert (loaded["betas"], loaded["steps"]) == ((0.9, 0.95), steps)
    assert open_checkpoint(path).shapes == {"weight": [1, 2], "bias": [1]}, "the weights have their own names"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"model": {1.5: torch.ones(1)}}, r"state\['model'\] has the key 1.5; use text or whole numbers"),
        ({"a": [object()]}, r"state\['a'\]\['0'\] is a object, which a checkpoint does not hold"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused(tmp_path: Path, state: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        CheckpointManager(tmp_path).save_checkpoint(state, 1)
    assert not (tmp_path / "checkpoints").exists()


def test_a_tree_that_shoal_did_not_write_is_refused(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    checkpoint = open_checkpoint(manager.save_checkpoint({"t": torch.ones(1)}, 1))
    for tree in ({}, [], {"dict": [["t", {"tensor": "../secret", "of_model": False}]]}, {"dict": 3}, {"tensor": []}):
        checkpoint.trainer[TREE] = tree
        with pytest.raises(UserError, match=f"{TREE} in {TRAINER} is not one that shoal wrote"):
            read_tree(checkpoint)
