"""Says in one line what an exception in the user's code means: where it was raised, and what to do.

An exception inside a recipe passes through dozens of frames of shoal, torch and the command line. The user needs one.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

import shoal
from shoal.config import Run
from shoal.errors import UserError, one_line, printable
from shoal.processes.group import is_lost_peer_error

_PACKAGES = [str(Path(module.__file__ or "").parent) for module in (shoal, torch)]
_PYTHON = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = [Path(folder).resolve() for folder in (*_PACKAGES, *_PYTHON)]
_HINTS = {
    r"Target -?\d+ is out of bounds|index out of range in self": "a label or token is not below the number of classes "
    "of the model's output or embedding; correct the data, or mark labels to leave out by -100",
    r"device-side assert": "most often a label or token is not below the number of classes; training.device=cpu shows "
    "where",
    r"indices must be integers": "a batch is a dict if __getitem__ of the data returns a dict; return one, or index "
    "the batch by position",
    r"does not require grad": "the loss is detached from the model; return it without .item() and .detach()",
}
"""What to do, by what an error says."""
_NO_HOST_MEMORY = r"DefaultCPUAllocator: (can't allocate|not enough) memory: you tried to allocate \d+ bytes"


class RecipeFailure(UserError):
    """An exception in the user's code, in one line. It may be gone if the run is started again, as other errors may."""


@contextmanager
def explained(run: Run | None = None) -> Iterator[None]:
    """Turns exceptions from the user's code, and a lack of memory, into a RecipeFailure; others pass as they are."""
    try:
        yield
    except (UserError, PermissionError):
        raise
    except Exception as error:
        if run is not None and lacks_memory(error):
            raise RecipeFailure(describe_lack_of_memory(error, run)) from error
        if is_lost_peer_error(error) or (line := describe(error)) is None:
            raise
        raise RecipeFailure(line) from error


@contextmanager
def with_hints() -> Iterator[None]:
    """Adds what to do to an exception from the user's code, which passes with its traceback."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError) and (hint := _hint(error)):
            error.add_note(f"shoal: {hint}")
        raise


def describe(error: Exception) -> str | None:
    """Returns where in the user's code an exception was raised, what it says, and what to do; None if nowhere there."""
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    message = one_line(error)
    if isinstance(error, SyntaxError) and error.filename:
        frames, message = [(error.filename, error.lineno or 0, "the module")], error.msg
    if "Original Traceback" in str(error):  # torch passes on an exception of a data worker as text
        found = re.findall(r'File "([^"\n]+)", line (\d+), in (\S+)', str(error))
        frames = [(file, int(line), function) for file, line, function in found]
        message = one_line(str(error).strip().splitlines()[-1].partition(": ")[2])
    places = [place for place in frames if _is_users(place[0])]
    if not places:
        return None
    file, line, function = places[-1]
    notes = "".join(f"; {one_line(note)}" for note in getattr(error, "__notes__", ()))
    hint = f"; {hint}" if (hint := _hint(error)) else ""
    return f"{_shown(file)}:{line} in {function}: {type(error).__name__}: {message}{hint}{notes}"


def _hint(error: Exception) -> str:
    return next((hint for pattern, hint in _HINTS.items() if re.search(pattern, str(error))), "")


def lacks_memory(error: Exception) -> bool:
    """Returns whether an error says that a GPU, or the host, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or bool(re.search(_NO_HOST_MEMORY, str(error)))


def describe_lack_of_memory(error: Exception, run: Run) -> str:
    """Returns the cheapest three ways to need less memory that are not in force yet."""
    config = run.config
    training, batch = config.training, config.training.batch_size or 1
    sharded = config.distributed.strategy in ("fsdp", "mesh", "deepspeed")
    remedies = {
        f"training.batch_size = {max(1, batch // 2)} with training.global_batch_size as it is": batch > 1,
        "training.activation_checkpointing = full": training.activation_checkpointing.mode == "none",
        "training.loss_chunks = 8": training.loss_chunks == 1,
        "distributed.strategy = fsdp": not sharded and config.launch.processes > 1,
        "training.mixed_precision = bf16": training.mixed_precision == "fp32",
        "more processes under fsdp": True,
    }
    cheapest = [remedy for remedy, helps in remedies.items() if helps][:3]
    found = re.search(_NO_HOST_MEMORY, str(error))
    said = found[0] if found else one_line(error).partition(". ")[0]
    return f"{said}; use {', or '.join(cheapest)}"


def keep_traceback(path: Path, error: BaseException) -> None:
    """Appends the traceback of an error to the log of a rank, if there is a run folder."""
    text = "".join(traceback.format_exception(error))
    with suppress(OSError):
        if path.parent.parent.is_dir():
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(harmless(text))


def harmless(text: str) -> str:
    """Returns a traceback in which no line looks like one that shoal prints."""
    return re.sub(r"^(?=shoal:|warning:)", "  ", printable(text, keep="\n\t"), flags=re.MULTILINE)


def _is_users(file: str) -> bool:
    """Returns whether a file is neither shoal's, nor Python's, nor that of an installed package."""
    path = Path(file)
    return path.is_file() and not any(path.resolve().is_relative_to(folder) for folder in _LIBRARIES)


def _shown(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
