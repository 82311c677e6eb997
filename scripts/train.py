#!/usr/bin/env python3
"""Trains a config, as `shoal train` does.

python scripts/train.py run.yaml                                          one process, or as many as the config says
python scripts/train.py --config run.yaml training.max_steps=50           words after the config are overrides
python scripts/train.py --config run.yaml --deepspeed zero3.json          by DeepSpeed, as the JSON says
torchrun --nproc_per_node=4 scripts/train.py --config run.yaml            in the processes that torchrun starts
deepspeed --num_gpus=4 scripts/train.py --config run.yaml                 in those that DeepSpeed starts
"""

from shoal.cli.recipe import main

if __name__ == "__main__":
    main()
