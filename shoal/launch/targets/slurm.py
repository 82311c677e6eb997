"""Starts a run as a SLURM job: one task on each machine, which starts the processes of that machine."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.config import Run
from shoal.errors import UserError, one_line, printable
from shoal.launch.targets import Launch
from shoal.launch.targets.checks import check_layout_of, count_gpus, number_of_nodes

FIRST_PORT, PORTS = 10_000, 20_000
"""The machines of a job meet at port FIRST_PORT + (job id modulo PORTS), below the ports that systems give away."""

_START = """
# The machines meet at the first one. Two jobs that share it have different ports.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${{hosts[0]}}" MASTER_PORT="$(({first_port} + SLURM_JOB_ID % {ports}))"
"""

_RUN = """
# The warning before the time limit comes to this shell alone. srun passes it on to the launcher of each machine, and
# the run saves and stops.
warned='' interrupted='' step=''
{note_saved}trap 'warned=yes interrupted=yes; [[ -z $step ]] || kill -USR1 "$step" || true' USR1
{srun} &
step=$!
while true; do
  interrupted='' code=0
  wait "$step" || code=$?
  [[ -n $interrupted ]] || break # or the warning has ended `wait`, and the run is still saving
done
"""

_NOTE_SAVED = """saved() {{ echo {}/step_*; }}
saved_before=$(saved)
"""

_REQUEUE = """
# Not after scancel or an error: only a run whose time was up goes on, and only if it gets further each time.
if [[ -n $warned && $code -ne 0 ]]; then
  if [[ $(saved) == "$saved_before" ]]; then
    echo "shoal: stopped by the time limit before anything was saved; job $SLURM_JOB_ID ends: give it more time"
  else
    echo "shoal: stopped before the time limit; job $SLURM_JOB_ID goes back into the queue and resumes"
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
"""

_NO_REQUEUE = """
if [[ -n $warned && $code -ne 0 ]]; then
  echo "shoal: stopped before the time limit; submit the job again to resume"
fi
"""


def submit(run: Run, launch: Launch, dry_run: bool) -> int:
    """Submits the run with sbatch, or only prints the file; returns the exit code for the user's shell.

    Without sbatch the file is written, and UserError says where it is.
    """
    text = render(run, launch.command)
    check_layout_of(run)
    if dry_run:
        print(text, end="")
        return 0
    path = log_folder(run) / "job.sbatch"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise UserError(
            f"experiment.output_dir = {run.config.output_dir!r} cannot be written: {error.strerror}"
        ) from None
    shown = printable(shlex.quote(str(path)))
    if shutil.which("sbatch") is None:
        raise UserError(
            f"launch.target = slurm: sbatch is not installed here; the job is in {shown}: submit it with "
            f"`sbatch {shown}` on a machine of the cluster"
        )
    result = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise UserError(f"launch.target = slurm: sbatch refused {shown}: {one_line(result.stderr or result.stdout)}")
    job = result.stdout.strip().partition(";")[0]  # a federation adds `;<name of the cluster>`
    print(f"submitted job {job}")
    print("its output  ", f"tail -F {printable(shlex.quote(str(path.with_name(f'{job}-node0.log'))))}")
    print("its state   ", f"squeue --job {job}")
    print("stop it     ", f"scancel {job}", flush=True)
    return 0


def log_folder(run: Run) -> Path:
    """Returns the folder with the job file and the logs of each machine."""
    return Path(run.config.output_dir).absolute() / "slurm"


def render(run: Run, arguments: Sequence[str]) -> str:
    """Returns the sbatch file of a run that is started by `shoal <arguments>` on each machine."""
    slurm, launch = run.config.launch.slurm, run.config.launch
    srun = " \\\n  ".join(_srun(run, arguments))
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(run))]
    if any(sign in text for text in (srun, *launch.env.values()) for sign in "$`"):
        lines.append("# shellcheck disable=SC2016 # texts of the config are meant as they are")
    lines.append("set -e")
    lines += [f"module load {shlex.quote(name)}" for name in slurm.modules]
    lines += slurm.setup
    lines += ["set -uo pipefail"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in launch.env.items()]
    text = "\n".join(lines) + "\n"
    text += _START.format(first_port=FIRST_PORT, ports=PORTS)
    note_saved = _NOTE_SAVED.format(shlex.quote(f"{log_folder(run).parent}/checkpoints")) if slurm.requeue else ""
    text += _RUN.format(note_saved=note_saved, srun=srun)
    return f'{text}{_REQUEUE if slurm.requeue else _NO_REQUEUE}exit "$code"\n'


def _options(run: Run) -> Iterator[str]:
    """Yields the options of the job, each as a line of the file."""
    slurm = run.config.launch.slurm
    gpus: float | None = None
    if slurm.gres is None:
        processes = run.config.launch.procs_per_node
        gpus = count_gpus(run, "launch.slurm.gpus_per_node", slurm.gpus_per_node, processes)
    options = {
        "job-name": slurm.job_name or run.config.experiment.name,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "nodes": number_of_nodes(run),
        "ntasks-per-node": 1,
        "gpus-per-node": gpus or None,
        "gres": slurm.gres,
        "cpus-per-task": slurm.cpus_per_task,
        "constraint": slurm.constraint,
        "time": slurm.time,
        "chdir": Path.cwd(),
        # The folder has to exist when the job starts.
        "output": f"{_escaped(log_folder(run))}/%j.log",
        "open-mode": "append",
        "signal": f"B:USR1@{slurm.warning_seconds}",
    }
    for name, value in options.items():
        if value is not None:
            yield f"--{name}={shlex.quote(str(value))}"
    yield "--requeue" if slurm.requeue else "--no-requeue"
    yield from slurm.options


def _srun(run: Run, arguments: Sequence[str]) -> Iterator[str]:
    """Yields the command that starts one task on each machine, in parts for one line each."""
    slurm = run.config.launch.slurm
    # srun does not take over the job's --cpus-per-task.
    cpus = f" --cpus-per-task={slurm.cpus_per_task}" if slurm.cpus_per_task else ""
    yield f"srun --nodes={number_of_nodes(run)} --ntasks-per-node=1{cpus}"
    yield f"--output={shlex.quote(f'{_escaped(log_folder(run))}/%j-node%n.log')} --open-mode=append"
    if slurm.container_image is not None:
        yield f"--container-image={shlex.quote(slurm.container_image)}"
        folders = Path.cwd(), Path(run.config.output_dir).absolute()
        mounts = [*dict.fromkeys(f"{folder}:{folder}" for folder in folders), *slurm.container_mounts]
        yield f"--container-mounts={shlex.quote(','.join(mounts))} --container-workdir={shlex.quote(str(Path.cwd()))}"
    python = slurm.python or ("python3" if slurm.container_image else sys.executable)
    yield shlex.join([python, "-m", "shoal", *arguments])


def _escaped(path: Path) -> str:
    """Returns a path in which SLURM replaces nothing."""
    return str(path).replace("%", "%%")
