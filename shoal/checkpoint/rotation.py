"""Which checkpoints a run keeps: the last, the best by a metric, and every n-th."""

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
    damage_note,
    discard,
    is_step_folder,
    remove_checkpoint,
    step_folder,
    step_folders,
    step_of,
)
from shoal.checkpoint.peers import ALL
from shoal.checkpoint.store import DamagedCheckpoint, flatten, open_checkpoint
from shoal.errors import UserError
from shoal.types import TrainState

Mode = Literal["min", "max"]

LARGEST = sys.float_info.max


class CheckpointManager:
    """Saves into `<output_dir>/checkpoints/step_<n>`; keeps the last k, the best k by a metric, and every n-th.

    All ranks save together, and ask it together what is best: the main process alone looks at folders, moves and
    removes them. What a step was worth is in its own checkpoint, so nothing has to be remembered from run to run.
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
        may_write: Callable[[], None] = lambda: None,
        background: bool = False,
    ):
        """`may_write` is asked on the main process before each save; UserError if another run writes here.

        `background` lets `save` return as soon as the state is copied aside; `wait` then tells how it went.
        """
        self.output_dir, self.folder = Path(output_dir), Path(output_dir) / "checkpoints"
        self.keep_last, self.keep_best, self.keep_every = keep_last, keep_best, keep_every
        self.metric, self.mode = metric, mode
        self.is_main_process, self.may_write = is_main_process, may_write
        self._metrics: dict[int, dict[str, float] | None] = {}
        """What the steps were worth, as far as known; None for one that is damaged."""
        self._lock = Lock()  # a save in the background clears up while the loop asks what is best
        self.background, self._saver = background, Saver(background)
        self.saving_step: int | None = None
        """What was given to `save` last."""
        self.saved_step = 0
        """The last that was published."""

    def path_of(self, step: int) -> Path:
        return step_folder(self.output_dir, step)

    def save(self, state: TrainState, trainer: dict[str, Any], about: dict[str, Any]) -> Path:
        """Publishes a checkpoint, then removes what it makes superfluous.

        OSError if it cannot be written, on every rank, with all others left as they were; in the background, that comes
        from `wait`. `trainer["metrics"]` is what the step was worth, where it was evaluated.
        """
        path = self.path_of(trainer["step"])
        self.wait()
        self.saving_step = trainer["step"]
        ALL.run_on_first(lambda: self._check_ready(num_bytes(state)))
        self._saver.save(path, state, trainer, about, lambda: self._published(trainer))
        return path

    def wait(self) -> None:
        """Until nothing is being written; raises what went wrong with the last save."""
        self._saver.wait()

    def _check_ready(self, needed_bytes: int) -> None:
        """Raises if a checkpoint of this size cannot be written, or is not ours to write."""
        self.may_write()
        if lack := self.lack_of_room(needed_bytes):
            raise OSError(lack)

    def lack_of_room(self, needed_bytes: int) -> str | None:
        """Says so if the disk has no room for a checkpoint of this size beside those that are there."""
        with suppress(OSError):  # whoever writes will find out
            there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
            free_bytes = shutil.disk_usage(there).free
            if free_bytes < needed_bytes:
                return f"{self.folder} has {_gb(free_bytes)} free, but a checkpoint takes {_gb(needed_bytes)}"
        return None

    def _published(self, trainer: dict[str, Any]) -> None:
        """Removes what is superfluous now that a step is there. Everything is looked up anew, so that a run which was
        killed in between leaves nothing behind that its successor does not remove."""
        with self._lock:
            self.saved_step = step = trainer["step"]
            self._metrics[step] = _worth(trainer)
            if self.is_main_process:
                damage_note(self.path_of(step)).unlink(missing_ok=True)
                self._clear_up_after(step)

    def _clear_up_after(self, step: int) -> None:
        good = self.values(up_to=step)
        stay = kept(good, self.keep_last, self.keep_best, self.mode, self.keep_every)
        # A damaged one does not count; it goes once there are as many good ones after it as are to be kept.
        enough = sorted(good)[-self.keep_last] if len(good) >= self.keep_last else 0
        for old in step_folders(self.output_dir):
            number = step_of(old)
            passed_by = self._metrics.get(number, {}) is None and number < enough
            if (number in good and number not in stay) or (passed_by and not _is_nth(number, self.keep_every)):
                with suppress(OSError):  # what cannot be removed now is tried again after the next save
                    remove_checkpoint(old)

    def pass_over(self, path: Path) -> None:
        """From now on a checkpoint that could not be read counts as damaged, though its manifest is whole."""
        self._metrics[step_of(path)] = None

    def note_damage(self) -> None:
        """Leaves notes beside what was passed over, for those who come later."""
        for path in step_folders(self.output_dir) if self.is_main_process else ():
            if self._metrics.get(step_of(path), {}) is None:
                with suppress(OSError):
                    damage_note(path).touch()

    def gets_into_best(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether a step that is worth this much would be kept as one of the best. All ranks get the same answer."""
        value = _worth({"metrics": metrics}).get(self.metric)
        if not self.keep_best or value is None:
            return False
        with self._lock:
            values = {**self.values(up_to=step), step: value} if self.is_main_process else {}
        return ALL.broadcast(step in best_first(values, self.mode)[: self.keep_best])

    def best(self) -> list[tuple[int, float]]:
        """The steps that were evaluated and are good, with their values, best first; the same on all ranks."""
        with self._lock:
            values = self.values() if self.is_main_process else {}
        return ALL.broadcast([(step, values[step] or 0.0) for step in best_first(values, self.mode)])

    def clean(self) -> None:
        """Removes what a killed run left half-written or half-removed. Only who alone writes here may call it."""
        for hidden in sorted(self.folder.glob(".step_*")) if self.is_main_process else ():
            target = self.folder / hidden.stem.removeprefix(".")
            if hidden.suffix == ".old" and not target.exists():  # it was about to be replaced
                hidden.rename(target)
            elif hidden.suffix in (".part", ".removed", ".old"):
                discard(hidden)

    def is_own_step(self, path: Path) -> bool:
        return is_step_folder(path) and path.resolve().parent == self.folder.resolve()

    def set_aside_after(self, given: Path) -> None:
        """Moves the checkpoints of an abandoned continuation out of the way, without deleting them."""
        for path in step_folders(self.output_dir) if self.is_main_process else ():
            if step_of(path) > step_of(given):
                aside, times = self.folder / "abandoned" / path.name, 1
                aside.parent.mkdir(exist_ok=True)
                while aside.exists():  # gone back before
                    times += 1
                    aside = aside.with_name(f"{path.name}.{times}")
                path.rename(aside)

    def values(self, up_to: int | None = None) -> dict[int, float | None]:
        """The good checkpoints' values of the metric. Later ones belong to a continuation that was passed over."""
        values: dict[int, float | None] = {}
        for path in step_folders(self.output_dir):
            step = step_of(path)
            if up_to is not None and step > up_to:
                continue
            if step not in self._metrics:
                try:
                    noted = damage_note(path).exists()
                    self._metrics[step] = None if noted else _worth(open_checkpoint(path).trainer)
                except DamagedCheckpoint:
                    self._metrics[step] = None
                except UserError:  # of another version of shoal: neither ours to count nor to remove
                    continue
            metrics = self._metrics[step]
            if metrics is not None:
                values[step] = metrics.get(self.metric)
        return values


def kept(
    good: Mapping[int, float | None], keep_last: int, keep_best: int = 0, mode: Mode = "min", nth: int | None = None
) -> set[int]:
    """Which of these steps stay: the last, the best of those with a value, every n-th."""
    last = sorted(good)[-keep_last:]
    return {*last, *best_first(good, mode)[:keep_best], *(step for step in good if _is_nth(step, nth))}


def best_first(values: Mapping[int, float | None], mode: Mode) -> list[int]:
    """The steps that have a value, best first; of equals the earlier."""
    sign = 1 if mode == "min" else -1
    ranked = sorted((sign * value, step) for step, value in values.items() if value is not None)
    return [step for _, step in ranked]


def find_best_checkpoint(output_dir: str | Path, metric: str = "eval/loss", mode: Mode = "min") -> Path | None:
    """The step under a run folder that was evaluated best, among those whose manifest verifies."""
    if mode not in ("min", "max"):
        raise UserError(f"find_best_checkpoint(mode={mode!r}): use min or max")
    steps = best_first(CheckpointManager(output_dir, metric=metric).values(), mode)
    return step_folder(output_dir, steps[0]) if steps else None


def num_bytes(state: TrainState) -> int:
    """What a checkpoint of this state takes on the disk, over all ranks; the manifest is a few hundred a tensor."""
    return sum(tensor.numel() * tensor.element_size() + 1000 for tensor in flatten(state).values())


def _worth(trainer: Any) -> dict[str, float]:
    """What of a checkpoint's metrics may be compared: NaN and infinities are never best. Its content is not trusted."""
    metrics = trainer.get("metrics") if isinstance(trainer, dict) else None
    numbers = metrics.items() if isinstance(metrics, dict) else ()
    return {name: float(v) for name, v in numbers if isinstance(v, int | float) and -LARGEST <= v <= LARGEST}


def _is_nth(step: int, nth: int | None) -> bool:
    return nth is not None and step % nth == 0


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
