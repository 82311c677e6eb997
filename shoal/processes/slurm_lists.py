"""Reads how SLURM writes the machines of a job step, and the number of its tasks on each of them."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from shoal.errors import UserError


def tasks_per_node(variables: Mapping[str, str]) -> list[int]:
    """Returns the number of tasks on each machine; SLURM writes `2(x3),1` for 2, 2, 2, 1."""
    text = variables.get("SLURM_STEP_TASKS_PER_NODE", variables.get("SLURM_STEP_NUM_TASKS", ""))
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if not found:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text!r:.200}: it should look like 2(x3),1; do not set it")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def expand_hosts(text: str) -> tuple[str, ...]:
    """Returns the hosts of a node list of SLURM, such as `gpu[01-03,7],login`."""
    hosts: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", word):
            names = [name + end for name in names for end in ([literal] if literal else _expand(ranges))]
        hosts += names
    return tuple(hosts) or (socket.gethostname(),)


def _expand(ranges: str) -> list[str]:
    """Returns `01-03,7` as 01, 02, 03, 7."""
    numbers: list[str] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            raise UserError(f"SLURM_STEP_NODELIST: [{ranges:.200}] is not a list of numbers; do not set it by hand")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return numbers
