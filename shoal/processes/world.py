"""The processes of a run: who I am, how many there are, and the group they talk in."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist

from shoal.errors import UserError

_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

LOST_PEERS = 75
"""Exit code of a process that ended only because another died or hung."""

HUNG = "hung in {}"
"""On the board, for an attempt: `who` the others waited for in vain, and the processes that are `silent`, in JSON."""

terminal = 2
"""Where the user looks; a process whose output goes to a log keeps the way to it here."""


@dataclass
class World:
    """This process among the others, as torchrun and every launcher like it tells by environment variables."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    least_timeout_seconds: float = 0.0
    """Of torch's own timeouts, where a watchdog is to speak first."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """One process if none of the variables that make a rank is set; a mistake if only some are."""
        if not {"RANK", "LOCAL_RANK"} & {*environment} and environment.get("WORLD_SIZE", "1") == "1":
            return cls()
        missing = [name for name in _NEEDED if name not in environment]
        if missing:
            given = ", ".join(f"{name}={environment[name]}" for name in _NEEDED if name in environment)
            raise UserError(
                f"the environment says {given}, but not {', '.join(missing)}: "
                "start the processes by `torchrun` or by launch.procs_per_node, or unset all of them"
            )
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
            if not environment[name].isdigit():
                raise UserError(f"the environment says {name}={environment[name]!r}, which is not a number")
            numbers[name] = int(environment[name])
        rank, size, local_rank = numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"]
        if rank >= size:
            raise UserError(f"the environment says RANK={rank} in a world of WORLD_SIZE={size}; ranks count from 0")
        return cls(rank, size, local_rank, int(environment.get("LOCAL_WORLD_SIZE", size)))

    def join(self, device: torch.device, backend: str, timeout_seconds: float) -> None:
        """Makes the process group, unless somebody has."""
        if dist.is_initialized():
            return
        if self.size == 1:  # nobody to talk to, so nowhere to listen
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=alone, rank=0, world_size=1)
            return
        if self._on_one_machine:  # which nobody else is to reach
            loopback = "lo0" if sys.platform == "darwin" else "lo"
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        dist.init_process_group(
            backend,
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=max(timeout_seconds, self.least_timeout_seconds)),
            device_id=device if "nccl" in backend else None,
        )

    @property
    def _on_one_machine(self) -> bool:
        """Both are needed: some clusters tell the first of several machines that it is itself `localhost`."""
        return self.size == self.local_size and os.environ["MASTER_ADDR"] in _LOOPBACK

    @cached_property
    def board(self) -> Any:
        """A store where the processes leave word for each other, and for their launcher if that keeps it."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        launcher_keeps_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self.rank == 0 and not launcher_keeps_it:
            return _kept_board(address, port, self._on_one_machine)
        return find_board(address, port)

    @cached_property
    def store(self) -> Any:
        """The board with names of its own for every attempt of a launcher.

        The first restart would otherwise read the addresses of the dead.
        """
        return dist.PrefixStore(attempt(), self.board)  # type: ignore[attr-defined]

    def once_per_node(self, task: Callable[[], None]) -> None:
        """Runs `task` in one process of each machine while the others wait, however long it takes."""
        if self.size == 1:
            task()
            return
        done = f"{task.__qualname__} on node {self.rank // self.local_size}"
        if self.local_rank == 0:
            task()
            self.store.set(done, "yes")
        else:
            while not self.store.check([done]):  # torch's `wait` would not hear a signal
                time.sleep(0.05)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def attempt() -> str:
    """Names this start of the processes: launchers that repair a run count them."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID')}, start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


@cache  # a process has one at an address, however often it asks
def _kept_board(address: str, port: int, loopback_only: bool) -> Any:
    return keep_board(address, port, loopback_only)


def keep_board(address: str, port: int, loopback_only: bool) -> Any:
    """Opens a store to others; port 0 takes a free one. Left to itself torch would listen on every interface."""
    try:
        if loopback_only:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.create_server((address, port), family=family)
        elif socket.has_dualstack_ipv6():
            listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", port))
    except OSError as error:
        raise UserError(
            f"MASTER_PORT={port} cannot be used on this machine: {error.strerror}; choose another"
        ) from None
    # Multi-tenant: torch's own launcher, in the same process, then takes this one instead of making another.
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def find_board(address: str, port: int, timeout_seconds: float = 300) -> Any:
    """The store that another process keeps, waiting for it to come up."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.TCPStore(address, port, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]


_LOST = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Timed out waiting", "pair closure")
_LOST_IN_NCCL = "remote process exited or there was a network error"


def peers_are_lost(error: BaseException) -> bool:
    """Whether an error says no more than that other processes are gone, which is never the cause."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in (*_LOST, _LOST_IN_NCCL))


def choose_backend(wanted: str, device: torch.device, world: World) -> str:
    """gloo for CPU tensors and NCCL for CUDA's, unless ranks share a GPU, which NCCL refuses."""
    if device.type != "cuda":
        if wanted == "nccl":
            raise UserError(
                f"distributed.backend = nccl needs a CUDA device, but the run is on {device.type}; use auto"
            )
        return "gloo"
    if wanted == "gloo":
        return "gloo"
    if world.local_size > torch.cuda.device_count():
        raise UserError(
            f"{world.local_size} processes on this machine, but {torch.cuda.device_count()} GPUs; NCCL needs one each: "
            "start fewer, or let them share by distributed.backend = gloo"
        )
    return "cpu:gloo,cuda:nccl"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
