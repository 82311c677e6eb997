"""A SLURM of two machines on this one: a controller and two daemons that listen on loopback, without accounting."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ports import free_port

NODES = ("shoal-a", "shoal-b")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
CONFIG = """
ClusterName=shoal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=5
KillWait=10
NodeName={nodes[0]} NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName={nodes[1]} NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=main Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Returns why this machine cannot have a SLURM; empty if it can."""
    if os.geteuid() != 0:
        return "the daemons of SLURM need root"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(absent)} not installed; `make test-clusters` installs them" if absent else ""


class Slurm:
    """A cluster that runs; `environment` leads the commands of SLURM to it."""

    def __init__(self, folder: Path, resources: ExitStack):
        self.folder, self._resources = folder, resources
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("munge", "state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        ports = [free_port() for _ in range(3)]
        config = CONFIG.format(folder=folder, host=socket.gethostname(), ports=ports, nodes=NODES)
        (folder / "slurm.conf").write_text(config)
        (folder / "munge" / "key").write_bytes(os.urandom(1024))
        (folder / "munge" / "key").chmod(0o400)
        files = [f"--{kind}-file={folder}/munge/{kind}" for kind in ("key", "pid", "log", "seed")]
        self._start("munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *files)
        self.until((folder / "munge" / "socket").exists)
        self._start("slurmctld", "-D", "-i")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        self.until(lambda: self.call("sinfo", "--noheader", "--format=%D %T").strip() == "2 idle")

    def _start(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            process = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out, start_new_session=True)
        self._resources.callback(process.wait)
        self._resources.callback(process.send_signal, signal.SIGTERM)

    def call(self, *command: str) -> str:
        """Returns what a command of SLURM prints."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return result.stdout

    def state(self, job: str) -> str:
        """Returns the state of a job, such as PENDING or COMPLETED."""
        fields = dict(word.split("=", 1) for word in self.call("scontrol", "show", "job", job).split() if "=" in word)
        return fields.get("JobState", "")

    def wait(self, job: str, seconds: float = 800) -> str:
        """Waits for the end of a job and returns its last state.

        A job that goes back into the queue seems to have ended for a few seconds, so the state has to last.
        """
        ended_at = float("inf")

        def has_ended() -> bool:
            nonlocal ended_at
            runs = self.state(job) in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "")
            ended_at = float("inf") if runs else min(ended_at, time.monotonic())
            return time.monotonic() > ended_at + 10

        self.until(has_ended, seconds)
        return self.state(job)

    def until(self, condition: object, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():  # type: ignore[operator]
            if time.monotonic() > end:
                logs = "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))
                raise AssertionError(f"SLURM did not get there in {seconds} s\n{logs}")
            time.sleep(0.2)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Starts a SLURM of two machines, and ends it with the context."""
    hosts = Path("/etc/hosts")
    before = hosts.read_text()
    with ExitStack() as resources:
        hosts.write_text(f"{before.rstrip()}\n127.0.0.1 {' '.join(NODES)}\n")
        resources.callback(hosts.write_text, before)
        cluster = Slurm(folder, resources)
        try:
            yield cluster
        finally:
            cluster.call("scancel", "--user=root")
            cluster.until(lambda: not cluster.call("squeue", "--noheader"))
