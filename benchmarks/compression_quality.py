"""Trains the demo with every method of compression, and compares the evaluation loss at the end with plain ddp's.

    python benchmarks/compression_quality.py [--steps 600] [--seeds 3] [--at-once 1] [--device cpu] [--out quality.json]

Every run has two processes, over gloo, with one thread each; with `--device cuda` they share a GPU. `--at-once` runs
several of them side by side: the losses do not depend on it. The table goes to docs/slow_networks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from shoal.config.shipped import shipped_config

ROWS = {
    "plain": {},
    "fp16": {"compression.method": "fp16"},
    "bf16": {"compression.method": "bf16"},
    "int8": {"compression.method": "int8"},
    "int8, no feedback": {"compression.method": "int8", "compression.error_feedback": "false"},
    "powersgd rank 4": {"compression.method": "powersgd", "compression.rank": 4},
    "powersgd rank 8": {"compression.method": "powersgd", "compression.rank": 8},
    "powersgd rank 8, no feedback": {
        "compression.method": "powersgd",
        "compression.rank": 8,
        "compression.error_feedback": "false",
    },
    "topk 1%": {"compression.method": "topk", "compression.ratio": 0.01},
    "topk 10%": {"compression.method": "topk", "compression.ratio": 0.1},
    "topk 20%": {"compression.method": "topk", "compression.ratio": 0.2},
    "topk 1%, no feedback": {
        "compression.method": "topk",
        "compression.ratio": 0.01,
        "compression.error_feedback": "false",
    },
    "local_sgd 16": {"local_sgd.sync_every": 16},
    "local_sgd 16, plain average": {
        "local_sgd.sync_every": 16,
        "local_sgd.outer_lr": 1.0,
        "local_sgd.outer_momentum": 0.0,
    },
}


def final_loss(row: str, seed: int, steps: int, device: str) -> float:
    """Trains the demo in two processes, and returns the evaluation loss at its end."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "experiment.output_dir": folder,
            "experiment.seed": seed,
            "training.max_steps": steps,
            "training.eval_steps": "null",
            "training.device": device,
            "distributed.backend": "gloo",  # two processes may share a GPU
            "checkpoint.every": "null",
            "logging.console": "off",
            "logging.tensorboard": "false",
            "logging.every": steps,
            "launch.procs_per_node": 2,
            "launch.max_restarts": 0,
            **{f"distributed.{key}": value for key, value in ROWS[row].items()},
        }
        command = [sys.executable, "-m", "shoal", "train", str(shipped_config("demo"))]
        command += [f"{key}={value}" for key, value in keys.items()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{row}, seed {seed}: {done.stderr[-2000:]}")
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        return next(line["eval/loss"] for line in reversed(lines) if "eval/loss" in line)


def table(losses: dict[str, list[float]]) -> str:
    """Returns the losses as Markdown; differences are of the means over those seeds that both have."""
    seeds = max(map(len, losses.values()))
    rows = [
        f"| method | {' | '.join(f'seed {seed}' for seed in range(seeds))} | to plain |",
        f"|{' --- |' * (seeds + 2)}",
    ]
    plain = losses["plain"]
    for row, values in losses.items():
        change = mean(values) / mean(plain[: len(values)]) - 1 if values else float("nan")
        shown = " | ".join(f"{value:.4f}" for value in values)
        rows.append(f"| {row} | {shown} | {'' if row == 'plain' else f'{change:+.1%}'} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--out", type=Path, help="write the losses as JSON, after every run")
    options = parser.parse_args()
    losses: dict[str, list[float]] = {row: [] for row in options.rows}
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = {
            (row, seed): pool.submit(final_loss, row, seed, options.steps, options.device)
            for seed in range(options.seeds)
            for row in options.rows
        }
        for (row, seed), run in runs.items():
            losses[row].append(run.result())
            print(f"{row}, seed {seed}: {losses[row][-1]:.4f}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(losses, indent=1))
    print(table(losses))


if __name__ == "__main__":
    main()
