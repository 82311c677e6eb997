#!/usr/bin/env bash
# Trains examples/bdh/train.py by DDP, with the same global batch however many processes there are.
#
#   scripts/train_distributed.sh                              one machine, all its GPUs (or two processes without)
#   scripts/train_distributed.sh --max_iters 200 --resume     any flag of the example can follow
#   GLOBAL_BATCH_SIZE=64 BATCH_SIZE=8 scripts/train_distributed.sh      accumulation makes up for missing GPUs
#
#   on machine 0:  NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 scripts/train_distributed.sh
#   on machine 1:  NUM_NODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 scripts/train_distributed.sh
#
# scripts/launch.sh says what NUM_NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, PROCS_PER_NODE and PYTHON are. The folder
# of checkpoints has to be shared by all machines.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

PROCS_PER_NODE=${PROCS_PER_NODE:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)}
if ((PROCS_PER_NODE == 0)); then PROCS_PER_NODE=2; fi
export PROCS_PER_NODE
BATCH_SIZE=${BATCH_SIZE:-8}
processes=$((${NUM_NODES:-1} * PROCS_PER_NODE))
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-$((BATCH_SIZE * processes))}

# global batch = batch size × accumulation × processes
accumulation=$((GLOBAL_BATCH_SIZE / (BATCH_SIZE * processes)))
if ((accumulation * BATCH_SIZE * processes != GLOBAL_BATCH_SIZE)); then
  echo "GLOBAL_BATCH_SIZE=$GLOBAL_BATCH_SIZE is not a multiple of BATCH_SIZE=$BATCH_SIZE × $processes processes" >&2
  exit 2
fi
exec "$here/launch.sh" "$here/../examples/bdh/train.py" --use_ddp \
  --batch_size "$BATCH_SIZE" --gradient_accumulation_steps "$accumulation" "$@"
