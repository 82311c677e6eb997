"""Starts a run of several processes in the background, and kills all of them at the end of a test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from conftest import PATIENCE_SECONDS, ToyRun
from ports import free_port
from safetensors.torch import load_file

SHOAL = (sys.executable, "-m", "shoal", "train", "run.yaml")


class Launched:
    """A command that runs in the folder of a toy run: `Launched(toy, *command)`.

    A command begins with an absolute path. `Launched(toy, "key=value", …)` is short for the command
    `shoal train run.yaml key=value …`.
    """

    def __init__(self, toy: ToyRun, *command: str, **environment: str):
        self.marker = f"LAUNCHED_BY_TEST={uuid.uuid4().hex}"
        environment_without_rank = {
            key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        name, value = self.marker.split("=")
        self.process = subprocess.Popen(
            command if Path(command[0]).is_absolute() else (*SHOAL, *command),
            cwd=toy.folder,
            env={**environment_without_rank, name: value, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a signal to its process group does not reach pytest
        )
        self.out = self.err = ""

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in [self.process.pid, *self.alive()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def wait(self) -> int:
        """Waits for the end and returns the exit code; what was printed is in `out` and `err`."""
        self.out, self.err = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode

    def alive(self) -> list[int]:
        """Returns all processes of the command: they inherit the marker in the environment, also from dead parents."""
        return [pid for pid, environment in _environments() if self.marker in environment]

    def ranks(self) -> dict[int, int]:
        """Returns the process id of every rank."""
        found = {}
        for pid, environment in _environments():
            rank = next((entry[5:] for entry in environment if entry.startswith("RANK=")), None)
            if rank is not None and self.marker in environment and _parent(pid) == self.process.pid:
                found[int(rank)] = pid
        return found

    def until(self, condition: Callable[[], object]) -> None:
        """Waits until the condition is true, or the run has ended, which is an error."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, f"the run ended early: {self.process.communicate()}"
            assert time.monotonic() < end, "the condition did not come true in time"
            time.sleep(0.01)

    def nothing_left(self) -> bool:
        """Waits for all processes of the command to end, and returns whether they did."""
        end = time.monotonic() + PATIENCE_SECONDS
        while self.alive() and time.monotonic() < end:
            time.sleep(0.05)
        return not self.alive()


def _environments() -> Iterator[tuple[int, list[str]]]:
    """Yields the process id and the environment of every process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                yield int(folder.name), (folder / "environ").read_bytes().decode(errors="replace").split("\0")


def _parent(pid: int) -> int:
    """Returns the parent of a process, or 0 if the process has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def catches(pid: int, number: signal.Signals) -> bool:
    """Returns whether a process has a handler for a signal."""
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
        return bool(caught and int(caught[1], 16) >> (number - 1) & 1)
    return False


def listening_addresses(pids: list[int]) -> set[str]:
    """Returns the local addresses on which processes accept connections, in hexadecimal as the kernel writes them."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets |= {*re.findall(r"socket:\[(\d+)\]", str(descriptor.readlink()))}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {fields[1].partition(":")[0] for fields in lines if fields[3] == "0A" and fields[9] in sockets}


def torchrun() -> tuple[str, ...]:
    """Returns the command of a torchrun at a port of its own: all listen at the same one by default."""
    return (sys.executable, "-m", "torch.distributed.run", f"--master-port={free_port()}")


def tensors(output: Path, step: int) -> dict[str, bytes]:
    """Returns the tensors of model and optimizer in a checkpoint, whichever files they are in."""
    folder = output / "checkpoints" / f"step_{step:08d}"
    return {
        f"{file.name.split('-')[0].split('.')[0]}/{name}": tensor.numpy().tobytes()
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def saved(toy: ToyRun, step: int) -> Callable[[], bool]:
    """Returns a condition that is true once the checkpoint of a step exists."""
    return (toy.output / "checkpoints" / f"step_{step:08d}").exists
