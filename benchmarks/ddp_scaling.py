"""Compares two DDP processes with one process, and with two that exchange nothing, on the cores of this machine.

    python benchmarks/ddp_scaling.py [--steps 60] [--rounds 5]

Every process is pinned to a core of its own and computes with one thread. All train the same chain of layers on as many
rows per process; the DDP processes sum their gradients in every step, in buckets that are sent during the backward. The
three take turns, so that other work on the machine slows all of them, and the medians of the rounds are printed. What
two independent processes reach is the most that two under DDP could.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor, nn

from shoal.config import Run
from shoal.config.schema import Config
from shoal.launch.spawn import run_function
from shoal.processes.detect import detect
from shoal.processes.world import World
from shoal.recipes import Recipe
from shoal.training import train

WIDTH, LAYERS, ROWS, BATCH = 512, 8, 128, 8
SAMPLES = 256
KINDS = {"one process": (1, False), "two independent processes": (2, False), "two under DDP": (2, True)}
"""By name: the number of processes, and whether they train one model together."""


class Samples:
    """Each sample is as many rows as a short text has tokens."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, ROWS, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index]}


class Chain(Recipe):
    """Layers with weights of their own, each of which has its gradient before the backward of the layers below."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)])

    def train_data(self) -> Samples:
        return Samples()

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {"input": batch["x"]}

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return (output - batch["x"]).square().mean((1, 2)).sum()


def pin(core: int) -> None:
    """Lets this process, all of its threads and those that they will start run on one core only."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def samples_per_second(folder: str, cores: list[int], together: bool, steps: int) -> float:
    """Trains in this process, as one rank of DDP or independently, and returns the speed."""
    world = detect()
    pin(cores[world.rank])
    assert torch.get_num_threads() == 1
    config = {
        "recipe": "ddp_scaling:Chain",
        "experiment": {"output_dir": f"{folder}/{'ddp' if together else f'alone_{world.rank}'}"},
        "training": {"max_steps": steps, "batch_size": BATCH, "device": "cpu"},
        # Of 8 MiB of gradients in all, so that several buckets are on their way while others are computed.
        "distributed": {"strategy": "ddp", "ddp": {"bucket_cap_mb": 2}} if together else {},
        "logging": {"every": steps, "console": "off", "tensorboard": False},
        "checkpoint": {"every": None},
    }
    run = Run(Config.model_validate(config), Chain, Chain.Config(), sources={})
    outcome = train(run, world if together else World())
    return outcome.metrics["train/samples_per_second"]  # since the first step, which is logged too


def measure(kind: str, cores: list[int], steps: int) -> float:
    """Returns the samples per second of all processes of a kind together."""
    processes, together = KINDS[kind]
    with tempfile.TemporaryDirectory() as folder:
        speeds = run_function(samples_per_second, (folder, cores, together, steps), processes, "spawn")
    return speeds[0] if together else sum(speeds)  # under DDP every rank counts the whole batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error(f"this process may run on {len(cores)} core; two processes need one each")
    load = os.getloadavg()[0]
    rounds = [{kind: measure(kind, cores, options.steps) for kind in KINDS} for _ in range(options.rounds)]
    for kind in KINDS:
        speed = statistics.median(one[kind] for one in rounds)
        ratio = statistics.median(one[kind] / one["one process"] for one in rounds)
        print(f"{kind:26}{speed:8.1f} samples/s in all, {ratio:.2f} times one process")
    print(
        f"medians of {options.rounds} rounds; load {load:.1f} before, {os.getloadavg()[0]:.1f} after; cores {cores[:2]}"
    )


if __name__ == "__main__":
    main()
