#!/usr/bin/env bash
# Fine-tunes Llama-2-7b by QLoRA under FSDP on the GPUs of this machine, as configs/fsdp_qlora_llama7b.yaml says.
#
#   scripts/launch_fsdp_qlora.sh                                       a process per GPU
#   scripts/launch_fsdp_qlora.sh training.max_steps=50                 words after it are overrides
#   CONFIG=my.yaml PROCS_PER_NODE=2 scripts/launch_fsdp_qlora.sh       another config, two processes
#
# The GPUs, or PROCS_PER_NODE, have to be as many as the config says. scripts/launch.sh says what NUM_NODES, NODE_RANK,
# MASTER_ADDR, MASTER_PORT and PYTHON are.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "$here/launch.sh" -m shoal.recipes.text_lora --config "${CONFIG:-$here/../configs/fsdp_qlora_llama7b.yaml}" "$@"
