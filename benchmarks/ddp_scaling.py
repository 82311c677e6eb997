"""Measures the speed of two DDP processes, compared with two independent processes, on the cores of this machine.

    python benchmarks/ddp_scaling.py [--steps 40] [--rounds 3]

Both train the same BDH on the same text, with one thread per process. The independent processes exchange nothing; under
DDP they sum their gradients after every step. The two kinds take turns, and the best round counts, because other load
on the machine can only make a run slower.
"""

from __future__ import annotations

import argparse
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")

from shoal.config import check_run
from shoal.launch.spawn import run_function
from shoal.training import train

PROCS = 2


def tokens_per_second(folder: str, together: bool, steps: int) -> float:
    """Trains in this process, as one of several ranks (`together`) or alone, and returns its speed."""
    rank = os.environ["RANK"]
    if not together:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    run = {
        "recipe": "bdh",
        "experiment": {"output_dir": f"{folder}/{'ddp' if together else f'alone_{rank}'}"},
        "model": {"n_layer": 4, "n_embd": 96, "mlp_internal_dim_multiplier": 32, "dropout": 0.0},
        "dataset": {"name": "stdlib", "seq_length": 128},
        "training": {"max_steps": steps, "batch_size": 8, "device": "cpu", "eval_batches": 1},
        "logging": {"every": steps, "console": "off", "tensorboard": False},
        "checkpoint": {"every": None},
    }
    # The speed is counted from the end of the first step, because the first step is logged too.
    return train(check_run(run)).metrics["train/tokens_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    alone, together = [], []
    for _ in range(options.rounds):
        for kind, speeds in ((False, alone), (True, together)):
            with tempfile.TemporaryDirectory() as folder:
                ranks = run_function(tokens_per_second, (folder, kind, options.steps), PROCS, "spawn")
            speeds.append(ranks[0] if kind else sum(ranks))  # under DDP every rank counts the whole batch
    print(f"two independent processes  {max(alone):8.0f} tokens/s in total")
    print(
        f"two under DDP              {max(together):8.0f} tokens/s in total, {max(together) / max(alone):.2f} of that"
    )


if __name__ == "__main__":
    main()
