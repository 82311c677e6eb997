#!/usr/bin/env bash
# Trains a config as a SLURM job, for those who write their own sbatch line. `shoal launch CONFIG --on slurm` makes a
# complete job file with a warning before the time limit, requeue and a log for each machine.
#
#   sbatch --nodes=2 --gpus-per-node=8 scripts/slurm_job.sh run.yaml launch.procs_per_node=8
#
# PYTHON is the interpreter that has shoal (python3). The folder of the config and the run folder have to be shared.
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
# The warning before the time limit goes to the launcher on each machine, which saves and stops.
#SBATCH --signal=USR1@120
set -euo pipefail

if (($# == 0)); then
  echo "usage: sbatch [--nodes=N …] scripts/slurm_job.sh CONFIG [KEY=VALUE …]" >&2
  exit 2
fi

# The machines meet at the first one. Two jobs that share it have different ports.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${hosts[0]}" MASTER_PORT="$((10000 + SLURM_JOB_ID % 20000))"
# srun does not take over the job's --cpus-per-task.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi

# shellcheck disable=SC2016 # each task, and not this shell, says which machine it is on
exec srun --ntasks-per-node=1 bash -c 'NODE_RANK=$SLURM_NODEID exec "$@"' task \
  "${PYTHON:-python3}" -m shoal train "$@" "launch.nodes=$SLURM_JOB_NUM_NODES"
