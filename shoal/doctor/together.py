"""The diagnosis of all machines of a run, by the ranks that a launcher has started.

The first rank of each machine examines it and posts its findings on the board, so that they arrive even if collectives
do not work. Rank 0 waits for them, tells all ranks to measure the network, and has the diagnosis.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shoal.config import Run
from shoal.doctor.diagnosis import (
    MODEL_SECONDS,
    Diagnosis,
    conclude,
    examine_machine,
    failed_measurement,
    judge_network,
    notes_of,
    on_host,
    request_for,
    try_size_model,
)
from shoal.doctor.findings import Finding, TimeLimitReached, within
from shoal.doctor.forecast import ModelSize
from shoal.doctor.machine import Case, Machine, read_machine
from shoal.doctor.network import GROUP_SECONDS, Network, Request, measure
from shoal.errors import UserError
from shoal.launch.ends import FINAL_EXIT_CODE
from shoal.processes.board import board_section, connect_to_board
from shoal.processes.detect import detect
from shoal.processes.world import World

ARRIVAL_SECONDS = 120.0
"""How long the first rank waits for the others."""
MACHINE_SECONDS = 400.0
"""How long it waits for the findings of a machine."""
_SAME = ("shoal", "torch", "python", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""The packages whose versions have to be the same on all machines."""


def find_world(run: Run | None) -> World:
    """Returns which process this is. Outside of its job, a run for a cluster is examined on this machine alone."""
    if run is None:
        return detect()
    launch = run.config.launch
    if launch.target != "local":
        launch = launch.model_copy(update={"nodes": 1})  # inside of a job the scheduler says how many there are
    return detect(launch=launch)


def diagnose_together(run: Run | None, config: str | None, world: World) -> Diagnosis | None:
    """Examines all machines; returns the diagnosis on rank 0, and None on the others, which have nothing to say."""
    init_timeout = run.config.distributed.init_timeout if run else ARRIVAL_SECONDS
    connect_to_board(world, min(ARRIVAL_SECONDS, init_timeout))
    board = board_section(world, "doctor")
    board.set(f"rank {world.rank}", "")
    missing = _wait(board, [f"rank {rank}" for rank in range(world.size)], ARRIVAL_SECONDS) if world.rank == 0 else []
    model, findings = try_size_model(run) if world.rank == 0 else (None, [])
    if world.local_rank == 0:
        _examine_own(board, world, run, model)
    if world.rank > 0:
        _follow(board, world)
        return None
    nodes = range(world.size // world.local_size)
    silent = _wait(board, [f"node {node}" for node in nodes], 1.0 if missing else MACHINE_SECONDS)
    reports = [json.loads(board.get(f"node {node}")) for node in nodes if f"node {node}" not in silent]
    machines = [Machine(**facts) for facts, _ in reports]
    for machine, (_, own) in zip(machines, reports, strict=True):
        findings += on_host([Finding(**one) for one in own], machine.host)
    findings += _compare_versions(machines)
    network, comparison = None, None
    if missing or silent:
        text = f"{', '.join(missing or silent)} of {world.size} ranks did not come within {ARRIVAL_SECONDS:g} s"
        fix = f"start all ranks, with MASTER_ADDR = {world.address}, MASTER_PORT = {world.port}"
        findings.append(Finding("will break", "network", text, fix))
        board.set("request", "null")
    else:
        request = request_for(run, model, world.size, world.local_size)
        board.set("request", json.dumps(asdict(request)))
        network = _measure(world, request, findings)
    if network is not None:
        about_network, comparison = judge_network(run, model, network, world.local_size)
        findings += about_network
    diagnosis = conclude(config, machines, findings, network, comparison)
    if diagnosis.exit_code:  # else a launcher of shoal would start the ranks again
        connect_to_board(world).set(FINAL_EXIT_CODE, str(diagnosis.exit_code))
    return diagnosis


def _examine_own(board: Any, world: World, run: Run | None, model: ModelSize | None) -> None:
    """Examines this machine and posts what was found. Its variables are not sent to other machines."""
    machine, nodes = read_machine(), world.size // world.local_size
    case = Case(machine, run, world.local_size, nodes, world.address, world.port, opens_port=False)
    findings = notes_of(world) + examine_machine(case, model, lambda name: None)
    facts = {"host": machine.host, "cores": machine.cores, "gpus": machine.gpus, "versions": dict(machine.versions)}
    board.set(f"node {world.node}", json.dumps([facts, [finding.as_dict() for finding in findings]]))


def _follow(board: Any, world: World) -> None:
    """Measures with the others if rank 0 asks for it."""
    if _wait(board, ["request"], ARRIVAL_SECONDS + MACHINE_SECONDS + MODEL_SECONDS):
        raise UserError("rank 0 of `shoal doctor` does not answer; look at what it prints")
    request = json.loads(board.get("request"))
    if request is not None:
        lists = {"shapes": tuple(map(tuple, request["shapes"])), "sizes": tuple(request["sizes"])}
        _measure(world, Request(**{**request, **lists}), [])


def _measure(world: World, request: Request, findings: list[Finding]) -> Network | None:
    """Returns what was measured, or None with a finding that says why nothing was."""
    try:
        return within(request.limit_seconds + GROUP_SECONDS, lambda: measure(world, request))
    except TimeLimitReached:
        text = f"the ranks did not finish measuring within {request.limit_seconds + GROUP_SECONDS:g} s"
        findings.append(Finding("will break", "network", text, "look at the findings about interfaces and names"))
    except Exception as error:
        findings.append(failed_measurement(error))
    return None


def _wait(board: Any, keys: Sequence[str], limit_seconds: float) -> list[str]:
    """Waits until the board has all keys; returns those that are missing when the time is over."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        if board.check(list(keys)):
            return []
        time.sleep(0.05)
    return [key for key in keys if not board.check([key])]


def _compare_versions(machines: Sequence[Machine]) -> list[Finding]:
    """Finds machines with other versions than the first one."""
    findings = []
    for machine in machines[1:]:
        for name in _SAME:
            first, other = (one.versions.get(name, "none") for one in (machines[0], machine))
            if first != other:
                text = f"{name} is {other} on {machine.host} and {first} on {machines[0].host}"
                findings.append(Finding("will break", "versions", text, "install the same version on every machine"))
    return findings
