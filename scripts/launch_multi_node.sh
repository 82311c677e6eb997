#!/usr/bin/env bash
# Trains a run on several machines without a scheduler: run this on every machine, each with its own NODE_RANK.
#
#   on machine 0:  NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 scripts/launch_multi_node.sh run.yaml
#   on machine 1:  NUM_NODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 scripts/launch_multi_node.sh run.yaml
#
# NUM_NODES may be MIN:MAX, such as 1:2, for a run that goes on when machines leave. MASTER_ADDR is an address of
# machine 0 that the others can reach, MASTER_PORT (29500) a free port there. PROCS_PER_NODE is the number of processes
# on each machine (one per GPU, or two without GPUs), PYTHON the interpreter to use (python3). The run folder has to be
# on storage that all machines share. Words after the config are overrides, such as training.max_steps=50.
set -euo pipefail

if (($# == 0)); then
  echo "usage: scripts/launch_multi_node.sh CONFIG [KEY=VALUE...]" >&2
  exit 2
fi
# Without these every machine would train for itself.
: "${NUM_NODES:?set it to the number of machines}" "${NODE_RANK:?set it to the number of this machine, from 0}"
: "${MASTER_ADDR:?set it to an address of machine 0}"

PROCS_PER_NODE=${PROCS_PER_NODE:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)}
if ((PROCS_PER_NODE == 0)); then PROCS_PER_NODE=2; fi
exec "${PYTHON:-python3}" -m shoal launch "$@" --on local --nodes "$NUM_NODES" --procs-per-node "$PROCS_PER_NODE" \
  --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"
