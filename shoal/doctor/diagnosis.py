"""The list of checks, and the diagnosis that is put together from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import shoal
from shoal.config import Run
from shoal.config.layout import check_layout
from shoal.config.mesh import say_mesh
from shoal.doctor import addresses, disk, hardware, limits
from shoal.doctor.findings import Finding, TimeLimitReached, exit_code, ranked, run_check, within
from shoal.doctor.forecast import ModelSize, can_compress, choose_layout, forecast, size_model
from shoal.doctor.known_bad import check_known_bad
from shoal.doctor.machine import Case, Machine, read_machine
from shoal.doctor.network import Network, Request, judge, measure_in_process
from shoal.errors import UserError, one_line
from shoal.launch.spawn import run_function
from shoal.parallel.compression.payoff import Comparison
from shoal.processes.world import World

MODEL_SECONDS = 120.0
"""The time limit for building the model without memory."""


@dataclass(frozen=True)
class Diagnosis:
    """Everything that `shoal doctor` has found."""

    config: str | None
    machines: tuple[Machine, ...]
    findings: tuple[Finding, ...]
    """The worst first."""
    network: Network | None = None
    comparison: Comparison | None = None

    @property
    def exit_code(self) -> int:
        return exit_code(self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON. Names stay the same from version to version; new ones may be added."""
        return {
            "format": 1,
            "shoal": shoal.__version__,
            "config": self.config,
            "exit_code": self.exit_code,
            "machines": [
                {"host": one.host, "cores": one.cores, "gpus": [*one.gpus], "versions": dict(one.versions)}
                for one in self.machines
            ],
            "findings": [finding.as_dict() for finding in self.findings],
            "network": asdict(self.network) if self.network else None,
            "exchange": _finite(asdict(self.comparison)) if self.comparison else None,
        }


def _finite(value: Any) -> Any:
    """Returns data in which numbers that JSON does not have are null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def examine_machine(case: Case, model: ModelSize | None, on_check: Callable[[str], None]) -> list[Finding]:
    """Runs all checks of one machine, each within its time limit. `on_check` gets the name of each before it runs."""
    checks: tuple[tuple[str, float, Callable[[], Sequence[Finding]]], ...] = (
        ("versions", 10, partial(hardware.check_versions, case)),
        ("known bad", 20, partial(check_known_bad, case)),
        ("layout", 30, partial(check_config, case)),
        ("GPUs", 20, partial(hardware.check_gpus, case)),
        ("use of GPUs", 30, partial(hardware.check_gpu_use, case)),
        ("links of GPUs", 60, partial(hardware.check_gpu_links, case)),
        ("backends", 20, partial(hardware.check_backends, case)),
        ("compiler", 60, partial(hardware.check_compiler, case)),
        ("CPU instructions", 150, partial(hardware.check_cpu_instructions, case)),
        ("shared memory", 10, partial(limits.check_shared_memory, case)),
        ("open files", 10, partial(limits.check_open_files, case)),
        ("processes", 20, partial(limits.check_processes, case)),
        ("disk", 60, partial(disk.check_disk, case, model.checkpoint_bytes if model else None)),
        ("name of this host", 30, partial(addresses.check_own_name, case)),
        ("master port", 30, partial(addresses.check_master, case)),
    )
    findings = []
    for name, limit_seconds, function in checks:
        on_check(name)
        findings += run_check(name, limit_seconds, function)
    return findings


def check_config(case: Case) -> list[Finding]:
    """Checks that the config's layout fits the processes and batches, as `shoal train` does before it starts."""
    if case.run is None:
        return [Finding("not checked", "layout", "no config was given")]
    size = case.procs * case.nodes
    layout = check_layout(case.run.config, case.run.make_recipe(), size, case.procs)
    where = f"{size} processes, the mesh is {say_mesh(layout.mesh)}" if size > 1 else "one process"
    return [Finding("fine", "layout", f"{layout.strategy} on {where}")]


def try_size_model(run: Run | None) -> tuple[ModelSize | None, list[Finding]]:
    """Returns the sizes of the config's model; if it cannot be built, a finding with the reason."""
    if run is None:
        return None, [Finding("not checked", "model", "no config was given")]
    try:
        model = within(MODEL_SECONDS, partial(size_model, run))
    except TimeLimitReached:
        return None, [Finding("not checked", "model", f"it was not built within {MODEL_SECONDS:g} s")]
    except Exception as error:  # the recipe is the user's, and may need data that is not there yet
        return None, [Finding("not checked", "model", f"it cannot be built: {one_line(error)}")]
    says = f"{model.trained:,} trained of {model.parameters:,} parameters"
    return model, [Finding("fine", "model", says)]


def notes_of(world: World) -> list[Finding]:
    """Returns what detection says about the environment, apart from what the table of known-bad combinations has."""
    notes = [note for note in world.notes if not note.startswith("NCCL_TIMEOUT")]
    return [Finding("slow or surprising", "environment", *note.rsplit("; ", 1)) for note in notes]


def request_for(run: Run | None, model: ModelSize | None, ranks: int, local_size: int) -> Request:
    """Returns what the ranks should measure for a config."""
    if run is None:
        return Request()
    training, distributed = run.config.training, run.config.distributed
    shapes: tuple[tuple[int, ...], ...] = ()
    try:
        if model is not None and can_compress(choose_layout(run, ranks, local_size)):
            shapes = model.shapes
    except UserError:  # the check of the layout has found it
        pass
    return Request(training.device, distributed.backend, shapes)


def judge_network(
    run: Run | None, model: ModelSize | None, network: Network, local_size: int
) -> tuple[list[Finding], Comparison | None]:
    """Returns what the measured network means, and for the gradients of the config if there is one."""
    findings = judge(network)
    if run is None or model is None:
        return findings, None
    try:
        about_gradients, comparison = forecast(run, model, network, local_size)
    except UserError:  # the check of the layout has found it
        return findings, None
    return findings + about_gradients, comparison


def diagnose_here(
    run: Run | None, config: str | None, world: World, procs: int | None, on_check: Callable[[str], None]
) -> Diagnosis:
    """Examines this machine; with `procs`, starts as many processes that measure the network between them."""
    launch = run.config.launch if run else None
    machine = read_machine()
    case = Case(
        machine,
        run,
        procs or max(1, world.starts),
        master_port=(launch.master_port if launch else None) or world.port,
    )
    on_check("model")
    model, findings = try_size_model(run)
    findings += notes_of(world) + examine_machine(case, model, on_check)
    if procs is None:
        text = "the network is measured between several processes: --procs N, or under a launcher"
        findings.append(Finding("not checked", "network", text))
        return conclude(config, [machine], findings)
    if case.on_gpu and not machine.gpus:
        findings.append(Finding("not checked", "network", "the GPUs that training.device asks for are missing"))
        return conclude(config, [machine], findings)
    on_check("network")
    try:
        network = run_function(measure_in_process, (request_for(run, model, procs, procs),), procs, "spawn")[0]
    except Exception as error:  # whatever ends a process of a run ends one of these, too
        return conclude(config, [machine], [*findings, failed_measurement(error)])
    about_network, comparison = judge_network(run, model, network, procs)
    return conclude(config, [machine], [*findings, *about_network], network, comparison)


def failed_measurement(error: BaseException) -> Finding:
    """Returns the finding that ranks could not exchange anything."""
    if isinstance(error, UserError):
        problem, _, fix = one_line(error, limit=1000).rpartition("; ")
        return Finding("will break", "network", problem or str(error), fix if problem else "")
    text = f"the processes cannot exchange tensors: {one_line(error)}"
    fix = "look at the findings about interfaces and names; NCCL_DEBUG=INFO or TORCH_CPP_LOG_LEVEL=INFO say more"
    return Finding("will break", "network", text, fix)


def conclude(
    config: str | None,
    machines: Iterable[Machine],
    findings: Iterable[Finding],
    network: Network | None = None,
    comparison: Comparison | None = None,
) -> Diagnosis:
    """Returns the diagnosis with its findings ranked."""
    return Diagnosis(config, tuple(machines), tuple(ranked([*findings])), network, comparison)


def on_host(findings: Iterable[Finding], host: str) -> list[Finding]:
    """Returns the findings with the name of the machine that they are about."""
    return [replace(finding, host=host) for finding in findings]
