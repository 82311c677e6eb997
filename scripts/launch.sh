#!/usr/bin/env bash
# Starts a training script in several processes, on one machine or on many.
#
#   scripts/launch.sh train.py --use_ddp                      one machine: a process per GPU, or two without GPUs
#   PROCS_PER_NODE=4 scripts/launch.sh train.py --use_ddp     one machine, four processes
#
#   on machine 0:  NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 scripts/launch.sh train.py --use_ddp
#   on machine 1:  NUM_NODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 scripts/launch.sh train.py --use_ddp
#
# MASTER_ADDR is an address of machine 0 that the others can reach, MASTER_PORT (29500) a free port there.
# PYTHON is the interpreter to use (python3).
set -euo pipefail

if (($# == 0)); then
  echo "usage: scripts/launch.sh SCRIPT [ARGUMENTS...]" >&2
  exit 2
fi

PYTHON=${PYTHON:-python3}
NUM_NODES=${NUM_NODES:-1}
PROCS_PER_NODE=${PROCS_PER_NODE:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)}
if ((PROCS_PER_NODE == 0)); then PROCS_PER_NODE=2; fi
# Each process would otherwise start a thread per core, and they would fight over the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if ((NUM_NODES == 1)); then
  # A free port of this machine alone.
  place=(--standalone)
else
  # Without these every machine would train for itself, or wait for ever.
  : "${MASTER_ADDR:?set it to an address of machine 0}" "${NODE_RANK:?set it to the number of this machine, from 0}"
  place=(--nnodes="$NUM_NODES" --node_rank="$NODE_RANK" --master_addr="$MASTER_ADDR" --master_port="${MASTER_PORT:-29500}")
fi
exec "$PYTHON" -m torch.distributed.run "${place[@]}" --nproc_per_node="$PROCS_PER_NODE" "$@"
