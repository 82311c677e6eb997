"""Compares two DDP processes with two independent processes on the cores of this machine.

    python benchmarks/ddp_scaling.py [--steps 40] [--rounds 3]

Both pairs train the same BDH on the same text, one thread per process. The independent processes exchange nothing; the
DDP processes sum their gradients in every step. The pairs take turns, and the fastest of the rounds counts, because
other work on the machine can only make a round slower.
"""

from __future__ import annotations

import argparse
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")

from shoal.config import check_run
from shoal.launch.spawn import run_function
from shoal.processes.detect import detect
from shoal.processes.world import World
from shoal.training import train

PROCS = 2


def tokens_per_second(folder: str, together: bool, steps: int) -> float:
    """Trains in this process, as one rank of DDP or independently, and returns the speed."""
    world = detect()
    run = {
        "recipe": "bdh",
        "experiment": {"output_dir": f"{folder}/{'ddp' if together else f'alone_{world.rank}'}"},
        "model": {"n_layer": 4, "n_embd": 96, "mlp_internal_dim_multiplier": 32, "dropout": 0.0},
        "dataset": {"name": "stdlib", "seq_length": 128},
        "training": {"max_steps": steps, "batch_size": 8, "device": "cpu", "eval_batches": 1},
        "logging": {"every": steps, "console": "off", "tensorboard": False},
        "checkpoint": {"every": None},
    }
    outcome = train(check_run(run), world if together else World())
    return outcome.metrics["train/tokens_per_second"]  # since the first step, which is logged too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    alone, together = [], []
    for _ in range(options.rounds):
        for is_ddp, speeds in ((False, alone), (True, together)):
            with tempfile.TemporaryDirectory() as folder:
                by_rank = run_function(tokens_per_second, (folder, is_ddp, options.steps), PROCS, "spawn")
            speeds.append(by_rank[0] if is_ddp else sum(by_rank))  # under DDP every rank counts the whole batch
    print(f"two independent processes  {max(alone):8.0f} tokens/s in all")
    print(f"two under DDP              {max(together):8.0f} tokens/s in all, {max(together) / max(alone):.2f} of that")


if __name__ == "__main__":
    main()
