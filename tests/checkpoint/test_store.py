"""Published or absent, checked while reading, and no code in it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import CheckpointManager, DamagedCheckpoint, find_latest_checkpoint, open_checkpoint
from shoal.checkpoint import store as store_module
from shoal.errors import UserError
from shoal.types import TrainState

ABOUT: dict[str, Any] = {"layout": {"strategy": "single", "world_size": 1}, "batches": [[0, 4]], "config": {"a": 1}}


def state(value: float = 1.0) -> TrainState:
    weights = {
        "weight": torch.full((3, 4), value),
        "half": torch.full((5,), value, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 2),
        "steps": torch.tensor(7),
    }
    return TrainState(weights, {"weight": {"exp_avg": torch.full((3, 4), 2 * value), "step": torch.tensor(3.0)}})


def save(folder: Path, step: int = 3, value: float = 1.0, keep_last: int = 9) -> Path:
    return CheckpointManager(folder, keep_last).save(state(value), {"step": step, "samples": 5}, ABOUT)


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path))
    assert checkpoint.step == 3
    assert checkpoint.manifest["config"] == {"a": 1}
    assert checkpoint.manifest["versions"]["torch"] == torch.__version__
    read = checkpoint.read()
    for name, tensor in state().model.items():
        assert read.model[name].dtype == tensor.dtype
        assert torch.equal(read.model[name], tensor)
    assert torch.equal(read.optimizer["weight"]["exp_avg"], torch.full((3, 4), 2.0))
    assert read.optimizer["weight"]["step"].item() == 3
    assert sorted(p.name for p in checkpoint.folder.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "trainer.json",
    ]


FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "trainer.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "pickle"])
def test_any_damage_is_detected_and_the_previous_one_used(tmp_path: Path, file: str, damage: str) -> None:
    save(tmp_path, step=1)
    path = save(tmp_path, step=2) / file
    data = path.read_bytes()
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "pickle":
        path.write_bytes(pickle.dumps(_Hostile(str(tmp_path / "ran"))))
    places = range(0, len(data), max(1, len(data) // 40)) if damage == "flip" else [0]
    for place in places:
        if damage == "flip":
            path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises((DamagedCheckpoint, UserError)):
            open_checkpoint(path.parent).read()
    assert not (tmp_path / "ran").exists()
    if damage != "flip" and file in ("manifest.json", "trainer.json"):
        assert find_latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_00000001"


class _Hostile:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.path),))


def test_a_manifest_that_points_outside_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (tmp_path / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("digest")
    text = json.dumps(manifest).replace('"model.safetensors"', '"../../secret.safetensors"')
    manifest = json.loads(text)
    manifest["digest"] = store_module._manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint, match="outside"):
        open_checkpoint(folder)


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["format"] = 99
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="format 99"):
        open_checkpoint(folder)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, step=1)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "_flush", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, step=2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_a_step_is_replaced_whole(tmp_path: Path) -> None:
    save(tmp_path, value=1.0)
    folder = save(tmp_path, value=5.0)
    assert open_checkpoint(folder).read().model["weight"].unique().item() == 5.0
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_latest_is_the_highest_step_not_the_newest_file(tmp_path: Path) -> None:
    save(tmp_path, step=100)
    save(tmp_path, step=20)
    (tmp_path / "checkpoints" / "step_00000300").mkdir()
    assert find_latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_00000100"
    assert find_latest_checkpoint(tmp_path / "nowhere") is None
