"""Which checkpoints a run keeps, and which one it goes on from."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeVar

import torch.distributed as dist

from shoal.checkpoint.async_save import Saver
from shoal.checkpoint.store import Checkpoint, DamagedCheckpoint, open_checkpoint
from shoal.config.schema import LoaderConfig
from shoal.errors import UserError
from shoal.types import TrainState

T = TypeVar("T")
Mode = Literal["min", "max"]

LARGEST = sys.float_info.max
_STEP = re.compile(r"^step_(\d{8,})$")


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
        self.folder = Path(output_dir) / "checkpoints"
        self.keep_last, self.keep_best, self.keep_every = keep_last, keep_best, keep_every
        self.metric, self.mode = metric, mode
        self.is_main_process, self.may_write = is_main_process, may_write
        self._metrics: dict[str, dict[str, float] | None] = {}
        self._lock = Lock()  # a save in the background clears up while the loop asks what is best
        self.background, self._saver = background, Saver(background)
        self.saving_step: int | None = None
        """What was given to `save` last."""
        self.saved_step = 0
        """The last that was published."""

    def steps(self) -> list[Path]:
        """The step folders, oldest first."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if _STEP.match(path.name)), key=_step_of)

    def path_of(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def save(self, state: TrainState, trainer: dict[str, Any], about: dict[str, Any]) -> Path:
        """Publishes a checkpoint, then removes what it makes superfluous.

        OSError if it cannot be written, on every rank, with all others left as they were; in the background, that comes
        from `wait`. `trainer["metrics"]` is what the step was worth, where it was evaluated.
        """
        path = self.path_of(trainer["step"])
        self.wait()
        self.saving_step = trainer["step"]
        self.check_ready(num_bytes(state))
        self._saver.save(path, state, trainer, about, lambda: self.published(path, trainer))
        return path

    def wait(self) -> None:
        """Until nothing is being written; raises what went wrong with the last save."""
        self._saver.wait()

    def check_ready(self, needed_bytes: int) -> None:
        """Raises on every rank if a checkpoint of this size cannot be written, or is not ours to write."""
        problem: Exception | None = None
        if self.is_main_process:
            try:
                self.may_write()
                problem = OSError(lack) if (lack := self.lack_of_room(needed_bytes)) else None
            except UserError as error:
                problem = error
        if problem := _told_by_main(problem):
            raise problem

    def lack_of_room(self, needed_bytes: int) -> str | None:
        """Says so if the disk has no room for a checkpoint of this size beside those that are there."""
        try:
            there = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
            free_bytes = shutil.disk_usage(there).free
        except OSError:  # whoever writes will find out
            return None
        if free_bytes >= needed_bytes:
            return None
        return f"{self.folder} has {_gb(free_bytes)} free, but a checkpoint takes {_gb(needed_bytes)}"

    def published(self, path: Path, trainer: dict[str, Any]) -> None:
        """Removes what is superfluous now that `path` is there. Everything is looked up anew, so that a run which was
        killed in between leaves nothing behind that its successor does not remove."""
        with self._lock:
            self._metrics[path.name] = _worth(trainer)
            self.saved_step = trainer["step"]
            if self.is_main_process:
                note_of_damage(path).unlink(missing_ok=True)
                self._clear_up_after(_step_of(path))

    def _clear_up_after(self, step: int) -> None:
        good = self._values(up_to=step)
        stay = kept(good, self.keep_last, self.keep_best, self.mode, self.keep_every)
        last = sorted(good)[-self.keep_last :]
        for old in self.steps():
            number = _step_of(old)
            damaged = self._metrics.get(old.name, {}) is None
            # A damaged one does not count; it goes once there are as many good ones after it as are to be kept.
            passed_by = damaged and len(last) == self.keep_last and number < last[0]
            if (number in good and number not in stay) or (passed_by and not _is_nth(number, self.keep_every)):
                _remove(old)

    def pass_over(self, path: Path) -> None:
        """From now on a checkpoint that could not be read counts as damaged, though its manifest is whole."""
        self._metrics[path.name] = None

    def note_damage(self) -> None:
        """Leaves notes beside what was passed over, for those who come later."""
        for path in self.steps() if self.is_main_process else ():
            if path.name in self._metrics and self._metrics[path.name] is None:
                with suppress(OSError):
                    note_of_damage(path).touch()

    def gets_into_best(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether a step that is worth this much would be kept as one of the best. All ranks get the same answer."""
        value = _worth({"metrics": metrics}).get(self.metric)
        if not self.keep_best or value is None:
            return False
        with self._lock:
            values = {**self._values(up_to=step), step: value} if self.is_main_process else {}
        return _told_by_main(step in best_first(values, self.mode)[: self.keep_best])

    def best(self) -> list[tuple[int, float]]:
        """The steps that were evaluated and are good, with their values, best first; the same on all ranks."""
        with self._lock:
            values = self._values() if self.is_main_process else {}
        return _told_by_main([(step, values[step] or 0.0) for step in best_first(values, self.mode)])

    def clean(self) -> None:
        """Removes what a killed run left half-written or half-removed. Only who alone writes here may call it."""
        if not self.is_main_process:
            return
        for old in self.folder.glob(".step_*.old"):  # it was about to be replaced
            name = old.name.removeprefix(".").removesuffix(".old")
            if not (self.folder / name).exists():
                old.rename(self.folder / name)
        for kind in ("part", "removed", "old"):
            for path in self.folder.glob(f".step_*.{kind}"):
                shutil.rmtree(path, ignore_errors=True)

    def is_own_step(self, path: Path) -> bool:
        return bool(_STEP.match(path.name)) and path.resolve().parent == self.folder.resolve()

    def set_aside_after(self, given: Path) -> None:
        """Moves the checkpoints of an abandoned continuation out of the way, without deleting them."""
        for path in self.steps() if self.is_main_process else ():
            if _step_of(path) > _step_of(given):
                aside, times = self.folder / "abandoned" / path.name, 1
                aside.parent.mkdir(exist_ok=True)
                while aside.exists():  # gone back before
                    times += 1
                    aside = aside.with_name(f"{path.name}.{times}")
                path.rename(aside)

    def _values(self, up_to: int | None = None) -> dict[int, float | None]:
        """The good checkpoints' values of the metric. Later ones belong to a continuation that was passed over."""
        values: dict[int, float | None] = {}
        for path in self.steps():
            if up_to is not None and _step_of(path) > up_to:
                continue
            if path.name not in self._metrics and note_of_damage(path).exists():
                self._metrics[path.name] = None
            if path.name not in self._metrics:
                try:
                    self._metrics[path.name] = _worth(open_checkpoint(path).trainer)
                except DamagedCheckpoint:
                    self._metrics[path.name] = None
                except UserError:  # of another version of shoal: neither ours to count nor to remove
                    continue
            metrics = self._metrics[path.name]
            if metrics is not None:
                values[_step_of(path)] = metrics.get(self.metric)
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


def find_latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The highest step under a run folder whose manifest verifies."""
    for folder in reversed(CheckpointManager(output_dir).steps()):
        with suppress(DamagedCheckpoint):
            return open_checkpoint(folder).folder
    return None


def find_best_checkpoint(output_dir: str | Path, metric: str = "eval/loss", mode: Mode = "min") -> Path | None:
    """The step under a run folder that was evaluated best, among those whose manifest verifies."""
    if mode not in ("min", "max"):
        raise UserError(f"find_best_checkpoint(mode={mode!r}): use min or max")
    manager = CheckpointManager(output_dir, metric=metric, mode=mode)
    steps = best_first(manager._values(), mode)
    return next((path for path in manager.steps() if steps and _step_of(path) == steps[0]), None)


def num_bytes(state: TrainState) -> int:
    """What a checkpoint of this state takes on the disk, over all ranks; the manifest is a few hundred a tensor."""
    moments = (tensor for slots in state.optimizer.values() for tensor in slots.values())
    tensors = [*state.model.values(), *moments, *state.strategy.values()]
    return sum(tensor.numel() * tensor.element_size() + 1000 for tensor in tensors)


def find_start(
    resume: str, manager: CheckpointManager, warn: Callable[[str], None], restarted: bool = False
) -> list[Path]:
    """The checkpoints a run may go on from, best first; none means a fresh start.

    `restarted`: a launcher repeats what a user wanted once, so a run that has gone back to a path goes on.
    """
    own = manager.steps()[::-1]
    if resume == "never" and own:
        raise UserError(
            f"checkpoint.resume = never, but {manager.folder} already holds {own[0].name}; "
            "choose another experiment.output_dir or resume: auto"
        )
    if resume in ("never", "auto"):
        return own
    given = Path(resume)
    if restarted and manager.is_own_step(given):
        since = [path for path in own if _step_of(path) > _step_of(given)]
        if any(_resumed_from(path) == resume for path in since):
            return own
    if not given.exists():
        raise UserError(f"checkpoint.resume = {resume!r}: no such folder; give a step folder or a run folder")
    if manager.is_own_step(given):
        return [given]
    found = [given] if _STEP.match(given.name) else CheckpointManager(given).steps()[::-1]
    if not found:
        raise UserError(f"checkpoint.resume = {resume!r} holds no usable checkpoint")
    if own and given.resolve() != manager.folder.parent.resolve():
        warn(f"going on in {manager.folder.parent}; checkpoint.resume = {resume} was only its starting point")
        return own
    return found


def _resumed_from(path: Path) -> str | None:
    """What `checkpoint.resume` was when this was saved."""
    with suppress(DamagedCheckpoint, UserError, LookupError, TypeError):
        return str(open_checkpoint(path).manifest["config"]["checkpoint"]["resume"])
    return None


def check_same_model(
    checkpoint: Checkpoint,
    shapes: dict[str, list[int]],
    advice: str = "choose another experiment.output_dir or checkpoint.resume",
) -> None:
    """Refuses a checkpoint of another architecture, naming the first tensors that differ."""
    theirs = checkpoint.shapes
    differences = [
        f"{name} {theirs.get(name, 'absent')} there, {shapes.get(name, 'absent')} here"
        for name in sorted({*theirs, *shapes})
        if theirs.get(name) != shapes.get(name)
    ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise UserError(
            f"{checkpoint.folder} is a checkpoint of another model: {'; '.join(differences[:3])}{more}; {advice}"
        )


def check_same_run(checkpoint: Checkpoint, now: dict[str, Any], allowed: list[str]) -> None:
    """Refuses to go on with another model, data, seed or batch than the checkpoint was made with."""
    then = _identity(checkpoint.manifest["config"])
    current = _identity(now)
    for key in sorted({*then, *current}):
        if then.get(key) != current.get(key) and not any(key == a or key.startswith(f"{a}.") for a in allowed):
            raise UserError(
                f"{key} = {current.get(key)!r}, but {checkpoint.folder} was made with {then.get(key)!r}; "
                f"set it back, choose another experiment.output_dir, or list it in checkpoint.allow_changed"
            )


_NOT_IDENTITY = {f"dataset.{key}" for key in (*LoaderConfig.model_fields, "cache_dir")}


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """The values that make a run this run and no other, by dotted key."""
    flat = _flatten(config)
    kept = ("recipe", "model.", "lora.", "dataset.", "experiment.seed")
    return {key: value for key, value in flat.items() if key.startswith(kept) and key not in _NOT_IDENTITY}


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _worth(trainer: Any) -> dict[str, float]:
    """What of a checkpoint's metrics may be compared: NaN and infinities are never best. Its content is not trusted."""
    metrics = trainer.get("metrics") if isinstance(trainer, dict) else None
    numbers = metrics.items() if isinstance(metrics, dict) else ()
    return {name: float(v) for name, v in numbers if isinstance(v, int | float) and -LARGEST <= v <= LARGEST}


def _is_nth(step: int, nth: int | None) -> bool:
    return nth is not None and step % nth == 0


def _remove(path: Path) -> None:
    """Out of sight first, at once: nobody sees half of it. What cannot be removed now is tried again after a save."""
    hidden = path.with_name(f".{path.name}.removed")
    with suppress(OSError):
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        note_of_damage(path).unlink(missing_ok=True)
        shutil.rmtree(hidden, ignore_errors=True)


def note_of_damage(path: Path) -> Path:
    """There if a run could not read the checkpoint, whose manifest alone does not show it."""
    return path.with_name(f".{path.name}.damaged")


def _told_by_main(value: T) -> T:
    """The first rank's value, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _step_of(path: Path) -> int:
    match = _STEP.match(path.name)
    assert match, path
    return int(match[1])
