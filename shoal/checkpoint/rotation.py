"""Rotation: which checkpoints a run keeps, and which of them is the best by a metric."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from shoal.checkpoint.async_save import Saver
from shoal.checkpoint.folders import (
    FINAL,
    damage_note,
    discard,
    is_step_folder,
    remove_checkpoint,
    step_folder,
    step_folders,
    step_of,
)
from shoal.checkpoint.peers import ALL, ALONE
from shoal.checkpoint.store import DamagedCheckpoint, flatten, open_checkpoint, write_checkpoint
from shoal.checkpoint.trees import TREE, read_tree, split_tree
from shoal.errors import UserError
from shoal.types import TrainState

Mode = Literal["min", "max"]

_LARGEST_FLOAT = sys.float_info.max


class CheckpointManager:
    """Saves into `<output_dir>/checkpoints/step_<n>`, and keeps the last k, the best k by a metric, and every n-th.

    All ranks call `save_state`, `best` and `would_be_among_best` together; only the main process reads, moves and
    removes folders. `save` and `save_checkpoint` are for loops of your own. The metrics of a step are stored in its
    checkpoint, so that a later run knows them without another file.
    """

    def __init__(
        self,
        output_dir: str | Path,
        keep_last: int = 3,
        *,
        keep_best: int = 0,
        metric: str = "eval/loss",
        mode: Mode = "min",
        keep_every: int | None = None,
        is_main_process: bool = True,
        check_may_write: Callable[[], None] = lambda: None,
        background: bool = False,
    ):
        """`check_may_write` is called on the main process before each save, and raises UserError if another run has
        taken over the folder. With `background`, `save_state` returns when the state is copied, and `wait` raises its
        errors.
        """
        self.output_dir, self.folder = Path(output_dir), Path(output_dir) / "checkpoints"
        self.keep_last, self.keep_best, self.keep_every = keep_last, keep_best, keep_every
        self.metric, self.mode = metric, mode
        self.is_main_process, self.check_may_write = is_main_process, check_may_write
        self._metrics: dict[int, dict[str, float] | None] = {}
        """The metrics of each step that was looked at; None for a damaged checkpoint."""
        self._lock = Lock()  # the background thread rotates while the training loop asks for the best step
        self.background, self._saver = background, Saver(background)
        self.last_attempted_step: int | None = None
        """The step of the last call of `save_state`, whether or not it succeeded."""
        self.saved_step = 0
        """The step of the last checkpoint that was published."""
        self.rotation_error: OSError | None = None
        """Why the last rotation did not remove all that it should have. The next one tries again."""

    def path_of(self, step: int) -> Path:
        """Returns the folder of a step's checkpoint."""
        return step_folder(self.output_dir, step)

    def reserve(self, state: TrainState) -> None:
        """Begins to allocate the memory that saves in the background copy such a state into."""
        self._saver.reserve(state)

    def save_state(self, state: TrainState, trainer: dict[str, Any], about: dict[str, Any]) -> None:
        """Publishes a checkpoint, and then removes those that need not be kept any longer.

        Raises OSError on every rank if it cannot be written, with the other checkpoints left as they were; in the
        background, `wait` raises it. `trainer["metrics"]` has the metrics of the step, if it was evaluated.
        """
        self.wait()
        self.last_attempted_step = trainer["step"]
        ALL.run_on_rank_0(lambda: self._check_ready(expected_bytes(state)))
        self._saver.save(self.path_of(trainer["step"]), state, trainer, about, lambda: self._published(trainer))

    # For loops of your own

    def save(self, strategy: Any, step: int, *, model: Any, optimizer: Any, final: bool = False, **state: Any) -> Path:
        """Saves a model by `strategy.save_checkpoint`, and removes checkpoints that need not be kept; returns the path.

        `state` is anything that JSON can hold; `metrics={"eval/loss": 0.5}` in it is what `keep_best` compares. With
        `final` the checkpoint is `checkpoints/final`, which is never removed. Where every rank has the whole model,
        only rank 0 needs to call it.
        """
        if not hasattr(strategy, "save_checkpoint"):
            raise TypeError(
                f"CheckpointManager.save: the first argument is a {type(strategy).__name__}; call save(strategy, step, "
                "model=model, optimizer=optimizer), or save_checkpoint(state=..., step=...) without a strategy"
            )
        path = self.folder / FINAL if final else self.path_of(step)
        state = {"step": step, **state}
        strategy.save_checkpoint(path, model, optimizer, **state)
        self.is_main_process = strategy.is_main_process
        if not final:
            self._published(state)
        return path

    def save_checkpoint(self, state: Mapping[str, Any], step: int, *, final: bool = False) -> Path:
        """Saves any nested dict of tensors, numbers and text, such as `{"model": model.state_dict(), "epoch": 3}`.

        Rank 0 writes alone, so the other ranks may call it or not. Returns the path.
        """
        tensors, tree = split_tree(state, "save_checkpoint")
        path, self.is_main_process = self.folder / FINAL if final else self.path_of(step), ALL.rank == 0
        if self.is_main_process:
            metrics = {"metrics": state["metrics"]} if isinstance(state.get("metrics"), dict) else {}
            trainer = {"step": step, **metrics, TREE: tree}
            write_checkpoint(path, tensors, trainer, {}, ALONE)
            if not final:
                self._published(trainer)
        return path

    def load_checkpoint(self, path: str | Path | None = None) -> dict[str, Any]:
        """Returns what `save_checkpoint` has saved, by default the latest, on the CPU."""
        found = self.latest() if path is None else Path(path)
        if found is None:
            raise UserError(f"load_checkpoint: {self.output_dir} has no checkpoint; save one first")
        tree = read_tree(open_checkpoint(found))
        if tree is None:
            raise UserError(f"{found} was not saved by save_checkpoint; use strategy.load_checkpoint({str(found)!r})")
        return tree

    def latest(self) -> Path | None:
        """Returns the latest good checkpoint, or None."""
        from shoal.checkpoint.latest import find_latest_checkpoint  # which needs this class

        return find_latest_checkpoint(self.output_dir)

    # For all

    def wait(self) -> None:
        """Waits until nothing is being written, and raises the error of the last save."""
        self._saver.wait()

    def _check_ready(self, needed_bytes: int) -> None:
        """Raises UserError if another run owns the folder, and OSError if the disk has too little space."""
        self.check_may_write()
        if problem := self.missing_space(needed_bytes):
            raise OSError(problem)

    def missing_space(self, needed_bytes: int) -> str | None:
        """Returns a message if the disk has no space for another checkpoint of this size, and else None."""
        with suppress(OSError):  # the save itself will report it
            existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
            free_bytes = shutil.disk_usage(existing).free
            if free_bytes < needed_bytes:
                return f"{self.folder} has {_in_gb(free_bytes)} free, but a checkpoint takes {_in_gb(needed_bytes)}"
        return None

    def _published(self, trainer: dict[str, Any]) -> None:
        """Notes that a step was saved, and rotates.

        Rotation lists the folders again after each save, so that whatever a killed run did not get to remove is removed
        by its successor.
        """
        with self._lock:
            self.saved_step = step = trainer["step"]
            self._metrics[step] = _comparable_metrics(trainer)
            if self.is_main_process:
                self.rotation_error = None
                try:
                    damage_note(self.path_of(step)).unlink(missing_ok=True)
                    self._finish_half_done()
                    self._rotate(step)
                except OSError as error:  # the checkpoint is published all the same
                    self.rotation_error = error

    def _rotate(self, saved_step: int) -> None:
        """Removes the checkpoints up to a step that need not be kept."""
        values = self.metric_values(up_to=saved_step)
        keep = steps_to_keep(values, self.keep_last, self.keep_best, self.mode, self.keep_every)
        # Damaged checkpoints do not count. They are removed once `keep_last` good ones are newer than they are.
        oldest_of_last = sorted(values)[-self.keep_last] if len(values) >= self.keep_last else 0
        for path in step_folders(self.output_dir):
            step = step_of(path)
            outdated_damage = self._metrics.get(step, {}) is None and step < oldest_of_last
            if (step in values and step not in keep) or (outdated_damage and not _is_every_nth(step, self.keep_every)):
                try:
                    remove_checkpoint(path)
                except OSError as error:
                    self.rotation_error = error

    def mark_damaged(self, path: Path) -> None:
        """Counts a checkpoint as damaged from now on, although its manifest is whole."""
        self._metrics[step_of(path)] = None

    def leave_damage_notes(self) -> None:
        """Leaves a note beside each checkpoint that was marked as damaged, for later runs and for `ls`."""
        for path in step_folders(self.output_dir) if self.is_main_process else ():
            if self._metrics.get(step_of(path), {}) is None:
                with suppress(OSError):
                    damage_note(path).touch()

    def would_be_among_best(self, step: int, metrics: dict[str, float]) -> bool:
        """Returns whether a step with these metrics would be kept as one of the best; the same on all ranks."""
        value = _comparable_metrics({"metrics": metrics}).get(self.metric)
        if not self.keep_best or value is None:
            return False
        with self._lock:
            values = {**self.metric_values(up_to=step), step: value} if self.is_main_process else {}
        return ALL.broadcast(step in best_first(values, self.mode)[: self.keep_best])

    def best(self) -> list[tuple[int, float]]:
        """Returns the evaluated steps that are not damaged with their values, best first; the same on all ranks."""
        with self._lock:
            values = self.metric_values() if self.is_main_process else {}
        return ALL.broadcast([(step, values[step] or 0.0) for step in best_first(values, self.mode)])

    def clean(self) -> None:
        """Finishes or removes what a killed run left half done. Only the run that holds the folder may call it.

        All ranks call it, and none returns before it is done: they must see the same checkpoints afterwards.
        """
        ALL.run_on_rank_0(self._finish_half_done)

    def _finish_half_done(self) -> None:
        """Finishes or removes what a killed run, or an error in this one, left half done."""
        for hidden in sorted(self.folder.glob(".step_*")):
            target = self.folder / hidden.stem.removeprefix(".")
            if hidden.suffix == ".old" and not target.exists():  # the run was killed while it replaced this one
                hidden.rename(target)
            elif hidden.suffix in (".part", ".removed", ".old"):
                discard(hidden)

    def owns(self, path: Path) -> bool:
        """Returns whether a path is a step folder of this run."""
        return is_step_folder(path) and path.resolve().parent == self.folder.resolve()

    def set_aside_later_steps(self, resumed: Path) -> None:
        """Moves the checkpoints after the resumed one to `checkpoints/abandoned`, without deleting them."""
        for path in step_folders(self.output_dir) if self.is_main_process else ():
            if step_of(path) > step_of(resumed):
                target, times = self.folder / "abandoned" / path.name, 1
                target.parent.mkdir(exist_ok=True)
                while target.exists():  # an earlier continuation was set aside too
                    times += 1
                    target = target.with_name(f"{path.name}.{times}")
                path.rename(target)

    def metric_values(self, up_to: int | None = None) -> dict[int, float | None]:
        """Returns the metric of each step whose checkpoint is not damaged; None if it was not evaluated.

        Steps after `up_to` belong to an earlier continuation of the run and are left out.
        """
        values: dict[int, float | None] = {}
        for path in step_folders(self.output_dir):
            step = step_of(path)
            if up_to is not None and step > up_to:
                continue
            if step not in self._metrics:
                try:
                    has_note = damage_note(path).exists()
                    self._metrics[step] = None if has_note else _comparable_metrics(open_checkpoint(path).trainer)
                except DamagedCheckpoint:
                    self._metrics[step] = None
                except UserError:  # written by another version of shoal: neither counted nor removed
                    continue
            if (metrics := self._metrics[step]) is not None:
                values[step] = metrics.get(self.metric)
        return values


def steps_to_keep(
    values: Mapping[int, float | None], keep_last: int, keep_best: int = 0, mode: Mode = "min", nth: int | None = None
) -> set[int]:
    """Returns the steps to keep: the last ones, the best of those with a value, and every n-th."""
    every_nth = (step for step in values if _is_every_nth(step, nth))
    return {*sorted(values)[-keep_last:], *best_first(values, mode)[:keep_best], *every_nth}


def best_first(values: Mapping[int, float | None], mode: Mode) -> list[int]:
    """Returns the steps that have a value, best first; of two equal ones the earlier first."""
    sign = 1 if mode == "min" else -1
    return [step for _, step in sorted((sign * value, step) for step, value in values.items() if value is not None)]


def find_best_checkpoint(output_dir: str | Path, metric: str = "eval/loss", mode: Mode = "min") -> Path | None:
    """Returns the checkpoint of a run with the best metric among those whose manifest verifies, or None."""
    if mode not in ("min", "max"):
        raise UserError(f"find_best_checkpoint(mode={mode!r}): use min or max")
    steps = best_first(CheckpointManager(output_dir, metric=metric).metric_values(), mode)
    return step_folder(output_dir, steps[0]) if steps else None


def best_first_folders(run_folder: Path) -> list[Path]:
    """Returns the evaluated checkpoints of a run, ordered by the metric that the run itself compares."""
    manager = CheckpointManager(run_folder)
    for folder in step_folders(run_folder)[::-1]:
        try:
            config = open_checkpoint(folder).manifest.get("config")
        except DamagedCheckpoint:
            continue
        saving = config.get("checkpoint") if isinstance(config, dict) else None  # a manifest is not trusted
        saving = saving if isinstance(saving, dict) else {}
        mode: Mode = "max" if saving.get("mode") == "max" else "min"
        manager = CheckpointManager(run_folder, metric=str(saving.get("metric", manager.metric)), mode=mode)
        break
    return [manager.path_of(step) for step in best_first(manager.metric_values(), manager.mode)]


def expected_bytes(state: TrainState) -> int:
    """Returns about how many bytes a checkpoint of this state takes over all ranks, headers and manifest included."""
    return sum(tensor.numel() * tensor.element_size() + 1000 for tensor in flatten(state).values())


def _comparable_metrics(trainer: Any) -> dict[str, float]:
    """Returns the metrics in a trainer.json that are finite numbers. The file is not trusted."""
    metrics = trainer.get("metrics") if isinstance(trainer, dict) else None
    items = metrics.items() if isinstance(metrics, dict) else ()
    return {
        name: float(v) for name, v in items if isinstance(v, int | float) and -_LARGEST_FLOAT <= v <= _LARGEST_FLOAT
    }


def _is_every_nth(step: int, nth: int | None) -> bool:
    return nth is not None and step % nth == 0


def _in_gb(num_bytes: int) -> str:
    """Returns a number of bytes in GB, or in MB if it is small."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
