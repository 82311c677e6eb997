#!/usr/bin/env bash
# Trains a config as a SLURM job: one task on each machine, which starts the processes of that machine. The task finds
# the others by itself. `shoal launch CONFIG --on slurm` makes a job file that also goes back into the queue before its
# time limit, and has a log for each machine.
#
#   sbatch --nodes=2 --gpus-per-node=8 scripts/slurm_job.sh run.yaml launch.procs_per_node=8
#
# PYTHON is the interpreter that has shoal (python3). The folder of the config and the run folder have to be shared.
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
# srun's tasks are warned before the time limit: the run saves and stops.
#SBATCH --signal=USR1@120
set -euo pipefail

if (($# == 0)); then
  echo "usage: sbatch [--nodes=N …] scripts/slurm_job.sh CONFIG [KEY=VALUE …]" >&2
  exit 2
fi

# srun does not take over the job's --cpus-per-task.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi
exec srun --ntasks-per-node=1 "${PYTHON:-python3}" -m shoal train "$@"
