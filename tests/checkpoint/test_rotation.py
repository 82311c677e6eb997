"""Rotation: which checkpoints a run keeps, which one is best, and what happens if the disk is full."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ToyRun
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.checkpoint import CheckpointManager, find_latest_checkpoint, open_checkpoint, rotation, step_folders
from shoal.checkpoint.manifest import manifest_digest
from shoal.checkpoint.regions import local_region
from shoal.checkpoint.rotation import find_best_checkpoint
from shoal.config import load_run
from shoal.errors import UserError
from shoal.tensors import local_part
from shoal.training import train
from shoal.training.loop import Shell
from shoal.training.meter import Meter
from shoal.training.trainer import RecipeBody
from shoal.types import TrainState


def save(manager: CheckpointManager, step: int, value: float | None = None, metric: str = "eval/loss") -> Path:
    state = TrainState({"w": torch.full((2,), float(step))}, {})
    evaluated = {} if value is None else {"metrics": {metric: value}}
    manager.save_state(state, {"step": step, "samples": step, **evaluated}, {})
    return manager.path_of(step)


def steps_in(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in step_folders(folder)]


def saved_steps(toy: ToyRun) -> list[int]:
    return steps_in(toy.output)


# Rotation


def test_the_last_the_best_and_every_nth_are_kept(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2, keep_best=2, keep_every=50)
    values = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: 9.0, 60: None, 70: 2.0, 80: float("nan"), 90: 5.0}
    for step, value in values.items():
        save(manager, step, value)
    assert steps_in(tmp_path) == [20, 40, 50, 80, 90]
    assert find_best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_00000020"
    assert find_best_checkpoint(tmp_path, mode="max") == tmp_path / "checkpoints" / "step_00000050"
    assert find_best_checkpoint(tmp_path, "eval/accuracy", "max") is None
    assert find_latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step_00000090"
    with pytest.raises(UserError, match="use min or max"):
        find_best_checkpoint(tmp_path, mode="least")  # type: ignore[arg-type]


class Killed(BaseException):
    pass


Event = st.tuples(
    st.integers(1, 3),  # steps further
    st.one_of(st.none(), st.sampled_from([1.0, 2.0, 3.0, float("nan"), float("inf")])),
    st.sampled_from(["fine", "fine", "fine", "restarted", "no room", "killed after publishing", "killed in removal"]),
)


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(Event, min_size=1, max_size=10),
    keep_last=st.integers(1, 3),
    keep_best=st.integers(0, 2),
    mode=st.sampled_from(["min", "max"]),
    keep_every=st.sampled_from([None, 4]),
)
def test_rotation_keeps_exactly_the_defined_steps(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[tuple[int, float | None, str]],
    keep_last: int,
    keep_best: int,
    mode: Any,
    keep_every: int | None,
) -> None:
    folder = tmp_path_factory.mktemp("rotation")

    def restarted() -> CheckpointManager:
        options: Any = {"keep_best": keep_best, "mode": mode, "keep_every": keep_every}
        again = CheckpointManager(folder, keep_last, **options)
        again.clean()
        return again

    manager, step = restarted(), 0
    values: dict[int, float | None] = {}
    for further, value, what in events:
        step += further
        before = steps_in(folder)
        with pytest.MonkeyPatch.context() as patch:
            if what == "no room":
                patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
                with pytest.raises(OSError, match=r"0\.0 MB free, but a checkpoint takes"):
                    save(manager, step, value)
                assert steps_in(folder) == before
                continue
            if what == "killed after publishing":
                patch.setattr(rotation, "steps_to_keep", lambda *_: (_ for _ in ()).throw(Killed))
            if what == "killed in removal":
                patch.setattr(rotation, "remove_checkpoint", _hide_and_die)
            try:
                save(manager, step, value)
                killed = False
            except Killed:
                killed = True
        values[step] = value if value in (1.0, 2.0, 3.0) else None
        if killed or what == "restarted":
            manager = restarted()
        assert steps_in(folder)[-1] == step
        known = {s: v for s, v in values.items() if s in before or s == step}
        expected = _expected_steps(known, keep_last, keep_best, mode, keep_every)
        assert expected <= {*steps_in(folder)}
        if not killed:
            assert {*steps_in(folder)} == expected
            assert not [*(folder / "checkpoints").glob(".*")]
        best = [s for s in steps_in(folder) if values[s] is not None]
        found = find_best_checkpoint(folder, mode=mode)
        if best:
            top = (min if mode == "min" else max)(values[s] for s in best)  # type: ignore[type-var]
            assert found is not None
            assert values[int(found.name[5:])] == top
        else:
            assert found is None


def _hide_and_die(path: Path) -> None:
    path.rename(path.with_name(f".{path.name}.removed"))
    raise Killed


def _expected_steps(values: dict[int, float | None], last: int, best: int, mode: str, nth: int | None) -> set[int]:
    stay = {*sorted(values)[-last:]} | {step for step in values if nth and step % nth == 0}
    evaluated = [step for step in sorted(values) if values[step] is not None]
    for _ in range(min(best, len(evaluated))):
        top = (min if mode == "min" else max)(evaluated, key=values.__getitem__)  # type: ignore[arg-type]
        stay.add(top)
        evaluated.remove(top)
    return stay


def test_damaged_checkpoints_do_not_count(tmp_path: Path) -> None:
    for step in (1, 2, 3, 8):
        save(CheckpointManager(tmp_path, keep_last=9), step, 0.1 * step)
    (tmp_path / "checkpoints" / "step_00000003" / "manifest.json").write_text("{}")
    damaged_step = tmp_path / "checkpoints" / "step_00000008"  # whole by its manifest, but a tensor was altered
    manager = CheckpointManager(tmp_path, keep_last=2, keep_best=1)
    manager.mark_damaged(damaged_step)
    save(manager, 4)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 8]
    save(manager, 5)
    assert steps_in(tmp_path) == [1, 4, 5, 8]  # 1 is the best
    save(manager, 8)
    save(manager, 9)
    assert steps_in(tmp_path) == [1, 8, 9]


def test_later_runs_see_the_damage_note(tmp_path: Path) -> None:
    """The manifest does not show the damage, and the checkpoint must not be counted in the place of a good one."""
    first = CheckpointManager(tmp_path, keep_last=9)
    for step in (1, 2, 3):
        save(first, step)
    first.mark_damaged(tmp_path / "checkpoints" / "step_00000003")
    first.leave_damage_notes()
    later = CheckpointManager(tmp_path, keep_last=2)
    save(later, 4)
    assert steps_in(tmp_path) == [2, 3, 4]
    save(later, 3)  # written anew it counts again
    save(CheckpointManager(tmp_path, keep_last=2), 5)
    assert steps_in(tmp_path) == [4, 5]
    assert not list((tmp_path / "checkpoints").glob(".step_*"))


def test_a_checkpoint_of_a_newer_format_is_not_removed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    newer = save(manager, 1) / "manifest.json"
    manifest = json.loads(newer.read_text()) | {"format": 99}
    manifest.pop("digest")
    newer.write_text(json.dumps(manifest | {"digest": manifest_digest(manifest)}, indent=1))
    manager = CheckpointManager(tmp_path, keep_last=1)
    for step in (2, 3):
        save(manager, step)
    assert steps_in(tmp_path) == [1, 3]


@pytest.mark.parametrize("metrics", [[], {"eval/loss": "0"}, {"eval/loss": None}, {"eval/loss": 10**400}, "x", None])
def test_metrics_that_are_not_finite_numbers_do_not_count(tmp_path: Path, metrics: Any) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save_state(TrainState({"w": torch.zeros(2)}, {}), {"step": 1, "metrics": metrics}, {})
    assert find_best_checkpoint(tmp_path) is None


def _save_and_ask(folder: Path, rank: int) -> tuple[list[bool], list[tuple[int, float]], str]:
    manager = CheckpointManager(folder, keep_last=1, keep_best=1, is_main_process=rank == 0)
    save(manager, 1, 0.5)
    answers = [manager.would_be_among_best(2, {"eval/loss": value}) for value in (0.4, 0.6, float("nan"))]
    if rank == 0:
        manager.check_may_write = _refuse
    with pytest.raises(UserError) as refused:
        save(manager, 2, 0.4)
    return answers, manager.best(), str(refused.value)


def _refuse() -> None:
    raise UserError("taken")


def _on_rank(folder: Path) -> Any:
    return _save_and_ask(folder, torch.distributed.get_rank())


def test_all_ranks_get_the_same_answers_and_errors(tmp_path: Path, pool2: Any) -> None:
    for answers_of_rank in pool2.run(_on_rank, tmp_path):
        assert answers_of_rank == ([True, False, False], [(1, 0.5)], "taken")
    assert steps_in(tmp_path) == [1]


# Whole runs


@pytest.fixture
def losses(toy: ToyRun, change_recipe: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the evaluation of step n return LOSSES[n]."""
    evaluate = RecipeBody.evaluate

    def scripted(body: RecipeBody, shell: Shell) -> dict[str, float] | None:
        with monkeypatch.context() as patch:
            value = LOSSES.get(shell.step, 9.0)
            patch.setattr(body.recipe, "loss", lambda output, batch: output.sum() * 0 + value * len(batch["x"]))
            return evaluate(body, shell)

    monkeypatch.setattr(RecipeBody, "evaluate", scripted)


LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: float("nan"), 5: 2.0, 6: 7.0, 7: 8.0, 8: 2.0}


@pytest.mark.usefixtures("losses")
def test_a_run_keeps_and_loads_its_best_step(toy: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("training.eval_steps=1", "checkpoint.every=null", "checkpoint.keep_last=1", "checkpoint.keep_best=2")
    toy.train(*options, "training.max_steps=4")
    assert saved_steps(toy) == [2, 3, 4]
    # Another process goes on: what was best is known from the checkpoints.
    outcome = toy.train(*options, "checkpoint.load_best_model_at_end=true")
    assert saved_steps(toy) == [5, 8, 10]
    assert (outcome.step, outcome.best_step) == (10, 5)
    last = capsys.readouterr().out.splitlines()[-1]
    best = toy.output / "checkpoints" / "step_00000005"
    assert last == f"best: step 5, eval/loss 2, {best}; its weights are in the model"
    stored = open_checkpoint(best).read().model
    for name, tensor in outcome.model.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
    assert find_latest_checkpoint(toy.output) == toy.output / "checkpoints" / "step_00000010"
    assert find_best_checkpoint(toy.output) == best
    # The last step is evaluated before it is saved, so that it has a value too.
    assert open_checkpoint(toy.output / "checkpoints" / "step_00000010").trainer["metrics"] == {"eval/loss": 9}


@pytest.mark.usefixtures("losses")
def test_a_damaged_best_checkpoint_is_skipped(toy: ToyRun, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("training.eval_steps=2", "training.max_steps=8", "checkpoint.keep_best=4", "checkpoint.mode=max")
    options += ("checkpoint.load_best_model_at_end=true",)
    assert toy.train(*options).best_step == 6
    path = toy.output / "checkpoints" / "step_00000006" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert toy.train(*options).best_step == 2
    assert "warning: the best checkpoint, of step 6, is damaged and passed over" in capsys.readouterr().out


def run_training(config: Path, overrides: list[str]) -> tuple[int | None, bool]:
    outcome = train(load_run(config, overrides))
    best = find_best_checkpoint(outcome.output_dir, mode="max")
    assert best is not None
    stored = open_checkpoint(best).stored_state().model
    parts = {name: (local_part(p), stored[name].read(local_region(p))) for name, p in outcome.model.named_parameters()}
    return outcome.best_step, all(torch.equal(mine, theirs) for mine, theirs in parts.values())


def test_two_sharded_ranks_load_the_same_best_step(toy: ToyRun, pool2: Any) -> None:
    options = ["distributed.strategy=fsdp", "launch.procs_per_node=2", "training.eval_steps=2", "checkpoint.every=null"]
    options += ["checkpoint.keep_best=1", "checkpoint.keep_last=1", "checkpoint.load_best_model_at_end=true"]
    options += ["checkpoint.mode=max"]  # the worst, which is not the last
    first, second = pool2.run(run_training, toy.config, options, init=False)
    assert first == second == (saved_steps(toy)[0], True)
    assert len(saved_steps(toy)) == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["checkpoint.load_best_model_at_end=true"], "keep_best = 0 keeps no best"),
        (
            ["checkpoint.keep_best=1", "checkpoint.metric=eval/acc"],
            "'eval/acc': an evaluation does not give",
        ),
        (["checkpoint.mode=least"], "checkpoint.mode"),
    ],
)
def test_metrics_that_are_never_measured_are_refused(toy: ToyRun, overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        toy.train(*overrides)
    assert "\n" not in str(refused.value)


def test_keep_best_needs_something_to_evaluate(toy: ToyRun, change_recipe: Callable[[str, str], None]) -> None:
    change_recipe("return Squares(17)", "return None")
    with pytest.raises(UserError, match=r"keep_best = 1, but the recipe has no evaluation data"):
        toy.train("checkpoint.keep_best=1")


def test_every_minutes_saves_by_time(toy: ToyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = [0]

    def add(meter: Meter, *arguments: Any) -> None:
        original(meter, *arguments)
        minutes[0] += 1

    original = Meter.add  # called once in each step
    monkeypatch.setattr(Meter, "add", add)
    monkeypatch.setattr(time, "monotonic", lambda: 60.0 * minutes[0])
    toy.train("checkpoint.every=null", "checkpoint.every_minutes=2.5", "checkpoint.keep_last=99")
    assert saved_steps(toy) == [3, 6, 9, 10]  # due after three minutes; and at the end
    shutil.rmtree(toy.output)
    toy.train("checkpoint.every=null", "checkpoint.every_minutes=11", "checkpoint.keep_last=99")
    assert saved_steps(toy) == [10]


def test_keep_every_saves_between_regular_saves(toy: ToyRun) -> None:
    toy.train("checkpoint.every=4", "checkpoint.keep_every=3", "checkpoint.keep_last=1")
    assert saved_steps(toy) == [3, 6, 9, 10]


def test_a_full_disk_is_reported_before_the_run_and_at_each_save(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = "training.lr_scheduler=constant"
    toy.train(constant, "training.max_steps=2")
    usage = shutil.disk_usage(toy.output)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match="step 6 could not be saved"):
        toy.train(constant, "training.max_steps=6")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len(lines) == 3
    assert "0.0 MB free, but a checkpoint takes 0.0 MB; make room" in lines[0]
    assert "step 4 could not be saved" in lines[1]
    assert lines[1].endswith("the last checkpoint is 2")
    assert saved_steps(toy) == [2]


@pytest.mark.parametrize(("optimizer", "times"), [("adamw", 3), ("sgd", 1), ("{name: sgd, momentum: 0.9}", 2)])
def test_the_size_of_a_checkpoint_is_estimated_before_the_first_step(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, optimizer: str, times: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(CheckpointManager, "missing_space", lambda self, needed: asked.append(needed))
    toy.train("model.hidden=20000", f"training.optimizer={optimizer}", "training.max_steps=1")
    weights = 4 * (3 * 20000 + 1)
    before, at_save = asked
    assert before == pytest.approx(times * weights, rel=0.05)
    assert at_save == pytest.approx(before, rel=0.05)
