"""A run of several processes in the background, of which nothing is left behind, whatever a test does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from conftest import PATIENCE_SECONDS, ToyRun
from safetensors.torch import load_file

SHOAL = (sys.executable, "-m", "shoal", "train", "run.yaml")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


class Launched:
    """`Launched(toy, *command)`, or `Launched(toy, "key=value", …)` for `shoal train run.yaml key=value …`."""

    def __init__(self, toy: ToyRun, *command: str, **environment: str):
        self.mark = f"LAUNCHED_BY_TEST={uuid.uuid4().hex}"
        clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            command if command[0] == sys.executable else (*SHOAL, *command),
            cwd=toy.folder,
            env={**clean, name: value, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a signal to its group is not one to pytest
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
        """All that is left of it: a mark in the environment is inherited, whatever becomes of the parents."""
        return [pid for pid, environment in _environments() if self.mark in environment]

    def ranks(self) -> dict[int, int]:
        """rank → process id."""
        found = {}
        for pid, environment in _environments():
            rank = next((entry[5:] for entry in environment if entry.startswith("RANK=")), None)
            if rank is not None and self.mark in environment and _parent(pid) == self.process.pid:
                found[int(rank)] = pid
        return found

    def until(self, happened: Callable[[], object]) -> None:
        """Waits until the condition is true, or the run has ended, which is an error."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not happened():
            assert self.process.poll() is None, f"the run ended early: {self.process.communicate()}"
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.01)

    def nothing_left(self) -> bool:
        """Whether all of its processes come to their end."""
        end = time.monotonic() + PATIENCE_SECONDS
        while self.alive() and time.monotonic() < end:
            time.sleep(0.05)
        return not self.alive()


def _environments() -> Iterator[tuple[int, list[str]]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # gone meanwhile, or not ours
                yield int(folder.name), (folder / "environ").read_bytes().decode(errors="replace").split("\0")


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def listening_addresses(pids: list[int]) -> set[str]:
    """The local addresses, as the kernel writes them in hexadecimal, on which processes accept connections."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets |= {*re.findall(r"socket:\[(\d+)\]", str(descriptor.readlink()))}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {fields[1].partition(":")[0] for fields in lines if fields[3] == "0A" and fields[9] in sockets}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tensors(output: Path, step: int) -> dict[str, bytes]:
    """Model and optimizer of a checkpoint, whichever files they are in."""
    folder = output / "checkpoints" / f"step_{step:08d}"
    return {
        f"{file.name.split('-')[0].split('.')[0]}/{name}": tensor.numpy().tobytes()
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def saved(toy: ToyRun, step: int) -> Callable[[], bool]:
    return (toy.output / "checkpoints" / f"step_{step:08d}").exists
