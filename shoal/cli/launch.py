"""`shoal launch`: starts a run on this machine, on several machines, or on a cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.arguments import ConfigFile, Debug, Overrides
from shoal.cli.train import set_variables, train_config

Target = Annotated[
    str | None, typer.Option("--on", metavar="TARGET", help="Where to start it: local, slurm, kubernetes or ray.")
]
Nodes = Annotated[str | None, typer.Option(metavar="N", help="Number of machines, or MIN:MAX if some may leave.")]
ProcsPerNode = Annotated[
    str | None, typer.Option(metavar="N", help="Number of processes on each machine, or auto: one for every GPU.")
]
NodeRank = Annotated[int | None, typer.Option(metavar="N", help="The number of this machine, from 0.")]
MasterAddr = Annotated[str | None, typer.Option(metavar="HOST", help="The address of machine 0.")]
MasterPort = Annotated[int | None, typer.Option(metavar="PORT", help="A free port of machine 0.")]
DryRun = Annotated[bool, typer.Option("--dry-run", metavar="", help="Print what would be started, and start nothing.")]


def launch(
    config: ConfigFile,
    overrides: Overrides = None,
    on: Target = None,
    nodes: Nodes = None,
    procs_per_node: ProcsPerNode = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    dry_run: DryRun = False,
    debug: Debug = False,
) -> None:
    """Start a run on this machine, on several machines, or on a cluster.

    Every option is short for a key of the section launch: --nodes 2 is launch.nodes=2. On several machines without a
    scheduler, run the command on each of them, with its own --node-rank.
    """
    options = {
        "target": on,
        "nodes": nodes,
        "procs_per_node": procs_per_node,
        "node_rank": node_rank,
        "master_addr": master_addr,
        "master_port": master_port,
    }
    keys = [f"launch.{key}={value}" for key, value in options.items() if value is not None]
    every_override = [*(overrides or ()), *keys]
    set_variables(config, every_override)
    from shoal.config import load_run
    from shoal.launch.mistakes import explained
    from shoal.launch.targets import Launch, open_target
    from shoal.processes.detect import detect
    from shoal.training.preflight import check_before_launch

    with explained():
        run = load_run(config, every_override)
    settings = run.config.launch
    if settings.target == "local":
        world = detect(launch=settings)
        if not world.starts and not dry_run:  # one process, or one that a launcher has started
            train_config(config, every_override, ["train", str(config)])
            return
        check_before_launch(run, world)
    raise typer.Exit(open_target(settings.target).submit(run, Launch(config, tuple(every_override)), dry_run))
